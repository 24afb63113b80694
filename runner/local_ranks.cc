#include "runner/local_ranks.h"

#include <algorithm>
#include <utility>

#include "runner/checked_run.h"
#include "runner/rank_threads.h"

namespace refit {

void AddRounds(absl::Span<const RoundMeasurement> of_rank,
               std::vector<RoundMeasurement>& all) {
  for (const RoundMeasurement& round : of_rank) {
    const auto found = std::lower_bound(
        all.begin(), all.end(), round,
        [](const RoundMeasurement& a, const RoundMeasurement& b) {
          return a.round < b.round;
        });
    if (found == all.end() || found->round != round.round) {
      all.insert(found, round);
      continue;
    }
    found->bytes_sent += round.bytes_sent;
    found->bytes_received += round.bytes_received;
    found->seconds = std::max(found->seconds, round.seconds);
  }
}

LocalRanks::LocalRanks(const PlanFile& plan, std::chrono::nanoseconds timeout)
    : plan_(plan), timeout_(timeout), fabric_(plan.world_size()) {}

absl::Status LocalRanks::OnAllRanks(
    const std::function<absl::Status(int32_t)>& step) {
  std::vector<absl::Status> statuses(plan_.world_size());
  absl::Status started = RunRankThreads(
      plan_.world_size(), [&](int32_t rank) { statuses[rank] = step(rank); });
  if (!started.ok()) return started;
  return MainError(statuses);
}

absl::StatusOr<std::unique_ptr<LocalRanks>> LocalRanks::Create(
    const PlanFile& plan, const std::vector<std::vector<BoundTensor>>& tensors,
    std::chrono::nanoseconds timeout, bool time_rounds) {
  std::unique_ptr<LocalRanks> ranks(new LocalRanks(plan, timeout));
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    absl::StatusOr<std::unique_ptr<Transport>> transport =
        ranks->fabric_.CreateTransport(rank);
    if (!transport.ok()) return transport.status();
    ranks->transports_.push_back(*std::move(transport));
    absl::StatusOr<std::unique_ptr<Executor>> executor =
        Executor::Load(plan, {.rank = rank,
                              .device = &ranks->device_,
                              .transport = ranks->transports_.back().get(),
                              .time_rounds = time_rounds});
    if (!executor.ok()) return executor.status();
    ranks->executors_.push_back(*std::move(executor));
  }
  absl::Status status = ranks->OnAllRanks([&](int32_t rank) {
    Executor& executor = *ranks->executors_[rank];
    absl::Status connected = executor.Connect(timeout);
    return connected.ok()
               ? executor.Bind(tensors[rank], timeout, LeavePostHooks(executor))
               : connected;
  });
  if (!status.ok()) return status;
  return ranks;
}

absl::StatusOr<RefitMeasurement> LocalRanks::Refit() {
  using Clock = std::chrono::steady_clock;
  std::vector<Clock::time_point> starts(plan_.world_size());
  std::vector<Clock::time_point> ends(plan_.world_size());
  absl::Status status = OnAllRanks([&](int32_t rank) {
    starts[rank] = Clock::now();
    absl::Status run =
        executors_[rank]->Run(nullptr, {.timeout = timeout_, .addresses = {}});
    if (run.ok()) run = executors_[rank]->Wait();
    ends[rank] = Clock::now();
    return run;
  });
  if (!status.ok()) return status;
  RefitMeasurement measurement;
  measurement.seconds = std::chrono::duration<double>(
                            *std::max_element(ends.begin(), ends.end()) -
                            *std::min_element(starts.begin(), starts.end()))
                            .count();
  for (const std::unique_ptr<Executor>& executor : executors_) {
    measurement.counters += executor->counters();
    AddRounds(executor->rounds(), measurement.rounds);
  }
  return measurement;
}

}  // namespace refit
