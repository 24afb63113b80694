#include "runner/world_rank.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "executor/agreement.h"
#include "plan/schedule/rank_schedule.h"
#include "refit/cuda_device.h"
#include "refit/host_device.h"
#include "runner/rank_report.h"
#include "runner/rank_threads.h"

namespace refit {
namespace {

using Clock = std::chrono::steady_clock;

// What the ranks hold and send because the transport reaches no peer's tensors.
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

// What all ranks must be given alike, as refit-run takes it.
std::string SharedFlags(const RunOfRanksOptions& options) {
  return absl::StrFormat("--iterations %d%s%s", options.iterations,
                         options.digest ? " --digest" : "",
                         options.change_rate.has_value()
                             ? absl::StrFormat(" --delta --change-rate %.15g",
                                               *options.change_rate)
                             : "");
}

// Ranks that were not would wait for each other, or check other values than
// were sent. Collective: an error on all ranks alike.
absl::Status CheckSharedFlags(WorldRank& rank,
                              const RunOfRanksOptions& options) {
  return ThroughRankZero(
             rank.transport(), Clock::now() + options.timeout,
             SharedFlags(options),
             [](absl::Span<const std::string> flags)
                 -> absl::StatusOr<std::string> {
               const auto other = std::find_if(
                   flags.begin(), flags.end(), [&](const std::string& of_rank) {
                     return of_rank != flags.front();
                   });
               if (other == flags.end()) return "";
               return absl::InvalidArgumentError(absl::StrCat(
                   "rank ", other - flags.begin(), " was started with ", *other,
                   ", and rank 0 with ", flags.front(),
                   "; start all ranks with the same flags"));
             })
      .status();
}

}  // namespace

std::vector<int32_t> AllRanks(const PlanFile& plan) {
  std::vector<int32_t> ranks(static_cast<size_t>(plan.world_size()));
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    ranks[rank] = static_cast<int32_t>(rank);
  }
  return ranks;
}

WorldRank::WorldRank(const PlanFile& plan, int32_t rank,
                     std::shared_ptr<Device> device,
                     std::chrono::nanoseconds timeout)
    : plan_(plan),
      rank_(rank),
      timeout_(timeout),
      check_(plan, rank,
             device->IsHost() ? Division::kExact : Division::kByReciprocal),
      device_(std::move(device)),
      tensors_(TensorsOfRank(plan, rank)),
      host_tensors_(static_cast<size_t>(plan.world_size())) {}

absl::StatusOr<std::unique_ptr<WorldRank>> WorldRank::Create(
    const PlanFile& plan, std::unique_ptr<ControlPlane> control,
    std::shared_ptr<Device> device, std::chrono::nanoseconds timeout,
    const ExecutorOptions& options) {
  const int32_t rank = control->rank();
  if (control->world_size() != plan.world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the plan has ", plan.world_size(), " ranks, there are ",
                     control->world_size(), " processes"));
  }
  std::unique_ptr<WorldRank> made(
      new WorldRank(plan, rank, std::move(device), timeout));
  if (absl::Status s = made->Allocate(); !s.ok()) return s;
  WorkerOptions worker_options = {
      .plan = std::shared_ptr<const PlanFile>(std::shared_ptr<void>(), &plan),
      .device = made->device_,
      .meeting = std::move(control),
      .executor = options};
  worker_options.executor.rank = rank;
  absl::StatusOr<std::unique_ptr<Worker>> worker =
      Worker::Create(std::move(worker_options));
  if (!worker.ok()) return worker.status();
  made->worker_ = *std::move(worker);
  absl::Status status = made->executor().Connect(timeout);
  if (status.ok()) status = made->Bind();
  if (!status.ok()) return status;
  return made;
}

absl::Status WorldRank::Allocate() {
  absl::StatusOr<std::unique_ptr<DeviceMemory>> memory =
      AllocateTensors(*device_, tensors_);
  if (!memory.ok()) return memory.status();
  memory_ = *std::move(memory);
  memory = AllocateBitmaps(plan_, rank_, *device_, tensors_);
  if (!memory.ok()) return memory.status();
  bitmaps_ = *std::move(memory);
  std::vector<BoundTensor>& host_tensors =
      host_tensors_[static_cast<size_t>(rank_)];
  host_tensors = tensors_;
  if (!device_->IsHost()) {
    HostDevice host;
    memory = AllocateTensors(host, host_tensors);
    if (!memory.ok()) return memory.status();
    host_memory_ = *std::move(memory);
    memory = AllocateBitmaps(plan_, rank_, host, host_tensors);
    if (!memory.ok()) return memory.status();
    host_bitmaps_ = *std::move(memory);
  }
  // Where ValueCheck sets bits.
  if (DeviceMemory* const bits =
          (device_->IsHost() ? bitmaps_ : host_bitmaps_).get()) {
    std::memset(bits->data(), 0, bits->size_bytes());
  }
  absl::StatusOr<std::unique_ptr<DeviceStream>> stream =
      device_->CreateStream();
  if (!stream.ok()) return stream.status();
  stream_ = *std::move(stream);
  return absl::OkStatus();
}

absl::Status WorldRank::Bind() {
  return executor().Bind(tensors_, timeout_, LeavePostHooks(executor()));
}

absl::Status WorldRank::BindAt(absl::Span<void* const> addresses) {
  for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].data = addresses[i];
  return Bind();
}

absl::Status WorldRank::CopyTensors(bool to_device) {
  if (host_memory_ == nullptr) return absl::OkStatus();
  const std::vector<BoundTensor>& host_tensors =
      host_tensors_[static_cast<size_t>(rank_)];
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const uint64_t size_bytes = tensors_[i].size_bytes;
    if (size_bytes == 0) continue;
    auto* const there = static_cast<std::byte*>(tensors_[i].data);
    auto* const here = static_cast<std::byte*>(host_tensors[i].data);
    absl::Status status =
        to_device ? device().Copy(there, here, size_bytes, stream())
                  : device().Copy(here, there, size_bytes, stream());
    if (!status.ok()) return status;
  }
  if (to_device && bitmaps_ != nullptr) {
    absl::Status status = device().Copy(bitmaps_->data(), host_bitmaps_->data(),
                                        bitmaps_->size_bytes(), stream());
    if (!status.ok()) return status;
  }
  return device().Synchronize(stream());
}

absl::Status WorldRank::FillSources() {
  if (plan_.side(rank_) != fb::Side::kSource) return absl::OkStatus();
  check_.FillSources(host_tensors_);
  return CopyTensors(/*to_device=*/true);
}

absl::Status WorldRank::ChangeSources(double change_rate) {
  check_.ChangeSources(host_tensors_, change_rate);
  if (plan_.side(rank_) != fb::Side::kSource) return absl::OkStatus();
  return CopyTensors(/*to_device=*/true);
}

absl::Status WorldRank::PoisonDestinations() {
  if (plan_.side(rank_) != fb::Side::kDestination) return absl::OkStatus();
  check_.PoisonDestinations(host_tensors_);
  return CopyTensors(/*to_device=*/true);
}

absl::StatusOr<CheckResult> WorldRank::Check() {
  if (plan_.side(rank_) != fb::Side::kDestination) return CheckResult{};
  absl::Status status = CopyTensors(/*to_device=*/false);
  if (!status.ok()) return status;
  return check_.Check(host_tensors_);
}

absl::StatusOr<RefitMeasurement> WorldRank::Refit(
    bool digest, bool dense, uint32_t direct_multiprocessors) {
  const absl::StatusOr<std::vector<std::string>> all_here =
      transport().ExchangeBytes("", {}, {}, Clock::now() + timeout_);
  if (!all_here.ok()) return all_here.status();
  const Clock::time_point start = Clock::now();
  absl::Status status = executor().Run(
      stream(), {.timeout = timeout_,
                 .addresses = {},
                 .check = digest,
                 .dense = dense,
                 .direct_multiprocessors = direct_multiprocessors});
  const Clock::time_point enqueued = Clock::now();
  if (status.ok()) status = executor().Wait();
  if (!status.ok()) return status;
  // As the refit did those of the device. Until then marks add up.
  if (host_bitmaps_ != nullptr) {
    std::memset(host_bitmaps_->data(), 0, host_bitmaps_->size_bytes());
  }
  RefitMeasurement measurement;
  measurement.seconds =
      std::chrono::duration<double>(Clock::now() - start).count();
  measurement.host_seconds =
      std::chrono::duration<double>(enqueued - start).count();
  measurement.counters = executor().counters();
  measurement.rounds = executor().rounds();
  measurement.delta = executor().delta_report();
  return measurement;
}

absl::StatusOr<int> DevicesHere() {
  const int devices = CudaDeviceCount();
  if (devices > 0) return devices;
  return CreateCudaDevice(0).status();
}

absl::StatusOr<RunOfRanksResult> RunCheckedRank(
    const PlanFile& plan, std::unique_ptr<ControlPlane> control,
    std::shared_ptr<Device> device, const RunOfRanksOptions& options) {
  absl::StatusOr<std::unique_ptr<WorldRank>> made =
      WorldRank::Create(plan, std::move(control), std::move(device),
                        options.timeout, {.time_rounds = options.time_rounds});
  if (!made.ok()) return made.status();
  WorldRank& rank = **made;
  if (absl::Status s = CheckSharedFlags(rank, options); !s.ok()) return s;
  if (absl::Status s = rank.FillSources(); !s.ok()) return s;
  RunOfRanksResult result;
  MeasureSizes(plan, result);
  if (!rank.transport().ReachesPeerMemory()) {
    MeasureSent(plan, result);
  }
  const int64_t refits =
      options.iterations + (options.change_rate.has_value() ? 1 : 0);
  for (int64_t i = 0; i < refits; ++i) {
    const bool dense = !options.change_rate.has_value() || i == 0;
    absl::Status made = dense ? rank.PoisonDestinations()
                              : rank.ChangeSources(*options.change_rate);
    if (!made.ok()) return made;
    absl::StatusOr<RefitMeasurement> refit = rank.Refit(options.digest, dense);
    if (!refit.ok()) return refit.status();
    absl::StatusOr<CheckResult> check = rank.Check();
    if (!check.ok()) return check.status();
    absl::StatusOr<RankReport> all =
        GatherReports(rank.transport(), {.refit = *refit, .check = *check},
                      Clock::now() + options.timeout);
    if (!all.ok()) return all.status();
    all->check.mismatches = std::move(check->mismatches);
    result.refits.push_back(std::move(all->refit));
    result.check = std::move(all->check);
    if (result.check.wrong_elements > 0) break;
  }
  return result;
}

absl::StatusOr<RunOfRanksResult> RunCheckedThreads(
    const PlanFile& plan, bool on_gpus, const RunOfRanksOptions& options) {
  const absl::StatusOr<int> devices = on_gpus ? DevicesHere() : 0;
  if (!devices.ok()) return devices.status();
  absl::StatusOr<TcpRendezvous> meeting = LoopbackRendezvous(plan.world_size());
  if (!meeting.ok()) return meeting.status();
  const Clock::time_point deadline = Clock::now() + options.timeout;
  const auto run = [&](int32_t rank) -> absl::StatusOr<RunOfRanksResult> {
    TcpRendezvous mine = *meeting;
    mine.rank = rank;
    absl::StatusOr<std::unique_ptr<ControlPlane>> control =
        ConnectTcp(mine, deadline);
    if (!control.ok()) return control.status();
    std::shared_ptr<Device> device = std::make_shared<HostDevice>();
    if (on_gpus) {
      absl::StatusOr<std::unique_ptr<Device>> gpu =
          CreateCudaDevice(rank % *devices);
      if (!gpu.ok()) return gpu.status();
      device = *std::move(gpu);
    }
    return RunCheckedRank(plan, *std::move(control), std::move(device),
                          options);
  };
  std::vector<absl::StatusOr<RunOfRanksResult>> results(
      static_cast<size_t>(plan.world_size()), absl::UnknownError(""));
  absl::Status threads = RunRankThreads(plan.world_size(), [&](int32_t rank) {
    results[static_cast<size_t>(rank)] = run(rank);
  });
  if (!threads.ok()) return threads;
  std::vector<absl::Status> statuses;
  for (const auto& of_rank : results) statuses.push_back(of_rank.status());
  if (absl::Status s = MainError(statuses); !s.ok()) return s;
  RunOfRanksResult result = *std::move(results.front());
  std::vector<std::string>& mismatches = result.check.mismatches;
  for (size_t rank = 1; rank < results.size(); ++rank) {
    mismatches.insert(mismatches.end(), results[rank]->check.mismatches.begin(),
                      results[rank]->check.mismatches.end());
  }
  return result;
}

}  // namespace refit
