// Delta refits in staged rounds.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tests/executor/delta_world.h"

namespace refit {
namespace {

constexpr uint64_t kElements = 1 << 16;

// One source, one destination on another host. `dtype`: the destination's.
PlanFile HostsPlan(const std::string& dtype = "bf16") {
  return PlanOfJob(R"job({
    "model": {"parameters": [
      {"name": "w", "shape": [256, 256], "dtype": "bf16"}]},
    "source": {"layout": "generic", "meshes": {"m": {"axes": {"a": 1}}},
      "tensors": [{"match": "w", "mesh": "m", "placements": ["Replicate"]}]},
    "destination": {"layout": "generic", "meshes": {"m": {"axes": {"a": 1}}},
      "tensors": [{"match": "w", "mesh": "m", "placements": ["Replicate"],
                   "dtype": ")job" +
                   dtype + R"job("}]},
    "topology": {"gpus_per_host": 1},
    "options": {"delta": {"dense_every": 0}}})job");
}

// Changes every `nth` element of the source.
void Change(DeltaWorld& world, uint64_t nth) {
  auto* const values = static_cast<uint16_t*>(world.tensors[0][0].data);
  for (uint64_t i = 0; i < kElements; i += nth) values[i] ^= 1;
}

void Fill(DeltaWorld& world) {
  auto* const values = static_cast<uint16_t*>(world.tensors[0][0].data);
  for (uint64_t i = 0; i < kElements; ++i) {
    values[i] = static_cast<uint16_t>(0x3f00 + i % 97);
  }
}

bool IsEqual(DeltaWorld& world) {
  return std::memcmp(world.tensors[0][0].data, world.tensors[1][0].data,
                     2 * kElements) == 0;
}

TEST(StagedDeltaTest, TheRungIsTheFirstWithRoomForWhatChanged) {
  const PlanFile plan = HostsPlan();
  DeltaWorld world(plan);
  Fill(world);
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_FALSE(world.report().is_delta);
  EXPECT_EQ(world.report().rung, 0);
  EXPECT_EQ(world.report().stored_bytes, 2 * kElements);
  const struct {
    uint64_t nth;
    uint32_t rung;
    uint64_t bytes;
  } cases[] = {
      {kElements + 1, 64, 8 + 1024 * 3 + 512},  // the first alone
      {64, 64, 8 + 1024 * 3 + 512},             // as many as there is room for
      {63, 16, 8 + 4096 * 3 + 512},
      {16, 16, 8 + 4096 * 3 + 512},
      {5, 4, 8 + 16384 * 3 + 512},
      {3, 1, 2 * kElements},  // too many: whole
  };
  for (const auto& [nth, rung, bytes] : cases) {
    Change(world, nth);
    ASSERT_TRUE(world.Refit().ok());
    const DeltaReport& report = world.report();
    EXPECT_TRUE(report.is_delta);
    EXPECT_EQ(report.rung, rung) << nth;
    EXPECT_EQ(report.stored_bytes, bytes) << nth;
    EXPECT_EQ(report.dense_bytes, 2 * kElements);
    EXPECT_EQ(report.elements, kElements);
    EXPECT_EQ(report.changed_elements, (kElements + nth - 1) / nth);
    EXPECT_TRUE(IsEqual(world)) << nth;
  }
}

TEST(StagedDeltaTest, WhatTheReceiverCastsIsSentWhole) {
  const PlanFile plan = HostsPlan("fp32");
  DeltaWorld world(plan);
  Fill(world);
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.Refit().ok());
  Change(world, 1000);
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_TRUE(world.report().is_delta);
  EXPECT_EQ(world.report().stored_bytes, world.report().dense_bytes);
  EXPECT_EQ(world.report().elements, 0);
}

// An engine's weights were overwritten between two refits.
TEST(StagedDeltaTest, AWrongBitAtTheReceiverFailsTheRefitOnAllRanks) {
  const PlanFile plan = HostsPlan();
  DeltaWorld world(plan);
  Fill(world);
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.Refit().ok());
  static_cast<uint16_t*>(world.tensors[1][0].data)[12345] ^= 2;
  Change(world, 1000);
  for (const absl::Status& status : world.Refits()) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_NE(status.message().find("\"w\""), std::string::npos) << status;
  }
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_FALSE(world.report().is_delta);
  EXPECT_TRUE(IsEqual(world));
}

}  // namespace
}  // namespace refit
