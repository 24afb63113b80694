// Rounds of what goes between hosts.
#ifndef REFIT_COMPILER_PASSES_NETWORK_ROUNDS_H_
#define REFIT_COMPILER_PASSES_NETWORK_ROUNDS_H_

#include <vector>

#include "compiler/ir/module.h"
#include "compiler/passes/rounds.h"

namespace refit {

// Sorts messages so that at each turn every source talks to a different
// destination: a round then loads all links alike instead of queueing at one
// receiver. Neighbouring shifts often carry messages of one kind (neighbouring
// ranks hold neighbouring shards), so the shifts are taken far apart from each
// other.
void SortByShift(const Module& module, std::vector<Message*>& messages);

// Places the messages of a wave that go between hosts, each with what deals it
// out. `is_last`: no wave follows, so that what comes in the last round is
// dealt out alone.
void PlaceOverNetwork(Module& module, const std::vector<Message*>& messages,
                      bool is_last, Scheduler& scheduler);

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_NETWORK_ROUNDS_H_
