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

#include "refit/local_transport.h"
#include "tests/executor/nccl_world.h"

namespace refit {
namespace {

// Calls a function before each digest: memory that changes behind the refit.
class DisturbedDevice : public HostDevice {
 public:
  std::function<void()> before_digest;

  absl::StatusOr<std::unique_ptr<PreparedCopies>> Prepare(
      absl::Span<std::byte* const> table,
      absl::Span<const CopyBatch> batches) override {
    auto prepared = HostDevice::Prepare(table, batches);
    if (!prepared.ok()) return prepared.status();
    std::vector<bool> digests;
    for (const CopyBatch& batch : batches) {
      digests.push_back(batch.kind == CopyKind::kDigest);
    }
    return std::make_unique<Disturbed>(*this, *std::move(prepared),
                                       std::move(digests));
  }

 private:
  class Disturbed : public PreparedCopies {
   public:
    Disturbed(DisturbedDevice& device, std::unique_ptr<PreparedCopies> copies,
              std::vector<bool> digests)
        : device_(device),
          copies_(std::move(copies)),
          digests_(std::move(digests)) {}

    absl::Status Enqueue(size_t batch, Stream stream, const uint32_t* unless,
                         const DeviceUse&) override {
      if (digests_[batch] && device_.before_digest) device_.before_digest();
      return copies_->Enqueue(batch, stream, unless);
    }
    absl::Status EnqueueStep(size_t batch, uint32_t step, Stream stream,
                             const uint32_t* unless,
                             const DeviceUse&) override {
      return copies_->EnqueueStep(batch, step, stream, unless);
    }

   private:
    DisturbedDevice& device_;
    const std::unique_ptr<PreparedCopies> copies_;
    const std::vector<bool> digests_;
  };
};

class UnreadableDevice : public HostDevice {
 public:
  absl::Status Copy(std::byte*, const std::byte*, uint64_t, Stream) override {
    return absl::InternalError("the device is gone");
  }
};

class QuantizedWorld : public ExecutorWorld {
 public:
  QuantizedWorld(const PlanFile& plan, HostDevice& device, int32_t disturbed)
      : QuantizedWorld(plan, device, disturbed,
                       std::make_shared<LocalFabric>(plan.world_size())) {}

  BoundTensor& tensor(int32_t rank, const std::string& name) {
    const auto found =
        std::find_if(tensors[rank].begin(), tensors[rank].end(),
                     [&](const BoundTensor& t) { return t.name == name; });
    EXPECT_NE(found, tensors[rank].end()) << name;
    return *found;
  }

 private:
  QuantizedWorld(const PlanFile& plan, HostDevice& device, int32_t disturbed,
                 const std::shared_ptr<LocalFabric>& fabric)
      : ExecutorWorld(plan.world_size(), fabric) {
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      AddRank(plan, *fabric->CreateTransport(rank),
              {.device = rank == disturbed ? &device : nullptr});
    }
  }
};

constexpr int32_t kWorker = 5;  // the second of two that serve

TEST(QuantizedCheckTest, WhatIsQuantizedIsComparedWhereBothSidesHoldIt) {
  for (const char* peer : {"direct", "staged"}) {
    const PlanFile plan = WindowsPlan(std::string(R"("scratch_bytes": 150000,
        "peer": ")") + peer + "\"");
    DisturbedDevice device;
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
    DisturbedDevice device;
    QuantizedWorld world(plan, device, kWorker);
    world.Bind();
    ValueCheck(plan).FillSources(world.tensors);
    BoundTensor& disturbed = world.tensor(kWorker, tensor);
    // The last digest of the rank is that of its tensors, the others of
    // scratch.
    size_t digests = 0;
    device.before_digest = [&] { ++digests; };
    for (const absl::Status& status : world.CheckedRefit()) {
      ASSERT_TRUE(status.ok()) << status;
    }
    const size_t last = 2 * digests;
    device.before_digest = [&] {
      if (++digests == last) static_cast<uint8_t*>(disturbed.data)[1] ^= 1;
    };
    for (const absl::Status& status : world.CheckedRefit()) {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
      EXPECT_TRUE(status.message().find("\"" + param + "\" on rank 5") !=
                  std::string::npos)
          << status;
    }
    for (const absl::Status& status : world.CheckedRefit()) {
      EXPECT_TRUE(status.ok()) << status;
    }
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
