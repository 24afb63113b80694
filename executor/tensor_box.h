// From the plan's virtual offsets to places in physical tensors.
#ifndef REFIT_EXECUTOR_TENSOR_BOX_H_
#define REFIT_EXECUTOR_TENSOR_BOX_H_

#include <cstdint>

#include "absl/container/inlined_vector.h"

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

  uint64_t elements() const;
};

// The box that starts at virtual `offset` of a stack whose tensors have
// `tensor_elements` (not 0) elements, without loops yet.
TensorBox TensorBoxAt(uint64_t offset, uint64_t tensor_elements);

// Adds an inner loop; `stride` is in virtual elements. PlanFile has checked
// that no loop runs across two tensors except in whole steps.
void AddLoop(uint64_t extent, uint64_t stride, uint64_t tensor_elements,
             TensorBox& box);

// Calls `visit(tensor)` for each tensor of the stack that holds a part of
// `box`; more than once if several dimensions of the box lead to the same
// tensor.
template <typename Visitor>
void ForEachTensor(const TensorBox& box, Visitor visit) {
  absl::InlinedVector<BoxLoop, 6> loops;
  for (const BoxLoop& loop : box.loops) {
    if (loop.extent == 0) return;
    if (loop.tensor_step > 0) loops.push_back(loop);
  }
  absl::InlinedVector<uint64_t, 6> counts(loops.size(), 0);
  uint64_t tensor = box.first_tensor;
  while (true) {
    visit(tensor);
    size_t d = loops.size();
    while (d > 0 && ++counts[d - 1] == loops[d - 1].extent) {
      tensor -= loops[d - 1].tensor_step * (loops[d - 1].extent - 1);
      counts[d - 1] = 0;
      --d;
    }
    if (d == 0) return;
    tensor += loops[d - 1].tensor_step;
  }
}

}  // namespace refit

#endif  // REFIT_EXECUTOR_TENSOR_BOX_H_
