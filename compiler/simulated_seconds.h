// How long a plan takes by the simulator: to choose between plans of one job.
#ifndef REFIT_COMPILER_SIMULATED_SECONDS_H_
#define REFIT_COMPILER_SIMULATED_SECONDS_H_

#include "absl/status/statusor.h"
#include "compiler/ir/module.h"
#include "plan/plan_file.h"

namespace refit {

// Of a refit on GPUs, with links as fast as `topology` says. Deterministic.
// kInvalidArgument: ranks wait for each other for ever, which no proved plan's
// do.
absl::StatusOr<double> SimulatedSeconds(const PlanFile& plan,
                                        const Topology& topology);

}  // namespace refit

#endif  // REFIT_COMPILER_SIMULATED_SECONDS_H_
