// Strided boxes of a buffer: the elements that a copy or a fragment names.
#ifndef REFIT_PLAN_TEXT_STRIDED_BOX_H_
#define REFIT_PLAN_TEXT_STRIDED_BOX_H_

#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "plan_generated.h"

namespace refit {

// The elements `offset + i0 * stride0 + i1 * stride1 + …`, every i below its
// extent.
struct StridedBox {
  struct Dim {
    uint64_t extent = 0;  // at least 2
    uint64_t stride = 0;
  };

  uint64_t offset = 0;
  absl::InlinedVector<Dim, 6>
      dims;  // by falling stride, none that could be merged

  // Adds a dimension; one of extent 1 adds nothing.
  void Add(uint64_t extent, uint64_t stride);
  // Sorts and merges the dimensions. Call after the last `Add`.
  void Normalize();
};

StridedBox BoxOf(const fb::Body& body, const fb::Copy& copy);

// Whether two normalized boxes share an element. Cost is far below their
// number of elements, and constant when their strides are equal.
bool Meet(const StridedBox& a, const StridedBox& b);

}  // namespace refit

#endif  // REFIT_PLAN_TEXT_STRIDED_BOX_H_
