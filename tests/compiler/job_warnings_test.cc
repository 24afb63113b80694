// Which jobs are warned of, and which neighbours of theirs are not.
#include "compiler/job_warnings.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/compile.h"
#include "plan/plan_file.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {
namespace {

constexpr std::string_view kDense =
    R"("model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
       "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 8,
       "intermediate_size": 96, "vocab_size": 256,
       "tie_word_embeddings": false)";
constexpr std::string_view kMoe =
    R"("model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2,
       "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 8,
       "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8,
       "vocab_size": 256, "tie_word_embeddings": false)";

constexpr std::string_view kMtp =
    R"("model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2,
       "num_attention_heads": 4, "num_key_value_heads": 4,
       "intermediate_size": 96, "moe_intermediate_size": 32,
       "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
       "first_k_dense_replace": 1, "topk_method": "noaux_tc",
       "q_lora_rank": 32, "kv_lora_rank": 32,
       "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
       "num_nextn_predict_layers": 1, "vocab_size": 256,
       "tie_word_embeddings": false)";

struct Compiled {
  std::string warnings;  // a line each, without the directory
  double predicted_seconds = 0;
};

Compiled CompiledOf(std::string_view config, const std::string& job) {
  const TemporaryDirectory directory;
  directory.Write("config.json", absl::StrCat("{", std::string(config), "}"));
  const std::string path = directory.Write(
      "job.json",
      absl::StrCat("{", config.empty() ? "" : "\"model\": \"config.json\", ",
                   job, "}"));
  Diagnostics diagnostics;
  const absl::StatusOr<std::vector<uint8_t>> bytes =
      CompileFile(path, {.prove = false}, diagnostics);
  EXPECT_TRUE(bytes.ok()) << bytes.status().message() << diagnostics.Render();
  return {.warnings = directory.Relative(
              absl::StrJoin(diagnostics.WarningLines(), "\n")),
          .predicted_seconds =
              EstimatesOf(*PlanFile::FromBytes(*bytes)).predicted_seconds};
}

std::string WarningsOf(std::string_view config, const std::string& job) {
  return CompiledOf(config, job).warnings;
}

std::string Sides(const std::string& source, const std::string& destination,
                  const std::string& more = "") {
  return absl::StrCat("\n\"source\": {\"layout\": \"megatron\"", source,
                      "},\n\"destination\": {\"layout\": \"vllm\"", destination,
                      "}", more);
}

std::string OnHosts(int gpus) {
  return absl::StrCat(",\n\"topology\": {\"gpus_per_host\": ", gpus, "}");
}

TEST(JobWarningsTest, AJobWithoutDoubtsCompilesWithoutAWord) {
  EXPECT_EQ(WarningsOf(kMoe, Sides(R"(, "tensor_parallel": 2)",
                                   R"(, "tensor_parallel": 4)")),
            "");
}

TEST(JobWarningsTest, MoreGpusThanAHostHasWantATopology) {
  const std::string five = R"(, "data_parallel": 5)";
  EXPECT_EQ(
      WarningsOf(kDense, Sides(five, R"(, "tensor_parallel": 4)")),
      "job.json:1:1: warning: topology.gpus_per_host is not given, so that all "
      "9 GPUs are on one host; wanted \"gpus_per_host\": 8, or as many as your "
      "hosts have");
  EXPECT_EQ(WarningsOf(kDense, Sides(five, R"(, "replicas": 3)")), "");
  // Colocated ranks share GPUs.
  EXPECT_EQ(WarningsOf(kDense, Sides(five, R"(, "tensor_parallel": 4)",
                                     R"(, "colocated": true)")),
            "");
  EXPECT_EQ(WarningsOf(kDense, Sides(five, R"(, "replicas": 5)", OnHosts(10))),
            "");
}

TEST(JobWarningsTest, HostsThatDoNotFitTensorParallelism) {
  const std::string four = R"(, "tensor_parallel": 4)";
  EXPECT_EQ(
      WarningsOf(kDense, Sides("", four, OnHosts(6))),
      "job.json:4:31: warning: topology.gpus_per_host 6 does not fit "
      "destination.tensor_parallel 4: groups of 4 ranks are cut by the ends of "
      "hosts; wanted a divisor or a multiple");
  EXPECT_EQ(WarningsOf(kDense, Sides(four, four, OnHosts(2))), "");
  EXPECT_EQ(WarningsOf(kDense, Sides(four, four, OnHosts(8))), "");
}

TEST(JobWarningsTest, AnEngineThatStartsInTheMiddleOfAHost) {
  const std::string two = R"(, "tensor_parallel": 2)";
  const std::string four = R"(, "tensor_parallel": 4)";
  EXPECT_EQ(
      WarningsOf(kDense, Sides(two, four, OnHosts(4))),
      "job.json:4:31: warning: destination rank 0 is GPU 2 of its host, so "
      "that the ends of hosts cut its groups of tensor_parallel 4; wanted "
      "topology.hosts with the host of each rank");
  EXPECT_EQ(WarningsOf(kDense, Sides(two, four,
                                     R"(, "topology": {"hosts":
                                        [0, 0, 1, 1, 1, 1]})")),
            "");
  EXPECT_EQ(WarningsOf(kDense, Sides(four, two, OnHosts(4))), "");
}

TEST(JobWarningsTest, VersionsThatNobodyHasRead) {
  const auto warnings = [](const std::string& version) {
    return WarningsOf(
        kMoe, Sides("", absl::StrCat(R"(, "version": ")", version, "\"")));
  };
  EXPECT_EQ(
      warnings("0.99"),
      "job.json:3:46: warning: destination.version \"0.99\" is newer than "
      "vLLM 0.33, the newest release this build knows; the names of 0.33 "
      "are used");
  EXPECT_EQ(warnings("1.0").find("destination.version"), 24u);
  const auto trainer = [](const std::string& layout) {
    return WarningsOf(kMoe, absl::StrCat("\n\"source\": {\"layout\": ", layout,
                                         "},\n\"destination\": {\"layout\": "
                                         "\"vllm\"}"));
  };
  EXPECT_EQ(trainer(R"("fsdp", "fused_experts": true, "version": "5.24")"), "");
  EXPECT_NE(trainer(R"("fsdp", "fused_experts": true, "version": "5.99")"), "");
  EXPECT_EQ(trainer(R"("megatron", "version": "0.19.2")"), "");
  EXPECT_NE(trainer(R"("megatron", "version": "0.99")"), "");
  EXPECT_EQ(warnings("0.33.2"), "");
  EXPECT_EQ(warnings("0.10"), "");
}

TEST(JobWarningsTest, WhatSglangsLoaderDoesNotTake) {
  constexpr std::string_view kGptOss =
      R"("model_type": "gpt_oss", "hidden_size": 8, "num_attention_heads": 4,
         "num_key_value_heads": 4, "head_dim": 2, "vocab_size": 64,
         "num_hidden_layers": 1, "num_local_experts": 4,
         "intermediate_size": 4)";
  const auto sglang = [](const std::string& more) {
    return absl::StrCat(
        "\n\"source\": {\"layout\": \"fsdp\"},\n"
        "\"destination\": {\"layout\": \"sglang\", \"tensor_parallel\": 2",
        more, "}");
  };
  EXPECT_EQ(WarningsOf(kGptOss, sglang(R"(, "expert_parallel": 2)")),
            "job.json:3:78: warning: destination.expert_parallel 2: SGLang "
            "0.5.23 cannot load gpt_oss with expert parallelism; wanted 1, or "
            "destination.version of a newer release that can");
  EXPECT_EQ(WarningsOf(kGptOss, sglang("")), "");
  constexpr std::string_view kNemotron =
      R"("model_type": "nemotron_h", "hidden_size": 8, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 2,
         "vocab_size": 64, "intermediate_size": 4, "mamba_num_heads": 4,
         "mamba_head_dim": 2, "n_groups": 2, "ssm_state_size": 3,
         "conv_kernel": 2, "hybrid_override_pattern": "M")";
  EXPECT_EQ(WarningsOf(kNemotron, sglang("")),
            "config.json:1:1: warning: n_groups is 2, and sglang reads "
            "mamba_n_groups, which is 8 where config.json does not have it; "
            "wanted \"mamba_n_groups\": 2");
  EXPECT_EQ(WarningsOf(
                absl::StrCat(std::string(kNemotron), ", \"mamba_n_groups\": 2"),
                sglang("")),
            "");
}

TEST(JobWarningsTest, RolesThatRulesLeaveOut) {
  constexpr std::string_view kAll[] = {
      R"({"name": "embed", "role": "embedding", "shape": ["vocab", "hidden"]})",
      R"({"name": "layers.{layer}.q", "role": "query", "shape": [16, "hidden"]})",
      R"({"name": "layers.{layer}.k", "role": "key", "shape": [16, "hidden"]})",
      R"({"name": "layers.{layer}.v", "role": "value", "shape": [16, "hidden"]})",
      R"({"name": "layers.{layer}.o", "role": "attention_output", "shape": ["hidden", 16]})",
      R"({"name": "layers.{layer}.up", "role": "mlp_up", "shape": [32, "hidden"]})",
      R"({"name": "layers.{layer}.down", "role": "mlp_down", "shape": ["hidden", 32]})",
      R"({"name": "norm", "role": "final_norm", "shape": ["hidden"]})"};
  const auto warnings = [&](std::string_view left_out) {
    const TemporaryDirectory directory;
    directory.Write("config.json",
                    R"({"model_type": "mine", "hidden_size": 16,
                        "num_hidden_layers": 3, "num_attention_heads": 4,
                        "vocab_size": 64, "tie_word_embeddings": true})");
    std::vector<std::string> params;
    for (const std::string_view param : kAll) {
      if (param.find(left_out) == param.npos) params.emplace_back(param);
    }
    directory.Write(
        "mine.json",
        absl::StrCat(R"({"model_type": "mine", "params": [)",
                     absl::StrJoin(params, ","), R"(], "vllm": {}})"));
    const std::string path = directory.Write("job.json", R"({
        "model": {"config": "config.json", "rules": "mine.json"},
        "source": {"layout": "fsdp"}, "destination": {"layout": "fsdp"}})");
    Diagnostics diagnostics;
    const absl::StatusOr<std::vector<uint8_t>> bytes =
        CompileFile(path, {.prove = false}, diagnostics);
    EXPECT_TRUE(bytes.ok()) << left_out << diagnostics.Render();
    return directory.Relative(absl::StrJoin(diagnostics.WarningLines(), "\n"));
  };
  EXPECT_EQ(warnings("nothing"), "");
  const auto of_layers = [](const std::string& role, const std::string& beside,
                            const std::string& name) {
    return absl::StrCat(
        "mine.json:1:34: warning: the rules give no param of layers 0..2 the "
        "role \"",
        role, "\", beside \"", beside, "\" (\"", name,
        "\"): no refit writes such a tensor there; wanted one, or modules of "
        "\"column\", \"row\" and \"replicated\" instead");
  };
  EXPECT_EQ(warnings("\"value\""), of_layers("value", "key", "layers.0.k"));
  EXPECT_EQ(warnings("\"attention_output\""),
            of_layers("attention_output", "value", "layers.0.v"));
  EXPECT_EQ(warnings("\"mlp_down\""),
            of_layers("mlp_down", "mlp_up", "layers.0.up"));
  EXPECT_EQ(warnings("\"final_norm\""),
            "mine.json:1:34: warning: the rules give no param the role "
            "\"final_norm\", so that no refit writes such a tensor; wanted "
            "one");
}

TEST(JobWarningsTest, QuantizedCheckpointsWantADestinationDtype) {
  const auto quantized = [](const std::string& method) {
    return absl::StrCat(std::string(kDense),
                        ",\n\"quantization_config\": {\"bits\": 4, "
                        "\"quant_method\": \"",
                        method, "\"}");
  };
  const std::string awq = quantized("awq");
  EXPECT_EQ(
      WarningsOf(quantized("fp8"), Sides("", "")),
      "config.json:5:52: warning: the checkpoint is quantized "
      "(quantization_config fp8), and an engine that loads it holds quantized "
      "tensors; this job writes unquantized ones; wanted destination.dtype: "
      "bf16 if the engine runs unquantized, else fp8_e4m3_block128 or "
      "mxfp8_e4m3");
  // fp8 would not be what an engine of AWQ holds.
  EXPECT_EQ(
      WarningsOf(awq, Sides("", "")),
      "config.json:5:52: warning: the checkpoint is quantized "
      "(quantization_config awq), and an engine that loads it holds quantized "
      "tensors; this job writes unquantized ones; wanted destination.dtype: "
      "bf16, and an engine that runs unquantized: no job writes tensors in "
      "this format");
  EXPECT_EQ(WarningsOf(awq, Sides("", R"(, "dtype": "bf16")")), "");
  // A trainer's copy of the model is not quantized by its config.
  EXPECT_EQ(WarningsOf(awq, R"("source": {"layout": "megatron"},
                         "destination": {"layout": "fsdp"})"),
            "");
}

TEST(JobWarningsTest, GpusBeyondHopperWantAMoeBackend) {
  const auto links = [](double gigabytes) {
    return absl::StrCat(
        ",\n\"topology\": {\"peer_gigabytes_per_second\": ", gigabytes, "}");
  };
  EXPECT_EQ(
      WarningsOf(kMoe, Sides("", "", links(800))),
      "job.json:4:43: warning: topology.peer_gigabytes_per_second 800 is "
      "beyond "
      "Hopper; on newer GPUs vllm chooses another MoE backend by itself, which "
      "reorders the experts; wanted destination.moe_backend, as the engine is "
      "started with");
  EXPECT_EQ(WarningsOf(kMoe, Sides("", "", OnHosts(72))).find("job.json:4:31"),
            0u);
  EXPECT_EQ(
      WarningsOf(kMoe, Sides("", R"(, "moe_backend": "triton")", links(800))),
      "");
  EXPECT_EQ(WarningsOf(kMoe, Sides("", "", links(370))), "");
  EXPECT_EQ(WarningsOf(kDense, Sides("", "", links(800))), "");
}

TEST(JobWarningsTest, BucketsFarFromWhatIsFast) {
  // 2 x 384 MiB of embedding and head.
  constexpr std::string_view kLarge =
      R"("model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 1,
         "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64,
         "intermediate_size": 1024, "vocab_size": 196608,
         "tie_word_embeddings": false)";
  const auto options = [](const std::string& text) {
    return Sides("", "", absl::StrCat(",\n\"options\": {", text, "}"));
  };
  EXPECT_EQ(WarningsOf(kLarge,
                       options(R"("peer": "staged", "bucket_bytes": 1048576)"))
                .find("job.json:4:47: warning: options.bucket_bytes 1048576 is "
                      "far from what is fast: 7"),
            0u);
  // Nothing is staged.
  EXPECT_EQ(WarningsOf(kLarge, options(R"("bucket_bytes": 1048576)")), "");
  // Small, and so is all there is to move.
  EXPECT_EQ(
      WarningsOf(kDense, options(R"("peer": "staged", "bucket_bytes": 4096)")),
      "");
  EXPECT_EQ(WarningsOf(kLarge, options(R"("peer": "staged")")), "");
}

TEST(JobWarningsTest, WarningsThatAreErrorsLeaveNoPlan) {
  const TemporaryDirectory directory;
  directory.Write("config.json", absl::StrCat("{", std::string(kDense), "}"));
  const std::string path = directory.Write(
      "job.json", absl::StrCat("{\"model\": \"config.json\", ",
                               Sides(R"(, "data_parallel": 8)", ""), "}"));
  Diagnostics diagnostics(/*warnings_are_errors=*/true);
  EXPECT_FALSE(CompileFile(path, {}, diagnostics).ok());
  EXPECT_EQ(diagnostics.error_count(), 1);
}

TEST(JobWarningsTest, AVisionTowerOfWhichTheJobSaysNothing) {
  constexpr std::string_view kTower =
      R"("model_type": "qwen3_vl", "tie_word_embeddings": false,
         "text_config": {"hidden_size": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 64,
         "num_hidden_layers": 2, "intermediate_size": 8},
         "vision_config": {"depth": 1, "hidden_size": 8, "num_heads": 4,
         "out_hidden_size": 4, "num_position_embeddings": 4})";
  const auto warnings = [&](const std::string& destination) {
    return WarningsOf(kTower,
                      "\n\"source\": {\"layout\": \"fsdp\"},\n\"destination\": "
                      "{\"layout\": \"vllm\"" +
                          destination + "}");
  };
  EXPECT_EQ(warnings(""),
            "job.json:2:11: warning: the vision tower of qwen3_vl is not "
            "moved; wanted source.vision: true to move it, or false if that "
            "is meant");
  EXPECT_EQ(warnings(R"(, "vision": true)"), "");
  EXPECT_EQ(warnings(R"(, "vision": false)"), "");
}

TEST(JobWarningsTest, APartThatOneSideWantsAndTheOtherLeavesOut) {
  EXPECT_EQ(
      WarningsOf(kMtp, Sides(R"(, "mtp": false)", R"(, "mtp": true)")),
      "job.json:3:42: warning: source.mtp is false and destination.mtp is "
      "true, so that prediction layers are not moved; wanted the same on both "
      "sides");
  EXPECT_EQ(WarningsOf(kMtp, Sides(R"(, "mtp": true)", "")), "");
}

TEST(JobWarningsTest, ExpertsOfTransformers5AreOneTensor) {
  const auto fsdp = [](const std::string& more) {
    return absl::StrCat(R"("source": {"layout": "fsdp")", more,
                        R"(}, "destination": {"layout": "vllm"})");
  };
  EXPECT_EQ(WarningsOf(kMoe, fsdp(R"(, "version": "5.2")")),
            "job.json:1:66: warning: source.version 5.2: transformers 5 holds "
            "the experts of a layer in one tensor, and this job has a tensor "
            "for each; wanted source.fused_experts: true, or false if that is "
            "meant");
  for (const char* more : {"", R"(, "version": "4.57")",
                           R"(, "version": "5.2", "fused_experts": true)",
                           R"(, "version": "5.2", "fused_experts": false)"}) {
    EXPECT_EQ(WarningsOf(kMoe, fsdp(more)), "");
  }
  EXPECT_EQ(WarningsOf(kDense, fsdp(R"(, "version": "5.2")")), "");
}

TEST(JobWarningsTest, OptionsOfDirectRoundsWithoutAny) {
  const auto options = [](int gpus_per_host, const std::string& text) {
    return Sides(
        "", "",
        absl::StrCat(OnHosts(gpus_per_host), ",\n\"options\": {", text, "}"));
  };
  const std::string bound = R"("direct_multiprocessors": 16)";
  EXPECT_EQ(WarningsOf(kDense, options(1, bound)),
            "job.json:5:39: warning: options.direct_multiprocessors has no "
            "effect: no round is direct; wanted source and destination ranks "
            "on one host, or a job without it");
  EXPECT_EQ(WarningsOf(kDense, options(1, R"("direct": "pull")"))
                .find("job.json:5:23: warning: options.direct has no effect"),
            0u);
  EXPECT_EQ(WarningsOf(kDense, options(1, R"("direct": "push")")), "");
  EXPECT_EQ(WarningsOf(kDense, options(2, bound)), "");
}

// Eight trainers of a host feed as many engines of another one, or one engine.
TEST(JobWarningsTest, DeltasThatMakeDenseRefitsMuchSlower) {
  constexpr std::string_view kLarge =
      R"("model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 4,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "intermediate_size": 12288, "vocab_size": 151936,
         "tie_word_embeddings": false)";
  const auto compiled = [&](const std::string& destination,
                            const std::string& options) {
    return CompiledOf(kLarge,
                      Sides(R"(, "data_parallel": 8)", destination,
                            OnHosts(8) + ",\n\"options\": {" + options + "}"));
  };
  const std::string engines = R"(, "replicas": 8)";
  const Compiled with = compiled(engines, R"("delta": true)");
  const Compiled without = compiled(engines, "");
  EXPECT_EQ(without.warnings, "");
  EXPECT_EQ(with.warnings,
            absl::StrFormat(
                "job.json:5:22: warning: with options.delta no rank relays, so "
                "that a dense refit is predicted to take %.3f ms instead of "
                "%.3f ms; wanted no delta, unless deltas gain more (refit-sim "
                "--change-rate predicts their time)",
                1e3 * with.predicted_seconds, 1e3 * without.predicted_seconds));
  for (const auto& [destination, options] :
       {std::pair(engines, R"("delta": false)"),
        {R"(, "tensor_parallel": 8)", R"("delta": true)"}}) {
    EXPECT_EQ(compiled(destination, options).warnings, "") << options;
  }
}

TEST(JobWarningsTest, DeltasThatSendMuchWhateverChanged) {
  constexpr std::string_view kOne =
      R"("model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
         "intermediate_size": 2048, "vocab_size": 1024,
         "tie_word_embeddings": false)";
  constexpr std::string_view kTiny =
      R"("model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
         "intermediate_size": 16, "vocab_size": 64,
         "tie_word_embeddings": false)";
  const auto warnings = [](std::string_view config,
                           const std::string& destination, int gpus,
                           const std::string& options) {
    return WarningsOf(
        config, Sides("", destination,
                      OnHosts(gpus) + ",\n\"options\": {" + options + "}"));
  };
  const std::string wide = R"(, "dtype": "fp32")";
  const std::string delta = R"("delta": true)";
  EXPECT_EQ(
      warnings(kOne, wide, 1, delta),
      "job.json:5:22: warning: with options.delta 100.0 % of the bytes of "
      "staged messages travel in each refit all the same: 100.0 % are "
      "cast by receivers; wanted the source's dtype at the destination, "
      "or no delta");
  EXPECT_EQ(
      warnings(kTiny, "", 1, delta),
      "job.json:5:22: warning: with options.delta 100.0 % of the bytes of "
      "staged messages travel in each refit all the same: 100.0 % are in "
      "messages below 65536 bytes; wanted no delta");
  EXPECT_EQ(
      warnings(kOne, "", 8, delta),
      "job.json:5:22: warning: options.delta has no effect: no round is "
      "staged, and direct rounds always move everything; wanted no delta, "
      "or options.peer \"staged\"");
  EXPECT_EQ(warnings(kOne, "", 8, delta + R"(, "peer": "staged")"), "");
  EXPECT_EQ(warnings(kOne, "", 1, delta), "");
  EXPECT_EQ(warnings(kOne, wide, 1, R"("delta": false)"), "");
}

// A cast of a part of the bytes counts for that part.
TEST(JobWarningsTest, DeltasThatSendAPartWhateverChanged) {
  const auto warnings = [](int wide_rows) {
    return WarningsOf("", absl::StrFormat(
                              R"(
"source": {"layout": "generic", "meshes": {"m": {"axes": {"a": 1}}},
  "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
"destination": {"layout": "generic", "meshes": {"m": {"axes": {"a": 1}}},
  "tensors": [
    {"match": "wide", "mesh": "m", "placements": ["Replicate"], "dtype": "fp32"},
    {"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
"topology": {"gpus_per_host": 1}, "options": {"delta": true},
"model": {"parameters": [
  {"name": "wide", "shape": [%d, 1024], "dtype": "bf16"},
  {"name": "same", "shape": [%d, 1024], "dtype": "bf16"}]})",
                              wide_rows, 1000 - wide_rows));
  };
  EXPECT_NE(warnings(250).find("25.0 % are cast by receivers"),
            std::string::npos)
      << warnings(250);
  EXPECT_EQ(warnings(90), "");
}

}  // namespace
}  // namespace refit
