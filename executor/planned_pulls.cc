#include "executor/planned_pulls.h"

#include "executor/copies/round_copies.h"
#include "executor/peer_tensors.h"
#include "executor/rank_schedule.h"
#include "plan/vector_length.h"

namespace refit {

bool IsQuantizer(const PlanFile& plan, int32_t rank) {
  return plan.side(rank) == fb::Side::kDestination &&
         Length(plan.body().programs()->Get(rank)->quantizes()) > 0;
}

bool MayPull(const PlanFile& plan) {
  if (plan.body().delta() != nullptr || plan.body().limits()->direct_pulls()) {
    return false;
  }
  for (int32_t rank = plan.source_ranks(); rank < plan.world_size(); ++rank) {
    if (IsQuantizer(plan, rank)) return true;
  }
  return false;
}

std::set<uint32_t> PlannedPulledSlots(const PlanFile& plan, int32_t rank) {
  if (!MayPull(plan) || !IsQuantizer(plan, rank)) return {};
  const RankSchedule schedule(plan, rank, DirectRounds::kStored);
  PeerTensors peers = PlannedPeerTensors(plan, schedule);
  if (!peers.pulled_from.empty()) return {};
  for (const int32_t sender : schedule.DirectSenders()) {
    if (plan.side(sender) != fb::Side::kSource) return {};
    peers.readable.insert(sender);
  }
  if (peers.readable.empty()) return {};
  return PulledSlots(plan, rank, schedule, peers);
}

}  // namespace refit
