#include "plan/proof/affine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <random>
#include <set>

#include "plan/proof/tiling.h"
#include "tests/sanitizers.h"

namespace refit::proof {
namespace {

// REFIT_SEED replays a run that failed.
uint32_t Seed() {
  const char* seed = std::getenv("REFIT_SEED");
  return seed == nullptr ? 1 : static_cast<uint32_t>(std::atoi(seed));
}

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int64_t Between(int64_t lo, int64_t hi) {
    return std::uniform_int_distribution<int64_t>(lo, hi)(engine_);
  }

 private:
  std::mt19937 engine_;
};

std::vector<int64_t> ValuesOf(const Sequence& sequence) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < CountOf(sequence); ++i) {
    values.push_back(ValueAt(sequence, i));
  }
  return values;
}

// Extents 1 and chains are frequent, so that there is something to bring to
// canonical form.
Sequence DrawSequence(Random& random) {
  Sequence sequence;
  sequence.base = random.Between(0, 3);
  const int64_t dims = random.Between(0, 4);
  int64_t stride = random.Between(1, 3);
  for (int64_t d = 0; d < dims; ++d) {
    const int64_t extent = random.Between(1, 4);
    sequence.digits.insert(sequence.digits.begin(),
                           {.extent = extent, .stride = stride});
    stride = random.Between(0, 2) > 0 ? extent * stride : random.Between(1, 9);
  }
  return sequence;
}

TEST(AffineTest, CanonicalFormKeepsTheValues) {
  Random random(Seed());
  for (int i = 0; i < 2000; ++i) {
    Sequence sequence = DrawSequence(random);
    const std::vector<int64_t> values = ValuesOf(sequence);
    Canonicalize(sequence);
    EXPECT_EQ(ValuesOf(sequence), values);
  }
}

TEST(AffineTest, EqualValuesHaveEqualCanonicalForms) {
  Random random(Seed());
  int equal = 0;
  for (int i = 0; i < 20000; ++i) {
    Sequence a = DrawSequence(random);
    Sequence b = DrawSequence(random);
    a.base = b.base = 0;
    const bool same = ValuesOf(a) == ValuesOf(b);
    Canonicalize(a);
    Canonicalize(b);
    EXPECT_EQ(a == b, same);
    equal += same ? 1 : 0;
  }
  EXPECT_GT(equal, 50);
}

TEST(AffineTest, SlicesAreTheValuesOfTheirRange) {
  Random random(Seed());
  for (int i = 0; i < 5000; ++i) {
    Sequence sequence = DrawSequence(random);
    Canonicalize(sequence);
    const std::vector<int64_t> values = ValuesOf(sequence);
    const int64_t begin = random.Between(0, CountOf(sequence) - 1);
    const int64_t count = random.Between(0, CountOf(sequence) - begin);
    std::vector<int64_t> sliced;
    for (const Sequence& slice : Slice(sequence, begin, count)) {
      Sequence canonical = slice;
      Canonicalize(canonical);
      EXPECT_EQ(canonical, slice);
      const std::vector<int64_t> part = ValuesOf(slice);
      sliced.insert(sliced.end(), part.begin(), part.end());
    }
    EXPECT_EQ(sliced, std::vector<int64_t>(values.begin() + begin,
                                           values.begin() + begin + count));
  }
}

TEST(AffineTest, FirstDifferenceIsThatOfTheValues) {
  Random random(Seed());
  int equal = 0;
  for (int i = 0; i < 20000; ++i) {
    Sequence a = DrawSequence(random);
    Sequence b = random.Between(0, 1) == 0 ? a : DrawSequence(random);
    if (random.Between(0, 1) == 0 && !b.digits.empty()) {
      b.digits[0].stride += random.Between(0, 1);
    }
    Canonicalize(a);
    Canonicalize(b);
    const int64_t a_begin = random.Between(0, CountOf(a) - 1);
    const int64_t b_begin = random.Between(0, 1) == 0
                                ? std::min(a_begin, CountOf(b) - 1)
                                : random.Between(0, CountOf(b) - 1);
    const int64_t count =
        random.Between(0, std::min(CountOf(a) - a_begin, CountOf(b) - b_begin));
    std::optional<int64_t> expected;
    for (int64_t k = 0; k < count && !expected.has_value(); ++k) {
      if (ValueAt(a, a_begin + k) != ValueAt(b, b_begin + k)) expected = k;
    }
    EXPECT_EQ(FirstDifference(a, a_begin, b, b_begin, count), expected);
    equal += expected.has_value() ? 0 : 1;
  }
  EXPECT_GT(equal, 1000);
}

TEST(AffineTest, DigitsThatDoNotNestAreNoLattice) {
  const Digit coinciding[] = {{.extent = 3, .stride = 2},
                              {.extent = 3, .stride = 1}};
  EXPECT_FALSE(MakeLattice(0, coinciding).has_value());
  const Digit standing[] = {{.extent = 2, .stride = 0}};
  EXPECT_FALSE(MakeLattice(0, standing).has_value());
  const Digit nested[] = {{.extent = 2, .stride = 1},
                          {.extent = 3, .stride = 2}};
  EXPECT_TRUE(MakeLattice(0, nested).has_value());
}

// A lattice with gaps and permuted dimensions, and its values.
Lattice DrawLattice(Random& random) {
  const int64_t dims = random.Between(0, 3);
  Digits digits;
  int64_t stride = random.Between(1, 2);
  for (int64_t d = 0; d < dims; ++d) {
    const int64_t extent = random.Between(1, 5);
    digits.push_back({.extent = extent, .stride = stride});
    stride *= extent;
    if (random.Between(0, 2) == 0) stride += random.Between(0, 3);
    stride = std::max<int64_t>(stride, 1);
  }
  for (size_t d = digits.size(); d-- > 1;) {
    std::swap(digits[d], digits[static_cast<size_t>(
                             random.Between(0, static_cast<int64_t>(d)))]);
  }
  return *MakeLattice(random.Between(0, 4), digits);
}

// Loops that often fit the lattice: its own, split, merged or cut.
Digits DrawLoops(const Lattice& lattice, Random& random) {
  Digits loops;
  for (const Digit& digit : lattice.digits) {
    const int64_t extent = random.Between(1, digit.extent);
    switch (random.Between(0, 4)) {
      case 0:
        loops.push_back({.extent = extent, .stride = digit.stride});
        break;
      case 1:
        loops.push_back({.extent = extent * random.Between(1, 3),
                         .stride = digit.stride * random.Between(1, 2)});
        break;
      case 2:
        if (digit.extent % 2 == 0) {
          loops.push_back(
              {.extent = digit.extent / 2, .stride = 2 * digit.stride});
          loops.push_back({.extent = 2, .stride = digit.stride});
        }
        break;
      default:
        loops.push_back({.extent = digit.extent, .stride = digit.stride});
    }
  }
  Sequence merged = {.base = 0, .digits = loops};
  if (random.Between(0, 1) == 0) Canonicalize(merged);
  return merged.digits;
}

TEST(AffineTest, APlacementStandsForExactlyTheValuesPlaced) {
  Random random(Seed());
  int placed = 0;
  int boxes = 0;
  for (int i = 0; i < 20000; ++i) {
    const Lattice lattice = DrawLattice(random);
    const Sequence all = {.base = lattice.offset, .digits = lattice.digits};
    const Sequence loops = {
        .base = ValueAt(all, random.Between(0, CountOf(all) - 1)) +
                (random.Between(0, 9) == 0 ? 1 : 0),
        .digits = DrawLoops(lattice, random)};
    Placement placement;
    if (!Place(lattice, loops.base, loops.digits, placement)) continue;
    ++placed;
    // The placement's coordinates, as a sequence of values again.
    Sequence seen = {.base = lattice.offset, .digits = {}};
    for (size_t d = 0; d < placement.start.size(); ++d) {
      seen.base += placement.start[d] * lattice.digits[d].stride;
    }
    for (const Placement::Move& move : placement.moves) {
      seen.digits.push_back(
          {.extent = move.extent,
           .stride = move.stride * lattice.digits[move.dimension].stride});
    }
    EXPECT_EQ(ValuesOf(seen), ValuesOf(loops));
    const Box hull = placement.Hull();
    for (size_t d = 0; d < hull.lo.size(); ++d) {
      EXPECT_GE(hull.lo[d], 0);
      EXPECT_LE(hull.hi[d], lattice.digits[d].extent);
    }
    const std::vector<int64_t> values = ValuesOf(loops);
    const std::set<int64_t> distinct(values.begin(), values.end());
    const bool fills = distinct.size() == values.size() &&
                       static_cast<int64_t>(values.size()) == VolumeOf(hull);
    EXPECT_EQ(placement.FillsHull(), fills);
    boxes += fills ? 1 : 0;
  }
  EXPECT_GT(placed, 2000);
  EXPECT_GT(boxes, 1000);
}

TEST(AffineTest, LatticesOwnLoopsAlwaysPlace) {
  Random random(Seed());
  for (int i = 0; i < 2000; ++i) {
    const Lattice lattice = DrawLattice(random);
    Sequence loops = {.base = lattice.offset, .digits = lattice.digits};
    Canonicalize(loops);
    Placement placement;
    ASSERT_TRUE(Place(lattice, loops.base, loops.digits, placement));
    EXPECT_TRUE(placement.FillsHull());
  }
}

TEST(AffineTest, IntersectionIsThatOfTheValues) {
  Random random(Seed());
  int shared = 0;
  for (int i = 0; i < 20000; ++i) {
    const Lattice a = DrawLattice(random);
    Lattice b = DrawLattice(random);
    b.offset += random.Between(0, 20);
    const std::vector<int64_t> a_values =
        ValuesOf({.base = a.offset, .digits = a.digits});
    const std::set<int64_t> in_a(a_values.begin(), a_values.end());
    bool expected = false;
    for (int64_t value : ValuesOf({.base = b.offset, .digits = b.digits})) {
      expected = expected || in_a.contains(value);
    }
    EXPECT_EQ(Intersect(a, b),
              expected ? Intersection::kShared : Intersection::kEmpty);
    shared += expected ? 1 : 0;
  }
  EXPECT_GT(shared, 2000);
}

TEST(AffineTest, HugeInterleavedLatticesIntersectQuickly) {
  // Rows 0, 2, 4 … and rows 1, 3, 5 … of 2^20 rows of 4096 elements.
  const Digit rows[] = {{.extent = 1 << 19, .stride = 2 * 4096},
                        {.extent = 4096, .stride = 1}};
  const Lattice even = *MakeLattice(0, rows);
  const Lattice odd = *MakeLattice(4096, rows);
  EXPECT_EQ(Intersect(even, odd), Intersection::kEmpty);
  EXPECT_EQ(Intersect(even, *MakeLattice(4095, rows)), Intersection::kShared);
}

// Cuts a space into boxes by random planes, and sometimes breaks the tiling.
std::vector<Box> DrawBoxes(const Box& space, Random& random) {
  std::vector<Box> boxes = {space};
  const int64_t cuts = random.Between(0, 12);
  for (int64_t i = 0; i < cuts && !space.lo.empty(); ++i) {
    Box& box = boxes[static_cast<size_t>(
        random.Between(0, static_cast<int64_t>(boxes.size()) - 1))];
    const auto d = static_cast<size_t>(
        random.Between(0, static_cast<int64_t>(space.lo.size()) - 1));
    if (box.hi[d] - box.lo[d] < 2) continue;
    const int64_t cut = random.Between(box.lo[d] + 1, box.hi[d] - 1);
    Box upper = box;
    upper.lo[d] = cut;
    box.hi[d] = cut;
    boxes.push_back(upper);
  }
  switch (random.Between(0, 3)) {
    case 0:
      boxes.pop_back();
      break;
    case 1: {
      Box& box = boxes.back();
      if (!box.lo.empty() && box.lo[0] > 0) --box.lo[0];
      break;
    }
    default:
      break;
  }
  std::shuffle(boxes.begin(), boxes.end(),
               std::mt19937(static_cast<uint32_t>(random.Between(0, 1 << 20))));
  return boxes;
}

TEST(TilingTest, OverlapsAndGapsAreThoseOfTheElements) {
  Random random(Seed());
  int tilings = 0;
  for (int i = 0; i < 5000; ++i) {
    Box space;
    const int64_t dims = random.Between(0, 3);
    for (int64_t d = 0; d < dims; ++d) {
      space.lo.push_back(0);
      space.hi.push_back(random.Between(1, 6));
    }
    const std::vector<Box> boxes = DrawBoxes(space, random);
    bool overlaps = false;
    std::optional<absl::InlinedVector<int64_t, 6>> first_open;
    for (int64_t k = 0; k < VolumeOf(space); ++k) {
      absl::InlinedVector<int64_t, 6> at(space.lo.size());
      int64_t rest = k;
      for (size_t d = at.size(); d-- > 0;) {
        at[d] = rest % space.hi[d];
        rest /= space.hi[d];
      }
      const auto holders =
          std::count_if(boxes.begin(), boxes.end(), [&](const Box& box) {
            for (size_t d = 0; d < at.size(); ++d) {
              if (at[d] < box.lo[d] || at[d] >= box.hi[d]) return false;
            }
            return true;
          });
      overlaps = overlaps || holders > 1;
      if (holders == 0 && !first_open.has_value()) first_open = at;
    }
    Steps steps(1 << 20);
    const auto found = FindOverlap(
        PointersTo(boxes), [](size_t, size_t) { return true; }, steps);
    EXPECT_FALSE(steps.AreUsedUp());
    EXPECT_EQ(found.has_value(), overlaps);
    if (overlaps) continue;
    EXPECT_EQ(FirstUncovered(space, PointersTo(boxes)), first_open);
    tilings += first_open.has_value() ? 0 : 1;
  }
  EXPECT_GT(tilings, 500);
}

// The boxes of a frame that turns like a pinwheel, around one box for each
// column: no plane separates them, and all columns have the same rows.
std::vector<Box> Pinwheel(int64_t columns) {
  const int64_t last = columns + 1;
  std::vector<Box> boxes = {{{0, 0}, {1, last}},
                            {{0, last}, {last, last + 1}},
                            {{last, 1}, {last + 1, last + 1}},
                            {{1, 0}, {last + 1, 1}}};
  for (int64_t column = 1; column <= columns; ++column) {
    boxes.push_back({{1, column}, {last, column + 1}});
  }
  return boxes;
}

TEST(TilingTest, BoxesThatNoPlaneSeparatesUseUpTheSteps) {
  const std::vector<Box> few = Pinwheel(100);
  const std::vector<Box> many = Pinwheel(10000);
  const auto is_overlap = [](size_t, size_t) { return true; };
  Steps steps(1 << 20);
  EXPECT_EQ(FindOverlap(PointersTo(few), is_overlap, steps), std::nullopt);
  EXPECT_FALSE(steps.AreUsedUp());
  EXPECT_EQ(FindOverlap(PointersTo(many), is_overlap, steps), std::nullopt);
  EXPECT_TRUE(steps.AreUsedUp());
}

// Each plane separates one box, from a group that needs another plane.
TEST(TilingTest, CutsWithinCutsAreNoDeepRecursion) {
  constexpr int64_t kBoxes = kSanitized ? 2000 : 200000;
  std::vector<Box> boxes;
  for (int64_t i = 0; i < kBoxes; ++i) {
    const bool is_row = i % 2 == 0;
    const int64_t at = i / 2;
    boxes.push_back(is_row ? Box{{at, at}, {at + 1, kBoxes}}
                           : Box{{at + 1, at}, {kBoxes, at + 1}});
  }
  Steps steps(uint64_t{1} << 28);
  EXPECT_EQ(FindOverlap(
                PointersTo(boxes), [](size_t, size_t) { return true; }, steps),
            std::nullopt);
}

// Quadratic, this would take minutes.
TEST(TilingTest, AGapAmongManyBoxesIsFound) {
  constexpr int64_t kBoxes = 300000;
  Box space{{0, 0}, {kBoxes, 2}};
  std::vector<Box> boxes;
  for (int64_t i = 0; i < kBoxes; ++i) {
    boxes.push_back({{i, 0}, {i + 1, i + 1 == kBoxes ? 1 : 2}});
  }
  const absl::InlinedVector<int64_t, 6> last = {kBoxes - 1, 1};
  EXPECT_EQ(FirstUncovered(space, PointersTo(boxes)), last);
}

}  // namespace
}  // namespace refit::proof
