#include "plan/proof/proof.h"

#include <gtest/gtest.h>

#include <utility>

#include "plan/dtype.h"
#include "plan/proof/schedule_proof.h"
#include "tests/plan/plan_spec.h"

namespace refit {
namespace {

// "" for a valid plan.
std::string ViolationOf(const PlanSpec& spec) {
  const PlanFile plan = OpenSpec(spec);
  const ProofResult proof = Prove(plan);
  EXPECT_EQ(proof.valid, proof.violation.empty());
  return proof.violation;
}

void Set(fb::Message& message, uint32_t round, uint64_t staging_offset,
         uint64_t size_bytes) {
  message = fb::Message(round, message.peer(), message.copies(), message.kind(),
                        0, 0, staging_offset, size_bytes);
}
void SetRound(fb::Message& message, uint32_t round) {
  Set(message, round, message.staging_offset(), message.size_bytes());
}
void SetStaging(fb::Message& message, uint64_t offset) {
  Set(message, message.round(), offset, message.size_bytes());
}
void SetSize(fb::Message& message, uint64_t size_bytes) {
  Set(message, message.round(), message.staging_offset(), size_bytes);
}

TEST(ProofTest, TheSamplePlanIsValid) {
  const PlanFile plan = OpenSpec(SampleSpec());
  const ProofResult proof = Prove(plan);
  EXPECT_EQ(proof.violation, "");
  EXPECT_TRUE(proof.valid);
  EXPECT_EQ(proof.messages, 4);
  EXPECT_EQ(proof.moved_bytes, 288);
  EXPECT_EQ(proof.destination_elements, 2 * (2 * 5 * 8 + 8));
  EXPECT_EQ(proof.skipped_elements, 0);
}

// Regions, and params that are skipped as a whole.
TEST(ProofTest, WhatIsDeclaredAsSkippedIsCounted) {
  PlanSpec spec = SampleSpec();
  spec.programs[2].fills = spec.programs[3].fills = 0;
  spec.buffers[3].regions[0].kind = fb::RegionKind::kSkip;
  spec.buffers[3].regions[0].reason = fb::SkipReason::kDerived;
  EXPECT_EQ(Prove(OpenSpec(spec)).skipped_elements, 2 * 2 * 8);
  for (PlanSpec::Param& param : spec.params) {
    param.skip = fb::SkipReason::kFrozen;
  }
  for (PlanSpec::Program& program : spec.programs) program.messages.clear();
  const ProofResult proof = Prove(OpenSpec(spec));
  EXPECT_EQ(proof.violation, "");
  EXPECT_EQ(proof.skipped_elements, proof.destination_elements);
}

// Invariant 1: written once.

TEST(ProofTest, AnElementThatIsNeverWrittenIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.copy_lists[6][0].loops.erase(spec.copy_lists[6][0].loops.begin());
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, buffer model.layers.1.mlp.up_proj.weight, index [2, 0]: "
            "is never written (invariant 1: written once)");
}

TEST(ProofTest, AnUnpackThatIsLeftOutIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.copy_lists[5].clear();
  EXPECT_EQ(ViolationOf(spec),
            "rank 3, buffer model.layers.0.mlp.up_proj.weight, index [0, 0]: "
            "is never written (invariant 1: written once)");
}

TEST(ProofTest, AnElementWrittenTwiceIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.copy_lists[3].push_back(spec.copy_lists[3][1]);
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 0, buffer model.norm.weight, index [0]: is written "
            "a second time, after round 0 (invariant 1: written once)");
}

TEST(ProofTest, PaddingThatIsNotZeroedIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.programs[2].fills = 0;
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, buffer model.layers.0.mlp.up_proj.weight, index [4, 0]: "
            "is never zeroed (invariant 1: written once)");
}

TEST(ProofTest, PaddingZeroedTwiceIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.copy_lists[7].push_back({.slot = 0, .offset = 75, .loops = {{5, 1}}});
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, buffer model.layers.1.mlp.up_proj.weight, index [4, 3]: "
            "is zeroed twice (invariant 1: written once)");
}

TEST(ProofTest, AFillOverDataIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.copy_lists[7].push_back({.slot = 1, .offset = 4, .loops = {{4, 1}}});
  EXPECT_EQ(
      ViolationOf(spec),
      "rank 2, buffer model.norm.weight, index [4]: the fill that begins here "
      "does not zero a box of one fill region (invariant 1: written once)");
}

TEST(ProofTest, AFillOnASourceRankIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.copy_lists.push_back({{.slot = 1, .offset = 0, .loops = {{8, 1}}}});
  spec.programs[1].fills = 8;
  EXPECT_EQ(ViolationOf(spec),
            "rank 1: a source rank has fills (invariant 1: written once)");
}

TEST(ProofTest, DataInPaddingIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.copy_lists[6].push_back(
      {.slot = 0, .offset = 32, .loops = {{8, 1}}, .staging_offset = 0});
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 1, buffer model.layers.0.mlp.up_proj.weight, index "
            "[4, 0]: is written although it is padding, to be zero (invariant "
            "1: written once)");
}

TEST(ProofTest, DataInADeclaredSkipIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.programs[2].fills = spec.programs[3].fills = 0;
  spec.buffers[3].regions[0].kind = fb::RegionKind::kSkip;
  spec.buffers[3].regions[0].reason = fb::SkipReason::kDerived;
  EXPECT_EQ(ViolationOf(spec), "");
  spec.copy_lists[6].push_back(
      {.slot = 0, .offset = 72, .loops = {{8, 1}}, .staging_offset = 0});
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 1, buffer model.layers.1.mlp.up_proj.weight, index "
            "[4, 0]: is written although it is declared as skipped (invariant "
            "1: written once)");
}

TEST(ProofTest, ASkippedParamThatIsMovedIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.params[1].skip = fb::SkipReason::kFrozen;
  EXPECT_EQ(ViolationOf(spec),
            "rank 0, round 0, buffer decoder.final_layernorm.weight, index "
            "[0]: packs an element of param model.norm.weight, which is "
            "declared as skipped (invariant 1: written once)");
}

TEST(ProofTest, ASkippedParamThatIsWrittenIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.params.push_back({.name = "frozen",
                         .index = {},
                         .shape = {8},
                         .skip = fb::SkipReason::kFrozen});
  spec.buffers[4].fragments[0].param = 3;
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 0, buffer model.norm.weight, index [0]: is written "
            "although param frozen is declared as skipped (invariant 1: "
            "written once)");
}

TEST(ProofTest, ASkippedParamMayStayUnwritten) {
  PlanSpec spec = SampleSpec();
  spec.buffers.push_back({.name = "lm_head.weight",
                          .index = {},
                          .shape = {16, 8},
                          .fragments = {{.param = 2,
                                         .lo = {0, 0},
                                         .extent = {16, 8},
                                         .offset = 0,
                                         .stride = {8, 1}}},
                          .regions = {}});
  spec.programs[2].buffers.push_back(5);
  EXPECT_EQ(ViolationOf(spec), "");
}

TEST(ProofTest, AnElementThatTheLayoutLeavesOutIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.buffers[3].regions.clear();
  spec.programs[2].fills = spec.programs[3].fills = 0;
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, buffer model.layers.0.mlp.up_proj.weight, index [4, 0]: "
            "is neither of a param nor of a region; the parts hold 64 of the "
            "buffer's 80 elements (invariant 1: written once)");
}

TEST(ProofTest, ASourceMayHoldElementsOfNoParam) {
  PlanSpec spec = SampleSpec();
  spec.buffers[2].shape = {12};
  EXPECT_EQ(ViolationOf(spec), "");
}

// Invariant 2: right element.

TEST(ProofTest, AWrongElementIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.copy_lists[5][0].offset = 8;
  EXPECT_EQ(
      ViolationOf(spec),
      "rank 3, round 1, buffer model.layers.0.mlp.up_proj.weight, index [1, "
      "0]: holds model.layers.0.mlp.up_proj.weight[0, 0] when it should be "
      "model.layers.0.mlp.up_proj.weight[1, 0] (invariant 2: right element)");
}

// Ranks 0 and 1 hold the halves of a matrix and send them to ranks `to_of_0`
// and `to_of_1`, which want the halves in this order: all buffers look alike,
// and all messages have the same copies.
PlanSpec HalvesSpec(uint32_t to_of_0, uint32_t to_of_1) {
  PlanSpec spec;
  spec.source_ranks = 2;
  spec.params = {{.name = "w", .index = {}, .shape = {4, 8}}};
  for (const uint64_t first_row : {0, 2}) {
    spec.buffers.push_back({.name = "w",
                            .index = {},
                            .shape = {2, 8},
                            .fragments = {{.param = 0,
                                           .lo = {first_row, 0},
                                           .extent = {2, 8},
                                           .offset = 0,
                                           .stride = {8, 1}}},
                            .regions = {}});
  }
  spec.copy_lists = {{}, {{.slot = 0, .offset = 0, .loops = {{16, 1}}}}};
  spec.rounds = {fb::Route::kPeer};
  spec.programs = {{{0}, {SendTo(to_of_0, 0, 1, 0, 32)}, 0, 32, 0},
                   {{1}, {SendTo(to_of_1, 0, 1, 0, 32)}, 0, 32, 0},
                   {{0}, {}, 0, 64, 0},
                   {{1}, {}, 0, 64, 0}};
  for (const auto& [from, to] : {std::pair(0U, to_of_0), {1U, to_of_1}}) {
    std::vector<fb::Message>& messages = spec.programs[to].messages;
    messages.push_back(RecvFrom(from, 0, 1, 32 * messages.size(), 32));
  }
  spec.bucket_bytes = 32;
  spec.staging_bytes = 64;
  spec.slots = 1;
  spec.operations_per_round = 8;
  return spec;
}

TEST(ProofTest, AWrongShardIsNamedThoughTheCopiesAreThoseOfARightOne) {
  EXPECT_EQ(ViolationOf(HalvesSpec(2, 3)), "");
  EXPECT_EQ(ViolationOf(HalvesSpec(3, 2)),
            "rank 2, round 0, buffer w, index [0, 0]: holds w[2, 0] when it "
            "should be w[0, 0] (invariant 2: right element)");
  // Rank 2 is right, then rank 3 gets the same from the same sender.
  PlanSpec spec = HalvesSpec(2, 3);
  spec.programs[0].messages.push_back(SendTo(3, 0, 1, 32, 32));
  spec.programs[0].staging_bytes = 64;
  spec.programs[1].messages.clear();
  spec.programs[3].messages = {RecvFrom(0, 0, 1, 0, 32)};
  EXPECT_EQ(ViolationOf(spec),
            "rank 3, round 0, buffer w, index [0, 0]: holds w[0, 0] when it "
            "should be w[2, 0] (invariant 2: right element)");
  // And from one whose buffers only look like the right one's.
  spec = HalvesSpec(2, 3);
  spec.programs[1].buffers = {0};
  EXPECT_EQ(ViolationOf(spec),
            "rank 3, round 0, buffer w, index [0, 0]: holds w[0, 0] when it "
            "should be w[2, 0] (invariant 2: right element)");
}

TEST(ProofTest, WhatOneMessageWritesTwiceIsNamedThoughBothAreAlike) {
  EXPECT_EQ(ViolationOf(HalvesSpec(2, 2)),
            "rank 2, round 0, buffer w, index [0, 0]: holds w[2, 0] when it "
            "should be w[0, 0] (invariant 2: right element)");
  PlanSpec spec = HalvesSpec(2, 2);
  spec.programs[1].buffers = {0};
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 0, buffer w, index [0, 0]: is written a second "
            "time, after round 0 (invariant 1: written once)");
}

// HalvesSpec's four ranks, each pair with a param of [4, 4] in a buffer of its
// own, of 32 elements: the copies of all messages are the same.
PlanSpec TwinsSpec() {
  PlanSpec spec = HalvesSpec(2, 3);
  spec.params = {{.name = "w", .index = {}, .shape = {4, 4}},
                 {.name = "v", .index = {}, .shape = {4, 4}}};
  spec.buffers.assign(4, {.name = "w",
                          .index = {},
                          .shape = {32},
                          .fragments = {{.param = 0,
                                         .lo = {0, 0},
                                         .extent = {4, 4},
                                         .offset = 0,
                                         .stride = {4, 1}}},
                          .regions = {{.kind = fb::RegionKind::kSkip,
                                       .reason = fb::SkipReason::kUnread,
                                       .offset = 16,
                                       .extent = {16},
                                       .stride = {1},
                                       .detail = {}}}});
  for (uint32_t rank = 0; rank < 4; ++rank)
    spec.programs[rank].buffers = {rank};
  return spec;
}

TEST(ProofTest, BuffersThatDifferInOneThingDoNotShareWhatTheirCopiesMean) {
  EXPECT_EQ(ViolationOf(TwinsSpec()), "");
  const auto violation = [](uint32_t rank, const auto& change) {
    PlanSpec spec = TwinsSpec();
    change(spec.buffers[rank]);
    return ViolationOf(spec);
  };
  using Buffer = PlanSpec::Buffer;
  EXPECT_EQ(violation(3,
                      [](Buffer& buffer) {
                        buffer.fragments[0].offset = 16;
                        buffer.regions[0].offset = 0;
                      }),
            "rank 3, round 0, buffer w, index [0]: is written although it is "
            "declared as skipped (invariant 1: written once)");
  EXPECT_EQ(violation(1,
                      [](Buffer& buffer) {
                        buffer.fragments[0].extent = {2, 4};
                      }),
            "rank 1, round 0, buffer w, index [0]: packs elements beyond those "
            "of the fragment in which the copy begins (invariant 2: right "
            "element)");
  EXPECT_EQ(violation(1,
                      [](Buffer& buffer) {
                        buffer.fragments[0].stride = {5, 1};
                        buffer.regions.clear();
                      }),
            "rank 1, round 0, buffer w, index [0]: packs elements beyond those "
            "of the fragment in which the copy begins (invariant 2: right "
            "element)");
  // Transposed.
  EXPECT_EQ(
      violation(1,
                [](Buffer& buffer) {
                  buffer.fragments[0].stride = {1, 4};
                }),
      "rank 3, round 0, buffer w, index [1]: holds w[1, 0] when it should be "
      "w[0, 1] (invariant 2: right element)");
  EXPECT_EQ(violation(1, [](Buffer& buffer) { buffer.fragments[0].param = 1; }),
            "rank 3, round 0, buffer w, index [0]: holds v[0, 0] when it "
            "should be w[0, 0] (invariant 2: right element)");
  EXPECT_EQ(
      violation(3, [](Buffer& buffer) { buffer.dtype = fb::DType::kFp32; }),
      "rank 3, round 0, buffer w, index [0]: is cast from bf16 to fp32 without "
      "a declared cast (invariant 6: well-formed inputs)");
}

TEST(ProofTest, BuffersThatDifferInStridesAloneDoNotShareWhatTheirCopiesMean) {
  // Two sources whose rows stand 5 elements apart, of 4 in the param.
  PlanSpec spec = TwinsSpec();
  spec.copy_lists.push_back(
      {{.slot = 0, .offset = 0, .loops = {{4, 5}, {4, 1}}}});
  for (const uint32_t rank : {0, 1}) {
    spec.buffers[rank].fragments[0].stride = {5, 1};
    spec.buffers[rank].regions.clear();
    spec.programs[rank].messages = {SendTo(2 + rank, 0, 2, 0, 32)};
  }
  EXPECT_EQ(ViolationOf(spec), "");
  spec.buffers[1].fragments[0].stride = {6, 1};
  EXPECT_EQ(ViolationOf(spec),
            "rank 1, round 0, buffer w, index [0]: packs elements beyond those "
            "of the fragment in which the copy begins (invariant 2: right "
            "element)");
}

TEST(ProofTest, ElementsInTheWrongOrderAreNamed) {
  PlanSpec spec = SampleSpec();
  spec.copy_lists[6][0].loops = {{16, 1}, {2, 40}};
  EXPECT_EQ(
      ViolationOf(spec),
      "rank 2, round 1, buffer model.layers.1.mlp.up_proj.weight, index [2, "
      "0]: holds model.layers.0.mlp.up_proj.weight[2, 1] when it should be "
      "model.layers.1.mlp.up_proj.weight[2, 0] (invariant 2: right element)");
}

TEST(ProofTest, AWrongParamIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.params.push_back({.name = "other.weight", .index = {}, .shape = {8}});
  spec.buffers[2].fragments[0].param = 3;
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 0, buffer model.norm.weight, index [0]: holds "
            "other.weight[0] when it should be model.norm.weight[0] (invariant "
            "2: right element)");
}

TEST(ProofTest, BytesThatNobodyPackedAreNamed) {
  PlanSpec spec = SampleSpec();
  spec.copy_lists[1].pop_back();
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 0, buffer model.norm.weight, index [0]: holds "
            "staging bytes that rank 0 does not pack when it should be "
            "model.norm.weight[0] (invariant 2: right element)");
}

TEST(ProofTest, PackedPaddingIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.buffers[2].shape = {12};
  spec.copy_lists[1][1].offset = 4;
  EXPECT_EQ(ViolationOf(spec),
            "rank 0, round 0, buffer decoder.final_layernorm.weight, index "
            "[4]: packs elements beyond those of the fragment in which the "
            "copy begins (invariant 2: right element)");
  spec.copy_lists[1][1] = {
      .slot = 1, .offset = 8, .loops = {{4, 1}}, .staging_offset = 64};
  EXPECT_EQ(
      ViolationOf(spec),
      "rank 0, round 0, buffer decoder.final_layernorm.weight, index [8]: "
      "packs an element that holds no param (invariant 2: right element)");
}

TEST(ProofTest, AStrideThatStandsStillIsRefused) {
  PlanSpec spec = SampleSpec();
  spec.copy_lists[4][1].loops = {{8, 0}};
  EXPECT_EQ(ViolationOf(spec),
            "rank 3, round 0, buffer model.norm.weight, index [0]: the copy "
            "that begins here leaves the fragment in which it begins "
            "(invariant 2: right element)");
}

TEST(ProofTest, PackAndUnpackMayCutTheBytesDifferently) {
  PlanSpec spec = SampleSpec();
  // Layer by layer on one side, both layers at once on the other.
  spec.copy_lists[2] = {
      {.slot = 0, .offset = 0, .loops = {{16, 1}}, .staging_offset = 0},
      {.slot = 0, .offset = 16, .loops = {{16, 1}}, .staging_offset = 32}};
  spec.copy_lists[6] = {
      {.slot = 0, .offset = 16, .loops = {{8, 1}}, .staging_offset = 0},
      {.slot = 0, .offset = 24, .loops = {{8, 1}}, .staging_offset = 16},
      {.slot = 0, .offset = 56, .loops = {{16, 1}}, .staging_offset = 32}};
  EXPECT_EQ(ViolationOf(spec), "");
  std::swap(spec.copy_lists[6][0].staging_offset,
            spec.copy_lists[6][1].staging_offset);
  EXPECT_EQ(
      ViolationOf(spec),
      "rank 2, round 1, buffer model.layers.0.mlp.up_proj.weight, index [2, "
      "0]: holds model.layers.0.mlp.up_proj.weight[3, 0] when it should be "
      "model.layers.0.mlp.up_proj.weight[2, 0] (invariant 2: right element)");
}

TEST(ProofTest, StagingReadAsAnotherDTypeIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.casts = {{DType::kFp16, DType::kBf16}};
  spec.copy_lists[6][0].dtype = DType::kFp16;
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 1, buffer model.layers.0.mlp.up_proj.weight, index "
            "[2, 0]: is read as fp16 from staging that holds bf16 (invariant "
            "2: right element)");
}

TEST(ProofTest, ACastThereAndBackIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.casts = {{DType::kFp16, DType::kBf16}, {DType::kBf16, DType::kFp16}};
  spec.copy_lists[2][0].dtype = DType::kFp16;
  spec.copy_lists[5][0].dtype = DType::kFp16;
  spec.copy_lists[6][0].dtype = DType::kFp16;
  EXPECT_EQ(
      ViolationOf(spec),
      "rank 2, round 1, buffer model.layers.0.mlp.up_proj.weight, index [2, "
      "0]: is cast twice, bf16 to fp16 to bf16 (invariant 2: right element)");
}

// Invariant 3: in bounds, no staging byte overwritten while owed.

TEST(ProofTest, MessagesOfOneRoundThatShareStagingAreNamed) {
  PlanSpec spec = SampleSpec();
  spec.rounds.pop_back();
  for (PlanSpec::Program& program : spec.programs) {
    SetRound(program.messages[1], 0);
  }
  std::swap(spec.programs[1].messages[0], spec.programs[1].messages[1]);
  std::swap(spec.programs[3].messages[0], spec.programs[3].messages[1]);
  EXPECT_EQ(ViolationOf(spec), "");
  SetStaging(spec.programs[0].messages[1], 64);
  EXPECT_EQ(ViolationOf(spec),
            "rank 0, round 0: staging bytes [64, 128) of the message with rank "
            "3 overlap those of the message with rank 2 in round 0, which are "
            "still owed (invariant 3: in bounds)");
}

TEST(ProofTest, StagingReusedWhileOwedIsNamed) {
  PlanSpec spec = SampleSpec();
  SetStaging(spec.programs[3].messages[1], 0);
  EXPECT_EQ(ViolationOf(spec),
            "rank 3, round 1: staging bytes [0, 64) of the message with rank 0 "
            "overlap those of the message with rank 1 in round 0, which are "
            "still owed (invariant 3: in bounds)");
}

TEST(ProofTest, StagingOfARoundMayLieBetweenThatOfAnother) {
  PlanSpec spec = SampleSpec();
  // The norm has a message of its own, behind what comes in round 1.
  const auto norm = static_cast<uint32_t>(spec.copy_lists.size());
  spec.copy_lists.push_back(
      {{.slot = 1, .offset = 0, .loops = {{8, 1}}, .staging_offset = 0}});
  spec.programs[0].messages = {SendTo(2, 0, 2, 0, 64),
                               SendTo(2, 0, norm, 128, 16),
                               SendTo(3, 1, 2, 64, 64)};
  spec.programs[2].messages = {RecvFrom(0, 0, 5, 0, 64),
                               RecvFrom(0, 0, norm, 128, 16),
                               RecvFrom(1, 1, 6, 64, 64)};
  EXPECT_EQ(ViolationOf(spec), "");
  SetStaging(spec.programs[2].messages[1], 112);
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 1: staging bytes [64, 128) of the message with rank "
            "1 overlap those of the message with rank 0 in round 0, which are "
            "still owed (invariant 3: in bounds)");
}

TEST(ProofTest, StagingMayBeReusedAfterAllStagingSlots) {
  PlanSpec spec = SampleSpec();
  spec.slots = 1;
  for (PlanSpec::Program& program : spec.programs) {
    SetStaging(program.messages[1], 0);
  }
  EXPECT_EQ(ViolationOf(spec), "");
}

TEST(ProofTest, AStagingByteThatIsPackedTwiceIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.copy_lists[1][1].staging_offset = 48;
  EXPECT_EQ(ViolationOf(spec),
            "rank 0, round 0: the message to rank 2 packs staging byte 48 "
            "twice (invariant 3: in bounds)");
}

TEST(ProofTest, StagingThatIsNotAlignedIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.programs[0].staging_bytes = 160;
  SetStaging(spec.programs[0].messages[1], 88);
  EXPECT_EQ(ViolationOf(spec),
            "rank 0, round 1: staging offset 88 is not a multiple of 16 "
            "(invariant 3: in bounds)");
}

TEST(ProofTest, ACopyThatIsNotAlignedIsNamed) {
  PlanSpec spec = SampleSpec();
  for (PlanSpec::Program& program : spec.programs) {
    SetSize(program.messages[0], 88);
    SetStaging(program.messages[1], 96);
    program.staging_bytes = 160;
  }
  for (int list : {1, 3, 4}) spec.copy_lists[list][1].staging_offset = 72;
  EXPECT_EQ(ViolationOf(spec),
            "rank 0, round 0, buffer decoder.final_layernorm.weight, index "
            "[0]: staging offset 72 of a copy is not a multiple of 16 "
            "(invariant 3: in bounds)");
}

// Invariant 4: matched messages.

TEST(ProofTest, AReceiveWithoutASendIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.programs[0].messages.pop_back();
  EXPECT_EQ(ViolationOf(spec),
            "rank 3, round 1: receives 64 bytes from rank 0, which does not "
            "send them in this round (invariant 4: matched messages)");
}

TEST(ProofTest, ASendWithoutAReceiveIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.programs[3].messages.pop_back();
  EXPECT_EQ(ViolationOf(spec),
            "rank 0, round 1: sends 64 bytes to rank 3, which does not receive "
            "them in this round (invariant 4: matched messages)");
}

TEST(ProofTest, ASendInAnotherRoundIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.rounds.push_back(fb::Route::kPeer);
  SetRound(spec.programs[1].messages[1], 2);
  EXPECT_EQ(ViolationOf(spec),
            "rank 1, round 2: sends 64 bytes to rank 2, which does not receive "
            "them in this round (invariant 4: matched messages)");
}

TEST(ProofTest, UnequalSizesAreNamed) {
  PlanSpec spec = SampleSpec();
  SetSize(spec.programs[1].messages[1], 68);
  spec.programs[1].staging_bytes = 160;
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 1: receives 64 bytes from rank 1, which sends 68 "
            "(invariant 4: matched messages)");
}

TEST(ProofTest, AWrongRouteIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.programs[3].host = 1;
  EXPECT_EQ(
      ViolationOf(spec),
      "rank 3, round 0: the round's route is peer when it should be network "
      "for the message from rank 1 (invariant 4: matched messages)");
}

// Rank 2 shares rank 0's GPU and rank 3 rank 1's: round 0 stays on the GPUs.
PlanSpec ColocatedSpec() {
  PlanSpec spec = SampleSpec();
  spec.colocated = true;
  spec.rounds[0] = fb::Route::kLocal;
  return spec;
}

TEST(ProofTest, ColocatedRanksExchangeLocally) {
  EXPECT_EQ(ViolationOf(ColocatedSpec()), "");
  PlanSpec spec = ColocatedSpec();
  spec.rounds[0] = fb::Route::kPeer;
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 0: the round's route is peer when it should be "
            "local for the message from rank 0 (invariant 4: matched "
            "messages)");
}

// Every round stores directly, whatever the limits of staged rounds are.
PlanSpec DirectSpec() {
  PlanSpec spec = SampleSpec();
  spec.mechanisms = {fb::Mechanism::kDirect, fb::Mechanism::kDirect};
  for (PlanSpec::Program& program : spec.programs) {
    program.staging_bytes = 0;
    for (fb::Message& message : program.messages) SetStaging(message, 0);
  }
  spec.bucket_bytes = 16;
  spec.staging_bytes = 0;
  spec.operations_per_round = 0;
  return spec;
}

TEST(ProofTest, DirectRoundsNeedNeitherStagingNorLimits) {
  EXPECT_EQ(ViolationOf(DirectSpec()), "");
}

TEST(ProofTest, ADirectRoundBetweenHostsIsNamed) {
  PlanSpec spec = DirectSpec();
  for (size_t rank : {2, 3}) spec.programs[rank].host = 1;
  spec.rounds.assign(2, fb::Route::kNetwork);
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 0: rank 0 stores directly into memory of another "
            "host (invariant 4: matched messages)");
}

TEST(ProofTest, ADirectCopyThatIsNotOneCopyOfTheSenderIsNamed) {
  PlanSpec spec = DirectSpec();
  // The norm arrives in two halves.
  PlanSpec::Copy& norm = spec.copy_lists[3][1];
  norm.loops = {{4, 1}};
  PlanSpec::Copy second = norm;
  second.offset += 4;
  second.staging_offset += 8;
  spec.copy_lists[3].push_back(second);
  EXPECT_NE(ViolationOf(spec).find(
                "the direct copy that begins here is not one copy of rank 0"),
            std::string::npos)
      << ViolationOf(spec);
}

TEST(ProofTest, ADirectCopyMayHaveOtherLoopsThanTheSender) {
  PlanSpec spec = DirectSpec();
  spec.copy_lists[1][1].loops = {{4, 2}, {2, 1}};
  EXPECT_EQ(ViolationOf(spec), "");
}

TEST(ProofTest, ADirectElementFromTheWrongAddressIsNamed) {
  PlanSpec spec = DirectSpec();
  std::swap(spec.copy_lists[3][0].offset, spec.copy_lists[4][0].offset);
  EXPECT_NE(ViolationOf(spec).find("invariant 2"), std::string::npos)
      << ViolationOf(spec);
}

// A tensor of one source rank, and lists of copies of its halves.
PlanSpec HalvesSpec() {
  PlanSpec spec;
  spec.source_ranks = 1;
  spec.params = {{.name = "w", .index = {}, .shape = {16}}};
  spec.buffers = {{.name = "w",
                   .index = {},
                   .shape = {16},
                   .fragments = {{.param = 0,
                                  .lo = {0},
                                  .extent = {16},
                                  .offset = 0,
                                  .stride = {1}}},
                   .regions = {}}};
  spec.copy_lists = {{},
                     {{.slot = 0, .offset = 0, .loops = {{8, 1}}}},
                     {{.slot = 0, .offset = 8, .loops = {{8, 1}}}}};
  return spec;
}

// A source rank gives each of two replicas a half of w in round 0; in round 1
// they relay these to each other.
PlanSpec RelaySpec() {
  PlanSpec spec = HalvesSpec();
  spec.rounds = {fb::Route::kPeer, fb::Route::kPeer, fb::Route::kPeer};
  spec.mechanisms.assign(3, fb::Mechanism::kDirect);
  spec.programs = {
      {{0}, {SendTo(1, 0, 1, 0, 16), SendTo(2, 0, 2, 0, 16)}, 0, 0, 0},
      {{0},
       {RecvFrom(0, 0, 1, 0, 16), RecvFrom(2, 1, 2, 0, 16),
        SendTo(2, 1, 1, 0, 16)},
       0,
       0,
       0},
      {{0},
       {RecvFrom(0, 0, 2, 0, 16), RecvFrom(1, 1, 1, 0, 16),
        SendTo(1, 1, 2, 0, 16)},
       0,
       0,
       0},
  };
  spec.slots = 1;
  return spec;
}

TEST(ProofTest, ReplicasMayRelayWhatTheyHold) {
  const ProofResult proof = Prove(OpenSpec(RelaySpec()));
  EXPECT_EQ(proof.violation, "");
  EXPECT_EQ(proof.moved_bytes, 2 * 32);
}

// Rank 1 is given the halves of w in rounds 0 and 1, and relays one of them in
// round 2, fed by the message of round `fed_by`.
PlanSpec FedRelaySpec(uint32_t half, uint32_t fed_by) {
  PlanSpec spec = RelaySpec();
  const uint32_t other = 1 - half;
  spec.programs[0].messages = {SendTo(1, 0, 1, 0, 16),
                               SendTo(2, 0, 1 + other, 0, 16),
                               SendTo(1, 1, 2, 0, 16)};
  spec.programs[1].messages = {RecvFrom(0, 0, 1, 0, 16),
                               RecvFrom(0, 1, 2, 0, 16),
                               SendTo(2, 2, 1 + half, 0, 16)};
  spec.programs[1].relays = {fb::Relay(2, fed_by)};
  spec.programs[2].messages = {RecvFrom(0, 0, 1 + other, 0, 16),
                               RecvFrom(1, 2, 1 + half, 0, 16)};
  return spec;
}

TEST(ProofTest, ARelayIsFedByTheLastThatBringsItsElementsOrALaterOne) {
  EXPECT_EQ(ViolationOf(FedRelaySpec(/*half=*/0, /*fed_by=*/0)), "");
  EXPECT_EQ(ViolationOf(FedRelaySpec(/*half=*/0, /*fed_by=*/1)), "");
  EXPECT_EQ(ViolationOf(FedRelaySpec(/*half=*/1, /*fed_by=*/1)), "");
  EXPECT_EQ(ViolationOf(FedRelaySpec(/*half=*/1, /*fed_by=*/0)),
            "rank 1, round 2, buffer w, index [8]: the copy that begins here "
            "relays elements that arrive in round 1, but is fed by round 0 "
            "(invariant 2: right element)");
}

TEST(ProofTest, ProgramsThatAreSharedAreProvedForEachRank) {
  PlanSpec spec = FoldedSpec();
  EXPECT_EQ(ViolationOf(spec), "");
  // A copy that is fed by the sources of the first part, which send elsewhere.
  spec.programs[6].source_shift = 0;
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 0: sends 80 bytes to rank 6, which does not receive "
            "them in this round (invariant 4: matched messages)");
  // Sources that change places: their copies meet the messages of each other.
  spec = FoldedSpec();
  std::swap(spec.programs[2], spec.programs[3]);
  spec.programs[2].source_shift = spec.programs[3].source_shift = 2;
  EXPECT_NE(ViolationOf(spec), "");
  // A copy of the right program on a rank that holds other rows.
  spec = FoldedSpec();
  PlanSpec::Program& other = spec.programs[3];
  other.buffers = spec.programs[0].buffers;  // the first half, not the second
  other.messages = spec.programs[1].messages;
  other.staging_bytes = spec.programs[1].staging_bytes;
  other.shares.reset();
  EXPECT_EQ(ViolationOf(spec),
            "rank 6, round 1, buffer model.layers.0.mlp.up_proj.weight, index "
            "[2, 0]: holds model.layers.0.mlp.up_proj.weight[0, 0] when it "
            "should be model.layers.0.mlp.up_proj.weight[2, 0] (invariant 2: "
            "right element)");
}

// The message as part `number` of the broadcasts of its sender.
fb::Message Broadcast(const fb::Message& message, uint8_t number = 1) {
  return fb::Message(message.round(), message.peer(), message.copies(),
                     message.kind(), number, 0, message.staging_offset(),
                     message.size_bytes());
}

// Rank 0 broadcasts the halves of a tensor, one in each round, to the ranks 1
// to 3. Every rank has a host of its own.
PlanSpec BroadcastSpec() {
  PlanSpec spec = HalvesSpec();
  spec.rounds.assign(2, fb::Route::kNetwork);
  PlanSpec::Program root = {
      .buffers = {0}, .messages = {}, .staging_bytes = 32};
  for (uint32_t round = 0; round < 2; ++round) {
    for (uint32_t rank = 1; rank < 4; ++rank) {
      root.messages.push_back(
          Broadcast(SendTo(rank, round, round + 1, round * 16, 16)));
    }
  }
  spec.programs.push_back(root);
  for (uint32_t rank = 1; rank < 4; ++rank) {
    spec.programs.push_back({.buffers = {0},
                             .messages = {Broadcast(RecvFrom(0, 0, 1, 0, 16)),
                                          Broadcast(RecvFrom(0, 1, 2, 16, 16))},
                             .staging_bytes = 32,
                             .host = rank});
  }
  spec.bucket_bytes = 16;
  spec.staging_bytes = 32;
  spec.slots = 2;
  spec.operations_per_round = 1;
  return spec;
}

TEST(ProofTest, ABroadcastIsOneOperationFromOneRangeOfStaging) {
  const PlanFile plan = OpenSpec(BroadcastSpec());
  EXPECT_EQ(Prove(plan).violation, "");
  EXPECT_EQ(plan.plan().required_features(), kFeatureBroadcasts);
  EXPECT_EQ(plan.plan().format_version(), kFormatMajor << 16 | 13);
}

TEST(ProofTest, SendsOfOtherMessagesAreNoBroadcast) {
  PlanSpec spec = BroadcastSpec();
  for (size_t i = 0; i < 3; ++i) {
    fb::Message& send = spec.programs[0].messages[i];
    send = Broadcast(send, 0);
  }
  for (size_t rank = 1; rank < 4; ++rank) {
    fb::Message& receive = spec.programs[rank].messages[0];
    receive = Broadcast(receive, 0);
  }
  spec.operations_per_round = 3;
  EXPECT_EQ(ViolationOf(spec),
            "rank 0, round 0: staging bytes [0, 16) of the message with rank 2 "
            "overlap those of the message with rank 1 in round 0, which are "
            "still owed (invariant 3: in bounds)");
}

TEST(ProofTest, BothEndsSayThatAMessageIsBroadcast) {
  PlanSpec spec = BroadcastSpec();
  fb::Message& receive = spec.programs[2].messages[1];
  receive = Broadcast(receive, 0);
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 1: receives from rank 0 what is no broadcast, and "
            "is broadcast 1 where it is sent (invariant 4: matched messages)");
}

TEST(ProofTest, ABroadcastGoesToAllThatItsSenderBroadcastsTo) {
  PlanSpec spec = BroadcastSpec();
  fb::Message& send = spec.programs[0].messages[5];
  send = Broadcast(send, 0);
  fb::Message& receive = spec.programs[3].messages[1];
  receive = Broadcast(receive, 0);
  spec.operations_per_round = 2;
  EXPECT_EQ(ViolationOf(spec),
            "rank 0, round 1: broadcasts, but not to rank 3 as in its first "
            "broadcast (invariant 4: matched messages)");
}

TEST(ProofTest, ABroadcastStaysNotInsideAHost) {
  PlanSpec spec = BroadcastSpec();
  spec.programs[1].host = 0;
  EXPECT_EQ(ViolationOf(spec),
            "rank 1, round 0: the round's route is network when it should be "
            "peer for the message from rank 0 (invariant 4: matched messages)");
}

TEST(ProofTest, ABroadcastIsOneMessage) {
  PlanSpec spec = BroadcastSpec();
  fb::Message& send = spec.programs[0].messages[4];
  send = Broadcast(SendTo(send.peer(), send.round(), /*copies=*/1,
                          send.staging_offset(), send.size_bytes()));
  EXPECT_EQ(ViolationOf(spec),
            "rank 0, round 1: broadcasts 16 bytes at 16 of copies 2 to rank 1 "
            "and 16 bytes at 16 of copies 1 to rank 2 (invariant 4: matched "
            "messages)");
}

TEST(ProofTest, NetworkPeersKeepToTheirLimit) {
  PlanSpec spec = SampleSpec();
  for (size_t rank = 0; rank < 4; ++rank) spec.programs[rank].host = rank / 2;
  for (fb::Route& route : spec.rounds) route = fb::Route::kNetwork;
  spec.network_peers = 2;
  EXPECT_EQ(ViolationOf(spec), "");
  spec.network_peers = 1;
  EXPECT_EQ(ViolationOf(spec),
            "rank 0: exchanges with 2 ranks of other hosts when the limit is 1 "
            "(invariant 5: round limits)");
}

TEST(ProofTest, ARelayFedByAStagedRoundOfWhatWasStoredIsNamed) {
  PlanSpec spec = FedRelaySpec(/*half=*/0, /*fed_by=*/1);
  spec.mechanisms[1] = fb::Mechanism::kStaged;
  spec.bucket_bytes = spec.staging_bytes = 16;
  spec.operations_per_round = 1;
  spec.programs[0].staging_bytes = spec.programs[1].staging_bytes = 16;
  EXPECT_EQ(ViolationOf(spec),
            "rank 1, round 2, buffer w, index [0]: the copy that begins here "
            "relays elements that arrive in round 0, but is fed by round 1 "
            "(invariant 2: right element)");
}

TEST(ProofTest, ARelayInTheRoundOfTheArrivalIsNamed) {
  PlanSpec spec = RelaySpec();
  SetRound(spec.programs[1].messages[2], 0);
  std::swap(spec.programs[1].messages[1], spec.programs[1].messages[2]);
  SetRound(spec.programs[2].messages[1], 0);
  EXPECT_EQ(ViolationOf(spec),
            "rank 1, round 0, buffer w, index [0]: the copy that begins here "
            "relays elements that arrive only in round 0 (invariant 2: right "
            "element)");
}

TEST(ProofTest, ARelayOfHalfOfWhatArrivedLaterIsNamed) {
  PlanSpec spec = RelaySpec();
  // Rank 1 relays two elements of the other half, which it has yet to get.
  spec.copy_lists.push_back({{.slot = 0, .offset = 2, .loops = {{8, 1}}}});
  spec.programs[1].messages[2] = SendTo(2, 1, 3, 0, 16);
  EXPECT_EQ(ViolationOf(spec),
            "rank 1, round 1, buffer w, index [2]: the copy that begins here "
            "relays elements that arrive only in round 1 (invariant 2: right "
            "element)");
}

TEST(ProofTest, ARelayOfTheWrongElementIsNamed) {
  PlanSpec spec = RelaySpec();
  SetRound(spec.programs[2].messages[1], 2);
  std::swap(spec.programs[2].messages[1], spec.programs[2].messages[2]);
  spec.programs[1].messages[2] = SendTo(2, 2, 2, 0, 16);
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 2, buffer w, index [0]: holds w[8] when it should "
            "be w[0] (invariant 2: right element)");
}

TEST(ProofTest, ARelayThatCastsBackIsNamed) {
  PlanSpec spec = RelaySpec();
  spec.buffers.push_back(spec.buffers[0]);
  spec.buffers[1].dtype = fb::DType::kFp32;
  spec.programs[1].buffers = spec.programs[2].buffers = {1};
  spec.casts = {{fb::DType::kBf16, fb::DType::kFp32}};
  EXPECT_EQ(ViolationOf(spec),
            "rank 1, round 1, buffer w, index [0]: relays as bf16 what it "
            "received as fp32 (invariant 2: right element)");
}

TEST(ProofTest, ACastAfterARelayIsNamed) {
  PlanSpec spec = RelaySpec();
  spec.buffers.push_back(spec.buffers[0]);
  spec.buffers[1].dtype = fb::DType::kFp32;
  spec.programs[2].buffers = {1};
  spec.programs[2].messages.pop_back();
  spec.programs[1].messages[1] = RecvFrom(0, 1, 2, 0, 16);
  spec.programs[0].messages.push_back(SendTo(1, 1, 2, 0, 16));
  spec.casts = {{fb::DType::kBf16, fb::DType::kFp32}};
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 1, buffer w, index [0]: is cast from bf16 to fp32 "
            "after it was relayed (invariant 2: right element)");
}

// A source may cast what it packs. Rank 1, which holds the same, may not.
TEST(ProofTest, ARelayThatCastsIsNamedThoughASourceHasTheSameCopies) {
  PlanSpec spec = RelaySpec();
  spec.buffers.push_back(spec.buffers[0]);
  spec.buffers[0].dtype = fb::DType::kFp32;
  spec.casts = {{fb::DType::kFp32, fb::DType::kBf16}};
  const auto list = [](fb::DType dtype) {
    return std::vector<PlanSpec::Copy>{{.slot = 0,
                                        .offset = 0,
                                        .loops = {{16, 1}},
                                        .staging_offset = 0,
                                        .dtype = dtype}};
  };
  spec.copy_lists = {{}, list(fb::DType::kFp32), list(fb::DType::kBf16)};
  spec.programs = {
      {{0}, {SendTo(1, 0, 1, 0, 64), SendTo(2, 0, 2, 0, 32)}, 0, 0, 0},
      {{0}, {RecvFrom(0, 0, 1, 0, 64), SendTo(3, 1, 2, 0, 32)}, 0, 0, 0},
      {{1}, {RecvFrom(0, 0, 2, 0, 32)}, 0, 0, 0},
      {{1}, {RecvFrom(1, 1, 2, 0, 32)}, 0, 0, 0}};
  EXPECT_EQ(ViolationOf(spec),
            "rank 1, round 1, buffer w, index [0]: relays as bf16 what it "
            "received as fp32 (invariant 2: right element)");
}

// Rank 2 gets in a direct round what is right for rank 1 in a staged one: two
// copies of one.
TEST(ProofTest, ADirectMessageIsLookedAtThoughAStagedOneHasTheSameCopies) {
  PlanSpec spec = RelaySpec();
  spec.copy_lists = {
      {},
      {{.slot = 0, .offset = 0, .loops = {{16, 1}}}},
      {{.slot = 0, .offset = 0, .loops = {{8, 1}}},
       {.slot = 0, .offset = 8, .loops = {{8, 1}}, .staging_offset = 16}}};
  spec.mechanisms[0] = fb::Mechanism::kStaged;
  spec.programs = {
      {{0}, {SendTo(1, 0, 1, 0, 32), SendTo(2, 1, 1, 0, 32)}, 0, 32, 0},
      {{0}, {RecvFrom(0, 0, 2, 0, 32)}, 0, 32, 0},
      {{0}, {RecvFrom(0, 1, 2, 0, 32)}, 0, 0, 0}};
  spec.bucket_bytes = spec.staging_bytes = 32;
  spec.operations_per_round = 8;
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 1, buffer w, index [0]: the direct copy that begins "
            "here is not one copy of rank 0 (invariant 2: right element)");
}

TEST(ProofTest, ReplicasMayRelayInStagedRounds) {
  PlanSpec spec = RelaySpec();
  spec.mechanisms[1] = fb::Mechanism::kStaged;
  spec.bucket_bytes = spec.staging_bytes = 64;
  spec.operations_per_round = 8;
  for (PlanSpec::Program& program : spec.programs) program.staging_bytes = 64;
  for (size_t rank : {1, 2}) SetStaging(spec.programs[rank].messages[2], 16);
  const PlanFile plan = OpenSpec(spec);
  EXPECT_EQ(plan.plan().required_features(),
            kFeatureDirectRounds | kFeatureRelays | kFeatureStagedRelays);
  EXPECT_EQ(plan.plan().format_version(), 1 << 16 | 3);
  EXPECT_EQ(Prove(plan).violation, "");
  SetStaging(spec.programs[1].messages[2], 0);
  EXPECT_NE(ViolationOf(spec).find("invariant 3"), std::string::npos)
      << ViolationOf(spec);
}

TEST(ProofTest, ARankMayDealOutWhatItHoldsForAnother) {
  const PlanFile plan = OpenSpec(DealtSpec());
  EXPECT_EQ(plan.plan().required_features(),
            kFeatureRelays | kFeatureStagedRelays | kFeatureDealing);
  EXPECT_EQ(plan.plan().format_version(), 1 << 16 | 10);
  const ProofResult proof = Prove(plan);
  EXPECT_EQ(proof.violation, "");
  // Over the network and inside the host.
  EXPECT_EQ(proof.moved_bytes, 32 + 16);
}

TEST(ProofTest, DealtBytesThatNobodyReceivesAreNamed) {
  PlanSpec spec = DealtSpec();
  spec.programs[1].messages.pop_back();
  spec.programs[1].relays.clear();
  spec.programs[2].messages.clear();
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, buffer w, index [0]: is never written (invariant 1: "
            "written once)");
}

TEST(ProofTest, BytesThatAreDealtTwiceAreNamed) {
  PlanSpec spec = DealtSpec();
  spec.rounds.push_back(fb::Route::kNetwork);
  spec.programs[1].messages.push_back(SendTo(2, 3, 0, 16, 16));
  spec.programs[1].relays.emplace_back(3, 1);
  spec.programs[2].messages.push_back(RecvFrom(1, 3, 1, 0, 16));
  spec.slots = 1;
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 3, buffer w, index [0]: is written a second time, "
            "after round 2 (invariant 1: written once)");
}

TEST(ProofTest, BytesThatAreDealtToTheWrongRankAreNamed) {
  PlanSpec spec = DealtSpec();
  // The half that rank 1 wants itself.
  SetStaging(spec.programs[1].messages[2], 0);
  spec.programs[1].relays = {fb::Relay(2, 0)};
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 2, buffer w, index [0]: holds w[0] when it should "
            "be w[8] (invariant 2: right element)");
}

// Rank 1 deals out two parts of one message, the second to rank 3. Ranks 2 and
// 3 want the same and have the same copies.
TEST(ProofTest, AWrongPartOfAMessageIsNamedThoughTheCopiesAreThoseOfARightOne) {
  const auto violation = [](uint64_t begin_of_3, uint64_t end_of_3) {
    PlanSpec spec = DealtSpec();
    spec.rounds.assign(2, fb::Route::kNetwork);
    spec.copy_lists[2] = {
        {.slot = 0, .offset = 8, .loops = {{8, 1}}},
        {.slot = 0, .offset = 0, .loops = {{8, 1}}, .staging_offset = 16}};
    const uint64_t size = end_of_3 - begin_of_3;
    spec.programs = {{{0}, {SendTo(1, 0, 2, 0, 32)}, 0, 32, 0},
                     {{},
                      {RecvFrom(0, 0, 0, 0, 32), SendTo(2, 1, 0, 0, 32),
                       SendTo(3, 1, 0, begin_of_3, size)},
                      0,
                      32,
                      1},
                     {{2}, {RecvFrom(1, 1, 1, 0, 32)}, 0, 32, 1},
                     {{2}, {RecvFrom(1, 1, 1, 0, size)}, 0, 32, 1}};
    spec.programs[1].relays = {fb::Relay(1, 0), fb::Relay(2, 0)};
    return ViolationOf(spec);
  };
  EXPECT_EQ(violation(0, 32), "");
  EXPECT_EQ(violation(0, 16), "");
  EXPECT_EQ(violation(16, 32),
            "rank 3, round 1, buffer w, index [0]: holds w[0] when it should "
            "be w[8] (invariant 2: right element)");
  EXPECT_EQ(violation(0, 24),
            "rank 1, round 1: deals out bytes [0, 24) of the message from rank "
            "0, which packs bytes [16, 32) as one copy; wanted whole copies "
            "(invariant 2: right element)");
}

TEST(ProofTest, DealtBytesOfAnotherMessageThanTheFeedAreNamed) {
  PlanSpec spec = DealtSpec();
  spec.programs[1].relays = {fb::Relay(2, 0)};
  EXPECT_EQ(ViolationOf(spec),
            "rank 1, round 2: the message to rank 2 deals out staging bytes "
            "[16, 32), which are not those of the message from rank 0 that "
            "feeds it, [0, 16) (invariant 3: in bounds)");
}

TEST(ProofTest, DealtBytesThatNothingFeedsAreNamed) {
  PlanSpec spec = DealtSpec();
  spec.programs[1].relays.clear();
  EXPECT_EQ(ViolationOf(spec),
            "rank 1, round 2: the message to rank 2 packs nothing, and no "
            "staged message feeds it (invariant 3: in bounds)");
}

// A source's message that packs nothing, and the list that has it is also one
// of a destination rank: there it deals out what nothing feeds.
TEST(ProofTest, DealtBytesThatNothingFeedsAreNamedThoughASourceSendsThemToo) {
  PlanSpec spec = DealtSpec();
  spec.rounds = {fb::Route::kNetwork};
  spec.buffers = {spec.buffers[1]};
  spec.programs = {{{}, {SendTo(1, 0, 0, 0, 16)}, 0, 16, 0},
                   {{}, {RecvFrom(0, 0, 0, 0, 16)}, 0, 16, 1},
                   {{}, {}, 0, 0, 1, 0, {}, {}, 0, {}, 0, 2, 0},
                   {{0}, {RecvFrom(2, 0, 1, 0, 16)}, 0, 16, 1}};
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 0: the message to rank 3 packs nothing, and no "
            "staged message feeds it (invariant 3: in bounds)");
}

// Where the second half lies: the first comes there a round later, a message
// before the second is dealt out.
TEST(ProofTest, AReceiveOverDealtBytesIsNamed) {
  PlanSpec spec = DealtSpec();
  spec.slots = 1;
  std::swap(spec.programs[0].messages[0], spec.programs[0].messages[1]);
  for (const size_t rank : {0, 1}) {
    for (const uint32_t round : {0, 1}) {
      fb::Message& message = spec.programs[rank].messages[round];
      Set(message, round, message.staging_offset(), message.size_bytes());
    }
  }
  std::swap(spec.programs[1].messages[0], spec.programs[1].messages[1]);
  for (const uint32_t round : {0, 1}) {
    fb::Message& message = spec.programs[1].messages[round];
    Set(message, round, 16, message.size_bytes());
  }
  spec.programs[1].relays = {fb::Relay(2, 0)};
  EXPECT_EQ(ViolationOf(spec),
            "rank 1, round 1: staging bytes [16, 32) of the message with rank "
            "0 overlap those that are dealt to rank 2 in round 2 (invariant "
            "3: in bounds)");
}

// A rank packs up to `slots` rounds ahead of the wire.
TEST(ProofTest, APackOverDealtBytesIsNamedUntilTheyHaveLeft) {
  PlanSpec spec = DealtSpec();
  spec.buffers[2] = spec.buffers[1];
  spec.buffers[2].shape = {16};
  spec.buffers[2].fragments[0].extent = {16};
  // Rank 1 relays its own half as well, in a round after the dealt one.
  for (const auto& [round, offset, is_right] :
       {std::tuple(3u, 0u, true), {3u, 16u, false}, {4u, 16u, true}}) {
    spec.rounds.assign(round + 1, fb::Route::kNetwork);
    spec.copy_lists.resize(3);
    spec.programs[1].messages.resize(3);
    spec.programs[1].messages.push_back(SendTo(2, round, 1, offset, 16));
    spec.programs[1].relays = {fb::Relay(2, 1), fb::Relay(3, 0)};
    spec.programs[2].messages = {RecvFrom(1, 2, 2, 0, 16),
                                 RecvFrom(1, round, 1, 16, 16)};
    spec.programs[2].staging_bytes = 32;
    EXPECT_EQ(ViolationOf(spec),
              is_right ? ""
                       : "rank 1, round 3: staging bytes [16, 32) of the "
                         "message with rank 2 overlap those that are dealt to "
                         "rank 2 in round 2 (invariant 3: in bounds)");
  }
}

// What is dealt out was in no tensor of the rank, so that it may be cast.
TEST(ProofTest, WhatIsDealtOutMayBeCastOnArrival) {
  PlanSpec spec = DealtSpec();
  spec.buffers[2].dtype = fb::DType::kFp32;
  spec.casts = {{fb::DType::kBf16, fb::DType::kFp32}};
  EXPECT_EQ(ViolationOf(spec), "");
}

// Rank 1 holds w as bf16 and relays that; rank 2 holds the message for rank 3,
// which has fp32 and so other values than the source.
TEST(ProofTest, WhatIsRelayedAndThenDealtOutIsNotCast) {
  PlanSpec spec = DealtSpec();
  spec.params[0].shape = {8};
  spec.params[0].dtype = fb::DType::kFp32;
  spec.buffers = {spec.buffers[1], spec.buffers[1]};
  spec.buffers[0].dtype = fb::DType::kFp32;
  spec.casts = {{fb::DType::kFp32, fb::DType::kBf16},
                {fb::DType::kBf16, fb::DType::kFp32}};
  spec.copy_lists = {{}, spec.copy_lists[1], spec.copy_lists[1]};
  spec.copy_lists[1][0].dtype = fb::DType::kFp32;
  spec.programs = {
      {{0}, {SendTo(1, 0, 1, 0, 32), SendTo(2, 0, 1, 32, 32)}, 0, 64, 0},
      {{1}, {RecvFrom(0, 0, 1, 0, 32), SendTo(2, 1, 2, 32, 16)}, 0, 64, 1},
      {{1},
       {RecvFrom(0, 0, 1, 0, 32), RecvFrom(1, 1, 0, 32, 16),
        SendTo(3, 2, 0, 32, 16)},
       0,
       64,
       2},
      {{0}, {RecvFrom(2, 2, 2, 0, 16)}, 0, 16, 2}};
  spec.programs[1].relays = {fb::Relay(1, 0)};
  spec.programs[2].relays = {fb::Relay(2, 1)};
  spec.staging_bytes = 128;
  EXPECT_NE(
      ViolationOf(spec).find("is cast from bf16 to fp32 after it was relayed"),
      std::string::npos)
      << ViolationOf(spec);
}

TEST(ProofTest, WhatIsDealtOutLongAfterItCameIsNamed) {
  PlanSpec spec = DealtSpec();
  spec.rounds.assign(6, fb::Route::kNetwork);
  SetRound(spec.programs[1].messages[2], 5);
  SetRound(spec.programs[2].messages[0], 5);
  EXPECT_NE(ViolationOf(spec).find("deals out what came in round 1; wanted at "
                                   "most 3 rounds before"),
            std::string::npos)
      << ViolationOf(spec);
}

// Rank 1 holds what rank 2 holds after it, on another host, and rank 3 wants.
TEST(ProofTest, WhatIsDealtOutTwiceOnItsWayIsFollowed) {
  PlanSpec spec = DealtSpec();
  spec.rounds.push_back(fb::Route::kNetwork);
  spec.programs.push_back(spec.programs[2]);
  spec.programs[3].messages = {RecvFrom(2, 3, 1, 0, 16)};
  spec.programs[2] = {
      {1}, {RecvFrom(1, 2, 0, 0, 16), SendTo(3, 3, 0, 0, 16)}, 0, 32, 1};
  spec.programs[2].relays = {fb::Relay(1, 0)};
  spec.programs[2].buffers = {};
  spec.programs[2].host = 2;
  EXPECT_EQ(ViolationOf(spec), "");
  // Rank 1 deals out the first half instead, which rank 3 does not want.
  fb::Message& held = spec.programs[1].messages[2];
  Set(held, held.round(), held.staging_offset() - 16, held.size_bytes());
  spec.programs[1].relays = {fb::Relay(2, 0)};
  EXPECT_NE(ViolationOf(spec).find("invariant 2: right element"),
            std::string::npos)
      << ViolationOf(spec);
}

// Half of what is held, which came as one copy. The receiver's rank is the
// lower one: what it lacks must not be named instead.
TEST(ProofTest, APartOfADealtCopyIsNamed) {
  PlanSpec spec = DealtSpec();
  spec.params[0].shape = {24};
  spec.buffers.push_back(spec.buffers[2]);
  for (const auto& [buffer, begin, elements] :
       {std::tuple(0u, 0u, 24u), {1u, 0u, 8u}, {2u, 8u, 8u}, {3u, 16u, 8u}}) {
    spec.buffers[buffer].shape = {elements};
    spec.buffers[buffer].fragments[0].lo = {begin};
    spec.buffers[buffer].fragments[0].extent = {elements};
  }
  // Rank 2 holds what ranks 1 and 3 want.
  spec.copy_lists[2][0].loops = {{16, 1}};
  spec.programs = {
      {{0}, {SendTo(2, 0, 1, 0, 16), SendTo(2, 1, 2, 16, 32)}, 0, 48, 0},
      {{2}, {RecvFrom(2, 2, 1, 0, 16)}, 0, 16, 1},
      {{1},
       {RecvFrom(0, 0, 1, 0, 16), RecvFrom(0, 1, 0, 16, 32),
        SendTo(1, 2, 0, 16, 16), SendTo(3, 2, 0, 32, 16)},
       0,
       48,
       1},
      {{3}, {RecvFrom(2, 2, 1, 0, 16)}, 0, 16, 1}};
  spec.programs[2].relays = {fb::Relay(2, 1), fb::Relay(3, 1)};
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 2: deals out bytes [0, 16) of the message from rank "
            "0, which packs bytes [0, 32) as one copy; wanted whole copies "
            "(invariant 2: right element)");
  // As two copies the parts are whole.
  spec.copy_lists[2] = {
      {.slot = 0, .offset = 8, .loops = {{8, 1}}},
      {.slot = 0, .offset = 16, .loops = {{8, 1}}, .staging_offset = 16}};
  EXPECT_EQ(ViolationOf(spec), "");
}

TEST(ProofTest, DealingToAnotherHostIsRight) {
  PlanSpec spec = DealtSpec();
  spec.programs[2].host = 2;
  EXPECT_EQ(ViolationOf(spec), "");
}

// What comes over NVLink may also come beside what the network brings.
TEST(ProofTest, ASourceMaySendInsideItsHostInARoundBetweenHosts) {
  PlanSpec spec = DealtSpec();
  spec.programs[1].host = spec.programs[0].host;
  EXPECT_EQ(ViolationOf(spec), "");
}

TEST(ProofTest, DealingInARoundInsideHostsIsNamed) {
  PlanSpec spec = DealtSpec();
  spec.rounds[2] = fb::Route::kPeer;
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 2: is dealt to by rank 1 in a round of route peer "
            "when it should be network (invariant 4: matched messages)");
}

TEST(ProofTest, ColocatedRanksOnTwoHostsAreNamed) {
  PlanSpec spec = ColocatedSpec();
  spec.programs[2].host = 1;
  EXPECT_EQ(ViolationOf(spec),
            "rank 2: shares a GPU with rank 0 but is on host 1, not 0 "
            "(invariant 6: well-formed inputs)");
}

TEST(ProofTest, AProgramOutOfOrderIsNamed) {
  PlanSpec spec = SampleSpec();
  std::swap(spec.programs[2].messages[0], spec.programs[2].messages[1]);
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 0: the message with rank 0 is not in order after "
            "that with rank 1 in round 1 (invariant 4: matched messages)");
}

TEST(ProofTest, ASourceThatReceivesIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.programs[0].messages.insert(spec.programs[0].messages.begin(),
                                   RecvFrom(1, 0, 0, 128, 16));
  spec.programs[1].messages.insert(spec.programs[1].messages.begin(),
                                   SendTo(0, 0, 0, 128, 16));
  spec.slots = 1;
  EXPECT_EQ(ViolationOf(spec),
            "rank 0, round 0: a source rank receives from rank 1, a source "
            "rank (invariant 4: matched messages)");
}

TEST(ProofTest, MessagesOfOnePairPairUpInOrder) {
  PlanSpec spec = SampleSpec();
  // Rank 0's message to rank 2 in two parts, of the same round.
  spec.programs[0].messages[0] = SendTo(2, 0, 2, 0, 64);
  spec.programs[0].messages.insert(spec.programs[0].messages.begin() + 1,
                                   SendTo(2, 0, 8, 64, 16));
  spec.programs[2].messages[0] = RecvFrom(0, 0, 5, 0, 64);
  spec.programs[2].messages.insert(spec.programs[2].messages.begin() + 1,
                                   RecvFrom(0, 0, 8, 64, 16));
  spec.copy_lists.push_back({{.slot = 1, .offset = 0, .loops = {{8, 1}}}});
  EXPECT_EQ(ViolationOf(spec), "");
  std::swap(spec.programs[0].messages[0], spec.programs[0].messages[1]);
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 0: receives 64 bytes from rank 0, which sends 16 "
            "(invariant 4: matched messages)");
}

// Invariant 5: round limits.

TEST(ProofTest, TooManyOperationsInARoundAreNamed) {
  PlanSpec spec = SampleSpec();
  spec.operations_per_round = 0;
  EXPECT_EQ(ViolationOf(spec),
            "rank 0, round 0: more than 0 messages in one round (invariant 5: "
            "round limits)");
}

// Found by plan_file_fuzz.
TEST(ProofTest, MoreElementsThanANumberHoldsAreThatMany) {
  PlanSpec spec = SampleSpec();
  spec.buffers.push_back({.name = "scratchpad",
                          .index = {},
                          .shape = {uint64_t{1} << 61},
                          .fragments = {},
                          .regions = {{.kind = fb::RegionKind::kSkip,
                                       .reason = fb::SkipReason::kDerived,
                                       .offset = 0,
                                       .extent = {uint64_t{1} << 61},
                                       .stride = {1},
                                       .detail = "it is not read"}}});
  const auto slot = static_cast<uint32_t>(spec.buffers.size() - 1);
  for (int i = 0; i < 5; ++i) spec.programs[2].buffers.push_back(slot);
  EXPECT_EQ(Prove(OpenSpec(spec)).destination_elements,
            std::numeric_limits<int64_t>::max());
}

// The loader refuses such a plan before; the proof does not rest on it.
TEST(ProofTest, AGroupInWhichNcclCanHangIsNamedWhateverThePlanAllows) {
  const auto violation = [](size_t count) {
    PlanSpec spec = SampleSpec();
    spec.operations_per_round = 1 << 20;
    std::vector<fb::Message>& messages = spec.programs[0].messages;
    while (messages.size() < count + 1) {  // one is of round 1
      messages.insert(messages.begin(), SendTo(2, 0, 0, 0, 0));
    }
    const std::vector<uint8_t> bytes = BuildPlan(spec);
    const fb::Body& body = *fb::GetPlan(bytes.data())->body_nested_root();
    proof::Violations violations(body);
    proof::CheckLimits(MessageLists(body), violations);
    return violations.empty() ? "" : violations.text();
  };
  EXPECT_EQ(violation(32), "");
  EXPECT_EQ(violation(33),
            "rank 0, round 0: more than 32 messages in one round (invariant 5: "
            "round limits)");
}

TEST(ProofTest, AMessageAboveTheBucketSizeIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.bucket_bytes = 79;
  EXPECT_EQ(ViolationOf(spec),
            "rank 0, round 0: a message with rank 2 has 80 bytes when the "
            "limit is 79 (invariant 5: round limits)");
}

TEST(ProofTest, StagingAboveTheLimitIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.programs[2].staging_bytes = 257;
  EXPECT_EQ(ViolationOf(spec),
            "rank 2: stages 257 bytes when the limit is 256 bytes of staging "
            "(invariant 5: round limits)");
}

TEST(ProofTest, AbsentBuffersAreNamed) {
  PlanSpec spec = SampleSpec();
  spec.slots = 0;
  EXPECT_EQ(
      ViolationOf(spec),
      "slots is 0 when it should be at least 1 (invariant 5: round limits)");
}

// Invariant 6: well-formed inputs.

// Sources of fp32, sent and stored as bf16.
PlanSpec CastSpec() {
  PlanSpec spec = SampleSpec();
  for (int buffer : {0, 1, 2}) spec.buffers[buffer].dtype = DType::kFp32;
  spec.casts = {{DType::kFp32, DType::kBf16}};
  return spec;
}

TEST(ProofTest, ADeclaredCastIsValid) {
  EXPECT_EQ(ViolationOf(CastSpec()), "");
}

TEST(ProofTest, AnUndeclaredCastIsNamed) {
  PlanSpec spec = CastSpec();
  spec.casts = {{DType::kBf16, DType::kFp32}};
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, round 0, buffer model.layers.0.mlp.up_proj.weight, index "
            "[0, 0]: is cast from fp32 to bf16 without a declared cast "
            "(invariant 6: well-formed inputs)");
}

TEST(ProofTest, ADeclaredCastThatDoesNotExistIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.casts = {{DType::kFp64, DType::kBf16}};
  EXPECT_EQ(ViolationOf(spec),
            "declares a cast from fp64 to bf16, which does not exist "
            "(invariant 6: well-formed inputs)");
}

// Each half arrives as declared, one cast and one not.
TEST(ProofTest, AParamInTwoDTypesOnTheSourceIsNamed) {
  PlanSpec spec = CastSpec();
  spec.buffers[1].dtype = DType::kBf16;
  EXPECT_EQ(ViolationOf(spec),
            "rank 1, buffer decoder.layers.0.mlp.linear_fc1.weight: holds "
            "model.layers.0.mlp.up_proj.weight as bf16 when rank 0 holds it as "
            "fp32 (invariant 6: well-formed inputs)");
}

TEST(ProofTest, OverlappingFragmentsAreNamed) {
  PlanSpec spec = SampleSpec();
  spec.buffers[3].regions[0].offset = 24;
  EXPECT_EQ(ViolationOf(spec),
            "rank 2, buffer model.layers.0.mlp.up_proj.weight, index [3, 0]: "
            "overlap: the part from model.layers.0.mlp.up_proj.weight[0, 0] "
            "and that from a fill region (invariant 6: well-formed inputs)");
}

TEST(ProofTest, AFragmentThatFoldsOntoItselfIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.buffers[0].fragments[0].stride = {16, 7, 1};
  EXPECT_EQ(ViolationOf(spec),
            "rank 0, buffer decoder.layers.0.mlp.linear_fc1.weight, index [0, "
            "0]: the strides of a fragment do not nest, so that its elements "
            "may coincide (invariant 6: well-formed inputs)");
}

TEST(ProofTest, TwoBuffersOfOneNameAreNamed) {
  PlanSpec spec = SampleSpec();
  spec.buffers[4].name = "model.layers.1.mlp.up_proj.weight";
  EXPECT_EQ(
      ViolationOf(spec),
      "rank 2: buffer slots 0 and 1 both hold "
      "model.layers.1.mlp.up_proj.weight (invariant 6: well-formed inputs)");
}

// A file of a few kilobytes must not take memory for ever more names.
TEST(ProofTest, ARankOfTooManyNamesIsNamed) {
  PlanSpec spec = SampleSpec();
  spec.buffers.push_back({.name = "b.{0}",
                          .index = {{0, 1000000}},
                          .shape = {1},
                          .fragments = {},
                          .regions = {}});
  spec.programs[2].buffers.insert(spec.programs[2].buffers.end(), 5, 5);
  EXPECT_EQ(ViolationOf(spec),
            "rank 2: has 5000003 names; the proof takes up to 4194304 "
            "(invariant 6: well-formed inputs)");
}

// Nor for the parts of one buffer in each of very many slots.
TEST(ProofTest, ABufferOfManyPartsMayBeHeldVeryOften) {
  PlanSpec spec = SampleSpec();
  PlanSpec::Buffer& buffer = spec.buffers.emplace_back(
      PlanSpec::Buffer{.name = "b",
                       .index = {},
                       .shape = {1},
                       .fragments = {},
                       .regions = {{.reason = fb::SkipReason::kUnread,
                                    .offset = 0,
                                    .extent = {1},
                                    .stride = {1},
                                    .detail = {}}}});
  buffer.regions[0].kind = fb::RegionKind::kSkip;
  buffer.regions.resize(100000, buffer.regions[0]);  // which overlap
  spec.programs[2].buffers.resize(200000, 5);
  EXPECT_EQ(ViolationOf(spec),
            "rank 2: buffer slots 2 and 3 both hold b (invariant 6: "
            "well-formed inputs)");
}

TEST(ProofTest, TwoParamsOfOneNameAreNamed) {
  PlanSpec spec = SampleSpec();
  spec.params[2].name = "model.norm.weight";
  EXPECT_EQ(ViolationOf(spec),
            "params 1 and 2 both hold model.norm.weight (invariant 6: "
            "well-formed inputs)");
}

}  // namespace
}  // namespace refit
