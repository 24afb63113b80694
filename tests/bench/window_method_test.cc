// A plan's messages in windows and without, over the fake libnccl, of which
// this file has the functions of windows.
#include "bench/window_method.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "bench/staged_messages.h"
#include "refit/host_device.h"
#include "tests/bench/method_runs.h"
#include "tests/executor/fake_nccl/fake_nccl.h"
#include "tests/executor/nccl_world.h"

namespace refit {
namespace {

std::atomic<int> registered_windows = 0;

nccl::WindowApi FakeWindows() {
  nccl::WindowApi api;
  api.MemAlloc = [](void** data, size_t size) {
    *data = std::malloc(size);
    return nccl::kSuccess;
  };
  api.MemFree = [](void* data) {
    std::free(data);
    return nccl::kSuccess;
  };
  api.CommWindowRegister = [](nccl::Comm, void*, size_t, nccl::Window* window,
                              int flags) {
    EXPECT_EQ(flags, 1);
    ++registered_windows;
    *window = reinterpret_cast<nccl::Window>(1);
    return nccl::kSuccess;
  };
  api.CommWindowDeregister = [](nccl::Comm, nccl::Window) {
    --registered_windows;
    return nccl::kSuccess;
  };
  return api;
}

class WindowMethodTest : public testing::Test {
 protected:
  WindowMethodTest() { fake_nccl_reset(); }

  // Sends the plan's messages three times; bytes, as all ranks together have
  // them then.
  static MethodBytes Run(const PlanFile& plan, bool registered) {
    HostDevice device;
    std::vector<uint32_t> hosts;
    for (const fb::RankProgram* program : *plan.body().programs()) {
      hosts.push_back(program->host());
    }
    const std::vector<std::unique_ptr<Transport>> ends =
        MakeNcclTransports(device, hosts);
    const absl::StatusOr<nccl::Api> api = nccl::Load();
    EXPECT_TRUE(api.ok()) << api.status();
    const nccl::WindowApi windows = FakeWindows();
    const MethodBytes bytes =
        RunMethod(plan, {.times = 3,
                         .on_thread = [](int32_t) {},
                         .make =
                             [&](int32_t rank) {
                               return MakeWindowMethod(
                                   plan, *ends[rank], device, *api, windows,
                                   {.registered = registered});
                             },
                         .at_end =
                             [&](int32_t) {
                               EXPECT_EQ(registered_windows > 0, registered);
                               return absl::OkStatus();
                             }});
    EXPECT_EQ(registered_windows, 0);
    return bytes;
  }
};

constexpr char kSmallRounds[] =
    R"("peer": "staged", "bucket_bytes": 32768, "staging_bytes": 131072)";

TEST_F(WindowMethodTest, DeliversAllMessages) {
  const PlanFile plan = CompiledPlan(ReshardJob(2, 2, kSmallRounds));
  EXPECT_GT(StagedRounds(plan, 0).size(), 2u);
  uint64_t planned = 0;
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    for (const auto& round : StagedRounds(plan, rank)) {
      for (const StagedMessage& message : round) {
        if (message.is_send) planned += message.size_bytes;
      }
    }
  }
  for (const bool registered : {false, true}) {
    const MethodBytes bytes = Run(plan, registered);
    EXPECT_EQ(bytes.wrong, 0u) << registered;
    EXPECT_EQ(bytes.sent, planned) << registered;
  }
}

TEST_F(WindowMethodTest, RanksWithoutMessagesTakePart) {
  const PlanFile plan = CompiledPlan(
      R"({"model": {"parameters": [
            {"name": "w", "shape": [1], "dtype": "bf16"}]},
          "source": {"layout": "generic", "meshes": {"m": {"axes": {"x": 2}}},
            "tensors": [{"match": "*", "mesh": "m",
                         "placements": ["Replicate"]}]},
          "destination": {"layout": "fsdp", "data_parallel": 1},
          "options": {"peer": "staged"}})");
  ASSERT_TRUE(StagedRounds(plan, 0).empty() != StagedRounds(plan, 1).empty());
  EXPECT_EQ(Run(plan, true).wrong, 0u);
}

TEST_F(WindowMethodTest, CountsWrongBytes) {
  const PlanFile plan = CompiledPlan(ReshardJob(1, 1, R"("peer": "staged")"));
  const size_t messages = StagedRounds(plan, 0)[0].size();
  // In the last of three times.
  fake_nccl_corrupt_at(0, 3 * messages - 1, 0);
  EXPECT_EQ(Run(plan, true).wrong, 1u);
}

}  // namespace
}  // namespace refit
