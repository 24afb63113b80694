// All ranks of a plan as threads, driven step by step.
#ifndef REFIT_TESTS_EXECUTOR_EXECUTOR_WORLD_H_
#define REFIT_TESTS_EXECUTOR_EXECUTOR_WORLD_H_

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "refit/executor.h"
#include "refit/host_device.h"
#include "runner/checked_run.h"
#include "runner/rank_threads.h"
#include "runner/value_check.h"
#include "tests/executor/all_ok.h"

namespace refit {

class ExecutorWorld {
 public:
  static constexpr std::chrono::seconds kTimeout{60};

  virtual ~ExecutorWorld() = default;

  // `body(rank)` on a thread per rank; its statuses by rank.
  virtual std::vector<absl::Status> OnAllRanks(
      const std::function<absl::Status(int32_t)>& body) {
    std::vector<absl::Status> statuses(world_size_);
    EXPECT_TRUE(RunRankThreads(world_size_, [&](int32_t rank) {
                  statuses[rank] = body(rank);
                }).ok());
    return statuses;
  }

  void Bind() {
    ASSERT_TRUE(AllOk(OnAllRanks([&](int32_t rank) {
      absl::Status s = executor(rank).Connect(kTimeout);
      return s.ok() ? executor(rank).Bind(tensors[rank], kTimeout) : s;
    })));
  }

  std::vector<absl::Status> ConnectAll() {
    return OnAllRanks(
        [&](int32_t rank) { return executor(rank).Connect(kTimeout); });
  }
  std::vector<absl::Status> BindAll() {
    return OnAllRanks([&](int32_t rank) {
      return executor(rank).Bind(tensors[rank], kTimeout);
    });
  }

  absl::Status Refit(int32_t rank, const RunOptions& options) {
    absl::Status status = executor(rank).Run(nullptr, options);
    return status.ok() ? executor(rank).Wait() : status;
  }
  std::vector<absl::Status> RefitAll(const RunOptions& options = {}) {
    return OnAllRanks([&](int32_t rank) { return Refit(rank, options); });
  }

  // A refit of `plan` that must succeed, with every element checked.
  void ExpectEveryElementRight(const PlanFile& plan) {
    const ValueCheck check(plan);
    check.FillSources(tensors);
    check.PoisonDestinations(tensors);
    RunOptions options;
    options.timeout = kTimeout;
    ASSERT_TRUE(AllOk(RefitAll(options)));
    const CheckResult result = check.Check(tensors);
    EXPECT_EQ(result.wrong_elements, 0);
    for (const std::string& mismatch : result.mismatches) {
      ADD_FAILURE() << mismatch;
    }
  }

  // Each rank's refit of which the states are compared.
  std::vector<absl::Status> CheckedRefit() {
    RunOptions options;
    options.timeout = kTimeout;
    options.check = true;
    return RefitAll(options);
  }

  // Three such refits of `plan` in a row, with every element checked.
  void ExpectCheckedRefitsRight(const PlanFile& plan) {
    const ValueCheck check(plan);
    check.FillSources(tensors);
    for (int i = 0; i < 3; ++i) {
      check.PoisonDestinations(tensors);
      ASSERT_TRUE(AllOk(CheckedRefit()));
      EXPECT_EQ(check.Check(tensors).wrong_elements, 0);
    }
  }

  // What the destinations of `plan` hold, tensor by tensor.
  std::vector<std::vector<std::byte>> Destinations(const PlanFile& plan) const {
    std::vector<std::vector<std::byte>> bytes;
    for (int32_t r = plan.source_ranks(); r < plan.world_size(); ++r) {
      for (const BoundTensor& tensor : tensors[r]) {
        const auto* data = static_cast<const std::byte*>(tensor.data);
        bytes.emplace_back(data, data + tensor.size_bytes);
      }
    }
    return bytes;
  }

  // Its executor and transport end.
  void CloseRank(int32_t rank) {
    executors_[rank].reset();
    transports_[rank].reset();
  }

  int32_t world_size() const { return world_size_; }
  Executor& executor(int32_t rank) { return *executors_[rank]; }
  Transport& transport(int32_t rank) { return *transports_[rank]; }

  TensorsByRank tensors;

 protected:
  // `shared` outlives the transports.
  explicit ExecutorWorld(int32_t world_size,
                         std::shared_ptr<void> shared = nullptr)
      : world_size_(world_size), shared_(std::move(shared)) {}

  // The next rank.
  // With `options`, but its own rank and transport; a null device is the
  // world's.
  void AddRank(const PlanFile& plan, std::unique_ptr<Transport> transport,
               ExecutorOptions options = {}) {
    const int32_t rank = transport->rank();
    transports_.push_back(std::move(transport));
    executors_.emplace_back();
    Load(plan, rank, options);
    tensors.push_back(TensorsOfRank(plan, rank));
    for (BoundTensor& tensor : tensors.back()) {
      memory_.push_back(*device_.Allocate(tensor.size_bytes));
      tensor.data = memory_.back()->data();
    }
  }

  // A new executor of the rank, without another beside it.
  void Load(const PlanFile& plan, int32_t rank, ExecutorOptions options) {
    options.rank = rank;
    options.transport = transports_[rank].get();
    if (options.device == nullptr) options.device = &device_;
    executors_[rank].reset();
    executors_[rank] = *Executor::Load(plan, options);
  }
  void EndExecutor(int32_t rank) { executors_[rank].reset(); }

  HostDevice device_;

 private:
  const int32_t world_size_;
  const std::shared_ptr<void> shared_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<std::unique_ptr<Executor>> executors_;
};

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_EXECUTOR_WORLD_H_
