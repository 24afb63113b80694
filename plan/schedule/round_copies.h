// The copies of a rank's rounds, once the addresses of all tensors are known.
#ifndef REFIT_PLAN_SCHEDULE_ROUND_COPIES_H_
#define REFIT_PLAN_SCHEDULE_ROUND_COPIES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/plan_file.h"
#include "plan/schedule/copy_batch.h"
#include "plan/schedule/direct_pairs.h"
#include "plan/schedule/operation.h"
#include "plan/schedule/rank_schedule.h"

namespace refit {

// What a refit issues in place of the schedule's batches.
struct BatchChoice {
  std::vector<size_t> batches;  // by batch of the schedule. Empty: those
  std::vector<bool> is_idle;    // by quantize launch: nothing is left of it
};

// Refits that quantize straight from the tensors that hold values into those
// that are to, without scratch. A source does so where it stores
// (fused_quantizes.h), a destination where it can read what sources
// would store (pulled_quantizes.h). The rest stays in scratch.
struct FusedBatches {
  BatchChoice fused;
  // The same where few multiprocessors store over NVLink: destinations alone
  // do without scratch.
  BatchChoice bounded;
  // A checked refit: sources do without scratch, and fill it too.
  BatchChoice checked;
  bool in_peer_rounds = false;   // sources' quantizing
  uint64_t stored_elements = 0;  // by this source, each once
  // Behind the last round of a refit that nobody checks, a destination reads
  // the tensors of these sources.
  std::optional<size_t> pull_batch;
  std::vector<int32_t> read_sources;  // ascending
  std::vector<int32_t> readers;       // destinations, ascending
  uint64_t pulled_elements = 0;       // by this destination
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

// By peer: its tensors, by entry of its TensorTable, as this rank reaches them.
using PeerAddresses = std::map<int32_t, absl::Span<std::byte* const>>;

// `tensors`: the rank's own, by entry of its TensorTable. `joins_rounds`: what
// is quantized straight into tensors of peers in several rounds may be one
// batch, so that these rounds have no times of their own.
//
// What is one run of a tensor, byte for byte, is sent from or received into the
// tensor itself, without staging.
absl::StatusOr<RoundCopies> BuildRoundCopies(
    const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
    absl::Span<std::byte* const> tensors, std::byte* staging,
    const DirectPairs& peers, const PeerAddresses& peer_tensors,
    bool joins_rounds);

// By quantize operation of the rank: whether a refit fuses it that is bounded
// to as many multiprocessors as the plan says. Nothing needs to be mapped, or
// bound.
std::vector<bool> FusedQuantizes(const PlanFile& plan, int32_t rank,
                                 const RankSchedule& schedule,
                                 const DirectPairs& peers);

// Of a destination rank: the slots of scratch that it need not use, because it
// can quantize straight from tensors of `peers.readable`. Nothing needs to be
// mapped, or bound.
std::set<uint32_t> PulledSlots(const PlanFile& plan, int32_t rank,
                               const RankSchedule& schedule,
                               const DirectPairs& peers);

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_ROUND_COPIES_H_
