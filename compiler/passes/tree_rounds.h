// Rounds of what goes from host to host along trees.
#ifndef REFIT_COMPILER_PASSES_TREE_ROUNDS_H_
#define REFIT_COMPILER_PASSES_TREE_ROUNDS_H_

#include <vector>

#include "compiler/ir/module.h"
#include "compiler/passes/rounds.h"

namespace refit {

// Places routed messages, of which some pass on to other hosts what others
// bring. If links were never in use by others, a source would send its messages
// one round after the other, and a rank would pass each on a round after it
// came, to one rank after the other. In this order each takes the first round
// that has room for it, at its turn if that comes soon. A rank sends one over
// the network in a round, and receives one. What cannot leave within
// kHeldRounds is packed again, kRelayRounds after it came.
void PlaceAlongTrees(Module& module, const std::vector<Message*>& messages,
                     Scheduler& scheduler);

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_TREE_ROUNDS_H_
