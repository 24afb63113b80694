// SGLang's layout: skips, and what its classes of newer families hold that
// those of others do not. Which bytes stand where else is the second opinion's
// (tests/second_opinion/sglang.py).
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

std::vector<std::string> SkippedOf(const ModelSizes& sizes, fb::Side which,
                                   size_t stage) {
  const std::vector<Tensors> stages = LayOutAndExpand(
      MakeModel(sizes), MakeSide(LayoutKind::kSglang, 1, 2), which);
  return SkippedTensors(stages.at(stage));
}

const std::vector<std::string> kNone;
const std::vector<std::string> kHead = {"lm_head.weight"};

TEST(SglangLayoutTest, CopyOfATiedHeadIsNotReadFromASource) {
  const ModelSizes sizes = {.tied = true, .family = "qwen3"};
  EXPECT_EQ(SkippedOf(sizes, fb::Side::kSource, 1), kHead);
  EXPECT_EQ(SkippedOf(sizes, fb::Side::kDestination, 1), kNone);
}

TEST(SglangLayoutTest, UnreadHeadsOfMoeModelsAreDeclaredSkips) {
  for (const ModelSizes& sizes :
       {ModelSizes{.experts = 4}, ModelSizes{.experts = 4, .tied = true},
        ModelSizes{.experts = 4, .family = "mixtral"}}) {
    EXPECT_EQ(SkippedOf(sizes, fb::Side::kDestination, 0), kHead);
    EXPECT_EQ(SkippedOf(sizes, fb::Side::kDestination, 1), kNone);
  }
}

TEST(SglangLayoutTest, EveryStageOfALlamaHasAHead) {
  EXPECT_EQ(SkippedOf({.family = "llama"}, fb::Side::kDestination, 0), kHead);
  EXPECT_EQ(SkippedOf({.family = "qwen3"}, fb::Side::kDestination, 0), kNone);
}

constexpr char kSizes[] = R"("hidden_size": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 60,
    "num_hidden_layers": 2, "intermediate_size": 8)";

TEST(SglangLayoutTest, ANormOverAllHeadsIsCutByAttentionRanks) {
  const Model model = ReadTinyModel(absl::StrFormat(
      R"({"model_type": "minimax_m2", %s, "num_local_experts": 4,
          "use_routing_bias": true})",
      kSizes));
  const Tensors hf = Under(Checkpoint(model), "model.layers.1.self_attn.");
  SideSpec side = MakeSide(LayoutKind::kSglang, 4);
  side.dp_attention.value = 2;
  const std::vector<Tensors> ranks =
      LayOutAndExpand(model, side, fb::Side::kDestination);
  const Tensors found = Under(ranks[3], "model.layers.1.self_attn.");
  EXPECT_EQ(found.at("q_norm.weight"), Rows(hf.at("q_norm.weight"), 4, 8));
  EXPECT_EQ(found.at("k_norm.weight"), Rows(hf.at("k_norm.weight"), 2, 4));
  EXPECT_EQ(
      BufferOf(model, side, "model.layers.{0}.block_sparse_moe.gate.weight")
          .dtype,
      DType::kFp32);
}

TEST(SglangLayoutTest, EveryStageOfAMinimaxHasAnEmbedding) {
  const Model model = ReadTinyModel(absl::StrFormat(
      R"({"model_type": "minimax_m2", %s, "num_local_experts": 2,
          "use_routing_bias": true})",
      kSizes));
  const std::vector<Tensors> stages = LayOutAndExpand(
      model, MakeSide(LayoutKind::kSglang, 1, 2), fb::Side::kDestination);
  EXPECT_EQ(SkippedTensors(stages[0]), kNone);
  EXPECT_EQ(SkippedTensors(stages[1]),
            std::vector<std::string>{"model.embed_tokens.weight"});
}

TEST(SglangLayoutTest, TheEmbeddingOfAGemmaIsWholeAndNotPadded) {
  const Model model = ReadTinyModel(
      absl::StrFormat(R"({"model_type": "gemma3_text", %s})", kSizes));
  const Tensors hf = Checkpoint(model);
  SideSpec side = MakeSide(LayoutKind::kSglang, 2);
  const Tensors found =
      LayOutAndExpand(model, side, fb::Side::kDestination).at(1);
  for (const std::string name :
       {"model.embed_tokens.weight",
        "model.layers.1.pre_feedforward_layernorm.weight",
        "model.layers.1.post_feedforward_layernorm.weight"}) {
    EXPECT_EQ(found.at(name), hf.at(name)) << name;
  }
  side.embedding.given = true;
  EXPECT_EQ(LayOutErrors(model, side),
            "destination.embedding: SGLang's gemma3_text has the embedding "
            "whole on every rank; wanted no such key\n");
  side.embedding.given = false;
  side.dp_attention.value = 2;
  EXPECT_EQ(LayOutErrors(model, side),
            "destination.dp_attention 2: SGLang's gemma3_text cuts its "
            "attention by all of tensor_parallel; wanted 1, with \"replicas\" "
            "for more engines\n");
}

// Layer 0 is a delta net, layer 1 attention; experts are in one tensor a layer.
Model Qwen35Moe() {
  return ReadTinyModel(absl::StrFormat(
      R"({"model_type": "qwen3_5_moe", "text_config": {%s,
          "layer_types": ["linear_attention", "full_attention"],
          "linear_num_key_heads": 4, "linear_num_value_heads": 4,
          "linear_key_head_dim": 1, "linear_value_head_dim": 2,
          "linear_conv_kernel_dim": 2, "num_experts": 2,
          "moe_intermediate_size": 4, "shared_expert_intermediate_size": 4}})",
      kSizes));
}

TEST(SglangLayoutTest, StackedExpertsAreCutInEachHalf) {
  const Model model = Qwen35Moe();
  const Tensors hf = Under(Checkpoint(model), "model.language_model.layers.1.");
  const Tensors found =
      Under(LayOutAndExpand(model, MakeSide(LayoutKind::kSglang, 2),
                            fb::Side::kDestination)
                .at(1),
            "model.layers.1.");
  EXPECT_TRUE(found.contains("qkv_proj.weight"));  // without "self_attn."
  const Tensor& gate_up = hf.at("mlp.experts.gate_up_proj");  // [2, 8, 4]
  Tensor w13 = {.shape = {2, 4, 4}, .cells = {}};
  for (const int64_t row : {2, 3, 6, 7, 10, 11, 14, 15}) {
    for (int64_t in = 0; in < 4; ++in) {
      w13.cells.push_back(gate_up.cells[row * 4 + in]);
    }
  }
  EXPECT_EQ(found.at("mlp.experts.w13_weight"), w13);
  SideSpec side = MakeSide(LayoutKind::kSglang, 2);
  side.shared_experts = {
      .value = SharedExperts::kFused, .place = {}, .given = true};
  EXPECT_EQ(LayOutErrors(model, side),
            "destination.shared_experts \"fused\" is not what SGLang does with "
            "those of qwen3_5_moe; wanted \"tensor\" or \"replicated\"\n");
}

TEST(SglangLayoutTest, RotaryPairsOfALlama4AreHeldByHalves) {
  constexpr char kText[] = R"("hidden_size": 3, "num_attention_heads": 2,
      "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 64,
      "num_hidden_layers": 2, "num_local_experts": 2, "intermediate_size": 2)";
  const Model model = ReadTinyModel(absl::StrFormat(
      R"({"model_type": "llama4", "text_config": {%s}})", kText));
  const std::string prefix = "language_model.model.layers.0.";
  const Tensors hf = Under(Checkpoint(model), prefix);
  SideSpec side = MakeSide(LayoutKind::kSglang, 2);
  side.moe_backend = Given<std::string>("flashinfer_cutlass");
  const Tensors found =
      Under(LayOutAndExpand(model, side, fb::Side::kDestination).at(1), prefix);
  std::vector<Tensor> heads;  // one of queries, keys and values each
  for (const std::string name : {"q_proj", "k_proj"}) {
    for (const int64_t row : {4, 6, 5, 7}) {
      heads.push_back(
          Rows(hf.at("self_attn." + name + ".weight"), row, row + 1));
    }
  }
  heads.push_back(Rows(hf.at("self_attn.v_proj.weight"), 4, 8));
  EXPECT_EQ(found.at("self_attn.qkv_proj.weight"), Concat(heads));
  const Tensor& gate_up =
      hf.at("feed_forward.experts.gate_up_proj");  // [2, 3, 4]
  Tensor w13 = {.shape = {2, 2, 3}, .cells = {}};
  for (const int64_t expert : {0, 1}) {
    for (const int64_t out : {3, 1}) {  // this backend wants ups first
      for (const int64_t in : {0, 1, 2}) {
        w13.cells.push_back(gate_up.cells[(expert * 3 + in) * 4 + out]);
      }
    }
  }
  EXPECT_EQ(found.at("feed_forward.experts.w13_weight"), w13);
  EXPECT_EQ(LayOutErrors(model, MakeSide(LayoutKind::kSglang, 1, 2)),
            "destination.pipeline_parallel 2: SGLang's llama4 has one stage; "
            "wanted 1\n");
  EXPECT_EQ(LayOutErrors(ReadTinyModel(absl::StrFormat(
                             R"({"model_type": "llama4_text", %s})", kText)),
                         side),
            "destination: the layout sglang does not know llama4_text; wanted "
            "another layout (generic places any tensors)\n");
}

TEST(SglangLayoutTest, TheEmbeddingOfAQwen35IsWholeBesideDpAttention) {
  const Model model = Qwen35Moe();
  SideSpec side = MakeSide(LayoutKind::kSglang, 4);
  const auto rows = [&] {
    return LayOutAndExpand(model, side, fb::Side::kDestination)
        .at(0)
        .at("model.embed_tokens.weight")
        .shape[0];
  };
  EXPECT_EQ(rows(), 16);
  side.dp_attention.value = 2;
  side.embedding.value = EmbeddingCut::kAttention;
  EXPECT_EQ(rows(), 64);
  side.embedding.given = true;
  EXPECT_EQ(LayOutErrors(model, side),
            "destination.embedding: SGLang's qwen3_5_moe has the embedding "
            "whole on every rank of dp_attention; wanted no such key\n");
}

Model SparseAttention(std::string_view more) {
  return ReadTinyModel(absl::StrFormat(
      R"({"model_type": "glm_moe_dsa", "hidden_size": 4,
          "num_attention_heads": 4, "vocab_size": 64, "num_hidden_layers": 1,
          "q_lora_rank": 2, "kv_lora_rank": 2, "qk_nope_head_dim": 1,
          "qk_rope_head_dim": 1, "v_head_dim": 1, "first_k_dense_replace": 1,
          "intermediate_size": 4, "n_routed_experts": 2,
          "moe_intermediate_size": 2, "index_n_heads": 3,
          "index_head_dim": 2%s})",
      more));
}

TEST(SglangLayoutTest, AnIndexersProjectionsAreOneTensorWhereRopeInterleaves) {
  const std::string prefix = "model.layers.0.self_attn.indexer.";
  for (const bool is_interleaved : {false, true}) {
    const Model model = SparseAttention(
        is_interleaved ? R"(, "indexer_rope_interleave": true)" : "");
    const Tensors hf = Under(Checkpoint(model), prefix);
    SideSpec side = MakeSide(LayoutKind::kSglang, 2);
    const Tensors found = Under(
        LayOutAndExpand(model, side, fb::Side::kDestination).at(1), prefix);
    Tensors wanted = hf;
    if (is_interleaved) {
      wanted.erase("wk.weight");
      wanted.erase("weights_proj.weight");
      wanted["wk_weights_proj.weight"] =
          Concat({hf.at("wk.weight"), hf.at("weights_proj.weight")});
    }
    ExpectSameTensors(found, wanted);
    // Its dtypes are its own.
    side.dtype = {.value = DType::kFp16, .place = {}, .given = true};
    const std::string weights =
        is_interleaved ? "wk_weights_proj.weight" : "weights_proj.weight";
    const std::string stack = "model.layers.{0}.self_attn.indexer.";
    EXPECT_EQ(BufferOf(model, side, stack + weights).dtype, DType::kBf16);
    EXPECT_EQ(BufferOf(model, side, stack + "k_norm.bias").dtype, DType::kFp32);
  }
}

TEST(SglangLayoutTest, AnIndexersOwnProjectionIsNotQuantized) {
  SideSpec side = MakeSide(LayoutKind::kSglang);
  side.quantized = {.value = kFp8Block128, .place = {}, .given = true};
  EXPECT_EQ(LayOutErrors(SparseAttention(""), side),
            "destination.dtype: SGLang quantizes the indexer's wk of this "
            "glm_moe_dsa, and a refit does not yet; wanted bf16\n");
  EXPECT_EQ(LayOutErrors(
                SparseAttention(R"(, "indexer_rope_interleave": true)"), side),
            "");
}

}  // namespace
}  // namespace refit
