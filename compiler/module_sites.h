// The simulator's view of a module's ranks, so that passes, what a plan names
// as its binding link, and the simulator mean the same links.
#ifndef REFIT_COMPILER_MODULE_SITES_H_
#define REFIT_COMPILER_MODULE_SITES_H_

#include "compiler/ir/module.h"
#include "simulator/links.h"
#include "simulator/simulation.h"

namespace refit {

simulator::Sites SitesOf(const Module& module);

// The speeds of its links.
simulator::Options LinkOptionsOf(const Module& module);

}  // namespace refit

#endif  // REFIT_COMPILER_MODULE_SITES_H_
