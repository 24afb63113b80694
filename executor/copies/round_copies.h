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

// A source's refit that quantizes straight into tensors of its peers. What it
// cannot do so stays in scratch (copies/fused_quantizes.h).
struct FusedBatches {
  // By batch of the schedule: what is issued instead. Empty: nothing is fused.
  std::vector<size_t> batches;
  // The same beside all quantize launches, which a checked refit needs.
  std::vector<size_t> checked_batches;
  std::vector<bool> is_idle;  // by quantize launch: nothing is left of it
  bool in_peer_rounds = false;
  uint64_t elements = 0;  // that are quantized so, each once
};

// What Run replays.
struct RoundCopies {
  std::vector<std::byte*> table;  // own tensors, staging, peers' tensors
  // As RankSchedule numbers them; then those of `fused`.
  std::vector<CopyBatch> batches;
  FusedBatches fused;
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

// By quantize operation of the rank: whether a refit fuses it that is bounded
// to as many multiprocessors as the plan says. Nothing needs to be mapped, or
// bound.
std::vector<bool> FusedQuantizes(const PlanFile& plan, int32_t rank,
                                 const RankSchedule& schedule,
                                 const PeerTensors& peers);

}  // namespace refit

#endif  // REFIT_EXECUTOR_COPIES_ROUND_COPIES_H_
