// When what a destination rank receives is in its tensors, so that a checked
// refit digests it while the rest comes.
#ifndef REFIT_EXECUTOR_DIGEST_ARRIVALS_H_
#define REFIT_EXECUTOR_DIGEST_ARRIVALS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/plan_file.h"
#include "plan/schedule/direct_pairs.h"
#include "plan/schedule/rank_schedule.h"
#include "plan/schedule/steps.h"

namespace refit {

// Arrivals as ArrivalsUntil counts them (plan/schedule/steps.h).
struct Arrivals {
  std::vector<StepReports> reports;  // by round of the schedule
  // By entry of the rank's TensorTable: after how many arrivals it is digested.
  // Of a destination: when it is as the refit leaves it. Of a source: 0, as
  // soon as the refit begins.
  std::vector<size_t> digested_after;
  size_t count = 0;  // of all
};

// All ranks of the plan take the same `peers` for granted that they have bound
// with.
Arrivals ListArrivals(const PlanFile& plan, int32_t rank,
                      const RankSchedule& schedule, const DirectPairs& peers);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DIGEST_ARRIVALS_H_
