// A check after a refit that quantizes: what a source quantizes is compared as
// the destination holds it, what a destination quantizes as it arrives.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/executor/local_world.h"
#include "tests/executor/nccl_world.h"
#include "tests/executor/observed_device.h"

namespace refit {
namespace {

class UnreadableDevice : public HostDevice {
 public:
  absl::Status Copy(std::byte*, const std::byte*, uint64_t, Stream) override {
    return absl::InternalError("the device is gone");
  }
};

class QuantizedWorld : public LocalWorld {
 public:
  QuantizedWorld(const PlanFile& plan, HostDevice& device, int32_t disturbed)
      : LocalWorld(plan, [&](int32_t rank) -> ExecutorOptions {
          return {.device = rank == disturbed ? &device : nullptr};
        }) {}

  BoundTensor& tensor(int32_t rank, const std::string& name) {
    const auto found =
        std::find_if(tensors[rank].begin(), tensors[rank].end(),
                     [&](const BoundTensor& t) { return t.name == name; });
    EXPECT_NE(found, tensors[rank].end()) << name;
    return *found;
  }
};

constexpr int32_t kWorker = 5;  // the second of two that serve

TEST(QuantizedCheckTest, WhatIsQuantizedIsComparedWhereBothSidesHoldIt) {
  for (const char* peer : {"direct", "staged"}) {
    const PlanFile plan = WindowsPlan(std::string(R"("scratch_bytes": 150000,
        "peer": ")") + peer + "\"");
    ObservedDevice device;
    QuantizedWorld world(plan, device, kWorker);
    world.Bind();
    world.ExpectCheckedRefitsRight(plan);
    // Attention is quantized at the source, the MLP at the destination.
    ASSERT_EQ(world.executor(0).notices().size(), 1);
    EXPECT_EQ(world.executor(0).notices()[0].kind, NoticeKind::kNotCompared);
    EXPECT_EQ(world.executor(0).notices()[0].text,
              "the check after a refit compares what destinations quantize as "
              "it arrives, and not what they make of it: "
              "\"model.layers.{0}.mlp.gate_proj.weight:fp8_e4m3\" and 5 more "
              "params");
  }
}

TEST(QuantizedCheckTest, OneBitOfAQuantizedValueAndOfAScaleIsSeen) {
  const PlanFile plan = WindowsPlan(R"("scratch_bytes": 150000)");
  for (const auto& [tensor, param] :
       std::vector<std::pair<std::string, std::string>>{
           {"model.layers.1.self_attn.o_proj.weight",
            "model.layers.1.self_attn.o_proj.weight:fp8_e4m3"},
           {"model.layers.0.self_attn.o_proj.weight_scale_inv",
            "model.layers.0.self_attn.o_proj.weight_scale_inv"},
           {"model.norm.weight", "model.norm.weight"}}) {
    ObservedDevice device;
    QuantizedWorld world(plan, device, kWorker);
    world.Bind();
    ValueCheck(plan).FillSources(world.tensors);
    BoundTensor& disturbed = world.tensor(kWorker, tensor);
    // The last digest of the rank is that of its tensors, the others of
    // scratch.
    size_t digests = 0;
    size_t last = 0;
    device.on_enqueue = [&](const ObservedDevice::Enqueued& enqueued) {
      if (enqueued.is_step || enqueued.kind != CopyKind::kDigest) return true;
      // Memory that changes behind the refit.
      if (++digests == last) static_cast<uint8_t*>(disturbed.data)[1] ^= 1;
      return true;
    };
    ASSERT_TRUE(AllOk(world.CheckedRefit()));
    last = 2 * digests;
    for (const absl::Status& status : world.CheckedRefit()) {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
      EXPECT_TRUE(status.message().find("\"" + param + "\" on rank 5") !=
                  std::string::npos)
          << status;
    }
    EXPECT_TRUE(AllOk(world.CheckedRefit()));
  }
}

// The others are in the exchange of digests by then.
TEST(QuantizedCheckTest, ARankThatCannotReadItsDigestsEndsTheCheckOnAll) {
  const PlanFile plan = WindowsPlan(R"("scratch_bytes": 150000)");
  for (const int32_t unreadable : {0, kWorker}) {
    UnreadableDevice device;
    QuantizedWorld world(plan, device, unreadable);
    world.Bind();
    ValueCheck(plan).FillSources(world.tensors);
    const std::vector<absl::Status> statuses = world.CheckedRefit();
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      const std::string told =
          rank == unreadable
              ? ""
              : "aborted by rank " + std::to_string(unreadable) + ": ";
      EXPECT_EQ(
          statuses[rank].message(),
          "rank " + std::to_string(rank) + ": " + told + "the device is gone");
      EXPECT_EQ(world.executor(rank).state(), ExecutorState::kTorn);
    }
  }
}

}  // namespace
}  // namespace refit
