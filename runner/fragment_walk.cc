#include "runner/fragment_walk.h"

#include <algorithm>

namespace refit {
namespace {

// `virtual_elements` as a place in, or a step over, tensors of a stack.
Place PlaceOf(uint64_t virtual_elements, uint64_t tensor_elements) {
  return {.tensor = virtual_elements / tensor_elements,
          .element = virtual_elements % tensor_elements};
}

bool Continues(const Place& outer, const Place& inner, uint64_t extent) {
  return outer.tensor == inner.tensor * extent &&
         outer.element == inner.element * extent;
}

void Advance(Place& place, const Place& step, uint64_t times) {
  place.tensor += step.tensor * times;
  place.element += step.element * times;
}

void Retreat(Place& place, const Place& step, uint64_t times) {
  place.tensor -= step.tensor * times;
  place.element -= step.element * times;
}

// Row-major strides of a param's virtual tensor.
std::vector<uint64_t> VirtualStrides(const fb::Param& param) {
  std::vector<uint64_t> extents;
  if (param.index() != nullptr) {
    for (const fb::IndexDim* dim : *param.index()) {
      extents.push_back(dim->count());
    }
  }
  if (param.shape() != nullptr) {
    extents.insert(extents.end(), param.shape()->begin(), param.shape()->end());
  }
  std::vector<uint64_t> strides(extents.size(), 1);
  for (size_t d = extents.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * extents[d];
  }
  return strides;
}

uint64_t TensorElements(const fb::Param& param) {
  uint64_t elements = 1;
  if (param.shape() != nullptr) {
    for (const uint64_t extent : *param.shape()) elements *= extent;
  }
  return elements;
}

}  // namespace

FragmentWalk::FragmentWalk(const fb::Fragment& fragment, const fb::Param& param,
                           const fb::Buffer& buffer) {
  const uint64_t param_elements = TensorElements(param);
  const uint64_t buffer_elements = refit::TensorElements(buffer);
  const std::vector<uint64_t> strides = VirtualStrides(param);
  row_.buffer = PlaceOf(fragment.offset(), buffer_elements);
  uint64_t first = 0;
  for (size_t d = 0; d < strides.size(); ++d) {
    first += fragment.lo()->Get(d) * strides[d];
    AddDim({.extent = fragment.extent()->Get(d),
            .param = PlaceOf(strides[d], param_elements),
            .buffer = PlaceOf(fragment.stride()->Get(d), buffer_elements)});
  }
  row_.param = PlaceOf(first, param_elements);
  SplitOffRow();
}

FragmentWalk::FragmentWalk(const fb::Region& region, const fb::Buffer& buffer) {
  const uint64_t buffer_elements = refit::TensorElements(buffer);
  if (buffer_elements == 0) {
    empty_ = true;
    return;
  }
  row_.buffer = PlaceOf(region.offset(), buffer_elements);
  const size_t dims = region.extent() == nullptr ? 0 : region.extent()->size();
  for (size_t d = 0; d < dims; ++d) {
    AddDim({.extent = region.extent()->Get(d),
            .param = {},
            .buffer = PlaceOf(region.stride()->Get(d), buffer_elements)});
  }
  SplitOffRow();
}

void FragmentWalk::AddDim(const Loop& loop) {
  if (loop.extent == 0) empty_ = true;
  if (loop.extent == 1) return;
  if (!loops_.empty() &&
      Continues(loops_.back().param, loop.param, loop.extent) &&
      Continues(loops_.back().buffer, loop.buffer, loop.extent)) {
    const uint64_t outer_extent = loops_.back().extent;
    loops_.back() = loop;
    loops_.back().extent *= outer_extent;
    return;
  }
  loops_.push_back(loop);
}

// The innermost loop becomes the row if it stays inside a tensor.
void FragmentWalk::SplitOffRow() {
  if (loops_.empty() || loops_.back().param.tensor > 0 ||
      loops_.back().buffer.tensor > 0) {
    return;
  }
  row_.count = loops_.back().extent;
  row_.param_step = loops_.back().param.element;
  row_.buffer_step = loops_.back().buffer.element;
  loops_.pop_back();
}

uint64_t FragmentWalk::elements() const {
  if (empty_) return 0;
  uint64_t elements = row_.count;
  for (const Loop& loop : loops_) elements *= loop.extent;
  return elements;
}

uint64_t FragmentWalk::Parts(uint64_t elements_per_part) const {
  const uint64_t wanted = elements() / elements_per_part + 1;
  const uint64_t outer = loops_.empty() ? row_.count : loops_.front().extent;
  return std::clamp<uint64_t>(wanted, 1, std::max<uint64_t>(outer, 1));
}

void FragmentWalk::Visit(
    uint64_t part, uint64_t parts,
    const std::function<void(const WalkRow&)>& visit) const {
  if (empty_) return;
  WalkRow row = row_;
  std::vector<Loop> loops = loops_;
  const uint64_t outer = loops.empty() ? row.count : loops.front().extent;
  const uint64_t begin = outer / parts * part + std::min(part, outer % parts);
  const uint64_t count = outer / parts + (part < outer % parts);
  if (count == 0) return;
  if (loops.empty()) {
    row.param.element += row.param_step * begin;
    row.buffer.element += row.buffer_step * begin;
    row.count = count;
  } else {
    Advance(row.param, loops.front().param, begin);
    Advance(row.buffer, loops.front().buffer, begin);
    loops.front().extent = count;
  }
  std::vector<uint64_t> counts(loops.size(), 0);
  while (true) {
    visit(row);
    size_t d = loops.size();
    while (d > 0 && ++counts[d - 1] == loops[d - 1].extent) {
      const Loop& loop = loops[d - 1];
      Retreat(row.param, loop.param, loop.extent - 1);
      Retreat(row.buffer, loop.buffer, loop.extent - 1);
      counts[d - 1] = 0;
      --d;
    }
    if (d == 0) return;
    Advance(row.param, loops[d - 1].param, 1);
    Advance(row.buffer, loops[d - 1].buffer, 1);
  }
}

}  // namespace refit
