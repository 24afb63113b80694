// The arithmetic of state digests (refit/state_digest.h has the formula): one
// source for every device.
#ifndef REFIT_EXECUTOR_DEVICE_ELEMENT_DIGEST_H_
#define REFIT_EXECUTOR_DEVICE_ELEMENT_DIGEST_H_

#include <cstdint>

namespace refit {

inline constexpr uint64_t kDigestPrime = (uint64_t{1} << 61) - 1;
inline constexpr uint64_t kDigestBlockBytes = 16;

// The multiplier of a word has two digits of 29 bits. Eight products of a word
// and a digit add up in 64 bits.
inline constexpr uint32_t kDigestDigitBits = 29;
inline constexpr uint32_t kDigestDigitMask = (1u << kDigestDigitBits) - 1;
inline constexpr uint32_t kDigestProductsMax = 8;

// The M of the formula.
constexpr uint64_t DigestWordMask(uint32_t word) {
  return word == 0   ? 0x243f6a8885a308d3u
         : word == 1 ? 0x13198a2e03707344u
         : word == 2 ? 0xa4093822299f31d0u
                     : 0x082efa98ec4e6c89u;
}

// The x of the formula of one block is this much more than that of the block
// before.
inline constexpr uint64_t kDigestBlockStep = 0x9e3779b97f4a7c15u;

// The r of the formula.
constexpr uint64_t DigestBlockKey(uint64_t x) {
  const uint64_t y = x ^ 0x452821e638d01377u;
#ifdef __CUDA_ARCH__
  return (x * y) ^ __umul64hi(x, y);
#else
  const unsigned __int128 product = static_cast<unsigned __int128>(x) * y;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
#endif
}

constexpr uint64_t DigestBlockKey(uint64_t param_key, uint64_t block) {
  return DigestBlockKey(param_key + block * kDigestBlockStep);
}

// The digits of the c of the formula.
constexpr uint32_t DigestLowDigit(uint64_t block_key, uint32_t word) {
  return ((static_cast<uint32_t>(block_key) ^
           static_cast<uint32_t>(DigestWordMask(word))) &
          kDigestDigitMask) |
         1u;
}

constexpr uint32_t DigestHighDigit(uint64_t block_key, uint32_t word) {
  return (static_cast<uint32_t>(block_key >> kDigestDigitBits) ^
          static_cast<uint32_t>(DigestWordMask(word) >> kDigestDigitBits)) &
         kDigestDigitMask;
}

// What x is mod p, but for a multiple: below 2^61 + 8.
constexpr uint64_t DigestFold(uint64_t x) {
  return (x & kDigestPrime) + (x >> 61);
}

// Products of words with both digits, kDigestProductsMax of each at most.
struct DigestProducts {
  uint64_t low = 0;
  uint64_t high = 0;

  constexpr void Add(uint32_t word_bits, uint64_t block_key, uint32_t word) {
    low += uint64_t{word_bits} * DigestLowDigit(block_key, word);
    high += uint64_t{word_bits} * DigestHighDigit(block_key, word);
  }
  // low + 2^29 high mod p, but for a multiple: below 2^62 + 2^33.
  constexpr uint64_t Folded() const {
    return DigestFold(low) + ((high & 0xffffffffu) << kDigestDigitBits) +
           (high >> 32);
  }
};

// `x` mod p, x being any sum of folded values.
constexpr uint64_t DigestReduced(uint64_t x) {
  x = DigestFold(x);
  return x >= kDigestPrime ? x - kDigestPrime : x;
}

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_ELEMENT_DIGEST_H_
