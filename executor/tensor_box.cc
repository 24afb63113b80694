#include "executor/tensor_box.h"

namespace refit {

uint64_t TensorBox::elements() const {
  uint64_t elements = 1;
  for (const BoxLoop& loop : loops) elements *= loop.extent;
  return elements;
}

TensorBox TensorBoxAt(uint64_t offset, uint64_t tensor_elements) {
  TensorBox box;
  box.first_tensor = offset / tensor_elements;
  box.first_element = offset % tensor_elements;
  return box;
}

void AddLoop(uint64_t extent, uint64_t stride, uint64_t tensor_elements,
             TensorBox& box) {
  if (extent == 1) return;
  if (stride >= tensor_elements && stride % tensor_elements == 0) {
    box.loops.push_back(
        {.extent = extent, .tensor_step = stride / tensor_elements});
  } else {
    box.loops.push_back({.extent = extent, .element_step = stride});
  }
}

}  // namespace refit
