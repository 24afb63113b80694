#include "runner/generated_values.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace refit {
namespace {

uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// 32 well mixed bits of an index; 32-bit arithmetic only, which CPUs have as
// vectors.
inline uint32_t Mix32(uint32_t index, uint32_t multiplier, uint32_t addend) {
  uint32_t x = index * multiplier + addend;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Sign and mantissa from the mixed bits; the exponent, whose field is
// `exponent_bits` wide, from 16 values around that of 1.
template <typename Bits, int exponent_bits>
inline Bits FloatBits(uint64_t mixed_bits) {
  // No wider than needed: vectors of 32-bit integers hold twice as many.
  using Word = std::conditional_t<sizeof(Bits) == 8, uint64_t, uint32_t>;
  constexpr int kWidth = 8 * sizeof(Bits);
  constexpr int kMantissaBits = kWidth - 1 - exponent_bits;
  constexpr Word kBias = (Word{1} << (exponent_bits - 1)) - 1;
  constexpr Word kMantissaMask = (Word{1} << kMantissaBits) - 1;
  const Word mixed = static_cast<Word>(mixed_bits);
  const Word sign = mixed >> (kWidth - 1) & 1;
  const Word exponent =
      kBias - 7 + (mixed >> (kWidth - 1 - exponent_bits) & 15);
  return static_cast<Bits>(sign << (kWidth - 1) | exponent << kMantissaBits |
                           (mixed & kMantissaMask));
}

inline uint16_t Bf16Bits(uint32_t mixed) {
  return FloatBits<uint16_t, 8>(mixed);
}
inline uint16_t Fp16Bits(uint32_t mixed) {
  return FloatBits<uint16_t, 5>(mixed);
}
inline uint32_t Fp32Bits(uint32_t mixed) {
  return FloatBits<uint32_t, 8>(mixed);
}
inline uint64_t Fp64Bits(uint32_t mixed) {
  return FloatBits<uint64_t, 11>(mixed * 0x9e3779b97f4a7c15u);
}
inline uint64_t Int64Bits(uint32_t mixed) {
  return mixed * 0x9e3779b97f4a7c15u;
}
inline uint32_t Int32Bits(uint32_t mixed) { return mixed; }
inline uint16_t Int16Bits(uint32_t mixed) {
  return static_cast<uint16_t>(mixed);
}
inline uint8_t ByteBits(uint32_t mixed) { return static_cast<uint8_t>(mixed); }
inline uint8_t BoolBits(uint32_t mixed) { return mixed & 1; }

template <typename Bits, Bits (*bits_of)(uint32_t)>
void Generate(uint64_t seed, const IndexRange& range, std::byte* out) {
  for (size_t done = 0; done < range.count;) {
    // Indices that agree in their high half share the two constants.
    const uint64_t first = range.first + done * range.stride;
    const uint64_t high = Mix64(seed ^ Mix64(first >> 32));
    const auto multiplier = static_cast<uint32_t>(high) | 1;
    const auto addend = static_cast<uint32_t>(high >> 32);
    const uint64_t same_high =
        ((first | 0xffffffffu) - first) / range.stride + 1;
    const size_t count = same_high < range.count - done
                             ? static_cast<size_t>(same_high)
                             : range.count - done;
    const auto low = static_cast<uint32_t>(first);
    const auto stride = static_cast<uint32_t>(range.stride);
    std::byte* block = out + done * sizeof(Bits);
    for (size_t i = 0; i < count; ++i) {
      const Bits bits = bits_of(
          Mix32(low + static_cast<uint32_t>(i) * stride, multiplier, addend));
      std::memcpy(block + i * sizeof(Bits), &bits, sizeof(Bits));
    }
    done += count;
  }
}

// The bit of a value that a training step inverts.
uint32_t ChangingBit(DType dtype) {
  // bf16's last, which is the last that both 16-bit formats keep.
  if (dtype == DType::kFp32) return 16;
  return dtype == DType::kFp16 ? 3 : 0;
}

}  // namespace

void ChangeValues(uint64_t seed, DType dtype, const IndexRange& range,
                  const ValueSteps& steps, void* values) {
  constexpr size_t kBlock = 1024;
  const auto below = static_cast<uint64_t>(
      std::llround(steps.change_rate * 4294967296.0));  // of 2^32
  const size_t element_bytes = DTypeBytes(dtype);
  const uint32_t bit = ChangingBit(dtype);
  const auto inverts = static_cast<std::byte>(1u << (bit % 8));
  auto* const bytes = static_cast<std::byte*>(values) + bit / 8;
  uint32_t mixed[kBlock];
  for (uint32_t step = 1; step <= steps.count; ++step) {
    for (size_t done = 0; done < range.count; done += kBlock) {
      const IndexRange block = {.first = range.first + done * range.stride,
                                .stride = range.stride,
                                .count = std::min(kBlock, range.count - done)};
      Generate<uint32_t, Int32Bits>(Mix64(seed + step), block,
                                    reinterpret_cast<std::byte*>(mixed));
      for (size_t i = 0; i < block.count; ++i) {
        if (mixed[i] < below) bytes[(done + i) * element_bytes] ^= inverts;
      }
    }
  }
}

uint64_t TensorSeed(std::string_view tensor_name) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : tensor_name) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  }
  return Mix64(hash);
}

void GenerateValues(uint64_t seed, DType dtype, const IndexRange& range,
                    void* out) {
  auto* bytes = static_cast<std::byte*>(out);
  switch (dtype) {
    case DType::kBf16:
      return Generate<uint16_t, Bf16Bits>(seed, range, bytes);
    case DType::kFp16:
      return Generate<uint16_t, Fp16Bits>(seed, range, bytes);
    case DType::kFp32:
      return Generate<uint32_t, Fp32Bits>(seed, range, bytes);
    case DType::kFp64:
      return Generate<uint64_t, Fp64Bits>(seed, range, bytes);
    case DType::kInt64:
      return Generate<uint64_t, Int64Bits>(seed, range, bytes);
    case DType::kInt32:
      return Generate<uint32_t, Int32Bits>(seed, range, bytes);
    case DType::kInt16:
      return Generate<uint16_t, Int16Bits>(seed, range, bytes);
    case DType::kInt8:
    case DType::kUint8:
    case DType::kFp8E4m3:
    case DType::kFp8E5m2:
      return Generate<uint8_t, ByteBits>(seed, range, bytes);
    case DType::kBool:
      return Generate<uint8_t, BoolBits>(seed, range, bytes);
    case DType::kUnspecified:
      break;
  }
  assert(false);  // PlanFile has refused it
}

}  // namespace refit
