#include "compiler/ir/box.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace refit {

int64_t Product(absl::Span<const int64_t> dims) {
  int64_t product = 1;
  for (int64_t dim : dims) product *= dim;
  return product;
}

Dims RowMajorStrides(absl::Span<const int64_t> shape) {
  Dims strides(shape.size());
  int64_t stride = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= shape[dim];
  }
  return strides;
}

int64_t Box::Volume() const {
  int64_t volume = 1;
  for (size_t dim = 0; dim < lo.size(); ++dim) {
    volume *= std::max<int64_t>(extent(dim), 0);
  }
  return volume;
}

bool Box::Empty() const {
  for (size_t dim = 0; dim < lo.size(); ++dim) {
    if (hi[dim] <= lo[dim]) return true;
  }
  return false;
}

Box WholeBox(absl::Span<const int64_t> extents) {
  return {.lo = Dims(extents.size(), 0),
          .hi = Dims(extents.begin(), extents.end())};
}

std::optional<Box> Intersect(const Box& a, const Box& b) {
  const size_t rank = a.lo.size();
  for (size_t dim = 0; dim < rank; ++dim) {
    if (std::min(a.hi[dim], b.hi[dim]) <= std::max(a.lo[dim], b.lo[dim])) {
      return std::nullopt;
    }
  }
  Box both = a;
  for (size_t dim = 0; dim < rank; ++dim) {
    both.lo[dim] = std::max(a.lo[dim], b.lo[dim]);
    both.hi[dim] = std::min(a.hi[dim], b.hi[dim]);
  }
  return both;
}

bool Contains(const Box& outer, const Box& inner) {
  for (size_t dim = 0; dim < outer.lo.size(); ++dim) {
    if (inner.lo[dim] < outer.lo[dim] || inner.hi[dim] > outer.hi[dim]) {
      return false;
    }
  }
  return true;
}

std::vector<Box> Subtract(const Box& box, const Box& hole) {
  const std::optional<Box> both = Intersect(box, hole);
  if (!both.has_value()) return {box};
  std::vector<Box> rest;
  Box middle =
      box;  // what is left to cut around `both`, one dimension at a time
  for (size_t dim = 0; dim < box.lo.size(); ++dim) {
    if (middle.lo[dim] < both->lo[dim]) {
      rest.push_back(middle);
      rest.back().hi[dim] = both->lo[dim];
    }
    if (both->hi[dim] < middle.hi[dim]) {
      rest.push_back(middle);
      rest.back().lo[dim] = both->hi[dim];
    }
    middle.lo[dim] = both->lo[dim];
    middle.hi[dim] = both->hi[dim];
  }
  std::sort(rest.begin(), rest.end(),
            [](const Box& a, const Box& b) { return a.lo < b.lo; });
  return rest;
}

std::string BoxText(const Box& box) {
  std::string text = "[";
  for (size_t dim = 0; dim < box.lo.size(); ++dim) {
    absl::StrAppend(&text, dim == 0 ? "" : ", ", box.lo[dim], ":", box.hi[dim]);
  }
  return text + "]";
}

}  // namespace refit
