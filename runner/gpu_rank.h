// One rank of a plan on a GPU: its tensors, its executor, generated values.
#ifndef REFIT_RUNNER_GPU_RANK_H_
#define REFIT_RUNNER_GPU_RANK_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/plan_file.h"
#include "refit/control_plane.h"
#include "refit/cuda_device.h"
#include "refit/executor.h"
#include "runner/checked_run.h"
#include "runner/value_check.h"
#include "runner/world_rank.h"

namespace refit {

class GpuRank : public WorldRank {
 public:
  // Allocates the rank's tensors on CUDA device `ordinal`, connects and binds:
  // collective over all ranks. `plan` must outlive the result. Of `options` the
  // rank, device and transport are ignored.
  static absl::StatusOr<std::unique_ptr<GpuRank>> Create(
      const PlanFile& plan, std::unique_ptr<ControlPlane> control, int ordinal,
      std::chrono::nanoseconds timeout, const ExecutorOptions& options = {});
  ~GpuRank() override;

  // Binds again, with its tensors at `addresses`, in the order of tensors().
  absl::Status BindAt(absl::Span<void* const> addresses);

  absl::Status FillSources() override;
  absl::Status PoisonDestinations() override;
  absl::StatusOr<CheckResult> Check() override;

  Device& device() { return *device_; }
  Executor& executor() override { return *executor_; }
  Transport& transport() override { return *transport_; }
  Stream stream() const override { return stream_->get(); }
  const std::vector<BoundTensor>& tensors() const { return tensors_; }

 private:
  GpuRank(const PlanFile& plan, int32_t rank, std::chrono::nanoseconds timeout);
  absl::Status ForEachTensor(
      const std::function<absl::Status(const BoundTensor& on_device,
                                       const BoundTensor& on_host)>& visit);

  const int32_t rank_;
  const ValueCheck check_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<DeviceStream> stream_;
  std::vector<BoundTensor> tensors_;
  // The same tensors on the host, where values are made and checked.
  std::unique_ptr<DeviceMemory> host_memory_;
  TensorsByRank host_tensors_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Executor> executor_;
};

// How many GPUs this process sees, at least one. Errors: kUnimplemented, a
// build without CUDA; kNotFound.
absl::StatusOr<int> DevicesHere();

// `refit-run --transport nccl --check` of one rank; collective. Every rank gets
// the result of all.
absl::StatusOr<RunOfRanksResult> RunCheckedOnGpu(
    const PlanFile& plan, std::unique_ptr<ControlPlane> control, int ordinal,
    const RunOfRanksOptions& options);

// The same for all ranks, as threads of this process; rank r is on device r, or
// r modulo their number.
absl::StatusOr<RunOfRanksResult> RunCheckedOnGpus(
    const PlanFile& plan, const RunOfRanksOptions& options);

}  // namespace refit

#endif  // REFIT_RUNNER_GPU_RANK_H_
