// What goes to all of its hosts by broadcasts.
#ifndef REFIT_COMPILER_PASSES_BROADCAST_FLOWS_H_
#define REFIT_COMPILER_PASSES_BROADCAST_FLOWS_H_

#include "compiler/ir/module.h"
#include "compiler/passes/flows.h"
#include "compiler/passes/routed_pieces.h"

namespace refit {

// Where shares would go along trees, has all that the same hosts want be
// broadcast instead: it is divided among the ranks that hold it and the
// receivers on their host, and each of these broadcasts its part to one rank of
// each host, which deals it out. A rank broadcasts to the same ranks in all
// waves, and takes part in few broadcasts, because each has a communicator of
// its own; what would need more goes along trees.
void BroadcastFlows(const Module& module, Flows& flows, RoutedPieces& routed);

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_BROADCAST_FLOWS_H_
