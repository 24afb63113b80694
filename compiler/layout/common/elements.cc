#include "compiler/layout/common/elements.h"

#include <utility>

namespace refit {

std::vector<Box> BoxesOfElements(absl::Span<const int64_t> shape, Range range) {
  if (range.size() == 0) return {};
  if (shape.empty()) return {Box{}};
  const int64_t row = Product(shape.subspan(1));
  // Boxes within one row, that row put before them.
  std::vector<Box> boxes;
  const auto within_row = [&](int64_t number, Range elements) {
    for (Box& box : BoxesOfElements(shape.subspan(1), elements)) {
      box.lo.insert(box.lo.begin(), number);
      box.hi.insert(box.hi.begin(), number + 1);
      boxes.push_back(std::move(box));
    }
  };
  const int64_t first = range.begin / row;
  if (range.end <= (first + 1) * row && range.size() < row) {
    within_row(first, {range.begin - first * row, range.end - first * row});
    return boxes;
  }
  const int64_t whole_begin = (range.begin + row - 1) / row;
  const int64_t whole_end = range.end / row;
  if (first < whole_begin) within_row(first, {range.begin - first * row, row});
  if (whole_begin < whole_end) {
    Box box = WholeBox(shape);
    box.lo[0] = whole_begin;
    box.hi[0] = whole_end;
    boxes.push_back(std::move(box));
  }
  within_row(whole_end, {0, range.end - whole_end * row});
  return boxes;
}

std::vector<Fragment> OfSplitParam(const Param& param,
                                   const Fragment& fragment) {
  if (param.split == Split::kNone) return {fragment};
  const std::vector<Dims> factors = param.Factors();
  const size_t index = param.index.size();
  std::vector<Fragment> fragments = {fragment};
  // From the last dimension on, so that those before keep their places.
  for (size_t dim = factors.size(); dim-- > 0;) {
    if (factors[dim].size() == 1) continue;
    const size_t at = index + dim;
    const Range range = {fragment.box.lo[at], fragment.box.hi[at]};
    const int64_t stride = fragment.stride[at];
    Dims strides = RowMajorStrides(factors[dim]);
    for (int64_t& of_factor : strides) of_factor *= stride;
    const auto put = [at](Dims& dims, const Dims& in_place) {
      dims.erase(dims.begin() + static_cast<ptrdiff_t>(at));
      dims.insert(dims.begin() + static_cast<ptrdiff_t>(at), in_place.begin(),
                  in_place.end());
    };
    std::vector<Fragment> split;
    for (const Fragment& whole : fragments) {
      int64_t offset = whole.offset;
      for (const Box& box : BoxesOfElements(factors[dim], range)) {
        Fragment& part = split.emplace_back(whole);
        part.offset = offset;
        put(part.box.lo, box.lo);
        put(part.box.hi, box.hi);
        put(part.stride, strides);
        offset += box.Volume() * stride;
      }
    }
    fragments = std::move(split);
  }
  return fragments;
}

}  // namespace refit
