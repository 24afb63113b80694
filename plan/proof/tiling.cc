#include "plan/proof/tiling.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace refit::proof {
namespace {

using Overlap = std::optional<std::pair<size_t, size_t>>;

// Groups this small are compared pair by pair.
constexpr size_t kSmallGroup = 4;

bool Intersects(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.lo.size(); ++d) {
    if (a.hi[d] <= b.lo[d] || b.hi[d] <= a.lo[d]) return false;
  }
  return true;
}

class OverlapSearch {
 public:
  OverlapSearch(absl::Span<const Box> boxes,
                absl::FunctionRef<bool(size_t, size_t)> is_overlap)
      : boxes_(boxes), is_overlap_(is_overlap) {}

  // Among boxes `group`, which is reordered. Cuts the group along planes that
  // no box crosses; boxes that a plane separates are disjoint.
  Overlap Find(absl::Span<size_t> group) {
    if (group.size() > kSmallGroup && !boxes_[group[0]].lo.empty()) {
      for (size_t d = 0; d < boxes_[group[0]].lo.size(); ++d) {
        SortBy(d, group);
        if (FirstCut(d, group) != group.size()) return FindInSlabs(d, group);
      }
      SortBy(0, group);
    }
    return FindInPairs(group);
  }

 private:
  // Boxes lie far apart in memory: what is compared is copied first.
  void SortBy(size_t d, absl::Span<size_t> group) {
    by_lo_.clear();
    for (const size_t i : group) by_lo_.emplace_back(boxes_[i].lo[d], i);
    std::sort(by_lo_.begin(), by_lo_.end());
    for (size_t i = 0; i < group.size(); ++i) group[i] = by_lo_[i].second;
  }

  // Where the first slab of a group sorted by dimension d ends.
  size_t FirstCut(size_t d, absl::Span<const size_t> group) const {
    int64_t end = boxes_[group[0]].hi[d];
    for (size_t i = 1; i < group.size(); ++i) {
      if (boxes_[group[i]].lo[d] >= end) return i;
      end = std::max(end, boxes_[group[i]].hi[d]);
    }
    return group.size();
  }

  Overlap FindInSlabs(size_t d, absl::Span<size_t> group) {
    // Slabs reorder themselves only, so the rest stays sorted.
    while (!group.empty()) {
      const size_t cut = FirstCut(d, group);
      if (Overlap found = Find(group.subspan(0, cut)); found.has_value()) {
        return found;
      }
      group = group.subspan(cut);
    }
    return std::nullopt;
  }

  Overlap FindInPairs(absl::Span<const size_t> group) const {
    for (size_t i = 0; i < group.size(); ++i) {
      for (size_t j = i + 1; j < group.size(); ++j) {
        const size_t a = group[i];
        const size_t b = group[j];
        if (group.size() > kSmallGroup && !boxes_[a].lo.empty() &&
            boxes_[b].lo[0] >= boxes_[a].hi[0]) {
          break;  // sorted by dimension 0: no later box meets this one
        }
        if (Intersects(boxes_[a], boxes_[b]) &&
            is_overlap_(std::min(a, b), std::max(a, b))) {
          return std::pair(std::min(a, b), std::max(a, b));
        }
      }
    }
    return std::nullopt;
  }

  absl::Span<const Box> boxes_;
  absl::FunctionRef<bool(size_t, size_t)> is_overlap_;
  std::vector<std::pair<int64_t, size_t>> by_lo_;  // of SortBy
};

using Coordinates = absl::InlinedVector<int64_t, 6>;

// Searches the dimensions from `d` on; `group` are the boxes that hold the
// coordinates chosen so far.
std::optional<Coordinates> UncoveredFrom(const Box& space, size_t d,
                                         absl::Span<const Box> boxes,
                                         const std::vector<size_t>& group) {
  if (d == space.lo.size()) {
    return group.empty() ? std::make_optional<Coordinates>() : std::nullopt;
  }
  std::vector<int64_t> cuts = {space.lo[d]};
  for (size_t i : group) {
    cuts.push_back(boxes[i].lo[d]);
    cuts.push_back(boxes[i].hi[d]);
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  for (int64_t cut : cuts) {
    if (cut < space.lo[d] || cut >= space.hi[d]) continue;
    std::vector<size_t> slab;
    for (size_t i : group) {
      if (boxes[i].lo[d] <= cut && cut < boxes[i].hi[d]) slab.push_back(i);
    }
    // Disjoint boxes that hold the slab's whole volume leave nothing open.
    __int128 open = 1;
    for (size_t e = d + 1; e < space.lo.size(); ++e) {
      open *= space.hi[e] - space.lo[e];
    }
    for (size_t i : slab) {
      __int128 volume = 1;
      for (size_t e = d + 1; e < space.lo.size(); ++e) {
        volume *= boxes[i].hi[e] - boxes[i].lo[e];
      }
      open -= volume;
    }
    if (open == 0) continue;
    if (auto rest = UncoveredFrom(space, d + 1, boxes, slab);
        rest.has_value()) {
      rest->insert(rest->begin(), cut);
      return rest;
    }
  }
  return std::nullopt;
}

}  // namespace

int64_t VolumeOf(const Box& box) {
  int64_t volume = 1;
  for (size_t d = 0; d < box.lo.size(); ++d) volume *= box.hi[d] - box.lo[d];
  return volume;
}

absl::InlinedVector<int64_t, 6> FirstShared(const Box& a, const Box& b) {
  absl::InlinedVector<int64_t, 6> shared = a.lo;
  for (size_t d = 0; d < shared.size(); ++d) {
    shared[d] = std::max(shared[d], b.lo[d]);
  }
  return shared;
}

std::optional<std::pair<size_t, size_t>> FindOverlap(
    absl::Span<const Box> boxes,
    absl::FunctionRef<bool(size_t, size_t)> is_overlap) {
  std::vector<size_t> group(boxes.size());
  std::iota(group.begin(), group.end(), size_t{0});
  return OverlapSearch(boxes, is_overlap).Find(absl::MakeSpan(group));
}

std::optional<absl::InlinedVector<int64_t, 6>> FirstUncovered(
    const Box& space, absl::Span<const Box> boxes) {
  std::vector<size_t> group(boxes.size());
  std::iota(group.begin(), group.end(), size_t{0});
  return UncoveredFrom(space, 0, boxes, group);
}

}  // namespace refit::proof
