// Boxes of integer coordinates: half-open ranges per dimension.
#ifndef REFIT_COMPILER_IR_BOX_H_
#define REFIT_COMPILER_IR_BOX_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"

namespace refit {

// One coordinate, extent or stride per dimension. Six hold layer, expert and
// a four-dimensional tensor without allocating.
using Dims = absl::InlinedVector<int64_t, 6>;

// The product; 1 for no dimensions.
int64_t Product(absl::Span<const int64_t> dims);

// Row-major strides of a dense tensor of this shape.
Dims RowMajorStrides(absl::Span<const int64_t> shape);

struct Box {
  Dims lo;
  Dims hi;  // exclusive

  int64_t extent(size_t dim) const { return hi[dim] - lo[dim]; }
  int64_t Volume() const;
  bool Empty() const;

  friend bool operator==(const Box&, const Box&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const Box& box) {
    return H::combine(std::move(h), box.lo, box.hi);
  }
};

// [0, extent) in every dimension.
Box WholeBox(absl::Span<const int64_t> extents);

// Empty when they share no element.
std::optional<Box> Intersect(const Box& a, const Box& b);
bool Contains(const Box& outer, const Box& inner);

// `box` minus `hole` as disjoint boxes, in lexicographic order of `lo`.
std::vector<Box> Subtract(const Box& box, const Box& hole);

// "[0:768, 0:4096]"
std::string BoxText(const Box& box);

}  // namespace refit

#endif  // REFIT_COMPILER_IR_BOX_H_
