// Whole compilations of jobs that once went wrong.
#include "compiler/compile.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "plan/plan_file.h"
#include "tests/compiler/compile_testing.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {
namespace {

TEST(CompileTest, OrderOfTheListedParametersDoesNotMatter) {
  const std::string a =
      R"({"name": "a.10.w", "shape": [8, 4], "dtype": "bf16"})";
  const std::string b =
      R"({"name": "a.9.w", "shape": [8, 4], "dtype": "bf16"})";
  const std::string c = R"({"name": "c", "shape": [6], "dtype": "fp32"})";
  const auto plan_of = [](const std::string& parameters) {
    std::vector<uint8_t> plan;
    EXPECT_EQ(ErrorsOf(GenericJob(parameters, GenericSide(2, "Shard(0)"),
                                  GenericSide(3, "Shard(0)")),
                       &plan),
              "");
    return plan;
  };
  const std::vector<uint8_t> plan = plan_of(a + "," + b + "," + c);
  EXPECT_EQ(plan_of(c + "," + b + "," + a), plan);
  EXPECT_EQ(plan_of(b + "," + c + "," + a), plan);
}

TEST(CompileTest, NoByteOfAPlanCanChangeUnseen) {
  std::vector<uint8_t> plan;
  ASSERT_EQ(
      ErrorsOf(
          GenericJob(R"({"name": "w", "shape": [8, 8], "dtype": "bf16"})",
                     GenericSide(2, "Shard(0)"), GenericSide(2, "Shard(1)")),
          &plan),
      "");
  ASSERT_TRUE(PlanFile::FromBytes(plan).ok());
  for (size_t at = 0; at < plan.size(); ++at) {
    for (const uint8_t flip : {0x01, 0x80, 0xff}) {
      plan[at] ^= flip;
      EXPECT_FALSE(PlanFile::FromBytes(plan).ok()) << "byte " << at;
      plan[at] ^= flip;
    }
  }
}

TEST(CompileTest, ConfigWithoutItsSizesIsReported) {
  const TemporaryDirectory directory;
  directory.Write("config.json",
                  R"({"model_type": "llama", "num_attention_heads": 4,
                      "num_key_value_heads": 2, "intermediate_size": 8,
                      "num_hidden_layers": 1, "vocab_size": 8})");
  const std::string job =
      directory.Write("job.json",
                      R"({"model": "config.json", "source": {"layout": "fsdp"},
          "destination": {"layout": "vllm"}})");
  Diagnostics diagnostics;
  EXPECT_FALSE(CompileFile(job, CompileOptions(), diagnostics).ok());
  EXPECT_NE(diagnostics.Render().find("missing key \"hidden_size\""),
            std::string::npos)
      << diagnostics.Render();
}

// 256 FSDP ranks name the same tensors: names are checked once, not by rank.
TEST(CompileTest, RowsThatEnginesPermuteAreNotQuantized) {
  const TemporaryDirectory directory;
  directory.Write("config.json", R"({"model_type": "llama4_text",
      "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 1,
      "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 64,
      "num_local_experts": 2, "intermediate_size": 128})");
  const auto errors = [&](const std::string& more) {
    const std::string job = directory.Write(
        "job.json", R"({"model": "config.json", "source": {"layout": "fsdp"},
            "destination": {"layout": "vllm", "dtype": "fp8_e4m3_block128"})" +
                        more + "}");
    Diagnostics diagnostics;
    EXPECT_FALSE(CompileFile(job, CompileOptions(), diagnostics).ok());
    return diagnostics.Render();
  };
  EXPECT_NE(errors("").find(
                "destination.dtype fp8_e4m3_block128: engines permute the rows "
                "of queries and keys, across blocks, as "
                "\"model.layers.0.self_attn.q_proj.weight\"; wanted bf16, fp16 "
                "or fp32"),
            std::string::npos);
  EXPECT_NE(errors(R"(, "options": {"exclude": ["*.self_attn.*"]})")
                .find("experts that the checkpoint has in one tensor are not "
                      "quantized by a refit yet"),
            std::string::npos);
}

TEST(CompileTest, ManyRanksMayHoldTheSameNames) {
  std::string parameters;
  for (int expert = 0; expert < 20000; ++expert) {
    parameters += (expert == 0 ? "" : ",\n");
    parameters += R"({"name": "e.)" + std::to_string(expert) +
                  R"(.w", "shape": [256, 8], "dtype": "bf16"})";
  }
  EXPECT_EQ(ErrorsOf(GenericJob(parameters, GenericSide(256, "Shard(0)"),
                                GenericSide(1, "Replicate"))),
            "");
}

TEST(CompileTest, PredictionLayersThatAreNotKnownAreAnErrorOfTheJob) {
  const TemporaryDirectory directory;
  const std::string sizes = R"("hidden_size": 4, "head_dim": 2,
      "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 64,
      "num_hidden_layers": 1, "intermediate_size": 4)";
  const std::pair<std::string, std::string> configs[] = {
      {"deepseek_v4", R"("q_lora_rank": 2, "o_lora_rank": 3, "o_groups": 2,
        "hc_mult": 2, "n_routed_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 4, "compress_ratios": [0]})"},
      {"minimax_m2", R"("num_local_experts": 2, "use_routing_bias": true,
                     "num_mtp_modules": 1})"},
      {"qwen3_5_text", R"("layer_types": ["full_attention"],
        "linear_num_key_heads": 1, "linear_num_value_heads": 1,
        "linear_key_head_dim": 1, "linear_value_head_dim": 1,
        "linear_conv_kernel_dim": 2})"}};
  for (const auto& [family, more] : configs) {
    const std::string config = directory.Write(
        "config.json",
        absl::StrCat("{\"model_type\": \"", family, "\", ", sizes, ", ", more));
    const std::string errors = ErrorsOf("{\"model\": \"" + config + R"(",
"source": {"layout": "fsdp", "mtp": true},
"destination": {"layout": "vllm"}})");
    const size_t at = errors.find("job.json");
    ASSERT_NE(at, std::string::npos) << errors;
    EXPECT_EQ(errors.substr(at, errors.find('\n', at) - at),
              "job.json:2:37: error: source.mtp is true, and the multi-token-"
              "prediction layers of " +
                  family + " are not known; wanted \"mtp\": false");
  }
}

TEST(CompileTest, AnEnginesDefaultIsAnotherInputThanTheSameWord) {
  const TemporaryDirectory directory;
  const std::string config = directory.Write("config.json", R"({
      "model_type": "glm4_moe_lite", "hidden_size": 4, "vocab_size": 64,
      "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": null,
      "kv_lora_rank": 2, "intermediate_size": 4,
      "qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 1,
      "moe_intermediate_size": 4, "n_routed_experts": 2,
      "n_shared_experts": 1})");
  const auto digest_with = [&](const std::string& key) {
    std::vector<uint8_t> bytes;
    EXPECT_EQ(ErrorsOf(R"({"model": ")" + config +
                           R"(", "source": {"layout": "megatron"},
                               "destination": {"layout": "sglang")" +
                           key + "}}",
                       &bytes),
              "");
    const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(std::move(bytes));
    EXPECT_TRUE(plan.ok());
    return DigestText(*plan->plan().inputs_digest());
  };
  EXPECT_NE(digest_with(""), digest_with(R"(, "shared_experts": "tensor")"));
}

// The body's digest names the plan, on ranks whose CPUs may round otherwise.
TEST(CompileTest, EstimatesStandOutsideTheBody) {
  const PlanFile plan = OpenJob(
      GenericJob(R"({"name": "w", "shape": [4096, 4096], "dtype": "bf16"})",
                 GenericSide(2, "Shard(0)"), GenericSide(2, "Shard(1)"), ""));
  const fb::Stats& stats = *plan.body().stats();
  EXPECT_GT(stats.moved_bytes(), 0u);
  EXPECT_EQ(stats.lower_bound_seconds(), 0);
  EXPECT_EQ(stats.predicted_seconds(), 0);
  EXPECT_EQ(stats.binding_link(), nullptr);
  const Estimates estimates = EstimatesOf(plan);
  EXPECT_GT(estimates.lower_bound_seconds, 0);
  EXPECT_GE(estimates.predicted_seconds, estimates.lower_bound_seconds);
  EXPECT_NE(estimates.binding_link, "");
}

// Its formula knows NICs alone.
TEST(CompileTest, PredictionIsNoLessThanTheBytesOfAnUplink) {
  const PlanFile plan = OpenJob(
      GenericJob(R"({"name": "w", "shape": [4096, 4096], "dtype": "bf16"})",
                 GenericSide(2, "Shard(0)"), GenericSide(2, "Shard(0)"),
                 R"(, "topology": {"hosts": [0, 1, 2, 3], )"
                 R"("network_gigabytes_per_second": 1, )"
                 R"("hosts_per_leaf": 2, "spine_oversubscription": 64})"));
  const Estimates estimates = EstimatesOf(plan);
  EXPECT_EQ(estimates.binding_link,
            "uplink of leaf 0, 1.074 s for 33554432 bytes");
  EXPECT_GE(estimates.predicted_seconds, 1.07);
}

// "stays" goes from each GPU to itself. Direct rounds over NVLink hide that,
// staged ones do not.
TEST(CompileTest, WhatStaysOnAGpuCostsTimeWhereNothingHidesIt) {
  const auto predicted = [](int rows, const std::string& options) {
    const auto side = [](const char* dim) {
      return absl::StrCat(
          R"job({"layout": "generic", "meshes": {"m": {"axes": {"x": 3}}},
                 "tensors": [
                   {"match": "stays", "mesh": "m", "placements": ["Shard(0)"]},
                   {"match": "goes", "mesh": "m", "placements": ["Shard()job",
          dim, R"job()"]}]})job");
    };
    std::vector<uint8_t> bytes;
    EXPECT_EQ(
        ErrorsOf(absl::StrCat(
                     R"({"model": {"parameters": [
                         {"name": "goes", "shape": [96000, 1536], "dtype": "bf16"},
                         {"name": "stays", "shape": [)",
                     rows, R"(, 1536], "dtype": "bf16"}]}, "source": )",
                     side("0"), R"(, "destination": )", side("1"),
                     R"(, "colocated": true, "options": {)", options, "}}"),
                 &bytes),
        "");
    const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(std::move(bytes));
    return EstimatesOf(*plan).predicted_seconds;
  };
  EXPECT_EQ(predicted(24000, ""), predicted(3000, ""));
  const std::string staged = R"("peer": "staged")";
  EXPECT_GT(predicted(24000, staged), predicted(3000, staged));
}

}  // namespace
}  // namespace refit
