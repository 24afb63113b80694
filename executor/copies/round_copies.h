// The copies of a rank's rounds, once the addresses of all tensors are known.
#ifndef REFIT_EXECUTOR_COPIES_ROUND_COPIES_H_
#define REFIT_EXECUTOR_COPIES_ROUND_COPIES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "executor/peer_tensors.h"
#include "executor/rank_schedule.h"
#include "plan/plan_file.h"
#include "refit/device.h"

namespace refit {

// What Run replays.
struct RoundCopies {
  std::vector<std::byte*> table;      // own tensors, staging, peers' tensors
  std::vector<CopyBatch> batches;     // as RankSchedule numbers them
  std::vector<Operation> operations;  // RankSchedule's, with their data
  // By operation: where in `table` the data is that needs no staging.
  std::vector<std::optional<CopyAddress>> in_tensor;
};

// `tensors`: the rank's own, by entry of its TensorTable.
//
// What is one run of a tensor, byte for byte, is sent from or received into the
// tensor itself, without staging.
absl::StatusOr<RoundCopies> BuildRoundCopies(
    const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
    absl::Span<std::byte* const> tensors, std::byte* staging,
    const PeerTensors& peers);

}  // namespace refit

#endif  // REFIT_EXECUTOR_COPIES_ROUND_COPIES_H_
