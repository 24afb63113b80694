#include "compiler/layout/megatron_specs.h"

#include <algorithm>

namespace refit::megatron {

TensorSpec FusedQkv(const LayerGroup& group, const Architecture& architecture,
                    Range rows) {
  const int64_t head = architecture.head_dim;
  const int64_t query_rows = architecture.heads / architecture.kv_heads * head;
  const int64_t group_rows = query_rows + 2 * head;

  TensorSpec spec;
  spec.shape = group.params[0]->shape;
  spec.shape[0] = rows.size();
  for (int64_t g = rows.begin / group_rows; g * group_rows < rows.end; ++g) {
    struct Block {
      const Param* param;
      int64_t size;
    };
    int64_t fused_row = g * group_rows;
    for (const Block& block :
         {Block{group.params[0], query_rows}, Block{group.params[1], head},
          Block{group.params[2], head}}) {
      const int64_t begin = std::max(rows.begin, fused_row);
      const int64_t end = std::min(rows.end, fused_row + block.size);
      if (begin < end) {
        const int64_t param_row = g * block.size + begin - fused_row;
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
  const Range gate = EvenShare(group.params[0]->shape[0], count, index);
  const Range up = EvenShare(group.params[1]->shape[0], count, index);
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
  const Param& param = *group.params[0];
  const Range rows = EvenShare(param.shape[0], count, index);
  return {.name = {},
          .shape = {rows.size(), param.shape[1]},
          .parts = {RowsPart(param, rows, 0)}};
}

TensorSpec ColumnShard(const LayerGroup& group, int64_t count, int64_t index) {
  const Param& param = *group.params[0];
  const Range columns = EvenShare(param.shape[1], count, index);
  return {.name = {},
          .shape = {param.shape[0], columns.size()},
          .parts = {ColumnsPart(param, columns)}};
}

TensorSpec Replicated(const LayerGroup& group) {
  return {.name = {},
          .shape = group.params[0]->shape,
          .parts = {WholePart(*group.params[0])}};
}

}  // namespace refit::megatron
