#include "plan/schedule/direct_ends.h"

#include <gtest/gtest.h>

#include "tests/executor/nccl_world.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

using Ranks = std::vector<int32_t>;

std::vector<DirectEnds> EndsOf(const PlanFile& plan, int32_t rank,
                               const DirectPairs& peers = {}) {
  return ListDirectEnds(plan, rank, RankSchedule(plan, rank), peers);
}

PlanFile ThreeDirectRounds() {
  return ReshardPlan({.layers = 3, .mechanism = fb::Mechanism::kDirect}).Open();
}

TEST(DirectEndsTest, ReceiversAtRestGrantAndAreToldOnce) {
  const PlanFile plan = ThreeDirectRounds();
  const std::vector<DirectEnds> sender = EndsOf(plan, 0);
  ASSERT_EQ(sender.size(), 3);
  for (size_t round = 0; round < 3; ++round) {
    SCOPED_TRACE(round);
    EXPECT_TRUE(sender[round].moves);
    EXPECT_EQ(sender[round].await_grants, round == 0 ? Ranks({2, 3}) : Ranks());
    EXPECT_EQ(sender[round].finish, round == 2 ? Ranks({2, 3}) : Ranks());
    EXPECT_EQ(sender[round].grant, Ranks());
  }
  const std::vector<DirectEnds> receiver = EndsOf(plan, 2);
  ASSERT_EQ(receiver.size(), 3);
  for (size_t round = 0; round < 3; ++round) {
    SCOPED_TRACE(round);
    EXPECT_FALSE(receiver[round].moves);
    EXPECT_EQ(receiver[round].grant, round == 0 ? Ranks({0, 1}) : Ranks());
    EXPECT_EQ(receiver[round].await_finishes,
              round == 2 ? Ranks({0, 1}) : Ranks());
  }
}

TEST(DirectEndsTest, SendersThatArePulledFromGrantOnce) {
  const PlanFile plan = ThreeDirectRounds();
  DirectPairs sender_peers;
  sender_peers.pulled_by = {3};
  const std::vector<DirectEnds> sender = EndsOf(plan, 0, sender_peers);
  EXPECT_EQ(sender[0].await_grants, Ranks({2}));
  EXPECT_EQ(sender[0].grant, Ranks({3}));
  EXPECT_EQ(sender[1].grant, Ranks());
  EXPECT_EQ(sender[2].await_finishes, Ranks({3}));
  DirectPairs receiver_peers;
  receiver_peers.pulled_from = {0, 1};
  const std::vector<DirectEnds> receiver = EndsOf(plan, 3, receiver_peers);
  EXPECT_TRUE(receiver[1].moves);
  EXPECT_EQ(receiver[0].await_grants, Ranks({0, 1}));
  EXPECT_EQ(receiver[2].finish, Ranks({0, 1}));
  EXPECT_EQ(receiver[2].grant, Ranks());
}

// Each source rank feeds the rank of its own GPU in a round before the others.
TEST(DirectEndsTest, RanksAtRestGrantAllInTheirFirstRound) {
  const PlanFile plan =
      CompiledPlan(ReshardJob(3, 3, "", R"(, "colocated": true)"));
  const std::vector<DirectEnds> receiver = EndsOf(plan, 3);
  ASSERT_EQ(receiver.size(), 2);
  EXPECT_EQ(receiver[0].grant, Ranks({0, 1, 2}));
  EXPECT_EQ(receiver[0].await_finishes, Ranks({0}));
  EXPECT_EQ(receiver[1].grant, Ranks());
  EXPECT_EQ(receiver[1].await_finishes, Ranks({1, 2}));
  const std::vector<DirectEnds> sender = EndsOf(plan, 0);
  ASSERT_EQ(sender.size(), 2);
  EXPECT_EQ(sender[0].await_grants, Ranks({3}));
  EXPECT_EQ(sender[1].await_grants, Ranks({4, 5}));
  for (size_t round = 0; round < 2; ++round) {
    EXPECT_TRUE(sender[round].is_timed && receiver[round].is_timed);
    EXPECT_EQ(sender[round].beside, round == 0);
    EXPECT_FALSE(receiver[round].beside);
  }
}

// A destination rank that reads moves beside, too.
TEST(DirectEndsTest, RanksWhoseMemoryOthersUseMoveNothingBeside) {
  const PlanFile plan =
      CompiledPlan(ReshardJob(3, 3, "", R"(, "colocated": true)"));
  DirectPairs peers;
  peers.pulled_by = {5};
  EXPECT_FALSE(EndsOf(plan, 0, peers)[0].beside);
  peers = {};
  peers.pulled_from = {0, 1, 2};
  EXPECT_TRUE(EndsOf(plan, 3, peers)[0].beside);
  peers = {};
  peers.pulled_slots = {{5, {2}}};
  EXPECT_FALSE(EndsOf(plan, 0, peers)[0].beside);
}

// Nobody can map the tensors of rank 5, which reads all that it receives and
// stores what it passes on: so it is the origin in all rounds.
TEST(DirectEndsTest, RelaysMoveNothingBeside) {
  const PlanFile plan = CompiledPlan(
      R"job({
    "model": {"parameters": [
      {"name": "a", "shape": [96000, 1600], "dtype": "bf16"},
      {"name": "b", "shape": [2400, 70], "dtype": "fp32"}]},
    "source": {"layout": "generic",
      "meshes": {"one": {"axes": {"x": 1}}, "all": {"axes": {"x": 4}}},
      "tensors": [
        {"match": "a", "mesh": "one", "placements": ["Shard(0)"]},
        {"match": "b", "mesh": "all", "placements": ["Shard(0)"]}]},
    "destination": {"layout": "generic",
      "meshes": {"all": {"axes": {"x": 4}}},
      "tensors": [{"match": "*", "mesh": "all", "placements": ["Replicate"]}]},
    "colocated": true})job",
      /*config=*/"", [](Limits& limits) { limits.relays_directly = true; });
  const RankSchedule schedule(plan, 5);
  ASSERT_EQ(schedule.rounds()[0].route, fb::Route::kLocal);
  ASSERT_TRUE(PassesOn(plan, 5));
  DirectPairs peers;
  for (const int32_t sender : schedule.DirectSenders()) {
    peers.pulled_from.insert(sender);
  }
  for (const DirectEnds& ends : ListDirectEnds(plan, 5, schedule, peers)) {
    EXPECT_TRUE(ends.moves);
    EXPECT_EQ(ends.grant, Ranks());
    EXPECT_FALSE(ends.beside);
  }
}

TEST(DirectEndsTest, RelaysGrantAndAreToldInEveryRound) {
  const PlanFile plan = RelayPlan({.replicas = 2, .layers = 3}).Open();
  const RankSchedule schedule(plan, 1);
  const std::vector<DirectEnds> relay = EndsOf(plan, 1);
  ASSERT_EQ(relay.size(), schedule.rounds().size());
  for (size_t round = 0; round < relay.size(); ++round) {
    SCOPED_TRACE(round);
    EXPECT_EQ(relay[round].grant, schedule.rounds()[round].senders);
    EXPECT_EQ(relay[round].await_finishes, schedule.rounds()[round].senders);
    EXPECT_EQ(relay[round].await_grants, schedule.rounds()[round].receivers);
    EXPECT_EQ(relay[round].finish, schedule.rounds()[round].receivers);
  }
}

}  // namespace
}  // namespace refit
