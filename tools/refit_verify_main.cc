// refit-verify: proves a plan from its file.
#include <iostream>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "compiler/diagnostics.h"
#include "compiler/job/job.h"
#include "compiler/plan_of_job.h"
#include "plan/plan_file.h"
#include "plan/proof/proof.h"
#include "tools/args.h"
#include "tools/plan_input.h"

namespace {

bool IsBadContent(const absl::Status& status) {
  return status.code() == absl::StatusCode::kInvalidArgument ||
         status.code() == absl::StatusCode::kFailedPrecondition;
}

int Invalid(const std::string& message) {
  std::cerr << message << "\n";
  return refit::kExitNo;
}

int CompareWithJob(const refit::ToolInfo& tool, const std::string& plan_path,
                   const refit::PlanFile& plan, const std::string& job_path) {
  refit::Diagnostics diagnostics;
  const std::optional<refit::Job> job =
      refit::ReadJob(job_path, diagnostics, "refit-verify --job");
  absl::StatusOr<std::string> difference =
      absl::InvalidArgumentError("the job has errors");
  if (job.has_value()) {
    difference = refit::DifferenceFromJob(*job, plan, diagnostics);
  }
  if (!diagnostics.ok()) {
    std::cerr << diagnostics.Render();
    return refit::kExitError;
  }
  if (!difference.ok()) return refit::Fail(tool, difference.status());
  if (difference->empty()) return refit::kExitSuccess;
  return Invalid(absl::StrFormat("%s: error: not the plan of %s; %s", plan_path,
                                 job_path, *difference));
}

}  // namespace

static int Main(int argc, char** argv) {
  std::string job_path;
  bool verbose = false;
  const refit::ToolInfo tool = {
      .name = "refit-verify",
      .usage = "refit-verify PLAN.refit [--job JOB.json] [--verbose]",
      .summary =
          "Proves, from the file alone, that a plan writes every destination "
          "element once\n"
          "and with the right value, and that steps which touch the same bytes "
          "are ordered.\n"
          "'-' reads the plan from standard input.\n"
          "Exit status: 0 valid, 1 not valid, 2 a file could not be read or "
          "the job has errors.",
      .flags =
          {{"--job", "", "JOB.json",
            "also compile this job and check that the plan is its plan",
            &job_path},
           {"--verbose", "-v", "",
            "print one line on what was proved, and on how much of it the\n"
            "plan declares as skipped",
            &verbose}},
      .positional_min = 1,
      .positional_max = 1,
  };
  const refit::ParsedArgs args = refit::ParseArgs(tool, argc, argv);
  if (args.done) return args.exit_status;
  const std::string& path = args.positional[0];
  const std::string shown = path == "-" ? "<stdin>" : path;
  if (path == "-" && job_path == "-") {
    return refit::Fail(tool, "only one of the plan and the job can be '-'");
  }

  absl::StatusOr<refit::PlanFile> plan = refit::OpenPlan(path);
  if (!plan.ok()) {
    const std::string message(plan.status().message());  // "PATH: what"
    if (!IsBadContent(plan.status())) return refit::Fail(tool, message);
    return Invalid(
        absl::StrFormat("%s: error: %s", shown,
                        absl::StripPrefix(message, absl::StrCat(shown, ": "))));
  }
  const refit::ProofResult proof = refit::Prove(*plan);
  if (!proof.valid) {
    return Invalid(absl::StrFormat("%s: error: %s", shown, proof.violation));
  }
  if (!job_path.empty()) {
    const int status = CompareWithJob(tool, shown, *plan, job_path);
    if (status != refit::kExitSuccess) return status;
  }
  if (!verbose) return refit::kExitSuccess;
  const absl::Status written = refit::WriteStdout(absl::StrFormat(
      "%s: valid: %d messages, %d bytes moved, %d destination elements (%d of "
      "them under declared skips)\n",
      shown, proof.messages, proof.moved_bytes, proof.destination_elements,
      proof.skipped_elements));
  return written.ok() ? refit::kExitSuccess : refit::Fail(tool, written);
}

int main(int argc, char** argv) {
  return refit::RunTool("refit-verify", Main, argc, argv);
}
