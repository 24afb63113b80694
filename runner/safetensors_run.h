// `refit-run --source-dir --destination-dir`: a plan on files.
#ifndef REFIT_RUNNER_SAFETENSORS_RUN_H_
#define REFIT_RUNNER_SAFETENSORS_RUN_H_

#include <string>

#include "absl/status/statusor.h"
#include "plan/plan_file.h"
#include "runner/checked_run.h"

namespace refit {

// "rank-00004.safetensors"
std::string RankFileName(int32_t rank);

// Reads `source_dir`/rank-00000.safetensors … of the source ranks, writes
// `destination_dir`/rank-….safetensors of the destination ranks. A tensor that
// the plan skips as a whole is left out of the output; other skipped elements
// are zero. Either every file of the output is complete or none appears, and
// those that were there before stay.
absl::StatusOr<RunOfRanksResult> RunSafetensors(
    const PlanFile& plan, const std::string& source_dir,
    const std::string& destination_dir, const RunOfRanksOptions& options);

}  // namespace refit

#endif  // REFIT_RUNNER_SAFETENSORS_RUN_H_
