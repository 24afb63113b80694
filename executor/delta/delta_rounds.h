// The batches of a rank's refits in a plan with deltas: those of dense refits,
// which leave a baseline, and those that move only what differs from it.
//
//   changes "snapshot"   dense: everything goes to the receiver and into the
//                        snapshot
//                        delta: what differs from the snapshot goes to both
//   changes "bitmap"     dense: everything goes to the receiver
//                        delta: what the worker marked goes to the receiver
//                        after both: the worker's marks are cleared
//
// Values that several ranks receive are compared by several copies, so these
// cannot update the snapshot: they mark, and one pass behind the rounds stores
// into it what is marked.
//
// Staged rounds: what changed is found before the rounds, by the snapshot or by
// the worker's marks; a snapshot takes it behind them. staged_deltas.h says
// how.
//
// Always dense are tensors that post-hooks rewrite in place, pairs of which the
// receiver reads the sender's tensors, and tensors without a bitmap.
#ifndef REFIT_EXECUTOR_DELTA_DELTA_ROUNDS_H_
#define REFIT_EXECUTOR_DELTA_DELTA_ROUNDS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "executor/copies/round_copies.h"
#include "executor/delta/staged_deltas.h"
#include "executor/peer_tensors.h"
#include "executor/rank_schedule.h"
#include "plan/plan_file.h"
#include "refit/device.h"

namespace refit {

// Of a staged round, by rung: the batches that pack and unpack what travels
// whole on it. Where rounds are merged, the first has those of all.
struct StagedDeltaBatches {
  std::vector<std::optional<size_t>> pack;
  std::vector<std::optional<size_t>> unpack;
};

// What a refit enqueues instead of the move batches of its schedule: numbers of
// batches.
struct RefitBatches {
  std::vector<size_t> before;
  std::vector<std::vector<size_t>> moves;  // by round of the schedule
  std::vector<size_t> after;
};

struct DeltaRounds {
  RefitBatches dense;
  RefitBatches delta;
  bool compares = false;  // with a snapshot; else workers mark what changed
  // What the batches use beside tensors.
  std::unique_ptr<DeviceMemory> marks;  // of the rank's own
  // Of the last refit: the DeltaCounts of its rounds, and one nobody reads.
  std::unique_ptr<DeviceMemory> counts;
  // What this rank moves in a dense refit, and a delta refit may leave out.
  DeltaCounts moved;
  uint64_t always_bytes = 0;  // and what none leaves out
  // Of a plan with rungs.
  std::unique_ptr<StagedDeltas> staged;
  std::vector<StagedDeltaBatches> staged_batches;  // by round of the schedule
  // The batch by which the snapshot takes all that staged rounds send: shorter
  // work than StagedDeltas::EnqueueKeep unless little of it changed.
  std::optional<size_t> keep_staged;
};

// Appends the batches of `rounds`' refits to `copies`, whose table they extend.
// `bitmaps`: the workers' marks by entry of the TensorTable, null without; of a
// plan whose workers mark what changed. `snapshot`: SnapshotBytes of the rank,
// of a plan whose executors compare. `staging`: what the schedule stages. Both
// must outlive the batches. `merge_powers`: as StagedDeltas::Merge takes it.
absl::Status AddDeltaRounds(const PlanFile& plan, int32_t rank,
                            const RankSchedule& schedule,
                            const PeerTensors& peers,
                            absl::Span<std::byte* const> bitmaps,
                            std::byte* snapshot, std::byte* staging,
                            absl::Span<const uint8_t> merge_powers,
                            Device& device, RoundCopies& copies,
                            DeltaRounds& rounds);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DELTA_DELTA_ROUNDS_H_
