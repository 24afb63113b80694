#include "runner/generated_values.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <set>
#include <vector>

#include "executor/device/cast.h"

namespace refit {
namespace {

std::vector<uint16_t> Bf16Values(const char* name, const IndexRange& range) {
  std::vector<uint16_t> values(range.count);
  GenerateValues(TensorSeed(name), DType::kBf16, range, values.data());
  return values;
}

TEST(GeneratedValuesTest, ValueDependsOnNameAndIndexOnly) {
  const auto all = Bf16Values("a", {.count = 3000});
  const auto strided =
      Bf16Values("a", {.first = 11, .stride = 7, .count = 100});
  for (size_t i = 0; i < strided.size(); ++i) {
    EXPECT_EQ(strided[i], all[11 + 7 * i]);
  }
  EXPECT_NE(all, Bf16Values("b", {.count = 3000}));
}

TEST(GeneratedValuesTest, IndicesBeyond32BitsHaveValuesOfTheirOwn) {
  const uint64_t border = uint64_t{1} << 32;
  const auto across = Bf16Values("a", {.first = border - 50, .count = 100});
  const auto beyond = Bf16Values("a", {.first = border, .count = 50});
  EXPECT_TRUE(std::equal(beyond.begin(), beyond.end(), across.begin() + 50));
  EXPECT_NE(beyond, Bf16Values("a", {.first = 0, .count = 50}));
}

TEST(GeneratedValuesTest, NeighboursRarelyAgree) {
  const auto values = Bf16Values("a", {.count = 4096});
  for (const size_t distance : {1, 2, 64, 128, 1024}) {
    int equal = 0;
    for (size_t i = distance; i < values.size(); ++i) {
      equal += values[i] == values[i - distance];
    }
    EXPECT_LT(equal, 12) << distance;  // one is expected
  }
}

TEST(GeneratedValuesTest, FloatsAreFiniteInEveryFloatType) {
  for (const DType dtype : {DType::kBf16, DType::kFp16}) {
    std::vector<uint16_t> values(10000);
    GenerateValues(TensorSeed("a"), dtype, {.count = values.size()},
                   values.data());
    for (const uint16_t bits : values) {
      const float value = std::bit_cast<float>(
          dtype == DType::kBf16 ? Fp32FromBf16(bits) : Fp32FromFp16(bits));
      EXPECT_GE(std::fabs(value), 0x1p-7f);
      EXPECT_LE(std::fabs(value), 0x1p9f);
    }
  }
  std::vector<float> values(10000);
  GenerateValues(TensorSeed("a"), DType::kFp32, {.count = values.size()},
                 values.data());
  for (const float value : values) {
    EXPECT_GE(std::fabs(value), 0x1p-7f);
    EXPECT_LE(std::fabs(value), 0x1p9f);
  }
}

}  // namespace
}  // namespace refit
