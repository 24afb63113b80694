// Who reads whose tensors, by the plan alone: in direct rounds that pull
// (executor/peer_tensors.h), and to quantize (executor/quantize_pulls.h).
#ifndef REFIT_EXECUTOR_PLANNED_PULLS_H_
#define REFIT_EXECUTOR_PLANNED_PULLS_H_

#include <cstdint>
#include <set>

#include "executor/peer_tensors.h"
#include "executor/rank_schedule.h"
#include "plan/plan_file.h"

namespace refit {

// Who moves the bytes if every rank can map every peer's tensors. Nothing is
// mapped.
PeerTensors PlannedPeerTensors(const PlanFile& plan,
                               const RankSchedule& schedule);

// Whether `rank` is a destination that quantizes.
bool IsQuantizer(const PlanFile& plan, int32_t rank);

// Whether any may read its sources. The same on all ranks.
bool MayPull(const PlanFile& plan);

// PeerTensors::pulled_slots of `rank` if every rank can map every peer's
// tensors. Direct rounds are stored. Empty of a rank that reads nothing.
std::set<uint32_t> PlannedPulledSlots(const PlanFile& plan, int32_t rank);

}  // namespace refit

#endif  // REFIT_EXECUTOR_PLANNED_PULLS_H_
