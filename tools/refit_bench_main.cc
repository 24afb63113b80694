// refit-bench: times the compiler and the execution of plans.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "bench/compile_bench.h"
#include "bench/link_bench.h"
#include "bench/link_table.h"
#include "bench/nccl_tests_json.h"
#include "bench/process_bench.h"
#include "bench/run_bench.h"
#include "bench/transfer_bench.h"
#include "compiler/diagnostics.h"
#include "compiler/job/job.h"
#include "refit/control_plane.h"
#include "refit/cuda_device.h"
#include "tools/args.h"
#include "tools/plan_input.h"

namespace {

constexpr char kProducer[] = "refit-bench " REFIT_VERSION;

std::string CompileHeader() {
  return absl::StrFormat("%6s %12s %12s %10s %10s %9s %9s %9s\n", "ranks",
                         "compile ms", "prove ms", "open ms", "file KiB",
                         "messages", "copies", "peak MiB");
}

std::string CompileRow(const refit::CompileMeasurement& row) {
  return absl::StrFormat("%6d %12.1f %12.1f %10.2f %10.1f %9d %9d %9.1f\n",
                         row.ranks, row.compile_seconds * 1e3,
                         row.prove_seconds * 1e3, row.open_seconds * 1e3,
                         static_cast<double>(row.plan_bytes) / 1024,
                         row.messages, row.copies,
                         static_cast<double>(row.peak_bytes) / (1 << 20));
}

// Shows what was measured: `status`, unless standard output does not take it.
int Show(const refit::ToolInfo& tool, const std::string& text,
         int status = refit::kExitSuccess) {
  const absl::Status written = refit::WriteStdout(text);
  return written.ok() ? status : refit::Fail(tool, written);
}

int BenchCompile(const refit::ToolInfo& tool, const std::string& path,
                 int64_t growth, int64_t iterations) {
  refit::Diagnostics diagnostics;
  const std::optional<refit::Job> job =
      refit::ReadJob(path, diagnostics, "refit-bench compile");
  if (!job.has_value()) {
    std::fputs(diagnostics.Render().c_str(), stderr);
    return refit::kExitError;
  }
  const std::vector<refit::Job> jobs =
      refit::GrowJob(*job, growth, diagnostics);
  if (!diagnostics.ok()) {
    std::fputs(diagnostics.Render().c_str(), stderr);
    return refit::kExitError;
  }
  // A table that nobody can see is not measured to its end.
  int shown = Show(tool, CompileHeader());
  std::vector<refit::CompileMeasurement> rows;
  for (const refit::Job& grown : jobs) {
    if (shown != refit::kExitSuccess) return shown;
    const absl::StatusOr<refit::CompileMeasurement> row =
        refit::MeasureCompile(grown, static_cast<int>(iterations));
    if (!row.ok()) return refit::Fail(tool, row.status());
    shown = Show(tool, CompileRow(*row));
    rows.push_back(*row);
  }
  if (shown != refit::kExitSuccess || rows.size() < 2) return shown;
  using Row = refit::CompileMeasurement;
  return Show(
      tool, absl::StrFormat("time ~ ranks^e: compile %.2f, prove %.2f\n",
                            refit::GrowthExponent(rows, &Row::compile_seconds),
                            refit::GrowthExponent(rows, &Row::prove_seconds)));
}

int BenchRun(const refit::ToolInfo& tool, const std::string& path,
             bool processes, bool json, int64_t iterations) {
  const absl::StatusOr<refit::PlanFile> plan = refit::OpenPlan(path);
  if (!plan.ok()) return refit::Fail(tool, plan.status());
  const absl::StatusOr<refit::RunMeasurement> run =
      processes ? refit::MeasureProcesses(*plan, iterations)
                : refit::MeasureRun(*plan, iterations);
  if (!run.ok()) return refit::Fail(tool, run.status());
  const double refit_seconds = refit::Median(run->refit_seconds);
  const double memcpy_seconds = refit::Median(run->memcpy_seconds);
  if (json) {
    return Show(tool, refit::NcclTestsJson(
                          kProducer, iterations,
                          {{.name = "refit",
                            .size_bytes = run->moved_bytes,
                            .seconds = refit_seconds,
                            .iteration_seconds = run->refit_seconds},
                           {.name = "memcpy",
                            .size_bytes = run->moved_bytes,
                            .seconds = memcpy_seconds,
                            .iteration_seconds = run->memcpy_seconds}}));
  }
  const double bytes = static_cast<double>(run->moved_bytes);
  std::string text = absl::StrFormat(
      "moved bytes    %d\n"
      "refit          %8.3f s  %6.2f GB/s  (median of %d)\n"
      "memcpy         %8.3f s  %6.2f GB/s  (same bytes, same cores)\n"
      "refit / memcpy %8.3f of its throughput\n",
      run->moved_bytes, refit_seconds, bytes / refit_seconds / 1e9, iterations,
      memcpy_seconds, bytes / memcpy_seconds / 1e9,
      memcpy_seconds / refit_seconds);
  if (processes) {
    const absl::StatusOr<double> iperf = refit::MeasureIperf();
    text += iperf.ok() ? absl::StrFormat(
                             "iperf3                     %6.2f GB/s  (TCP on "
                             "the loopback interface, one stream)\n",
                             *iperf / 1e9)
                       : absl::StrFormat("iperf3         not measured: %s\n",
                                         iperf.status().message());
  }
  return Show(tool, text);
}

// All ranks as threads, or, when a launcher's variables say which rank this
// process is, that one.
int BenchTransfer(const refit::ToolInfo& tool, const std::string& path,
                  bool one_rank, bool json,
                  const std::vector<std::string>& against,
                  refit::TransferOptions options) {
  const absl::StatusOr<refit::PlanFile> plan = refit::OpenPlan(path);
  if (!plan.ok()) return refit::Fail(tool, plan.status());
  if (!against.empty()) {
    absl::StatusOr<refit::OtherMethods> others =
        refit::FindOtherMethods(*plan, against, one_rank);
    if (!others.ok()) return refit::Fail(tool, others.status());
    options.others = std::make_shared<refit::OtherMethods>(*std::move(others));
  }
  // Rows are shown as they come, so that an end halfway shows what came before.
  int shown = refit::kExitSuccess;
  double ours = 0;
  if (!json) {
    options.on_row = [&](const refit::TransferRow& row) {
      std::string text;
      if (ours == 0) {
        ours = row.seconds;
        text = refit::TransferHeader();
      }
      text += refit::TransferRowText(row, ours);
      if (shown == refit::kExitSuccess) shown = Show(tool, text);
    };
  }
  int32_t rank = 0;
  const auto measure = [&]() -> absl::StatusOr<refit::TransferMeasurement> {
    if (!one_rank) return refit::MeasureTransferInProcess(*plan, options);
    const absl::StatusOr<refit::TcpRendezvous> meeting =
        refit::RendezvousFromEnvironment();
    if (!meeting.ok()) return meeting.status();
    rank = meeting->rank;
    const absl::StatusOr<int32_t> local = refit::LocalRankFromEnvironment();
    if (!local.ok()) return local.status();
    absl::StatusOr<std::unique_ptr<refit::ControlPlane>> control =
        refit::ConnectTcp(*meeting, std::chrono::steady_clock::now() +
                                        std::chrono::minutes(2));
    if (!control.ok()) return control.status();
    return refit::MeasureTransfer(
        *plan, *std::move(control),
        *local % std::max(1, refit::CudaDeviceCount()), options);
  };
  const absl::StatusOr<refit::TransferMeasurement> measured = measure();
  if (!measured.ok()) return refit::Fail(tool, measured.status());
  if (shown != refit::kExitSuccess) return shown;
  const int status =
      measured->all_right() ? refit::kExitSuccess : refit::kExitNo;
  if (rank != 0) return status;
  if (json) {
    std::vector<refit::TimedMethod> methods;
    for (const refit::TransferRow& row : measured->rows) {
      methods.push_back({.name = row.method,
                         .size_bytes = row.wire_bytes,
                         .seconds = row.seconds,
                         .wrong_elements = row.wrong_elements});
    }
    // The refit that is checked is one of the plan's.
    methods.front().wrong_elements = measured->wrong_elements;
    return Show(tool,
                refit::NcclTestsJson(kProducer, options.iterations, methods),
                status);
  }
  return Show(tool, refit::TransferSummary(*plan, *measured), status);
}

// `ranks` ranks here, or, if that is 0, the one that a launcher's variables say
// this process is.
int BenchLinks(const refit::ToolInfo& tool, const std::string& wire,
               int64_t ranks, int64_t megabytes, bool json,
               int64_t iterations) {
  if (wire != "local" && wire != "ucx" && wire != "nccl") {
    return refit::Fail(tool, absl::StrCat("--transport is ", wire,
                                          "; wanted local, ucx or nccl"));
  }
  if (wire == "local" && ranks == 0) {
    return refit::Fail(tool, "--transport local needs --ranks");
  }
  // As many bytes as keep the start of a message below 2 % of its time.
  if (megabytes == 0) megabytes = wire == "nccl" ? 512 : 64;
  const refit::LinkOptions options = {
      .message_bytes = static_cast<uint64_t>(megabytes) << 20,
      .iterations = iterations};
  int32_t rank = 0;
  const auto measure = [&]() -> absl::StatusOr<refit::LinkTable> {
    if (ranks > 0) {
      return refit::MeasureLinksHere(wire, static_cast<int32_t>(ranks),
                                     options);
    }
    const absl::StatusOr<refit::TcpRendezvous> meeting =
        refit::RendezvousFromEnvironment();
    if (!meeting.ok()) return meeting.status();
    rank = meeting->rank;
    if (meeting->world_size < 2) {
      return absl::InvalidArgumentError(
          "the launcher started one rank; wanted two or more");
    }
    int32_t ordinal = 0;
    if (wire == "nccl") {
      const absl::StatusOr<int32_t> local = refit::LocalRankFromEnvironment();
      if (!local.ok()) return local.status();
      ordinal = *local % std::max(1, refit::CudaDeviceCount());
    }
    return refit::MeasureLinksOfRank(wire, *meeting, ordinal, options);
  };
  const absl::StatusOr<refit::LinkTable> table = measure();
  if (!table.ok()) {
    const int status = refit::Fail(tool, table.status());
    return absl::IsDataLoss(table.status()) ? refit::kExitNo : status;
  }
  if (rank != 0) return refit::kExitSuccess;
  return Show(tool, json ? refit::LinkJson(kProducer, *table)
                         : refit::LinkText(*table));
}

// Reports an option of another benchmark than `subject`; "" if there is none.
std::string OptionOfAnother(const std::string& subject,
                            const refit::ParsedArgs& parsed) {
  struct Option {
    std::string_view name;
    std::string_view subject;
  };
  constexpr std::array kOptions = {
      Option{"--growth", "compile"},    Option{"--processes", "run"},
      Option{"--peers", "transfer"},    Option{"--against", "transfer"},
      Option{"--one-rank", "transfer"}, Option{"--multiprocessors", "transfer"},
      Option{"--transport", "links"},   Option{"--ranks", "links"},
      Option{"--megabytes", "links"}};
  for (const Option& option : kOptions) {
    if (option.subject == subject) continue;
    if (std::find(parsed.flags.begin(), parsed.flags.end(), option.name) ==
        parsed.flags.end()) {
      continue;
    }
    return absl::StrCat(std::string(option.name), " is an option of ",
                        std::string(option.subject), ", not of ", subject);
  }
  return "";
}

struct Flags {
  int64_t growth = 1;
  int64_t iterations = 5;
  bool peers = false;
  bool processes = false;
  bool one_rank = false;
  bool json = false;
  std::string against;
  std::string multiprocessors;
  std::string transport = "local";
  int64_t ranks = 0;
  int64_t megabytes = 0;
};

refit::ToolInfo ToolOf(Flags& flags) {
  return {
      .name = "refit-bench",
      .usage =
          "refit-bench compile JOB.json [--growth N] | refit-bench run "
          "PLAN.refit [--processes] |\n"
          "       refit-bench transfer PLAN.refit [--peers] [--one-rank]\n"
          "       [--against NAME[,NAME...]] [--multiprocessors N[,N...]] |\n"
          "       refit-bench links [--transport local|ucx|nccl] [--ranks N] "
          "[--megabytes N]",
      .summary =
          "compile: times compiling, proving and opening, each job in a "
          "process "
          "of its\n"
          "own; run: times a plan on this CPU beside memcpy of the same bytes; "
          "transfer:\n"
          "times a plan on the GPUs of this host beside the same bytes without "
          "a plan; links:\n"
          "measures every pair of ranks, and prints a table of GB/s and the "
          "\"topology\" of a\n"
          "job with these speeds.",
      .flags =
          {{"--growth", "", "N",
            "compile: also 2, 4 … N times source.data_parallel and "
            "destination.replicas",
            &flags.growth, 1, 1024},
           {"--processes", "", "",
            "run: each rank is a process, with UCX between them; also times "
            "iperf3, if it\nis installed",
            &flags.processes},
           {"--peers", "", "",
            "transfer: also broadcasts of whole models, packed and by tensor",
            &flags.peers},
           {"--against", "", "NAME[,NAME...]",
            "transfer: also nccl_m2n, NVIDIA's library of that name, or "
            "nccl_m2n_groups, with\n--one-rank and NCCL 2.30.5 or later; "
            "windows, the plan's staged messages without\npacking, beside the "
            "same in memory registered with NCCL 2.27 or later",
            &flags.against},
           {"--one-rank", "", "",
            "transfer: this process is one rank, as its launcher's variables "
            "say",
            &flags.one_rank},
           {"--json", "", "",
            "run, transfer: in the JSON of nccl-tests (-J), for what reads it; "
            "links: in that\nof nvbandwidth (--json)",
            &flags.json},
           {"--multiprocessors", "", "N[,N...]",
            "transfer: also the plan on at most N multiprocessors of each GPU",
            &flags.multiprocessors},
           {"--transport", "", "NAME",
            "links: local (default), threads on this CPU; ucx, processes on "
            "CPUs; nccl, GPUs",
            &flags.transport},
           {"--ranks", "", "N",
            "links: so many ranks here; without it this process is one rank, "
            "as its\nlauncher's variables say",
            &flags.ranks, 2, 4096},
           {"--megabytes", "", "N",
            "links: MiB of a message (default 64; nccl: 512)", &flags.megabytes,
            1, 1 << 16},
           {"--iterations", "", "N", "repetitions (default 5)",
            &flags.iterations, 1}},
      .positional_min = 1,
      .positional_max = 2,
  };
}

}  // namespace

static int Main(int argc, char** argv) {
  Flags flags;
  const refit::ToolInfo tool = ToolOf(flags);
  const refit::ParsedArgs parsed = refit::ParseArgs(tool, argc, argv);
  if (parsed.done) return parsed.exit_status;
  const std::string& subject = parsed.positional[0];
  if (subject != "compile" && subject != "run" && subject != "transfer" &&
      subject != "links") {
    return refit::Fail(
        tool, absl::StrCat("no benchmark \"", subject,
                           "\"; wanted compile, run, transfer or links"));
  }
  if (const std::string mistake = OptionOfAnother(subject, parsed);
      !mistake.empty()) {
    return refit::Fail(tool, mistake);
  }
  if (flags.json && subject == "compile") {
    return refit::Fail(
        tool, "--json is an option of run, transfer and links, not of compile");
  }
  if (subject == "links") {
    if (parsed.positional.size() > 1) {
      return refit::Fail(tool, absl::StrCat("links takes no file, not \"",
                                            parsed.positional[1], "\""));
    }
    return BenchLinks(tool, flags.transport, flags.ranks, flags.megabytes,
                      flags.json, flags.iterations);
  }
  if (parsed.positional.size() < 2) {
    return refit::Fail(
        tool, absl::StrCat(subject, " needs a file: ",
                           subject == "compile" ? "JOB.json" : "PLAN.refit"));
  }
  if (subject == "compile") {
    return BenchCompile(tool, parsed.positional[1], flags.growth,
                        flags.iterations);
  }
  if (subject == "run")
    return BenchRun(tool, parsed.positional[1], flags.processes, flags.json,
                    flags.iterations);
  refit::TransferOptions options = {.iterations = flags.iterations,
                                    .peers = flags.peers,
                                    .multiprocessors = {}};
  std::vector<absl::string_view> numbers;
  if (!flags.multiprocessors.empty())
    numbers = absl::StrSplit(flags.multiprocessors, ',');
  for (const absl::string_view text : numbers) {
    uint32_t& number = options.multiprocessors.emplace_back();
    if (!absl::SimpleAtoi(text, &number) || number == 0) {
      return refit::Fail(
          tool, absl::StrCat("--multiprocessors has \"", text,
                             "\"; wanted numbers above 0, with commas"));
    }
  }
  std::vector<std::string> others;
  if (!flags.against.empty()) others = absl::StrSplit(flags.against, ',');
  return BenchTransfer(tool, parsed.positional[1], flags.one_rank, flags.json,
                       others, std::move(options));
}

int main(int argc, char** argv) {
  return refit::RunTool("refit-bench", Main, argc, argv);
}
