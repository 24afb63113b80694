// All ranks of a plan with deltas as threads, whose workers come and go.
#ifndef REFIT_TESTS_EXECUTOR_DELTA_WORLD_H_
#define REFIT_TESTS_EXECUTOR_DELTA_WORLD_H_

#include <gtest/gtest.h>

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
#include "refit/local_transport.h"
#include "tests/executor/executor_world.h"

namespace refit {

// The plan of a job whose paths are relative to `directory`.
inline PlanFile PlanOfJob(
    const std::string& text, const std::string& directory = "",
    const std::function<void(Limits&)>& change_limits = {}) {
  Diagnostics diagnostics;
  auto file = std::make_shared<SourceFile>();
  file->path = "job.json";
  file->text = text;
  const std::optional<Job> job =
      ReadJobText(file, directory, diagnostics, "refitc");
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

class DeltaWorld : public ExecutorWorld {
 public:
  explicit DeltaWorld(const PlanFile& plan, Device* device = nullptr,
                      int32_t rank_of_device = -1)
      : DeltaWorld(plan, std::make_shared<LocalFabric>(plan.world_size()),
                   device, rank_of_device) {}

  // By rank. `on_thread(rank)`: what a thread of that rank calls first.
  DeltaWorld(const PlanFile& plan,
             std::vector<std::unique_ptr<Transport>> transports,
             std::vector<Device*> devices,
             std::function<void(int32_t)> on_thread)
      : ExecutorWorld(plan.world_size()),
        plan_(plan),
        on_thread_(std::move(on_thread)),
        devices_(std::move(devices)) {
    AddRanks(std::move(transports));
  }

  // The worker of `rank` ends, and another one comes.
  void Replace(int32_t rank) { Load(plan_, rank, {.device = devices_[rank]}); }
  void Kill(int32_t rank) { EndExecutor(rank); }

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
      const std::function<absl::Status(int32_t)>& body) override {
    return ExecutorWorld::OnAllRanks([&](int32_t rank) {
      if (on_thread_) on_thread_(rank);
      return body(rank);
    });
  }

  static absl::Status FirstFailure(const std::vector<absl::Status>& statuses) {
    for (const absl::Status& status : statuses) {
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Connect() { return FirstFailure(ConnectAll()); }
  absl::Status Bind() { return FirstFailure(BindAll()); }
  absl::Status Start() {
    absl::Status status = Connect();
    return status.ok() ? Bind() : status;
  }

  absl::Status RefitOf(int32_t rank, RunOptions options = {}) {
    options.timeout = kTimeout;
    return ExecutorWorld::Refit(rank, options);
  }
  std::vector<absl::Status> Refits(const RunOptions& options = {}) {
    return OnAllRanks([&](int32_t rank) { return RefitOf(rank, options); });
  }
  absl::Status Refit(const RunOptions& options = {}) {
    return FirstFailure(Refits(options));
  }

  BoundTensor& Tensor(int32_t rank, std::string_view name) {
    for (BoundTensor& tensor : tensors[rank]) {
      if (tensor.name == name) return tensor;
    }
    ADD_FAILURE() << name;
    return tensors[rank].front();
  }
  const DeltaReport& report(int32_t rank = 0) {
    return executor(rank).delta_report().value();
  }
  const PlanFile& plan() const { return plan_; }

 private:
  DeltaWorld(const PlanFile& plan, const std::shared_ptr<LocalFabric>& fabric,
             Device* device, int32_t rank_of_device)
      : ExecutorWorld(plan.world_size(), fabric),
        plan_(plan),
        devices_(plan.world_size()) {
    if (rank_of_device >= 0) devices_[rank_of_device] = device;
    std::vector<std::unique_ptr<Transport>> transports;
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      transports.push_back(*fabric->CreateTransport(rank));
    }
    AddRanks(std::move(transports));
  }
  void AddRanks(std::vector<std::unique_ptr<Transport>> transports) {
    memory_.resize(transports.size());
    bits_.resize(transports.size());
    for (auto& transport : transports) {
      const int32_t rank = transport->rank();
      AddRank(plan_, std::move(transport), {.device = devices_[rank]});
      Allocate(rank);
    }
  }

  const PlanFile& plan_;
  const std::function<void(int32_t)> on_thread_;
  std::vector<Device*> devices_;  // null: the world's
  std::vector<std::vector<std::vector<std::byte>>> memory_;
  std::vector<std::vector<std::vector<uint32_t>>> bits_;
};

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_DELTA_WORLD_H_
