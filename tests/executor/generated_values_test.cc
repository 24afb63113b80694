#include "runner/generated_values.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
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

TEST(GeneratedValuesTest, ATrainingStepChangesAPartOfTheValues) {
  const uint64_t seed = TensorSeed("a");
  const IndexRange range = {.first = 5, .stride = 3, .count = 50000};
  std::vector<uint16_t> before(range.count);
  GenerateValues(seed, DType::kBf16, range, before.data());
  std::vector<size_t> by_step[3];
  for (uint32_t steps = 1; steps <= 2; ++steps) {
    auto after = before;
    ChangeValues(seed, DType::kBf16, range,
                 {.count = steps, .change_rate = 0.02}, after.data());
    for (size_t i = 0; i < range.count; ++i) {
      if (after[i] == before[i]) continue;
      EXPECT_EQ(after[i] ^ before[i], 1);
      by_step[steps].push_back(i);
    }
    EXPECT_NEAR(static_cast<double>(by_step[steps].size()),
                steps * 0.02 * 50000, 100 * steps);
  }
  EXPECT_NE(by_step[1], by_step[2]);
  for (const double rate : {0.0, 1.0}) {
    auto after = before;
    ChangeValues(seed, DType::kBf16, range, {.count = 1, .change_rate = rate},
                 after.data());
    for (size_t i = 0; i < range.count; ++i) {
      EXPECT_EQ(after[i], before[i] ^ (rate == 1));
    }
  }
}

// A part of the range changes as the whole does.
TEST(GeneratedValuesTest, WhatChangesDependsOnTheIndexOnly) {
  const uint64_t seed = TensorSeed("a");
  const ValueSteps steps = {.count = 3, .change_rate = 0.3};
  std::vector<uint32_t> all(5000, 0), part(700, 0);
  ChangeValues(seed, DType::kInt32, {.count = all.size()}, steps, all.data());
  ChangeValues(seed, DType::kInt32,
               {.first = 1000, .stride = 4, .count = part.size()}, steps,
               part.data());
  for (size_t i = 0; i < part.size(); ++i) {
    EXPECT_EQ(part[i], all[1000 + 4 * i]) << i;
  }
}

TEST(GeneratedValuesTest, NoCastDropsAChange) {
  const DType floats[] = {DType::kBf16, DType::kFp16, DType::kFp32};
  for (const DType from : floats) {
    for (const DType to : floats) {
      if (from == to) continue;
      const IndexRange range = {.count = 5000};
      std::vector<uint32_t> values(range.count), before(range.count),
          after(range.count);
      GenerateValues(TensorSeed("a"), from, range, values.data());
      FindCast(from, to)(reinterpret_cast<std::byte*>(before.data()),
                         reinterpret_cast<std::byte*>(values.data()),
                         range.count);
      ChangeValues(TensorSeed("a"), from, range, {.count = 1, .change_rate = 1},
                   values.data());
      FindCast(from, to)(reinterpret_cast<std::byte*>(after.data()),
                         reinterpret_cast<std::byte*>(values.data()),
                         range.count);
      const auto* a = reinterpret_cast<const std::byte*>(before.data());
      const auto* b = reinterpret_cast<const std::byte*>(after.data());
      const auto size = static_cast<size_t>(DTypeBytes(to));
      for (size_t i = 0; i < range.count; ++i) {
        EXPECT_NE(std::memcmp(a + i * size, b + i * size, size), 0) << i;
      }
    }
  }
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
