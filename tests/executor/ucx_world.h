// Worlds whose ranks are threads of this process that meet on the loopback
// interface and send with UCX.
#ifndef REFIT_TESTS_EXECUTOR_UCX_WORLD_H_
#define REFIT_TESTS_EXECUTOR_UCX_WORLD_H_

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "refit/control_plane.h"
#include "refit/ucx_transport.h"
#include "runner/rank_threads.h"
#include "tests/executor/executor_world.h"

namespace refit {

// By rank.
inline std::vector<std::unique_ptr<Transport>> UcxTransports(
    int32_t world_size) {
  const TcpRendezvous meeting = *LoopbackRendezvous(world_size);
  std::vector<std::unique_ptr<Transport>> transports(
      static_cast<size_t>(world_size));
  EXPECT_TRUE(RunRankThreads(world_size, [&](int32_t rank) {
                TcpRendezvous mine = meeting;
                mine.rank = rank;
                auto control =
                    ConnectTcp(mine, std::chrono::steady_clock::now() +
                                         std::chrono::minutes(1));
                ASSERT_TRUE(control.ok()) << control.status();
                auto transport = CreateUcxTransport(*std::move(control));
                ASSERT_TRUE(transport.ok()) << transport.status();
                transports[static_cast<size_t>(rank)] = *std::move(transport);
              }).ok());
  return transports;
}

class UcxWorld : public ExecutorWorld {
 public:
  explicit UcxWorld(const PlanFile& plan) : ExecutorWorld(plan.world_size()) {
    for (auto& transport : UcxTransports(plan.world_size())) {
      AddRank(plan, std::move(transport));
    }
  }
};

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_UCX_WORLD_H_
