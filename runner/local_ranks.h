// All ranks of a plan in this process, on the CPU.
#ifndef REFIT_RUNNER_LOCAL_RANKS_H_
#define REFIT_RUNNER_LOCAL_RANKS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/plan_file.h"
#include "refit/executor.h"
#include "refit/worker.h"

namespace refit {

// What one refit took, over all ranks.
struct RefitMeasurement {
  double seconds = 0;       // from the first rank's start to the last one's end
  double host_seconds = 0;  // in Run alone
  RunCounters counters;     // sums
  // Bytes are sums, seconds those of the slowest rank; empty unless timed.
  std::vector<RoundMeasurement> rounds;
  // By rank: each one's own; all empty unless timed.
  std::vector<std::vector<RoundMeasurement>> rounds_of_ranks;
  // Sums; what ranks agree on is the first one's. None: refits of the plan
  // and transport are always dense.
  std::optional<DeltaReport> delta;
};

// Takes in what another rank measured.
void AddRounds(absl::Span<const RoundMeasurement> of_rank,
               std::vector<RoundMeasurement>& all);

void AddDelta(const std::optional<DeltaReport>& of_rank,
              std::optional<DeltaReport>& all);

class LocalRanks {
 public:
  // Loads, connects and binds every rank; `tensors` by global rank. `plan` and
  // the tensors' memory must outlive the result. `timeout` holds for each step.
  static absl::StatusOr<std::unique_ptr<LocalRanks>> Create(
      const PlanFile& plan,
      const std::vector<std::vector<BoundTensor>>& tensors,
      std::chrono::nanoseconds timeout, bool time_rounds = false);

  // `digest`: RunOptions::check. `dense`: RunOptions::dense, for callers that
  // write the destination's tensors.
  absl::StatusOr<RefitMeasurement> Refit(bool digest = false,
                                         bool dense = true);

 private:
  LocalRanks(const PlanFile& plan, std::chrono::nanoseconds timeout);
  // Calls `step(rank)` on a thread per rank; the error that explains the
  // others.
  absl::Status OnAllRanks(const std::function<absl::Status(int32_t)>& step);

  const PlanFile& plan_;
  const std::chrono::nanoseconds timeout_;
  std::vector<std::unique_ptr<Worker>> workers_;  // by rank
};

}  // namespace refit

#endif  // REFIT_RUNNER_LOCAL_RANKS_H_
