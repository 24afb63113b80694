// `refit-run --check`: a plan on generated data, every element checked.
#ifndef REFIT_RUNNER_CHECKED_RUN_H_
#define REFIT_RUNNER_CHECKED_RUN_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/plan_file.h"
#include "runner/local_ranks.h"
#include "runner/value_check.h"

namespace refit {

struct RunOfRanksOptions {
  int64_t iterations = 1;
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);  // of each step
  bool time_rounds = false;
  // Each refit also compares the sides by digests (RunOptions::check).
  bool digest = false;
  // The part of the source's values that changes before each refit, which
  // follows a dense one and may be a delta: `iterations` of these. The plan has
  // options.delta. Nullopt: each refit is dense, of the same values.
  std::optional<double> change_rate = std::nullopt;
};

struct RunOfRanksResult {
  // One per iteration; with a change rate behind the dense one.
  std::vector<RefitMeasurement> refits;
  CheckResult check;  // of a checked run: the first iteration with a mismatch
                      // or the last
  // By name: tensors of destination ranks that a worker would have to change
  // before it serves. They are left as they were moved.
  std::map<std::string, uint64_t> post_hooks;
  uint64_t source_bytes = 0;
  uint64_t destination_bytes = 0;
  uint64_t staging_bytes = 0;       // sum over ranks
  uint64_t peak_staging_bytes = 0;  // of one rank
  uint64_t scratch_bytes = 0;       // sum over ranks
  uint64_t snapshot_bytes = 0;      // sum over ranks
  // The messages of direct rounds were sent like those of staged ones.
  bool sends_direct_rounds = false;
};

// Memory: sources, destinations, staging and scratch of all ranks.
// kResourceExhausted without allocating when this machine does not have it.
absl::StatusOr<RunOfRanksResult> RunChecked(const PlanFile& plan,
                                            const RunOfRanksOptions& options);

// The tensors a rank holds by the plan, in plan order, without addresses.
std::vector<BoundTensor> TensorsOfRank(const PlanFile& plan, int32_t rank);

// For ranks whose tensors are to stay as they were moved: all post-hooks count
// as the caller's, and nobody performs them.
std::vector<PostHookPerformer> LeavePostHooks(const Executor& executor);

// Gives `tensors` addresses in one new piece of memory.
absl::StatusOr<std::unique_ptr<DeviceMemory>> AllocateTensors(
    Device& device, std::vector<BoundTensor>& tensors);

// Gives source tensors of a plan whose workers mark what changed bitmaps in one
// new piece of memory, with bits of any value. Null where there are none.
absl::StatusOr<std::unique_ptr<DeviceMemory>> AllocateBitmaps(
    const PlanFile& plan, int32_t rank, Device& device,
    std::vector<BoundTensor>& tensors);

// Fills the sizes and post-hooks of `result` from the plan.
void MeasureSizes(const PlanFile& plan, RunOfRanksResult& result);

}  // namespace refit

#endif  // REFIT_RUNNER_CHECKED_RUN_H_
