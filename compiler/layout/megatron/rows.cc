#include "compiler/layout/megatron/rows.h"

#include <algorithm>
#include <vector>

namespace refit::megatron {
namespace {

using enum ParamRole;

// Rows of a param that stand together in a query group.
struct QkvBlock {
  const Param* param;
  int64_t row;
  int64_t size;
};

// Query group g: [its query heads; their output gates, if there are any; its
// key head; its value head].
std::vector<QkvBlock> QueryGroup(absl::Span<const Param* const> params,
                                 const Architecture& architecture, int64_t g) {
  const int64_t head = architecture.head_dim;
  const int64_t heads = architecture.heads / architecture.kv_heads;
  const Param* const query = params[0];
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
  blocks.push_back({params[1], g * head, head});
  blocks.push_back({params[2], g * head, head});
  return blocks;
}

// Tensor parallelism cuts the rows of all query groups evenly, if need be
// through a group.
TensorSpec FusedQkv(absl::Span<const Param* const> params,
                    const Architecture& architecture, EvenPart part) {
  const int64_t all_rows = FusedQkvRows(architecture);
  const int64_t group_rows = all_rows / architecture.kv_heads;
  const Range rows = EvenShard(all_rows, part.count, part.index);
  TensorSpec spec;
  spec.shape = params[0]->shape;
  spec.shape[0] = rows.size();
  for (int64_t g = rows.begin / group_rows; g * group_rows < rows.end; ++g) {
    int64_t fused_row = g * group_rows;
    for (const QkvBlock& block : QueryGroup(params, architecture, g)) {
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

TensorSpec DeltaIn(absl::Span<const Param* const> params,
                   const Architecture& architecture, EvenPart part) {
  return DeltaInRows(params, *architecture.delta, part);
}

}  // namespace

absl::Span<const Row> Rows() {
  using enum Cut;
  static constexpr Row kRowsOfLayer[] = {
#include "compiler/layout/megatron/rows.inc"
  };
  return kRowsOfLayer;
}

bool IsOfExperts(const Row& row) {
  return row.name.starts_with("mlp.experts.");
}

int64_t FusedQkvRows(const Architecture& architecture) {
  return architecture.heads * architecture.query_head_rows() +
         2 * architecture.kv_heads * architecture.head_dim;
}

TensorSpec InterleavedGateAndUp(absl::Span<const Param* const> params,
                                EvenPart part, int64_t interleave) {
  const Range own = EvenShard(params[0]->shape[0], part.count, part.index);
  TensorSpec spec = {
      .name = {}, .shape = {0, params[0]->shape[1]}, .parts = {}};
  for (int64_t row = own.begin; row < own.end; row += interleave) {
    for (const Param* param : params) {
      AppendRows(*param, {row, row + interleave}, spec);
    }
  }
  return spec;
}

}  // namespace refit::megatron
