// How what holders send each host by itself enters it.
#ifndef REFIT_COMPILER_PASSES_ENTER_HOSTS_H_
#define REFIT_COMPILER_PASSES_ENTER_HOSTS_H_

#include <cstdint>

#include "compiler/ir/module.h"
#include "compiler/passes/flows.h"
#include "compiler/passes/routed_pieces.h"

namespace refit {

// Sends what several ranks of a host want once to it, by way of these ranks, so
// that all receive as much over the network; which source sends which part is
// chosen with it, so that sources send as much as each other. What is more than
// a rank's part of what its host is sent comes by way of others, where the
// rank would be the busiest of all. Shares that go by a tree are left out, and
// so are flows of a host of less than `bytes_min`.
//
// With `Limits::by_rails` a source sends a host all that it wants by way of as
// few ranks as it can.
void EnterHosts(const Module& module, const Flows& flows, int64_t bytes_min,
                RoutedPieces& routed);

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_ENTER_HOSTS_H_
