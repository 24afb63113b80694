// Steps: how much work a proof may be.
#ifndef REFIT_PLAN_PROOF_STEPS_H_
#define REFIT_PLAN_PROOF_STEPS_H_

#include <cstdint>

namespace refit::proof {

// Ranks share lists and boxes overlap in many ways, so a small file could make
// a proof quadratic in its size. The proof takes steps, some nanoseconds each,
// and refuses a plan that needs more than it may.
class Steps {
 public:
  explicit Steps(uint64_t most) : most_(most), left_(most) {}

  // Returns false if fewer than `steps` are left, and from then on.
  bool Take(uint64_t steps) {
    left_ = steps < left_ ? left_ - steps : 0;
    return left_ > 0;
  }
  bool AreUsedUp() const { return left_ == 0; }
  uint64_t most() const { return most_; }

 private:
  uint64_t most_;
  uint64_t left_;
};

}  // namespace refit::proof

#endif  // REFIT_PLAN_PROOF_STEPS_H_
