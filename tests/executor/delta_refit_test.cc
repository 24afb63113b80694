// When a refit of a plan with deltas is dense, what ends in a failure, and
// staged rounds beside direct ones.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "plan/sent_ranges.h"
#include "tests/executor/delta_world.h"

namespace refit {
namespace {

// Two sources hold the rows of a matrix, two destinations its columns; both
// hold all of a vector. Rank 3 alone is on another host, so that what it
// receives is staged, and what rank 2 receives is stored.
PlanFile MatrixPlan(const std::string& delta) {
  return PlanOfJob(R"job({
    "model": {"parameters": [
      {"name": "w", "shape": [64, 128], "dtype": "bf16"},
      {"name": "norm", "shape": [128], "dtype": "bf16"}]},
    "source": {"layout": "generic", "meshes": {"m": {"axes": {"a": 2}}},
      "tensors": [{"match": "w", "mesh": "m", "placements": ["Shard(0)"]},
                  {"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
    "destination": {"layout": "generic", "meshes": {"m": {"axes": {"a": 2}}},
      "tensors": [{"match": "w", "mesh": "m", "placements": ["Shard(1)"]},
                  {"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
    "topology": {"gpus_per_host": 3},
    "options": {"bucket_bytes": 65536, "delta": )job" +
                   delta + "}}");
}

constexpr uint64_t kRowElements = 128;
constexpr uint64_t kMatrixElements = 32 * kRowElements;  // of a source
// Of the matrix, to each destination.
constexpr uint64_t kSentElements = kMatrixElements / 2;
// Of a source's first row: element 5 of rank 3's.
constexpr uint64_t kFarElement = 64 + 5;

void Set(BoundTensor& tensor, uint64_t element, uint16_t bits) {
  std::memcpy(static_cast<std::byte*>(tensor.data) + element * sizeof(bits),
              &bits, sizeof(bits));
  if (tensor.changes != nullptr) {
    tensor.changes[element / 32] |= uint32_t{1} << (element % 32);
  }
}

uint16_t Get(const BoundTensor& tensor, uint64_t element) {
  uint16_t bits = 0;
  std::memcpy(
      &bits,
      static_cast<const std::byte*>(tensor.data) + element * sizeof(bits),
      sizeof(bits));
  return bits;
}

void Fill(DeltaWorld& world) {
  for (int32_t rank = 0; rank < world.plan().source_ranks(); ++rank) {
    for (BoundTensor& tensor : world.tensors[rank]) {
      for (uint64_t i = 0; i < tensor.size_bytes / 2; ++i) {
        Set(tensor, i, static_cast<uint16_t>(i * 7 + tensor.size_bytes));
      }
    }
  }
}

TEST(DeltaRefitTest, StagedRoundsSendWhatChangedAndDirectOnesAll) {
  const PlanFile plan = MatrixPlan("true");
  DeltaWorld world(plan);
  Fill(world);
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_FALSE(world.report().is_delta);
  EXPECT_EQ(world.report().why_dense, "rank 0 bound since its last refit");
  EXPECT_EQ(world.report().version, 1);
  EXPECT_EQ(world.report().check_seconds, 0);
  EXPECT_EQ(world.report().stored_bytes, world.report().dense_bytes);
  const uint64_t direct_bytes =
      world.executor(1)
          .counters()
          .by(fb::Route::kPeer, fb::Mechanism::kDirect)
          .bytes_sent;
  EXPECT_GE(direct_bytes, kSentElements * 2);

  // Nothing changed.
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_TRUE(world.report().is_delta);
  EXPECT_EQ(world.report().why_dense, "");
  EXPECT_EQ(world.report().base_version, 1);
  EXPECT_EQ(world.report().version, 2);
  EXPECT_GT(world.report().check_seconds, 0);
  EXPECT_EQ(world.report().changed_elements, 0);
  EXPECT_EQ(world.report().rung, 128);
  EXPECT_LT(world.report().stored_bytes, world.report().dense_bytes / 10);

  // One value of each destination: those of direct rounds are not counted.
  Set(world.Tensor(1, "w"), 5, 0x1234);
  Set(world.Tensor(1, "w"), kFarElement, 0x5678);
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_EQ(world.report(0).changed_elements, 0);
  EXPECT_EQ(world.report(1).changed_elements, 1);
  EXPECT_GE(world.report(1).elements, kSentElements);
  EXPECT_LT(world.report(1).elements, kSentElements + kRowElements + 1);
  EXPECT_LT(world.report(1).stored_bytes, world.report(1).dense_bytes / 10);
  const RunCounters& counters = world.executor(1).counters();
  EXPECT_EQ(counters.by(fb::Route::kPeer, fb::Mechanism::kDirect).bytes_sent,
            direct_bytes);
  EXPECT_EQ(counters.by(fb::Route::kNetwork, fb::Mechanism::kStaged).bytes_sent,
            world.report(1).stored_bytes);
  EXPECT_EQ(Get(world.Tensor(2, "w"), 32 * kRowElements / 2 + 5), 0x1234);
  EXPECT_EQ(Get(world.Tensor(3, "w"), 32 * kRowElements / 2 + 5), 0x5678);

  // What two destinations hold changes on both, and is known by then.
  for (const int32_t rank : {0, 1}) Set(world.Tensor(rank, "norm"), 9, 77);
  for (int refit = 0; refit < 2; ++refit) {
    ASSERT_TRUE(world.Refit().ok());
    for (const int32_t rank : {2, 3}) {
      EXPECT_EQ(Get(world.Tensor(rank, "norm"), 9), 77);
    }
    EXPECT_EQ(
        world.report(0).changed_elements + world.report(1).changed_elements,
        refit == 0 ? 1 : 0);
  }

  // A dense refit is checked where its caller asks for that.
  ASSERT_TRUE(world.Refit({.check = true, .dense = true}).ok());
  EXPECT_GT(world.report().check_seconds, 0);
}

// What `rank` is told of its Bind; the others of that it cannot go on.
std::string RefusalOfBind(DeltaWorld& world, int32_t rank) {
  EXPECT_TRUE(world.Connect().ok());
  const std::vector<absl::Status> statuses = world.OnAllRanks(
      [&](int32_t of) { return world.executor(of).Bind(world.tensors[of]); });
  for (const absl::Status& status : statuses) EXPECT_FALSE(status.ok());
  EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kInvalidArgument);
  return std::string(statuses[rank].message());
}

TEST(DeltaRefitTest, BitmapsAreRefusedWhereThePlanTakesNone) {
  const PlanFile dense = MatrixPlan("false");
  const PlanFile snapshot = MatrixPlan("true");
  const PlanFile bitmap = MatrixPlan(R"({"changes": "bitmap"})");
  const std::string before =
      " cannot bind, 1 problem\n  bitmap: \"norm\" and 1 more tensors have a "
      "bitmap of changes, but ";
  DeltaWorld of_dense(dense);
  of_dense.GiveBitmaps(1);
  EXPECT_EQ(RefusalOfBind(of_dense, 1),
            "rank 1" + before +
                "each refit sends all: the plan's job has no options.delta, or "
                "the plan no staged rounds");
  DeltaWorld of_snapshot(snapshot);
  of_snapshot.GiveBitmaps(0);
  EXPECT_EQ(
      RefusalOfBind(of_snapshot, 0),
      "rank 0" + before +
          "the plan's options.delta.changes is \"snapshot\", so the executor "
          "finds what changed; wanted no bitmap, or a plan with \"bitmap\"");
  DeltaWorld of_bitmap(bitmap);
  of_bitmap.GiveBitmaps(3);
  EXPECT_EQ(RefusalOfBind(of_bitmap, 3),
            "rank 3" + before +
                "this rank is of the destination; wanted bitmaps of source "
                "ranks");
}

TEST(DeltaRefitTest, BitmapsThatAreNotAlignedOrNotAloneAreRefused) {
  const PlanFile plan = MatrixPlan(R"({"changes": "bitmap"})");
  DeltaWorld world(plan);
  world.GiveBitmaps(0);
  BoundTensor& norm = world.Tensor(0, "norm");
  BoundTensor& matrix = world.Tensor(0, "w");
  uint32_t* const right = norm.changes;
  norm.changes =
      reinterpret_cast<uint32_t*>(reinterpret_cast<std::byte*>(right) + 2);
  EXPECT_NE(RefusalOfBind(world, 0).find(
                "1 problem\n  not aligned: the bitmap of \"norm\" is at 0x"),
            std::string::npos);
  // Four words from the matrix's last but one on.
  norm.changes = matrix.changes + kMatrixElements / 32 - 2;
  EXPECT_NE(RefusalOfBind(world, 0).find(
                "1 problem\n  overlap: the bitmap of \"w\" and the bitmap of "
                "\"norm\" share 8 bytes"),
            std::string::npos);
  norm.changes = static_cast<uint32_t*>(matrix.data) + 1;
  EXPECT_NE(RefusalOfBind(world, 0).find("1 problem\n  overlap: \"w\" and the "
                                         "bitmap of \"norm\" share 16 bytes"),
            std::string::npos);
  norm.changes = right;
  EXPECT_TRUE(world.Start().ok());
}

TEST(DeltaRefitTest, IsDenseAtTheInterval) {
  const PlanFile plan = MatrixPlan(R"({"dense_every": 3})");
  DeltaWorld world(plan);
  Fill(world);
  ASSERT_TRUE(world.Start().ok());
  std::string kinds;
  for (int i = 0; i < 7; ++i) {
    ASSERT_TRUE(world.Refit().ok());
    kinds += world.report().is_delta ? 'd' : 'D';
  }
  EXPECT_EQ(kinds, "DddDddD");
  EXPECT_EQ(world.report().why_dense, "every refit of 3 is");
}

TEST(DeltaRefitTest, OneRankMayAskForDense) {
  const PlanFile plan = MatrixPlan("true");
  DeltaWorld world(plan);
  Fill(world);
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.Refit().ok());
  // An engine that loaded other weights.
  std::memset(world.Tensor(3, "w").data, 0, 64);
  EXPECT_TRUE(AllOk(world.OnAllRanks([&](int32_t rank) {
    return world.RefitOf(rank, {.dense = rank == 3});
  })));
  EXPECT_EQ(world.report(0).why_dense, "rank 3 asked for it");
  EXPECT_NE(Get(world.Tensor(3, "w"), 1), 0);
}

// The next refit, dense by itself, mends it.
TEST(DeltaRefitTest, OneFlippedBitIsSeenAndMended) {
  const PlanFile plan = MatrixPlan("true");
  DeltaWorld world(plan);
  Fill(world);
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.Refit().ok());
  for (const std::string name : {"w", "norm"}) {
    ASSERT_TRUE(world.Refit().ok());
    ASSERT_TRUE(world.report().is_delta);
    BoundTensor& tensor = world.Tensor(3, name);
    const uint16_t right = Get(tensor, 100);
    Set(tensor, 100, right ^ 0x40);
    for (const absl::Status& status : world.Refits()) {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_TRUE(
          absl::StrContains(status.message(), "\"" + name + "\" on rank 3"))
          << status;
    }
    EXPECT_FALSE(world.executor(0).delta_report().has_value());
    ASSERT_TRUE(world.Refit().ok());
    EXPECT_EQ(world.report().why_dense,
              "the last refit failed, or rank 0 did not wait for it");
    EXPECT_EQ(Get(tensor, 100), right);
  }
}

// Its successor has no snapshot, whatever the destination holds.
TEST(DeltaRefitTest, ASourceThatEndsBeforeAllHaveAcknowledgedLeavesNoBase) {
  const PlanFile plan = MatrixPlan("true");
  for (const int32_t victim : {0, 1, 2}) {
    DeltaWorld world(plan);
    Fill(world);
    ASSERT_TRUE(world.Start().ok());
    ASSERT_TRUE(world.Refit().ok());
    Set(world.Tensor(0, "w"), kFarElement, 0x1111);
    // All bytes are stored; the victim ends before it says so.
    const auto statuses = world.OnAllRanks([&](int32_t rank) {
      absl::Status status = world.executor(rank).Run(
          nullptr, {.timeout = std::chrono::milliseconds(500)});
      if (!status.ok()) return status;
      if (rank != victim) return world.executor(rank).Wait();
      world.Kill(rank);
      return absl::OkStatus();
    });
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      if (rank == victim) continue;
      EXPECT_FALSE(statuses[rank].ok());
      EXPECT_EQ(world.executor(rank).state(), ExecutorState::kTorn);
    }
    // The trainer went back to its checkpoint.
    world.Replace(victim);
    Fill(world);
    const uint16_t right = Get(world.Tensor(0, "w"), kFarElement);
    ASSERT_NE(right, 0x1111);
    ASSERT_TRUE(world.Start().ok());
    ASSERT_TRUE(world.Refit().ok());
    EXPECT_FALSE(world.report(victim == 0 ? 1 : 0).is_delta);
    EXPECT_EQ(Get(world.Tensor(3, "w"), 5), right);
    Set(world.Tensor(0, "w"), kFarElement, 0x2222);
    ASSERT_TRUE(world.Refit().ok());
    EXPECT_TRUE(world.report().is_delta);
    EXPECT_EQ(Get(world.Tensor(3, "w"), 5), 0x2222);
  }
}

TEST(DeltaRefitTest, CaptureIsRefused) {
  class CapturingDevice : public HostDevice {
   public:
    absl::StatusOr<bool> IsCapturing(Stream stream) override {
      return stream != nullptr;
    }
  };
  const PlanFile plan = MatrixPlan("true");
  CapturingDevice device;
  DeltaWorld world(plan, &device, 0);
  Fill(world);
  ASSERT_TRUE(world.Start().ok());
  int stream = 0;
  const auto statuses = world.OnAllRanks([&](int32_t rank) {
    return world.executor(rank).Run(rank == 0 ? &stream : nullptr,
                                    {.timeout = DeltaWorld::kTimeout});
  });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(statuses[0].message(),
            "rank 0: a replayed graph does not know what the destination "
            "holds: refits of a plan with options.delta cannot be captured");
}

// A second one beside it would not fit where the first just does.
TEST(DeltaRefitTest, ANewBindKeepsTheMemoryOfTheSnapshot) {
  class CountingDevice : public HostDevice {
   public:
    std::map<uint64_t, int> allocations;  // by size
    absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(
        uint64_t size_bytes) override {
      ++allocations[size_bytes];
      return HostDevice::Allocate(size_bytes);
    }
  };
  const PlanFile plan = MatrixPlan("true");
  CountingDevice device;
  DeltaWorld world(plan, &device, 0);
  Fill(world);
  ASSERT_TRUE(world.Start().ok());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(world.Bind().ok());
    ASSERT_TRUE(world.Refit().ok());
    Set(world.Tensor(0, "w"), kFarElement, static_cast<uint16_t>(i));
    ASSERT_TRUE(world.Refit().ok());
    EXPECT_EQ(Get(world.Tensor(3, "w"), 5), i);
  }
  EXPECT_EQ(device.allocations[SnapshotBytes(plan, 0)], 1);
}

TEST(DeltaRefitTest, NoMemoryForTheSnapshotIsTold) {
  class FullDevice : public HostDevice {
   public:
    uint64_t refused_bytes = 0;
    absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(
        uint64_t size_bytes) override {
      if (size_bytes == refused_bytes) {
        return absl::ResourceExhaustedError("no pages are left");
      }
      return HostDevice::Allocate(size_bytes);
    }
  };
  const PlanFile plan = MatrixPlan("true");
  FullDevice device;
  device.refused_bytes = SnapshotBytes(plan, 0);
  DeltaWorld world(plan, &device, 0);
  const std::vector<absl::Status> statuses =
      world.OnAllRanks([&](int32_t rank) {
        return world.executor(rank).Connect(DeltaWorld::kTimeout);
      });
  EXPECT_EQ(statuses[0].message(),
            "rank 0: the snapshot of what this rank sends: no pages are left; "
            "options.delta with \"changes\": \"bitmap\" needs none, but 1/16 "
            "of that from the worker");
}

TEST(DeltaRefitTest, TheBitmapOfAnEmptyTensorIsLeftAlone) {
  const PlanFile plan = PlanOfJob(R"job({
    "model": {"parameters": [
      {"name": "w", "shape": [1, 64], "dtype": "bf16"}]},
    "source": {"layout": "generic", "meshes": {"m": {"axes": {"a": 2}}},
      "tensors": [{"match": "*", "mesh": "m", "placements": ["Shard(0)"]}]},
    "destination": {"layout": "generic", "meshes": {"m": {"axes": {"a": 1}}},
      "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
    "options": {"peer": "staged", "delta": {"changes": "bitmap"}}})job");
  DeltaWorld world(plan);
  world.GiveBitmaps(0);
  world.GiveBitmaps(1);
  Fill(world);
  BoundTensor& empty = world.Tensor(1, "w");
  ASSERT_EQ(empty.size_bytes, 0);
  empty.changes[0] = 0x12345678;
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.Refit().ok());
  EXPECT_EQ(empty.changes[0], 0x12345678);
}

// Which poison the destination before each refit.
TEST(DeltaRefitTest, CheckedRunsAreDense) {
  const PlanFile plan = MatrixPlan("true");
  const absl::StatusOr<RunOfRanksResult> run =
      RunChecked(plan, {.iterations = 3, .timeout = std::chrono::minutes(1)});
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(run->check.wrong_elements, 0);
  EXPECT_EQ(run->check.checked_bytes, run->destination_bytes);
}

// Their check would see a delta that leaves out what changed.
TEST(DeltaRefitTest, CheckedRunsMayChangeWhatIsSent) {
  const PlanFile plan = MatrixPlan("true");
  DeltaWorld world(plan);
  ValueCheck check(plan);
  check.FillSources(world.tensors);
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.Refit().ok());
  for (int step = 0; step < 3; ++step) {
    check.ChangeSources(world.tensors, 0.05);
    EXPECT_GT(check.Check(world.tensors).wrong_elements, 200);
    ASSERT_TRUE(world.Refit().ok());
    EXPECT_TRUE(world.report().is_delta);
    EXPECT_EQ(check.Check(world.tensors).wrong_elements, 0);
  }
}

TEST(DeltaRefitTest, TheSnapshotIsOfWhatTheRankSendsInStagedRounds) {
  const PlanFile plan = MatrixPlan("true");
  // The matrix without the first half row, and of the vector what this source
  // is chosen for.
  const std::vector<SentRange> ranges = SentRanges(plan, 0);
  uint64_t bytes = 0;
  for (const SentRange& range : ranges) bytes += range.size_bytes();
  EXPECT_GE(bytes, kMatrixElements * 2 - kRowElements);
  EXPECT_LE(bytes, kMatrixElements * 2 - kRowElements + 256);
  EXPECT_GE(SnapshotBytes(plan, 0), bytes);
  EXPECT_LE(SnapshotBytes(plan, 0), bytes + 2 * 512);
  EXPECT_EQ(SnapshotBytes(plan, 2), 0);
}

}  // namespace
}  // namespace refit
