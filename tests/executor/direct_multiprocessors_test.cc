// How many multiprocessors direct rounds use: what the job says, unless the run
// says another number.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "refit/local_transport.h"
#include "tests/executor/nccl_world.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

using Uses = std::set<DeviceUse>;

constexpr DeviceUse kAll = {};
constexpr DeviceUse kAllInBulk = {.way = DeviceUse::Way::kBulk};
constexpr DeviceUse kFew = {.way = DeviceUse::Way::kFew};
constexpr DeviceUse kMost = {.way = DeviceUse::Way::kMost};

DeviceUse AtMost(uint32_t multiprocessors) {
  return {.way = DeviceUse::Way::kBulk, .at_most = multiprocessors};
}

// Notes how GPUs would be used by the batches that are enqueued.
class NotingDevice : public HostDevice {
 public:
  bool copies_in_bulk = false;
  std::atomic<int> streams = 0;  // made

  absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream() override {
    ++streams;
    return HostDevice::CreateStream();
  }
  bool CopiesInBulk() const override { return copies_in_bulk; }
  absl::StatusOr<std::unique_ptr<PreparedCopies>> Prepare(
      absl::Span<std::byte* const> table,
      absl::Span<const CopyBatch> batches) override {
    auto prepared = HostDevice::Prepare(table, batches);
    if (!prepared.ok()) return prepared.status();
    std::vector<bool> copies;
    for (const CopyBatch& batch : batches) {
      copies.push_back(!batch.copies.empty());
    }
    return std::make_unique<Noting>(*this, *std::move(prepared),
                                    std::move(copies));
  }

  // Of batches that copy, since the last call.
  Uses Noted() {
    std::lock_guard lock(mutex_);
    return std::exchange(noted_, {});
  }

 private:
  class Noting : public PreparedCopies {
   public:
    Noting(NotingDevice& device, std::unique_ptr<PreparedCopies> prepared,
           std::vector<bool> copies)
        : device_(device),
          prepared_(std::move(prepared)),
          copies_(std::move(copies)) {}
    absl::Status Enqueue(size_t batch, Stream stream, const uint32_t* unless,
                         const DeviceUse& use) override {
      Note(batch, use);
      return prepared_->Enqueue(batch, stream, unless, use);
    }
    absl::Status EnqueueStep(size_t batch, uint32_t step, Stream stream,
                             const uint32_t* unless,
                             const DeviceUse& use) override {
      Note(batch, use);
      return prepared_->EnqueueStep(batch, step, stream, unless, use);
    }

   private:
    void Note(size_t batch, const DeviceUse& use) {
      if (!copies_[batch]) return;
      std::lock_guard lock(device_.mutex_);
      device_.noted_.insert(use);
    }

    NotingDevice& device_;
    const std::unique_ptr<PreparedCopies> prepared_;
    const std::vector<bool> copies_;
  };

  std::mutex mutex_;
  Uses noted_;
};

class NotedWorld : public ExecutorWorld {
 public:
  NotedWorld(const PlanFile& plan, NotingDevice& device)
      : NotedWorld(plan, device,
                   std::make_shared<LocalFabric>(plan.world_size())) {}

  // How a refit's copies used a GPU.
  Uses Refit(NotingDevice& device, uint32_t direct_multiprocessors) {
    device.Noted();
    for (const absl::Status& status : OnAllRanks([&](int32_t rank) {
           RunOptions options = {.timeout = kTimeout};
           options.direct_multiprocessors = direct_multiprocessors;
           return ExecutorWorld::Refit(rank, options);
         })) {
      EXPECT_TRUE(status.ok()) << status;
    }
    return device.Noted();
  }

 private:
  NotedWorld(const PlanFile& plan, NotingDevice& device,
             const std::shared_ptr<LocalFabric>& fabric)
      : ExecutorWorld(plan.world_size(), fabric) {
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      AddRank(plan, *fabric->CreateTransport(rank), {.device = &device});
    }
  }
};

PlanFile DirectReshardPlan(const std::string& options) {
  return CompiledPlan(ReshardJob(2, 3, options));
}

TEST(DirectMultiprocessorsTest, TheRunsNumberGoesBeforeTheJobs) {
  NotingDevice device;
  const PlanFile plan = DirectReshardPlan(R"("direct_multiprocessors": 16)");
  NotedWorld world(plan, device);
  world.Bind();
  EXPECT_EQ(world.Refit(device, 0), Uses{AtMost(16)});
  EXPECT_EQ(world.Refit(device, 5), Uses{AtMost(5)});
  EXPECT_EQ(world.Refit(device, 0), Uses{AtMost(16)});
}

TEST(DirectMultiprocessorsTest, WithoutANumberAllCopyInBulk) {
  NotingDevice device;
  const PlanFile plan = DirectReshardPlan("");
  NotedWorld world(plan, device);
  world.Bind();
  EXPECT_EQ(world.Refit(device, 0), Uses{kAllInBulk});
  EXPECT_EQ(world.Refit(device, 1), Uses{AtMost(1)});
}

// Three ranks of each side share three GPUs: a third of the bytes stays on its
// GPU.
TEST(DirectMultiprocessorsTest, RoundsOnOneGpuGoBesideOthersInBulk) {
  const PlanFile plan =
      CompiledPlan(ReshardJob(3, 3, "", R"(, "colocated": true)"));
  for (const bool in_bulk : {true, false}) {
    NotingDevice device;
    device.copies_in_bulk = in_bulk;
    NotedWorld world(plan, device);
    world.Bind();
    EXPECT_EQ(world.Refit(device, 0),
              in_bulk ? Uses({kFew, kMost}) : Uses({kAll, kAllInBulk}));
    EXPECT_EQ(world.Refit(device, 5),
              in_bulk ? Uses({kFew, AtMost(5)}) : Uses({kAll, AtMost(5)}));
    world.ExpectEveryElementRight(plan);
  }
}

// Streams of a GPU wait for each other where there are many.
TEST(DirectMultiprocessorsTest, RanksOfOtherGpusHaveNoStreamBeside) {
  const auto streams = [](const char* more) {
    const PlanFile plan = CompiledPlan(ReshardJob(3, 3, "", more));
    NotingDevice device;
    NotedWorld world(plan, device);
    world.Bind();
    return device.streams.load();
  };
  EXPECT_EQ(streams(R"(, "colocated": true)"), streams("") + 6);
}

TEST(DirectMultiprocessorsTest, StagedRoundsAreNotBounded) {
  NotingDevice device;
  const PlanFile plan =
      DirectReshardPlan(R"("peer": "staged", "direct_multiprocessors": 16)");
  NotedWorld world(plan, device);
  world.Bind();
  EXPECT_EQ(world.Refit(device, 5), Uses{kAll});
}

}  // namespace
}  // namespace refit
