// refit-diff: what differs between two plans, by meaning.
#include <string>

#include "absl/status/statusor.h"
#include "plan/diff/diff.h"
#include "tools/args.h"
#include "tools/plan_input.h"

static int Main(int argc, char** argv) {
  bool json = false;
  const refit::ToolInfo tool = {
      .name = "refit-diff",
      .usage = "refit-diff A.refit B.refit [--json]",
      .summary =
          "Compares two plans by meaning: the contract with the workers, the "
          "traffic\n"
          "between ranks, the schedule. The order in which a plan was built "
          "does not\n"
          "count. One of the files may be '-', standard input.\n"
          "Exit status: 0 same (and nothing is printed), 1 different, 2 "
          "trouble.",
      .flags = {{"--json", "", "",
                 "the differences as one JSON object, also when there is none",
                 &json}},
      .positional_min = 2,
      .positional_max = 2,
  };
  const refit::ParsedArgs args = refit::ParseArgs(tool, argc, argv);
  if (args.done) return args.exit_status;
  if (args.positional[0] == "-" && args.positional[1] == "-") {
    return refit::Fail(tool, "only one of the plans can be standard input");
  }
  absl::StatusOr<refit::PlanFile> a = refit::OpenPlan(args.positional[0]);
  if (!a.ok()) return refit::Fail(tool, a.status());
  absl::StatusOr<refit::PlanFile> b = refit::OpenPlan(args.positional[1]);
  if (!b.ok()) return refit::Fail(tool, b.status());

  const refit::PlanDifference difference = refit::ComparePlans(*a, *b);
  std::string text;
  if (json) {
    text = refit::DifferenceJson(difference);
  } else if (!difference.same()) {
    text = refit::DifferenceText(difference);
  }
  if (absl::Status status = refit::WriteStdout(text); !status.ok()) {
    return refit::Fail(tool, status);
  }
  return difference.same() ? refit::kExitSuccess : refit::kExitNo;
}

int main(int argc, char** argv) {
  return refit::RunTool("refit-diff", Main, argc, argv);
}
