// refit-dump: shows a plan as stable text or JSON.
#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "plan/text/text.h"
#include "tools/args.h"
#include "tools/plan_input.h"

static int Main(int argc, char** argv) {
  constexpr int64_t kAllRanks = std::numeric_limits<int64_t>::min();
  int64_t rank = kAllRanks;
  std::string tensor_glob;
  bool json = false;
  bool stats = false;
  const refit::ToolInfo tool = {
      .name = "refit-dump",
      .usage =
          "refit-dump PLAN.refit [--rank N] [--tensor GLOB] [--json]\n"
          "       refit-dump PLAN.refit --stats [--json]",
      .summary =
          "Shows a plan as stable text: the same plan always prints the same "
          "bytes.\n"
          "'-' reads the plan from standard input. docs/plan-format.md says "
          "how to\n"
          "read the text. Exit status: 0 shown, 2 trouble.",
      .flags = {{"--rank", "", "N",
                 "only this rank: its buffers, its program, what that uses",
                 &rank},
                {"--tensor", "", "GLOB",
                 "only params and buffers whose name matches ('*' any run of\n"
                 "characters, '?' one), and the messages that carry them",
                 &tensor_glob},
                {"--json", "", "", "the same facts as JSON", &json},
                {"--stats", "", "",
                 "only the summary of bytes, times and sizes that refitc\n"
                 "--stats prints; goes with --json alone",
                 &stats}},
      .positional_min = 1,
      .positional_max = 1,
  };
  const refit::ParsedArgs args = refit::ParseArgs(tool, argc, argv);
  if (args.done) return args.exit_status;
  if (stats && (rank != kAllRanks || !tensor_glob.empty())) {
    return refit::Fail(tool, "--stats goes with --json alone");
  }
  absl::StatusOr<refit::PlanFile> plan = refit::OpenPlan(args.positional[0]);
  if (!plan.ok()) return refit::Fail(tool, plan.status());

  refit::TextOptions options = {.rank = std::nullopt,
                                .tensor_glob = tensor_glob};
  if (rank != kAllRanks) {
    if (rank < 0 || rank >= plan->world_size()) {
      return refit::Fail(
          tool, absl::StrCat("--rank ", rank, ": this plan has ranks 0..",
                             plan->world_size() - 1));
    }
    options.rank = static_cast<int32_t>(rank);
  }
  if (!tensor_glob.empty() && !refit::HasTensor(*plan, tensor_glob)) {
    return refit::Fail(
        tool, absl::StrCat("--tensor \"", tensor_glob,
                           "\": no param, buffer or skip of this plan has such "
                           "a name"));
  }
  std::string text;
  if (stats) {
    text = json ? refit::StatsJson(*plan) : refit::StatsText(*plan);
  } else {
    text = json ? refit::PlanJson(*plan, options)
                : refit::PlanText(*plan, options);
  }
  if (absl::Status status = refit::WriteStdout(text); !status.ok()) {
    return refit::Fail(tool, status);
  }
  return refit::kExitSuccess;
}

int main(int argc, char** argv) {
  return refit::RunTool("refit-dump", Main, argc, argv);
}
