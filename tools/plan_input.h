// Where every tool gets a plan from, and where its text goes.
#ifndef REFIT_TOOLS_PLAN_INPUT_H_
#define REFIT_TOOLS_PLAN_INPUT_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "plan/plan_file.h"

namespace refit {

// Opens the plan at `path`; "-" reads all of standard input. An error's message
// names the file, once.
absl::StatusOr<PlanFile> OpenPlan(const std::string& path);

// Writes all of `text` to standard output. kUnavailable when it does not take
// it (a full disk, a closed pipe).
absl::Status WriteStdout(std::string_view text);

}  // namespace refit

#endif  // REFIT_TOOLS_PLAN_INPUT_H_
