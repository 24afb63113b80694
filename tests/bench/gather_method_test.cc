// Scatter and all-gather instead of relays, over the fake libnccl. Its gathers
// are those below: threads that wait for each other and copy.
#include "bench/gather_method.h"

#include <gtest/gtest.h>

#include <barrier>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "refit/host_device.h"
#include "runner/world_rank.h"
#include "tests/bench/method_runs.h"
#include "tests/executor/fake_nccl/fake_nccl.h"
#include "tests/executor/nccl_world.h"

namespace refit {
namespace {

// Of three receivers, ranks 1 to 3.
constexpr int kReceivers = 3;

struct Gathers {
  std::barrier<> barrier{kReceivers};
  std::byte* arenas[kReceivers] = {};  // where each gathers to
  bool leaves_one_out = false;
};
Gathers* gathers = nullptr;
thread_local int me = 0;

nccl::Api FakeGathers() {
  nccl::Api api = nccl::Load().value();
  api.AllGather = [](const void* from, void* to, size_t count, nccl::DataType,
                     nccl::Comm, nccl::CudaStream) {
    EXPECT_EQ(from, static_cast<std::byte*>(to) + (me - 1) * count);
    gathers->arenas[me - 1] = static_cast<std::byte*>(to);
    gathers->barrier.arrive_and_wait();
    for (int peer = 0; peer < kReceivers; ++peer) {
      if (gathers->leaves_one_out && peer == 2) continue;
      const size_t offset = peer * count;
      if (peer + 1 == me) continue;
      std::memcpy(static_cast<std::byte*>(to) + offset,
                  gathers->arenas[peer] + offset, count);
    }
    gathers->barrier.arrive_and_wait();
    return nccl::kSuccess;
  };
  return api;
}

PlanFile ReplicasPlan(const std::string& options) {
  return CompiledPlan(
      R"({"model": {"parameters": [
            {"name": "w", "shape": [4096, 500], "dtype": "bf16"}]},
          "source": {"layout": "fsdp", "data_parallel": 1},
          "destination": {"layout": "generic",
            "meshes": {"m": {"axes": {"x": 3}}}, "tensors": [{"match": "*",
            "mesh": "m", "placements": ["Replicate"]}]},
          "topology": {"peer_gigabytes_per_second": 1},
          "options": {)" +
      options + "}}");
}

class GatherMethodTest : public testing::Test {
 protected:
  GatherMethodTest() { fake_nccl_reset(); }

  // Refits twice on all ranks; the bytes that are wrong then.
  uint64_t WrongBytes(const PlanFile& plan, const GatherOptions& options) {
    gathers_ = std::make_unique<Gathers>();
    gathers_->leaves_one_out = leaves_one_out_;
    gathers = gathers_.get();
    HostDevice device;
    const std::vector<std::unique_ptr<Transport>> ends =
        MakeNcclTransports(device, std::vector<uint32_t>(4, 0));
    const nccl::Api api = FakeGathers();
    const MethodBytes bytes =
        RunMethod(plan, {.times = 2,
                         .on_thread = [](int32_t rank) { me = rank; },
                         .make =
                             [&](int32_t rank) {
                               return MakeGatherMethod(plan, *ends[rank],
                                                       device, api, options);
                             }});
    sent_bytes_ += bytes.sent;
    return bytes.wrong;
  }

  std::unique_ptr<Gathers> gathers_;
  bool leaves_one_out_ = false;
  uint64_t sent_bytes_ = 0;
};

constexpr char kStagedOptions[] = R"("peer": "staged")";

TEST_F(GatherMethodTest, EveryReceiverHasAllBytes) {
  const PlanFile plan = ReplicasPlan(kStagedOptions);
  ASSERT_EQ(CanGather(plan, FakeGathers()), absl::OkStatus());
  // Rounds of which the last is shorter, and one for all.
  for (const uint64_t round_bytes : {uint64_t{1} << 20, uint64_t{1} << 24}) {
    sent_bytes_ = 0;
    EXPECT_EQ(WrongBytes(plan, {.round_bytes = round_bytes}), 0u);
    // What the source sends once, receivers send twice, in parts of 256 bytes.
    EXPECT_NEAR(static_cast<double>(sent_bytes_), 3.0 * 4096 * 500 * 2,
                3 * 3 * 256 * 6);
  }
}

TEST_F(GatherMethodTest, CountsWrongBytes) {
  leaves_one_out_ = true;
  EXPECT_GT(WrongBytes(ReplicasPlan(kStagedOptions), {.round_bytes = 1 << 20}),
            0u);
}

TEST_F(GatherMethodTest, PlansWithoutRelaysAreRefused) {
  const auto expect_refused = [](const PlanFile& plan) {
    EXPECT_EQ(CanGather(plan, FakeGathers()).code(),
              absl::StatusCode::kFailedPrecondition);
  };
  expect_refused(ReplicasPlan(R"("peer": "staged", "fan_out": "none")"));
  expect_refused(ReplicasPlan(""));
  expect_refused(CompiledPlan(ReshardJob(2, 2, kStagedOptions)));
}

}  // namespace
}  // namespace refit
