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
#include "tests/executor/local_world.h"
#include "tests/executor/nccl_world.h"
#include "tests/executor/observed_device.h"
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
class NotingDevice : public ObservedDevice {
 public:
  NotingDevice() {
    on_enqueue = [this](const Enqueued& enqueued) {
      std::lock_guard lock(mutex_);
      if (enqueued.copies) noted_.insert(enqueued.use);
      return true;
    };
  }

  bool copies_in_bulk = false;
  std::atomic<int> streams = 0;  // made

  absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream() override {
    ++streams;
    return HostDevice::CreateStream();
  }
  bool CopiesInBulk() const override { return copies_in_bulk; }

  // Of batches that copy, since the last call.
  Uses Noted() {
    std::lock_guard lock(mutex_);
    return std::exchange(noted_, {});
  }

 private:
  std::mutex mutex_;
  Uses noted_;
};

class NotedWorld : public LocalWorld {
 public:
  NotedWorld(const PlanFile& plan, NotingDevice& device)
      : LocalWorld(plan, {.device = &device}) {}

  // How a refit's copies used a GPU.
  Uses Refit(NotingDevice& device, uint32_t direct_multiprocessors) {
    device.Noted();
    EXPECT_TRUE(AllOk(OnAllRanks([&](int32_t rank) {
      RunOptions options = {.timeout = kTimeout};
      options.direct_multiprocessors = direct_multiprocessors;
      return ExecutorWorld::Refit(rank, options);
    })));
    return device.Noted();
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
