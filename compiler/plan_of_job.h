// Whether a plan is the plan of a job: one answer for all who ask.
#ifndef REFIT_COMPILER_PLAN_OF_JOB_H_
#define REFIT_COMPILER_PLAN_OF_JOB_H_

#include <string>

#include "absl/status/statusor.h"
#include "compiler/diagnostics.h"
#include "compiler/job/job.h"
#include "plan/plan_file.h"

namespace refit {

// Compiles `job` and compares. Returns "" if `plan` is its plan:
// - the bodies are equal, however the job is written; or
// - they have the same inputs and no difference in the contract with the
//   workers: another version of the compiler schedules otherwise; or
// - they do the same.
// Otherwise returns the first difference, as refit-diff words it, from the job
// to the plan: "job -> plan: LIMITS_CHANGED bucket_bytes 4096 -> 8192".
//
// Errors are those of Compile; `diagnostics` gets the job's mistakes. Proves
// neither plan.
absl::StatusOr<std::string> DifferenceFromJob(const Job& job,
                                              const PlanFile& plan,
                                              Diagnostics& diagnostics);

// Whether `plan` was compiled from this job and its model, by the digest of its
// inputs. A job that says the same in other words counts as another. Compiles
// nothing. False also after errors, which `diagnostics` gets.
bool HasInputsOf(const Job& job, const PlanFile& plan,
                 Diagnostics& diagnostics);

}  // namespace refit

#endif  // REFIT_COMPILER_PLAN_OF_JOB_H_
