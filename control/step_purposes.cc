#include "control/step_purposes.h"

#include "absl/strings/str_cat.h"

namespace refit {

absl::Status AbortedBy(int32_t rank, const absl::Status& status) {
  const bool late = status.code() == absl::StatusCode::kDeadlineExceeded;
  return absl::Status(
      late ? absl::StatusCode::kDeadlineExceeded : absl::StatusCode::kAborted,
      absl::StrCat("aborted by rank ", rank, ": ", status.message()));
}

absl::Status StepPurposes::Add(int32_t rank, uint64_t step,
                               StepPurpose purpose) {
  if (purpose == StepPurpose::kOther || step < step_) return absl::OkStatus();
  if (step > step_) {
    step_ = step;
    rank_ = rank;
    purpose_ = purpose;
  }
  if (purpose == purpose_) return absl::OkStatus();
  const bool checks = purpose == StepPurpose::kCheck;
  return absl::FailedPreconditionError(absl::StrCat(
      "check differs: rank ", checks ? rank : rank_,
      " runs a refit that is checked, rank ", checks ? rank_ : rank,
      " one that is not; give check on all ranks or on none"));
}

}  // namespace refit
