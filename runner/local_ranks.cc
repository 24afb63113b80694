#include "runner/local_ranks.h"

#include <algorithm>
#include <utility>

#include "refit/host_device.h"
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

void AddDelta(const std::optional<DeltaReport>& of_rank,
              std::optional<DeltaReport>& all) {
  if (!of_rank.has_value()) return;
  if (!all.has_value()) {
    all = of_rank;
    return;
  }
  all->elements += of_rank->elements;
  all->changed_elements += of_rank->changed_elements;
  all->rung = std::max(all->rung, of_rank->rung);
  all->stored_bytes += of_rank->stored_bytes;
  all->dense_bytes += of_rank->dense_bytes;
  for (double DeltaReport::*const seconds :
       {&DeltaReport::move_seconds, &DeltaReport::keep_seconds,
        &DeltaReport::find_seconds, &DeltaReport::encode_seconds,
        &DeltaReport::wire_seconds, &DeltaReport::apply_seconds,
        &DeltaReport::check_seconds, &DeltaReport::agree_seconds,
        &DeltaReport::total_seconds}) {
    (*all).*seconds = std::max((*all).*seconds, (*of_rank).*seconds);
  }
}

LocalRanks::LocalRanks(const PlanFile& plan, std::chrono::nanoseconds timeout)
    : plan_(plan), timeout_(timeout) {}

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
  const auto device = std::make_shared<HostDevice>();
  const auto fabric = std::make_shared<LocalFabric>(plan.world_size());
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Create(
        {.plan =
             std::shared_ptr<const PlanFile>(std::shared_ptr<void>(), &plan),
         .device = device,
         .fabric = fabric,
         .executor = {.rank = rank, .time_rounds = time_rounds}});
    if (!worker.ok()) return worker.status();
    ranks->workers_.push_back(*std::move(worker));
  }
  absl::Status status = ranks->OnAllRanks([&](int32_t rank) {
    Executor& executor = ranks->workers_[rank]->executor();
    absl::Status connected = executor.Connect(timeout);
    return connected.ok()
               ? executor.Bind(tensors[rank], timeout, LeavePostHooks(executor))
               : connected;
  });
  if (!status.ok()) return status;
  return ranks;
}

absl::StatusOr<RefitMeasurement> LocalRanks::Refit(bool digest, bool dense) {
  using Clock = std::chrono::steady_clock;
  std::vector<Clock::time_point> starts(plan_.world_size());
  std::vector<Clock::time_point> ends(plan_.world_size());
  absl::Status status = OnAllRanks([&](int32_t rank) {
    starts[rank] = Clock::now();
    Executor& executor = workers_[rank]->executor();
    absl::Status run = executor.Run(nullptr, {.timeout = timeout_,
                                              .addresses = {},
                                              .check = digest,
                                              .dense = dense});
    if (run.ok()) run = executor.Wait();
    ends[rank] = Clock::now();
    return run;
  });
  if (!status.ok()) return status;
  RefitMeasurement measurement;
  measurement.seconds = std::chrono::duration<double>(
                            *std::max_element(ends.begin(), ends.end()) -
                            *std::min_element(starts.begin(), starts.end()))
                            .count();
  for (const std::unique_ptr<Worker>& worker : workers_) {
    measurement.counters += worker->executor().counters();
    AddRounds(worker->executor().rounds(), measurement.rounds);
    measurement.rounds_of_ranks.push_back(worker->executor().rounds());
    AddDelta(worker->executor().delta_report(), measurement.delta);
  }
  return measurement;
}

}  // namespace refit
