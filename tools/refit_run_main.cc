// refit-run: executes a plan.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/algorithm/container.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "files/atomic_file.h"
#include "plan/enum_text.h"
#include "refit/control_plane.h"
#include "refit/cuda_device.h"
#include "refit/host_device.h"
#include "runner/checked_run.h"
#include "runner/measured_trace.h"
#include "runner/safetensors_run.h"
#include "runner/world_rank.h"
#include "tools/args.h"
#include "tools/plan_input.h"

namespace {

using refit::RefitMeasurement;
using refit::RunOfRanksResult;

uint64_t PeakResidentBytes() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

const RefitMeasurement& Fastest(const RunOfRanksResult& result) {
  return *std::min_element(
      result.refits.begin(), result.refits.end(),
      [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
}

double GigabytesPerSecond(const RefitMeasurement& refit) {
  return refit.seconds > 0
             ? static_cast<double>(refit.counters.bytes_received) /
                   refit.seconds / 1e9
             : 0;
}

// A line for each kind of post-hook.
std::string PostHooksText(const RunOfRanksResult& result) {
  std::string text;
  for (const auto& [name, tensors] : result.post_hooks) {
    text += absl::StrFormat(
        "post-hook: %s of %d tensors is left to the workers\n", name, tensors);
  }
  return text;
}

// Which of the plan's programs a refit ran.
std::string RungOf(const RefitMeasurement& refit) {
  return refit.delta->is_delta ? refit::RungText(refit.delta->rung) : "dense";
}

double Percent(uint64_t part, uint64_t whole) {
  return whole == 0
             ? 0
             : 100 * static_cast<double>(part) / static_cast<double>(whole);
}

// A line for each refit of a plan with deltas, in the words of DeltaJson and of
// refit-sim.
std::string DeltaText(const RunOfRanksResult& result) {
  std::string text;
  for (size_t i = 0; i < result.refits.size(); ++i) {
    const RefitMeasurement& refit = result.refits[i];
    absl::StrAppendFormat(&text, "refit %d: rung %s", i, RungOf(refit));
    const refit::DeltaReport& delta = *refit.delta;
    if (!delta.is_delta) absl::StrAppendFormat(&text, " (%s)", delta.why_dense);
    if (const std::optional<double> rate = delta.change_rate()) {
      absl::StrAppendFormat(&text, ", change rate %.3f %% (%d of %d elements)",
                            100 * *rate, delta.changed_elements,
                            delta.elements);
    }
    absl::StrAppendFormat(
        &text,
        ", stored %d of dense %d bytes (%.3f %%), %.6f s (agree %.6f, find "
        "%.6f, encode %.6f, wire %.6f, apply %.6f, keep %.6f, check %.6f; move "
        "%.6f, total %.6f), version %d",
        delta.stored_bytes, delta.dense_bytes,
        Percent(delta.stored_bytes, delta.dense_bytes), refit.seconds,
        delta.agree_seconds, delta.find_seconds, delta.encode_seconds,
        delta.wire_seconds, delta.apply_seconds, delta.keep_seconds,
        delta.check_seconds, delta.move_seconds, delta.total_seconds,
        delta.version);
    if (delta.is_delta) {
      absl::StrAppendFormat(&text, ", base version %d", delta.base_version);
    }
    text += "\n";
  }
  return text;
}

std::string DeltaJson(const RefitMeasurement& refit) {
  const refit::DeltaReport& of = *refit.delta;
  const std::optional<double> rate = of.change_rate();
  return absl::StrFormat(
      ",\n     \"delta\": {\"rung\": \"%s\", \"why_dense\": \"%s\", "
      "\"change_rate\": %s, \"elements\": %d, \"changed_elements\": %s, "
      "\"stored_bytes\": %d, \"dense_bytes\": %d, \"base_version\": %d, "
      "\"version\": %d, \"move_seconds\": %.9f, \"keep_seconds\": %.9f, "
      "\"find_seconds\": %.9f, \"encode_seconds\": %.9f, "
      "\"wire_seconds\": %.9f, \"apply_seconds\": %.9f, "
      "\"check_seconds\": %.9f, \"agree_seconds\": %.9f, "
      "\"total_seconds\": %.9f}",
      RungOf(refit), of.why_dense,
      rate ? absl::StrFormat("%.9f", *rate) : "null", of.elements,
      rate ? absl::StrCat(of.changed_elements) : "null", of.stored_bytes,
      of.dense_bytes, of.base_version, of.version, of.move_seconds,
      of.keep_seconds, of.find_seconds, of.encode_seconds, of.wire_seconds,
      of.apply_seconds, of.check_seconds, of.agree_seconds, of.total_seconds);
}

std::string SummaryText(const refit::PlanFile& plan,
                        const RunOfRanksResult& result, bool check,
                        bool delta) {
  const RefitMeasurement& refit = Fastest(result);
  std::string text =
      absl::StrFormat("ranks: %d source, %d destination\n", plan.source_ranks(),
                      plan.world_size() - plan.source_ranks());
  if (check) {
    text += absl::StrFormat(
        "check: %s, %d of %d destination bytes checked (%d of them under "
        "declared skips), %d elements wrong\n",
        result.check.wrong_elements == 0 ? "passed" : "FAILED",
        result.check.checked_bytes, result.destination_bytes,
        result.check.skipped_bytes, result.check.wrong_elements);
  }
  text += delta ? DeltaText(result)
                : absl::StrFormat(
                      "refit: %.6f s, %d bytes in %d messages, %.2f GB/s (best "
                      "of %d)\n",
                      refit.seconds, refit.counters.bytes_received,
                      refit.counters.messages_received,
                      GigabytesPerSecond(refit), result.refits.size());
  if (result.sends_direct_rounds) {
    text +=
        "direct rounds: sent as messages, since UCX reaches no peer's "
        "tensors\n";
  }
  text += PostHooksText(result);
  text += absl::StrFormat("staging: at most %d bytes on a rank, %d in all\n",
                          result.peak_staging_bytes, result.staging_bytes);
  const uint64_t tensors = result.source_bytes + result.destination_bytes;
  text += absl::StrFormat(
      "memory: peak %d bytes; sources %d + destinations %d + staging %d + "
      "scratch %d",
      PeakResidentBytes(), result.source_bytes, result.destination_bytes,
      result.staging_bytes, result.scratch_bytes);
  if (result.snapshot_bytes > 0) {
    absl::StrAppendFormat(&text, " + snapshots %d", result.snapshot_bytes);
  }
  absl::StrAppendFormat(&text, " = %d\n",
                        tensors + result.staging_bytes + result.scratch_bytes +
                            result.snapshot_bytes);
  return text;
}

std::string RoundsJson(const RefitMeasurement& refit) {
  if (refit.rounds.empty()) return "";
  std::string text = ",\n     \"rounds\": [";
  for (const refit::RoundMeasurement& round : refit.rounds) {
    text += absl::StrFormat(
        "%s\n      {\"round\": %d, \"route\": \"%s\", \"mechanism\": \"%s\", "
        "\"bytes_sent\": %d, \"bytes_received\": %d, \"seconds\": %.9f}",
        &round == &refit.rounds.front() ? "" : ",", round.round,
        refit::EnumText(round.route), refit::EnumText(round.mechanism),
        round.bytes_sent, round.bytes_received, round.seconds);
  }
  return text + "]";
}

std::string SummaryJson(const refit::PlanFile& plan,
                        const RunOfRanksResult& result, bool check,
                        bool delta) {
  std::string text = absl::StrFormat(
      "{\n  \"plan_digest\": \"%s\",\n  \"source_ranks\": %d,\n"
      "  \"destination_ranks\": %d,\n",
      refit::DigestText(*plan.plan().body_digest()), plan.source_ranks(),
      plan.world_size() - plan.source_ranks());
  if (check) {
    text += absl::StrFormat(
        "  \"passed\": %s,\n  \"checked_bytes\": %d,\n"
        "  \"skipped_bytes\": %d,\n  \"wrong_elements\": %d,\n",
        result.check.wrong_elements == 0 ? "true" : "false",
        result.check.checked_bytes, result.check.skipped_bytes,
        result.check.wrong_elements);
  }
  if (result.sends_direct_rounds) text += "  \"sends_direct_rounds\": true,\n";
  text += "  \"post_hooks\": {";
  for (const auto& [name, tensors] : result.post_hooks) {
    text += absl::StrFormat("%s\"%s\": %d", text.back() == '{' ? "" : ", ",
                            name, tensors);
  }
  text += "},\n";
  text += absl::StrFormat(
      "  \"source_bytes\": %d,\n  \"destination_bytes\": %d,\n"
      "  \"staging_bytes\": %d,\n  \"peak_staging_bytes\": %d,\n"
      "  \"scratch_bytes\": %d,\n  \"peak_resident_bytes\": %d,\n"
      "  \"refits\": [",
      result.source_bytes, result.destination_bytes, result.staging_bytes,
      result.peak_staging_bytes, result.scratch_bytes, PeakResidentBytes());
  for (size_t i = 0; i < result.refits.size(); ++i) {
    const RefitMeasurement& refit = result.refits[i];
    text += absl::StrFormat(
        "%s\n    {\"seconds\": %.9f, \"bytes\": %d, \"messages\": %d, "
        "\"pack_seconds\": %.9f, \"wire_seconds\": %.9f, "
        "\"unpack_seconds\": %.9f, \"fused_elements\": %d%s%s}",
        i == 0 ? "" : ",", refit.seconds, refit.counters.bytes_received,
        refit.counters.messages_received, refit.counters.pack_seconds,
        refit.counters.wire_seconds, refit.counters.unpack_seconds,
        refit.counters.fused_elements, delta ? DeltaJson(refit) : "",
        RoundsJson(refit));
  }
  return text + "\n  ]\n}\n";
}

// What to do about variables of a launcher that are not there.
absl::Status WithLaunchers(const absl::Status& status) {
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(),
                   "; start one process per rank (torchrun, srun, mpirun), or "
                   "give --ranks-in-process"));
}

// A rank that ends before it has met the others tells them why, or they would
// wait for it until --timeout. It knows where they meet from its launcher.
void EndMeeting(const absl::Status& why) {
  constexpr std::chrono::seconds kPatience(10);  // ranks start about together
  const absl::StatusOr<refit::TcpRendezvous> meeting =
      refit::RendezvousFromEnvironment();
  if (!meeting.ok() || meeting->world_size == 1) return;
  (void)refit::EndMeetingTcp(
      *meeting,
      absl::Status(why.code(), absl::StrFormat("rank %d: %s", meeting->rank,
                                               std::string(why.message()))),
      std::chrono::steady_clock::now() + kPatience);
}

// On GPUs: the launcher's number of this rank on its host, modulo their number.
absl::StatusOr<std::shared_ptr<refit::Device>> DeviceOfRank(bool on_gpu) {
  if (!on_gpu) return std::make_shared<refit::HostDevice>();
  const absl::StatusOr<int32_t> local_rank = refit::LocalRankFromEnvironment();
  if (!local_rank.ok()) return WithLaunchers(local_rank.status());
  const absl::StatusOr<int> devices = refit::DevicesHere();
  if (!devices.ok()) return devices.status();
  return refit::CreateCudaDevice(*local_rank % *devices);
}

// One process per rank, told by its launcher's variables which one it is.
absl::StatusOr<RunOfRanksResult> RunThisRank(
    const refit::PlanFile& plan, const refit::RunOfRanksOptions& options,
    bool on_gpu, int32_t& rank) {
  const absl::StatusOr<refit::TcpRendezvous> meeting =
      refit::RendezvousFromEnvironment();
  if (!meeting.ok()) return WithLaunchers(meeting.status());
  rank = meeting->rank;
  if (meeting->world_size != plan.world_size()) {
    // Mostly all ranks find that, so none waits to tell the others.
    return absl::InvalidArgumentError(absl::StrFormat(
        "the launcher started %d processes, the plan has %d ranks; start one "
        "process per rank",
        meeting->world_size, plan.world_size()));
  }
  absl::StatusOr<std::shared_ptr<refit::Device>> device = DeviceOfRank(on_gpu);
  if (!device.ok()) {
    EndMeeting(device.status());
    return device.status();
  }
  absl::StatusOr<std::unique_ptr<refit::ControlPlane>> control =
      refit::ConnectTcp(*meeting,
                        std::chrono::steady_clock::now() + options.timeout);
  if (!control.ok()) return control.status();
  return refit::RunCheckedRank(plan, *std::move(control), *std::move(device),
                               options);
}

struct Flags {
  std::string transport = "local";
  std::string source_dir;
  std::string destination_dir;
  bool check = false;
  bool json = false;
  bool digest = false;
  bool time_rounds = false;
  std::string trace;
  bool delta = false;
  std::string change_rate = "0.01";
  bool ranks_in_process = false;
  int64_t iterations = 1;
  int64_t timeout_seconds = 600;
};

refit::ToolInfo ToolOf(Flags& flags) {
  return {
      .name = "refit-run",
      .usage =
          "refit-run PLAN.refit [--transport local] --check [--iterations N] "
          "[--digest] [--json]\n"
          "       refit-run PLAN.refit [--transport local] --source-dir S "
          "--destination-dir D\n"
          "       refit-run PLAN.refit --transport nccl|ucx "
          "[--ranks-in-process] --check [--iterations N] [--digest] [--json]\n"
          "       refit-run PLAN.refit ... --delta [--change-rate R] "
          "[--iterations N] [--json]",
      .summary =
          "Executes a plan on generated data (--check) or on one safetensors "
          "file per rank:\n"
          "all ranks on the CPU of this machine (local), or each on a GPU "
          "(nccl) or in host\n"
          "memory (ucx), one process per rank as torchrun, SLURM or Open MPI "
          "start them, or all\n"
          "as threads of this process. Exit status: 0 done, 1 a destination "
          "element is wrong, 2 "
          "trouble.",
      .flags =
          {{"--transport", "", "NAME", "local (default), nccl or ucx",
            &flags.transport},
           {"--ranks-in-process", "", "",
            "with nccl or ucx: all ranks as threads; with nccl on all GPUs of\n"
            "this host",
            &flags.ranks_in_process},
           {"--check", "", "",
            "generate the sources, check every destination element",
            &flags.check},
           {"--digest", "", "",
            "with --check: each refit also compares digests of the two sides, "
            "as\n"
            "a worker's run with check does",
            &flags.digest},
           {"--delta", "", "",
            "with a plan of options.delta and staged rounds: a dense refit,\n"
            "then --iterations refits before each of which a share of the\n"
            "sources' elements changes; checks all",
            &flags.delta},
           {"--change-rate", "", "R",
            "with --delta: that share, 0 to 1 (default 0.01)",
            &flags.change_rate},
           {"--source-dir", "", "DIR",
            "read rank-00000.safetensors ... of the source ranks",
            &flags.source_dir},
           {"--destination-dir", "", "DIR",
            "write the destination ranks' files, all or none",
            &flags.destination_dir},
           {"--iterations", "", "N", "refits to run (default 1)",
            &flags.iterations, 1},
           {"--timeout", "", "SECONDS", "of each refit (default 600)",
            &flags.timeout_seconds, 1, 1'000'000},
           {"--json", "", "",
            "the summary as JSON; seconds of packing, wire and unpacking\n"
            "are sums over all ranks",
            &flags.json},
           {"--time-rounds", "", "",
            "with --check --json: time every round; on GPUs without a graph",
            &flags.time_rounds},
           {"--trace", "", "FILE",
            "with --check: time every round, and write the fastest refit's as\n"
            "a trace for Perfetto, with the names of refit-sim's; on GPUs\n"
            "without a graph",
            &flags.trace}},
      .positional_min = 1,
      .positional_max = 1,
  };
}

// What is wrong with the flags; "" if nothing is. Sets `rate`.
std::string MistakeIn(const Flags& flags, const refit::ParsedArgs& args,
                      double& rate) {
  const bool is_local = flags.transport == "local";
  const bool has_dirs = !flags.source_dir.empty();
  const bool gives_rate = absl::c_linear_search(args.flags, "--change-rate");
  const std::string replaced =
      refit::ReplacedInput(flags.trace, {{"the plan", args.positional[0]}});
  const struct {
    bool is_made;
    std::string text;
  } mistakes[] = {
      {gives_rate && !flags.delta, "--change-rate needs --delta"},
      {!absl::SimpleAtod(flags.change_rate, &rate) || !(rate >= 0 && rate <= 1),
       "--change-rate is " + flags.change_rate +
           "; wanted a number from 0 to 1"},
      {flags.delta && (has_dirs || !flags.destination_dir.empty()),
       "--delta generates its data; give no --source-dir and "
       "--destination-dir beside it"},
      {!is_local && flags.transport != "nccl" && flags.transport != "ucx",
       "--transport is " + flags.transport + "; wanted local, nccl or ucx"},
      {flags.ranks_in_process && is_local,
       "--ranks-in-process needs --transport nccl or ucx"},
      {!is_local && !flags.check,
       "--transport " + flags.transport + " needs --check"},
      {flags.check == has_dirs || has_dirs == flags.destination_dir.empty(),
       "give either --check or both --source-dir and --destination-dir"},
      {flags.time_rounds && !(flags.check && flags.json),
       "--time-rounds needs --check and --json"},
      {!flags.trace.empty() && !flags.check, "--trace needs --check"},
      {!replaced.empty(), replaced},
      {flags.digest && !flags.check, "--digest needs --check"},
  };
  for (const auto& [is_made, text] : mistakes) {
    if (is_made) return text;
  }
  return "";
}

}  // namespace

static int Main(int argc, char** argv) {
  Flags flags;
  const refit::ToolInfo tool = ToolOf(flags);
  const refit::ParsedArgs args = refit::ParseArgs(tool, argc, argv);
  if (args.done) return args.exit_status;
  flags.check |= flags.delta;
  const bool is_local = flags.transport == "local";
  const bool on_gpus = flags.transport == "nccl";
  const auto fail = [&](const std::string& message) {
    const int status = refit::Fail(tool, message);
    if (!is_local && !flags.ranks_in_process) {
      EndMeeting(absl::InvalidArgumentError(message));
    }
    return status;
  };
  double rate = 0;
  if (const std::string mistake = MistakeIn(flags, args, rate);
      !mistake.empty()) {
    return fail(mistake);
  }
  absl::StatusOr<refit::PlanFile> plan = refit::OpenPlan(args.positional[0]);
  if (!plan.ok()) return fail(std::string(plan.status().message()));
  if (flags.delta && !refit::HasRungs(plan->body())) {
    return fail(
        "--delta needs a plan with staged rounds whose job has options.delta; "
        "all refits of this one are dense");
  }
  const refit::RunOfRanksOptions options = {
      .iterations = flags.iterations,
      .timeout = std::chrono::seconds(flags.timeout_seconds),
      .time_rounds = flags.time_rounds || !flags.trace.empty(),
      .digest = flags.digest,
      .change_rate = flags.delta ? std::optional(rate) : std::nullopt};
  int32_t rank = 0;
  absl::StatusOr<RunOfRanksResult> result =
      flags.ranks_in_process ? refit::RunCheckedThreads(*plan, on_gpus, options)
      : !is_local            ? RunThisRank(*plan, options, on_gpus, rank)
      : flags.check          ? refit::RunChecked(*plan, options)
                             : refit::RunSafetensors(*plan, flags.source_dir,
                                                     flags.destination_dir, options);
  if (absl::IsDataLoss(result.status())) {
    absl::FPrintF(stderr, "refit-run: %s\n", result.status().message());
    return refit::kExitNo;
  }
  if (!result.ok()) return refit::Fail(tool, result.status());
  for (const std::string& mismatch : result->check.mismatches) {
    absl::FPrintF(stderr, "refit-run: %s\n", mismatch);
  }
  if (!flags.trace.empty() && rank == 0) {
    const std::string text = refit::MeasuredTrace(*plan, Fastest(*result));
    const absl::Status written = refit::WriteFileAtomically(
        flags.trace,
        absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()),
                            text.size()));
    if (!written.ok()) return refit::Fail(tool, written);
  }
  // Without a check there is nothing to report unless asked; of many
  // processes one reports.
  if ((flags.check || flags.json) && rank == 0) {
    const std::string summary =
        flags.json ? SummaryJson(*plan, *result, flags.check, flags.delta)
                   : SummaryText(*plan, *result, flags.check, flags.delta);
    if (absl::Status written = refit::WriteStdout(summary); !written.ok()) {
      return refit::Fail(tool, written);
    }
  }
  return result->check.wrong_elements == 0 ? refit::kExitSuccess
                                           : refit::kExitNo;
}

int main(int argc, char** argv) {
  return refit::RunTool("refit-run", Main, argc, argv);
}
