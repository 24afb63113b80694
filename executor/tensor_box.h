// From the plan's virtual offsets to places in physical tensors.
#ifndef REFIT_EXECUTOR_TENSOR_BOX_H_
#define REFIT_EXECUTOR_TENSOR_BOX_H_

#include <cstdint>
#include <functional>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"

namespace refit {

// A loop of a box steps either over tensors of a stack or inside one of them.
struct BoxLoop {
  uint64_t extent = 1;
  uint64_t tensor_step = 0;
  uint64_t element_step = 0;
};

// A strided box of a stack of tensors.
struct TensorBox {
  uint64_t first_tensor = 0;              // of the stack
  uint64_t first_element = 0;             // of that tensor
  absl::InlinedVector<BoxLoop, 6> loops;  // outermost first
};

// The box that starts at virtual `offset` of a stack whose tensors have
// `tensor_elements` (not 0) elements, without loops yet.
TensorBox TensorBoxAt(uint64_t offset, uint64_t tensor_elements);

// Adds an inner loop; `stride` is in virtual elements. PlanFile has checked
// that no loop runs across two tensors except in whole steps.
void AddLoop(uint64_t extent, uint64_t stride, uint64_t tensor_elements,
             TensorBox& box);

// Calls `visit` with boxes that hold the elements [begin, end) of `box`, as its
// loops visit them, in that order.
void ForEachPart(const TensorBox& box, uint64_t begin, uint64_t end,
                 const std::function<void(const TensorBox& part)>& visit);

// A loop of a fragment or region, in virtual elements. Unlike a copy's it may
// run on from one tensor of the stack into the next.
struct VirtualLoop {
  uint64_t extent = 1;
  uint64_t stride = 0;
};

// Calls `visit` for each tensor of the stack that holds an element of the box
// of `loops` at virtual `offset`; for some tensors more than once.
void ForEachTensor(uint64_t offset, absl::Span<const VirtualLoop> loops,
                   uint64_t tensor_elements,
                   const std::function<void(uint64_t)>& visit);

}  // namespace refit

#endif  // REFIT_EXECUTOR_TENSOR_BOX_H_
