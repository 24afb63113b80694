// What copies have of a quantize operation, as boxes of its dimensions.
#ifndef REFIT_PLAN_SCHEDULE_OPERATION_BOX_H_
#define REFIT_PLAN_SCHEDULE_OPERATION_BOX_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "plan/schedule/copy_batch.h"

namespace refit {

CopyStride Times(const CopyStride& stride, uint64_t times);
void MoveBy(CopyAddress& at, const CopyStride& stride, uint64_t times);

// One dimension of an operation's tensor: matrices, rows or columns.
struct Dimension {
  uint64_t extent = 1;
  uint64_t stride_bytes = 0;
};
using Dimensions = absl::InlinedVector<Dimension, 6>;

// Some coordinates of one dimension, in steps, and how far each moves the other
// side of the copy.
struct DimensionLoop {
  uint64_t step = 1;
  uint64_t extent = 1;
  CopyStride to;
};

// What a copy has of an operation's tensor, by its dimensions.
struct OperationBox {
  absl::InlinedVector<uint64_t, 6> start;
  absl::InlinedVector<std::vector<DimensionLoop>, 6> loops;  // steps descending
  CopyAddress to;  // where the other side of the copy begins
  uint32_t link = 0;

  uint64_t LastOf(size_t dim) const;
  uint64_t Elements() const;
};

// The matrices' dimensions, then rows, then columns.
template <typename StrideOf>
Dimensions DimensionsOf(absl::Span<const QuantizeLoop> loops, uint64_t rows,
                        uint64_t row_bytes, uint64_t columns,
                        uint64_t element_bytes, const StrideOf& stride_of) {
  Dimensions dims;
  for (const QuantizeLoop& loop : loops) {
    dims.push_back({loop.extent, stride_of(loop).bytes});
  }
  dims.push_back({rows, row_bytes});
  dims.push_back({columns, element_bytes});
  return dims;
}

// How far the last element's end is from the first.
uint64_t SpanBytes(const Dimensions& dims, uint64_t element_bytes);

// Whether a position says what its coordinates are: no dimension reaches into
// the next one of a longer stride. Tensors are left in no dimension.
bool IsNested(const Dimensions& dims, uint64_t element_bytes);

// None: the copy does not read a box of what stands at `first` in these
// dimensions.
std::optional<OperationBox> BoxIn(const Dimensions& dims,
                                  const CopyAddress& first,
                                  const StridedCopy& copy,
                                  absl::Span<const CopyLoop> loops);

// Whether the boxes have nothing in common, as one dimension alone can show.
bool AreDisjoint(const OperationBox& a, const OperationBox& b);

// Entries of which a copy's side has something, and the bytes of each.
CopyStride SpanOf(const CopyAddress& first, absl::Span<const CopyLoop> loops,
                  CopyStride CopyLoop::*side);

// Whether `span` from `at` on, the same bytes of each entry, meets the
// `span_bytes` at `first`.
bool Meets(const CopyAddress& at, const CopyStride& span,
           const CopyAddress& first, uint64_t span_bytes);

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_OPERATION_BOX_H_
