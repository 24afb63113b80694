#include "executor/tensor_box.h"

#include <algorithm>
#include <vector>

namespace refit {

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

void ForEachTensor(uint64_t offset, absl::Span<const VirtualLoop> loops,
                   uint64_t tensor_elements,
                   const std::function<void(uint64_t)>& visit) {
  // Loops that together stay inside a tensor are only a span of elements; the
  // others are walked.
  std::vector<VirtualLoop> walked;
  for (const VirtualLoop& loop : loops) {
    if (loop.extent == 0) return;
    if (loop.extent > 1) walked.push_back(loop);
  }
  std::sort(walked.begin(), walked.end(),
            [](const VirtualLoop& a, const VirtualLoop& b) {
              return a.stride < b.stride;
            });
  uint64_t span = 0;
  size_t inside = 0;
  for (; inside < walked.size(); ++inside) {
    const VirtualLoop& loop = walked[inside];
    const uint64_t wider = span + (loop.extent - 1) * loop.stride;
    if (offset % tensor_elements + wider >= tensor_elements) break;
    span = wider;
  }
  walked.erase(walked.begin(), walked.begin() + inside);
  std::vector<uint64_t> counts(walked.size(), 0);
  while (true) {
    for (uint64_t tensor = offset / tensor_elements;
         tensor <= (offset + span) / tensor_elements; ++tensor) {
      visit(tensor);
    }
    size_t d = 0;
    while (d < walked.size() && ++counts[d] == walked[d].extent) {
      offset -= (walked[d].extent - 1) * walked[d].stride;
      counts[d] = 0;
      ++d;
    }
    if (d == walked.size()) return;
    offset += walked[d].stride;
  }
}

}  // namespace refit
