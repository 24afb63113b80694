// The loader's check of params and buffers: names, shapes, fragments, regions,
// post-hooks.
#ifndef REFIT_PLAN_STACK_CHECK_H_
#define REFIT_PLAN_STACK_CHECK_H_

#include <compare>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "plan/dtype.h"
#include "plan_generated.h"

namespace refit {

// What the checks of copies need of a buffer.
struct BufferSize {
  uint64_t tensor_elements = 0;
  uint64_t tensors = 0;
  DType dtype = DType::kUnspecified;

  uint64_t elements() const { return tensor_elements * tensors; }
  friend auto operator<=>(const BufferSize&, const BufferSize&) = default;
};

// Checks Body.params and Body.buffers, which must be present. Fills `sizes`
// by buffer.
absl::Status CheckStacks(const fb::Body& body, std::vector<BufferSize>& sizes);

}  // namespace refit

#endif  // REFIT_PLAN_STACK_CHECK_H_
