#include "plan/schedule/direct_pairs.h"

#include <vector>

#include "plan/schedule/round_copies.h"
#include "plan/vector_length.h"

namespace refit {

DirectPairs PlannedPairs(const PlanFile& plan, const RankSchedule& schedule) {
  DirectPairs peers;
  if (!plan.body().limits()->direct_pulls()) return peers;
  const std::vector<int32_t> senders = schedule.DirectSenders();
  const std::vector<int32_t> receivers = schedule.DirectReceivers();
  peers.pulled_from = {senders.begin(), senders.end()};
  peers.pulled_by = {receivers.begin(), receivers.end()};
  return peers;
}

bool IsQuantizer(const PlanFile& plan, int32_t rank) {
  return plan.side(rank) == fb::Side::kDestination &&
         Length(plan.body().programs()->Get(rank)->quantizes()) > 0;
}

bool MayPull(const PlanFile& plan) {
  if (plan.body().limits()->direct_pulls()) return false;
  for (int32_t rank = plan.source_ranks(); rank < plan.world_size(); ++rank) {
    if (IsQuantizer(plan, rank)) return true;
  }
  return false;
}

std::set<uint32_t> PlannedPulledSlots(const PlanFile& plan, int32_t rank) {
  if (!MayPull(plan) || !IsQuantizer(plan, rank)) return {};
  const RankSchedule schedule(plan, rank, DirectRounds::kStored);
  DirectPairs peers = PlannedPairs(plan, schedule);
  if (!peers.pulled_from.empty()) return {};
  for (const int32_t sender : schedule.DirectSenders()) {
    if (plan.side(sender) != fb::Side::kSource) return {};
    peers.readable.insert(sender);
  }
  if (peers.readable.empty()) return {};
  return PulledSlots(plan, rank, schedule, peers);
}

}  // namespace refit
