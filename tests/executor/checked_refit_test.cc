// That a checked refit digests what is whole, while the rest comes: on devices
// whose streams run at once, and on such that put work off.
#include <atomic>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "executor/digest/arrivals.h"
#include "plan/schedule/copy_batches.h"
#include "plan/schedule/direct_pairs.h"
#include "plan/schedule/direct_steps.h"
#include "tests/compiler/make_compact.h"
#include "tests/executor/lazy_device.h"
#include "tests/executor/local_world.h"
#include "tests/executor/nccl_world.h"
#include "tests/executor/observed_device.h"
#include "tests/property/draw.h"
#include "tests/sanitizers.h"

namespace refit {
namespace {

// Works at once, and digests beside rounds as a GPU does.
class BusyDevice : public HostDevice {
 public:
  bool IsHost() const override { return false; }
};

// Counts the steps of digests that are enqueued beside rounds.
class CountingDevice : public ObservedDevice {
 public:
  CountingDevice() {
    on_enqueue = [this](const Enqueued& enqueued) {
      beside_rounds += enqueued.use.way == DeviceUse::Way::kBesideRounds;
      return true;
    };
  }
  bool IsHost() const override { return false; }

  int beside_rounds = 0;
};

// Of a plan with deltas: all but the first refit are some.
void ExpectDeltasRight(const PlanFile& plan, ExecutorWorld& world) {
  ValueCheck values(plan);
  values.FillSources(world.tensors);
  values.PoisonDestinations(world.tensors);
  for (int i = 0; i < 3; ++i) {
    if (i > 0) values.ChangeSources(world.tensors, 0.1);
    ASSERT_TRUE(AllOk(world.CheckedRefit()));
    EXPECT_EQ(values.Check(world.tensors).wrong_elements, 0);
    EXPECT_EQ(world.executor(0).delta_report()->is_delta, i > 0);
  }
}

// Every second one is of a process with one hardware queue: its digests come
// behind the rounds, and its peers know nothing of it.
class QueuedDevice : public LazyDevice {
 public:
  bool OverlapsStreams() const override { return overlaps_; }

 private:
  static inline std::atomic<int> made_ = 0;
  const bool overlaps_ = made_++ % 2 == 0;
};

template <typename DeviceOfRank>
void ExpectChecksPass(const PlanFile& plan) {
  LocalWorldOf<DeviceOfRank> world(plan);
  world.Bind();
  if (plan.body().delta() != nullptr) {
    ExpectDeltasRight(plan, world);
  } else {
    world.ExpectCheckedRefitsRight(plan);
  }
}

std::string DrawSide(Draw& draw, int64_t ranks) {
  const std::vector<std::string> placements = {"Shard(0)", "Shard(1)",
                                               "Replicate"};
  std::vector<std::string> tensors;
  for (const char* match : {"layers.*.w", "layers.*.v", "*"}) {
    tensors.push_back(
        absl::StrFormat(R"({"match": "%s", "mesh": "m", "placements": ["%s"]})",
                        match, draw.Pick(placements)));
  }
  return absl::StrFormat(
      R"({"layout": "generic", "meshes": {"m": {"axes": {"x": %d}}},
          "tensors": [%s]})",
      ranks, absl::StrJoin(tensors, ", "));
}

std::string DrawJob(Draw& draw) {
  std::vector<std::string> parameters;
  for (int64_t layer = draw.Between(2, 6); layer-- > 0;) {
    for (const char* name : {"w", "v"}) {
      parameters.push_back(absl::StrFormat(
          R"({"name": "layers.%d.%s", "shape": [48, 60], "dtype": "bf16"})",
          layer, name));
    }
  }
  std::vector<std::string> options = {R"("bucket_bytes": 4096)"};
  // A stack of two dimensions, of which a part is left out.
  const int64_t expert_layers = draw.Between(0, 3);
  if (expert_layers > 0 && draw.Chance(70)) {
    options.push_back(R"("exclude": ["layers.*.experts.4.u"])");
  }
  for (int64_t layer = expert_layers; layer-- > 0;) {
    for (int expert = 0; expert < 5; ++expert) {
      parameters.push_back(absl::StrFormat(
          R"({"name": "layers.%d.experts.%d.u", "shape": [24, 30],
              "dtype": "bf16"})",
          layer, expert));
    }
  }
  parameters.push_back(
      absl::StrFormat(R"({"name": "head", "shape": [%d, 60], "dtype": "bf16"})",
                      draw.Between(1, 900)));
  if (draw.Chance(30)) options.push_back(R"("delta": {"dense_every": 100})");
  if (draw.Chance(35)) {
    options.push_back(R"("peer": "staged")");
  } else if (draw.Chance(40)) {
    options.push_back(R"("direct": "pull")");
  }
  const int64_t sources = draw.Between(1, 4);
  const int64_t destinations = draw.Between(1, 4);
  std::string topology;
  if (draw.Chance(40)) {
    std::vector<int64_t> hosts(static_cast<size_t>(sources + destinations));
    for (int64_t& host : hosts) host = draw.Between(0, 1);
    topology = absl::StrFormat(
        R"("topology": {"hosts": [%s], "peer_gigabytes_per_second": 0.01,
                        "network_gigabytes_per_second": 0.001},)",
        absl::StrJoin(hosts, ", "));
  }
  return absl::StrFormat(
      R"({"model": {"parameters": [%s]}, "source": %s, "destination": %s, %s
          "options": {%s}})",
      absl::StrJoin(parameters, ", "), DrawSide(draw, sources),
      DrawSide(draw, destinations), topology, absl::StrJoin(options, ", "));
}

TEST(CheckedRefitTest, DigestsSeeWhatTheRefitLeaves) {
  for (uint64_t seed = 1; seed <= (kSanitized ? 15 : 150); ++seed) {
    Draw draw(seed);
    const std::string job = DrawJob(draw);
    SCOPED_TRACE(absl::StrCat("seed ", seed, "\n", job));
    const PlanFile plan = draw.Chance(25) ? CompiledPlan(job, "", MakeCompact)
                                          : CompiledPlan(job);
    ExpectChecksPass<BusyDevice>(plan);
    ExpectChecksPass<QueuedDevice>(plan);
    if (testing::Test::HasFailure()) return;
  }
}

Arrivals ArrivalsOf(const PlanFile& plan, int32_t rank) {
  const RankSchedule schedule(plan, rank);
  return ListArrivals(plan, rank, schedule, PlannedPairs(plan, schedule));
}

// Two ranks each send two half of every matrix: 96 KB to each.
std::string HalvesJob(const std::string& more) {
  std::vector<std::string> parameters;
  for (int layer = 0; layer < 8; ++layer) {
    parameters.push_back(absl::StrFormat(
        R"({"name": "layers.%d.w", "shape": [64, 192], "dtype": "bf16"})",
        layer));
  }
  const auto side = [](int dimension) {
    return absl::StrFormat(
        R"json({"layout": "generic", "meshes": {"m": {"axes": {"x": 2}}},
          "tensors": [{"match": "*", "mesh": "m",
                       "placements": ["Shard(%d)"]}]})json",
        dimension);
  };
  return absl::StrFormat(
      R"({"model": {"parameters": [%s]}, "source": %s, "destination": %s, %s})",
      absl::StrJoin(parameters, ", "), side(0), side(1), more);
}

TEST(CheckedRefitTest, SendersTellWhatCameStepByStep) {
  const PlanFile plan =
      CompiledPlan(HalvesJob(R"("options": {"bucket_bytes": 8192})"));
  for (const int32_t sender : {0, 1}) {
    const Arrivals arrivals = ArrivalsOf(plan, sender);
    ASSERT_EQ(arrivals.reports.size(), 1);
    EXPECT_TRUE(arrivals.reports[0].moves);
    EXPECT_EQ(arrivals.reports[0].targets, (std::vector<int32_t>{2, 3}));
    EXPECT_TRUE(arrivals.reports[0].origins.empty());
    EXPECT_EQ(arrivals.digested_after, std::vector<size_t>(8, 0));
  }
  for (const int32_t receiver : {2, 3}) {
    const Arrivals arrivals = ArrivalsOf(plan, receiver);
    EXPECT_FALSE(arrivals.reports[0].moves);
    EXPECT_EQ(arrivals.reports[0].origins, (std::vector<int32_t>{0, 1}));
    EXPECT_EQ(arrivals.digested_after,
              (std::vector<size_t>{1, 2, 3, 4, 5, 6, 7, 8}));
  }
}

// Two layers of four, of these three experts each.
TEST(CheckedRefitTest, CopiesAreCutInEveryDimensionOfAStack) {
  const PlanFile plan =
      CompiledPlan(HalvesJob(R"("options": {"bucket_bytes": 8192})"));
  const DirectSteps steps(plan, /*sender=*/0, /*receiver=*/2, /*round=*/0);
  constexpr uint64_t kFirstEntry = 100;
  CopyBatch batch;
  batch.loops = {{.extent = 2, .from = {.bytes = 600}, .to = {.entries = 4}},
                 {.extent = 3, .from = {.bytes = 200}, .to = {.entries = 1}},
                 {.extent = 7, .from = {.bytes = 2}, .to = {.bytes = 2}}};
  batch.copies.push_back({.from = {.entry = 3},
                          .to = {.entry = kFirstEntry},
                          .loops_begin = 0,
                          .loops_count = 3});
  CutBySteps(steps, kFirstEntry, /*first_copy=*/0, batch);
  std::map<uint64_t, uint64_t> from_of;  // by entry that is stored into
  for (const StridedCopy& copy : batch.copies) {
    const auto loops = absl::MakeConstSpan(batch.loops)
                           .subspan(copy.loops_begin, copy.loops_count);
    EXPECT_EQ(loops.back().extent, 7);
    ForEachIteration(
        loops.subspan(0, loops.size() - 1), copy.from, copy.to,
        [&](const CopyAddress& from, const CopyAddress& to) {
          EXPECT_TRUE(from_of.emplace(to.entry, from.byte_offset).second);
          EXPECT_EQ(copy.step, steps.StepOf(to.entry - 100));
          EXPECT_EQ(copy.step, to.entry - 100);
        });
  }
  EXPECT_EQ(from_of, (std::map<uint64_t, uint64_t>{{100, 0},
                                                   {101, 200},
                                                   {102, 400},
                                                   {104, 600},
                                                   {105, 800},
                                                   {106, 1000}}));
}

TEST(CheckedRefitTest, ReceiversThatReadKnowThemselves) {
  const PlanFile plan = CompiledPlan(
      HalvesJob(R"("options": {"bucket_bytes": 8192, "direct": "pull"})"));
  EXPECT_FALSE(ArrivalsOf(plan, 0).reports[0].IsStepped());
  const Arrivals arrivals = ArrivalsOf(plan, 2);
  EXPECT_TRUE(arrivals.reports[0].moves);
  EXPECT_TRUE(arrivals.reports[0].origins.empty());
  EXPECT_EQ(arrivals.digested_after,
            (std::vector<size_t>{1, 2, 3, 4, 5, 6, 7, 8}));
}

// 24 KB for each pair are less than four buckets.
TEST(CheckedRefitTest, ShortRoundsAreToldOfAtTheirEnd) {
  const PlanFile plan =
      CompiledPlan(HalvesJob(R"("options": {"bucket_bytes": 65536})"));
  for (int32_t rank = 0; rank < 4; ++rank) {
    EXPECT_FALSE(ArrivalsOf(plan, rank).reports[0].IsStepped());
  }
  EXPECT_EQ(ArrivalsOf(plan, 2).digested_after, std::vector<size_t>(8, 8));
}

// Processes that share a GPU take turns, milliseconds each.
TEST(CheckedRefitTest, RanksThatShareAGpuTellNoSteps) {
  const PlanFile plan = CompiledPlan(
      HalvesJob(R"("colocated": true, "options": {"bucket_bytes": 8192})"));
  for (int32_t rank = 0; rank < 4; ++rank) {
    for (const StepReports& reports : ArrivalsOf(plan, rank).reports) {
      EXPECT_FALSE(reports.IsStepped());
    }
  }
}

// Encoding and applying take all of a GPU.
TEST(CheckedRefitTest, DeltasDigestBehindTheRounds) {
  const PlanFile plan = CompiledPlan(HalvesJob(
      R"("options": {"bucket_bytes": 8192, "peer": "staged", "delta": {}})"));
  LocalWorldOf<CountingDevice> world(plan);
  world.Bind();
  ValueCheck values(plan);
  values.FillSources(world.tensors);
  const auto besides = [&] {
    EXPECT_TRUE(AllOk(world.CheckedRefit()));
    EXPECT_EQ(values.Check(world.tensors).wrong_elements, 0);
    int steps = 0;
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      steps += std::exchange(world.device(rank).beside_rounds, 0);
    }
    return steps;
  };
  EXPECT_GT(besides(), 0);
  values.ChangeSources(world.tensors, 0.001);
  EXPECT_EQ(besides(), 0);
  EXPECT_TRUE(world.executor(0).delta_report()->is_delta);
}

TEST(CheckedRefitTest, StagedRoundsAreDigestedOneByOne) {
  const PlanFile plan = CompiledPlan(
      HalvesJob(R"("options": {"bucket_bytes": 8192, "peer": "staged"})"), "",
      [](Limits& limits) { limits.operations_per_round = 2; });
  const Arrivals arrivals = ArrivalsOf(plan, 2);
  EXPECT_EQ(arrivals.count, arrivals.reports.size() * kDirectSteps);
  const std::set<size_t> distinct(arrivals.digested_after.begin(),
                                  arrivals.digested_after.end());
  EXPECT_GE(distinct.size(), 4);
  EXPECT_EQ(*distinct.rbegin(), arrivals.count);
}

}  // namespace
}  // namespace refit
