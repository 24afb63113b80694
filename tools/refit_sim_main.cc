// refit-sim: how long a plan takes on given links, and why.
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "files/atomic_file.h"
#include "plan/plan_file.h"
#include "plan/text/text_sink.h"
#include "simulator/output.h"
#include "simulator/simulation.h"
#include "tools/args.h"
#include "tools/plan_input.h"
#include "tools/simulation_input.h"

namespace {

constexpr double kMostSlow = 1e6;
constexpr double kMostGigabytesPerSecond = 1e6;

struct Arguments {
  bool json = false;
  bool rounds = false;
  std::string job;
  std::string trace;
  std::string executor = "gpu";
  std::string peer_speed, network_speed, copy_speed, round_microseconds;
  std::string change_rate;
  std::string slow_ranks, slow_nics, dead_nics, oversubscription;
};

refit::ToolInfo Tool(Arguments& arguments) {
  return {
      .name = "refit-sim",
      .usage = "refit-sim PLAN.refit [options]",
      .summary =
          "Simulates one refit: messages are flows that share links fairly, "
          "and ranks wait\n"
          "as the executor does. Prints the time, the link that binds, and the "
          "critical\n"
          "path. '-' reads the plan from standard input, or writes a file to "
          "standard\n"
          "output. docs/simulator.md says what the model leaves out.\n"
          "Exit status: 0 simulated, 2 trouble.",
      .flags =
          {{"--json", "", "",
            "the same facts, all rounds and links, and the whole critical\n"
            "path as JSON",
            &arguments.json},
           {"--rounds", "", "", "with a table of all rounds",
            &arguments.rounds},
           {"--trace", "", "OUT.json",
            "write a trace for Perfetto: a process for each rank, arrows from\n"
            "sends to receives, each link's share of its speed",
            &arguments.trace},
           {"--job", "", "JOB.json",
            "the job that the plan was compiled from: its topology has the\n"
            "speeds of links, which a plan has only if the job names a\n"
            "machine or a fabric",
            &arguments.job},
           {"--peer-gigabytes-per-second", "", "G",
            "speed of a rank inside its host, each way (default: the job's,\n"
            "else 370; cpu: 4)",
            &arguments.peer_speed},
           {"--network-gigabytes-per-second", "", "G",
            "speed of a rank between hosts, each way (default: the job's,\n"
            "else 50)",
            &arguments.network_speed},
           {"--executor", "", "KIND",
            "gpu (default), or cpu: over UCX, a thread for each rank",
            &arguments.executor},
           {"--copy-gigabytes-per-second", "", "G",
            "packing and unpacking (default: 2000; cpu: 2)",
            &arguments.copy_speed},
           {"--round-microseconds", "", "U",
            "what a round between hosts costs before its bytes (default: 120)",
            &arguments.round_microseconds},
           {"--change-rate", "", "R",
            "of a plan with options.delta: a refit that sends only what\n"
            "changed, R of all elements, 0 to 1, beside a dense one",
            &arguments.change_rate},
           {"--slow-rank", "", "R=F[,R=F]",
            "what if rank R is F times slower: links, copies, launches",
            &arguments.slow_ranks},
           {"--slow-nic", "", "R=F[,R=F]",
            "what if the NIC of rank R is F times slower",
            &arguments.slow_nics},
           {"--dead-nic", "", "R[,R]",
            "what if rank R has to use the next NIC of its host",
            &arguments.dead_nics},
           {"--oversubscribe", "", "F",
            "what if the NICs of a leaf switch together are F times as fast\n"
            "as its way to the other leaves (of a host, if the plan has no\n"
            "leaves)",
            &arguments.oversubscription}},
      .positional_min = 1,
      .positional_max = 1,
  };
}

// Reads a number of the range; says what is wrong, or "".
std::string ReadNumber(absl::string_view flag, absl::string_view text,
                       double min, double max, double& value) {
  if (absl::SimpleAtod(text, &value) && value >= min && value <= max) return "";
  return absl::StrFormat("%s is \"%s\"; wanted a number from %.15g to %.15g",
                         flag, text, min, max);
}

bool ReadRank(absl::string_view text, int32_t& rank) {
  return absl::SimpleAtoi(text, &rank) && rank >= 0;
}

// "3=2,7=1.5"
std::string ReadFactors(absl::string_view flag, absl::string_view text,
                        std::map<int32_t, double>& factors) {
  if (text.empty()) return "";
  for (const absl::string_view entry : absl::StrSplit(text, ',')) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(entry, absl::MaxSplits('=', 1));
    int32_t rank = 0;
    double factor = 0;
    if (!ReadRank(parts.first, rank) ||
        !absl::SimpleAtod(parts.second, &factor) || !(factor >= 1) ||
        factor > kMostSlow) {
      return absl::StrFormat(
          "%s is \"%s\"; wanted RANK=FACTOR, with factors from 1 to %.15g",
          flag, text, kMostSlow);
    }
    if (!factors.emplace(rank, factor).second) {
      return absl::StrCat(flag, " names rank ", rank, " twice");
    }
  }
  return "";
}

std::string ReadRanks(absl::string_view flag, absl::string_view text,
                      std::set<int32_t>& ranks) {
  if (text.empty()) return "";
  for (const absl::string_view entry : absl::StrSplit(text, ',')) {
    int32_t rank = 0;
    if (!ReadRank(entry, rank)) {
      return absl::StrCat(flag, " is \"", text, "\"; wanted ranks");
    }
    if (!ranks.insert(rank).second) {
      return absl::StrCat(flag, " names rank ", rank, " twice");
    }
  }
  return "";
}

// What is wrong with the files; "" when nothing is.
std::string CheckFiles(const Arguments& arguments, const std::string& plan) {
  if (plan == "-" && arguments.job == "-") {
    return "only one of the plan and the job can be '-'";
  }
  if (arguments.trace == "-" && (arguments.json || arguments.rounds)) {
    return "--json and --rounds print where '-' writes; give a file";
  }
  return refit::ReplacedInput(
      arguments.trace, {{"the plan", plan}, {"the job file", arguments.job}});
}

// What is wrong with the other arguments; "" when nothing is. What they say
// comes in the place of what `options` has.
std::string ReadOptions(const Arguments& arguments,
                        refit::simulator::Options& options) {
  if (arguments.json && arguments.rounds) {
    return "--json shows all rounds; leave out --rounds";
  }
  struct NumberFlag {
    absl::string_view name;
    const std::string& text;
    double min, max;
    double unit;
    double* target;
  };
  double oversubscription = 0;
  double change_rate = 0;
  const NumberFlag numbers[] = {
      {"--peer-gigabytes-per-second", arguments.peer_speed, 1e-6,
       kMostGigabytesPerSecond, 1e9, &options.peer_bytes_per_second},
      {"--network-gigabytes-per-second", arguments.network_speed, 1e-6,
       kMostGigabytesPerSecond, 1e9, &options.network_bytes_per_second},
      {"--copy-gigabytes-per-second", arguments.copy_speed, 1e-6,
       kMostGigabytesPerSecond, 1e9, &options.copy_bytes_per_second},
      {"--round-microseconds", arguments.round_microseconds, 0, 1e9, 1e-6,
       &options.network_round_seconds},
      {"--oversubscribe", arguments.oversubscription, 1, kMostSlow, 1,
       &oversubscription},
      {"--change-rate", arguments.change_rate, 0, 1, 1, &change_rate},
  };
  for (const NumberFlag& number : numbers) {
    if (number.text.empty()) continue;
    double value = 0;
    const std::string mistake =
        ReadNumber(number.name, number.text, number.min, number.max, value);
    if (!mistake.empty()) return mistake;
    *number.target = value * number.unit;
  }
  if (oversubscription > 0) options.oversubscription = oversubscription;
  if (!arguments.change_rate.empty()) options.change_rate = change_rate;
  if (!arguments.peer_speed.empty() || !arguments.network_speed.empty()) {
    options.has_plan_speeds = false;
  }
  std::string mistake =
      ReadFactors("--slow-rank", arguments.slow_ranks, options.slow_ranks);
  if (mistake.empty()) {
    mistake = ReadFactors("--slow-nic", arguments.slow_nics, options.slow_nics);
  }
  if (mistake.empty()) {
    mistake = ReadRanks("--dead-nic", arguments.dead_nics, options.dead_nics);
  }
  options.record_rates = !arguments.trace.empty();
  options.folds_equal_ranks = true;
  return mistake;
}

// What `print` gives its sink, as a file or, for "-", on standard output.
absl::Status Write(const std::string& path,
                   const std::function<void(const refit::TextSink&)>& print) {
  absl::Status status;
  if (path == "-") {
    print([&](std::string_view piece) {
      if (status.ok()) status = refit::WriteStdout(piece);
    });
    return status;
  }
  absl::StatusOr<refit::AtomicFile> file = refit::AtomicFile::Create(path);
  if (!file.ok()) return file.status();
  print([&](std::string_view piece) {
    if (!status.ok()) return;
    status = file->Write(absl::MakeConstSpan(
        reinterpret_cast<const uint8_t*>(piece.data()), piece.size()));
  });
  return status.ok() ? file->Commit() : status;
}

}  // namespace

static int Main(int argc, char** argv) {
  Arguments arguments;
  const refit::ToolInfo tool = Tool(arguments);
  const refit::ParsedArgs args = refit::ParseArgs(tool, argc, argv);
  if (args.done) return args.exit_status;
  if (const std::string mistake = CheckFiles(arguments, args.positional[0]);
      !mistake.empty()) {
    return refit::Fail(tool, mistake);
  }
  refit::simulator::Options options;
  if (const std::string mistake =
          refit::ReadExecutor(arguments.executor, options);
      !mistake.empty()) {
    return refit::Fail(tool, mistake);
  }
  const std::string& path = args.positional[0];
  const absl::StatusOr<refit::PlanFile> plan = refit::OpenPlan(path);
  if (!plan.ok()) return refit::Fail(tool, plan.status());
  refit::simulator::UseSpeedsOf(*plan, options);
  if (!arguments.job.empty() &&
      !refit::ReadPlansJob(tool, arguments.job, *plan, options)) {
    return refit::kExitError;
  }
  if (const std::string mistake = ReadOptions(arguments, options);
      !mistake.empty()) {
    return refit::Fail(tool, mistake);
  }
  const absl::StatusOr<refit::simulator::Simulation> simulation =
      refit::simulator::Simulate(*plan, options);
  if (!simulation.ok()) {
    return refit::Fail(tool, absl::StrCat(path == "-" ? "<stdin>" : path, ": ",
                                          simulation.status().message()));
  }
  absl::Status status;
  if (!arguments.trace.empty()) {
    status = Write(arguments.trace, [&](const refit::TextSink& sink) {
      refit::simulator::WriteTrace(*plan, *simulation, sink);
    });
  }
  if (!status.ok()) return refit::Fail(tool, status);
  if (arguments.trace == "-") return refit::kExitSuccess;
  status = refit::WriteStdout(
      arguments.json ? refit::simulator::SimulationJson(*plan, *simulation)
                     : refit::simulator::SimulationText(*plan, *simulation,
                                                        arguments.rounds));
  return status.ok() ? refit::kExitSuccess : refit::Fail(tool, status);
}

int main(int argc, char** argv) {
  return refit::RunTool("refit-sim", Main, argc, argv);
}
