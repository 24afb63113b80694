// A trace of what ranks measured, beside that of a simulation.
#ifndef REFIT_RUNNER_MEASURED_TRACE_H_
#define REFIT_RUNNER_MEASURED_TRACE_H_

#include <string>

#include "plan/plan_file.h"
#include "runner/local_ranks.h"

namespace refit {

// In the JSON of Chrome's trace events, with the names of refit-sim's trace.
// Ranks are processes 1,000,000 and up, so that both fit into one file. Time 0
// is the first thing that a rank does. Clocks of several hosts are shifted so
// that their ranks all begin then.
//
// Requires: `refit` was timed. A message lasts from the start of its sender's
// round to the end of its receiver's, or of its sender's, if the receiver does
// not see that.
std::string MeasuredTrace(const PlanFile& plan, const RefitMeasurement& refit);

}  // namespace refit

#endif  // REFIT_RUNNER_MEASURED_TRACE_H_
