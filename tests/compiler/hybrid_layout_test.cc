// Models with latent attention, mixers, experts in one tensor and prediction
// layers: refusals, hooks, skips and dtypes. Which bytes stand where is in
// tests/second_opinion.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "compiler/model/model.h"
#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

// One layer of attention; %s: the pattern of each prediction, and how many.
std::string Nemotron(const std::string& predictions, int groups = 2) {
  return absl::StrCat(R"({"model_type": "nemotron_h", "hidden_size": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1,
    "vocab_size": 64, "num_hidden_layers": 2, "hybrid_override_pattern": "ME",
    "mamba_num_heads": 4, "mamba_head_dim": 2, "n_groups": )",
                      groups, R"(,
    "ssm_state_size": 3, "conv_kernel": 2, "n_routed_experts": 4,
    "moe_intermediate_size": 4, "moe_shared_expert_intermediate_size": 8,
    "intermediate_size": 8, )",
                      predictions, "}");
}
constexpr char kOnePrediction[] =
    R"("num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E")";

// Layer 0 is a delta net of 2 key heads, layer 1 attention. `more`: keys.
std::string Qwen3Next(const std::string& more = "") {
  return absl::StrCat(R"({"model_type": "qwen3_next", "hidden_size": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1,
    "vocab_size": 64, "num_hidden_layers": 2, "full_attention_interval": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 1, "linear_value_head_dim": 2,
    "linear_conv_kernel_dim": 2, "num_experts": 4, "moe_intermediate_size": 4,
    "intermediate_size": 8, "shared_expert_intermediate_size": 4)",
                      more, "}");
}

constexpr char kGptOss[] = R"({"model_type": "gpt_oss", "hidden_size": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1,
    "vocab_size": 64, "num_hidden_layers": 1, "num_local_experts": 4,
    "intermediate_size": 4})";

std::string ReadErrors(const std::string& config, bool mtp) {
  Diagnostics diagnostics;
  ReadTinyModel(config, mtp, diagnostics);
  // Messages alone, without places and source lines.
  const std::string word = "error: ";
  std::string messages;
  const std::string rendered = diagnostics.Render();
  for (const std::string& line :
       std::vector<std::string>(absl::StrSplit(rendered, '\n'))) {
    const size_t at = line.find(word);
    if (at == std::string::npos) continue;
    absl::StrAppend(&messages, line.substr(at + word.size()), "\n");
  }
  return messages;
}

TEST(MtpLayoutTest, VllmHasNoOtherDraftOfNemotron) {
  const auto errors = [](const std::string& predictions) {
    return LayOutErrors(ReadTinyModel(Nemotron(predictions), /*mtp=*/true),
                        MakeSide(LayoutKind::kVllm));
  };
  const std::string message =
      "destination: vLLM's draft model of nemotron_h has one block of "
      "attention and experts; the model's has ";
  EXPECT_EQ(errors(R"("num_nextn_predict_layers": 2,
                      "mtp_hybrid_override_pattern": "*E")"),
            message + "2 blocks; wanted \"mtp\": false\n");
  EXPECT_EQ(errors(R"("num_nextn_predict_layers": 1,
                      "mtp_hybrid_override_pattern": "*M")"),
            message + "a Mamba mixer; wanted \"mtp\": false\n");
}

TEST(MtpLayoutTest, AModelWithoutPredictionLayersIsReported) {
  EXPECT_EQ(ReadErrors(kGptOss, /*mtp=*/true),
            "source.mtp is true, and this gpt_oss has no multi-token-"
            "prediction layers; wanted \"mtp\": false\n");
  EXPECT_EQ(ReadErrors(Nemotron(R"("num_nextn_predict_layers": 0)"), true),
            "source.mtp is true, and this nemotron_h has no multi-token-"
            "prediction layers; wanted \"mtp\": false\n");
}

TEST(MtpLayoutTest, PredictionsAreNotMoreThanLayersMayBe) {
  EXPECT_EQ(ReadErrors(Nemotron(R"("num_nextn_predict_layers": 50001,
                                   "mtp_hybrid_override_pattern": "*E")"),
                       /*mtp=*/true),
            "sizes.mtp_layers is \"num_nextn_predict_layers * mtp_block or "
            "0\", 100002 for this config.json; wanted 0 to 100000 "
            "(families/nemotron_h.json:20)\n");
}

TEST(Qwen3NextTest, LayerTypesComeBeforeTheInterval) {
  const Model model = ReadTinyModel(
      Qwen3Next(R"(, "layer_types": ["full_attention", "linear_attention"])"));
  const Tensors hf = Checkpoint(model);
  EXPECT_TRUE(hf.contains("model.layers.0.self_attn.q_proj.weight"));
  EXPECT_TRUE(hf.contains("model.layers.1.linear_attn.A_log"));
  EXPECT_FALSE(hf.contains("model.layers.1.self_attn.q_proj.weight"));
  EXPECT_EQ(ReadErrors(Qwen3Next(R"(, "layer_types": ["full_attention"])"),
                       /*mtp=*/false),
            "layer_types has 1 words; wanted 2, one per layer\n");
  EXPECT_EQ(
      ReadErrors(Qwen3Next(R"(, "layer_types": ["mamba", "full_attention"])"),
                 /*mtp=*/false),
      "layer_types has a layer \"mamba\"; wanted full_attention or "
      "linear_attention\n");
}

TEST(Qwen3NextTest, SomeLayersMayBeDense) {
  for (const std::string key :
       {R"(, "mlp_only_layers": [0])", R"(, "decoder_sparse_step": 2)"}) {
    const Tensors hf = Checkpoint(ReadTinyModel(Qwen3Next(key)));
    EXPECT_EQ(hf.at("model.layers.0.mlp.up_proj.weight").shape,
              (std::vector<int64_t>{8, 4}));
    EXPECT_FALSE(hf.contains("model.layers.0.mlp.gate.weight"));
    EXPECT_TRUE(hf.contains("model.layers.1.mlp.experts.3.up_proj.weight"));
    EXPECT_FALSE(hf.contains("model.layers.1.mlp.up_proj.weight"));
  }
  EXPECT_EQ(
      ReadErrors(Qwen3Next(R"(, "mlp_only_layers": [0])"), /*mtp=*/true),
      "mlp_only_layers is an array, which makes some layers dense, and the "
      "multi-token-prediction layer of such a model is not known; wanted "
      "\"mtp\": false\n");
}

TEST(HybridSglangLayoutTest, WhatItsQwen3NextLacksIsReported) {
  EXPECT_EQ(LayOutErrors(ReadTinyModel(Qwen3Next()),
                         MakeSide(LayoutKind::kSglang, 1, 2)),
            "destination.pipeline_parallel 2: SGLang's qwen3_next has one "
            "stage; wanted 1\n");
  EXPECT_EQ(
      LayOutErrors(ReadTinyModel(Qwen3Next(R"(, "mlp_only_layers": [0])")),
                   MakeSide(LayoutKind::kSglang, 1)),
      "destination: SGLang's qwen3_next has experts in every layer, and "
      "the model has a dense MLP \"model.layers.0.mlp.up_proj.weight\"; "
      "wanted another layout (generic places any tensors)\n");
  SideSpec side = MakeSide(LayoutKind::kSglang, 1);
  side.shared_experts = Given(SharedExperts::kFused);
  EXPECT_EQ(LayOutErrors(ReadTinyModel(Nemotron(kOnePrediction)), side),
            "destination.shared_experts \"fused\" is not what SGLang does with "
            "those of nemotron_h; wanted \"tensor\" or \"replicated\"\n");
}

TEST(HybridVllmLayoutTest, AttentionSinksMayHaveACopy) {
  const Buffer sinks =
      BufferOf(ReadTinyModel(kGptOss), MakeSide(LayoutKind::kVllm, 1),
               "model.layers.{0}.attn.sinks");
  ASSERT_EQ(sinks.post_hooks.size(), 1);
  EXPECT_EQ(sinks.post_hooks[0].name.text(), "derive-attention-sinks");
}

TEST(HybridVllmLayoutTest, EveryStageOfQwen3NextHasAVocabularyAndOneTheNorm) {
  const Model model = ReadTinyModel(Qwen3Next());
  const Tensors hf = Checkpoint(model);
  const std::vector<Tensors> ranks = LayOutAndExpand(
      model, MakeSide(LayoutKind::kVllm, 1, 2), fb::Side::kDestination);
  const Tensor unread = Filled({64, 4}, Tensor::kSkip);
  EXPECT_EQ(ranks[0].at("lm_head.weight"), unread);
  EXPECT_EQ(ranks[1].at("lm_head.weight"), hf.at("lm_head.weight"));
  EXPECT_EQ(ranks[1].at("model.embed_tokens.weight"), unread);
  EXPECT_FALSE(ranks[0].contains("model.norm.weight"));
}

TEST(OwnDTypeTest, FrameworksKeepSomeTensorsInFp32) {
  const Model oss = ReadTinyModel(kGptOss);
  const SideSpec sglang = MakeSide(LayoutKind::kSglang);
  const std::string experts = "model.layers.{0}.mlp.experts.";
  EXPECT_EQ(BufferOf(oss, sglang, experts + "w13_weight_bias").dtype,
            DType::kFp32);
  EXPECT_EQ(BufferOf(oss, sglang, experts + "w2_weight_bias").dtype,
            DType::kFp32);
  EXPECT_EQ(BufferOf(oss, sglang, experts + "w13_weight").dtype, DType::kBf16);

  const Model glm = ReadTinyModel(R"({"model_type": "glm4_moe",
      "hidden_size": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
      "head_dim": 1, "vocab_size": 64, "num_hidden_layers": 1,
      "n_routed_experts": 4, "moe_intermediate_size": 4,
      "intermediate_size": 8, "first_k_dense_replace": 0,
      "n_shared_experts": null})");
  const std::string gate = "model.layers.{0}.mlp.gate.weight";
  EXPECT_EQ(BufferOf(glm, MakeSide(LayoutKind::kVllm), gate).dtype,
            DType::kFp32);
  const Buffer newest = BufferOf(glm, sglang, gate);
  EXPECT_EQ(newest.dtype, DType::kFp32);
  EXPECT_TRUE(newest.post_hooks.empty());
  // Before 0.5.19 SGLang's gate computes with a copy of its own.
  SideSpec older = sglang;
  older.version = Given<std::string>("0.5.18");
  const Buffer copied = BufferOf(glm, older, gate);
  EXPECT_EQ(copied.dtype, DType::kBf16);
  ASSERT_EQ(copied.post_hooks.size(), 1u);
  EXPECT_EQ(copied.post_hooks[0].name.text(), "drop-router-copy");
}

TEST(OwnDTypeTest, AJobMaySayTheRoutersDType) {
  const Model model = ReadTinyModel(R"({"model_type": "mixtral",
      "hidden_size": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
      "vocab_size": 64, "num_hidden_layers": 1, "num_local_experts": 4,
      "intermediate_size": 8})");
  const std::string gate = "model.layers.{0}.block_sparse_moe.gate.weight";
  for (const LayoutKind layout : {LayoutKind::kVllm, LayoutKind::kSglang}) {
    SideSpec side = MakeSide(layout);
    EXPECT_EQ(BufferOf(model, side, gate).dtype, DType::kBf16);
    side.router_dtype = Given(DType::kFp32);
    const Buffer router = BufferOf(model, side, gate);
    EXPECT_EQ(router.dtype, DType::kFp32);
    EXPECT_TRUE(router.own_dtype);
  }
}

// Layer 0 is dense, layer 1 has experts, layer 2 predicts; four heads.
Model Latent(bool mtp, int64_t shared_experts = 2) {
  return ReadTinyModel(
      absl::StrFormat(
          R"({"model_type": "deepseek_v3", "hidden_size": 4, "vocab_size": 64,
              "num_hidden_layers": 2, "num_nextn_predict_layers": 1,
              "num_attention_heads": 4, "q_lora_rank": 2, "kv_lora_rank": 3,
              "qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 1,
              "intermediate_size": 8, "moe_intermediate_size": 4,
              "first_k_dense_replace": 1, "n_routed_experts": 8,
              "topk_method": "noaux_tc", "n_shared_experts": %d})",
          shared_experts),
      mtp);
}

TEST(LatentLayoutTest, InterleavedBlocksFillARanksPartOfAnExpert) {
  SideSpec side = MakeSide(LayoutKind::kMegatron);
  side.tensor_parallel.value = 2;
  side.expert_tensor_parallel.value = 2;
  side.moe_mlp_glu_interleave_size = Given<int64_t>(4);
  EXPECT_EQ(LayOutErrors(Latent(/*mtp=*/true), side),
            "destination.moe_mlp_glu_interleave_size 4 does not divide 2 "
            "intermediate features that a rank holds of an expert\n");
}

TEST(LatentLayoutTest, FusedSharedExpertsAreOfTheSizeOfOne) {
  SideSpec side = MakeSide(LayoutKind::kSglang);
  side.tensor_parallel.value = 4;
  side.expert_parallel.value = 2;
  side.shared_experts = Given(SharedExperts::kFused);
  EXPECT_EQ(
      LayOutErrors(Latent(/*mtp=*/false), side),
      "destination.shared_experts \"fused\" needs shared experts of the "
      "size of one; they have 8 intermediate features, an expert has 4\n");
}

TEST(LatentLayoutTest, SglangsDraftModelIsAnotherWorker) {
  EXPECT_EQ(LayOutErrors(Latent(/*mtp=*/true), MakeSide(LayoutKind::kSglang)),
            "destination cannot hold the model's 1 multi-token-prediction "
            "layers: SGLang's draft model is a worker of its own; wanted "
            "\"mtp\": false\n");
}

TEST(LatentLayoutTest, HeadsAreNotCutThrough) {
  for (const LayoutKind layout : {LayoutKind::kMegatron, LayoutKind::kVllm}) {
    SideSpec side = MakeSide(layout);
    side.tensor_parallel.value = 8;
    EXPECT_TRUE(
        LayOutErrors(Latent(/*mtp=*/true), side)
            .starts_with("destination.tensor_parallel 8 does not divide "
                         "4 attention heads\n"));
  }
}

TEST(LatentLayoutTest, VllmsLatentProjectionsAreDerivedAgain) {
  BufferTable buffers;
  Diagnostics diagnostics;
  const Model model = Latent(/*mtp=*/true);
  const SideSpec side = MakeSide(LayoutKind::kVllm, 2);
  LayOut({.model = model,
          .side = side,
          .which = fb::Side::kDestination,
          .buffers = buffers,
          .diagnostics = diagnostics});
  std::set<std::string> hooked;
  std::vector<Dims> derived;
  for (const Buffer& buffer : buffers.all()) {
    for (const PostHook& hook : buffer.post_hooks) {
      hooked.insert(
          absl::StrCat(buffer.name, " ", std::string(hook.name.text())));
    }
    if (buffer.name.ends_with("W_UV") || buffer.name.ends_with("W_UK_T")) {
      derived.push_back(buffer.shape);
    }
  }
  EXPECT_EQ(hooked, (std::set<std::string>{
                        "model.layers.{0}.self_attn.kv_b_proj.weight "
                        "derive-latent-projections",
                        "model.layers.{0}.mtp_block.self_attn.kv_b_proj.weight "
                        "derive-latent-projections"}));
  // Two of four heads: latent rank 3 to a value of 1, a key of 2 to the rank.
  const Dims values = {2, 3, 1}, keys = {2, 2, 3};
  EXPECT_EQ(derived, (std::vector<Dims>{values, values, keys, keys}));
}

TEST(MambaLayoutTest, MambaGroupsThatCannotBeCutAreReported) {
  const Model one = ReadTinyModel(Nemotron(kOnePrediction, 1));
  EXPECT_EQ(LayOutErrors(one, MakeSide(LayoutKind::kMegatron, 2)),
            "destination.tensor_parallel 2 does not divide 1 Mamba groups\n");
  const Model two = ReadTinyModel(Nemotron(kOnePrediction, 2));
  EXPECT_EQ(LayOutErrors(two, MakeSide(LayoutKind::kVllm, 4)),
            "destination.tensor_parallel 4 does not divide 2 Mamba groups\n");
}

}  // namespace
}  // namespace refit
