// Whole refits on GPUs, ranks as threads of this process: what only real
// streams, graphs and NCCL can show. Needs four GPUs.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "refit/control_plane.h"
#include "runner/gpu_rank.h"
#include "runner/rank_threads.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

constexpr std::chrono::seconds kTimeout(15);

class GpuWorld {
 public:
  explicit GpuWorld(const PlanFile& plan) : plan_(plan) {
    const TcpRendezvous meeting = *LoopbackRendezvous(plan.world_size());
    ranks_.resize(static_cast<size_t>(plan.world_size()));
    OnAllRanks([&](int32_t rank) -> absl::Status {
      TcpRendezvous mine = meeting;
      mine.rank = rank;
      auto control =
          ConnectTcp(mine, std::chrono::steady_clock::now() + kTimeout);
      if (!control.ok()) return control.status();
      auto made = GpuRank::Create(plan_, *std::move(control), rank, kTimeout);
      if (!made.ok()) return made.status();
      ranks_[static_cast<size_t>(rank)] = *std::move(made);
      return absl::OkStatus();
    });
  }
  ~GpuWorld() {
    // Together: no rank leaves while others map its memory.
    (void)RunRankThreads(plan_.world_size(), [&](int32_t rank) {
      ranks_[static_cast<size_t>(rank)].reset();
    });
  }

  GpuRank& rank(int32_t r) { return *ranks_[static_cast<size_t>(r)]; }

  std::vector<absl::Status> Statuses(
      const std::function<absl::Status(int32_t)>& body) {
    std::vector<absl::Status> statuses(ranks_.size());
    EXPECT_TRUE(RunRankThreads(plan_.world_size(), [&](int32_t r) {
                  statuses[static_cast<size_t>(r)] = body(r);
                }).ok());
    return statuses;
  }

  void OnAllRanks(const std::function<absl::Status(int32_t)>& body) {
    for (const absl::Status& status : Statuses(body)) {
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  bool IsSource(int32_t r) const { return plan_.side(r) == fb::Side::kSource; }

  void ExpectRefitIsRight() {
    OnAllRanks([&](int32_t r) -> absl::Status {
      if (absl::Status s = rank(r).FillSources(); !s.ok()) return s;
      if (absl::Status s = rank(r).PoisonDestinations(); !s.ok()) return s;
      if (auto refit = rank(r).Refit(); !refit.ok()) return refit.status();
      auto check = rank(r).Check();
      if (!check.ok()) return check.status();
      EXPECT_EQ(check->wrong_elements, 0) << "rank " << r;
      return absl::OkStatus();
    });
  }

 private:
  const PlanFile& plan_;
  std::vector<std::unique_ptr<GpuRank>> ranks_;
};

class RefitGpuTest : public testing::TestWithParam<fb::Mechanism> {
 protected:
  void SetUp() override {
    if (CudaDeviceCount() < 4) GTEST_SKIP() << "needs four GPUs";
  }
  PlanFile Plan() const {
    return ReshardPlan({.layers = 6,
                        .rows = 512,
                        .columns = 1024,
                        .mechanism = GetParam()})
        .Open();
  }
};

INSTANTIATE_TEST_SUITE_P(Mechanisms, RefitGpuTest,
                         testing::ValuesIn(fb::EnumValuesMechanism()));

TEST_P(RefitGpuTest, EveryByteIsRight) {
  const PlanFile plan = Plan();
  GpuWorld world(plan);
  world.ExpectRefitIsRight();
  world.ExpectRefitIsRight();
}

TEST(RelayGpuTest, OneRankFeedsThreeThatRelay) {
  if (CudaDeviceCount() < 4) GTEST_SKIP() << "needs four GPUs";
  const PlanFile plan = RelayPlan({.replicas = 3,
                                   .layers = 12,
                                   .rows_per_stripe = 256,
                                   .columns = 1024})
                            .Open();
  GpuWorld world(plan);
  for (int refit = 0; refit < 20; ++refit) world.ExpectRefitIsRight();
}

// Every byte of the rank's tensors is `value`.
bool AllBytesAre(GpuRank& rank, int value) {
  for (const BoundTensor& tensor : rank.tensors()) {
    std::vector<std::byte> bytes(tensor.size_bytes);
    EXPECT_EQ(cudaMemcpy(bytes.data(), tensor.data, bytes.size(),
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
    for (std::byte byte : bytes) {
      if (byte != std::byte(value)) return false;
    }
  }
  return true;
}

TEST_P(RefitGpuTest, CapturedRefitReplaysWithChangedWeights) {
  const PlanFile plan = Plan();
  GpuWorld world(plan);
  world.ExpectRefitIsRight();
  std::vector<cudaGraphExec_t> replays(static_cast<size_t>(plan.world_size()));
  world.OnAllRanks([&](int32_t r) -> absl::Status {
    auto stream = static_cast<cudaStream_t>(world.rank(r).stream());
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(world.rank(r).device().MakeCurrent(), absl::OkStatus());
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
              cudaSuccess);
    absl::Status status = world.rank(r).executor().Run(
        stream, {.timeout = kTimeout, .addresses = {}});
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    if (!status.ok()) return status;
    EXPECT_EQ(cudaGraphInstantiate(&replays[static_cast<size_t>(r)], graph, 0),
              cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return world.rank(r).executor().Wait();
  });
  for (int replay = 1; replay <= 10; ++replay) {
    world.OnAllRanks([&](int32_t r) -> absl::Status {
      auto stream = static_cast<cudaStream_t>(world.rank(r).stream());
      EXPECT_EQ(world.rank(r).device().MakeCurrent(), absl::OkStatus());
      if (world.IsSource(r)) {
        for (const BoundTensor& tensor : world.rank(r).tensors()) {
          EXPECT_EQ(
              cudaMemsetAsync(tensor.data, replay, tensor.size_bytes, stream),
              cudaSuccess);
        }
      }
      EXPECT_EQ(cudaGraphLaunch(replays[static_cast<size_t>(r)], stream),
                cudaSuccess);
      absl::Status status = world.rank(r).device().Synchronize(stream);
      if (!world.IsSource(r)) {
        EXPECT_TRUE(AllBytesAre(world.rank(r), replay))
            << "rank " << r << ", replay " << replay;
      }
      return status;
    });
  }
  // NCCL's communicators outlive the graphs that use them.
  for (cudaGraphExec_t replay : replays) {
    EXPECT_EQ(cudaGraphExecDestroy(replay), cudaSuccess);
  }
}

TEST_P(RefitGpuTest, RankThatDoesNotComeEndsTheRefitUntilConnect) {
  const PlanFile plan = Plan();
  GpuWorld world(plan);
  world.ExpectRefitIsRight();
  const std::vector<absl::Status> statuses =
      world.Statuses([&](int32_t r) -> absl::Status {
        if (r == 3) return absl::OkStatus();
        absl::Status status = world.rank(r).executor().Run(
            world.rank(r).stream(),
            {.timeout = std::chrono::seconds(2), .addresses = {}});
        return status.ok() ? world.rank(r).executor().Wait() : status;
      });
  for (int32_t r = 0; r < 3; ++r) {
    EXPECT_FALSE(statuses[static_cast<size_t>(r)].ok());
    EXPECT_EQ(world.rank(r).executor().state(), ExecutorState::kTorn);
    printf("rank %d: %s\n", r,
           std::string(statuses[static_cast<size_t>(r)].message()).c_str());
  }
  // Rank 3 learns of it when it comes.
  absl::Status late = world.rank(3).executor().Run(
      world.rank(3).stream(),
      {.timeout = std::chrono::seconds(2), .addresses = {}});
  if (late.ok()) late = world.rank(3).executor().Wait();
  EXPECT_FALSE(late.ok());
  printf("rank 3: %s\n", std::string(late.message()).c_str());
  world.OnAllRanks(
      [&](int32_t r) { return world.rank(r).executor().Connect(kTimeout); });
  world.ExpectRefitIsRight();
}

TEST_P(RefitGpuTest, MovedTensorEndsTheRefitUntilItIsBound) {
  const PlanFile plan = Plan();
  GpuWorld world(plan);
  const std::vector<absl::Status> statuses =
      world.Statuses([&](int32_t r) -> absl::Status {
        std::vector<const void*> addresses;
        for (const BoundTensor& tensor : world.rank(r).tensors()) {
          addresses.push_back(tensor.data);
        }
        if (r == 2) addresses[0] = nullptr;
        absl::Status status = world.rank(r).executor().Run(
            world.rank(r).stream(),
            {.timeout = kTimeout, .addresses = addresses});
        return status.ok() ? world.rank(r).executor().Wait() : status;
      });
  EXPECT_EQ(statuses[2].message(), "rank 2: a tensor moved since Bind");
  for (const absl::Status& status : statuses) EXPECT_FALSE(status.ok());
  world.OnAllRanks([&](int32_t r) {
    absl::Status status = world.rank(r).executor().Connect(kTimeout);
    return status.ok() ? world.rank(r).executor().Bind(world.rank(r).tensors(),
                                                       kTimeout)
                       : status;
  });
  world.ExpectRefitIsRight();
}

}  // namespace
}  // namespace refit
