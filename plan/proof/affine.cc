#include "plan/proof/affine.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace refit::proof {
namespace {

// Canonical, of equal counts: the first position at which they differ.
std::optional<int64_t> FirstDifferenceOfWhole(const Sequence& a,
                                              const Sequence& b) {
  if (a.base != b.base) return 0;
  int64_t weight = 1;  // positions per stride of the digit looked at
  size_t i = a.digits.size();
  size_t j = b.digits.size();
  while (i > 0 && j > 0) {
    const Digit& x = a.digits[--i];
    const Digit& y = b.digits[--j];
    if (x.stride != y.stride) return weight;
    // The shorter progression does not go on, as the form is canonical.
    if (x.extent != y.extent) return weight * std::min(x.extent, y.extent);
    weight *= x.extent;
  }
  return std::nullopt;
}

void AppendSlice(int64_t base, absl::Span<const Digit> digits, int64_t begin,
                 int64_t count, std::vector<Sequence>& slices) {
  int64_t inner = 1;  // values per stride of the first digit
  for (size_t i = 1; i < digits.size(); ++i) inner *= digits[i].extent;
  if (digits.empty() || (begin == 0 && count == inner * digits[0].extent)) {
    Sequence& whole = slices.emplace_back();
    whole.base = base;
    whole.digits.assign(digits.begin(), digits.end());
    Canonicalize(whole);
    return;
  }
  const auto rest = digits.subspan(1);
  const int64_t stride = digits[0].stride;
  int64_t first = begin / inner;
  const int64_t last = (begin + count) / inner;
  const int64_t head = begin % inner;
  const int64_t tail = (begin + count) % inner;
  if (first == last) {
    AppendSlice(base + first * stride, rest, head, count, slices);
    return;
  }
  if (head != 0) {
    AppendSlice(base + first * stride, rest, head, inner - head, slices);
    ++first;
  }
  if (last > first) {
    Sequence& middle = slices.emplace_back();
    middle.base = base + first * stride;
    middle.digits.push_back({.extent = last - first, .stride = stride});
    middle.digits.insert(middle.digits.end(), rest.begin(), rest.end());
    Canonicalize(middle);
  }
  if (tail != 0) AppendSlice(base + last * stride, rest, 0, tail, slices);
}

}  // namespace

void Canonicalize(Sequence& sequence) {
  Digits& digits = sequence.digits;
  // Writes from the back: `kept` is where the last digit kept stands.
  size_t kept = digits.size();
  for (size_t i = digits.size(); i-- > 0;) {
    const Digit digit = digits[i];
    if (digit.extent == 1) continue;
    if (kept < digits.size() &&
        digit.stride == digits[kept].extent * digits[kept].stride) {
      digits[kept].extent *= digit.extent;
    } else {
      digits[--kept] = digit;
    }
  }
  digits.erase(digits.begin(), digits.begin() + static_cast<ptrdiff_t>(kept));
}

int64_t CountOf(const Sequence& sequence) {
  int64_t count = 1;
  for (const Digit& digit : sequence.digits) count *= digit.extent;
  return count;
}

int64_t ValueAt(const Sequence& sequence, int64_t position) {
  int64_t value = sequence.base;
  for (size_t i = sequence.digits.size(); i-- > 0;) {
    const Digit& digit = sequence.digits[i];
    value += position % digit.extent * digit.stride;
    position /= digit.extent;
  }
  return value;
}

std::vector<Sequence> Slice(const Sequence& sequence, int64_t begin,
                            int64_t count) {
  std::vector<Sequence> slices;
  if (count > 0) {
    AppendSlice(sequence.base, sequence.digits, begin, count, slices);
  }
  return slices;
}

std::optional<int64_t> FirstDifference(const Sequence& a, int64_t a_begin,
                                       const Sequence& b, int64_t b_begin,
                                       int64_t count) {
  if (a_begin == 0 && b_begin == 0 && count == CountOf(a) &&
      count == CountOf(b)) {
    return FirstDifferenceOfWhole(a, b);
  }
  int64_t done = 0;
  for (const Sequence& piece : Slice(b, b_begin, count)) {
    const int64_t piece_count = CountOf(piece);
    const std::vector<Sequence> parts = Slice(a, a_begin + done, piece_count);
    int64_t part_begin = 0;
    for (const Sequence& part : parts) {
      // Several parts are each smaller than the piece, so this ends.
      const int64_t part_count = CountOf(part);
      const std::optional<int64_t> difference =
          parts.size() == 1
              ? FirstDifferenceOfWhole(part, piece)
              : FirstDifference(part, 0, piece, part_begin, part_count);
      if (difference.has_value()) return done + part_begin + *difference;
      part_begin += part_count;
    }
    done += piece_count;
  }
  return std::nullopt;
}

int64_t Lattice::Volume() const {
  int64_t volume = 1;
  for (const Digit& digit : digits) volume *= digit.extent;
  return volume;
}

int64_t Lattice::Last() const {
  int64_t last = offset;
  for (const Digit& digit : digits) last += (digit.extent - 1) * digit.stride;
  return last;
}

int64_t Lattice::At(absl::Span<const int64_t> coordinates) const {
  int64_t value = offset;
  for (size_t d = 0; d < coordinates.size(); ++d) {
    value += coordinates[d] * digits[d].stride;
  }
  return value;
}

std::optional<Lattice> MakeLattice(int64_t offset,
                                   absl::Span<const Digit> digits) {
  Lattice lattice;
  lattice.offset = offset;
  for (size_t d = 0; d < digits.size(); ++d) {
    if (digits[d].extent != 1) {
      lattice.dimensions.push_back(static_cast<uint8_t>(d));
    }
  }
  std::stable_sort(lattice.dimensions.begin(), lattice.dimensions.end(),
                   [&](uint8_t a, uint8_t b) {
                     return digits[a].stride > digits[b].stride;
                   });
  for (uint8_t d : lattice.dimensions) lattice.digits.push_back(digits[d]);
  int64_t span = 0;  // of the digits inside the one looked at
  for (size_t i = lattice.digits.size(); i-- > 0;) {
    const Digit& digit = lattice.digits[i];
    if (digit.stride <= span) return std::nullopt;
    span += (digit.extent - 1) * digit.stride;
  }
  return lattice;
}

Box Placement::Hull() const {
  Box hull;
  hull.lo = start;
  hull.hi = start;
  for (int64_t& hi : hull.hi) ++hi;
  for (const Move& move : moves) {
    hull.hi[move.dimension] += (move.extent - 1) * move.stride;
  }
  return hull;
}

bool Placement::FillsHull() const {
  // Along each dimension the moves, smallest stride first, must count through
  // the range: 1, extent of the first, product of the first two…
  absl::InlinedVector<Move, 8> sorted = moves;
  std::sort(sorted.begin(), sorted.end(), [](const Move& a, const Move& b) {
    return a.dimension != b.dimension ? a.dimension < b.dimension
                                      : a.stride < b.stride;
  });
  int64_t covered = 1;
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (i == 0 || sorted[i].dimension != sorted[i - 1].dimension) covered = 1;
    if (sorted[i].stride != covered) return false;
    covered *= sorted[i].extent;
  }
  return true;
}

bool Place(const Lattice& lattice, int64_t offset,
           absl::Span<const Digit> digits, Placement& placement) {
  const Digits& dims = lattice.digits;
  placement.start.resize(dims.size());
  placement.moves.clear();
  int64_t rest = offset - lattice.offset;
  if (rest < 0) return false;
  for (size_t d = 0; d < dims.size(); ++d) {
    // Greedy is right because the digits nest.
    const int64_t k = rest / dims[d].stride;
    if (k >= dims[d].extent) return false;
    placement.start[d] = k;
    rest -= k * dims[d].stride;
  }
  if (rest != 0) return false;
  for (const Digit& digit : digits) {
    if (digit.extent == 1) continue;
    if (digit.stride == 0) return false;
    size_t d = 0;
    while (d < dims.size() && dims[d].stride > digit.stride) ++d;
    if (d == dims.size() || digit.stride % dims[d].stride != 0) return false;
    int64_t stride = digit.stride / dims[d].stride;
    int64_t extent = digit.extent;
    const size_t first_move = placement.moves.size();
    // Over the end of dimension d, as if its elements and those of the next
    // larger dimension were one row.
    while (placement.start[d] + (extent - 1) * stride >= dims[d].extent) {
      const int64_t inside = dims[d].extent / stride;
      if (inside * stride != dims[d].extent || extent % inside != 0 || d == 0 ||
          dims[d - 1].stride != dims[d].extent * dims[d].stride) {
        return false;
      }
      if (inside > 1) {
        placement.moves.insert(
            placement.moves.begin() + static_cast<ptrdiff_t>(first_move),
            {static_cast<uint8_t>(d), inside, stride});
      }
      extent /= inside;
      stride = 1;
      --d;
      if (extent == 1) break;
    }
    if (extent > 1) {
      placement.moves.insert(
          placement.moves.begin() + static_cast<ptrdiff_t>(first_move),
          {static_cast<uint8_t>(d), extent, stride});
    }
  }
  // Whatever the split, the placement is right when every coordinate stays in
  // range: offsets and coordinates are then the same linear function.
  absl::InlinedVector<int64_t, 6> last = placement.start;
  for (const Placement::Move& move : placement.moves) {
    last[move.dimension] += (move.extent - 1) * move.stride;
  }
  for (size_t d = 0; d < dims.size(); ++d) {
    if (last[d] >= dims[d].extent) return false;
  }
  return true;
}

namespace {

// One unknown of an equation: lo <= k <= hi, times `stride`.
struct Unknown {
  int64_t stride = 0;
  int64_t lo = 0;
  int64_t hi = 0;
  // Of the unknowns after this one: what they can add, and what divides it.
  __int128 rest_lo = 0;
  __int128 rest_hi = 0;
  int64_t rest_gcd = 0;
};

__int128 FloorDivide(__int128 a, __int128 b) {
  return a / b - (a % b != 0 && a < 0 ? 1 : 0);
}

// Whether the unknowns from `i` on can add up to `target`. Each call takes one
// from `budget`; below 0 the answer means nothing.
bool Solve(const std::vector<Unknown>& unknowns, size_t i, __int128 target,
           int64_t& budget) {
  if (i == unknowns.size()) return target == 0;
  if (--budget < 0) return false;
  const Unknown& unknown = unknowns[i];
  const __int128 lo = std::max<__int128>(
      unknown.lo, -FloorDivide(unknown.rest_hi - target, unknown.stride));
  const __int128 hi = std::min<__int128>(
      unknown.hi, FloorDivide(target - unknown.rest_lo, unknown.stride));
  for (__int128 k = lo; k <= hi && budget >= 0; ++k) {
    const __int128 rest = target - k * unknown.stride;
    if (unknown.rest_gcd == 0 ? rest != 0 : rest % unknown.rest_gcd != 0) {
      --budget;
      continue;
    }
    if (Solve(unknowns, i + 1, rest, budget)) return true;
  }
  return false;
}

}  // namespace

Intersection Intersect(const Lattice& a, const Lattice& b) {
  constexpr int64_t kBudget = 1 << 16;
  if (a.Last() < b.offset || b.Last() < a.offset) return Intersection::kEmpty;
  // sum(x_i * a_i) - sum(y_j * b_j) = b.offset - a.offset. Unknowns of equal
  // stride are one unknown.
  std::vector<Unknown> unknowns;
  for (const Digit& digit : a.digits) {
    unknowns.push_back(
        {.stride = digit.stride, .lo = 0, .hi = digit.extent - 1});
  }
  for (const Digit& digit : b.digits) {
    const auto same = std::find_if(
        unknowns.begin(), unknowns.end(),
        [&](const Unknown& unknown) { return unknown.stride == digit.stride; });
    if (same != unknowns.end()) {
      same->lo = 1 - digit.extent;
    } else {
      unknowns.push_back(
          {.stride = digit.stride, .lo = 1 - digit.extent, .hi = 0});
    }
  }
  std::sort(
      unknowns.begin(), unknowns.end(),
      [](const Unknown& x, const Unknown& y) { return x.stride > y.stride; });
  for (size_t i = unknowns.size(); i-- > 1;) {
    const Unknown& inner = unknowns[i];
    Unknown& outer = unknowns[i - 1];
    outer.rest_lo =
        inner.rest_lo + static_cast<__int128>(inner.lo) * inner.stride;
    outer.rest_hi =
        inner.rest_hi + static_cast<__int128>(inner.hi) * inner.stride;
    outer.rest_gcd = std::gcd(inner.rest_gcd, inner.stride);
  }
  int64_t budget = kBudget;
  const bool shared = Solve(unknowns, 0, b.offset - a.offset, budget);
  if (shared) return Intersection::kShared;
  return budget < 0 ? Intersection::kUnknown : Intersection::kEmpty;
}

}  // namespace refit::proof
