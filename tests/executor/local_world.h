// All ranks of a plan as threads that share a local fabric, each with a device
// of its own.
#ifndef REFIT_TESTS_EXECUTOR_LOCAL_WORLD_H_
#define REFIT_TESTS_EXECUTOR_LOCAL_WORLD_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "refit/local_transport.h"
#include "tests/executor/executor_world.h"

namespace refit {

template <typename DeviceOfRank>
class LocalWorld : public ExecutorWorld {
 public:
  explicit LocalWorld(const PlanFile& plan)
      : LocalWorld(plan, std::make_shared<LocalFabric>(plan.world_size())) {}
  ~LocalWorld() override {
    for (int32_t rank = 0; rank < world_size(); ++rank) CloseRank(rank);
  }

  DeviceOfRank& device(int32_t rank) { return *devices_[rank]; }

 private:
  LocalWorld(const PlanFile& plan, const std::shared_ptr<LocalFabric>& fabric)
      : ExecutorWorld(plan.world_size(), fabric) {
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      devices_.push_back(std::make_unique<DeviceOfRank>());
      ExecutorOptions options;
      options.device = devices_.back().get();
      AddRank(plan, *fabric->CreateTransport(rank), options);
    }
  }

  std::vector<std::unique_ptr<DeviceOfRank>> devices_;
};

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_LOCAL_WORLD_H_
