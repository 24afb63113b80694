// The pass that plans equal parts of large jobs once.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "plan/plan_file.h"
#include "tests/compiler/compile_testing.h"

namespace refit {
namespace {

// `copies` trainers of `ranks` ranks feed twice as many engines of two.
std::string FoldedJob(int copies, int ranks, const std::string& hosts,
                      const std::string& fold) {
  const auto side = [](int replicas, int shards) {
    return R"({"layout": "generic", "meshes": {"m": {"axes": {"dp": )" +
           std::to_string(replicas) + R"(, "tp": )" + std::to_string(shards) +
           R"(}}}, "tensors": [{"match": "*", "mesh": "m",)"
           R"x( "placements": ["Replicate", "Shard(0)"]}]})x";
  };
  return GenericJob(R"({"name": "w", "shape": [960, 64], "dtype": "bf16"})",
                    side(copies, ranks), side(2 * copies, 2),
                    R"(, "topology": {"peer_gigabytes_per_second": 0.1,
          "network_gigabytes_per_second": 0.01, "hosts": )" +
                        hosts + R"(}, "options": {"fold": ")" + fold + R"("})");
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
  const PlanFile plan = OpenJob(FoldedJob(2, 4, kHostsOfParts, "always"));
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
  const PlanFile whole = OpenJob(FoldedJob(2, 4, kHostsOfParts, "never"));
  EXPECT_FALSE(IsFolded(whole));
  EXPECT_EQ(body.stats()->moved_bytes(), whole.body().stats()->moved_bytes());
  const Estimates estimates = EstimatesOf(plan);
  EXPECT_EQ(estimates.lower_bound_seconds,
            EstimatesOf(whole).lower_bound_seconds);
  EXPECT_LE(estimates.predicted_seconds,
            EstimatesOf(whole).predicted_seconds * 1.01);
}

// Small plans have the rounds of the first part too, and open with executors
// that know no shifts.
TEST(FoldRanksTest, SmallPlansAreFoldedWithoutShifts) {
  const PlanFile plan = OpenJob(FoldedJob(2, 4, kHostsOfParts, "auto"));
  const PlanFile folded = OpenJob(FoldedJob(2, 4, kHostsOfParts, "always"));
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

TEST(FoldRanksTest, OnlyLargePlansHaveShiftsUnasked) {
  std::string hosts = "0";
  for (int rank = 1; rank < 1040; ++rank) {
    hosts += ", " + std::to_string(rank / 4);
  }
  const PlanFile large = OpenJob(FoldedJob(130, 4, "[" + hosts + "]", "auto"));
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
    EXPECT_FALSE(IsFolded(OpenJob(FoldedJob(2, 4, hosts, "always")))) << hosts;
  }
}

// With half as many trainers' ranks, engines of one part pass on to those of
// the other what only one trainer sends them: apart they would take longer.
TEST(FoldRanksTest, PartsThatSendMoreThanTheyReceiveAreNotFolded) {
  EXPECT_FALSE(IsFolded(OpenJob(
      FoldedJob(2, 2, "[0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]", "always"))));
}

}  // namespace
}  // namespace refit
