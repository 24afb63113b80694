// One rank of a plan in host memory: its tensors, its executor, generated
// values. Ranks are processes, and UCX is between them.
#ifndef REFIT_RUNNER_HOST_RANK_H_
#define REFIT_RUNNER_HOST_RANK_H_

#include <chrono>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "plan/plan_file.h"
#include "refit/control_plane.h"
#include "refit/executor.h"
#include "refit/host_device.h"
#include "runner/checked_run.h"
#include "runner/value_check.h"
#include "runner/world_rank.h"

namespace refit {

class HostRank : public WorldRank {
 public:
  // Allocates the rank's tensors, connects and binds: collective over all
  // ranks. `plan` must outlive the result. Of `options` the rank, device and
  // transport are ignored.
  static absl::StatusOr<std::unique_ptr<HostRank>> Create(
      const PlanFile& plan, std::unique_ptr<ControlPlane> control,
      std::chrono::nanoseconds timeout, const ExecutorOptions& options = {});
  ~HostRank() override;

  absl::Status FillSources() override;
  absl::Status PoisonDestinations() override;
  absl::StatusOr<CheckResult> Check() override;

  Executor& executor() override { return *executor_; }
  Transport& transport() override { return *transport_; }
  Stream stream() const override { return nullptr; }

 private:
  HostRank(const PlanFile& plan, int32_t rank,
           std::chrono::nanoseconds timeout);

  const int32_t rank_;
  const ValueCheck check_;
  HostDevice device_;
  std::unique_ptr<DeviceMemory> memory_;
  TensorsByRank tensors_;  // of this rank alone
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Executor> executor_;
};

// `refit-run --transport ucx --check` of one rank; collective. Every rank gets
// the result of all.
absl::StatusOr<RunOfRanksResult> RunCheckedOnHost(
    const PlanFile& plan, std::unique_ptr<ControlPlane> control,
    const RunOfRanksOptions& options);

// The same for all ranks, as threads of this process.
absl::StatusOr<RunOfRanksResult> RunCheckedOnHostThreads(
    const PlanFile& plan, const RunOfRanksOptions& options);

}  // namespace refit

#endif  // REFIT_RUNNER_HOST_RANK_H_
