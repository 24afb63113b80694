#include "plan/text/strided_box.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "plan/diff/element_sum.h"

namespace refit {
namespace {

std::set<uint64_t> ElementsOf(const StridedBox& box) {
  std::set<uint64_t> elements = {box.offset};
  for (const StridedBox::Dim& dim : box.dims) {
    std::set<uint64_t> next;
    for (const uint64_t element : elements) {
      for (uint64_t i = 0; i < dim.extent; ++i)
        next.insert(element + i * dim.stride);
    }
    elements = std::move(next);
  }
  return elements;
}

StridedBox RandomBox(std::mt19937& random) {
  StridedBox box = {.offset = random() % 40, .dims = {}};
  const size_t dims = random() % 4;
  for (size_t dim = 0; dim < dims; ++dim)
    box.Add(1 + random() % 4, 1 + random() % 30);
  return box;
}

TEST(StridedBoxTest, NormalizingKeepsTheElements) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    StridedBox box = RandomBox(random);
    const std::set<uint64_t> elements = ElementsOf(box);
    box.Normalize();
    EXPECT_EQ(ElementsOf(box), elements);
  }
}

TEST(StridedBoxTest, BoxesMeetWhenTheyShareAnElement) {
  std::mt19937 random(2);
  int meetings = 0;
  for (int i = 0; i < 20000; ++i) {
    StridedBox a = RandomBox(random);
    StridedBox b = RandomBox(random);
    a.Normalize();
    b.Normalize();
    const std::set<uint64_t> elements_a = ElementsOf(a);
    bool share = false;
    for (const uint64_t element : ElementsOf(b))
      share = share || elements_a.count(element) > 0;
    ASSERT_EQ(Meet(a, b), share) << "case " << i;
    meetings += share ? 1 : 0;
  }
  EXPECT_GT(meetings, 2000);
  EXPECT_LT(meetings, 18000);
}

TEST(ElementSumTest, GeometricSumIsTheSumOfPowers) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 50; ++i) {
    const Residue ratio(random());
    Residue sum;
    Residue power(1);
    for (uint64_t count = 0; count < 40; ++count) {
      ASSERT_EQ(GeometricSum(ratio, count), sum);
      sum += power;
      power *= ratio;
    }
  }
  EXPECT_EQ(GeometricSum(Residue(1), 1000).value(), 1000u);
}

TEST(ElementSumTest, ResiduesMultiplyModuloThePrime) {
  const Residue last(Residue::kModulus - 1);
  EXPECT_EQ((last * last).value(), 1u);
  EXPECT_EQ((last + Residue(1)).value(), 0u);
  EXPECT_EQ((Residue(uint64_t{1} << 60) * Residue(4)).value(), 2u);
}

}  // namespace
}  // namespace refit
