// Which rank of each pair moves the bytes of direct rounds, and which
// destinations quantize what they read.
#ifndef REFIT_PLAN_SCHEDULE_DIRECT_PAIRS_H_
#define REFIT_PLAN_SCHEDULE_DIRECT_PAIRS_H_

#include <cstdint>
#include <map>
#include <set>

#include "plan/plan_file.h"
#include "plan/schedule/rank_schedule.h"

namespace refit {

// The pairs of one rank. A sender stores into its receiver's tensors: it
// *pushes*. Or the receiver reads the sender's: it *pulls*. Limits.direct_pulls
// says which. If the end that is to move the bytes cannot map the other's
// tensors, the other end does.
struct DirectPairs {
  std::set<int32_t> pulled_from;  // senders that this rank reads
  std::set<int32_t> pulled_by;    // receivers that read this rank
  // Of a destination that quantizes: the sources whose tensors it can read,
  // beside what these store.
  std::set<int32_t> readable;
  // By destination, this rank or one that it stores into: the slots of its
  // scratch that only a checked refit fills, because it reads the sources'
  // tensors instead. None is empty.
  std::map<int32_t, std::set<uint32_t>> pulled_slots;

  // Whether this rank, not `peer`, moves a message of this kind between them.
  bool Moves(fb::MessageKind kind, int32_t peer) const {
    return kind == fb::MessageKind::kSend ? !pulled_by.contains(peer)
                                          : pulled_from.contains(peer);
  }
};

// Those of direct rounds if every rank can map every peer's tensors: without
// what is read to quantize it.
DirectPairs PlannedPairs(const PlanFile& plan, const RankSchedule& schedule);

// Whether `rank` is a destination that quantizes.
bool IsQuantizer(const PlanFile& plan, int32_t rank);

// Whether any may read its sources. The same on all ranks.
bool MayPull(const PlanFile& plan);

// DirectPairs::pulled_slots of `rank` if every rank can map every peer's
// tensors. Direct rounds are stored. Empty of a rank that reads nothing.
std::set<uint32_t> PlannedPulledSlots(const PlanFile& plan, int32_t rank);

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_DIRECT_PAIRS_H_
