// What calls of an executor have in common: how long they last, and how their
// errors read.
#ifndef REFIT_EXECUTOR_EXECUTOR_CALLS_H_
#define REFIT_EXECUTOR_EXECUTOR_CALLS_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "refit/executor.h"

namespace refit {

// A timeout too long for the clock means no deadline.
inline Deadline DeadlineAfter(std::chrono::nanoseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point now = Clock::now();
  return timeout > Clock::time_point::max() - now ? Clock::time_point::max()
                                                  : now + timeout;
}

inline absl::Status WithRank(const absl::Status& status, int32_t rank) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat("rank ", rank, ": ", status.message()));
}

// What to call before `call`, which the rank called while in `state`.
absl::Status OutOfOrder(int32_t rank, const std::string& call,
                        ExecutorState state);

}  // namespace refit

#endif  // REFIT_EXECUTOR_EXECUTOR_CALLS_H_
