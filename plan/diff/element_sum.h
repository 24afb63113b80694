// Sums that stand for sets of elements, however boxes cut them.
//
// An element weighs a product of powers, base^coordinate, modulo the prime
// 2^61 - 1; a set weighs the sum over its elements. So equal sets weigh the
// same whatever boxes they were cut into and whatever order these stand in,
// different ones differ but for a chance of about 2^-61, and an affine box
// weighs a product of geometric series, which takes microseconds however many
// elements it has. This compares plans; it proves nothing against an adversary.
#ifndef REFIT_PLAN_DIFF_ELEMENT_SUM_H_
#define REFIT_PLAN_DIFF_ELEMENT_SUM_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "plan/plan_file.h"

namespace refit {

// A number modulo 2^61 - 1.
class Residue {
 public:
  static constexpr uint64_t kModulus = (uint64_t{1} << 61) - 1;

  constexpr Residue() = default;
  constexpr explicit Residue(uint64_t value) : value_(value % kModulus) {}

  constexpr uint64_t value() const { return value_; }

  friend constexpr Residue operator+(Residue a, Residue b) {
    return Residue(a.value_ + b.value_);
  }
  friend constexpr Residue operator*(Residue a, Residue b) {
    const unsigned __int128 product =
        static_cast<unsigned __int128>(a.value_) * b.value_;
    // 2^61 is 1 modulo 2^61 - 1.
    return Residue(static_cast<uint64_t>(product & kModulus) +
                   static_cast<uint64_t>(product >> 61));
  }
  Residue& operator+=(Residue other) { return *this = *this + other; }
  Residue& operator*=(Residue other) { return *this = *this * other; }
  friend bool operator==(Residue, Residue) = default;
  friend auto operator<=>(Residue, Residue) = default;

 private:
  uint64_t value_ = 0;
};

// 1 + ratio + … + ratio^(count-1).
Residue GeometricSum(Residue ratio, uint64_t count);

// A weight for a name or a word.
Residue WeightOf(std::string_view text);

// What one copy reads or writes in one tensor of a stack.
struct CopyPart {
  uint32_t slot = 0;
  uint32_t tensor = 0;  // ordinal in the stack
  Residue content;      // which elements, as which wire dtype
  Residue packing;      // which element at which byte of the message
  uint64_t bytes = 0;   // staged
};

// Appends the parts of `copy`, whose buffer has tensors of `tensor_elements`
// elements.
void AppendCopyParts(const fb::Body& body, const fb::Copy& copy,
                     uint64_t tensor_elements, std::vector<CopyPart>& parts);

// For each tensor of the stack, the sum over its elements of what they hold:
// an element of a param, named by `param_weights` (by param and its ordinal)
// and its coordinates; a fill; a skip with its reason and detail.
std::vector<Residue> LayoutSums(
    const fb::Body& body, const fb::Buffer& buffer,
    const std::vector<std::vector<Residue>>& param_weights);

}  // namespace refit

#endif  // REFIT_PLAN_DIFF_ELEMENT_SUM_H_
