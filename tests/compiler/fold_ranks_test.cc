// The pass that plans equal parts of large jobs once.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "compiler/ir/module.h"
#include "compiler/model/model.h"
#include "compiler/passes/passes.h"
#include "compiler/simulated_seconds.h"
#include "plan/plan_file.h"
#include "tests/compiler/compile_testing.h"
#include "tests/compiler/make_compact.h"

namespace refit {
namespace {

// `copies` trainers of `ranks` ranks feed engines of two.
std::string JobOf(int copies, int ranks, int engines,
                  const std::string& hosts) {
  const auto side = [](int replicas, int shards) {
    return R"({"layout": "generic", "meshes": {"m": {"axes": {"dp": )" +
           std::to_string(replicas) + R"(, "tp": )" + std::to_string(shards) +
           R"(}}}, "tensors": [{"match": "*", "mesh": "m",)"
           R"x( "placements": ["Replicate", "Shard(0)"]}]})x";
  };
  return GenericJob(R"({"name": "w", "shape": [960, 64], "dtype": "bf16"})",
                    side(copies, ranks), side(engines, 2),
                    R"(, "topology": {"peer_gigabytes_per_second": 0.1,
          "network_gigabytes_per_second": 0.01, "hosts": )" +
                        hosts + "}");
}
// Twice as many engines as trainers.
std::string FoldedJob(int copies, int ranks, const std::string& hosts) {
  return JobOf(copies, ranks, 2 * copies, hosts);
}
// Two trainers of four ranks on a host each, and two engines on each of two.
constexpr char kHostsOfParts[] =
    "[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]";

bool IsFolded(const PlanFile& plan) {
  return (plan.plan().required_features() & kFeatureShifts) != 0;
}

bool IsPacked(const PlanFile& plan) {
  return (plan.plan().required_features() & kFeaturePackedMessages) != 0;
}

TEST(FoldRanksTest, EqualPartsAreOneProgramWithAShift) {
  const PlanFile plan = OpenJob(FoldedJob(2, 4, kHostsOfParts), MakeCompact);
  ASSERT_TRUE(IsFolded(plan));
  EXPECT_TRUE(IsPacked(plan));
  const fb::Body& body = plan.body();
  for (const uint32_t rank : {4u, 5u, 6u, 7u, 12u, 13u, 14u, 15u}) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    EXPECT_TRUE(AreShared(*body.programs()->Get(rank - 4), program));
    EXPECT_EQ(program.source_shift(), 4u);
    EXPECT_EQ(program.destination_shift(), 4u);
    EXPECT_GT(plan.messages().Of(program).size(), 0u);
  }
  EXPECT_EQ(body.programs()->Get(1)->source_shift(), 0u);
}

// What the passes find of a job, with fold-ranks or without.
Stats StatsOf(const std::string& text, bool folds) {
  const auto file = std::make_shared<SourceFile>();
  file->path = "job.json";
  file->text = text;
  Diagnostics diagnostics;
  const std::optional<Job> job = ReadJobText(file, "", diagnostics, "refitc");
  const std::optional<Model> model = ReadModel(*job, diagnostics);
  Module module;
  module.limits = {.bucket_bytes = int64_t{256} << 20,
                   .staging_bytes = int64_t{1} << 30,
                   .relays = true,
                   .shape = {}};
  MakeCompact(module.limits);
  module.params = model->params;
  for (const PassInfo& pass : Pipeline()) {
    if (!folds && pass.run == FoldRanks) continue;
    const absl::Status status = pass.run(
        {.job = *job, .model = *model, .diagnostics = diagnostics}, module);
    EXPECT_TRUE(status.ok()) << pass.name;
  }
  EXPECT_EQ(module.fold.has_value(), folds);
  return module.stats;
}

// Engines of two parts are on hosts 2 and 3. On one leaf they are sent once
// what both want, if they pass it on.
TEST(FoldRanksTest, PartsDoNotCrossANarrowWayTwice) {
  const auto is_folded = [](const std::string& leaves) {
    return IsFolded(
        OpenJob(FoldedJob(2, 4, kHostsOfParts + leaves), MakeCompact));
  };
  EXPECT_FALSE(
      is_folded(R"(, "hosts_per_leaf": 2, "spine_oversubscription": 4)"));
  EXPECT_TRUE(
      is_folded(R"(, "hosts_per_leaf": 1, "spine_oversubscription": 4)"));
  EXPECT_TRUE(
      is_folded(R"(, "hosts_per_leaf": 4, "spine_oversubscription": 4)"));
}

TEST(FoldRanksTest, PartsThatArePlannedOnceTakeNoLonger) {
  const std::string job = FoldedJob(2, 4, kHostsOfParts);
  const Stats folded = StatsOf(job, true);
  const Stats whole = StatsOf(job, false);
  EXPECT_EQ(folded.moved_bytes, whole.moved_bytes);
  EXPECT_EQ(folded.lower_bound_seconds, whole.lower_bound_seconds);
  EXPECT_LE(folded.predicted_seconds, whole.predicted_seconds * 1.01);
}

// Five trainers of four ranks, and nine engines: four hosts of two and one of
// one. Part p is ranks 4p .. 4p + 3 and 20 + 4p .. 20 + 4p + 3.
std::string UnevenJob() {
  return JobOf(5, 4, 9,
               "[0,0,0,0, 1,1,1,1, 2,2,2,2, 3,3,3,3, 4,4,4,4, "
               "5,5,5,5, 6,6,6,6, 7,7,7,7, 8,8,8,8, 9,9]");
}

TEST(FoldRanksTest, EnginesThatDoNotDivideEvenlyLeaveAPartOfTheirOwn) {
  const PlanFile plan = OpenJob(UnevenJob(), MakeCompact);
  ASSERT_TRUE(IsFolded(plan));
  const auto& programs = *plan.body().programs();
  for (const uint32_t rank : {12u, 13u, 14u, 15u, 32u, 33u, 34u, 35u}) {
    EXPECT_TRUE(AreShared(*programs.Get(rank - 12), *programs.Get(rank)));
    EXPECT_EQ(programs.Get(rank)->source_shift(), 12u);
    EXPECT_EQ(programs.Get(rank)->destination_shift(), 12u);
  }
  for (const uint32_t rank : {16u, 17u, 18u, 19u, 36u, 37u}) {
    EXPECT_FALSE(AreShared(*programs.Get(rank - 16), *programs.Get(rank)));
    EXPECT_EQ(programs.Get(rank)->destination_shift(), 0u);
    EXPECT_GT(plan.messages().Of(rank).size(), 0u);
  }
}

TEST(FoldRanksTest, PartsThatAreNotAlikeTakeNoLongerThanAllTogether) {
  const Stats folded = StatsOf(UnevenJob(), true);
  const Stats whole = StatsOf(UnevenJob(), false);
  EXPECT_EQ(folded.moved_bytes, whole.moved_bytes);
  EXPECT_EQ(folded.lower_bound_seconds, whole.lower_bound_seconds);
  // A small plan shares nothing, so that its parts have to be all alike.
  const Topology topology = {.host = {},
                             .peer_bytes_per_second = 1e8,
                             .network_bytes_per_second = 1e7,
                             .fabric = {}};
  const auto of_parts =
      SimulatedSeconds(OpenJob(UnevenJob(), MakeCompact), topology);
  const auto of_all = SimulatedSeconds(OpenJob(UnevenJob()), topology);
  ASSERT_TRUE(of_parts.ok() && of_all.ok());
  EXPECT_LE(*of_parts, *of_all * 1.01);
}

// Small plans have the rounds of the first part too, and open with executors
// that know no shifts.
TEST(FoldRanksTest, SmallPlansAreFoldedWithoutShifts) {
  const PlanFile plan = OpenJob(FoldedJob(2, 4, kHostsOfParts));
  const PlanFile folded = OpenJob(FoldedJob(2, 4, kHostsOfParts), MakeCompact);
  EXPECT_FALSE(IsFolded(plan));
  EXPECT_FALSE(IsPacked(plan));
  for (uint32_t rank = 0; rank < 16; ++rank) {
    const fb::RankProgram& program = *plan.body().programs()->Get(rank);
    const fb::RankProgram& shifted = *folded.body().programs()->Get(rank);
    EXPECT_EQ(program.source_shift(), 0u);
    EXPECT_EQ(program.destination_shift(), 0u);
    const MessageVector& messages = plan.messages().Of(program);
    const MessageVector& of_shifted = folded.messages().Of(shifted);
    ASSERT_EQ(messages.size(), of_shifted.size());
    for (uint32_t i = 0; i < messages.size(); ++i) {
      const fb::Message& message = *messages.Get(i);
      EXPECT_EQ(message.round(), of_shifted.Get(i)->round());
      EXPECT_EQ(message.peer(),
                PeerOf(folded.body(), shifted, *of_shifted.Get(i)));
    }
  }
}

TEST(FoldRanksTest, LargePlansHaveShifts) {
  std::string hosts = "0";
  for (int rank = 1; rank < 1040; ++rank) {
    hosts += ", " + std::to_string(rank / 4);
  }
  const PlanFile large = OpenJob(FoldedJob(130, 4, "[" + hosts + "]"));
  ASSERT_TRUE(IsFolded(large));
  EXPECT_TRUE(IsPacked(large));
  EXPECT_EQ(large.body().programs()->Get(1039)->destination_shift(), 516u);
}

// Where hosts are shared or parts stand elsewhere, a part would not find what
// is near, or not be as far from its peers as the first.
TEST(FoldRanksTest, PartsOnHostsOfTheirOwnAloneAreFolded) {
  for (const char* hosts :
       {"[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]",
        "[0, 0, 4, 4, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]",
        "[0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 3, 3, 3, 3]"}) {
    EXPECT_FALSE(IsFolded(OpenJob(FoldedJob(2, 4, hosts), MakeCompact)))
        << hosts;
  }
}

TEST(FoldRanksTest, PartsWhoseSourcesShareANicAreNotFolded) {
  const std::string hosts = "[0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9]";
  EXPECT_TRUE(IsFolded(OpenJob(FoldedJob(2, 2, hosts), MakeCompact)));
  EXPECT_FALSE(IsFolded(
      OpenJob(FoldedJob(2, 2, hosts + R"(, "gpus_per_nic": 2)"), MakeCompact)));
}

// With half as many trainers' ranks, engines of one part pass on to those of
// the other what only one trainer sends them: apart they would take longer.
TEST(FoldRanksTest, PartsThatSendMoreThanTheyReceiveAreNotFolded) {
  EXPECT_FALSE(IsFolded(OpenJob(
      FoldedJob(2, 2, "[0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]"), MakeCompact)));
}

}  // namespace
}  // namespace refit
