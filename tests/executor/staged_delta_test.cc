// Delta refits in staged rounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/executor/delta_world.h"
#include "tests/executor/nccl_delta_world.h"
#include "tests/plan/plan_spec.h"

namespace refit {
namespace {

constexpr uint64_t kElements = 1 << 16;

// One source, one destination on another host. `dtype`: the destination's.
// `other`: of a param of 128 elements, if there is one; `other_becomes` at the
// destination. `changes`: how the source knows what changed. `held`: the
// source's dtype.
PlanFile HostsPlan(const std::string& dtype = "bf16",
                   const std::string& other = "",
                   const std::string& other_becomes = "",
                   const std::string& changes = "snapshot",
                   const std::string& held = "bf16") {
  const auto tensor = [](const std::string& name, const std::string& becomes) {
    return absl::StrCat(
        R"({"match": ")", name,
        R"(", "mesh": "m", "placements": ["Replicate"], "dtype": ")", becomes,
        R"("})");
  };
  const auto side = [&](const std::string& w, const std::string& o) {
    return absl::StrCat(
        R"({"layout": "generic", "meshes": {"m": {"axes": {"a": 1}}},
            "tensors": [)",
        tensor("w", w), o.empty() ? "" : ", " + tensor("other", o), "]}");
  };
  const std::string param =
      other.empty()
          ? ""
          : R"(, {"name": "other", "shape": [128], "dtype": ")" + other + "\"}";
  return PlanOfJob(absl::StrCat(R"({
    "model": {"parameters": [
      {"name": "w", "shape": [256, 256], "dtype": "bf16"})",
                                param, R"(]},
    "source": )",
                                side(held, other), R"(, "destination": )",
                                side(dtype, other_becomes), R"(,
    "topology": {"gpus_per_host": 1},
    "options": {"delta": {"dense_every": 0, "changes": ")",
                                changes, R"("}}})"));
}

// Rounds of one message of 1 MiB each, 2048 rows of "w".
PlanFile RowsPlan(uint64_t rows) {
  return PlanOfJob(absl::StrCat(R"({
    "model": {"parameters": [
      {"name": "w", "shape": [)",
                                rows, R"(, 256], "dtype": "bf16"}]},
    "source": {"layout": "generic", "meshes": {"m": {"axes": {"a": 1}}},
      "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
    "destination": {"layout": "generic", "meshes": {"m": {"axes": {"a": 1}}},
      "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
    "topology": {"gpus_per_host": 1},
    "options": {"delta": {"dense_every": 0}, "bucket_bytes": 1048576,
                "staging_bytes": 2097152}})"));
}

uint64_t ElementsOf(const BoundTensor& tensor) {
  return tensor.size_bytes / DTypeBytes(tensor.dtype);
}

// Changes every `nth` element of the source.
void Change(DeltaWorld& world, uint64_t nth) {
  const BoundTensor& tensor = world.Tensor(0, "w");
  auto* const values = static_cast<uint16_t*>(tensor.data);
  for (uint64_t i = 0; i < ElementsOf(tensor); i += nth) values[i] ^= 1;
}

// The source's worker marks elements of a tensor: every `nth`, from `first` on.
void Mark(DeltaWorld& world, const std::string& name, uint64_t nth,
          uint64_t first = 0) {
  const BoundTensor& tensor = world.Tensor(0, name);
  const uint64_t elements = ElementsOf(tensor);
  for (uint64_t i = first; i < elements; i += nth) {
    tensor.changes[i / 32] |= uint32_t{1} << i % 32;
  }
}

bool IsMarked(DeltaWorld& world, const std::string& name) {
  const BoundTensor& tensor = world.Tensor(0, name);
  const uint64_t elements = ElementsOf(tensor);
  return std::any_of(tensor.changes, tensor.changes + (elements + 31) / 32,
                     [](uint32_t word) { return word != 0; });
}

// Gives no bitmap of one tensor of the source.
void TakeBitmap(DeltaWorld& world, const std::string& name) {
  for (BoundTensor& tensor : world.tensors[0]) {
    if (tensor.name == name) tensor.changes = nullptr;
  }
}

void FillWorld(DeltaWorld& world) {
  const BoundTensor& tensor = world.Tensor(0, "w");
  auto* const values = static_cast<uint16_t*>(tensor.data);
  for (uint64_t i = 0; i < ElementsOf(tensor); ++i) {
    values[i] = static_cast<uint16_t>(0x3f00 + i % 97);
  }
}

// The first refit, which is dense.
absl::Status Begin(DeltaWorld& world) {
  FillWorld(world);
  absl::Status status = world.Start();
  return status.ok() ? world.Refit() : status;
}

bool IsEqual(DeltaWorld& world) {
  const BoundTensor& sent = world.Tensor(0, "w");
  return std::memcmp(sent.data, world.Tensor(1, "w").data, sent.size_bytes) ==
         0;
}

TEST(StagedDeltaTest, TheRungIsTheFirstWithRoomForWhatChanged) {
  const PlanFile plan = HostsPlan();
  DeltaWorld world(plan);
  ASSERT_TRUE(Begin(world).ok());
  EXPECT_FALSE(world.report().is_delta);
  EXPECT_EQ(world.report().rung, 0);
  EXPECT_EQ(world.report().stored_bytes, 2 * kElements);
  const struct {
    uint64_t nth;
    uint32_t rung;
    uint64_t bytes;
  } cases[] = {
      {kElements + 1, 128, 8 + 512 * 3 + 512},  // the first alone
      {128, 128, 8 + 512 * 3 + 512},            // as many as there is room for
      {127, 64, 8 + 1024 * 3 + 512},
      {64, 64, 8 + 1024 * 3 + 512},
      {63, 32, 8 + 2048 * 3 + 512},
      {16, 16, 8 + 4096 * 3 + 512},
      {9, 8, 8 + 8192 * 3 + 512},
      {5, 4, 8 + 16384 * 3 + 512},
      {3, 2, 8 + 32768 * 3 + 512},
      {1, 1, 2 * kElements},  // too many: whole
  };
  for (const auto& [nth, rung, bytes] : cases) {
    Change(world, nth);
    ASSERT_TRUE(world.Refit().ok());
    const DeltaReport& report = world.report();
    EXPECT_TRUE(report.is_delta);
    EXPECT_EQ(report.rung, rung) << nth;
    EXPECT_EQ(report.stored_bytes, bytes) << nth;
    EXPECT_EQ(world.executor(1).counters().bytes_received, bytes) << nth;
    EXPECT_EQ(report.dense_bytes, 2 * kElements);
    EXPECT_EQ(report.elements, kElements);
    EXPECT_EQ(report.changed_elements, (kElements + nth - 1) / nth);
    EXPECT_TRUE(IsEqual(world)) << nth;
  }
}

TEST(StagedDeltaTest, WhatTheReceiverCastsIsSentWhole) {
  const PlanFile plan = HostsPlan("fp32");
  DeltaWorld world(plan);
  ASSERT_TRUE(Begin(world).ok());
  Change(world, 1000);
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_TRUE(world.report().is_delta);
  EXPECT_EQ(world.report().rung, 1);
  EXPECT_EQ(world.report().stored_bytes, world.report().dense_bytes);
  EXPECT_EQ(world.report().elements, 0);
}

// A small tensor that the receiver casts does not keep its message whole.
TEST(StagedDeltaTest, WhatTheReceiverCastsTravelsBesideWhatChanged) {
  const PlanFile plan = HostsPlan("bf16", "bf16", "fp32");
  DeltaWorld world(plan);
  ASSERT_TRUE(Begin(world).ok());
  Change(world, 1000);
  auto* const other = static_cast<uint16_t*>(world.Tensor(0, "other").data);
  for (int i = 0; i < 128; ++i) other[i] = static_cast<uint16_t>(0x4000 + i);
  ASSERT_TRUE(world.Refit().ok());
  const DeltaReport& report = world.report();
  EXPECT_EQ(report.rung, 128);
  // Room for all of the other and 1/128 of this; 513 groups of 128.
  EXPECT_EQ(report.stored_bytes, 8 + (128 + 512) * 3 + 513);
  EXPECT_EQ(report.elements, kElements);
  EXPECT_TRUE(IsEqual(world));
  const auto* const received =
      static_cast<const uint32_t*>(world.Tensor(1, "other").data);
  for (uint32_t i = 0; i < 128; ++i) {
    EXPECT_EQ(received[i], (0x4000 + i) << 16) << i;
  }
}

// An optimizer's fp32 weights change in every step, what is sent of them does
// not.
TEST(StagedDeltaTest, WhatTheSourceCastsIsComparedAsItIsSent) {
  const PlanFile plan = HostsPlan("bf16", "", "", "snapshot", "fp32");
  DeltaWorld world(plan);
  auto* const held = static_cast<uint32_t*>(world.Tensor(0, "w").data);
  const auto* const received =
      static_cast<const uint16_t*>(world.Tensor(1, "w").data);
  // None is half way between two of bf16.
  for (uint32_t i = 0; i < kElements; ++i) held[i] = 0x3f800002 + (i << 3);
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.Refit().ok());
  std::vector<uint16_t> sent(received, received + kElements);
  const auto refit = [&](uint64_t changed) {
    ASSERT_TRUE(world.Refit().ok());
    EXPECT_EQ(world.report().rung, 128);
    EXPECT_EQ(world.report().changed_elements, changed);
    EXPECT_EQ(std::memcmp(received, sent.data(), 2 * kElements), 0);
  };
  for (uint32_t i = 0; i < kElements; ++i) held[i] ^= 1;
  refit(0);
  for (uint32_t i = 0; i < kElements; i += 200) {
    held[i] = 0x40490000;
    sent[i] = 0x4049;
  }
  refit((kElements + 199) / 200);
  for (uint32_t i = 0; i < kElements; ++i) held[i] ^= 1;
  refit(0);
}

// The loader takes copies of a message in any order, and so does the proof.
TEST(StagedDeltaTest, CopiesOfAMessageMayStandInAnyOrder) {
  PlanSpec spec = SpecOf(HostsPlan("bf16", "bf16", "bf16").body());
  for (std::vector<PlanSpec::Copy>& list : spec.copy_lists) {
    std::reverse(list.begin(), list.end());
  }
  const PlanFile plan = OpenSpec(spec);
  DeltaWorld world(plan);
  ASSERT_TRUE(Begin(world).ok());
  auto* const other = static_cast<uint16_t*>(world.Tensor(0, "other").data);
  for (uint64_t refit = 0; refit < 3; ++refit) {
    Change(world, 1000 + refit);
    other[5] ^= 0x11;
    ASSERT_TRUE(world.Refit().ok());
    EXPECT_EQ(world.report().rung, 128);
    EXPECT_TRUE(IsEqual(world));
    EXPECT_EQ(static_cast<const uint16_t*>(world.Tensor(1, "other").data)[5],
              other[5]);
  }
}

// Kernels read codes in words. The proof refuses such a plan, the loader not.
TEST(StagedDeltaTest, MessagesThatAreStagedBetweenWordsAreRefused) {
  PlanSpec spec = SpecOf(HostsPlan().body());
  for (PlanSpec::Program& program : spec.programs) {
    program.staging_bytes += 2;
    for (fb::Message& message : program.messages) {
      message = (message.kind() == fb::MessageKind::kSend ? SendTo : RecvFrom)(
          message.peer(), message.round(), message.copies(),
          message.staging_offset() + 2, message.size_bytes());
    }
  }
  const PlanFile plan = OpenSpec(spec);
  DeltaWorld world(plan);
  FillWorld(world);
  const absl::Status status = world.Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_NE(status.message().find("a message is staged at byte 2, no multiple "
                                  "of 8; refit-verify tells more"),
            std::string::npos)
      << status;
}

// A message of 256 bytes, beside one of 128 KiB, that changes in each step.
TEST(StagedDeltaTest, SmallMessagesChooseNoRung) {
  const PlanFile plan = PlanOfJob(R"job({
    "model": {"parameters": [
      {"name": "w", "shape": [256, 256], "dtype": "bf16"},
      {"name": "other", "shape": [128], "dtype": "bf16"}]},
    "source": {"layout": "generic", "meshes": {"m": {"axes": {"a": 1}}},
      "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
    "destination": {"layout": "generic",
      "meshes": {"m": {"axes": {"a": 1}, "ranks": [0]},
                 "n": {"axes": {"a": 1}, "ranks": [1]}},
      "tensors": [
        {"match": "w", "mesh": "m", "placements": ["Replicate"]},
        {"match": "other", "mesh": "n", "placements": ["Replicate"]}]},
    "topology": {"gpus_per_host": 1},
    "options": {"delta": {"dense_every": 0}}})job");
  DeltaWorld world(plan);
  ASSERT_TRUE(Begin(world).ok());
  Change(world, 1000);
  const BoundTensor& other = world.Tensor(0, "other");
  std::memset(other.data, 0x31, other.size_bytes);
  ASSERT_TRUE(world.Refit().ok());
  const DeltaReport& report = world.report();
  EXPECT_EQ(report.rung, 128);
  EXPECT_EQ(report.stored_bytes, 8 + 512 * 3 + 512 + 256);
  EXPECT_EQ(report.elements, kElements);
  EXPECT_TRUE(IsEqual(world));
  EXPECT_EQ(std::memcmp(world.Tensor(2, "other").data, other.data, 256), 0);
}

TEST(StagedDeltaTest, ElementsCountOnceWhateverTheirSize) {
  const PlanFile plan = HostsPlan("bf16", "int8", "int8");
  DeltaWorld world(plan);
  ASSERT_TRUE(Begin(world).ok());
  Change(world, 1024);
  static_cast<uint8_t*>(world.Tensor(0, "other").data)[7] ^= 1;
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_EQ(world.report().elements, kElements + 128);
  EXPECT_EQ(world.report().changed_elements, 64 + 1);
  EXPECT_TRUE(IsEqual(world));
}

TEST(StagedDeltaTest, MarksTellWhatChanged) {
  const PlanFile plan = HostsPlan("bf16", "", "", "bitmap");
  DeltaWorld world(plan);
  world.GiveBitmaps(0);
  Mark(world, "w", 7);
  ASSERT_TRUE(Begin(world).ok());
  EXPECT_FALSE(world.report().is_delta);
  EXPECT_FALSE(IsMarked(world, "w"));
  const struct {
    uint64_t nth;
    uint32_t rung;
    uint64_t bytes;
  } cases[] = {
      {kElements + 1, 128, 8 + 512 * 3 + 512},
      {128, 128, 8 + 512 * 3 + 512},
      {127, 64, 8 + 1024 * 3 + 512},
      {3, 2, 8 + 32768 * 3 + 512},
      {1, 1, 2 * kElements},
  };
  for (const auto& [nth, rung, bytes] : cases) {
    // What is marked is sent, changed or not.
    for (const bool changes : {true, false}) {
      if (changes) Change(world, nth);
      Mark(world, "w", nth);
      ASSERT_TRUE(world.Refit().ok());
      const DeltaReport& report = world.report();
      EXPECT_TRUE(report.is_delta);
      EXPECT_EQ(report.rung, rung) << nth;
      EXPECT_EQ(report.stored_bytes, bytes) << nth;
      EXPECT_EQ(report.elements, kElements);
      EXPECT_EQ(report.changed_elements, (kElements + nth - 1) / nth);
      EXPECT_TRUE(IsEqual(world)) << nth;
      EXPECT_FALSE(IsMarked(world, "w")) << nth;
    }
  }
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_EQ(world.report().changed_elements, 0);
}

TEST(StagedDeltaTest, MarksOfVersionsThatAreNotSentAddUp) {
  const PlanFile plan = HostsPlan("bf16", "", "", "bitmap");
  DeltaWorld world(plan);
  world.GiveBitmaps(0);
  ASSERT_TRUE(Begin(world).ok());
  for (const uint64_t nth : {1000, 1100}) {
    Change(world, nth);
    Mark(world, "w", nth);
  }
  // Both marked and changed twice is element 0 and each 11000th.
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_EQ(world.report().rung, 128);
  EXPECT_EQ(world.report().changed_elements, 66 + 60 - 6);
  EXPECT_TRUE(IsEqual(world));
}

TEST(StagedDeltaTest, AChangeWithoutItsMarkFailsTheRefitOnAllRanks) {
  const PlanFile plan = HostsPlan("bf16", "", "", "bitmap");
  DeltaWorld world(plan);
  world.GiveBitmaps(0);
  ASSERT_TRUE(Begin(world).ok());
  Change(world, 1000);
  Mark(world, "w", 1000, /*first=*/1000);
  for (const absl::Status& status : world.Refits()) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_NE(status.message().find("\"w\""), std::string::npos) << status;
  }
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_FALSE(world.report().is_delta);
  EXPECT_TRUE(IsEqual(world));
}

// Rank 0 stores into rank 1, which stages nothing, and sends to hosts of
// others. The two have to agree whether steps of direct rounds are told.
TEST(StagedDeltaTest, ARankThatStagesNothingIsCheckedAsThoseThatDo) {
  std::vector<std::string> parameters;
  for (int layer = 0; layer < 8; ++layer) {
    parameters.push_back(absl::StrCat(R"({"name": "layers.)", layer,
                                      R"(.w", "shape": [96, 256],
                                          "dtype": "bf16"})"));
  }
  const auto side = [](int ranks, const char* placement) {
    return absl::StrCat(R"({"layout": "generic",
        "meshes": {"m": {"axes": {"a": )",
                        ranks, R"(}}}, "tensors": [{"match": "*", "mesh": "m",
        "placements": [")",
                        placement, R"("]}]})");
  };
  const PlanFile plan = PlanOfJob(absl::StrCat(
      R"({"model": {"parameters": [)", absl::StrJoin(parameters, ", "),
      R"(]}, "source": )", side(1, "Replicate"), R"(, "destination": )",
      side(3, "Shard(0)"), R"(, "topology": {"gpus_per_host": 2},
      "options": {"bucket_bytes": 8192,
                  "delta": {"dense_every": 0, "changes": "bitmap"}}})"));
  DeltaWorld world(plan);
  world.GiveBitmaps(0);
  ASSERT_TRUE(world.Start().ok());
  for (int refit = 0; refit < 3; ++refit) {
    SCOPED_TRACE(refit);
    BoundTensor& tensor = world.tensors[0][0];
    *static_cast<uint16_t*>(tensor.data) ^= 1;
    *tensor.changes |= 1;
    ASSERT_TRUE(AllOk(world.OnAllRanks([&](int32_t rank) {
      RunOptions options;
      options.timeout = std::chrono::seconds(20);
      const absl::Status run = world.executor(rank).Run(nullptr, options);
      return run.ok() ? world.executor(rank).Wait() : run;
    })));
    EXPECT_EQ(world.report(0).is_delta, refit > 0);
    EXPECT_EQ(world.report(0).rung, refit > 0 ? 128 : 0);
  }
}

// It takes of the room for what changed.
TEST(StagedDeltaTest, ATensorWithoutBitmapIsSentAlways) {
  const PlanFile plan = HostsPlan("bf16", "bf16", "bf16", "bitmap");
  DeltaWorld world(plan);
  world.GiveBitmaps(0);
  TakeBitmap(world, "other");
  ASSERT_TRUE(Begin(world).ok());
  const std::vector<Notice>& notices = world.executor(0).notices();
  ASSERT_EQ(notices.size(), 1);
  EXPECT_EQ(notices[0].kind, NoticeKind::kNotDelta);
  EXPECT_EQ(
      notices[0].text,
      "each refit sends 256 bytes of rank 0 whole, since \"other\" has no "
      "bitmap");
  const BoundTensor& other = world.Tensor(0, "other");
  const BoundTensor& received = world.Tensor(1, "other");
  const struct {
    uint64_t nth;
    uint32_t rung;
  } cases[] = {{200, 128}, {160, 64}};  // room for 513, 1025
  for (const auto& [nth, rung] : cases) {
    Change(world, nth);
    Mark(world, "w", nth);
    std::memset(other.data, static_cast<int>(nth), other.size_bytes);
    ASSERT_TRUE(world.Refit().ok());
    EXPECT_EQ(world.report().rung, rung);
    EXPECT_EQ(world.report().elements, kElements);
    EXPECT_EQ(world.report().changed_elements, (kElements + nth - 1) / nth);
    EXPECT_TRUE(IsEqual(world));
    EXPECT_EQ(std::memcmp(received.data, other.data, other.size_bytes), 0);
  }
  // Of nearly all there is none: no rung has room.
  world.GiveBitmaps(0);
  TakeBitmap(world, "w");
  ASSERT_TRUE(world.Bind().ok());
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_FALSE(world.report().is_delta);
  Change(world, 1000);
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_TRUE(world.report().is_delta);
  EXPECT_EQ(world.report().rung, 1);
  EXPECT_EQ(world.report().stored_bytes, world.report().dense_bytes);
  EXPECT_EQ(world.report().elements, 128);
  EXPECT_TRUE(IsEqual(world));
}

// Marks are of what the source holds, whatever it is cast to.
TEST(StagedDeltaTest, WhatTheSourceCastsIsSentWhereItIsMarked) {
  const PlanFile plan = HostsPlan("bf16", "", "", "bitmap", "fp32");
  DeltaWorld world(plan);
  world.GiveBitmaps(0);
  auto* const held = static_cast<uint32_t*>(world.Tensor(0, "w").data);
  const auto* const received =
      static_cast<const uint16_t*>(world.Tensor(1, "w").data);
  for (uint32_t i = 0; i < kElements; ++i) held[i] = 0x3f800002 + (i << 3);
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.Refit().ok());
  std::vector<uint16_t> sent(received, received + kElements);
  for (uint32_t i = 0; i < kElements; i += 200) {
    held[i] = 0x40490000;
    sent[i] = 0x4049;
  }
  Mark(world, "w", 200);
  for (uint32_t i = 1; i < kElements; i += 400) held[i] ^= 1;
  Mark(world, "w", 400, /*first=*/1);
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_EQ(world.report().rung, 128);
  EXPECT_EQ(world.report().changed_elements, 328 + 164);
  EXPECT_EQ(std::memcmp(received, sent.data(), 2 * kElements), 0);
}

// Over the fake libnccl, on devices that work on streams.
class NcclStagedDeltaTest : public testing::Test {
 protected:
  NcclStagedDeltaTest() {
    fake_nccl_reset();
    EXPECT_TRUE(Begin(*world_).ok());
  }
  ~NcclStagedDeltaTest() override {
    EXPECT_EQ(fake_nccl_violations(), 0) << fake_nccl_first_violation();
  }

  // A delta refit fails on all ranks, by what `rank` finds; the next one, after
  // a Connect, is dense.
  void ExpectTorn(int32_t rank, absl::StatusCode code,
                  const std::string& text) {
    Change(*world_, 1000);
    const std::vector<absl::Status> statuses = world_->Refits();
    EXPECT_EQ(statuses[rank].code(), code) << statuses[rank];
    EXPECT_NE(statuses[rank].message().find(text), std::string::npos)
        << statuses[rank];
    EXPECT_FALSE(statuses[1 - rank].ok());
    for (LazyDevice& device : devices_) {
      device.before_apply = nullptr;
    }
    ASSERT_TRUE(world_->Connect().ok());
    ASSERT_TRUE(world_->Refit().ok());
    EXPECT_FALSE(world_->report().is_delta);
    EXPECT_TRUE(IsEqual(*world_));
    Change(*world_, 1000);
    ASSERT_TRUE(world_->Refit().ok());
    EXPECT_EQ(world_->report().rung, 128);
    EXPECT_TRUE(IsEqual(*world_));
  }

  const PlanFile plan_ = HostsPlan();
  std::vector<LazyDevice> devices_{2};
  const std::unique_ptr<DeltaWorld> world_ = NcclDeltaWorld(plan_, devices_);
};

// Found when the refit is over on the rank, and before any rank has a base.
TEST_F(NcclStagedDeltaTest, AMessageThatWasDamagedTearsTheRefit) {
  devices_[1].before_apply = [](const std::vector<MessageToCode>& messages) {
    messages[0].code[1] = std::byte{0x11};
  };
  ExpectTorn(1, absl::StatusCode::kDataLoss,
             "round 0: recv of 2056 bytes from rank 0: what changed is not "
             "encoded as it should be: 4418 elements, with room for 512");
}

// Nothing that reads the worker's tensors is left on a stream.
TEST_F(NcclStagedDeltaTest,
       CallersWorkThatNeverEndsIsWaitedForUntilTheDeadline) {
  Change(*world_, 1000);
  devices_[0].is_stuck = true;
  const size_t pending = devices_[0].Pending();
  const std::vector<absl::Status> statuses =
      world_->OnAllRanks([&](int32_t rank) {
        return world_->executor(rank).Run(
            nullptr, {.timeout = std::chrono::milliseconds(100 + rank * 5000)});
      });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(statuses[0].message().find("what changed was not found before the "
                                       "deadline"),
            std::string::npos)
      << statuses[0];
  EXPECT_FALSE(statuses[1].ok());
  EXPECT_EQ(devices_[0].Pending(), pending);
  devices_[0].is_stuck = false;
  ASSERT_TRUE(world_->Connect().ok());
  ASSERT_TRUE(world_->Refit().ok());
  EXPECT_FALSE(world_->report().is_delta);
  EXPECT_TRUE(IsEqual(*world_));
}

// A device that works on the calling thread.
class EagerDevice : public LazyDevice {
 public:
  absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream() override {
    return HostDevice::CreateStream();
  }
  bool IsHost() const override { return true; }
};

// There it is found at once: some rounds are over, and others not begun.
TEST(StagedDeltaTest, ARefitMayEndBetweenTwoStagedRounds) {
  const PlanFile plan = RowsPlan(32768);
  EagerDevice device;
  DeltaWorld world(plan, &device, /*rank=*/1);
  ASSERT_TRUE(Begin(world).ok());
  int rounds = 0;
  device.before_apply = [&](const std::vector<MessageToCode>& messages) {
    if (++rounds != 3) return;
    std::memset(messages[2].code, 0x11, 8);
  };
  Change(world, 1000);
  const std::vector<absl::Status> statuses = world.Refits();
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kDataLoss)
      << statuses[0] << statuses[1];
  for (const absl::Status& status : statuses) {
    EXPECT_NE(status.message().find("round 2: "), std::string::npos) << status;
  }
  EXPECT_EQ(rounds, 3);
  for (int32_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(world.executor(rank).state(), ExecutorState::kTorn);
  }
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_FALSE(world.report().is_delta);
  EXPECT_TRUE(IsEqual(world));
}

TEST(StagedDeltaTest, EachRoundAddsToTheTimes) {
  const PlanFile plan = RowsPlan(32768);
  for (const int32_t rank : {0, 1}) {
    TickingDevice device;
    DeltaWorld world(plan, &device, rank);
    ASSERT_TRUE(Begin(world).ok());
    constexpr int rounds = 16;
    for (const int nth : {1000, 1}) {
      Change(world, nth);
      ASSERT_TRUE(world.Refit().ok());
      const DeltaReport& report = world.report(rank);
      EXPECT_EQ(world.executor(rank).counters().rounds, rounds);
      EXPECT_EQ(report.find_seconds, rank == 0 ? 1 : 0);
      EXPECT_EQ(report.encode_seconds, rank == 0 ? rounds : 0);
      EXPECT_EQ(report.wire_seconds, rounds);
      EXPECT_EQ(report.apply_seconds, rank == 1 ? rounds : 0);
      EXPECT_GE(report.check_seconds, 1);
      EXPECT_EQ(report.keep_seconds, 1);
    }
  }
}

}  // namespace
}  // namespace refit
