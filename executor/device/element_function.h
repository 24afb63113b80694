// The functions that post-hooks apply to elements: one arithmetic for every
// device, so that all give the same bits.
//
// An element is widened to fp64. Functions follow each other there; the last
// result is rounded to fp32, and from there to the tensor's dtype, to nearest
// even each time. exp and log are exact to some 2^-52 before that. Sources that
// include this are compiled without contracting products and sums.
#ifndef REFIT_EXECUTOR_DEVICE_ELEMENT_FUNCTION_H_
#define REFIT_EXECUTOR_DEVICE_ELEMENT_FUNCTION_H_

#include <bit>
#include <cstdint>
#include <limits>

#include "executor/device/cast.h"
#include "refit/device_types.h"

namespace refit {

// ln 2 in two parts. Products of the first with an exponent are exact.
inline constexpr double kLn2High = 6.93147180369123816490e-01;
inline constexpr double kLn2Low = 1.90821492927058770002e-10;

// 2^exponent, for an exponent of a normal number.
constexpr double PowerOfTwo(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(1023 + exponent) << 52);
}

constexpr double ExpOf(double x) {
  if (!(x == x)) return x;
  // No fp32 is so large, and none so small.
  if (x > 90) return std::numeric_limits<double>::infinity();
  if (x < -105) return 0;
  const int n =
      static_cast<int>(x * 1.44269504088896338700e+00 + (x < 0 ? -0.5 : 0.5));
  const double r = (x - n * kLn2High) - n * kLn2Low;
  double sum = 1;
  for (int term = 14; term > 0; --term) sum = 1 + r / term * sum;
  return sum * PowerOfTwo(n);
}

// Of the value of an fp32, which is a normal number in fp64.
constexpr double LogOf(double x) {
  if (!(x > 0)) {
    return x == 0 ? -std::numeric_limits<double>::infinity()
                  : std::numeric_limits<double>::quiet_NaN();
  }
  if (x == std::numeric_limits<double>::infinity()) return x;
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  double mantissa =
      std::bit_cast<double>((bits & 0x000fffffffffffffu) | 0x3ff0000000000000u);
  if (mantissa > 1.41421356237309504880) {
    mantissa *= 0.5;
    ++exponent;
  }
  // log m = 2 artanh((m - 1) / (m + 1)).
  const double s = (mantissa - 1) / (mantissa + 1);
  const double square = s * s;
  double sum = 0;
  for (int power = 23; power > 1; power -= 2)
    sum = (sum + 1.0 / power) * square;
  return exponent * kLn2High + (exponent * kLn2Low + 2 * s * (sum + 1));
}

constexpr double ValueOf(ElementFunction function, double x) {
  switch (function) {
    case ElementFunction::kAddOne:
      return x + 1;
    case ElementFunction::kSubtractOne:
      return x - 1;
    case ElementFunction::kNegativeExp:
      return -ExpOf(x);
    case ElementFunction::kLogOfNegative:
      return LogOf(-x);
  }
  return x;
}

// One element's functions, on the bits of an fp32. Devices do not agree on the
// sign of a NaN that they make, so all become one.
template <typename Functions>
constexpr uint32_t AppliedTo(uint32_t fp32_bits, const Functions* functions,
                             uint32_t count) {
  double value = std::bit_cast<float>(fp32_bits);
  for (uint32_t i = 0; i < count; ++i) value = ValueOf(functions[i], value);
  const uint32_t result = std::bit_cast<uint32_t>(static_cast<float>(value));
  return (result & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : result;
}

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_ELEMENT_FUNCTION_H_
