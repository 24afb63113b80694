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
// Cuts within cuts. A layout's boxes need a few for each of its dimensions; a
// hostile file's could need one for each box.
constexpr int kMostCuts = 100;

class OverlapSearch {
 public:
  OverlapSearch(absl::Span<const Box* const> boxes,
                absl::FunctionRef<bool(size_t, size_t)> is_overlap,
                Steps& steps)
      : dims_(boxes.empty() ? 0 : boxes[0]->lo.size()),
        is_overlap_(is_overlap),
        steps_(steps),
        ranges_(boxes.size() * dims_) {
    Range* range = ranges_.data();
    for (const Box* box : boxes) {
      const int64_t* lo = box->lo.data();
      const int64_t* hi = box->hi.data();
      for (size_t d = 0; d < dims_; ++d) *range++ = {lo[d], hi[d]};
    }
  }

  // Among boxes `group`, which is reordered. Cuts the group along planes that
  // no box crosses; boxes that a plane separates are disjoint.
  Overlap Find(absl::Span<size_t> group, int cuts = 0) {
    if (group.size() > kSmallGroup && dims_ > 0) {
      for (size_t d = 0; d < dims_ && cuts < kMostCuts; ++d) {
        if (!steps_.Take(group.size())) return std::nullopt;
        SortBy(d, group);
        if (FirstCut(d, group) != group.size()) {
          return FindInSlabs(d, group, cuts + 1);
        }
      }
      SortBy(0, group);
    }
    return FindInPairs(group);
  }

 private:
  struct Range {
    int64_t lo = 0;
    int64_t hi = 0;
  };

  const Range& At(size_t box, size_t d) const {
    return ranges_[box * dims_ + d];
  }

  bool Intersects(size_t a, size_t b) const {
    for (size_t d = 0; d < dims_; ++d) {
      if (At(a, d).hi <= At(b, d).lo || At(b, d).hi <= At(a, d).lo) {
        return false;
      }
    }
    return true;
  }

  // Boxes lie apart in memory: what is compared is copied first.
  void SortBy(size_t d, absl::Span<size_t> group) {
    by_lo_.clear();
    bool is_sorted = true;
    for (const size_t i : group) {
      const auto lo = static_cast<uint64_t>(At(i, d).lo) ^ kSign;
      const Key key = Key{lo} << 64 | i;
      is_sorted &= by_lo_.empty() || by_lo_.back() < key;
      by_lo_.push_back(key);
    }
    if (is_sorted) return;
    std::sort(by_lo_.begin(), by_lo_.end());
    for (size_t i = 0; i < group.size(); ++i) {
      group[i] = static_cast<size_t>(by_lo_[i]);
    }
  }

  // Where the first slab of a group sorted by dimension d ends.
  size_t FirstCut(size_t d, absl::Span<const size_t> group) const {
    int64_t end = At(group[0], d).hi;
    for (size_t i = 1; i < group.size(); ++i) {
      if (At(group[i], d).lo >= end) return i;
      end = std::max(end, At(group[i], d).hi);
    }
    return group.size();
  }

  Overlap FindInSlabs(size_t d, absl::Span<size_t> group, int cuts) {
    // Slabs reorder themselves only, so the rest stays sorted.
    while (!group.empty()) {
      const size_t cut = FirstCut(d, group);
      if (cut > 1) {
        Overlap found = Find(group.subspan(0, cut), cuts);
        if (found.has_value()) return found;
      }
      group = group.subspan(cut);
    }
    return std::nullopt;
  }

  Overlap FindInPairs(absl::Span<const size_t> group) const {
    for (size_t i = 0; i < group.size(); ++i) {
      for (size_t j = i + 1; j < group.size(); ++j) {
        if (!steps_.Take(1)) return std::nullopt;
        const size_t a = group[i];
        const size_t b = group[j];
        if (group.size() > kSmallGroup && dims_ > 0 &&
            At(b, 0).lo >= At(a, 0).hi) {
          break;  // sorted by dimension 0: no later box meets this one
        }
        if (Intersects(a, b) && is_overlap_(std::min(a, b), std::max(a, b))) {
          return std::pair(std::min(a, b), std::max(a, b));
        }
      }
    }
    return std::nullopt;
  }

  const size_t dims_;
  absl::FunctionRef<bool(size_t, size_t)> is_overlap_;
  Steps& steps_;
  std::vector<Range> ranges_;  // by box, then dimension
  // Of SortBy: the coordinate, in the order of unsigned numbers, then the box.
  // One number is compared faster than two.
  using Key = unsigned __int128;
  static constexpr uint64_t kSign = uint64_t{1} << 63;
  std::vector<Key> by_lo_;
};

using Coordinates = absl::InlinedVector<int64_t, 6>;

// The volume of a box in its dimensions from `d` on.
__int128 VolumeFrom(const Box& box, size_t d) {
  __int128 volume = 1;
  for (; d < box.lo.size(); ++d) volume *= box.hi[d] - box.lo[d];
  return volume;
}

// Searches the dimensions from `d` on; `group` are the boxes that hold the
// coordinates chosen so far. Disjoint boxes that hold a slab's whole volume
// leave nothing of it open.
std::optional<Coordinates> UncoveredFrom(const Box& space, size_t d,
                                         absl::Span<const Box* const> boxes,
                                         const std::vector<size_t>& group) {
  if (d == space.lo.size()) {
    return group.empty() ? std::make_optional<Coordinates>() : std::nullopt;
  }
  std::vector<size_t> by_lo = group;
  std::sort(by_lo.begin(), by_lo.end(), [&](size_t a, size_t b) {
    return boxes[a]->lo[d] < boxes[b]->lo[d];
  });
  std::vector<size_t> by_hi = group;
  std::sort(by_hi.begin(), by_hi.end(), [&](size_t a, size_t b) {
    return boxes[a]->hi[d] < boxes[b]->hi[d];
  });
  const __int128 whole = VolumeFrom(space, d + 1);
  __int128 covered = 0;  // of the slab from `cut` on
  size_t begun = 0;
  size_t ended = 0;
  for (int64_t cut = space.lo[d]; cut < space.hi[d];) {
    for (; begun < by_lo.size() && boxes[by_lo[begun]]->lo[d] <= cut; ++begun) {
      covered += VolumeFrom(*boxes[by_lo[begun]], d + 1);
    }
    for (; ended < by_hi.size() && boxes[by_hi[ended]]->hi[d] <= cut; ++ended) {
      covered -= VolumeFrom(*boxes[by_hi[ended]], d + 1);
    }
    if (covered != whole) {
      std::vector<size_t> slab;
      for (size_t i : group) {
        if (boxes[i]->lo[d] <= cut && cut < boxes[i]->hi[d]) slab.push_back(i);
      }
      auto rest = UncoveredFrom(space, d + 1, boxes, slab);
      if (rest.has_value()) rest->insert(rest->begin(), cut);
      return rest;
    }
    // Where the next box begins or ends.
    int64_t next = space.hi[d];
    if (begun < by_lo.size()) {
      next = std::min(next, boxes[by_lo[begun]]->lo[d]);
    }
    if (ended < by_hi.size()) {
      next = std::min(next, boxes[by_hi[ended]]->hi[d]);
    }
    cut = next;
  }
  return std::nullopt;
}

}  // namespace

int64_t VolumeOf(const Box& box) {
  int64_t volume = 1;
  for (size_t d = 0; d < box.lo.size(); ++d) volume *= box.hi[d] - box.lo[d];
  return volume;
}

bool Intersects(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.lo.size(); ++d) {
    if (a.hi[d] <= b.lo[d] || b.hi[d] <= a.lo[d]) return false;
  }
  return true;
}

void Extend(Box& box, const Box& other) {
  for (size_t d = 0; d < box.lo.size(); ++d) {
    box.lo[d] = std::min(box.lo[d], other.lo[d]);
    box.hi[d] = std::max(box.hi[d], other.hi[d]);
  }
}

std::vector<const Box*> PointersTo(absl::Span<const Box> boxes) {
  std::vector<const Box*> pointers;
  pointers.reserve(boxes.size());
  for (const Box& box : boxes) pointers.push_back(&box);
  return pointers;
}

absl::InlinedVector<int64_t, 6> FirstShared(const Box& a, const Box& b) {
  absl::InlinedVector<int64_t, 6> shared = a.lo;
  for (size_t d = 0; d < shared.size(); ++d) {
    shared[d] = std::max(shared[d], b.lo[d]);
  }
  return shared;
}

std::optional<std::pair<size_t, size_t>> FindOverlap(
    absl::Span<const Box* const> boxes,
    absl::FunctionRef<bool(size_t, size_t)> is_overlap, Steps& steps) {
  std::vector<size_t> group(boxes.size());
  std::iota(group.begin(), group.end(), size_t{0});
  return OverlapSearch(boxes, is_overlap, steps).Find(absl::MakeSpan(group));
}

std::optional<absl::InlinedVector<int64_t, 6>> FirstUncovered(
    const Box& space, absl::Span<const Box* const> boxes) {
  std::vector<size_t> group(boxes.size());
  std::iota(group.begin(), group.end(), size_t{0});
  return UncoveredFrom(space, 0, boxes, group);
}

}  // namespace refit::proof
