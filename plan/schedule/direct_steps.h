// In which order the bytes of a direct round come.
#ifndef REFIT_PLAN_SCHEDULE_DIRECT_STEPS_H_
#define REFIT_PLAN_SCHEDULE_DIRECT_STEPS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/plan_file.h"
#include "plan/schedule/copy_batch.h"

namespace refit {

// A sender's bytes come to a receiver in steps of about as many bytes, in the
// order of the receiver's tensors. So a checked refit digests what is there
// while the rest comes (executor/digest/arrivals.h). Both ends find the steps
// in the plan.
inline constexpr uint32_t kDirectSteps = 8;

// Whether direct rounds of the plan have steps: not where ranks share a GPU,
// which take turns on it, and not where values are quantized on their way.
bool HasDirectSteps(const PlanFile& plan);

// The steps of what one rank sends another in a direct round.
class DirectSteps {
 public:
  // Of a plan that has steps. `round`: of the plan.
  DirectSteps(const PlanFile& plan, int32_t sender, int32_t receiver,
              uint32_t round);

  // The step at whose end the receiver's entry of its TensorTable has all that
  // the round brings it. Of an entry that the round leaves alone: any.
  uint32_t StepOf(uint64_t entry) const { return steps_[entry]; }
  // Whether the steps are long enough to be told: some 4 * bucket_bytes in all.
  bool AreLong() const { return are_long_; }

 private:
  std::vector<uint32_t> steps_;  // by entry
  bool are_long_ = false;
};

// Cuts the copies of `batch` from number `first_copy` on into those of each
// step. They store into the receiver's tensors, which begin at `first_entry`.
void CutBySteps(const DirectSteps& steps, uint64_t first_entry,
                size_t first_copy, CopyBatch& batch);

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_DIRECT_STEPS_H_
