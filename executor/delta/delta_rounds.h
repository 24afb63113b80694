// What a rank's refits need to send only what changed: StagedDeltas over the
// rank's tensors, and the batches around it.
//
//   changes "snapshot"   the snapshot holds what staged rounds sent last, and
//                        behind the rounds it takes what they sent now
//   changes "bitmap"     the worker marks what changed; its marks are cleared
//                        behind the rounds
//
// Direct rounds are the dense refit's.
#ifndef REFIT_EXECUTOR_DELTA_DELTA_ROUNDS_H_
#define REFIT_EXECUTOR_DELTA_DELTA_ROUNDS_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "executor/delta/staged_deltas.h"
#include "plan/plan_file.h"
#include "plan/schedule/rank_schedule.h"
#include "plan/schedule/round_copies.h"
#include "refit/device.h"

namespace refit {

// Of a staged round, by rung: the batches that pack and unpack what travels
// whole on it.
struct StagedDeltaBatches {
  std::vector<std::optional<size_t>> pack;
  std::vector<std::optional<size_t>> unpack;
};

struct DeltaRounds {
  std::unique_ptr<StagedDeltas> staged;            // null: refits are dense
  std::vector<StagedDeltaBatches> staged_batches;  // by round of the schedule
  // Behind the rounds: the snapshot takes all that they send, or marks are
  // cleared. None: there is nothing to do.
  std::optional<size_t> after;
  bool compares = false;  // with a snapshot; else workers mark what changed
};

// Appends the batches of `rounds` to `copies`, whose table they extend, of a
// plan with rungs. `bitmaps`: the workers' marks by entry of the TensorTable,
// null without; of a plan whose workers mark what changed. `snapshot`:
// SnapshotBytes of the rank, of a plan whose executors compare. `staging`: what
// the schedule stages. Both must outlive the batches.
absl::Status AddDeltaRounds(const PlanFile& plan, int32_t rank,
                            const RankSchedule& schedule,
                            absl::Span<std::byte* const> bitmaps,
                            std::byte* snapshot, std::byte* staging,
                            Device& device, RoundCopies& copies,
                            DeltaRounds& rounds);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DELTA_DELTA_ROUNDS_H_
