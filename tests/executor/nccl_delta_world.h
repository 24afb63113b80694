// A world of delta refits over the fake libnccl.
#ifndef REFIT_TESTS_EXECUTOR_NCCL_DELTA_WORLD_H_
#define REFIT_TESTS_EXECUTOR_NCCL_DELTA_WORLD_H_

#include <memory>
#include <vector>

#include "tests/executor/delta_world.h"
#include "tests/executor/fake_nccl/fake_nccl.h"
#include "tests/executor/lazy_device.h"
#include "tests/executor/nccl_world.h"

namespace refit {

// `devices`, by rank, must outlive it.
inline std::unique_ptr<DeltaWorld> NcclDeltaWorld(
    const PlanFile& plan, std::vector<LazyDevice>& devices) {
  static HostDevice of_transports;
  std::vector<uint32_t> hosts;
  std::vector<Device*> by_rank;
  for (LazyDevice& device : devices) {
    hosts.push_back(plan.body().programs()->Get(by_rank.size())->host());
    by_rank.push_back(&device);
  }
  return std::make_unique<DeltaWorld>(
      plan, MakeNcclTransports(of_transports, hosts), by_rank,
      [](int32_t rank) { fake_nccl_set_rank(rank); });
}

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_NCCL_DELTA_WORLD_H_
