#include "runner/gpu_rank.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "refit/host_device.h"
#include "refit/nccl_transport.h"
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

std::vector<uint32_t> HostsOf(const PlanFile& plan) {
  std::vector<uint32_t> hosts;
  for (const fb::RankProgram* program : *plan.body().programs()) {
    hosts.push_back(program->host());
  }
  return hosts;
}

}  // namespace

std::vector<int32_t> AllRanks(const PlanFile& plan) {
  std::vector<int32_t> ranks(static_cast<size_t>(plan.world_size()));
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    ranks[rank] = static_cast<int32_t>(rank);
  }
  return ranks;
}

GpuRank::GpuRank(const PlanFile& plan, int32_t rank)
    : plan_(plan), rank_(rank), check_(plan, rank) {}

GpuRank::~GpuRank() {
  // The executor frees what it has mapped before the transport ends, and both
  // before the tensors.
  executor_.reset();
  transport_.reset();
}

absl::StatusOr<std::unique_ptr<GpuRank>> GpuRank::Create(
    const PlanFile& plan, std::unique_ptr<ControlPlane> control, int ordinal,
    std::chrono::nanoseconds timeout, const ExecutorOptions& options) {
  const int32_t rank = control->rank();
  if (control->world_size() != plan.world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the plan has ", plan.world_size(), " ranks, there are ",
                     control->world_size(), " processes"));
  }
  std::unique_ptr<GpuRank> made(new GpuRank(plan, rank));
  made->timeout_ = timeout;
  absl::StatusOr<std::unique_ptr<Device>> device = CreateCudaDevice(ordinal);
  if (!device.ok()) return device.status();
  made->device_ = *std::move(device);
  made->tensors_ = TensorsOfRank(plan, rank);
  absl::StatusOr<std::unique_ptr<DeviceMemory>> memory =
      AllocateTensors(*made->device_, made->tensors_);
  if (!memory.ok()) return memory.status();
  made->memory_ = *std::move(memory);
  made->host_tensors_.resize(static_cast<size_t>(plan.world_size()));
  std::vector<BoundTensor>& host_tensors =
      made->host_tensors_[static_cast<size_t>(rank)];
  host_tensors = TensorsOfRank(plan, rank);
  HostDevice host;
  memory = AllocateTensors(host, host_tensors);
  if (!memory.ok()) return memory.status();
  made->host_memory_ = *std::move(memory);
  absl::StatusOr<std::unique_ptr<DeviceStream>> stream =
      made->device_->CreateStream();
  if (!stream.ok()) return stream.status();
  made->stream_ = *std::move(stream);
  absl::StatusOr<std::unique_ptr<Transport>> transport =
      CreateNcclTransport({.device = made->device_.get(),
                           .control = std::move(control),
                           .hosts = HostsOf(plan)});
  if (!transport.ok()) return transport.status();
  made->transport_ = *std::move(transport);
  ExecutorOptions of_rank = options;
  of_rank.rank = rank;
  of_rank.device = made->device_.get();
  of_rank.transport = made->transport_.get();
  absl::StatusOr<std::unique_ptr<Executor>> executor =
      Executor::Load(plan, of_rank);
  if (!executor.ok()) return executor.status();
  made->executor_ = *std::move(executor);
  absl::Status status = made->executor_->Connect(timeout);
  if (status.ok()) status = made->executor_->Bind(made->tensors_, timeout);
  if (!status.ok()) return status;
  return made;
}

absl::Status GpuRank::BindAt(absl::Span<void* const> addresses) {
  for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].data = addresses[i];
  return executor_->Bind(tensors_, timeout_);
}

absl::Status GpuRank::ForEachTensor(
    const std::function<absl::Status(const BoundTensor& on_device,
                                     const BoundTensor& on_host)>& visit) {
  const std::vector<BoundTensor>& host_tensors =
      host_tensors_[static_cast<size_t>(rank_)];
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].size_bytes == 0) continue;
    if (absl::Status s = visit(tensors_[i], host_tensors[i]); !s.ok()) return s;
  }
  return device_->Synchronize(stream());
}

absl::Status GpuRank::FillSources() {
  if (plan_.side(rank_) != fb::Side::kSource) return absl::OkStatus();
  check_.FillSources(host_tensors_);
  return ForEachTensor([&](const BoundTensor& there, const BoundTensor& here) {
    return device_->Copy(static_cast<std::byte*>(there.data),
                         static_cast<const std::byte*>(here.data),
                         there.size_bytes, stream());
  });
}

absl::Status GpuRank::PoisonDestinations() {
  if (plan_.side(rank_) != fb::Side::kDestination) return absl::OkStatus();
  check_.PoisonDestinations(host_tensors_);
  return ForEachTensor([&](const BoundTensor& there, const BoundTensor& here) {
    return device_->Copy(static_cast<std::byte*>(there.data),
                         static_cast<const std::byte*>(here.data),
                         there.size_bytes, stream());
  });
}

absl::StatusOr<CheckResult> GpuRank::Check() {
  if (plan_.side(rank_) != fb::Side::kDestination) return CheckResult{};
  absl::Status status =
      ForEachTensor([&](const BoundTensor& there, const BoundTensor& here) {
        return device_->Copy(static_cast<std::byte*>(here.data),
                             static_cast<const std::byte*>(there.data),
                             there.size_bytes, stream());
      });
  if (!status.ok()) return status;
  return check_.Check(host_tensors_);
}

absl::StatusOr<RefitMeasurement> GpuRank::Refit() {
  const absl::StatusOr<std::vector<std::string>> all_here = transport_->Share(
      "", AllRanks(plan_), AllRanks(plan_), Clock::now() + timeout_);
  if (!all_here.ok()) return all_here.status();
  const Clock::time_point start = Clock::now();
  absl::Status status =
      executor_->Run(stream(), {.timeout = timeout_, .addresses = {}});
  const Clock::time_point enqueued = Clock::now();
  if (status.ok()) status = executor_->Wait();
  if (!status.ok()) return status;
  RefitMeasurement measurement;
  measurement.seconds =
      std::chrono::duration<double>(Clock::now() - start).count();
  measurement.host_seconds =
      std::chrono::duration<double>(enqueued - start).count();
  measurement.counters = executor_->counters();
  measurement.rounds = executor_->rounds();
  return measurement;
}

namespace {

// Tells all ranks what this one measured and sums what all did.
absl::Status ShareReports(GpuRank& rank, const PlanFile& plan,
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

absl::StatusOr<RunOfRanksResult> RunCheckedOnGpu(
    const PlanFile& plan, std::unique_ptr<ControlPlane> control, int ordinal,
    const RunOfRanksOptions& options) {
  absl::StatusOr<std::unique_ptr<GpuRank>> rank =
      GpuRank::Create(plan, std::move(control), ordinal, options.timeout,
                      {.time_rounds = options.time_rounds});
  if (!rank.ok()) return rank.status();
  if (absl::Status s = (*rank)->FillSources(); !s.ok()) return s;
  RunOfRanksResult result;
  MeasureSizes(plan, result);
  for (int64_t i = 0; i < options.iterations; ++i) {
    if (absl::Status s = (*rank)->PoisonDestinations(); !s.ok()) return s;
    absl::StatusOr<RefitMeasurement> refit = (*rank)->Refit();
    if (!refit.ok()) return refit.status();
    absl::StatusOr<CheckResult> check = (*rank)->Check();
    if (!check.ok()) return check.status();
    RefitMeasurement all;
    CheckResult checked;
    checked.mismatches = check->mismatches;
    absl::Status shared = ShareReports(
        **rank, plan,
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

absl::StatusOr<int> DevicesHere() {
  const int devices = CudaDeviceCount();
  if (devices > 0) return devices;
  return CreateCudaDevice(0).status();
}

absl::StatusOr<RunOfRanksResult> RunCheckedOnGpus(
    const PlanFile& plan, const RunOfRanksOptions& options) {
  const absl::StatusOr<int> devices = DevicesHere();
  if (!devices.ok()) return devices.status();
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
        control.ok() ? RunCheckedOnGpu(plan, *std::move(control),
                                       rank % *devices, options)
                     : control.status();
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
