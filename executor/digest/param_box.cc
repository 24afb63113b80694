#include "executor/digest/param_box.h"

#include <algorithm>

namespace refit {

ParamBox BoxOf(const fb::Fragment& fragment) {
  ParamBox box;
  if (fragment.lo() == nullptr) return box;
  box.lo.assign(fragment.lo()->begin(), fragment.lo()->end());
  box.extent.assign(fragment.extent()->begin(), fragment.extent()->end());
  return box;
}

uint64_t ElementsOf(const ParamBox& box) {
  uint64_t elements = 1;
  for (const uint64_t extent : box.extent) elements *= extent;
  return elements;
}

std::optional<ParamBox> Meet(const ParamBox& a, const ParamBox& b) {
  ParamBox both = a;
  for (size_t d = 0; d < a.lo.size(); ++d) {
    both.lo[d] = std::max(a.lo[d], b.lo[d]);
    const uint64_t end = std::min(a.lo[d] + a.extent[d], b.lo[d] + b.extent[d]);
    if (end <= both.lo[d]) return std::nullopt;
    both.extent[d] = end - both.lo[d];
  }
  return both;
}

std::vector<ParamBox> Without(const std::vector<ParamBox>& boxes,
                              const ParamBox& taken) {
  std::vector<ParamBox> left;
  for (const ParamBox& box : boxes) {
    const std::optional<ParamBox> both = Meet(box, taken);
    if (!both.has_value()) {
      left.push_back(box);
      continue;
    }
    // What lies before and behind in one dimension after the other.
    ParamBox rest = box;
    for (size_t d = 0; d < rest.lo.size(); ++d) {
      const uint64_t before = both->lo[d] - rest.lo[d];
      const uint64_t behind = rest.extent[d] - before - both->extent[d];
      if (before > 0) {
        left.push_back(rest);
        left.back().extent[d] = before;
      }
      if (behind > 0) {
        left.push_back(rest);
        left.back().lo[d] = both->lo[d] + both->extent[d];
        left.back().extent[d] = behind;
      }
      rest.lo[d] = both->lo[d];
      rest.extent[d] = both->extent[d];
    }
  }
  return left;
}

}  // namespace refit
