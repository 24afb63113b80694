// Whole refits on GPUs, ranks as threads of this process: what only real
// streams, graphs and NCCL can show. Of two ranks on two or three GPUs, of four
// on more; relays, which need no NCCL, share GPUs if they must.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "plan/schedule/rank_schedule.h"
#include "refit/control_plane.h"
#include "refit/cuda_device.h"
#include "runner/rank_threads.h"
#include "runner/world_rank.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

constexpr std::chrono::seconds kTimeout(15);

class GpuWorld {
 public:
  explicit GpuWorld(const PlanFile& plan, ExecutorOptions options = {})
      : plan_(plan) {
    const TcpRendezvous meeting = *LoopbackRendezvous(plan.world_size());
    ranks_.resize(static_cast<size_t>(plan.world_size()));
    OnAllRanks([&](int32_t rank) -> absl::Status {
      TcpRendezvous mine = meeting;
      mine.rank = rank;
      auto control =
          ConnectTcp(mine, std::chrono::steady_clock::now() + kTimeout);
      if (!control.ok()) return control.status();
      auto device = CreateCudaDevice(rank % CudaDeviceCount());
      if (!device.ok()) return device.status();
      auto made = WorldRank::Create(plan_, *std::move(control),
                                    *std::move(device), kTimeout, options);
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

  WorldRank& rank(int32_t r) { return *ranks_[static_cast<size_t>(r)]; }

  std::vector<absl::Status> Statuses(
      const std::function<absl::Status(int32_t)>& body) {
    std::vector<absl::Status> statuses(ranks_.size());
    EXPECT_TRUE(RunRankThreads(plan_.world_size(), [&](int32_t r) {
                  statuses[static_cast<size_t>(r)] = body(r);
                }).ok());
    return statuses;
  }

  // A status that is not OK ends the test: what follows needs what failed.
  void OnAllRanks(const std::function<absl::Status(int32_t)>& body) {
    const std::vector<absl::Status> statuses = Statuses(body);
    for (size_t r = 0; r < statuses.size(); ++r) {
      if (statuses[r].ok()) continue;
      throw std::runtime_error(
          absl::StrCat("rank ", r, ": ", statuses[r].ToString()));
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
  std::vector<std::unique_ptr<WorldRank>> ranks_;
};

class RefitGpuTest : public testing::TestWithParam<fb::Mechanism> {
 protected:
  void SetUp() override {
    if (CudaDeviceCount() < 2) GTEST_SKIP() << "needs two GPUs";
  }
  PlanFile Plan(const std::vector<std::string>& post_hooks = {}) const {
    const uint32_t ranks_of_side = CudaDeviceCount() < 4 ? 1 : 2;
    PlanBuilder plan = ReshardPlan({.source_ranks = ranks_of_side,
                                    .destination_ranks = ranks_of_side,
                                    .layers = 6,
                                    .rows = 512,
                                    .columns = 1024,
                                    .mechanism = GetParam()});
    for (size_t rank = ranks_of_side; rank < plan.ranks.size(); ++rank) {
      plan.buffers[plan.ranks[rank].buffers[0]].post_hooks = post_hooks;
    }
    return plan.Open();
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

// Ranks are dealt out over the GPUs, whatever the plan says: four share two.
class RelayGpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (CudaDeviceCount() < 2) GTEST_SKIP() << "needs two GPUs";
    if (SharesWithOneConnection()) {
      GTEST_SKIP() << "threads that share a GPU need two connections to it, "
                      "see ThreadsThatShareAGpuAgainstThePlanAreRefused";
    }
  }
  static bool SharesWithOneConnection() {
    const char* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    return CudaDeviceCount() < 4 && connections != nullptr &&
           std::string(connections) == "1";
  }
};

TEST(RefusedGpuTest, ThreadsThatShareAGpuAgainstThePlanAreRefused) {
  // The variable counts where CUDA begins, so it is the caller's to set.
  const char* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (connections == nullptr || std::string(connections) != "1") {
    GTEST_SKIP() << "needs CUDA_DEVICE_MAX_CONNECTIONS=1";
  }
  if (CudaDeviceCount() >= 4) GTEST_SKIP() << "needs fewer GPUs than ranks";
  const PlanFile plan = RelayPlan({}).Open();
  try {
    GpuWorld world(plan);
    FAIL() << "ranks that share a GPU connect";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what())
                  .find("share a GPU and are threads of one process, where "
                        "CUDA_DEVICE_MAX_CONNECTIONS is 1"),
              std::string::npos)
        << error.what();
  }
}

TEST_F(RelayGpuTest, OneRankFeedsThreeThatRelay) {
  const PlanFile plan = RelayPlan({.replicas = 3,
                                   .layers = 12,
                                   .rows_per_stripe = 256,
                                   .columns = 1024})
                            .Open();
  GpuWorld world(plan);
  for (int refit = 0; refit < 20; ++refit) {
    world.ExpectRefitIsRight();
    for (int32_t r = 0; r < plan.world_size(); ++r) {
      EXPECT_EQ(world.rank(r).executor().counters().graph_launches, 1);
    }
  }
}

// Every byte of the rank's tensors is `value`.
bool AllBytesAre(WorldRank& rank, int value) {
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

// Fills the sources with `value`, refits, and looks at the destinations.
void ExpectRefitOf(GpuWorld& world, int value) {
  world.OnAllRanks([&](int32_t r) -> absl::Status {
    WorldRank& rank = world.rank(r);
    EXPECT_EQ(rank.device().MakeCurrent(), absl::OkStatus());
    for (const BoundTensor& tensor : rank.tensors()) {
      EXPECT_EQ(cudaMemsetAsync(tensor.data, world.IsSource(r) ? value : 0xff,
                                tensor.size_bytes,
                                static_cast<cudaStream_t>(rank.stream())),
                cudaSuccess);
    }
    if (auto refit = rank.Refit(); !refit.ok()) return refit.status();
    EXPECT_EQ(rank.device().MakeCurrent(), absl::OkStatus());
    EXPECT_TRUE(AllBytesAre(rank, value)) << "rank " << r;
    return absl::OkStatus();
  });
}

// A trainer may have another GPU current on the thread that calls.
TEST_P(RefitGpuTest, CallersKeepTheirCurrentGpu) {
  if (CudaDeviceCount() < 2) GTEST_SKIP() << "needs two GPUs";
  const PlanFile plan = Plan();
  GpuWorld world(plan);
  world.OnAllRanks([&](int32_t r) -> absl::Status {
    const int other = (r + 1) % CudaDeviceCount();
    EXPECT_EQ(cudaSetDevice(other), cudaSuccess);
    absl::Status status = world.rank(r).executor().Connect(kTimeout);
    if (status.ok()) status = world.rank(r).Refit().status();
    int current = -1;
    EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
    EXPECT_EQ(current, other) << "rank " << r;
    return status;
  });
}

TEST_P(RefitGpuTest, RefitsAreLaunchedAsAGraph) {
  const PlanFile plan = Plan();
  GpuWorld world(plan);
  // NCCL would ask the peers while it records staged rounds.
  const uint64_t launches = GetParam() == fb::Mechanism::kDirect ? 1 : 0;
  for (int value = 1; value <= 5; ++value) {
    ExpectRefitOf(world, value);
    for (int32_t r = 0; r < plan.world_size(); ++r) {
      EXPECT_EQ(world.rank(r).executor().counters().graph_launches, launches);
    }
  }
  // Another Bind, another graph, of the same memory.
  world.OnAllRanks([&](int32_t r) {
    return world.rank(r).executor().Bind(world.rank(r).tensors(), kTimeout);
  });
  ExpectRefitOf(world, 6);
  ExpectRefitOf(world, 7);
}

TEST_P(RefitGpuTest, NoGraphIsLaunchedIfRefused) {
  const PlanFile plan = Plan();
  GpuWorld world(plan, {.graph = false});
  for (int value = 1; value <= 3; ++value) {
    ExpectRefitOf(world, value);
    EXPECT_EQ(world.rank(0).executor().counters().graph_launches, 0);
  }
}

TEST_P(RefitGpuTest, RefitsNeedNotBeWaitedForInBetween) {
  const PlanFile plan = Plan();
  GpuWorld world(plan);
  ExpectRefitOf(world, 1);
  ExpectRefitOf(world, 2);
  world.OnAllRanks([&](int32_t r) -> absl::Status {
    Executor& executor = world.rank(r).executor();
    for (int i = 0; i < 10; ++i) {
      absl::Status status = executor.Run(
          world.rank(r).stream(), {.timeout = kTimeout, .addresses = {}});
      if (!status.ok()) return status;
    }
    return executor.Wait();
  });
  ExpectRefitOf(world, 3);
}

TEST_P(RefitGpuTest, RoundsAreTimedIfAsked) {
  const PlanFile plan = Plan();
  GpuWorld world(plan, {.time_rounds = true});
  world.ExpectRefitIsRight();
  world.ExpectRefitIsRight();
  for (int32_t r = 0; r < plan.world_size(); ++r) {
    const Executor& executor = world.rank(r).executor();
    ASSERT_EQ(executor.rounds().size(), executor.counters().rounds);
    uint64_t received = 0;
    for (const RoundMeasurement& round : executor.rounds()) {
      // A receiver of stores may not be told when they were made.
      if (round.mechanism == fb::Mechanism::kStaged || round.bytes_sent > 0) {
        EXPECT_GT(round.seconds, 0);
      }
      EXPECT_LT(round.seconds, 1);
      received += round.bytes_received;
    }
    EXPECT_EQ(received, executor.counters().bytes_received);
  }
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

TEST_P(RefitGpuTest, PostHooksAreDoneOnceInEachRefitGraphsAndCapturesToo) {
  const PlanFile plan = Plan({"add-one"});
  GpuWorld world(plan);
  world.OnAllRanks([&](int32_t r) {  // the executor does them
    return world.rank(r).executor().Bind(world.rank(r).tensors(), kTimeout);
  });
  const auto fill = [&](int32_t r) {
    EXPECT_EQ(world.rank(r).device().MakeCurrent(), absl::OkStatus());
    for (const BoundTensor& tensor : world.rank(r).tensors()) {
      if (!world.IsSource(r)) continue;
      EXPECT_EQ(
          cudaMemsetAsync(tensor.data, 0x40, tensor.size_bytes,  // 3 in bf16
                          static_cast<cudaStream_t>(world.rank(r).stream())),
          cudaSuccess);
    }
  };
  const auto expect_four = [&](int32_t r) {
    if (world.IsSource(r)) return;
    for (const BoundTensor& tensor : world.rank(r).tensors()) {
      std::vector<uint16_t> elements(tensor.size_bytes / 2);
      EXPECT_EQ(cudaMemcpy(elements.data(), tensor.data, tensor.size_bytes,
                           cudaMemcpyDeviceToHost),
                cudaSuccess);
      EXPECT_EQ(std::count(elements.begin(), elements.end(), 0x4080),
                static_cast<ptrdiff_t>(elements.size()))
          << "rank " << r;
    }
  };
  for (int refit = 0; refit < 4; ++refit) {
    world.OnAllRanks([&](int32_t r) -> absl::Status {
      fill(r);
      auto done = world.rank(r).Refit();
      expect_four(r);
      return done.status();
    });
  }
  std::vector<cudaGraphExec_t> replays(static_cast<size_t>(plan.world_size()));
  world.OnAllRanks([&](int32_t r) -> absl::Status {
    auto stream = static_cast<cudaStream_t>(world.rank(r).stream());
    cudaGraph_t graph = nullptr;
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
  for (int replay = 0; replay < 3; ++replay) {
    world.OnAllRanks([&](int32_t r) -> absl::Status {
      fill(r);
      EXPECT_EQ(
          cudaGraphLaunch(replays[static_cast<size_t>(r)],
                          static_cast<cudaStream_t>(world.rank(r).stream())),
          cudaSuccess);
      absl::Status status =
          world.rank(r).device().Synchronize(world.rank(r).stream());
      expect_four(r);
      return status;
    });
  }
  for (cudaGraphExec_t replay : replays) {
    EXPECT_EQ(cudaGraphExecDestroy(replay), cudaSuccess);
  }
}

// A graph that is replayed does not come by Wait.
TEST_P(RefitGpuTest, ACallersFunctionForbidsCaptures) {
  const PlanFile plan = Plan({"publish"});
  GpuWorld world(plan);
  int calls = 0;
  const int32_t last = plan.world_size() - 1;
  world.OnAllRanks([&](int32_t r) {
    return world.rank(r).executor().Bind(
        world.rank(r).tensors(), kTimeout,
        {{.name = "publish",
          .perform = [&, r](const TensorPostHook&, const BoundTensor&) {
            calls += r == last;
            return absl::OkStatus();
          }}});
  });
  world.OnAllRanks([&](int32_t r) { return world.rank(r).Refit().status(); });
  EXPECT_EQ(calls, 6);
  const std::vector<absl::Status> statuses = world.Statuses([&](int32_t r) {
    auto stream = static_cast<cudaStream_t>(world.rank(r).stream());
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(world.rank(r).device().MakeCurrent(), absl::OkStatus());
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
              cudaSuccess);
    absl::Status status = world.rank(r).executor().Run(
        stream, {.timeout = std::chrono::seconds(2), .addresses = {}});
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    // What refused the refit leaves the caller's capture as it is.
    if (r == last) {
      EXPECT_EQ(ended, cudaSuccess);
    }
    if (graph != nullptr) cudaGraphDestroy(graph);
    return status;
  });
  EXPECT_NE(statuses[static_cast<size_t>(last)].message().find(
                "a replayed graph does not call the function of post-hook "
                "\"publish\" of \"model.layers.0.weight\""),
            std::string::npos)
      << statuses[static_cast<size_t>(last)];
}

// After so many refits that went well: later ones are graphs.
void ExpectLateRankEndsTheRefitUntilConnect(const PlanFile& plan, int before) {
  GpuWorld world(plan);
  const int32_t last = plan.world_size() - 1;
  for (int i = 0; i < before; ++i) world.ExpectRefitIsRight();
  const std::vector<absl::Status> statuses =
      world.Statuses([&](int32_t r) -> absl::Status {
        if (r == last) return absl::OkStatus();
        absl::Status status = world.rank(r).executor().Run(
            world.rank(r).stream(),
            {.timeout = std::chrono::seconds(2), .addresses = {}});
        return status.ok() ? world.rank(r).executor().Wait() : status;
      });
  for (int32_t r = 0; r < last; ++r) {
    EXPECT_FALSE(statuses[static_cast<size_t>(r)].ok());
    EXPECT_EQ(world.rank(r).executor().state(), ExecutorState::kTorn);
    printf("rank %d: %s\n", r,
           std::string(statuses[static_cast<size_t>(r)].message()).c_str());
  }
  // The late rank learns of it when it comes.
  absl::Status late = world.rank(last).executor().Run(
      world.rank(last).stream(),
      {.timeout = std::chrono::seconds(2), .addresses = {}});
  if (late.ok()) late = world.rank(last).executor().Wait();
  EXPECT_FALSE(late.ok());
  printf("rank %d: %s\n", last, std::string(late.message()).c_str());
  world.OnAllRanks(
      [&](int32_t r) { return world.rank(r).executor().Connect(kTimeout); });
  for (int i = 0; i < 3; ++i) world.ExpectRefitIsRight();
}

TEST_P(RefitGpuTest, RankThatDoesNotComeEndsTheRefitUntilConnect) {
  ExpectLateRankEndsTheRefitUntilConnect(Plan(), 0);
}

TEST_P(RefitGpuTest, RankThatDoesNotComeEndsTheFirstGraphUntilConnect) {
  ExpectLateRankEndsTheRefitUntilConnect(Plan(), 1);
}

TEST_P(RefitGpuTest, RankThatDoesNotComeEndsALaterGraphUntilConnect) {
  ExpectLateRankEndsTheRefitUntilConnect(Plan(), 4);
}

TEST_F(RelayGpuTest, RankThatDoesNotComeEndsALaterGraphUntilConnect) {
  const PlanFile plan = RelayPlan({}).Open();
  ExpectLateRankEndsTheRefitUntilConnect(plan, 4);
}

// The others record their rounds and launch them. What that asks of the driver
// may not wait for the late rank.
void ExpectLateRankMayStillCome(const PlanFile& plan) {
  const uint64_t launches = HasDirectRounds(plan) ? 1 : 0;
  for (int32_t late = 0; late < plan.world_size(); ++late) {
    SCOPED_TRACE(late);
    GpuWorld world(plan);
    // What Bind recorded is gone.
    world.OnAllRanks(
        [&](int32_t r) { return world.rank(r).executor().Connect(kTimeout); });
    for (int refit = 0; refit < 2; ++refit) {
      world.OnAllRanks([&](int32_t r) -> absl::Status {
        if (absl::Status s = world.rank(r).FillSources(); !s.ok()) return s;
        return world.rank(r).PoisonDestinations();
      });
      world.OnAllRanks([&](int32_t r) -> absl::Status {
        if (r == late) std::this_thread::sleep_for(std::chrono::seconds(1));
        Executor& executor = world.rank(r).executor();
        absl::Status status =
            executor.Run(world.rank(r).stream(), {.timeout = kTimeout});
        return status.ok() ? executor.Wait() : status;
      });
      world.OnAllRanks([&](int32_t r) -> absl::Status {
        auto check = world.rank(r).Check();
        if (!check.ok()) return check.status();
        EXPECT_EQ(check->wrong_elements, 0) << "rank " << r;
        EXPECT_EQ(world.rank(r).executor().counters().graph_launches, launches);
        return absl::OkStatus();
      });
    }
  }
}

TEST_P(RefitGpuTest, ARankMayComeLateWhileTheOthersRecord) {
  ExpectLateRankMayStillCome(Plan());
}

// On two GPUs two ranks, threads of this process, share each.
TEST_F(RelayGpuTest, ARankMayComeLateWhileTheOthersRecord) {
  ExpectLateRankMayStillCome(RelayPlan({}).Open());
}

TEST_P(RefitGpuTest, MovedTensorEndsTheRefitUntilItIsBound) {
  const PlanFile plan = Plan();
  GpuWorld world(plan);
  const int32_t moved = plan.source_ranks();
  const std::vector<absl::Status> statuses =
      world.Statuses([&](int32_t r) -> absl::Status {
        std::vector<const void*> addresses;
        for (const BoundTensor& tensor : world.rank(r).tensors()) {
          addresses.push_back(tensor.data);
        }
        if (r == moved) addresses[0] = nullptr;
        absl::Status status = world.rank(r).executor().Run(
            world.rank(r).stream(),
            {.timeout = kTimeout, .addresses = addresses});
        return status.ok() ? world.rank(r).executor().Wait() : status;
      });
  EXPECT_EQ(statuses[static_cast<size_t>(moved)].message(),
            absl::StrCat("rank ", moved, ": a tensor moved since Bind"));
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
