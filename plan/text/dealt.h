// What ranks deal out: receive for others of their host, and send on.
#ifndef REFIT_PLAN_TEXT_DEALT_H_
#define REFIT_PLAN_TEXT_DEALT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan_file.h"

namespace refit {

struct Dealt {
  uint64_t bytes = 0;  // 0: nobody deals
  uint64_t ranks = 0;  // that deal
  // The one that deals out most, and to whom; ascending.
  uint32_t busiest = 0;
  uint64_t busiest_bytes = 0;
  std::vector<int32_t> receivers;
};

Dealt DealtOf(const PlanFile& plan);

// "2359296 bytes by 4 ranks, most by rank 4: 786432 bytes to 5..7".
std::string DealtText(const Dealt& dealt);

// Whether a message of the round between these ranks is dealt out: it stays in
// a host, beside what the network brings.
bool IsDealt(const fb::Body& body, uint32_t round, uint32_t source,
             uint32_t destination);

}  // namespace refit

#endif  // REFIT_PLAN_TEXT_DEALT_H_
