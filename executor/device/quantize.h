// Block quantization to fp8 e4m3: the arithmetic of one element and one scale,
// the same on every device but for the last bit of fp32 scales.
//
// Of a block whose largest magnitude is `amax` (in fp32):
//   fp32    scale = max(amax, 1e-4) / 448, by a Division
//   ue8m0   the same, rounded up to a power of two
//   e8m0    amax / 448 rounded up to a power of two 2^(scale - 127), and at
//           least 2^-127
// and a value is x * (1 / scale), rounded to nearest even, at most 448. A block
// with a NaN has the scale NaN (e8m0: 255), one with an infinity but no NaN an
// infinite one (e8m0: 254, 2^127); what does not stay a number becomes
// NaN, 0x7f.
#ifndef REFIT_EXECUTOR_DEVICE_QUANTIZE_H_
#define REFIT_EXECUTOR_DEVICE_QUANTIZE_H_

#include <bit>
#include <cstdint>

#include "plan/element_types.h"

namespace refit {

inline constexpr uint32_t kFp32Infinity = 0x7f800000u;
inline constexpr uint32_t kFp32QuietNan = 0x7fc00000u;

// Largest magnitudes are found as integers: the bits of fp32 magnitudes are in
// the order of their values, NaN last.
constexpr uint32_t MagnitudeBits(uint32_t fp32_bits) {
  return fp32_bits & 0x7fffffffu;
}

// What is stored as a block's scale (e8m0: in the low byte), and what its
// values are multiplied by.
struct BlockScale {
  uint32_t stored = 0;
  float inverse = 0;
};

// How PyTorch divides a tensor by 448: exactly on CPUs; on GPUs it multiplies
// by 448's reciprocal, rounded to fp32. A scale then differs in its last bit,
// once in two, and a value that lies between two numbers goes to the other.
// Engines quantize with PyTorch what they load, so each device divides as
// PyTorch there.
enum class Division { kExact, kByReciprocal };

// A positive finite fp32, rounded up to a power of two.
constexpr uint32_t RoundUpToPowerOfTwo(uint32_t bits) {
  return (bits + 0x007fffffu) & 0x7f800000u;
}

// 2^(127 - exponent) for an exponent of e8m0.
constexpr float InverseE8m0(uint32_t exponent) {
  return std::bit_cast<float>(exponent == 254 ? 0x00400000u
                                              : (254u - exponent) << 23);
}

constexpr BlockScale ScaleOf(uint32_t amax_bits, fb::ScaleFormat format,
                             Division division) {
  if (format == scale_format::kE8m0) {
    if (amax_bits > kFp32Infinity) {
      return {255, std::bit_cast<float>(kFp32QuietNan)};
    }
    if (amax_bits == kFp32Infinity) return {254, InverseE8m0(254)};
    const uint32_t bits =
        std::bit_cast<uint32_t>(std::bit_cast<float>(amax_bits) / 448.0f);
    // Subnormal numbers up to 2^-127 have that exponent, 0; others 1.
    const uint32_t exponent =
        bits <= 0x00400000u ? 0 : RoundUpToPowerOfTwo(bits) >> 23;
    return {exponent, InverseE8m0(exponent)};
  }
  if (amax_bits > kFp32Infinity) {
    return {kFp32QuietNan, std::bit_cast<float>(kFp32QuietNan)};
  }
  const float amax = std::bit_cast<float>(amax_bits);
  const float least = amax < 1e-4f ? 1e-4f : amax;
  const float scale =
      division == Division::kExact ? least / 448.0f : least * (1.0f / 448.0f);
  uint32_t stored = std::bit_cast<uint32_t>(scale);
  if (format == scale_format::kUe8m0 && stored < kFp32Infinity) {
    stored = RoundUpToPowerOfTwo(stored);
  }
  return {stored, 1.0f / std::bit_cast<float>(stored)};
}

// Rounds to nearest even; what is larger than 448 becomes 448. All NaN become
// one: devices do not agree on the sign of those that they make.
constexpr uint8_t E4m3FromFp32(uint32_t bits) {
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = MagnitudeBits(bits);
  if (magnitude > kFp32Infinity) return 0x7f;
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);
  uint32_t rounded = 0;
  if (magnitude < 0x3c800000u) {
    // Below 2^-6. Adding 2^14, whose last bit weighs 2^-9, rounds to the
    // subnormals' grid.
    rounded =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 16384.0f) -
        std::bit_cast<uint32_t>(16384.0f);
  } else {
    rounded = (magnitude - ((127u - 7u) << 23) + 0x0007ffffu +
               ((magnitude >> 20) & 1u)) >>
              20;
  }
  return static_cast<uint8_t>(sign | rounded);
}

constexpr uint8_t QuantizedValue(uint32_t fp32_bits, float inverse) {
  return E4m3FromFp32(
      std::bit_cast<uint32_t>(std::bit_cast<float>(fp32_bits) * inverse));
}

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_QUANTIZE_H_
