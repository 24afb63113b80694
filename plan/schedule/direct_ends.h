// Which end of each pair of ranks moves the bytes of a direct round, and where
// in a refit the two must wait for each other.
#ifndef REFIT_PLAN_SCHEDULE_DIRECT_ENDS_H_
#define REFIT_PLAN_SCHEDULE_DIRECT_ENDS_H_

#include <cstdint>
#include <vector>

#include "plan/plan_file.h"
#include "plan/schedule/direct_pairs.h"
#include "plan/schedule/rank_schedule.h"

namespace refit {

// A rank's calls of the fence in one direct round (refit/fence.h). Each list is
// ascending and distinct; a rank may be a target and an origin at once.
struct DirectEnds {
  bool moves = false;  // this rank is the origin of some pair
  // It may move them beside its other rounds, on few multiprocessors: they stay
  // on its GPU, it passes nothing on, nobody uses its memory in any round, and
  // they are no more than what it moves elsewhere.
  bool beside = false;
  // Whether the rank sees when the round's bytes are moved: not one whose
  // origins use its memory in other rounds too, without telling.
  bool is_timed = false;
  std::vector<int32_t> grant;           // origins
  std::vector<int32_t> await_grants;    // targets
  std::vector<int32_t> finish;          // targets
  std::vector<int32_t> await_finishes;  // origins
};

// Whether the rank is of the destination, and sends what it received.
bool PassesOn(const PlanFile& plan, int32_t rank);

// By round of the schedule; of a staged one there is nothing.
//
// A target whose tensors nobody writes twice or reads before the end of the
// refit grants its origins once, all of them in its first round, so that none
// waits for what another stores. It hears from each once, after its last. That
// is any rank but one that quantizes, whose scratch is used again and again,
// and a destination rank that relays. Fences are what rounds cost, above all
// where ranks share a GPU: processes take turns on it, milliseconds each.
//
// `pulls`: scratch of peers.pulled_slots is neither filled nor used. Then a
// destination may be at rest that quantizes, and pairs of ranks that move
// nothing in a round are left out.
std::vector<DirectEnds> ListDirectEnds(const PlanFile& plan, int32_t rank,
                                       const RankSchedule& schedule,
                                       const DirectPairs& peers,
                                       bool pulls = false);

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_DIRECT_ENDS_H_
