// All ranks of a plan with deltas as threads, whose workers come and go.
#ifndef REFIT_TESTS_EXECUTOR_DELTA_WORLD_H_
#define REFIT_TESTS_EXECUTOR_DELTA_WORLD_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "compiler/compile.h"
#include "compiler/diagnostics.h"
#include "compiler/job/job.h"
#include "plan/plan_file.h"
#include "refit/executor.h"
#include "refit/host_device.h"
#include "refit/local_transport.h"
#include "runner/checked_run.h"
#include "runner/rank_threads.h"
#include "tests/executor/all_ok.h"

namespace refit {

// The plan of a job whose paths are relative to `directory`.
inline PlanFile PlanOfJob(
    const std::string& text, const std::string& directory = "",
    const std::function<void(Limits&)>& change_limits = {}) {
  Diagnostics diagnostics;
  auto file = std::make_shared<SourceFile>();
  file->path = "job.json";
  file->text = text;
  const std::optional<Job> job = ReadJobText(file, directory, diagnostics);
  EXPECT_TRUE(job.has_value()) << diagnostics.Render();
  auto bytes = Compile(*job, {.change_limits = change_limits}, diagnostics);
  EXPECT_TRUE(bytes.ok()) << bytes.status() << diagnostics.Render();
  return *PlanFile::FromBytes(*std::move(bytes));
}

// What a timer measures takes a second, so that times count parts.
class TickingDevice : public HostDevice {
 public:
  absl::StatusOr<std::unique_ptr<DeviceTimer>> CreateTimer() override {
    class Timer : public DeviceTimer {
     public:
      absl::Status Start(Stream) override { return absl::OkStatus(); }
      absl::Status Stop(Stream) override { return absl::OkStatus(); }
      absl::StatusOr<double> Seconds() override { return 1.0; }
      absl::StatusOr<double> SecondsAfter(const DeviceTimer&) override {
        return 1.0;
      }
    };
    return std::make_unique<Timer>();
  }
};

class DeltaWorld {
 public:
  static constexpr std::chrono::seconds kTimeout{60};

  explicit DeltaWorld(const PlanFile& plan, Device* device = nullptr,
                      int32_t rank_of_device = -1)
      : plan_(plan), fabric_(plan.world_size()) {
    std::vector<Device*> devices(plan.world_size(), &device_);
    if (rank_of_device >= 0) devices[rank_of_device] = device;
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      transports_.push_back(*fabric_.CreateTransport(rank));
    }
    AddRanks(std::move(devices));
  }

  // By rank. `on_thread(rank)`: what a thread of that rank calls first.
  DeltaWorld(const PlanFile& plan,
             std::vector<std::unique_ptr<Transport>> transports,
             std::vector<Device*> devices,
             std::function<void(int32_t)> on_thread)
      : plan_(plan),
        fabric_(plan.world_size()),
        on_thread_(std::move(on_thread)),
        transports_(std::move(transports)) {
    AddRanks(std::move(devices));
  }

  // The worker of `rank` ends, and another one comes.
  void Replace(int32_t rank, ExecutorOptions options = {}) {
    options.rank = rank;
    options.device = devices_[rank];
    options.transport = transports_[rank].get();
    executors_[rank].reset();
    executors_[rank] = *Executor::Load(plan_, options);
  }
  void Kill(int32_t rank) { executors_[rank].reset(); }

  // New memory for the rank's tensors; a destination's holds no weights.
  void Allocate(int32_t rank) {
    std::vector<std::vector<std::byte>> memory;
    for (BoundTensor& tensor : tensors[rank]) {
      memory.emplace_back(tensor.size_bytes, std::byte{0xa5});
      if (plan_.side(rank) == fb::Side::kSource && tensor.data != nullptr) {
        std::memcpy(memory.back().data(), tensor.data, tensor.size_bytes);
      }
      tensor.data = memory.back().data();
    }
    memory_[rank] = std::move(memory);
  }

  // The rank's worker marks what changes.
  void GiveBitmaps(int32_t rank) {
    bits_[rank].clear();
    for (BoundTensor& tensor : tensors[rank]) {
      const uint64_t elements = tensor.size_bytes / DTypeBytes(tensor.dtype);
      bits_[rank].emplace_back(elements / 32 + 1, 0);
      tensor.changes = bits_[rank].back().data();
    }
  }

  std::vector<absl::Status> OnAllRanks(
      const std::function<absl::Status(int32_t)>& body) {
    std::vector<absl::Status> statuses(plan_.world_size());
    EXPECT_TRUE(RunRankThreads(plan_.world_size(), [&](int32_t rank) {
                  if (on_thread_) on_thread_(rank);
                  statuses[rank] = body(rank);
                }).ok());
    return statuses;
  }

  static absl::Status FirstFailure(const std::vector<absl::Status>& statuses) {
    for (const absl::Status& status : statuses) {
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Connect() {
    return FirstFailure(OnAllRanks(
        [&](int32_t rank) { return executor(rank).Connect(kTimeout); }));
  }
  absl::Status Bind() {
    return FirstFailure(OnAllRanks([&](int32_t rank) {
      return executor(rank).Bind(tensors[rank], kTimeout);
    }));
  }
  absl::Status Start() {
    absl::Status status = Connect();
    return status.ok() ? Bind() : status;
  }

  absl::Status RefitOf(int32_t rank, RunOptions options = {}) {
    options.timeout = kTimeout;
    absl::Status status = executor(rank).Run(nullptr, options);
    return status.ok() ? executor(rank).Wait() : status;
  }
  std::vector<absl::Status> Refits(RunOptions options = {}) {
    return OnAllRanks([&](int32_t rank) { return RefitOf(rank, options); });
  }
  absl::Status Refit(RunOptions options = {}) {
    return FirstFailure(Refits(options));
  }

  BoundTensor& Tensor(int32_t rank, std::string_view name) {
    for (BoundTensor& tensor : tensors[rank]) {
      if (tensor.name == name) return tensor;
    }
    ADD_FAILURE() << name;
    return tensors[rank].front();
  }
  Executor& executor(int32_t rank) { return *executors_[rank]; }
  const DeltaReport& report(int32_t rank = 0) {
    return executor(rank).delta_report().value();
  }
  const PlanFile& plan() const { return plan_; }

  std::vector<std::vector<BoundTensor>> tensors;

 private:
  void AddRanks(std::vector<Device*> devices) {
    devices_ = std::move(devices);
    for (int32_t rank = 0; rank < plan_.world_size(); ++rank) {
      executors_.emplace_back();
      Replace(rank);
      tensors.push_back(TensorsOfRank(plan_, rank));
      memory_.emplace_back();
      bits_.emplace_back();
      Allocate(rank);
    }
  }

  const PlanFile& plan_;
  HostDevice device_;
  LocalFabric fabric_;
  const std::function<void(int32_t)> on_thread_;
  std::vector<Device*> devices_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<std::unique_ptr<Executor>> executors_;
  std::vector<std::vector<std::vector<std::byte>>> memory_;
  std::vector<std::vector<std::vector<uint32_t>>> bits_;
};

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_DELTA_WORLD_H_
