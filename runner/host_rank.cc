#include "runner/host_rank.h"

#include <algorithm>
#include <utility>

#include "executor/rank_schedule.h"
#include "refit/ucx_transport.h"

namespace refit {

HostRank::HostRank(const PlanFile& plan, int32_t rank,
                   std::chrono::nanoseconds timeout)
    : WorldRank(plan, timeout),
      rank_(rank),
      check_(plan, rank),
      tensors_(static_cast<size_t>(plan.world_size())) {}

HostRank::~HostRank() {
  // The executor aborts what is under way before the transport ends, and both
  // end before the tensors.
  executor_.reset();
  transport_.reset();
}

absl::StatusOr<std::unique_ptr<HostRank>> HostRank::Create(
    const PlanFile& plan, std::unique_ptr<ControlPlane> control,
    std::chrono::nanoseconds timeout, const ExecutorOptions& options) {
  if (absl::Status s = CheckWorldSize(plan, *control); !s.ok()) return s;
  const int32_t rank = control->rank();
  std::unique_ptr<HostRank> made(new HostRank(plan, rank, timeout));
  std::vector<BoundTensor>& tensors = made->tensors_[static_cast<size_t>(rank)];
  tensors = TensorsOfRank(plan, rank);
  absl::StatusOr<std::unique_ptr<DeviceMemory>> memory =
      AllocateTensors(made->device_, tensors);
  if (!memory.ok()) return memory.status();
  made->memory_ = *std::move(memory);
  absl::StatusOr<std::unique_ptr<Transport>> transport =
      CreateUcxTransport(std::move(control));
  if (!transport.ok()) return transport.status();
  made->transport_ = *std::move(transport);
  ExecutorOptions of_rank = options;
  of_rank.rank = rank;
  of_rank.device = &made->device_;
  of_rank.transport = made->transport_.get();
  absl::StatusOr<std::unique_ptr<Executor>> executor =
      Executor::Load(plan, of_rank);
  if (!executor.ok()) return executor.status();
  made->executor_ = *std::move(executor);
  absl::Status status = made->executor_->Connect(timeout);
  if (status.ok()) {
    status = made->executor_->Bind(tensors, timeout,
                                   LeavePostHooks(*made->executor_));
  }
  if (!status.ok()) return status;
  return made;
}

absl::Status HostRank::FillSources() {
  if (plan_.side(rank_) == fb::Side::kSource) check_.FillSources(tensors_);
  return absl::OkStatus();
}

absl::Status HostRank::PoisonDestinations() {
  if (plan_.side(rank_) == fb::Side::kDestination) {
    check_.PoisonDestinations(tensors_);
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckResult> HostRank::Check() {
  if (plan_.side(rank_) != fb::Side::kDestination) return CheckResult{};
  return check_.Check(tensors_);
}

namespace {

// What the ranks hold and send because UCX reaches no peer's tensors.
void MeasureSent(const PlanFile& plan, RunOfRanksResult& result) {
  result.sends_direct_rounds = HasDirectRounds(plan);
  result.staging_bytes = 0;
  result.peak_staging_bytes = 0;
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    const uint64_t staging_bytes =
        RankSchedule(plan, rank, DirectRounds::kSent).staging_bytes();
    result.staging_bytes += staging_bytes;
    result.peak_staging_bytes =
        std::max(result.peak_staging_bytes, staging_bytes);
  }
}

}  // namespace

absl::StatusOr<RunOfRanksResult> RunCheckedOnHost(
    const PlanFile& plan, std::unique_ptr<ControlPlane> control,
    const RunOfRanksOptions& options) {
  absl::StatusOr<std::unique_ptr<HostRank>> rank =
      HostRank::Create(plan, std::move(control), options.timeout,
                       {.time_rounds = options.time_rounds});
  if (!rank.ok()) return rank.status();
  absl::StatusOr<RunOfRanksResult> result =
      RunCheckedRank(plan, **rank, options);
  if (result.ok()) MeasureSent(plan, *result);
  return result;
}

absl::StatusOr<RunOfRanksResult> RunCheckedOnHostThreads(
    const PlanFile& plan, const RunOfRanksOptions& options) {
  return RunCheckedThreads(
      plan, options, [&](std::unique_ptr<ControlPlane> control) {
        return RunCheckedOnHost(plan, std::move(control), options);
      });
}

}  // namespace refit
