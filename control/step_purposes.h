// What ranks begin steps for, and how they are told that one has failed.
#ifndef REFIT_CONTROL_STEP_PURPOSES_H_
#define REFIT_CONTROL_STEP_PURPOSES_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "refit/control_plane.h"

namespace refit {

// What the collective is called to which ranks may come late and have missed
// nothing.
inline constexpr std::string_view kHandshake = "handshake";

// `status` of `rank`, as the others are told of it.
absl::Status AbortedBy(int32_t rank, const absl::Status& status);

// What the ranks begin the newest step for: a refit is checked on all ranks or
// on none.
class StepPurposes {
 public:
  // Error: kFailedPrecondition, another rank said that `step` is for something
  // else; it names both.
  absl::Status Add(int32_t rank, uint64_t step, StepPurpose purpose);

 private:
  uint64_t step_ = 0;  // the newest with a purpose
  int32_t rank_ = 0;   // the first that said so
  StepPurpose purpose_ = StepPurpose::kOther;
};

}  // namespace refit

#endif  // REFIT_CONTROL_STEP_PURPOSES_H_
