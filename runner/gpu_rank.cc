#include "runner/gpu_rank.h"

#include <algorithm>
#include <string>
#include <utility>

#include "refit/host_device.h"
#include "refit/nccl_transport.h"

namespace refit {
namespace {

std::vector<uint32_t> HostsOf(const PlanFile& plan) {
  std::vector<uint32_t> hosts;
  for (const fb::RankProgram* program : *plan.body().programs()) {
    hosts.push_back(program->host());
  }
  return hosts;
}

}  // namespace

GpuRank::GpuRank(const PlanFile& plan, int32_t rank,
                 std::chrono::nanoseconds timeout)
    : WorldRank(plan, timeout), rank_(rank), check_(plan, rank) {}

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
  if (absl::Status s = CheckWorldSize(plan, *control); !s.ok()) return s;
  std::unique_ptr<GpuRank> made(new GpuRank(plan, rank, timeout));
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
  if (status.ok()) {
    status = made->executor_->Bind(made->tensors_, timeout,
                                   LeavePostHooks(*made->executor_));
  }
  if (!status.ok()) return status;
  return made;
}

absl::Status GpuRank::BindAt(absl::Span<void* const> addresses) {
  for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].data = addresses[i];
  return executor_->Bind(tensors_, timeout_, LeavePostHooks(*executor_));
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

absl::StatusOr<RunOfRanksResult> RunCheckedOnGpu(
    const PlanFile& plan, std::unique_ptr<ControlPlane> control, int ordinal,
    const RunOfRanksOptions& options) {
  absl::StatusOr<std::unique_ptr<GpuRank>> rank =
      GpuRank::Create(plan, std::move(control), ordinal, options.timeout,
                      {.time_rounds = options.time_rounds});
  if (!rank.ok()) return rank.status();
  return RunCheckedRank(plan, **rank, options);
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
  return RunCheckedThreads(
      plan, options, [&](std::unique_ptr<ControlPlane> control) {
        const int ordinal = control->rank() % *devices;
        return RunCheckedOnGpu(plan, std::move(control), ordinal, options);
      });
}

}  // namespace refit
