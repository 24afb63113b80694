// Prediction layers of hybrid models, and SGLang's tensors of them: one rank of
// each framework written out from whole tensors.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "compiler/model/model.h"
#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

// One layer of attention; %s: the pattern of each prediction, and how many.
std::string Nemotron(const std::string& predictions) {
  return absl::StrCat(R"({"model_type": "nemotron_h", "hidden_size": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1,
    "vocab_size": 64, "num_hidden_layers": 2, "hybrid_override_pattern": "ME",
    "mamba_num_heads": 4, "mamba_head_dim": 2, "n_groups": 2,
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

TEST(MtpLayoutTest, MegatronsBlockOfANemotronNumbersItsLayersFromZero) {
  const Model model = ReadTinyModel(Nemotron(R"("num_nextn_predict_layers": 2,
                  "mtp_hybrid_override_pattern": "*E")"),
                                    /*mtp=*/true);
  const Tensors hf = Checkpoint(model);
  const std::vector<Tensors> ranks = LayOutAndExpand(
      model, MakeSide(LayoutKind::kMegatron, 2, 2), fb::Side::kDestination);
  const Tensors& last = ranks[3];
  // The second prediction's layers are 2 and 3 of the checkpoint.
  EXPECT_EQ(last.at("mtp.layers.1.enorm.weight"),
            hf.at("mtp.layers.2.enorm.weight"));
  EXPECT_EQ(last.at("mtp.layers.1.eh_proj.weight"),
            Rows(hf.at("mtp.layers.2.eh_proj.weight"), 2, 4));
  EXPECT_EQ(last.at("mtp.layers.1.final_layernorm.weight"),
            hf.at("mtp.layers.3.final_layernorm.weight"));
  const std::string block = "mtp.layers.1.mtp_model_layer.layers.";
  EXPECT_EQ(last.at(block + "0.self_attention.linear_proj.weight"),
            Columns(hf.at("mtp.layers.2.mixer.o_proj.weight"), 2, 4));
  EXPECT_EQ(last.at(block + "1.pre_mlp_layernorm.weight"),
            hf.at("mtp.layers.3.norm.weight"));
  EXPECT_EQ(last.at(block + "1.mlp.experts.linear_fc2.weight3"),
            hf.at("mtp.layers.3.mixer.experts.3.down_proj.weight"));
  EXPECT_TRUE(last.contains("embedding.word_embeddings.weight"));
  EXPECT_FALSE(ranks[0].contains("mtp.layers.0.enorm.weight"));
}

TEST(MtpLayoutTest, MegatronsPredictionOfQwen3NextIsOneLayer) {
  const Model model = ReadTinyModel(Qwen3Next(), /*mtp=*/true);
  const Tensors hf = Checkpoint(model);
  const std::vector<Tensors> ranks = LayOutAndExpand(
      model, MakeSide(LayoutKind::kMegatron, 2), fb::Side::kSource);
  EXPECT_EQ(ranks[1].at("mtp.layers.0.eh_proj.weight"),
            Rows(hf.at("mtp.fc.weight"), 2, 4));
  EXPECT_EQ(ranks[1].at("mtp.layers.0.hnorm.weight"),
            hf.at("mtp.pre_fc_norm_hidden.weight"));
  EXPECT_EQ(ranks[1].at("mtp.layers.0.final_layernorm.weight"),
            hf.at("mtp.norm.weight"));
  EXPECT_EQ(
      ranks[1].at("mtp.layers.0.mtp_model_layer.self_attention.linear_proj."
                  "weight"),
      Columns(hf.at("mtp.layers.0.self_attn.o_proj.weight"), 2, 4));
}

TEST(MtpLayoutTest, VllmsDraftIsUnderItsOwnPrefixOnTheLastStage) {
  for (const auto& [config, join] :
       {std::pair(Qwen3Next(), "mtp.fc.weight"),
        std::pair(Nemotron(kOnePrediction), "mtp.layers.0.eh_proj.weight")}) {
    const Model model = ReadTinyModel(config, /*mtp=*/true);
    const Tensors hf = Checkpoint(model);
    const std::vector<Tensors> ranks = LayOutAndExpand(
        model, MakeSide(LayoutKind::kVllm, 2, 2), fb::Side::kDestination);
    const Tensors& last = ranks[3];
    EXPECT_EQ(last.at(join), Rows(hf.at(join), 2, 4));
    const Tensor& embedding = hf.at(model.params[0].name);
    EXPECT_EQ(last.at("mtp.embed_tokens.weight"), Rows(embedding, 32, 64));
    EXPECT_FALSE(ranks[0].contains("mtp.embed_tokens.weight"));
    EXPECT_FALSE(ranks[0].contains(join));
  }
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
            "num_nextn_predict_layers 50001, each of 2 layers, makes 100002; "
            "wanted at most 100000\n");
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
            "layer_types has 1 entries; wanted one for each of 2 layers\n");
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
  EXPECT_EQ(ReadErrors(Qwen3Next(R"(, "mlp_only_layers": [0])"), /*mtp=*/true),
            "mlp_only_layers makes some layers dense, and the multi-token-"
            "prediction layer of such a model is not known; wanted \"mtp\": "
            "false\n");
}

TEST(HybridSglangLayoutTest, AttentionHasNoModuleOfItsOwnInQwen3Next) {
  const Model model = ReadTinyModel(Qwen3Next());
  const Tensors hf = Checkpoint(model);
  SideSpec side = MakeSide(LayoutKind::kSglang, 4);
  side.dp_attention.value = 2;
  side.expert_parallel.value = 2;
  side.embedding.value = EmbeddingCut::kAttention;
  side.shared_experts = Given(SharedExperts::kTensor);
  const Tensors rank =
      LayOutAndExpand(model, side, fb::Side::kDestination).at(3);
  // Rank 3 is the second of two attention ranks, and has half of experts 2, 3.
  const std::string attention = "model.layers.1.self_attn.";
  EXPECT_EQ(rank.at("model.layers.1.qkv_proj.weight"),
            Concat({Rows(hf.at(attention + "q_proj.weight"), 4, 8),
                    Rows(hf.at(attention + "k_proj.weight"), 1, 2),
                    Rows(hf.at(attention + "v_proj.weight"), 1, 2)}));
  EXPECT_EQ(rank.at("model.layers.1.q_norm.weight"),
            hf.at(attention + "q_norm.weight"));
  const std::string delta = "model.layers.0.linear_attn.";
  EXPECT_EQ(rank.at(delta + "in_proj_qkvz.weight"),
            Rows(hf.at(delta + "in_proj_qkvz.weight"), 10, 20));
  EXPECT_EQ(rank.at(delta + "A_log"), Rows(hf.at(delta + "A_log"), 2, 4));
  // Beside attention the ranks of all groups share the work.
  const std::string mlp = "model.layers.0.mlp.";
  EXPECT_EQ(rank.at(mlp + "shared_expert.down_proj.weight"),
            Columns(hf.at(mlp + "shared_expert.down_proj.weight"), 3, 4));
  EXPECT_EQ(rank.at(mlp + "shared_expert_gate.weight"),
            hf.at(mlp + "shared_expert_gate.weight"));
  EXPECT_EQ(rank.at(mlp + "experts.w2_weight"),
            Stack({Columns(hf.at(mlp + "experts.2.down_proj.weight"), 2, 4),
                   Columns(hf.at(mlp + "experts.3.down_proj.weight"), 2, 4)}));
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

TEST(HybridSglangLayoutTest, ASharedExpertOfQwen3NextIsFusedIfItIsOfTheirSize) {
  const std::string mlp = "model.layers.1.mlp.";
  const Model model = ReadTinyModel(Qwen3Next());  // all of 4 features
  const Tensors hf = Checkpoint(model);
  SideSpec side = MakeSide(LayoutKind::kSglang, 2);
  side.expert_parallel.value = 2;
  Tensors rank = LayOutAndExpand(model, side, fb::Side::kDestination).at(1);
  std::vector<Tensor> down;
  for (const char* expert : {"experts.2", "experts.3", "shared_expert"}) {
    down.push_back(hf.at(mlp + expert + ".down_proj.weight"));
  }
  EXPECT_EQ(rank.at(mlp + "experts.w2_weight"), Stack(down));
  EXPECT_FALSE(rank.contains(mlp + "shared_expert.down_proj.weight"));
  EXPECT_EQ(rank.at(mlp + "shared_expert_gate.weight"),
            hf.at(mlp + "shared_expert_gate.weight"));

  side.shared_experts = Given(SharedExperts::kTensor);
  rank = LayOutAndExpand(model, side, fb::Side::kDestination).at(1);
  EXPECT_TRUE(rank.contains(mlp + "shared_expert.down_proj.weight"));
}

TEST(HybridSglangLayoutTest, NemotronIsNamedAsInVllmAndCutByAttentionRanks) {
  const Model model = ReadTinyModel(Nemotron(kOnePrediction));
  const Tensors hf = Checkpoint(model);
  SideSpec side = MakeSide(LayoutKind::kSglang, 4);
  side.dp_attention.value = 2;
  side.embedding.value = EmbeddingCut::kAttention;
  const Tensors rank =
      LayOutAndExpand(model, side, fb::Side::kDestination).at(1);
  EXPECT_EQ(rank.at("model.layers.0.mixer.A"),
            Rows(hf.at("backbone.layers.0.mixer.A_log"), 2, 4));
  EXPECT_EQ(rank.at("model.layers.0.mixer.out_proj.weight"),
            Columns(hf.at("backbone.layers.0.mixer.out_proj.weight"), 4, 8));
  EXPECT_EQ(rank.at("model.layers.1.mixer.shared_experts.up_proj.weight"),
            Rows(hf.at("backbone.layers.1.mixer.shared_experts.up_proj.weight"),
                 2, 4));
  EXPECT_EQ(rank.at("model.layers.1.mixer.experts.w13_weight").shape,
            (std::vector<int64_t>{4, 1, 4}));
  EXPECT_EQ(rank.at("model.norm_f.weight"), hf.at("backbone.norm_f.weight"));
  EXPECT_EQ(rank.at("model.embed_tokens.weight"),
            Rows(hf.at("backbone.embeddings.weight"), 32, 64));
}

TEST(HybridSglangLayoutTest, GptOssCutsHeadsByItsAttentionRanks) {
  const Model model = ReadTinyModel(kGptOss);
  const Tensors hf = Checkpoint(model);
  SideSpec side = MakeSide(LayoutKind::kSglang, 4);
  side.dp_attention.value = 2;
  side.expert_parallel.value = 2;
  side.embedding.value = EmbeddingCut::kAttention;
  Tensors rank = LayOutAndExpand(model, side, fb::Side::kDestination).at(3);
  EXPECT_EQ(rank.at("model.embed_tokens.weight"),
            Rows(hf.at("model.embed_tokens.weight"), 32, 64));
  EXPECT_EQ(rank.at("model.layers.0.self_attn.sinks"),
            Rows(hf.at("model.layers.0.self_attn.sinks"), 2, 4));
  const std::string experts = "model.layers.0.mlp.experts.";
  EXPECT_EQ(rank.at(experts + "w13_weight").shape,
            (std::vector<int64_t>{2, 4, 3}));
  // Rank 2 adds the bias of experts 2 and 3, rank 3 nothing.
  EXPECT_EQ(rank.at(experts + "w2_weight_bias"), Filled({2, 3}, Tensor::kFill));
  EXPECT_EQ(LayOutAndExpand(model, side, fb::Side::kDestination)
                .at(2)
                .at(experts + "w2_weight_bias"),
            Rows(hf.at(experts + "down_proj_bias"), 2, 4));
  side.embedding = Given(EmbeddingCut::kTensor);
  rank = LayOutAndExpand(model, side, fb::Side::kDestination).at(3);
  EXPECT_EQ(rank.at("model.embed_tokens.weight"),
            Rows(hf.at("model.embed_tokens.weight"), 48, 64));
}

TEST(HybridSglangLayoutTest, TritonKernelsWantExpertsTransposed) {
  const Model model = ReadTinyModel(kGptOss);
  const Tensors hf = Under(Checkpoint(model), "model.layers.0.mlp.experts.");
  SideSpec side = MakeSide(LayoutKind::kSglang, 1);
  side.moe_backend = Given(std::string("triton_kernel"));
  const Tensors found =
      Under(LayOutAndExpand(model, side, fb::Side::kDestination).at(0),
            "model.layers.0.mlp.experts.");
  // As the checkpoint has them: [expert, in, out].
  EXPECT_EQ(found.at("w13_weight"),
            (Tensor{.shape = {4, 3, 8}, .cells = hf.at("gate_up_proj").cells}));
  EXPECT_EQ(found.at("w2_weight"), hf.at("down_proj"));
  EXPECT_EQ(found.at("w13_weight_bias").shape, (std::vector<int64_t>{4, 8}));
}

TEST(HybridVllmLayoutTest, AttentionSinksMayHaveACopy) {
  const Buffer sinks =
      BufferOf(ReadTinyModel(kGptOss), MakeSide(LayoutKind::kVllm, 1),
               "model.layers.{0}.attn.sinks");
  ASSERT_EQ(sinks.post_hooks.size(), 1);
  EXPECT_EQ(sinks.post_hooks[0].name, "derive-attention-sinks");
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

TEST(HybridFsdpLayoutTest, FusedExpertsOfNemotronAreInAModelOfTransformers5) {
  const Model model = ReadTinyModel(Nemotron(kOnePrediction));
  SideSpec side = MakeSide(LayoutKind::kFsdp);
  EXPECT_TRUE(
      LayOutAndExpand(model, side, fb::Side::kSource)
          .at(0)
          .contains("backbone.layers.1.mixer.experts.0.up_proj.weight"));
  side.version = Given<std::string>("5.19");
  EXPECT_TRUE(LayOutAndExpand(model, side, fb::Side::kSource)
                  .at(0)
                  .contains("model.layers.1.mixer.experts.0.up_proj.weight"));
  side.version = {};
  side.fused_experts = Given(true);
  const Tensors rank = LayOutAndExpand(model, side, fb::Side::kSource).at(0);
  EXPECT_TRUE(rank.contains("model.embeddings.weight"));
  EXPECT_EQ(rank.at("model.layers.1.mixer.experts.up_proj").shape,
            (std::vector<int64_t>{4, 4, 4}));
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
      "intermediate_size": 8})");
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
  EXPECT_EQ(copied.post_hooks[0].name, "drop-router-copy");
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

}  // namespace
}  // namespace refit
