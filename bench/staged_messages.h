// A plan's staged messages, to time them without packing and unpacking.
#ifndef REFIT_BENCH_STAGED_MESSAGES_H_
#define REFIT_BENCH_STAGED_MESSAGES_H_

#include <cstdint>
#include <vector>

#include "plan/plan_file.h"

namespace refit {

struct StagedMessage {
  int32_t peer = 0;
  bool is_send = false;
  uint64_t offset = 0;       // in the staging arena of the rank
  uint64_t peer_offset = 0;  // in that of the peer
  uint64_t size_bytes = 0;
};

// Those of each staged round in which `rank` has any, in the plan's order.
std::vector<std::vector<StagedMessage>> StagedRounds(const PlanFile& plan,
                                                     int32_t rank);

}  // namespace refit

#endif  // REFIT_BENCH_STAGED_MESSAGES_H_
