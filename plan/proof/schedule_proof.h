// Invariants 3, 4 and 5: what can be said of messages without their copies.
#ifndef REFIT_PLAN_PROOF_SCHEDULE_PROOF_H_
#define REFIT_PLAN_PROOF_SCHEDULE_PROOF_H_

#include <cstdint>
#include <vector>

#include "plan/message_lists.h"
#include "plan/proof/violations.h"

namespace refit::proof {

// partners[rank][i]: the position, in the peer's list, of the other end of
// message i of `rank`; -1 when it has none.
using Partners = std::vector<std::vector<int32_t>>;

// Invariant 4: sends of sources and receives of destinations pair up, round by
// round and in order, with equal sizes; the round's route is that of the pair.
Partners MatchMessages(const MessageLists& messages, Violations& violations);

// Invariant 4: what a rank broadcasts in a round is one message, to the same
// ranks in all rounds.
void CheckBroadcasts(const MessageLists& messages, Violations& violations);

// Invariant 4: each program is in the order of its rounds.
// Invariant 5: operations, message sizes and staging are within the limits.
void CheckLimits(const MessageLists& messages, Violations& violations);

// Invariant 3: no staging byte has two owners among messages of rounds that
// may be under way at the same time; ranges are aligned.
void CheckStaging(const MessageLists& messages, Violations& violations);

// Invariant 3: scratch buffers that share bytes have no round in common.
void CheckWindows(const fb::Body& body, Violations& violations);

}  // namespace refit::proof

#endif  // REFIT_PLAN_PROOF_SCHEDULE_PROOF_H_
