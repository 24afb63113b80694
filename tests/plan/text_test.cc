#include "plan/text/text.h"

#include <gtest/gtest.h>
#include <rapidjson/document.h>

#include <string>

#include "plan/diff/diff.h"
#include "plan/text/fact_writer.h"
#include "tests/plan/plan_spec.h"

namespace refit {
namespace {

// What follows the first line, which holds the digests.
std::string TextOf(const PlanSpec& spec, const TextOptions& options) {
  const std::string text = PlanText(OpenSpec(spec), options);
  return text.substr(text.find('\n') + 1);
}

constexpr char kSampleText[] =
    R"(ranks source 0..1 destination 2..3
host 0 ranks 0..3
limits bucket 128 bytes staging 256 bytes slots 2 operations_per_round 8
stats moved 288 bytes local 0 peer 288 network 0
stats lower_bound 0.001 s predicted 0.0025 s binding_link "egress of rank 0"
param p0 "model.layers.{0}.mlp.up_proj.weight" {0}=0..1 bf16 [4, 8]
param p1 "model.norm.weight" bf16 [8]
param p2 "lm_head.weight" bf16 [16, 8] skip tied
skip "lm_head.weight" tied "tied to model.embed_tokens.weight"
buffer b0 "decoder.layers.{0}.mlp.linear_fc1.weight" {0}=0..1 bf16 [2, 8] ranks 0
  holds p0 [0:2, 0:2, 0:8] at 0 strides [16, 8, 1]
buffer b1 "decoder.layers.{0}.mlp.linear_fc1.weight" {0}=0..1 bf16 [2, 8] ranks 1
  holds p0 [0:2, 2:4, 0:8] at 0 strides [16, 8, 1]
buffer b2 "decoder.final_layernorm.weight" bf16 [8] ranks 0..1
  holds p1 [0:8] at 0 strides [1]
buffer b3 "model.layers.{0}.mlp.up_proj.weight" {0}=0..1 bf16 [5, 8] ranks 2..3
  holds p0 [0:2, 0:4, 0:8] at 0 strides [40, 8, 1]
  fill extents [2, 8] at 32 strides [40, 1]
buffer b4 "model.norm.weight" bf16 [8] ranks 2..3
  holds p1 [0:8] at 0 strides [1]
rounds 0..1 peer
rank 0 source host 0 staging 144 bytes
  slot 0 b0
  slot 1 b2
  round 0 send -> 2 80 bytes at 0 copies c1
  round 1 send -> 3 64 bytes at 80 copies c2
rank 1 source host 0 staging 144 bytes
  slot 0 b1
  slot 1 b2
  round 0 send -> 3 80 bytes at 0 copies c1
  round 1 send -> 2 64 bytes at 80 copies c2
rank 2 destination host 0 staging 144 bytes
  slot 0 b3
  slot 1 b4
  fills c7
  round 0 recv <- 0 80 bytes at 0 copies c3
  round 1 recv <- 1 64 bytes at 80 copies c6
rank 3 destination host 0 staging 144 bytes
  slot 0 b3
  slot 1 b4
  fills c7
  round 0 recv <- 1 80 bytes at 0 copies c4
  round 1 recv <- 0 64 bytes at 80 copies c5
copies c1
  slot 0 at 0 loops [2 x 16, 16 x 1] bf16 staging 0
  slot 1 at 0 loops [8 x 1] bf16 staging 64
copies c2
  slot 0 at 0 loops [2 x 16, 16 x 1] bf16 staging 0
copies c3
  slot 0 at 0 loops [2 x 40, 16 x 1] bf16 staging 0
  slot 1 at 0 loops [8 x 1] bf16 staging 64
copies c4
  slot 0 at 16 loops [2 x 40, 16 x 1] bf16 staging 0
  slot 1 at 0 loops [8 x 1] bf16 staging 64
copies c5
  slot 0 at 0 loops [2 x 40, 16 x 1] bf16 staging 0
copies c6
  slot 0 at 16 loops [2 x 40, 16 x 1] bf16 staging 0
copies c7
  slot 0 at 32 loops [2 x 40, 8 x 1] bf16 staging 0
)";

std::string FactsIn(FactForm form) {
  FactWriter facts(form);
  facts.Object("", [&] {
    facts.Number("only_json", 1);
    facts.List("rows", std::vector{0u, 7u}, [&](uint32_t row) {
      facts.Positive("row", row);
      facts.Name("name", "a\"b");
      facts.Flag("odd", row % 2 == 1);
      facts.Shown("only_text", "!");
      facts.Line("{name}| row {row}| odd{odd}|{only_text}");
    });
  });
  return facts.Take();
}

TEST(FactWriterTest, APartOfALineNeedsAllItsFacts) {
  EXPECT_EQ(FactsIn(FactForm::kText), "\"a\\\"b\"!\n\"a\\\"b\" row 7 odd!\n");
}

TEST(FactWriterTest, JsonHasEachFactWithItsKey) {
  rapidjson::Document json;
  json.Parse(FactsIn(FactForm::kJson).c_str());
  ASSERT_FALSE(json.HasParseError());
  EXPECT_EQ(json["only_json"].GetInt(), 1);
  const rapidjson::Value& rows = json["rows"];
  ASSERT_EQ(rows.Size(), 2u);
  EXPECT_FALSE(rows[0].HasMember("row"));
  EXPECT_FALSE(rows[0]["odd"].GetBool());
  EXPECT_EQ(rows[1]["row"].GetInt(), 7);
  EXPECT_TRUE(rows[1]["odd"].GetBool());
  EXPECT_STREQ(rows[1]["name"].GetString(), "a\"b");
  EXPECT_FALSE(rows[1].HasMember("only_text"));
}

TEST(PlanTextTest, SaysEveryFactOfAPlan) {
  EXPECT_EQ(TextOf(SampleSpec(), {}), kSampleText);
}

TEST(PlanTextTest, WhatARankDealsOutIsCalledSo) {
  const std::string text = TextOf(DealtSpec(), {});
  EXPECT_NE(text.find("\ndealt 16 bytes by rank 1 to 2\n"), std::string::npos)
      << text;
  EXPECT_NE(text.find("\n  round 2 deal -> 2 16 bytes"), std::string::npos);
  rapidjson::Document json;
  json.Parse(PlanJson(OpenSpec(DealtSpec()), {}).c_str());
  ASSERT_FALSE(json.HasParseError());
  const rapidjson::Value& messages = json["ranks"][1]["messages"];
  EXPECT_FALSE(messages[1].HasMember("deals"));
  EXPECT_TRUE(messages[2]["deals"].GetBool());
}

TEST(PlanTextTest, ASourceThatSendsInsideAHostDealsNothingOut) {
  PlanSpec spec = DealtSpec();
  spec.programs[0].host = 1;
  EXPECT_NE(TextOf(spec, {}).find("\n  round 0 send -> 1 16 bytes"),
            std::string::npos);
  rapidjson::Document json;
  json.Parse(PlanJson(OpenSpec(spec), {}).c_str());
  EXPECT_FALSE(json["ranks"][0]["messages"][0].HasMember("deals"));
}

TEST(PlanTextTest, HeaderNamesFormatAndDigests) {
  const PlanFile plan = OpenSpec(SampleSpec());
  const std::string text = PlanText(plan, {});
  EXPECT_EQ(text.substr(0, text.find('\n')),
            "plan 1.1 body " + DigestText(*plan.plan().body_digest()) +
                " inputs 00000000012345670000000089abcdef");
}

TEST(PlanTextTest, RequirementsFollowTheRanks) {
  PlanSpec spec = SampleSpec();
  spec.requirements = {{fb::Side::kSource, "moe_backend", "triton"},
                       {fb::Side::kDestination, "expert_placement", "linear"}};
  EXPECT_NE(TextOf(spec, {}).find("\nrequires source moe_backend triton\n"
                                  "requires destination expert_placement "
                                  "linear\nlimits "),
            std::string::npos);
  rapidjson::Document json;
  json.Parse(PlanJson(OpenSpec(spec), {}).c_str());
  ASSERT_FALSE(json.HasParseError());
  const rapidjson::Value& requirements = json["requirements"];
  ASSERT_EQ(requirements.Size(), 2u);
  EXPECT_STREQ(requirements[0]["side"].GetString(), "source");
  EXPECT_STREQ(requirements[1]["key"].GetString(), "expert_placement");
  EXPECT_STREQ(requirements[1]["value"].GetString(), "linear");
}

TEST(PlanTextTest, ATopologyFollowsTheRanks) {
  PlanSpec spec = SampleSpec();
  spec.topology = {.hosts_per_nvlink_domain = 18,
                   .gpus_per_nic = 2,
                   .hosts_per_leaf = 4,
                   .spine_oversubscription = 1.5};
  EXPECT_NE(TextOf(spec, {}).find(
                "\ntopology hosts_per_nvlink_domain 18 gpus_per_nic 2 "
                "hosts_per_leaf 4 spine_oversubscription 1.5 peer 3.7e+11 "
                "network 5e+10 bytes per second\nlimits "),
            std::string::npos);
  rapidjson::Document json;
  json.Parse(PlanJson(OpenSpec(spec), {}).c_str());
  ASSERT_FALSE(json.HasParseError());
  const rapidjson::Value& topology = json["topology"];
  EXPECT_FALSE(topology.HasMember("machine"));
  EXPECT_EQ(topology["hosts_per_nvlink_domain"].GetUint(), 18u);
  EXPECT_EQ(topology["gpus_per_nic"].GetUint(), 2u);
  EXPECT_EQ(topology["hosts_per_leaf"].GetUint(), 4u);
  EXPECT_FALSE(topology["rails"].GetBool());
  EXPECT_EQ(topology["spine_oversubscription"].GetDouble(), 1.5);
  EXPECT_EQ(topology["network_bytes_per_second"].GetDouble(), 50e9);
}

TEST(PlanTextTest, ADeltaFollowsTheRanks) {
  PlanSpec spec = SampleSpec();
  spec.delta = {.changes = fb::DeltaChanges::kBitmap,
                .dense_every = 7,
                .check = false,
                .rungs = {6, 4}};
  EXPECT_NE(TextOf(spec, {}).find("\ndelta changes bitmap dense_every 7 rungs "
                                  "1/64 1/16\nlimits "),
            std::string::npos);
  rapidjson::Document json;
  json.Parse(PlanJson(OpenSpec(spec), {}).c_str());
  ASSERT_FALSE(json.HasParseError());
  EXPECT_STREQ(json["delta"]["changes"].GetString(), "bitmap");
  EXPECT_EQ(json["delta"]["dense_every"].GetUint(), 7u);
  EXPECT_FALSE(json["delta"]["check"].GetBool());
  json.Parse(StatsJson(OpenSpec(spec)).c_str());
  EXPECT_EQ(json["delta"]["snapshot_bytes_max"].GetUint64(), 0u);
  spec.delta->changes = fb::DeltaChanges::kSnapshot;
  json.Parse(StatsJson(OpenSpec(spec)).c_str());
  EXPECT_GT(json["delta"]["snapshot_bytes_max"].GetUint64(), 0u);
  for (const std::string& text :
       {PlanJson(OpenSpec(spec), {}), StatsJson(OpenSpec(spec))}) {
    json.Parse(text.c_str());
    ASSERT_EQ(json["delta"]["rungs"].Size(), 2u);
    EXPECT_EQ(json["delta"]["rungs"][0].GetUint(), 6u);
  }
}

TEST(PlanTextTest, PostHooksFollowWhatTheirBufferHolds) {
  PlanSpec spec = SampleSpec();
  spec.buffers[4].post_hooks = {{"add-one", "add 1 to it"},
                                {"negative-exp", "make it -exp"}};
  const std::string shown =
      "buffer b4 \"model.norm.weight\" bf16 [8] ranks 2..3\n"
      "  holds p1 [0:8] at 0 strides [1]\n"
      "  post-hook add-one \"add 1 to it\"\n"
      "  post-hook negative-exp \"make it -exp\"\n";
  EXPECT_NE(TextOf(spec, {}).find(shown), std::string::npos);
  rapidjson::Document json;
  json.Parse(PlanJson(OpenSpec(spec), {}).c_str());
  ASSERT_FALSE(json.HasParseError());
  const rapidjson::Value& hooks = json["buffers"][4]["post_hooks"];
  ASSERT_EQ(hooks.Size(), 2u);
  EXPECT_STREQ(hooks[0]["name"].GetString(), "add-one");
  EXPECT_STREQ(hooks[1]["detail"].GetString(), "make it -exp");
  EXPECT_FALSE(json["buffers"][3].HasMember("post_hooks"));
}

TEST(PlanTextTest, ScratchHasItsWindow) {
  const PlanFile plan = OpenSpec(WindowedSpec());
  const std::string text = PlanText(plan, {.rank = 0});
  EXPECT_NE(text.find("staging 96 bytes scratch 144 bytes\n"
                      "  slot 0 b0\n"
                      "  slot 1 b1 scratch at 0 rounds 0\n"
                      "  slot 2 b2 scratch at 128 rounds 0\n"
                      "  slot 3 b5 scratch at 0 rounds 1\n"),
            std::string::npos)
      << text;
  rapidjson::Document json;
  json.Parse(PlanJson(plan, {}).c_str());
  const rapidjson::Value& rank = json["ranks"][0];
  EXPECT_EQ(rank["scratch_bytes"].GetUint64(), 144u);
  const rapidjson::Value& slot = rank["slots"][4];
  EXPECT_EQ(slot["arena_offset"].GetUint64(), 128u);
  EXPECT_EQ(slot["begin_round"].GetUint(), 1u);
  EXPECT_EQ(slot["end_round"].GetUint(), 2u);
}

TEST(PlanTextTest, ProvenanceIsNotPrinted) {
  PlanSpec spec = SampleSpec();
  const std::string text = PlanText(OpenSpec(spec), {});
  spec.producer = "refitc 9.9.9";
  EXPECT_EQ(PlanText(OpenSpec(spec), {}), text);
}

TEST(PlanTextTest, RankShowsOnlyWhatThatRankUses) {
  EXPECT_EQ(TextOf(SampleSpec(), {.rank = 3}),
            R"(ranks source 0..1 destination 2..3
host 0 ranks 0..3
limits bucket 128 bytes staging 256 bytes slots 2 operations_per_round 8
stats moved 288 bytes local 0 peer 288 network 0
stats lower_bound 0.001 s predicted 0.0025 s binding_link "egress of rank 0"
param p0 "model.layers.{0}.mlp.up_proj.weight" {0}=0..1 bf16 [4, 8]
param p1 "model.norm.weight" bf16 [8]
skip "lm_head.weight" tied "tied to model.embed_tokens.weight"
buffer b3 "model.layers.{0}.mlp.up_proj.weight" {0}=0..1 bf16 [5, 8] ranks 2..3
  holds p0 [0:2, 0:4, 0:8] at 0 strides [40, 8, 1]
  fill extents [2, 8] at 32 strides [40, 1]
buffer b4 "model.norm.weight" bf16 [8] ranks 2..3
  holds p1 [0:8] at 0 strides [1]
rounds 0..1 peer
rank 3 destination host 0 staging 144 bytes
  slot 0 b3
  slot 1 b4
  fills c7
  round 0 recv <- 1 80 bytes at 0 copies c4
  round 1 recv <- 0 64 bytes at 80 copies c5
copies c4
  slot 0 b3 at 16 loops [2 x 40, 16 x 1] bf16 staging 0
  slot 1 b4 at 0 loops [8 x 1] bf16 staging 64
copies c5
  slot 0 b3 at 0 loops [2 x 40, 16 x 1] bf16 staging 0
copies c7
  slot 0 b3 at 32 loops [2 x 40, 8 x 1] bf16 staging 0
)");
}

// Its lines that begin with `prefix`, joined.
std::string Lines(const std::string& text, const std::string& prefix) {
  std::string lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin) + 1;
    if (text.compare(begin, prefix.size(), prefix) == 0) {
      lines += text.substr(begin, end - begin);
    }
    begin = end;
  }
  return lines;
}

TEST(PlanTextTest, TensorOfAParamShowsTheBuffersAndMessagesThatCarryIt) {
  const std::string text =
      TextOf(SampleSpec(), {.tensor_glob = "model.norm.*"});
  EXPECT_EQ(text.substr(text.find("param")),
            R"(param p1 "model.norm.weight" bf16 [8]
buffer b2 "decoder.final_layernorm.weight" bf16 [8] ranks 0..1
  holds p1 [0:8] at 0 strides [1]
buffer b4 "model.norm.weight" bf16 [8] ranks 2..3
  holds p1 [0:8] at 0 strides [1]
round 0 peer
rank 0 source host 0 staging 144 bytes
  slot 1 b2
  round 0 send -> 2 80 bytes at 0 copies c1
rank 1 source host 0 staging 144 bytes
  slot 1 b2
  round 0 send -> 3 80 bytes at 0 copies c1
rank 2 destination host 0 staging 144 bytes
  slot 1 b4
  round 0 recv <- 0 80 bytes at 0 copies c3
rank 3 destination host 0 staging 144 bytes
  slot 1 b4
  round 0 recv <- 1 80 bytes at 0 copies c4
copies c1
  slot 1 at 0 loops [8 x 1] bf16 staging 64
copies c3
  slot 1 at 0 loops [8 x 1] bf16 staging 64
copies c4
  slot 1 at 0 loops [8 x 1] bf16 staging 64
)");
}

TEST(PlanTextTest, TensorMatchesNamesOfSingleLayers) {
  // Layer 1 alone: the copy of layer 0 in a list of its own is left out.
  PlanSpec spec = SampleSpec();
  spec.copy_lists[6] = {
      {.slot = 0, .offset = 16, .loops = {{16, 1}}, .staging_offset = 0},
      {.slot = 0, .offset = 56, .loops = {{16, 1}}, .staging_offset = 32}};
  const std::string text = TextOf(
      spec, {.rank = 2, .tensor_glob = "model.layers.1.mlp.up_proj.weight"});
  EXPECT_EQ(text.substr(text.find("\ncopies c6") + 1),
            "copies c6\n"
            "  slot 0 b3 at 56 loops [16 x 1] bf16 staging 32\n"
            "copies c7\n"
            "  slot 0 b3 at 32 loops [2 x 40, 8 x 1] bf16 staging 0\n");
}

TEST(PlanTextTest, TensorOfAFrameworksNameShowsTheParamsItHolds) {
  const std::string text =
      TextOf(SampleSpec(), {.tensor_glob = "*linear_fc1*"});
  EXPECT_EQ(Lines(text, "param"),
            "param p0 \"model.layers.{0}.mlp.up_proj.weight\" {0}=0..1 bf16 "
            "[4, 8]\n");
  EXPECT_EQ(Lines(text, "rank "),
            "rank 0 source host 0 staging 144 bytes\n"
            "rank 1 source host 0 staging 144 bytes\n");
}

TEST(PlanTextTest, TensorThatNothingMovesStillShowsItsSkip) {
  const std::string text = TextOf(SampleSpec(), {.tensor_glob = "lm_head.*"});
  EXPECT_EQ(
      text.substr(text.find("param")),
      "param p2 \"lm_head.weight\" bf16 [16, 8] skip tied\n"
      "skip \"lm_head.weight\" tied \"tied to model.embed_tokens.weight\"\n");
}

TEST(PlanTextTest, TensorsAreThereByTheNameOfAParamABufferOrASkip) {
  const PlanFile plan = OpenSpec(SampleSpec());
  EXPECT_TRUE(HasTensor(plan, "model.layers.1.mlp.up_proj.weight"));
  EXPECT_TRUE(HasTensor(plan, "decoder.final_*"));
  EXPECT_TRUE(HasTensor(plan, "lm_head.weight"));
  EXPECT_FALSE(HasTensor(plan, "model.layers.2.*"));
  EXPECT_FALSE(HasTensor(plan, "norm"));
}

TEST(PlanTextTest, NamesAreEscaped) {
  PlanSpec spec = SampleSpec();
  spec.params[1].name = "a\"b\nc";
  EXPECT_EQ(Lines(TextOf(spec, {}), "param p1"),
            "param p1 \"a\\\"b\\nc\" bf16 [8]\n");
}

TEST(PlanJsonTest, CarriesTheFactsOfTheText) {
  rapidjson::Document json;
  json.Parse(PlanJson(OpenSpec(SampleSpec()), {}).c_str());
  ASSERT_FALSE(json.HasParseError());
  EXPECT_EQ(json["source_ranks"].GetInt(), 2);
  EXPECT_EQ(json["params"].Size(), 3u);
  EXPECT_STREQ(json["params"][2]["skip"].GetString(), "tied");
  EXPECT_EQ(json["params"][0]["index"][0][1].GetInt(), 1);
  EXPECT_EQ(json["buffers"].Size(), 5u);
  EXPECT_EQ(json["buffers"][1]["holds"][0]["lo"][1].GetInt(), 2);
  EXPECT_STREQ(json["buffers"][3]["regions"][0]["kind"].GetString(), "fill");
  EXPECT_EQ(json["ranks"][2]["fills"].GetInt(), 7);
  EXPECT_EQ(json["ranks"][2]["messages"][1]["peer"].GetInt(), 1);
  EXPECT_EQ(json["copy_lists"][2]["copies"][0]["stride"][0].GetInt(), 40);
}

TEST(PlanJsonTest, RankRestrictsTheTables) {
  rapidjson::Document json;
  json.Parse(PlanJson(OpenSpec(SampleSpec()), {.rank = 0}).c_str());
  ASSERT_FALSE(json.HasParseError());
  EXPECT_EQ(json["ranks"].Size(), 1u);
  EXPECT_EQ(json["buffers"].Size(), 2u);
  EXPECT_EQ(json["copy_lists"].Size(), 2u);
}

TEST(PlanJsonTest, AGlobRestrictsTheQuantizations) {
  PlanSpec spec = QuantizedSpec();
  spec.params.push_back({.name = "lm_head.weight",
                         .index = {},
                         .shape = {8},
                         .skip = fb::SkipReason::kTied});
  const PlanFile plan = OpenSpec(spec);
  const TextOptions options = {.tensor_glob = "lm_head.*"};
  EXPECT_EQ(Lines(PlanText(plan, options), "quantization"), "");
  rapidjson::Document json;
  json.Parse(PlanJson(plan, options).c_str());
  EXPECT_EQ(json["params"].Size(), 1u);
  EXPECT_EQ(json["quantizations"].Size(), 0u);
}

TEST(StatsTextTest, SaysBytesTimesAndSizes) {
  const std::string text = StatsText(OpenSpec(SampleSpec()));
  EXPECT_EQ(
      text.substr(0, text.find("plan file")),
      R"(ranks                                     4        2 source, 2 destination, on 1 host
moved                                   288 bytes
  local                                   0 bytes  on one GPU
  peer                                  288 bytes  inside a host
  network                                 0 bytes  between hosts
  direct                                  0 bytes  stored into mapped tensors, without staging
sent per source rank, max               144 bytes  rank 0
sent per source rank, mean              144 bytes
  imbalance                           1.000        max / mean
received per destination rank, max      144 bytes  rank 2
received per destination rank, mean     144 bytes
  imbalance                           1.000        max / mean
lower bound                           0.001 s      1.000 ms
predicted                            0.0025 s      2.500 ms, 2.500 x the lower bound
  binding link                                     egress of rank 0
messages                                  4
  largest staged                         80 bytes  limit 128
rounds                                    2
  operations of a rank, max               1        rank 0 in round 0, limit 8
staging of a rank, max                  144 bytes  rank 0, limit 256
params                                    4        in 3 stacks
tensors of all ranks                     12        in 5 buffer entries
fragments                                 5
copies                                   10        in 8 lists
skips                                     2
)");
}

TEST(StatsTextTest, CountsTheTensorsOfAPostHook) {
  PlanSpec spec = SampleSpec();
  spec.buffers[3].post_hooks = {{"negative-exp", "make it -exp"}};
  EXPECT_EQ(Lines(StatsText(OpenSpec(spec)), "post-hook"),
            "post-hook negative-exp                    4        tensors of all "
            "ranks\n");
}

TEST(StatsTextTest, SaysInHowManyWavesScratchIsUsed) {
  // 18 bytes of values and 4 scales are a wave, of which two take turns.
  EXPECT_EQ(Lines(StatsText(OpenSpec(WindowedSpec())), "  in waves"),
            "  in waves                                2        each in "
            "windows of at most 34 bytes\n");
  EXPECT_EQ(Lines(StatsText(OpenSpec(QuantizedSpec())), "  in waves"), "");
}

TEST(StatsTextTest, NamesTheBusiestSender) {
  PlanSpec spec = SampleSpec();
  // Rank 0 brings both norms.
  spec.programs[1].messages[0] = SendTo(3, 0, 2, 0, 64);
  spec.programs[0].messages[1] = SendTo(3, 1, 1, 64, 80);
  const std::string text = StatsText(OpenSpec(spec));
  EXPECT_EQ(Lines(text, "sent per source rank, max"),
            "sent per source rank, max               160 bytes  rank 0\n");
  EXPECT_NE(
      text.find(
          "  imbalance                           1.111        max / mean\n"),
      std::string::npos);
}

// Four direct messages of 2^62 bytes, as a hostile file may have: no sum wraps.
TEST(TextTest, SumsThatNoNumberHoldsAreTheLargest) {
  constexpr uint64_t kElements = uint64_t{1} << 61;
  PlanSpec spec;
  spec.source_ranks = 4;
  spec.params = {{.name = "w", .index = {}, .shape = {kElements}}};
  spec.buffers = {{.name = "w",
                   .index = {},
                   .shape = {kElements},
                   .fragments = {{.param = 0,
                                  .lo = {0},
                                  .extent = {kElements},
                                  .offset = 0,
                                  .stride = {1}}},
                   .regions = {}}};
  spec.copy_lists = {{}, {{.slot = 0, .offset = 0, .loops = {{kElements, 1}}}}};
  spec.slots = 1;
  spec.programs.resize(5);
  for (uint32_t rank = 0; rank < 4; ++rank) {
    spec.rounds.push_back(fb::Route::kPeer);
    spec.mechanisms.push_back(fb::Mechanism::kDirect);
    spec.programs[rank].messages = {SendTo(4, rank, 1, 0, 2 * kElements)};
    spec.programs[4].messages.push_back(
        RecvFrom(rank, rank, 1, 0, 2 * kElements));
  }
  for (PlanSpec::Program& program : spec.programs) program.buffers = {0};
  const PlanFile plan = OpenSpec(spec);
  rapidjson::Document json;
  json.Parse(StatsJson(plan).c_str());
  ASSERT_FALSE(json.HasParseError());
  EXPECT_EQ(json["moved_bytes"].GetUint64(), ~uint64_t{0});
  EXPECT_EQ(json["peer_bytes"].GetUint64(), ~uint64_t{0});
  EXPECT_EQ(ComparePlans(plan, plan).totals_a.moved_bytes, ~uint64_t{0});
}

}  // namespace
}  // namespace refit
