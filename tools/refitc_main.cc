// refitc: compiles a job to a proved plan.

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "compiler/compile.h"
#include "compiler/diagnostics.h"
#include "compiler/job/job.h"
#include "compiler/passes/passes.h"
#include "files/atomic_file.h"
#include "plan/nearest_word.h"
#include "plan/plan_file.h"
#include "plan/text/text.h"
#include "tools/args.h"
#include "tools/plan_input.h"

namespace {

struct Arguments {
  std::string output;
  std::string emit = "plan";
  std::string print_after;
  std::optional<std::string> stats;  // "" for text, or "json"
  bool time_passes = false;
  bool list_passes = false;
  bool warnings_are_errors = false;
};

refit::ToolInfo Tool(Arguments& arguments) {
  return {
      .name = "refitc",
      .usage = "refitc JOB.json -o PLAN.refit [options]",
      .summary =
          "Compiles a job (model, source and destination layout, topology) to "
          "a plan,\n"
          "proves it, and writes it. '-' stands for standard input or output. "
          "What you\n"
          "ask to see goes to standard output, unless the plan goes there. "
          "Warnings\n"
          "name what a job may not mean, and the key that settles it; they go "
          "to\n"
          "standard error.\n"
          "Exit status: 0 written, 2 the job has errors or a file could not be "
          "read or written.",
      .flags =
          {{"--output", "-o", "FILE", "where the plan goes", &arguments.output},
           {"--emit", "", "FORM",
            "plan (default), or text or json: the plan as refit-dump shows it",
            &arguments.emit},
           {"--stats", "", "[=json]",
            "print bytes (by route, and what destination ranks that want the\n"
            "same relay to each other), balance, lower bound, predicted time,\n"
            "binding link; as text or JSON",
            &arguments.stats},
           {"--print-after", "", "PASS",
            "print what a pass produced; 'all' for every pass",
            &arguments.print_after},
           {"--time-passes", "", "", "print on stderr what each pass cost",
            &arguments.time_passes},
           {"--werror", "", "",
            "treat warnings as errors: nothing is written, exit status 2",
            &arguments.warnings_are_errors},
           {"--list-passes", "", "", "list the passes in order and exit",
            &arguments.list_passes}},
      .positional_min = 0,
      .positional_max = 1,
  };
}

int ListPasses(const refit::ToolInfo& tool) {
  std::ostringstream text;
  for (const refit::PassInfo& pass : refit::Pipeline()) {
    text << pass.name << std::string(22 - pass.name.size(), ' ') << pass.summary
         << "\n";
  }
  const absl::Status written = refit::WriteStdout(text.str());
  return written.ok() ? refit::kExitSuccess : refit::Fail(tool, written);
}

// Reports what is wrong with the arguments; "" when nothing is.
std::string Mistake(const Arguments& arguments,
                    const refit::ParsedArgs& parsed) {
  if (parsed.positional.empty()) return "no job given; wanted refitc JOB.json";
  if (arguments.emit != "plan" && arguments.emit != "text" &&
      arguments.emit != "json") {
    return absl::StrCat("--emit is \"", arguments.emit,
                        "\"; wanted plan, text or json");
  }
  if (!arguments.stats.value_or("").empty() && *arguments.stats != "text" &&
      *arguments.stats != "json") {
    return absl::StrCat("--stats is \"", *arguments.stats,
                        "\"; wanted text or json");
  }
  std::vector<std::string_view> names = {"all"};
  bool known = arguments.print_after.empty() || arguments.print_after == "all";
  for (const refit::PassInfo& pass : refit::Pipeline()) {
    names.push_back(pass.name);
    known |= pass.name == arguments.print_after;
  }
  if (!known) {
    const std::string nearest =
        refit::NearestWord(arguments.print_after, names);
    return absl::StrCat(
        "--print-after: no pass \"", arguments.print_after, "\"",
        nearest.empty() ? "; see --list-passes"
                        : absl::StrCat("; did you mean \"", nearest, "\"?"));
  }
  const bool shows_something = arguments.stats.has_value() ||
                               arguments.time_passes ||
                               !arguments.print_after.empty();
  if (arguments.output.empty() && arguments.emit == "plan" &&
      !shows_something) {
    return "no output given; wanted -o PLAN.refit";
  }
  return "";
}

// The files that a job is compiled from, and those beside them that may be.
std::vector<refit::InputFile> InputsOf(const std::string& job_path,
                                       const refit::ModelSpec& model) {
  std::vector<refit::InputFile> inputs = {{"the job file", job_path}};
  if (model.config_path.has_value()) {
    inputs.push_back({"the model's config", *model.config_path});
  }
  if (model.rules_path.given) {
    inputs.push_back({"the model's rules", model.rules_path.value});
  }
  if (!model.safetensors_path.has_value()) return inputs;
  const std::filesystem::path given = *model.safetensors_path;
  std::error_code error;
  const bool is_directory = std::filesystem::is_directory(given, error);
  const std::filesystem::path directory = is_directory ? given
                                          : given.has_parent_path()
                                              ? given.parent_path()
                                              : ".";
  const bool is_index = !is_directory && given.extension() != ".safetensors";
  inputs.push_back({"the model's config", directory / "config.json"});
  inputs.push_back(
      {"the model's safetensors index",
       is_index ? given : directory / "model.safetensors.index.json"});
  for (const auto& entry :
       std::filesystem::directory_iterator(directory, error)) {
    if (entry.path().extension() == ".safetensors") {
      inputs.push_back({"a safetensors file of the model", entry.path()});
    }
  }
  return inputs;
}

// What the user asked to see goes to stdout, or to stderr where the plan has
// taken that.
absl::Status Show(const std::string& text, bool stdout_taken) {
  if (!stdout_taken) return refit::WriteStdout(text);
  std::cerr << text;
  return absl::OkStatus();
}

absl::Status WriteOutput(const Arguments& arguments,
                         absl::Span<const uint8_t> bytes) {
  if (arguments.output == "-" ||
      (arguments.output.empty() && arguments.emit != "plan")) {
    return refit::WriteStdout(
        {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  if (arguments.output.empty()) return absl::OkStatus();
  return refit::WriteFileAtomically(arguments.output, bytes);
}

absl::Span<const uint8_t> BytesOf(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Writes the plan as asked, after what is to be seen of it.
absl::Status WritePlan(const Arguments& arguments, std::vector<uint8_t> bytes,
                       bool stdout_taken) {
  // Opening checks all of it once more: only for those that read it.
  if (arguments.emit == "plan" && !arguments.stats.has_value()) {
    return WriteOutput(arguments, bytes);
  }
  const absl::StatusOr<refit::PlanFile> plan =
      refit::PlanFile::FromBytes(std::move(bytes));
  if (!plan.ok()) return plan.status();
  if (arguments.stats.has_value()) {
    const absl::Status shown =
        Show(*arguments.stats == "json" ? refit::StatsJson(*plan)
                                        : refit::StatsText(*plan),
             stdout_taken);
    if (!shown.ok()) return shown;
  }
  if (arguments.emit == "text") {
    return WriteOutput(arguments, BytesOf(refit::PlanText(*plan, {})));
  }
  if (arguments.emit == "json") {
    return WriteOutput(arguments, BytesOf(refit::PlanJson(*plan, {})));
  }
  return WriteOutput(arguments, plan->bytes());
}

}  // namespace

static int Main(int argc, char** argv) {
  Arguments arguments;
  const refit::ToolInfo tool = Tool(arguments);
  const refit::ParsedArgs parsed = refit::ParseArgs(tool, argc, argv);
  if (parsed.done) return parsed.exit_status;
  if (arguments.list_passes) return ListPasses(tool);
  if (const std::string mistake = Mistake(arguments, parsed);
      !mistake.empty()) {
    return refit::Fail(tool, mistake);
  }
  const bool stdout_taken =
      arguments.output == "-" ||
      (arguments.output.empty() && arguments.emit != "plan");
  refit::Diagnostics diagnostics(arguments.warnings_are_errors);
  const std::optional<refit::Job> job =
      refit::ReadJob(parsed.positional[0], diagnostics, "refitc");
  if (!job.has_value()) {
    std::cerr << diagnostics.Render();
    return refit::kExitError;
  }
  if (const std::string replaced = refit::ReplacedInput(
          arguments.output, InputsOf(parsed.positional[0], job->model));
      !replaced.empty()) {
    return refit::Fail(tool, replaced);
  }
  std::ostringstream passes;
  absl::StatusOr<std::vector<uint8_t>> bytes =
      refit::Compile(*job,
                     {.print_after = arguments.print_after,
                      .time_passes = arguments.time_passes,
                      .shown = &passes,
                      .log = &std::cerr},
                     diagnostics);
  // Also of a job that turned out to be wrong.
  if (const absl::Status shown = Show(passes.str(), stdout_taken);
      !shown.ok()) {
    return refit::Fail(tool, shown);
  }
  std::cerr << diagnostics.Render();
  if (!diagnostics.ok()) return refit::kExitError;
  if (!bytes.ok()) return refit::Fail(tool, bytes.status());
  const absl::Status status =
      WritePlan(arguments, *std::move(bytes), stdout_taken);
  return status.ok() ? refit::kExitSuccess : refit::Fail(tool, status);
}

int main(int argc, char** argv) {
  return refit::RunTool("refitc", Main, argc, argv);
}
