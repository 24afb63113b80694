// One rank of a plan whose ranks meet over a control plane: what a checked run
// does with it, wherever its tensors are.
#ifndef REFIT_RUNNER_WORLD_RANK_H_
#define REFIT_RUNNER_WORLD_RANK_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "plan/plan_file.h"
#include "refit/control_plane.h"
#include "refit/executor.h"
#include "runner/checked_run.h"
#include "runner/value_check.h"

namespace refit {

// 0, 1, … of the plan's ranks.
std::vector<int32_t> AllRanks(const PlanFile& plan);

// Error: kInvalidArgument, the control plane is not of the plan's ranks.
absl::Status CheckWorldSize(const PlanFile& plan, const ControlPlane& control);

class WorldRank {
 public:
  virtual ~WorldRank() = default;

  // What ValueCheck does, of this rank's tensors; nothing on the other side's
  // ranks.
  virtual absl::Status FillSources() = 0;
  virtual absl::Status PoisonDestinations() = 0;
  virtual absl::StatusOr<CheckResult> Check() = 0;

  // One refit, waited for. `seconds` runs from all ranks' start to this one's
  // end.
  absl::StatusOr<RefitMeasurement> Refit();

  virtual Executor& executor() = 0;
  virtual Transport& transport() = 0;
  virtual Stream stream() const = 0;

 protected:
  // `timeout` is of each step.
  WorldRank(const PlanFile& plan, std::chrono::nanoseconds timeout)
      : plan_(plan), timeout_(timeout) {}

  const PlanFile& plan_;
  const std::chrono::nanoseconds timeout_;
};

// Collective: every rank gets the result of all.
absl::StatusOr<RunOfRanksResult> RunCheckedRank(
    const PlanFile& plan, WorldRank& rank, const RunOfRanksOptions& options);

// What `run` does of each rank, which meets the others on the loopback
// interface, on a thread of its own; the result of all with every mismatch.
absl::StatusOr<RunOfRanksResult> RunCheckedThreads(
    const PlanFile& plan, const RunOfRanksOptions& options,
    const std::function<
        absl::StatusOr<RunOfRanksResult>(std::unique_ptr<ControlPlane>)>& run);

}  // namespace refit

#endif  // REFIT_RUNNER_WORLD_RANK_H_
