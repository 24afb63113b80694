#include "compiler/layout/megatron/specs.h"

#include <algorithm>
#include <vector>

namespace refit::megatron {
namespace {

// Rows of a param that stand together in a query group.
struct QkvBlock {
  const Param* param;
  int64_t row;
  int64_t size;
};

// Query group g: [its query heads; their output gates, if there are any; its
// key head; its value head].
std::vector<QkvBlock> QueryGroup(const LayerGroup& group,
                                 const Architecture& architecture, int64_t g) {
  const int64_t head = architecture.head_dim;
  const int64_t heads = architecture.heads / architecture.kv_heads;
  const Param* const query = group.params[0];
  std::vector<QkvBlock> blocks;
  if (architecture.output_gate) {
    for (const int64_t half : {0, 1}) {
      for (int64_t i = g * heads; i < (g + 1) * heads; ++i) {
        blocks.push_back({query, (2 * i + half) * head, head});
      }
    }
  } else {
    blocks.push_back({query, g * heads * head, heads * head});
  }
  blocks.push_back({group.params[1], g * head, head});
  blocks.push_back({group.params[2], g * head, head});
  return blocks;
}

}  // namespace

int64_t FusedQkvRows(const Architecture& architecture) {
  return architecture.heads * architecture.query_head_rows() +
         2 * architecture.kv_heads * architecture.head_dim;
}

TensorSpec FusedQkv(const LayerGroup& group, const Architecture& architecture,
                    Range rows) {
  const int64_t group_rows = FusedQkvRows(architecture) / architecture.kv_heads;
  TensorSpec spec;
  spec.shape = group.params[0]->shape;
  spec.shape[0] = rows.size();
  for (int64_t g = rows.begin / group_rows; g * group_rows < rows.end; ++g) {
    int64_t fused_row = g * group_rows;
    for (const QkvBlock& block : QueryGroup(group, architecture, g)) {
      const int64_t begin = std::max(rows.begin, fused_row);
      const int64_t end = std::min(rows.end, fused_row + block.size);
      if (begin < end) {
        const int64_t param_row = block.row + begin - fused_row;
        spec.parts.push_back(RowsPart(*block.param,
                                      {param_row, param_row + end - begin},
                                      begin - rows.begin));
      }
      fused_row += block.size;
    }
  }
  return spec;
}

TensorSpec InterleavedGateAndUp(const LayerGroup& group, int64_t count,
                                int64_t index, int64_t interleave) {
  const Range gate = EvenShard(group.params[0]->shape[0], count, index);
  const Range up = EvenShard(group.params[1]->shape[0], count, index);
  TensorSpec spec;
  spec.shape = {gate.size() + up.size(), group.params[0]->shape[1]};
  for (int64_t row = 0; row < gate.size(); row += interleave) {
    const auto block = [&](Range rows) -> Range {
      return {rows.begin + row, rows.begin + row + interleave};
    };
    spec.parts.push_back(RowsPart(*group.params[0], block(gate), 2 * row));
    spec.parts.push_back(
        RowsPart(*group.params[1], block(up), 2 * row + interleave));
  }
  return spec;
}

TensorSpec GateAndUp(const LayerGroup& group, int64_t count, int64_t index) {
  const int64_t rows = group.params[0]->shape[0] / count;
  return InterleavedGateAndUp(group, count, index, rows);
}

TensorSpec RowShard(const LayerGroup& group, int64_t count, int64_t index) {
  return RowsOf(*group.params[0], {count, index});
}

TensorSpec ColumnShard(const LayerGroup& group, int64_t count, int64_t index) {
  return ColumnsOf(*group.params[0], {count, index});
}

TensorSpec Replicated(const LayerGroup& group) {
  return WholeOf(*group.params[0]);
}

TensorSpec ReplicatedSecond(const LayerGroup& group) {
  return WholeOf(*group.params[1]);
}

}  // namespace refit::megatron
