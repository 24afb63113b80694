#include "plan/diff/diff.h"

#include <gtest/gtest.h>
#include <rapidjson/document.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "tests/plan/plan_spec.h"

namespace refit {
namespace {

PlanDifference Compare(const PlanSpec& a, const PlanSpec& b) {
  return ComparePlans(OpenSpec(a), OpenSpec(b));
}

// The text without the summary.
std::string DiffOf(const PlanSpec& a, const PlanSpec& b) {
  const std::string text = DifferenceText(Compare(a, b));
  return text.substr(0, text.find("summary:"));
}

// The padding's fill and the projection's copies with each layer an entry of
// its own.
PlanSpec SplitStacks(PlanSpec spec) {
  PlanSpec split = spec;
  split.params[0] = {.name = "model.layers.0.mlp.up_proj.weight",
                     .index = {},
                     .shape = {4, 8}};
  split.params.push_back({.name = "model.layers.{0}.mlp.up_proj.weight",
                          .index = {{1, 1}},
                          .shape = {4, 8}});
  // Every stacked buffer b becomes b (layer 0) and one at the end (layer 1).
  for (const uint32_t b : {0, 1, 3}) {
    const PlanSpec::Buffer& stack = spec.buffers[b];
    const std::string prefix = stack.name.substr(0, stack.name.find("{0}"));
    const std::string suffix = stack.name.substr(stack.name.find("{0}") + 3);
    PlanSpec::Buffer layer = stack;
    layer.index.clear();
    PlanSpec::Fragment fragment = stack.fragments[0];
    fragment.lo.erase(fragment.lo.begin());
    fragment.extent.erase(fragment.extent.begin());
    fragment.stride.erase(fragment.stride.begin());
    layer.fragments = {fragment};
    for (PlanSpec::Region& region : layer.regions) {
      region.extent = {8};
      region.stride = {1};
    }
    layer.name = prefix + "0" + suffix;
    split.buffers[b] = layer;
    layer.name = prefix + "1" + suffix;
    layer.fragments[0].param = 3;
    layer.fragments[0].lo.insert(layer.fragments[0].lo.begin(), 0);
    layer.fragments[0].extent.insert(layer.fragments[0].extent.begin(), 1);
    layer.fragments[0].stride.insert(layer.fragments[0].stride.begin(), 0);
    split.buffers.push_back(layer);
  }
  split.programs[0].buffers.push_back(5);
  split.programs[1].buffers.push_back(6);
  split.programs[2].buffers.push_back(7);
  split.programs[3].buffers.push_back(7);
  for (std::vector<PlanSpec::Copy>& list : split.copy_lists) {
    const bool fills = &list == &split.copy_lists[7];
    std::vector<PlanSpec::Copy> copies;
    for (const PlanSpec::Copy& copy : list) {
      if (copy.slot != 0) {
        copies.push_back(copy);
        continue;
      }
      for (const uint32_t layer : {0, 1}) {
        PlanSpec::Copy part = copy;
        part.loops.erase(part.loops.begin());
        part.slot = layer == 0 ? 0 : 2;
        if (!fills) part.staging_offset += layer * part.loops[0].extent() * 2;
        copies.push_back(part);
      }
    }
    list = copies;
  }
  return split;
}

TEST(DiffTest, PlanIsSameAsItself) {
  const PlanDifference difference = Compare(SampleSpec(), SampleSpec());
  EXPECT_TRUE(difference.same());
  EXPECT_EQ(
      difference.summary,
      "summary: 0 contract, 0 traffic, 0 schedule; moved bytes 288 -> 288; "
      "rounds 2 -> 2; peak staging bytes 144 -> 144");
}

TEST(DiffTest, ProvenanceAndStatsDoNotCount) {
  PlanSpec other = SampleSpec();
  other.producer = "refitc 9.9.9";
  other.moved_bytes = 1;
  EXPECT_TRUE(Compare(SampleSpec(), other).same());
}

// Executors that do not know a feature refuse the plan.
TEST(DiffTest, FurtherFeaturesAreContract) {
  const PlanSpec spec = SampleSpec();
  PlanSpec packed = spec;
  PackMessages(packed);
  EXPECT_EQ(DiffOf(spec, packed),
            "contract\n"
            "  FORMAT_CHANGED plan 1.1 -> plan 1.12 features 0x200; executors "
            "must also know packed messages\n");
  EXPECT_EQ(DiffOf(packed, spec),
            "schedule\n"
            "  FORMAT_CHANGED plan 1.12 features 0x200 -> plan 1.1\n");
}

TEST(DiffTest, FormatVersionOfEqualBodiesIsSchedule) {
  PlanSpec newer = SampleSpec();
  newer.format_version = kFormatMajor << 16 | kFormatMinor;
  EXPECT_FALSE(Compare(SampleSpec(), newer).same());
  EXPECT_EQ(DiffOf(SampleSpec(), newer),
            "schedule\n  FORMAT_CHANGED plan 1.1 -> plan 1.13\n");
}

TEST(DiffTest, JobsThatSayOtherThingsAreToldFirst) {
  PlanSpec a = SampleSpec(), b = SampleSpec();
  a.job = {{"destination.tensor_parallel", "2"},
           {"model", "qwen3, 2 layers"},
           {"options.delta", "true"}};
  EXPECT_EQ(DiffOf(a, b), "");  // of a plan that does not say
  EXPECT_EQ(DiffOf(b, a), "");
  b.job = {{"destination.replicas", "2"},
           {"destination.tensor_parallel", "4"},
           {"model", "qwen3, 2 layers"}};
  EXPECT_TRUE(Compare(a, b).same());
  EXPECT_EQ(DiffOf(a, b),
            "job\n"
            "  destination.replicas: not said -> 2\n"
            "  destination.tensor_parallel: 2 -> 4\n"
            "  options.delta: true -> not said\n");
  EXPECT_EQ(DiffOf(a, a), "");
  rapidjson::Document json;
  json.Parse(DifferenceJson(Compare(a, b)).c_str());
  ASSERT_EQ(json["job"].Size(), 3u);
  EXPECT_STREQ(json["job"][0]["key"].GetString(), "destination.replicas");
  EXPECT_FALSE(json["job"][0].HasMember("first"));
  EXPECT_STREQ(json["job"][0]["second"].GetString(), "2");
}

TEST(DiffTest, OrderOfTablesDoesNotCount) {
  PlanSpec other = SampleSpec();
  std::reverse(other.params.begin(), other.params.end());
  std::reverse(other.buffers.begin(), other.buffers.end());
  for (PlanSpec::Buffer& buffer : other.buffers) {
    buffer.fragments[0].param = 2 - buffer.fragments[0].param;
  }
  for (PlanSpec::Program& program : other.programs) {
    for (uint32_t& buffer : program.buffers) buffer = 4 - buffer;
    std::reverse(program.buffers.begin(), program.buffers.end());
  }
  for (std::vector<PlanSpec::Copy>& list : other.copy_lists) {
    std::reverse(list.begin(), list.end());
    for (PlanSpec::Copy& copy : list) copy.slot = 1 - copy.slot;
  }
  EXPECT_EQ(DiffOf(SampleSpec(), other), "");
}

TEST(DiffTest, SharingOfCopyListsDoesNotCount) {
  PlanSpec other = SampleSpec();
  other.copy_lists.push_back(other.copy_lists[1]);
  other.programs[1].messages[0] = SendTo(3, 0, 8, 0, 80);
  EXPECT_EQ(DiffOf(SampleSpec(), other), "");
}

TEST(DiffTest, HowTensorsAreStackedDoesNotCount) {
  EXPECT_EQ(DiffOf(SampleSpec(), SplitStacks(SampleSpec())), "");
  EXPECT_EQ(DiffOf(SplitStacks(SampleSpec()), SampleSpec()), "");
}

TEST(DiffTest, HowFragmentsAndCopiesAreCutDoesNotCount) {
  PlanSpec other = SampleSpec();
  std::vector<PlanSpec::Fragment>& fragments = other.buffers[3].fragments;
  fragments.push_back(fragments[0]);
  fragments[0].extent[1] = 1;
  fragments[1].lo[1] = 1;
  fragments[1].extent[1] = 3;
  fragments[1].offset = 8;
  // Column by column: the same bytes at the same place of the message.
  other.copy_lists[5] = {{.slot = 0,
                          .offset = 0,
                          .loops = {{2, 40}, {2, 8}, {8, 1}},
                          .staging_offset = 0}};
  EXPECT_EQ(DiffOf(SampleSpec(), other), "");
}

TEST(DiffTest, ParamsThatComeAndGoAreNamedByStack) {
  PlanSpec other = SampleSpec();
  other.params.push_back({.name = "mtp.{0}.norm.weight",
                          .index = {{3, 4}},
                          .shape = {8},
                          .dtype = fb::DType::kFp32});
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "contract\n"
            "  PARAM_ADDED param \"mtp.{0}.norm.weight\" {0}=3..6: fp32 [8]\n");
  EXPECT_EQ(
      DiffOf(other, SampleSpec()),
      "contract\n"
      "  PARAM_REMOVED param \"mtp.{0}.norm.weight\" {0}=3..6: fp32 [8]\n");
}

TEST(DiffTest, DTypeAndShapeOfAParamAreContract) {
  PlanSpec other = SampleSpec();
  other.params[2].dtype = fb::DType::kFp32;
  other.params[2].shape = {16, 4};
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "contract\n"
            "  DTYPE_CHANGED param \"lm_head.weight\": bf16 -> fp32\n"
            "  SHAPE_CHANGED param \"lm_head.weight\": [16, 8] -> [16, 4]\n");
}

TEST(DiffTest, SkipsAreContract) {
  PlanSpec other = SampleSpec();
  other.params[2].skip = fb::SkipReason::kUnspecified;
  other.skips[0].detail = "another reason";
  other.skips.push_back({"mtp.norm.weight", fb::SkipReason::kExcluded, ""});
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "contract\n"
            "  SKIP_ADDED skip \"mtp.norm.weight\": excluded\n"
            "  SKIP_CHANGED skip \"lm_head.weight\": tied \"tied to "
            "model.embed_tokens.weight\" -> "
            "tied \"another reason\"\n"
            "  SKIP_REMOVED param \"lm_head.weight\": was tied\n");
  EXPECT_EQ(DiffOf(other, SampleSpec()).substr(0, 76),
            "contract\n"
            "  SKIP_ADDED param \"lm_head.weight\": tied\n"
            "  SKIP_CHANGED skip \"lm_h");
}

// The name of a skip is a pattern: it may say several things.
TEST(DiffTest, SkipsOfOneNameAreComparedOneByOne) {
  PlanSpec spec = SampleSpec();
  spec.skips = {{"mtp.*", fb::SkipReason::kExcluded, "by the job"},
                {"mtp.*", fb::SkipReason::kFrozen, ""}};
  PlanSpec other = spec;
  std::swap(other.skips[0], other.skips[1]);
  EXPECT_EQ(DiffOf(spec, other), "");
  other.skips[0].reason = fb::SkipReason::kUnread;
  EXPECT_EQ(DiffOf(spec, other),
            "contract\n"
            "  SKIP_CHANGED skip \"mtp.*\": frozen -> unread\n");
  other.skips.pop_back();
  EXPECT_EQ(DiffOf(spec, other),
            "contract\n"
            "  SKIP_ADDED skip \"mtp.*\": unread\n"
            "  SKIP_REMOVED skip \"mtp.*\": was excluded \"by the job\"\n"
            "  SKIP_REMOVED skip \"mtp.*\": was frozen\n");
}

TEST(DiffTest, CastsAreContract) {
  PlanSpec other = SampleSpec();
  other.casts = {{fb::DType::kFp32, fb::DType::kBf16}};
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "contract\n  CAST_ADDED cast fp32 -> bf16\n");
  EXPECT_EQ(DiffOf(other, SampleSpec()),
            "contract\n  CAST_REMOVED cast fp32 -> bf16\n");
}

TEST(DiffTest, LayoutOfABufferNamesWhatItHeldAndHolds) {
  PlanSpec other = SampleSpec();
  std::swap(other.buffers[0].fragments, other.buffers[1].fragments);
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "contract\n"
            "  LAYOUT_CHANGED buffer "
            "\"decoder.layers.{0}.mlp.linear_fc1.weight\" {0}=0..1 of rank 0: "
            "holds \"model.layers.{0}.mlp.up_proj.weight\" {0}=0..1 [0:2, 0:2, "
            "0:8] at 0 "
            "strides [16, 8, 1] -> "
            "\"model.layers.{0}.mlp.up_proj.weight\" {0}=0..1 [0:2, 2:4, 0:8] "
            "at 0 strides [16, 8, 1]\n"
            "  LAYOUT_CHANGED buffer "
            "\"decoder.layers.{0}.mlp.linear_fc1.weight\" {0}=0..1 of rank 1: "
            "holds \"model.layers.{0}.mlp.up_proj.weight\" {0}=0..1 [0:2, 2:4, "
            "0:8] at 0 "
            "strides [16, 8, 1] -> "
            "\"model.layers.{0}.mlp.up_proj.weight\" {0}=0..1 [0:2, 0:2, 0:8] "
            "at 0 strides [16, 8, 1]\n");
}

TEST(DiffTest, ReasonOfASkippedRegionIsLayout) {
  PlanSpec other = SampleSpec();
  PlanSpec::Region& padding = other.buffers[3].regions[0];
  padding.kind = fb::RegionKind::kSkip;
  padding.reason = fb::SkipReason::kUnread;
  for (const size_t rank : {2, 3}) other.programs[rank].fills = 0;
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "contract\n"
            "  LAYOUT_CHANGED buffer \"model.layers.{0}.mlp.up_proj.weight\" "
            "{0}=0..1 of ranks "
            "2..3: holds fill [2, 8] at 32 strides [40, 1] -> skip unread [2, "
            "8] at 32 strides "
            "[40, 1]\n");
}

TEST(DiffTest, PostHooksAreContract) {
  PlanSpec hooked = SampleSpec();
  hooked.buffers[4].post_hooks = {{"add-one", "add 1 to it"}};
  EXPECT_EQ(DiffOf(SampleSpec(), hooked),
            R"(contract
  FORMAT_CHANGED plan 1.1 -> plan 1.2 features 0x2; executors must also know post-hooks
  POST_HOOKS_CHANGED buffer "model.norm.weight" of ranks 2..3: none -> add-one "add 1 to it"
)");
  EXPECT_EQ(DiffOf(hooked, SampleSpec()),
            R"(contract
  POST_HOOKS_CHANGED buffer "model.norm.weight" of ranks 2..3: add-one "add 1 to it" -> none
schedule
  FORMAT_CHANGED plan 1.2 features 0x2 -> plan 1.1
)");
  EXPECT_TRUE(Compare(hooked, hooked).same());
}

TEST(DiffTest, RequirementsAreContract) {
  const fb::Side side = fb::Side::kDestination;
  PlanSpec triton = SampleSpec();
  triton.requirements = {{side, "moe_backend", "triton"}};
  PlanSpec cutlass = SampleSpec();
  cutlass.requirements = {{side, "moe_backend", "flashinfer_cutlass"}};
  EXPECT_EQ(DiffOf(SampleSpec(), triton),
            "contract\n"
            "  REQUIREMENT_ADDED destination moe_backend: triton\n"
            "schedule\n"
            "  FORMAT_CHANGED plan 1.1 -> plan 1.4\n");
  EXPECT_EQ(DiffOf(triton, cutlass),
            "contract\n"
            "  REQUIREMENT_CHANGED destination moe_backend: triton -> "
            "flashinfer_cutlass\n");
  EXPECT_EQ(DiffOf(triton, SampleSpec()),
            "contract\n"
            "  REQUIREMENT_REMOVED destination moe_backend: was triton\n"
            "schedule\n"
            "  FORMAT_CHANGED plan 1.4 -> plan 1.1\n");
  EXPECT_TRUE(Compare(triton, triton).same());
}

TEST(DiffTest, DeltasAreContract) {
  PlanSpec dense = SampleSpec();
  dense.mechanisms.assign(dense.rounds.size(), fb::Mechanism::kDirect);
  for (PlanSpec::Program& program : dense.programs) {
    program.staging_bytes = 0;
    for (fb::Message& message : program.messages) {
      message = fb::Message(message.round(), message.peer(), message.copies(),
                            message.kind(), 0, 0, 0, message.size_bytes());
    }
  }
  PlanSpec snapshot = dense;
  snapshot.delta = PlanSpec::Delta();
  PlanSpec bitmap = snapshot;
  bitmap.delta->changes = fb::DeltaChanges::kBitmap;
  EXPECT_EQ(DiffOf(dense, snapshot),
            "contract\n"
            "  DELTA_ADDED delta: changes snapshot dense_every 20 check\n"
            "  FORMAT_CHANGED plan 1.1 features 0x1 -> plan 1.6 features 0x21; "
            "executors must also know delta refits\n");
  EXPECT_EQ(DiffOf(snapshot, bitmap),
            "contract\n"
            "  DELTA_CHANGED delta: changes snapshot dense_every 20 check -> "
            "changes bitmap dense_every 20 check\n");
  EXPECT_EQ(DiffOf(bitmap, dense),
            "contract\n"
            "  DELTA_REMOVED delta: was changes bitmap dense_every 20 check\n"
            "schedule\n"
            "  FORMAT_CHANGED plan 1.6 features 0x21 -> plan 1.1 features "
            "0x1\n");
}

TEST(DiffTest, WhatJoinsHostsIsSchedule) {
  PlanSpec spec = SampleSpec();
  spec.topology = {.machine = "hgx-h200", .rails = true};
  EXPECT_EQ(DiffOf(SampleSpec(), spec),
            "schedule\n"
            "  FORMAT_CHANGED plan 1.1 -> plan 1.7\n"
            "  TOPOLOGY_CHANGED topology: none -> machine \"hgx-h200\" "
            "hosts_per_nvlink_domain 1 gpus_per_nic 1 hosts_per_leaf all rails "
            "spine_oversubscription 1 peer 3.7e+11 network 5e+10 bytes per "
            "second\n");
}

// The topology says how many hosts are joined, their numbers say which.
TEST(DiffTest, HostNumbersThatMoveDomainsAndLeavesAreSchedule) {
  PlanSpec spec = SampleSpec();
  spec.topology = {.hosts_per_nvlink_domain = 2, .hosts_per_leaf = 2};
  for (PlanSpec::Program& program : spec.programs) {
    program.host = static_cast<uint32_t>(&program - spec.programs.data());
  }
  PlanSpec other = spec;
  std::swap(other.programs[1].host, other.programs[2].host);
  EXPECT_EQ(DiffOf(spec, other),
            "schedule\n"
            "  TOPOLOGY_CHANGED leaves: 0..1 | 2..3 -> 0, 2 | 1, 3\n"
            "  TOPOLOGY_CHANGED nvlink domains: 0..1 | 2..3 -> 0, 2 | 1, 3\n");
  // Other numbers for the same pairs.
  other = spec;
  std::swap(other.programs[0].host, other.programs[3].host);
  std::swap(other.programs[1].host, other.programs[2].host);
  EXPECT_EQ(DiffOf(spec, other), "");
  // All hosts share one leaf.
  spec.topology->hosts_per_leaf = 0;
  spec.topology->hosts_per_nvlink_domain = 1;
  other = spec;
  std::swap(other.programs[1].host, other.programs[2].host);
  EXPECT_EQ(DiffOf(spec, other), "");
}

TEST(DiffTest, BuffersThatComeAndGoNameTheirRanks) {
  PlanSpec other = SampleSpec();
  other.buffers.push_back({.name = "rotary.{0}.inv_freq",
                           .index = {{0, 2}},
                           .shape = {8},
                           .dtype = fb::DType::kFp32,
                           .fragments = {},
                           .regions = {}});
  other.programs[0].buffers.push_back(5);
  other.programs[2].buffers.push_back(5);
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "contract\n"
            "  BUFFER_ADDED buffer \"rotary.{0}.inv_freq\" {0}=0..1 of ranks "
            "0, 2: fp32 [8]\n");
  EXPECT_EQ(DiffOf(other, SampleSpec()),
            "contract\n"
            "  BUFFER_REMOVED buffer \"rotary.{0}.inv_freq\" {0}=0..1 of ranks "
            "0, 2: fp32 [8]\n");
}

TEST(DiffTest, MoreRanksAreOneDifference) {
  PlanSpec other = SampleSpec();
  other.programs[0].messages.push_back(SendTo(4, 1, 2, 80, 64));
  other.programs.push_back({{3, 4}, {RecvFrom(0, 1, 5, 0, 64)}, 7, 64, 0});
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "contract\n"
            "  RANKS_CHANGED destination ranks: 2 -> 3\n");
}

// `w` cut over the source ranks, whole on one destination rank; nothing moves.
PlanSpec SplitSource(uint64_t ranks) {
  constexpr uint64_t kRows = 8;
  PlanSpec spec;
  spec.source_ranks = static_cast<uint32_t>(ranks);
  spec.params = {{.name = "w", .index = {}, .shape = {kRows}},
                 {.name = "norm", .index = {}, .shape = {2}}};
  const auto hold = [&](std::string name, uint32_t param, uint64_t lo,
                        uint64_t rows) {
    spec.buffers.push_back({.name = std::move(name),
                            .index = {},
                            .shape = {rows},
                            .fragments = {{.param = param,
                                           .lo = {lo},
                                           .extent = {rows},
                                           .offset = 0,
                                           .stride = {1}}},
                            .regions = {}});
    return static_cast<uint32_t>(spec.buffers.size() - 1);
  };
  spec.copy_lists = {{}};
  const uint32_t norm = hold("local.norm", 1, 0, 2);
  for (uint64_t rank = 0; rank < ranks; ++rank) {
    spec.programs.emplace_back().buffers = {
        hold("local.w", 0, rank * kRows / ranks, kRows / ranks), norm};
  }
  spec.programs.emplace_back().buffers = {hold("w", 0, 0, kRows)};
  spec.slots = 1;
  return spec;
}

TEST(DiffTest, OfAnotherSourceMeshWhatEachSideHoldsIsCompared) {
  EXPECT_EQ(
      DiffOf(SplitSource(4), SplitSource(2)),
      "contract\n"
      "  RANKS_CHANGED source ranks: 4 -> 2\n"
      "  SHAPE_CHANGED buffer \"local.w\" of the source: [2] -> [4]\n"
      "traffic\n"
      "  RANKS_NOT_COMPARED messages, rounds and staging of single ranks: with "
      "4 -> 2 source ranks, a number names another rank\n");
}

TEST(DiffTest, OfAnotherSourceMeshLayoutsAndNamesAreCompared) {
  PlanSpec other = SplitSource(2);
  other.programs.insert(other.programs.begin(), other.programs[0]);
  other.source_ranks = 3;  // a replica of the first
  other.buffers.back().name = "engine.w";
  other.buffers[1].dtype = fb::DType::kFp32;
  other.buffers[2].dtype = fb::DType::kFp32;
  const std::string text = DiffOf(SplitSource(2), other);
  EXPECT_NE(text.find("  BUFFER_ADDED buffer \"engine.w\" of the destination: "
                      "bf16 [8]\n  BUFFER_REMOVED buffer \"w\" of the "
                      "destination: bf16 [8]\n  DTYPE_CHANGED buffer "
                      "\"local.w\" of the source: bf16 -> fp32\n"),
            std::string::npos)
      << text;
  EXPECT_EQ(text.find("LAYOUT_CHANGED"), std::string::npos) << text;
  other.buffers[1].fragments[0].lo = {2};
  EXPECT_NE(DiffOf(SplitSource(2), other)
                .find("LAYOUT_CHANGED buffer \"local.w\" of the source: some "
                      "rank holds other elements"),
            std::string::npos);
}

TEST(DiffTest, HostsCountButNotTheirNumbers) {
  PlanSpec other = SampleSpec();
  for (PlanSpec::Program& program : other.programs) program.host = 7;
  EXPECT_EQ(DiffOf(SampleSpec(), other), "");
  other.programs[3].host = 8;
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "contract\n"
            "  RANKS_CHANGED hosts: 0..3 -> 0..2 | 3\n");
}

TEST(DiffTest, AnotherSenderIsTraffic) {
  PlanSpec other = SampleSpec();
  // Rank 1 takes both norms, so that rank 0 sends rank 2 its half alone.
  other.programs[0].messages[0] = SendTo(2, 0, 2, 0, 64);
  other.programs[2].messages[0] = RecvFrom(0, 0, 5, 0, 64);
  other.programs[1].messages[1] = SendTo(2, 1, 1, 64, 80);
  other.programs[2].messages[1] = RecvFrom(1, 1, 4, 64, 80);
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "traffic\n"
            "  BYTES_CHANGED 0 -> 2: 80 -> 64 bytes\n"
            "  BYTES_CHANGED 1 -> 2: 64 -> 80 bytes\n"
            "  SENDER_CHANGED buffer \"model.norm.weight\" of rank 2: from 0 "
            "-> from 1\n");
}

TEST(DiffTest, SendersThatSwapPartsAreTraffic) {
  PlanSpec other = SampleSpec();
  // Both senders feed the same tensors with the same bytes, but other rows.
  other.programs[2].messages = {RecvFrom(0, 0, 4, 0, 80),
                                RecvFrom(1, 1, 5, 80, 64)};
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "traffic\n"
            "  SENDER_CHANGED buffer \"model.layers.{0}.mlp.up_proj.weight\" "
            "{0}=0..1 of rank 2: "
            "from 0..1, each another part\n");
}

TEST(DiffTest, RouteOfAPairIsTraffic) {
  PlanSpec other = SampleSpec();
  other.rounds[1] = fb::Route::kNetwork;
  // Inside a host, beside what the network brings.
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "contract\n"
            "  FORMAT_CHANGED plan 1.1 -> plan 1.10 features 0x100; executors "
            "must also know dealt messages\n"
            "traffic\n"
            "  ROUTE_CHANGED 0 -> 3; 1 -> 2: peer -> peer dealt\n");
  PlanSpec spec = SampleSpec();
  for (size_t rank : {size_t{2}, size_t{3}}) {
    spec.programs[rank].host = other.programs[rank].host = 1;
  }
  EXPECT_EQ(DiffOf(spec, other),
            "traffic\n"
            "  ROUTE_CHANGED 0 -> 3; 1 -> 2: peer -> network\n");
}

TEST(DiffTest, BytesOfAPairThatDealsAreTraffic) {
  PlanSpec direct = DealtSpec();
  direct.rounds.pop_back();
  direct.programs[0].messages[1] = SendTo(2, 1, 2, 16, 16);
  direct.programs[1].messages = {RecvFrom(0, 0, 1, 0, 16)};
  direct.programs[1].relays.clear();
  direct.programs[2].messages = {RecvFrom(0, 1, 1, 0, 16)};
  const std::string text = DiffOf(direct, DealtSpec());
  EXPECT_EQ(text.substr(0, text.find("  SENDER_CHANGED")),
            "contract\n"
            "  FORMAT_CHANGED plan 1.1 -> plan 1.10 features 0x118; executors "
            "must also know relays, staged relays, dealt messages\n"
            "traffic\n"
            "  BYTES_CHANGED 0 -> 1: 16 -> 32 bytes\n"
            "  BYTES_CHANGED 0 -> 2: 16 -> 0 bytes\n"
            "  BYTES_CHANGED 1 -> 2: 0 -> 16 bytes\n");
}

TEST(DiffTest, MissingFillIsTraffic) {
  PlanSpec other = SampleSpec();
  other.programs[2].fills = 0;
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "traffic\n"
            "  FILLS_CHANGED rank 2: other elements are zeroed\n");
}

TEST(DiffTest, SmallerBucketsAreOnlySchedule) {
  PlanSpec other = SampleSpec();
  other.bucket_bytes = 64;
  // The norms travel in a third round.
  other.copy_lists.push_back({{.slot = 1, .offset = 0, .loops = {{8, 1}}}});
  other.rounds.push_back(fb::Route::kPeer);
  other.programs = {
      {{0, 2},
       {SendTo(2, 0, 2, 0, 64), SendTo(3, 1, 2, 64, 64),
        SendTo(2, 2, 8, 0, 16)},
       0,
       128,
       0},
      {{1, 2},
       {SendTo(3, 0, 2, 0, 64), SendTo(2, 1, 2, 64, 64),
        SendTo(3, 2, 8, 0, 16)},
       0,
       128,
       0},
      {{3, 4},
       {RecvFrom(0, 0, 5, 0, 64), RecvFrom(1, 1, 6, 64, 64),
        RecvFrom(0, 2, 8, 0, 16)},
       7,
       128,
       0},
      {{3, 4},
       {RecvFrom(1, 0, 6, 0, 64), RecvFrom(0, 1, 5, 64, 64),
        RecvFrom(1, 2, 8, 0, 16)},
       7,
       128,
       0},
  };
  EXPECT_EQ(
      DifferenceText(Compare(SampleSpec(), other)),
      "schedule\n"
      "  BUCKETS_CHANGED 0 -> 2; 1 -> 3: 1 message of at most 80 bytes -> "
      "2 messages of at most 64 bytes\n"
      "  LIMITS_CHANGED bucket_bytes 128 -> 64\n"
      "  ROUNDS_CHANGED rounds 2 -> 3\n"
      "  STAGING_CHANGED ranks 0..3: 144 -> 128 bytes\n"
      "summary: 0 contract, 0 traffic, 4 schedule; moved bytes 288 -> 288; "
      "rounds 2 -> 3; "
      "peak staging bytes 144 -> 128\n");
}

TEST(DiffTest, WhatFeedsARelayIsSchedule) {
  PlanSpec spec = SampleSpec();
  spec.rounds.push_back(fb::Route::kPeer);
  const auto sent = static_cast<uint32_t>(spec.programs[2].messages.size());
  spec.programs[2].messages.push_back(SendTo(3, 2, 5, 0, 64));
  spec.programs[3].messages.push_back(RecvFrom(2, 2, 5, 0, 64));
  spec.programs[2].relays = {fb::Relay(sent, 0)};
  PlanSpec other = spec;
  other.programs[2].relays = {fb::Relay(sent, 1)};
  EXPECT_EQ(DiffOf(spec, spec), "");
  EXPECT_EQ(DiffOf(spec, other),
            "schedule\n"
            "  RELAYS_CHANGED 2 -> 3: relays wait for messages of other "
            "rounds\n");
}

TEST(DiffTest, RoundsAndStagingRangesAreSchedule) {
  PlanSpec other = SampleSpec();
  other.programs[0].messages = {SendTo(3, 0, 2, 0, 64),
                                SendTo(2, 1, 1, 64, 80)};
  other.programs[3].messages = {RecvFrom(0, 0, 5, 80, 64),
                                RecvFrom(1, 0, 4, 0, 80)};
  other.programs[2].messages = {RecvFrom(0, 1, 3, 0, 80),
                                RecvFrom(1, 1, 6, 80, 64)};
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "schedule\n"
            "  ROUNDS_CHANGED 0 -> 2..3: the same messages in other rounds\n");
  other = SampleSpec();
  other.programs[1].messages = {SendTo(3, 0, 1, 64, 80),
                                SendTo(2, 1, 2, 0, 64)};
  EXPECT_EQ(DiffOf(SampleSpec(), other),
            "schedule\n"
            "  STAGING_CHANGED rank 1: messages elsewhere in an arena of the "
            "same size\n");
}

TEST(DiffTest, OrderInsideAMessageIsSchedule) {
  PlanSpec other = SampleSpec();
  for (const size_t list : {1, 3, 4}) {
    other.copy_lists[list][0].staging_offset = 16;
    other.copy_lists[list][1].staging_offset = 0;
  }
  EXPECT_EQ(
      DiffOf(SampleSpec(), other),
      "schedule\n"
      "  PACKING_CHANGED 0 -> 2; 1 -> 3: other order inside the messages\n");
}

TEST(DiffTest, EveryChangeOfACopyOrAMessageIsSeen) {
  const PlanSpec sample = SampleSpec();
  std::vector<PlanSpec> mutants;
  for (size_t list = 1; list < sample.copy_lists.size(); ++list) {
    for (size_t copy = 0; copy < sample.copy_lists[list].size(); ++copy) {
      const auto mutate = [&](auto change) {
        change(mutants.emplace_back(sample).copy_lists[list][copy]);
      };
      mutate([](PlanSpec::Copy& c) { c.loops.pop_back(); });
      mutate([](PlanSpec::Copy& c) { c.loops.back() = {2, 1}; });
      mutate([](PlanSpec::Copy& c) { c.loops.back() = {4, 2}; });
      mutate([](PlanSpec::Copy& c) { c.dtype = fb::DType::kFp16; });
      mutate([](PlanSpec::Copy& c) { c.loops = {{4, 1}}, c.offset += 4; });
      mutate([](PlanSpec::Copy& c) {
        c.loops = {{4, 1}}, c.staging_offset += 16;
      });
    }
  }
  for (size_t rank = 0; rank < sample.programs.size(); ++rank) {
    for (size_t i = 0; i < sample.programs[rank].messages.size(); ++i) {
      std::vector<fb::Message>& messages =
          mutants.emplace_back(sample).programs[rank].messages;
      messages.erase(messages.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  int seen = 0;
  for (size_t i = 0; i < mutants.size(); ++i) {
    // What the loader refuses need not be compared.
    absl::StatusOr<PlanFile> mutant =
        PlanFile::FromBytes(BuildPlan(mutants[i]));
    if (!mutant.ok()) continue;
    EXPECT_FALSE(ComparePlans(OpenSpec(sample), *mutant).same())
        << "mutant " << i;
    ++seen;
  }
  EXPECT_GE(seen, 40);
}

TEST(DiffTest, WindowsOfScratchAreSchedule) {
  EXPECT_EQ(DiffOf(QuantizedSpec(), WindowedSpec()),
            "schedule\n"
            "  BUCKETS_CHANGED 0 -> 1: 1 message of at most 80 bytes -> 2 "
            "messages of at most 48 bytes\n"
            "  ROUNDS_CHANGED rounds 1 -> 2\n"
            "  STAGING_CHANGED ranks 0..1: 80 -> 96 bytes\n"
            "  WINDOWS_CHANGED rank 0: 192 bytes -> 144 bytes in 4 windows\n");
  PlanSpec other = WindowedSpec();
  std::swap(other.programs[0].scratch_windows[0],
            other.programs[0].scratch_windows[1]);
  other.programs[0].scratch_arena_bytes = 146;
  EXPECT_EQ(DiffOf(WindowedSpec(), other),
            "schedule\n  WINDOWS_CHANGED rank 0: 144 bytes in 4 windows -> 146 "
            "bytes in 4 windows\n");
}

TEST(DiffTest, WhatIsQuantizedIsTraffic) {
  PlanSpec other = WindowedSpec();
  other.programs[0].quantizes.pop_back();
  EXPECT_EQ(DiffOf(WindowedSpec(), other),
            "traffic\n  QUANTIZES_CHANGED rank 0: quantizes 36 elements -> 18 "
            "elements\n");
}

// Ranks 0 and 1 both hold what QuantizedSpec's source does; rank 2 is sent a
// layer by each, and quantizes them itself.
PlanSpec QuantizedAtTheDestinationSpec() {
  PlanSpec spec = QuantizedSpec();
  spec.source_ranks = 2;
  PlanSpec::Buffer& scratch = spec.buffers[1];
  scratch.name = "scratch.bf16";
  scratch.dtype = fb::DType::kBf16;
  scratch.fragments[0].param = 0;
  const auto layer = [](uint32_t slot, uint64_t number) {
    return std::vector<PlanSpec::Copy>{{.slot = slot,
                                        .offset = 18 * number,
                                        .loops = {{18, 1}},
                                        .staging_offset = 0,
                                        .dtype = fb::DType::kBf16}};
  };
  spec.copy_lists = {{}, layer(0, 0), layer(0, 1), layer(2, 0), layer(2, 1)};
  spec.programs = {
      {.buffers = {0},
       .messages = {SendTo(2, 0, 1, 0, 48)},
       .staging_bytes = 48},
      {.buffers = {0},
       .messages = {SendTo(2, 0, 2, 0, 48)},
       .staging_bytes = 48},
      {.buffers = {3, 4, 1},
       .messages = {RecvFrom(0, 0, 3, 0, 48), RecvFrom(1, 0, 4, 48, 48)},
       .staging_bytes = 96,
       .scratch_buffers = 1,
       .quantizes = {fb::Quantize(
           /*quantization=*/0, /*input_slot=*/2,
           /*output_slot=*/0, /*scale_slot=*/1, /*loops_begin=*/0,
           /*loops_count=*/1, /*offsets=*/0, 0, 0, /*rows=*/3,
           /*columns=*/6, /*row strides=*/6, 6, 2)}}};
  return spec;
}

TEST(DiffTest, SendersIntoScratchThatSwapPartsAreTraffic) {
  const PlanSpec spec = QuantizedAtTheDestinationSpec();
  PlanSpec other = spec;
  other.programs[0].messages = {SendTo(2, 0, 2, 0, 48)};
  other.programs[1].messages = {SendTo(2, 0, 1, 0, 48)};
  other.programs[2].messages = {RecvFrom(0, 0, 4, 0, 48),
                                RecvFrom(1, 0, 3, 48, 48)};
  EXPECT_EQ(DiffOf(spec, other),
            "traffic\n"
            "  SENDER_CHANGED buffer \"scratch.bf16\" of rank 2: from 0..1, "
            "each another part\n");
  EXPECT_EQ(DiffOf(spec, spec), "");
}

TEST(DiffTest, SendersIntoScratchThatHoldsSomethingElseGoWithoutSaying) {
  const PlanSpec spec = QuantizedAtTheDestinationSpec();
  PlanSpec other = spec;
  // The layers change places in scratch, of unequal halves.
  PlanSpec::Buffer& scratch = other.buffers[1];
  scratch.shape = {40};
  scratch.fragments = {scratch.fragments[0], scratch.fragments[0]};
  for (const size_t layer : {0, 1}) {
    scratch.fragments[layer].lo[0] = layer;
    scratch.fragments[layer].extent[0] = 1;
    scratch.fragments[layer].offset = layer == 0 ? 20 : 0;
  }
  other.copy_lists[3][0].offset = 20;
  other.copy_lists[4][0].offset = 0;
  EXPECT_EQ(DiffOf(spec, other),
            "schedule\n  WINDOWS_CHANGED rank 2: 72 bytes -> 80 bytes\n");
}

TEST(DiffTest, TextShowsTwentyLinesOfARuleAndJsonAll) {
  PlanSpec other = SampleSpec();
  for (int i = 0; i < 25; ++i) {
    other.params.push_back(
        {.name = "extra." + std::to_string(i), .index = {}, .shape = {1}});
  }
  const PlanDifference difference = Compare(SampleSpec(), other);
  const std::string text = DifferenceText(difference);
  EXPECT_NE(text.find("  PARAM_ADDED and 5 more\n"), std::string::npos) << text;
  rapidjson::Document json;
  json.Parse(DifferenceJson(difference).c_str());
  ASSERT_FALSE(json.HasParseError());
  EXPECT_FALSE(json["same"].GetBool());
  EXPECT_EQ(json["differences"].Size(), 25u);
  EXPECT_STREQ(json["differences"][0]["class"].GetString(), "contract");
}

TEST(DiffTest, JsonListsThePairs) {
  PlanSpec other = SampleSpec();
  other.rounds[1] = fb::Route::kNetwork;
  rapidjson::Document json;
  json.Parse(DifferenceJson(Compare(SampleSpec(), other)).c_str());
  ASSERT_FALSE(json.HasParseError());
  const rapidjson::Value& pairs = json["differences"][1]["pairs"];
  ASSERT_EQ(pairs.Size(), 2u);
  EXPECT_EQ(pairs[1][0].GetInt(), 1);
  EXPECT_EQ(pairs[1][1].GetInt(), 2);
}

TEST(DiffTest, JsonCountsWhatTheSummarySays) {
  PlanSpec other = SampleSpec();
  other.skips.clear();
  other.bucket_bytes = 64;
  const PlanDifference difference = Compare(SampleSpec(), other);
  EXPECT_EQ(difference.summary.find("summary: 1 contract, 0 traffic, 1 "
                                    "schedule; moved bytes 288 -> 288; rounds "
                                    "2 -> 2; peak staging bytes 144 -> 144"),
            0u)
      << difference.summary;
  rapidjson::Document json;
  json.Parse(DifferenceJson(difference).c_str());
  ASSERT_FALSE(json.HasParseError());
  EXPECT_EQ(json["counts"]["contract"].GetInt(), 1);
  EXPECT_EQ(json["counts"]["traffic"].GetInt(), 0);
  EXPECT_EQ(json["counts"]["schedule"].GetInt(), 1);
  EXPECT_EQ(json["moved_bytes"][0].GetInt(), 288);
  EXPECT_EQ(json["moved_bytes"][1].GetInt(), 288);
  EXPECT_EQ(json["rounds"][1].GetInt(), 2);
  EXPECT_EQ(json["peak_staging_bytes"][0].GetInt(), 144);
}

// Whoever binds a tensor must know of it.
TEST(DiffTest, ScratchThatAWorkerBindsIsContract) {
  const PlanSpec spec = QuantizedSpec();
  PlanSpec bound = spec;
  bound.programs[0].scratch_buffers = 1;
  EXPECT_EQ(DiffOf(spec, bound),
            "contract\n"
            "  SCRATCH_CHANGED buffer \"scratch.fp8_e4m3\" of rank 0: scratch "
            "-> bound by the worker\n");
}

}  // namespace
}  // namespace refit
