// What Megatron's linear layers hold of a layer's params on one rank. Specs
// have no name yet: Megatron's are its modules' own, not the checkpoint's.
#ifndef REFIT_COMPILER_LAYOUT_MEGATRON_SPECS_H_
#define REFIT_COMPILER_LAYOUT_MEGATRON_SPECS_H_

#include <cstdint>

#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/model/model.h"

namespace refit::megatron {

// Rows of the fused query, key and value of all heads.
int64_t FusedQkvRows(const Architecture& architecture);

// Rows [rows) of a group's fused query, key and value (or of their biases). The
// rows of query group g are [its query heads; their output gates, if there are
// any; its key head; its value head]. Tensor parallelism cuts the rows evenly,
// if need be through a group.
TensorSpec FusedQkv(const LayerGroup& group, const Architecture& architecture,
                    Range rows);

// Shard `index` of `count` of a group's gate rows, then as many up rows.
TensorSpec GateAndUp(const LayerGroup& group, int64_t count, int64_t index);

// The same in blocks of `interleave` rows that alternate: gate, up, gate, up …
TensorSpec InterleavedGateAndUp(const LayerGroup& group, int64_t count,
                                int64_t index, int64_t interleave);

// Shard `index` of `count` of the rows or columns of a group's one param.
TensorSpec RowShard(const LayerGroup& group, int64_t count, int64_t index);
TensorSpec ColumnShard(const LayerGroup& group, int64_t count, int64_t index);

// A group's one param, whole.
TensorSpec Replicated(const LayerGroup& group);

// A group's second param, whole, in the layers that have the first.
TensorSpec ReplicatedSecond(const LayerGroup& group);

}  // namespace refit::megatron

#endif  // REFIT_COMPILER_LAYOUT_MEGATRON_SPECS_H_
