// The numbers of `refitc --stats`.
#ifndef REFIT_PLAN_TEXT_STATS_H_
#define REFIT_PLAN_TEXT_STATS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "plan/add_up_to.h"
#include "plan/plan_file.h"
#include "plan/text/dealt.h"

namespace refit {

// What the messages of a plan add up to.
struct Totals {
  uint64_t route_bytes[4] = {};      // by fb::Route
  uint64_t direct_bytes = 0;         // of all routes
  uint64_t relayed_bytes = 0;        // sent by destination ranks
  std::vector<uint64_t> sent_bytes;  // by rank
  std::vector<uint64_t> received_bytes;
  uint64_t messages = 0;
  uint64_t largest_message_bytes = 0;
  uint64_t most_operations = 0;  // of one rank in one round
  uint32_t most_operations_rank = 0;
  uint32_t most_operations_round = 0;

  uint64_t moved_bytes() const {
    uint64_t bytes = 0;
    for (const uint64_t of_route : route_bytes) AddUpTo(of_route, bytes);
    return bytes;
  }
};

// The busiest of some ranks, and how much each has on average.
struct Balance {
  uint32_t busiest = 0;  // global rank
  uint64_t max_bytes = 0;
  double mean_bytes = 0;

  // 1 if nothing moves.
  double imbalance() const {
    return max_bytes == 0 ? 1 : static_cast<double>(max_bytes) / mean_bytes;
  }
};

// What a rank quantizes at once, in windows of its scratch that last as long.
struct Waves {
  uint64_t count = 0;
  uint64_t largest_bytes = 0;
};

// The rank of a side that quantizes in the most scratch.
struct ScratchUse {
  uint32_t rank = 0;
  uint64_t bytes = 0;  // 0: the side has none
  Waves waves;
};

struct PlanStats {
  size_t hosts = 0;
  Totals totals;
  Dealt dealt;
  // The rank with the most peers on other hosts; 0: no rank has any.
  uint32_t most_network_peers = 0;
  uint32_t most_network_peers_rank = 0;
  Balance sent;      // by source ranks
  Balance received;  // by destination ranks
  uint32_t largest_staging_rank = 0;
  uint64_t largest_staging_bytes = 0;
  ScratchUse scratch[2];  // by fb::Side
  // Of a plan whose executors compare with a snapshot: the rank whose is the
  // largest.
  uint32_t snapshot_rank = 0;
  uint64_t snapshot_bytes = 0;
  std::map<std::string, uint64_t> post_hooks;  // tensors of all ranks
  uint64_t params = 0;
  uint64_t tensors = 0;  // of all ranks
  uint64_t fragments = 0;
  uint64_t skips = 0;
};

PlanStats StatsOf(const PlanFile& plan);

}  // namespace refit

#endif  // REFIT_PLAN_TEXT_STATS_H_
