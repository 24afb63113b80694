// What the order proof says of lists that wait for less than they should.
#include "plan/proof/order_proof.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "plan/proof/proof.h"
#include "plan/proof/steps.h"
#include "plan/proof/violations.h"
#include "tests/plan/plan_spec.h"

namespace refit {
namespace {

using proof::ListedSteps;
using proof::Movers;
using EditList = std::function<void(int32_t rank, std::vector<Step>& steps)>;

std::string ViolationOf(const PlanFile& plan, const EditList& edit,
                        Movers movers = Movers::kSenders) {
  EXPECT_EQ(Prove(plan).violation, "");
  proof::Steps steps(1 << 20);
  proof::Violations violations(plan.body(), &steps);
  proof::CheckOrder(
      plan, movers,
      [&](int32_t rank) {
        ListedSteps listed = proof::ListRankSteps(plan, rank, movers);
        edit(rank, listed.steps);
        return listed;
      },
      steps, violations);
  return violations.empty() ? "" : violations.text();
}

// The number-th step of a kind.
Step& StepOf(std::vector<Step>& steps, StepKind kind, size_t number = 0) {
  for (Step& step : steps) {
    if (step.kind == kind && number-- == 0) return step;
  }
  ADD_FAILURE() << "no " << StepKindName(kind);
  return steps.front();
}

// What is said if that step of a rank waits for no other lane.
std::string WithoutWaits(const PlanSpec& spec, int32_t of, StepKind kind,
                         size_t number, Movers movers = Movers::kSenders) {
  return ViolationOf(
      OpenSpec(spec),
      [&](int32_t rank, std::vector<Step>& steps) {
        if (rank == of) StepOf(steps, kind, number).after.clear();
      },
      movers);
}

// What is said if the first step of a kind waits for that of the list alone.
std::string WithFirstWait(const PlanSpec& spec, int32_t of, StepKind kind) {
  return ViolationOf(OpenSpec(spec),
                     [&](int32_t rank, std::vector<Step>& steps) {
                       if (rank == of) StepOf(steps, kind).after = {0};
                     });
}

// What is said if that step of a rank calls, or waits for, nobody.
std::string WithoutPeers(const PlanSpec& spec, int32_t of, StepKind kind,
                         size_t number, Movers movers = Movers::kSenders) {
  return ViolationOf(
      OpenSpec(spec),
      [&](int32_t rank, std::vector<Step>& steps) {
        if (rank == of) StepOf(steps, kind, number).peers = {};
      },
      movers);
}

void MakeDirect(PlanSpec& spec) {
  spec.mechanisms.assign(spec.rounds.size(), fb::Mechanism::kDirect);
  for (PlanSpec::Program& program : spec.programs) {
    program.staging_bytes = 0;
    for (fb::Message& message : program.messages) {
      message = fb::Message(message.round(), message.peer(), message.copies(),
                            message.kind(), 0, 0, /*staging_offset=*/0,
                            message.size_bytes());
    }
  }
}

PlanSpec DirectSpec() {
  PlanSpec spec = SampleSpec();
  MakeDirect(spec);
  return spec;
}

// Rank 1 passes on to rank 2, in round 1, what it has of rank 0.
PlanSpec RelaySpec() {
  PlanSpec spec;
  spec.source_ranks = 1;
  spec.params = {{.name = "w", .index = {}, .shape = {16}}};
  spec.buffers = {{.name = "w",
                   .index = {},
                   .shape = {16},
                   .fragments = {{0, {0}, {16}, 0, {1}}},
                   .regions = {}}};
  spec.copy_lists = {{}, {{.slot = 0, .offset = 0, .loops = {{16, 1}}}}};
  spec.rounds = {fb::Route::kPeer, fb::Route::kPeer};
  spec.programs = {
      {{0}, {SendTo(1, 0, 1, 0, 32)}, 0, 32},
      {{0}, {RecvFrom(0, 0, 1, 0, 32), SendTo(2, 1, 1, 32, 32)}, 0, 64},
      {{0}, {RecvFrom(1, 1, 1, 0, 32)}, 0, 32}};
  spec.bucket_bytes = 64;
  spec.staging_bytes = 64;
  spec.slots = 2;
  spec.operations_per_round = 8;
  return spec;
}

TEST(OrderProofTest, StagingIsUsedInOrder) {
  EXPECT_EQ(WithoutWaits(SampleSpec(), 0, StepKind::kExchange, 0),
            "rank 0, round 0: step exchange of round 0 does not wait for step "
            "pack of round 0, and both touch staging bytes in [0, 80) "
            "(invariant 7: ordered)");
  EXPECT_EQ(WithoutWaits(SampleSpec(), 2, StepKind::kUnpack, 1),
            "rank 2, round 1: step unpack of round 1 does not wait for step "
            "exchange of round 1, and both touch staging bytes in [80, 144) "
            "(invariant 7: ordered)");
}

TEST(OrderProofTest, WhatIsPackedIsSentAfterwards) {
  EXPECT_EQ(ViolationOf(OpenSpec(SampleSpec()),
                        [](int32_t rank, std::vector<Step>& steps) {
                          if (rank != 0) return;
                          std::swap(StepOf(steps, StepKind::kPack).kind,
                                    StepOf(steps, StepKind::kExchange).kind);
                        }),
            "rank 0, round 0: step exchange of round 0 comes before step pack "
            "of round 0 (invariant 7: ordered)");
}

TEST(OrderProofTest, AllComesBetweenTheFirstStepAndTheLast) {
  EXPECT_EQ(WithoutWaits(SampleSpec(), 0, StepKind::kPack, 0),
            "rank 0, round 0: step pack of round 0 does not wait for step "
            "zero, and both touch its tensors (invariant 7: ordered)");
  EXPECT_EQ(WithoutWaits(SampleSpec(), 2, StepKind::kJoin, 0),
            "rank 2: step hooks does not wait for step unpack of round 0, and "
            "both touch its tensors (invariant 7: ordered)");
}

TEST(OrderProofTest, ARelayWaitsForWhatItPassesOn) {
  EXPECT_EQ(WithFirstWait(RelaySpec(), 1, StepKind::kPack),
            "rank 1, round 1: step pack of round 1 does not wait for step "
            "unpack of round 0, which may bring what the message to rank 2 "
            "relays (invariant 7: ordered)");
}

TEST(OrderProofTest, ScratchIsQuantizedBeforeItIsSentAndUsedAgain) {
  EXPECT_EQ(WithFirstWait(WindowedSpec(), 0, StepKind::kPack),
            "rank 0, round 0, buffer scratch.0.fp8_e4m3: step pack of round 0 "
            "does not wait for step quantize, and both touch this scratch "
            "(invariant 7: ordered)");
  EXPECT_EQ(WithoutWaits(WindowedSpec(), 0, StepKind::kQuantize, 1),
            "rank 0, round 1, buffer scratch.1.fp8_e4m3: step pack of round 1 "
            "does not wait for step exchange of round 0, whose scratch shares "
            "bytes with this one (invariant 7: ordered)");
}

TEST(OrderProofTest, PeersMoveBetweenGrantAndFinish) {
  EXPECT_EQ(
      WithoutPeers(DirectSpec(), 2, StepKind::kGrant, 0),
      "rank 2, round 0: rank 0's move waits for no grant of this rank: it "
      "touches tensors that step zero touches too (invariant 7: ordered)");
  EXPECT_EQ(
      WithoutPeers(DirectSpec(), 0, StepKind::kAwaitGrants, 0),
      "rank 2, round 0: rank 0's move waits for no grant of this rank: it "
      "touches tensors that step zero touches too (invariant 7: ordered)");
  EXPECT_EQ(
      WithoutPeers(DirectSpec(), 0, StepKind::kFinish, 0),
      "rank 2, round 0: no step waits for the finish of rank 0's move: it "
      "touches tensors that step hooks touches too (invariant 7: ordered)");
  EXPECT_EQ(
      WithoutPeers(DirectSpec(), 2, StepKind::kAwaitFinishes, 0),
      "rank 2, round 0: no step waits for the finish of rank 0's move: it "
      "touches tensors that step hooks touches too (invariant 7: ordered)");
  EXPECT_EQ(
      WithoutPeers(DirectSpec(), 0, StepKind::kGrant, 0, Movers::kReceivers),
      "rank 0, round 0: rank 2's move waits for no grant of this rank: it "
      "touches tensors that step zero touches too, where receivers move the "
      "bytes (invariant 7: ordered)");
}

TEST(OrderProofTest, NoWaitClosesACircle) {
  const auto swapped = [](StepKind first, StepKind second) {
    return ViolationOf(OpenSpec(DirectSpec()),
                       [&](int32_t rank, std::vector<Step>& steps) {
                         if (rank != 2) return;
                         std::swap(StepOf(steps, first), StepOf(steps, second));
                       });
  };
  EXPECT_EQ(swapped(StepKind::kGrant, StepKind::kAwaitFinishes),
            "rank 2, round 0: step grant of round 0 comes behind steps of "
            "later rounds (invariant 7: ordered)");
  EXPECT_EQ(ViolationOf(OpenSpec(DirectSpec()),
                        [&](int32_t rank, std::vector<Step>& steps) {
                          if (rank != 2) return;
                          for (Step& step : steps) {
                            if (!step.peers.empty()) step.round = 1;
                          }
                        }),
            "rank 2, round 0: rank 0 waits for a grant of rank 2 that does not "
            "come in this round or before (invariant 7: ordered)");
}

TEST(OrderProofTest, WhatIsLeftOutIsNamed) {
  const auto without = [](const PlanSpec& spec, int32_t of, StepKind kind) {
    return ViolationOf(OpenSpec(spec),
                       [&](int32_t rank, std::vector<Step>& steps) {
                         if (rank != of) return;
                         StepOf(steps, kind).kind = StepKind::kJoin;
                       });
  };
  EXPECT_EQ(without(SampleSpec(), 2, StepKind::kUnpack),
            "rank 2, round 0: its list has no unpack (invariant 7: ordered)");
  EXPECT_EQ(without(DirectSpec(), 0, StepKind::kMove),
            "rank 0, round 0: its list has no move (invariant 7: ordered)");
  EXPECT_EQ(without(WindowedSpec(), 0, StepKind::kQuantize),
            "rank 0, buffer scratch.0.fp8_e4m3: its list has no quantize "
            "(invariant 7: ordered)");
  EXPECT_EQ(without(SampleSpec(), 0, StepKind::kHooks),
            "rank 0: its list does not begin with zero and end with hooks "
            "(invariant 7: ordered)");
}

TEST(OrderProofTest, RanksThatShareTheirListsAreListedOnce) {
  const auto listed = [](PlanSpec spec) {
    MakeDirect(spec);
    std::vector<int32_t> ranks;
    EXPECT_EQ(ViolationOf(OpenSpec(spec),
                          [&](int32_t rank, std::vector<Step>&) {
                            ranks.push_back(rank);
                          }),
              "");
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  };
  EXPECT_EQ(listed(FoldedSpec()), (std::vector<int32_t>{0, 1, 4, 5}));
}

}  // namespace
}  // namespace refit
