// refit-report: one HTML page about a plan.
#include <cstdint>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "compiler/diagnostics.h"
#include "compiler/job/job.h"
#include "files/atomic_file.h"
#include "plan/diff/diff.h"
#include "plan/plan_file.h"
#include "plan/proof/proof.h"
#include "report/job_text.h"
#include "report/measured_run.h"
#include "report/report.h"
#include "simulator/simulation.h"
#include "tools/args.h"
#include "tools/plan_input.h"
#include "tools/simulation_input.h"

namespace {

struct ReportArguments {
  std::string output;
  std::string job;
  std::string measured;
  std::string against;
  std::string executor = "gpu";
  bool json = false;
};

refit::ToolInfo ReportTool(ReportArguments& arguments) {
  return {
      .name = "refit-report",
      .usage =
          "refit-report PLAN.refit {-o OUT.html | --json} [--job JOB.json]\n"
          "                    [--measured RUN.json] [--against OTHER.refit]\n"
          "                    [--executor KIND]",
      .summary =
          "Writes one HTML page about a plan: bytes, times, ranks, traffic, "
          "links,\n"
          "memory, the slowest operations, the critical path. The page needs "
          "no "
          "network\n"
          "and no other file. '-' is standard input or output.\n"
          "docs/report.md says what the page shows.\n"
          "Exit status: 0 written, 1 the plan is not valid, 2 trouble.",
      .flags =
          {{"--output", "-o", "OUT.html", "the page", &arguments.output},
           {"--job", "", "JOB.json",
            "the job of the plan: names its layouts, and gives the speeds of\n"
            "links to the simulation",
            &arguments.job},
           {"--measured", "", "RUN.json",
            "what refit-run --json printed: shown beside the simulated times",
            &arguments.measured},
           {"--against", "", "OTHER.refit",
            "an older plan: the page lists what changes from it to PLAN",
            &arguments.against},
           {"--executor", "", "KIND",
            "whose executor is simulated: gpu (default), or cpu, over UCX",
            &arguments.executor},
           {"--json", "", "", "print the page's data as JSON, and no page",
            &arguments.json}},
      .positional_min = 1,
      .positional_max = 1,
  };
}

// What is wrong with the arguments; "" when nothing is. `options` become those
// of --executor.
std::string CheckReport(const ReportArguments& arguments,
                        const std::string& plan,
                        refit::simulator::Options& options) {
  if (arguments.json != arguments.output.empty()) {
    return arguments.json ? "--json prints; leave out --output"
                          : "no page; wanted -o OUT.html";
  }
  if (std::string mistake = refit::ReadExecutor(arguments.executor, options);
      !mistake.empty()) {
    return mistake;
  }
  int streams = 0;
  for (const std::string& input :
       {plan, arguments.job, arguments.measured, arguments.against}) {
    streams += input == "-" ? 1 : 0;
  }
  if (streams > 1) return "only one of the files can be '-', standard input";
  return refit::ReplacedInput(arguments.output,
                              {{"the plan", plan},
                               {"the job file", arguments.job},
                               {"the measured run", arguments.measured},
                               {"the other plan", arguments.against}});
}

// For messages.
std::string NameOf(const std::string& path) {
  return path == "-" ? "<stdin>" : path;
}

int Report(const refit::ToolInfo& tool, const ReportArguments& arguments,
           refit::simulator::Options options, const std::string& path) {
  const absl::StatusOr<refit::PlanFile> plan = refit::OpenPlan(path);
  if (!plan.ok()) return refit::Fail(tool, plan.status());

  options.record_rates = true;
  options.folds_equal_ranks = true;
  refit::simulator::UseSpeedsOf(*plan, options);
  std::optional<refit::report::JobText> job_text;
  if (!arguments.job.empty()) {
    const std::optional<refit::Job> job =
        refit::ReadPlansJob(tool, arguments.job, *plan, options);
    if (!job.has_value()) return refit::kExitError;
    job_text = refit::report::TextOfJob(arguments.job, *job);
  }
  std::optional<refit::report::MeasuredRun> measured;
  if (!arguments.measured.empty()) {
    refit::Diagnostics diagnostics;
    measured =
        refit::report::ReadMeasuredRun(arguments.measured, *plan, diagnostics);
    if (!measured.has_value()) {
      std::cerr << diagnostics.Render();
      return refit::kExitError;
    }
  }
  std::optional<refit::report::Comparison> against;
  if (!arguments.against.empty()) {
    const absl::StatusOr<refit::PlanFile> other =
        refit::OpenPlan(arguments.against);
    if (!other.ok()) return refit::Fail(tool, other.status());
    against = {.path = arguments.against,
               .digest = refit::DigestText(*other->plan().body_digest()),
               .difference = refit::ComparePlans(*other, *plan)};
  }

  const refit::ProofResult proof = refit::Prove(*plan);
  if (!proof.valid) {
    refit::Fail(tool,
                absl::StrCat(NameOf(path), ": not valid; ", proof.violation));
    return refit::kExitNo;
  }
  const absl::StatusOr<refit::simulator::Simulation> simulation =
      refit::simulator::Simulate(*plan, options);
  if (!simulation.ok()) {
    return refit::Fail(
        tool, absl::StrCat(NameOf(path), ": ", simulation.status().message()));
  }
  const std::string data =
      refit::report::ReportData({.path = path,
                                 .plan = *plan,
                                 .proof = proof,
                                 .simulation = *simulation,
                                 .job = std::move(job_text),
                                 .measured = std::move(measured),
                                 .against = std::move(against)});
  absl::Status status;
  if (arguments.json) {
    status = refit::WriteStdout(data + "\n");
  } else {
    const std::string page = refit::report::ReportPage(data);
    status = arguments.output == "-"
                 ? refit::WriteStdout(page)
                 : refit::WriteFileAtomically(
                       arguments.output,
                       absl::MakeConstSpan(
                           reinterpret_cast<const uint8_t*>(page.data()),
                           page.size()));
  }
  return status.ok() ? static_cast<int>(refit::kExitSuccess)
                     : refit::Fail(tool, status);
}

}  // namespace

static int Main(int argc, char** argv) {
  ReportArguments arguments;
  const refit::ToolInfo tool = ReportTool(arguments);
  const refit::ParsedArgs args = refit::ParseArgs(tool, argc, argv);
  if (args.done) return args.exit_status;
  const std::string& plan = args.positional[0];
  refit::simulator::Options options;
  if (const std::string mistake = CheckReport(arguments, plan, options);
      !mistake.empty()) {
    return refit::Fail(tool, mistake);
  }
  return Report(tool, arguments, options, plan);
}

int main(int argc, char** argv) {
  return refit::RunTool("refit-report", Main, argc, argv);
}
