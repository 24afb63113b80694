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

namespace {

// The part of `box` in the iterations of its loops from `depth` on that
// [begin, end) are; `part` stands at the first of them, with the loops before
// `depth` left out.
void VisitParts(const TensorBox& box, size_t depth, uint64_t begin,
                uint64_t end, const TensorBox& part,
                const std::function<void(const TensorBox&)>& visit) {
  if (begin == end) return;
  if (depth == box.loops.size()) return visit(part);
  uint64_t inner = 1;  // elements of one iteration
  for (size_t l = depth + 1; l < box.loops.size(); ++l) {
    inner *= box.loops[l].extent;
  }
  const BoxLoop& loop = box.loops[depth];
  const auto at = [&](uint64_t iteration) {
    TensorBox moved = part;
    moved.first_tensor += iteration * loop.tensor_step;
    moved.first_element += iteration * loop.element_step;
    return moved;
  };
  uint64_t first = begin / inner;
  const uint64_t last = end / inner;
  if (begin % inner != 0 || first == last) {
    const uint64_t limit = first == last ? end % inner : inner;
    VisitParts(box, depth + 1, begin % inner, limit, at(first), visit);
    if (first == last) return;
    ++first;
  }
  if (first < last) {
    TensorBox whole = at(first);
    whole.loops.push_back(loop);
    whole.loops.back().extent = last - first;
    whole.loops.insert(whole.loops.end(),
                       box.loops.begin() + static_cast<ptrdiff_t>(depth) + 1,
                       box.loops.end());
    visit(whole);
  }
  VisitParts(box, depth + 1, 0, end % inner, at(last), visit);
}

}  // namespace

void ForEachPart(const TensorBox& box, uint64_t begin, uint64_t end,
                 const std::function<void(const TensorBox&)>& visit) {
  const TensorBox start = {.first_tensor = box.first_tensor,
                           .first_element = box.first_element,
                           .loops = {}};
  VisitParts(box, 0, begin, end, start, visit);
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
