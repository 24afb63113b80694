// What makes two jobs different inputs, and whether a plan is a job's.
#include "compiler/plan_of_job.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "compiler/compile.h"
#include "compiler/inputs_digest.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {
namespace {

// A model with a member of everything.
Model FullModel() {
  Model model;
  model.architecture.latent.emplace();
  model.architecture.mamba.emplace();
  model.architecture.delta.emplace();
  model.params.push_back(
      {.name = "w", .index = {{.numbers = {0, 1}}}, .shape = {4, 2}});
  model.skips.emplace_back().name = "tied";
  return model;
}

// Every change makes other inputs than each other one.
void ExpectDistinct(
    const std::vector<std::function<void(Job&, Model&)>>& changes) {
  std::set<std::string> texts = {CanonicalInputs({}, FullModel())};
  for (size_t i = 0; i < changes.size(); ++i) {
    Job job;
    Model model = FullModel();
    changes[i](job, model);
    EXPECT_TRUE(texts.insert(CanonicalInputs(job, model)).second)
        << "change " << i;
  }
}

TEST(InputsTest, EveryMemberOfTheArchitectureCounts) {
  const auto of = [](auto change) {
    return [change](Job&, Model& model) { change(model.architecture); };
  };
  static constexpr Family kOther = {.model_type = "other"};
  ExpectDistinct({
      of([](Architecture& a) { a.family = &kOther; }),
      of([](Architecture& a) { a.layers = 7; }),
      of([](Architecture& a) { a.mtp_layers = 7; }),
      of([](Architecture& a) { a.mtp_block = 7; }),
      of([](Architecture& a) { a.hidden = 7; }),
      of([](Architecture& a) { a.heads = 7; }),
      of([](Architecture& a) { a.kv_heads = 7; }),
      of([](Architecture& a) { a.head_dim = 7; }),
      of([](Architecture& a) { a.vocab = 7; }),
      of([](Architecture& a) { a.experts = 7; }),
      of([](Architecture& a) { a.tied = true; }),
      of([](Architecture& a) { a.output_gate = true; }),
      of([](Architecture& a) { a.latent = std::nullopt; }),
      of([](Architecture& a) { a.latent->query_rank = 7; }),
      of([](Architecture& a) { a.latent->key_value_rank = 7; }),
      of([](Architecture& a) { a.latent->nope_dim = 7; }),
      of([](Architecture& a) { a.latent->rope_dim = 7; }),
      of([](Architecture& a) { a.latent->value_dim = 7; }),
      of([](Architecture& a) { a.mamba = std::nullopt; }),
      of([](Architecture& a) { a.mamba->heads = 7; }),
      of([](Architecture& a) { a.mamba->head_dim = 7; }),
      of([](Architecture& a) { a.mamba->groups = 7; }),
      of([](Architecture& a) { a.mamba->state = 7; }),
      of([](Architecture& a) { a.delta = std::nullopt; }),
      of([](Architecture& a) { a.delta->key_heads = 7; }),
      of([](Architecture& a) { a.delta->value_heads = 7; }),
      of([](Architecture& a) { a.delta->key_dim = 7; }),
      of([](Architecture& a) { a.delta->value_dim = 7; }),
  });
}

TEST(InputsTest, EveryMemberOfAParamCounts) {
  const auto of = [](auto change) {
    return [change](Job&, Model& model) { change(model.params[0]); };
  };
  ExpectDistinct({
      of([](Param& p) { p.name = "v"; }),
      of([](Param& p) {
        p.index[0].numbers = {0, 2};
      }),
      of([](Param& p) {
        p.shape = {2, 4};
      }),
      of([](Param& p) { p.dtype = DType::kFp16; }),
      of([](Param& p) { p.role = ParamRole::kQuery; }),
      of([](Param& p) { p.first_layer = 7; }),
      of([](Param& p) { p.skip = SkipReason::kFrozen; }),
      of([](Param& p) { p.split = Split::kLastInPairs; }),
      [](Job&, Model& model) { model.mtp = true; },
      [](Job&, Model& model) { model.skips[0].reason = SkipReason::kTied; },
      [](Job&, Model& model) { model.skips[0].detail = "a head"; },
  });
}

// Keys that are younger than the digest stand in it where a job gives them.
TEST(InputsTest, YoungerKeysCountWhereTheyAreGiven) {
  const auto given = [](auto member, auto value) {
    return [member, value](Job& job, Model&) {
      (job.topology.*member).value = value;
      (job.topology.*member).given = true;
    };
  };
  const auto peers = [](Job& job, Model&) {
    job.options.network_peers = {.value = 2, .place = {}, .given = true};
  };
  const auto multiprocessors = [](Job& job, Model&) {
    job.options.direct_multiprocessors = {
        .value = 2, .place = {}, .given = true};
  };
  ExpectDistinct({given(&TopologySpec::machine, "hgx-h200"),
                  given(&TopologySpec::hosts_per_nvlink_domain, 2),
                  given(&TopologySpec::gpus_per_nic, 2),
                  given(&TopologySpec::hosts_per_leaf, 2),
                  given(&TopologySpec::rails, true),
                  given(&TopologySpec::spine_oversubscription, 2), peers,
                  multiprocessors});
  Job job;
  const std::string text = CanonicalInputs(job, FullModel());
  job.topology.gpus_per_nic.value = 2;
  EXPECT_EQ(CanonicalInputs(job, FullModel()), text);
}

TEST(InputsTest, WordsAreNotRunTogether) {
  const auto globs = [](std::vector<std::string> exclude) {
    return [exclude](Job& job, Model&) { job.options.exclude.value = exclude; };
  };
  ExpectDistinct({globs({"a,b"}), globs({"a", "b"}), globs({"a b"}),
                  globs({"a 1:b"}), globs({"a", "b", ""})});
}

TEST(InputsTest, WhatMovesNothingDoesNotCount) {
  Job job;
  Model model = FullModel();
  const std::string text = CanonicalInputs(job, model);
  job.source.tensor_parallel.place.offset = 7;
  job.model.config_path = "elsewhere/config.json";
  model.quant_method = {.value = "awq", .place = {}, .given = true};
  EXPECT_EQ(CanonicalInputs(job, model), text);
}

// Jobs of one tensor of eight rows.
std::string JobText(const std::string& source, const std::string& more = "") {
  return R"json({"model": {"parameters": [
                   {"name": "w", "shape": [8, 4], "dtype": "bf16"}]},
                 "source": {"layout": "generic",
                   "meshes": {"m": {"axes": {"x": 2}}},
                   "tensors": [{"match": "*", "mesh": "m",
                                "placements": [")json" +
         source + R"json("]}]},
                 "destination": {"layout": "generic",
                   "meshes": {"m": {"axes": {"x": 2}}},
                   "tensors": [{"match": "*", "mesh": "m",
                                "placements": ["Shard(0)"]}]})json" +
         more + "}";
}

Job ReadText(const std::string& text) {
  Diagnostics diagnostics;
  std::optional<Job> job =
      ReadJobText(std::make_shared<const SourceFile>(
                      SourceFile{.path = "job.json", .text = text}),
                  "", diagnostics, "refitc");
  EXPECT_TRUE(job.has_value()) << diagnostics.Render();
  return *std::move(job);
}

// What keeps the plan of `planned` from being that of `asked`.
std::string DifferenceOf(const std::string& planned, const std::string& asked) {
  Diagnostics diagnostics;
  absl::StatusOr<std::vector<uint8_t>> bytes =
      Compile(ReadText(planned), {}, diagnostics);
  EXPECT_TRUE(bytes.ok()) << diagnostics.Render();
  const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(*std::move(bytes));
  EXPECT_TRUE(plan.ok());
  absl::StatusOr<std::string> difference =
      DifferenceFromJob(ReadText(asked), *plan, diagnostics);
  EXPECT_TRUE(difference.ok()) << diagnostics.Render();
  return *std::move(difference);
}

TEST(PlanOfJobTest, APlanIsThatOfEveryJobThatCompilesToIt) {
  const std::string job = JobText("Shard(1)");
  EXPECT_EQ(DifferenceOf(job, job), "");
  // Other inputs, written out or without effect.
  EXPECT_EQ(DifferenceOf(
                job, JobText("Shard(1)", R"(, "options": {"peer": "direct"})")),
            "");
  EXPECT_EQ(
      DifferenceOf(job, JobText("Shard(1)",
                                R"(, "topology": {"peer_gigabytes_per_second":
                                                  300})")),
      "");
}

TEST(PlanOfJobTest, TheFirstDifferenceIsToldFromTheJobToThePlan) {
  EXPECT_EQ(DifferenceOf(
                JobText("Shard(1)"),
                JobText("Shard(1)", R"(, "options": {"bucket_bytes": 4096})")),
            "job -> plan: LIMITS_CHANGED bucket_bytes 4096 -> 268435456");
  EXPECT_EQ(DifferenceOf(JobText("Shard(1)"), JobText("Replicate"))
                .find("job -> plan: SHAPE_CHANGED buffer \"w\" of ranks 0..1: "
                      "[8, 4] -> [8, 2]"),
            0u);
}

}  // namespace
}  // namespace refit
