// What a simulation is told beside its plan.
#ifndef REFIT_TOOLS_SIMULATION_INPUT_H_
#define REFIT_TOOLS_SIMULATION_INPUT_H_

#include <optional>
#include <string>

#include "compiler/job/job.h"
#include "plan/plan_file.h"
#include "simulator/simulation.h"
#include "tools/args.h"

namespace refit {

// What is wrong with --executor; "" when nothing is.
std::string ReadExecutor(const std::string& text, simulator::Options& options);

// The job of --job, from which `options` gets the speeds of links unless the
// plan says them. None: it is wrong, or another plan's; the user was told.
std::optional<Job> ReadPlansJob(const ToolInfo& tool, const std::string& path,
                                const PlanFile& plan,
                                simulator::Options& options);

}  // namespace refit

#endif  // REFIT_TOOLS_SIMULATION_INPUT_H_
