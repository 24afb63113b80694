#include "executor/device/cast.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "plan/dtype.h"

namespace refit {
namespace {

// A binary floating-point format, by its definition.
struct Format {
  int exponent_bits;
  int mantissa_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int min_exponent() const { return 1 - bias(); }
};

constexpr Format kBf16{8, 7};
constexpr Format kFp16{5, 10};

// The value of a 16-bit pattern, as a double holds it exactly.
double Value(uint16_t bits, Format format) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent =
      bits >> format.mantissa_bits & ((1 << format.exponent_bits) - 1);
  if (exponent == (1 << format.exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) {
    return sign *
           std::ldexp(mantissa, format.min_exponent() - format.mantissa_bits);
  }
  return sign * std::ldexp(mantissa + (1 << format.mantissa_bits),
                           exponent - format.bias() - format.mantissa_bits);
}

// The nearest pattern to a finite or infinite double, ties to even.
uint16_t Nearest(double value, Format format) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const uint16_t infinity = ((1 << format.exponent_bits) - 1)
                            << format.mantissa_bits;
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return sign | infinity;
  int exponent = magnitude == 0 ? format.min_exponent() : std::ilogb(magnitude);
  exponent = std::max(exponent, format.min_exponent());
  // In units of the last place; nearbyint rounds ties to even.
  const double units =
      std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  // A carry into the exponent and the leading bit of a normal both add up.
  const double pattern = units + std::ldexp(exponent - format.min_exponent(),
                                            format.mantissa_bits);
  return sign |
         (pattern >= infinity ? infinity : static_cast<uint16_t>(pattern));
}

bool IsNan(uint16_t bits, Format format) {
  return std::isnan(Value(bits, format));
}

bool IsQuiet(uint16_t bits, Format format) {
  return bits >> (format.mantissa_bits - 1) & 1;
}

// Values of fp32 at, beside and between the values of a 16-bit format.
std::vector<uint32_t> InterestingFp32() {
  std::vector<uint32_t> patterns;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u,
                               0xffffu, 0x0fffu, 0x1000u, 0x1001u, 0x3000u}) {
      patterns.push_back(high << 16 | low);
    }
  }
  return patterns;
}

void ExpectNearestOfFp32(DType to, Format format) {
  const std::vector<uint32_t> patterns = InterestingFp32();
  std::vector<uint16_t> results(patterns.size());
  FindCast(DType::kFp32, to)(results.data(), patterns.data(), patterns.size());
  for (size_t i = 0; i < patterns.size(); ++i) {
    const float value = std::bit_cast<float>(patterns[i]);
    if (std::isnan(value)) {
      ASSERT_TRUE(IsNan(results[i], format)) << std::hex << patterns[i];
      ASSERT_TRUE(IsQuiet(results[i], format)) << std::hex << patterns[i];
      ASSERT_EQ(results[i] >> 15, patterns[i] >> 31);
    } else {
      ASSERT_EQ(results[i], Nearest(value, format)) << std::hex << patterns[i];
    }
  }
}

TEST(CastTest, Fp32RoundsToTheNearestBf16) {
  ExpectNearestOfFp32(DType::kBf16, kBf16);
}

TEST(CastTest, Fp32RoundsToTheNearestFp16) {
  ExpectNearestOfFp32(DType::kFp16, kFp16);
}

std::vector<uint16_t> AllPatterns() {
  std::vector<uint16_t> patterns(0x10000);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = i;
  return patterns;
}

void ExpectExactFp32(DType from, Format format) {
  const std::vector<uint16_t> patterns = AllPatterns();
  std::vector<uint32_t> results(patterns.size());
  FindCast(from, DType::kFp32)(results.data(), patterns.data(),
                               patterns.size());
  for (size_t i = 0; i < patterns.size(); ++i) {
    const double value = Value(patterns[i], format);
    if (std::isnan(value)) {
      ASSERT_GT(results[i] & 0x7fffffffu, 0x7f800000u) << patterns[i];
      ASSERT_TRUE(results[i] & 0x00400000u) << patterns[i];
      ASSERT_EQ(results[i] >> 31, patterns[i] >> 15u);
    } else {
      ASSERT_EQ(results[i], std::bit_cast<uint32_t>(static_cast<float>(value)))
          << patterns[i];
    }
  }
}

TEST(CastTest, EveryBf16IsExactInFp32) { ExpectExactFp32(DType::kBf16, kBf16); }

TEST(CastTest, EveryFp16IsExactInFp32) { ExpectExactFp32(DType::kFp16, kFp16); }

void ExpectNearest16(DType from, Format from_format, DType to,
                     Format to_format) {
  const std::vector<uint16_t> patterns = AllPatterns();
  std::vector<uint16_t> results(patterns.size());
  FindCast(from, to)(results.data(), patterns.data(), patterns.size());
  for (size_t i = 0; i < patterns.size(); ++i) {
    const double value = Value(patterns[i], from_format);
    if (std::isnan(value)) {
      ASSERT_TRUE(IsNan(results[i], to_format)) << patterns[i];
      ASSERT_TRUE(IsQuiet(results[i], to_format)) << patterns[i];
    } else {
      ASSERT_EQ(results[i], Nearest(value, to_format)) << patterns[i];
    }
  }
}

TEST(CastTest, EveryBf16RoundsToTheNearestFp16) {
  ExpectNearest16(DType::kBf16, kBf16, DType::kFp16, kFp16);
}

TEST(CastTest, EveryFp16RoundsToTheNearestBf16) {
  ExpectNearest16(DType::kFp16, kFp16, DType::kBf16, kBf16);
}

}  // namespace
}  // namespace refit
