// All ranks of a plan as threads that share a local fabric.
#ifndef REFIT_TESTS_EXECUTOR_LOCAL_WORLD_H_
#define REFIT_TESTS_EXECUTOR_LOCAL_WORLD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "refit/local_transport.h"
#include "tests/executor/executor_world.h"

namespace refit {

class LocalWorld : public ExecutorWorld {
 public:
  using OptionsOfRank = std::function<ExecutorOptions(int32_t rank)>;

  // A null device is the world's.
  explicit LocalWorld(const PlanFile& plan, const ExecutorOptions& options = {})
      : LocalWorld(plan, [&](int32_t) { return options; }) {}
  LocalWorld(const PlanFile& plan, const OptionsOfRank& options)
      : LocalWorld(plan.world_size()) {
    AddLocalRanks(plan, options);
  }

 protected:
  // Without ranks yet.
  explicit LocalWorld(int32_t world_size)
      : LocalWorld(world_size, std::make_shared<LocalFabric>(world_size)) {}
  void AddLocalRank(const PlanFile& plan, const ExecutorOptions& options = {}) {
    AddRank(plan, *fabric_.CreateTransport(next_rank_++), options);
  }
  void AddLocalRanks(const PlanFile& plan, const OptionsOfRank& options) {
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      AddLocalRank(plan, options(rank));
    }
  }

 private:
  LocalWorld(int32_t world_size, const std::shared_ptr<LocalFabric>& fabric)
      : ExecutorWorld(world_size, fabric), fabric_(*fabric) {}

  LocalFabric& fabric_;  // that the world keeps
  int32_t next_rank_ = 0;
};

// Each rank has a device of its own.
template <typename DeviceOfRank>
class LocalWorldOf : public LocalWorld {
 public:
  explicit LocalWorldOf(const PlanFile& plan) : LocalWorld(plan.world_size()) {
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      devices_.push_back(std::make_unique<DeviceOfRank>());
      AddLocalRank(plan, {.device = devices_.back().get()});
    }
  }
  ~LocalWorldOf() override {
    for (int32_t rank = 0; rank < world_size(); ++rank) CloseRank(rank);
  }

  DeviceOfRank& device(int32_t rank) { return *devices_[rank]; }

 private:
  std::vector<std::unique_ptr<DeviceOfRank>> devices_;
};

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_LOCAL_WORLD_H_
