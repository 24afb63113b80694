#include "runner/world_rank.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runner/rank_threads.h"

namespace refit {
namespace {

using Clock = std::chrono::steady_clock;

// What ranks tell each other of one refit.
struct RankReport {
  double seconds = 0;
  RunCounters counters;
  uint64_t checked_bytes = 0;
  uint64_t skipped_bytes = 0;
  uint64_t wrong_elements = 0;
};

void Add(const RankReport& report, RefitMeasurement& refit,
         CheckResult& check) {
  refit.seconds = std::max(refit.seconds, report.seconds);
  refit.counters += report.counters;
  check.checked_bytes += report.checked_bytes;
  check.skipped_bytes += report.skipped_bytes;
  check.wrong_elements += report.wrong_elements;
}

// Tells all ranks what this one measured and sums what all did.
absl::Status ShareReports(WorldRank& rank, const PlanFile& plan,
                          const RankReport& mine,
                          absl::Span<const RoundMeasurement> my_rounds,
                          Deadline deadline, RefitMeasurement& refit,
                          CheckResult& check) {
  const std::vector<int32_t> everyone = AllRanks(plan);
  std::string bytes(reinterpret_cast<const char*>(&mine), sizeof(mine));
  bytes.append(reinterpret_cast<const char*>(my_rounds.data()),
               my_rounds.size() * sizeof(RoundMeasurement));
  const absl::StatusOr<std::vector<std::string>> reports =
      rank.transport().Share(bytes, everyone, everyone, deadline);
  if (!reports.ok()) return reports.status();
  for (const std::string& report_bytes : *reports) {
    RankReport report;
    if (report_bytes.size() < sizeof(report)) {
      return absl::InternalError("a rank sent a report that cannot be read");
    }
    std::memcpy(&report, report_bytes.data(), sizeof(report));
    Add(report, refit, check);
    std::vector<RoundMeasurement> rounds(
        (report_bytes.size() - sizeof(report)) / sizeof(RoundMeasurement));
    std::memcpy(rounds.data(), report_bytes.data() + sizeof(report),
                rounds.size() * sizeof(RoundMeasurement));
    AddRounds(rounds, refit.rounds);
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<int32_t> AllRanks(const PlanFile& plan) {
  std::vector<int32_t> ranks(static_cast<size_t>(plan.world_size()));
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    ranks[rank] = static_cast<int32_t>(rank);
  }
  return ranks;
}

absl::Status CheckWorldSize(const PlanFile& plan, const ControlPlane& control) {
  if (control.world_size() == plan.world_size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the plan has ", plan.world_size(), " ranks, there are ",
                   control.world_size(), " processes"));
}

absl::StatusOr<RefitMeasurement> WorldRank::Refit() {
  const absl::StatusOr<std::vector<std::string>> all_here = transport().Share(
      "", AllRanks(plan_), AllRanks(plan_), Clock::now() + timeout_);
  if (!all_here.ok()) return all_here.status();
  const Clock::time_point start = Clock::now();
  absl::Status status =
      executor().Run(stream(), {.timeout = timeout_, .addresses = {}});
  const Clock::time_point enqueued = Clock::now();
  if (status.ok()) status = executor().Wait();
  if (!status.ok()) return status;
  RefitMeasurement measurement;
  measurement.seconds =
      std::chrono::duration<double>(Clock::now() - start).count();
  measurement.host_seconds =
      std::chrono::duration<double>(enqueued - start).count();
  measurement.counters = executor().counters();
  measurement.rounds = executor().rounds();
  return measurement;
}

absl::StatusOr<RunOfRanksResult> RunCheckedRank(
    const PlanFile& plan, WorldRank& rank, const RunOfRanksOptions& options) {
  if (absl::Status s = rank.FillSources(); !s.ok()) return s;
  RunOfRanksResult result;
  MeasureSizes(plan, result);
  for (int64_t i = 0; i < options.iterations; ++i) {
    if (absl::Status s = rank.PoisonDestinations(); !s.ok()) return s;
    absl::StatusOr<RefitMeasurement> refit = rank.Refit();
    if (!refit.ok()) return refit.status();
    absl::StatusOr<CheckResult> check = rank.Check();
    if (!check.ok()) return check.status();
    RefitMeasurement all;
    CheckResult checked;
    checked.mismatches = check->mismatches;
    absl::Status shared = ShareReports(
        rank, plan,
        {.seconds = refit->seconds,
         .counters = refit->counters,
         .checked_bytes = check->checked_bytes,
         .skipped_bytes = check->skipped_bytes,
         .wrong_elements = check->wrong_elements},
        refit->rounds, Clock::now() + options.timeout, all, checked);
    if (!shared.ok()) return shared;
    result.refits.push_back(all);
    result.check = std::move(checked);
    if (result.check.wrong_elements > 0) break;
  }
  return result;
}

absl::StatusOr<RunOfRanksResult> RunCheckedThreads(
    const PlanFile& plan, const RunOfRanksOptions& options,
    const std::function<
        absl::StatusOr<RunOfRanksResult>(std::unique_ptr<ControlPlane>)>& run) {
  absl::StatusOr<TcpRendezvous> meeting = LoopbackRendezvous(plan.world_size());
  if (!meeting.ok()) return meeting.status();
  std::vector<absl::StatusOr<RunOfRanksResult>> results(
      static_cast<size_t>(plan.world_size()), absl::UnknownError(""));
  const Clock::time_point deadline = Clock::now() + options.timeout;
  absl::Status threads = RunRankThreads(plan.world_size(), [&](int32_t rank) {
    TcpRendezvous mine = *meeting;
    mine.rank = rank;
    absl::StatusOr<std::unique_ptr<ControlPlane>> control =
        ConnectTcp(mine, deadline);
    results[static_cast<size_t>(rank)] =
        control.ok() ? run(*std::move(control)) : control.status();
  });
  if (!threads.ok()) return threads;
  std::vector<absl::Status> statuses;
  for (const auto& of_rank : results) statuses.push_back(of_rank.status());
  if (absl::Status s = MainError(statuses); !s.ok()) return s;
  RunOfRanksResult result;
  for (absl::StatusOr<RunOfRanksResult>& of_rank : results) {
    std::vector<std::string> mismatches = std::move(result.check.mismatches);
    mismatches.insert(mismatches.end(), of_rank->check.mismatches.begin(),
                      of_rank->check.mismatches.end());
    result = *std::move(of_rank);
    result.check.mismatches = std::move(mismatches);
  }
  return result;
}

}  // namespace refit
