// Which round each staged message goes in.
#ifndef REFIT_COMPILER_PASSES_LIST_ROUNDS_H_
#define REFIT_COMPILER_PASSES_LIST_ROUNDS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "compiler/ir/module.h"
#include "compiler/passes/rounds.h"

namespace refit {

// Places staged messages of one wave and route, each with what deals it out:
// round by round from `first_round` on, the most urgent ones that have room.
// How urgent a message is: what its stream has to send and its receiver has to
// receive, and the longest way on from there, in bytes.
//
// A rank passes a message on in a later round than that in which it came. Along
// a tree or in a broadcast it does so from where the message lies in staging,
// at most Stats::held_rounds later; else it packs it again, at least
// kRelayRounds later.
//
// `ends`: no wave follows, so that what comes in the last round is dealt out
// alone.
//
// Error: kInternal, a message has room in no round.
absl::Status PlaceStaged(Module& module, const std::vector<Message*>& messages,
                         int32_t first_round, bool ends, RoundLoads& loads);

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_LIST_ROUNDS_H_
