#include "runner/fragment_walk.h"

#include <algorithm>
#include <limits>

namespace refit {
namespace {

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

}  // namespace

FragmentWalk::FragmentWalk(const fb::Fragment& fragment, const fb::Param& param,
                           const fb::Buffer& buffer)
    : param_elements_(TensorElements(param)),
      buffer_elements_(TensorElements(buffer)) {
  const std::vector<uint64_t> strides = VirtualStrides(param);
  first_.buffer = fragment.offset();
  for (size_t d = 0; d < strides.size(); ++d) {
    first_.param += fragment.lo()->Get(d) * strides[d];
    AddLoop({.extent = fragment.extent()->Get(d),
             .param_stride = strides[d],
             .buffer_stride = fragment.stride()->Get(d)});
  }
  SplitOffRow();
}

FragmentWalk::FragmentWalk(const fb::Region& region, const fb::Buffer& buffer)
    : buffer_elements_(TensorElements(buffer)) {
  first_.buffer = region.offset();
  const size_t dims = region.extent() == nullptr ? 0 : region.extent()->size();
  for (size_t d = 0; d < dims; ++d) {
    AddLoop({.extent = region.extent()->Get(d),
             .param_stride = 0,
             .buffer_stride = region.stride()->Get(d)});
  }
  if (buffer_elements_ == 0) empty_ = true;
  SplitOffRow();
}

// Loops that continue each other in param and buffer become one.
void FragmentWalk::AddLoop(const Loop& loop) {
  if (loop.extent == 0) empty_ = true;
  if (loop.extent == 1) return;
  if (!loops_.empty() &&
      loops_.back().param_stride == loop.param_stride * loop.extent &&
      loops_.back().buffer_stride == loop.buffer_stride * loop.extent) {
    const uint64_t outer_extent = loops_.back().extent;
    loops_.back() = loop;
    loops_.back().extent *= outer_extent;
    return;
  }
  loops_.push_back(loop);
}

void FragmentWalk::SplitOffRow() {
  if (loops_.empty()) return;
  row_ = loops_.back();
  loops_.pop_back();
}

uint64_t FragmentWalk::elements() const {
  if (empty_) return 0;
  uint64_t elements = row_.extent;
  for (const Loop& loop : loops_) elements *= loop.extent;
  return elements;
}

uint64_t FragmentWalk::Parts(uint64_t elements_per_part) const {
  const uint64_t wanted = elements() / elements_per_part + 1;
  const Loop& outer = loops_.empty() ? row_ : loops_.front();
  return std::clamp<uint64_t>(wanted, 1, std::max<uint64_t>(outer.extent, 1));
}

void FragmentWalk::Visit(
    uint64_t part, uint64_t parts,
    const std::function<void(const WalkRow&)>& visit) const {
  if (empty_) return;
  std::vector<Loop> loops = loops_;
  Loop row = row_;
  Loop& outer = loops.empty() ? row : loops.front();
  const uint64_t begin =
      outer.extent / parts * part + std::min(part, outer.extent % parts);
  Position position = {.param = first_.param + begin * outer.param_stride,
                       .buffer = first_.buffer + begin * outer.buffer_stride};
  outer.extent = outer.extent / parts + (part < outer.extent % parts);
  if (outer.extent == 0) return;
  std::vector<uint64_t> counts(loops.size(), 0);
  while (true) {
    VisitRow(position, row.extent, visit);
    size_t d = loops.size();
    while (d > 0 && ++counts[d - 1] == loops[d - 1].extent) {
      const Loop& loop = loops[d - 1];
      position.param -= loop.param_stride * (loop.extent - 1);
      position.buffer -= loop.buffer_stride * (loop.extent - 1);
      counts[d - 1] = 0;
      --d;
    }
    if (d == 0) return;
    position.param += loops[d - 1].param_stride;
    position.buffer += loops[d - 1].buffer_stride;
  }
}

// Cuts a row where it leaves a tensor of the param or of the buffer.
void FragmentWalk::VisitRow(
    const Position& first, uint64_t count,
    const std::function<void(const WalkRow&)>& visit) const {
  // Indices that stay in the tensor, that of `element` included.
  const auto indices = [](uint64_t element, uint64_t stride,
                          uint64_t elements) {
    return stride == 0 ? std::numeric_limits<uint64_t>::max()
                       : (elements - 1 - element) / stride + 1;
  };
  Position position = first;
  while (count > 0) {
    WalkRow row;
    row.param = {.tensor = position.param / param_elements_,
                 .element = position.param % param_elements_};
    row.buffer = {.tensor = position.buffer / buffer_elements_,
                  .element = position.buffer % buffer_elements_};
    row.param_stride = row_.param_stride;
    row.buffer_stride = row_.buffer_stride;
    row.count = std::min(
        {count, indices(row.param.element, row_.param_stride, param_elements_),
         indices(row.buffer.element, row_.buffer_stride, buffer_elements_)});
    visit(row);
    position.param += row.count * row_.param_stride;
    position.buffer += row.count * row_.buffer_stride;
    count -= row.count;
  }
}

}  // namespace refit
