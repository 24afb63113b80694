// A digest of the values that tensors hold, whatever their layout.
//
// The digest of a param is a sum over its elements, so each rank adds up what
// it holds. Sums of two sides, replicas or plans are equal if the values are,
// bit for bit, provided that each counts every element once.
//
// Take the param as one contiguous row-major tensor of its dtype, little
// endian. Block b is its bytes [16 b, 16 b + 16), and w[b][k] is 32-bit word k
// of that block, with zeros behind the last byte. All arithmetic is unsigned:
//
//   p       = 2^61 - 1, a prime
//   sum     = sum over b and k of w[b][k] * c[b][k]               mod p
//   c[b][k] = (r[b] ^ M[k]) mod 2^58, its lowest bit set to 1
//   r[b]    = the two 64-bit halves of x * (x ^ K), xored, where
//   x       = key + b * 0x9e3779b97f4a7c15                        mod 2^64
//   key     = low 64 bits of XXH3-128 of the param's own name
//   K       = 0x452821e638d01377
//   M       = 0x243f6a8885a308d3, 0x13198a2e03707344,
//             0xa4093822299f31d0, 0x082efa98ec4e6c89
//
// A change within one 32-bit word is always seen: the sum moves by d * c with
// 0 < |d| < 2^32 and 0 < c < 2^58, and p divides no such product. So is a swap
// of two different words of one block. The c of different blocks behave as
// random numbers of 57 bits; so any other change, swapped elements and swapped
// blocks among them, is missed with a probability of about 2^-57. The digest
// guards against faults. It is no signature: who knows the formula can make two
// states with one sum.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_STATE_DIGEST_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_STATE_DIGEST_H_

#include <cstdint>
#include <string>

#include "plan/dtype.h"

namespace refit {

struct StateDigest {
  uint64_t sum = 0;       // below 2^61 - 1
  uint64_t elements = 0;  // how many were counted

  // Adds what other ranks, or other params, counted.
  StateDigest& operator+=(const StateDigest& other);
  friend bool operator==(const StateDigest&, const StateDigest&) = default;
};

// What a rank holds of one param.
struct ParamDigest {
  std::string param;  // as the checkpoint names it
  // Of the tensors that hold it. Digests of different dtypes do not compare.
  DType dtype = DType::kUnspecified;
  StateDigest digest;

  friend bool operator==(const ParamDigest&, const ParamDigest&) = default;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_STATE_DIGEST_H_
