// Casts among bf16, fp16 and fp32: round to nearest even; NaN stays a quiet NaN
// with its sign; what is too large becomes infinity.
#ifndef REFIT_EXECUTOR_DEVICE_CAST_H_
#define REFIT_EXECUTOR_DEVICE_CAST_H_

#include <bit>
#include <cstddef>
#include <cstdint>

#include "plan/element_types.h"

namespace refit {

// Every function below is free of branches, so that a loop over it becomes
// vector code.

constexpr uint32_t Fp32FromBf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  const bool nan = (wide & 0x7fffffffu) > 0x7f800000u;
  return wide | (nan ? 0x00400000u : 0u);
}

constexpr uint16_t Bf16FromFp32(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(nan ? quiet : rounded);
}

constexpr uint32_t Fp32FromFp16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
  // The mantissa as an integer times 2^-24, the weight of its last bit.
  const uint32_t subnormal = std::bit_cast<uint32_t>(
      static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t special = 0x7f800000u | (magnitude << 13) |
                           (magnitude > 0x7c00u ? 0x00400000u : 0u);
  const uint32_t finite = magnitude < 0x0400u ? subnormal : normal;
  return sign | (magnitude >= 0x7c00u ? special : finite);
}

constexpr uint16_t Fp16FromFp32(uint32_t bits) {
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal =
      (magnitude - ((127u - 15u) << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >>
      13;
  // Adding 0.5, whose last bit weighs 2^-24, rounds to the subnormals' grid.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) -
      std::bit_cast<uint32_t>(0.5f);
  const uint32_t quiet = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
  const uint32_t finite = magnitude < 0x38800000u   ? subnormal
                          : magnitude < 0x47800000u ? normal
                                                    : 0x7c00u;
  return static_cast<uint16_t>(sign |
                               (magnitude > 0x7f800000u ? quiet : finite));
}

// Casts `count` contiguous elements; the ranges need no alignment and do not
// overlap.
using CastFunction = void (*)(void* to, const void* from, size_t count);

// Requires IsSupportedCast(from, to).
CastFunction FindCast(DType from, DType to);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CAST_H_
