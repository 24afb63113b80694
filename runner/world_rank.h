// One rank of a plan whose ranks meet over a control plane: its tensors, on a
// GPU or in host memory, its worker, and generated values.
#ifndef REFIT_RUNNER_WORLD_RANK_H_
#define REFIT_RUNNER_WORLD_RANK_H_

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
#include "refit/worker.h"
#include "runner/checked_run.h"
#include "runner/value_check.h"

namespace refit {

// 0, 1, … of the plan's ranks.
std::vector<int32_t> AllRanks(const PlanFile& plan);

class WorldRank {
 public:
  // Allocates the rank's tensors on `device`, connects and binds: collective
  // over all ranks. `plan` must outlive the result; `timeout` is of each step.
  // Of `options` the rank, device and transport are ignored.
  static absl::StatusOr<std::unique_ptr<WorldRank>> Create(
      const PlanFile& plan, std::unique_ptr<ControlPlane> control,
      std::shared_ptr<Device> device, std::chrono::nanoseconds timeout,
      const ExecutorOptions& options = {});

  // Binds again, with its tensors at `addresses`, in the order of tensors().
  absl::Status BindAt(absl::Span<void* const> addresses);

  // What ValueCheck does, of this rank's tensors; nothing on the other side's
  // ranks.
  absl::Status FillSources();
  absl::Status ChangeSources(double change_rate);
  absl::Status PoisonDestinations();
  absl::StatusOr<CheckResult> Check();

  // One refit, waited for. `seconds` runs from all ranks' start to this one's
  // end. `digest`: RunOptions::check. `dense`: RunOptions::dense.
  absl::StatusOr<RefitMeasurement> Refit(bool digest = false, bool dense = true,
                                         uint32_t direct_multiprocessors = 0);

  Executor& executor() { return worker_->executor(); }
  Transport& transport() { return worker_->transport(); }
  Device& device() { return *device_; }
  Stream stream() const { return stream_->get(); }
  const std::vector<BoundTensor>& tensors() const { return tensors_; }

 private:
  WorldRank(const PlanFile& plan, int32_t rank, std::shared_ptr<Device> device,
            std::chrono::nanoseconds timeout);
  absl::Status Allocate();
  absl::Status Bind();
  // Copies all tensors and bitmaps, from where values are made or to where they
  // are checked; nothing if that is where they are.
  absl::Status CopyTensors(bool to_device);

  const PlanFile& plan_;
  const int32_t rank_;
  const std::chrono::nanoseconds timeout_;
  ValueCheck check_;
  const std::shared_ptr<Device> device_;
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<DeviceMemory> bitmaps_;  // null: the plan takes none
  std::vector<BoundTensor> tensors_;
  // The same tensors in host memory, where values are made and checked.
  std::unique_ptr<DeviceMemory> host_memory_;  // null if they are there anyway
  std::unique_ptr<DeviceMemory> host_bitmaps_;
  TensorsByRank host_tensors_;  // of this rank alone
  std::unique_ptr<DeviceStream> stream_;
  std::unique_ptr<Worker> worker_;  // ends first
};

// How many GPUs this process sees, at least one. Errors: kUnimplemented, a
// build without CUDA; kNotFound.
absl::StatusOr<int> DevicesHere();

// `refit-run --transport nccl|ucx --check` of one rank, whose tensors are on
// `device`. Collective: every rank gets the result of all, but for
// rounds_of_ranks, which rank 0 alone gets.
absl::StatusOr<RunOfRanksResult> RunCheckedRank(
    const PlanFile& plan, std::unique_ptr<ControlPlane> control,
    std::shared_ptr<Device> device, const RunOfRanksOptions& options);

// The same for all ranks, as threads of this process that meet on the loopback
// interface, with every mismatch. On GPUs rank r is on device r modulo their
// number.
absl::StatusOr<RunOfRanksResult> RunCheckedThreads(
    const PlanFile& plan, bool on_gpus, const RunOfRanksOptions& options);

}  // namespace refit

#endif  // REFIT_RUNNER_WORLD_RANK_H_
