// What vLLM's classes of newer families hold that those of others do not: one
// rank written out from whole tensors.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

constexpr char kSizes[] = R"("hidden_size": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 64)";

// Layer 0 is a delta net of 2 key heads (1 row) and 4 value heads (2 rows),
// layer 1 attention.
std::string Qwen35(const std::string& model_type, const std::string& more) {
  return absl::StrFormat(
      R"({"model_type": "%s", "text_config": {%s, "num_hidden_layers": 2,
          "layer_types": ["linear_attention", "full_attention"],
          "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 1, "linear_value_head_dim": 2,
          "linear_conv_kernel_dim": 2%s},
          "vision_config": {"hidden_size": 8}})",
      model_type, kSizes, more);
}

std::vector<Tensors> OnVllm(const Model& model, int64_t tensor_parallel) {
  return LayOutAndExpand(model, MakeSide(LayoutKind::kVllm, tensor_parallel),
                         fb::Side::kDestination);
}

TEST(VllmFamiliesTest, SeparateProjectionsOfADeltaNetAreFused) {
  const Model model =
      ReadTinyModel(Qwen35("qwen3_5", R"(, "intermediate_size": 8)"));
  const Tensors hf =
      Under(Checkpoint(model), "model.language_model.layers.0.linear_attn.");
  const Tensors found =
      Under(OnVllm(model, 2)[1], "language_model.model.layers.0.linear_attn.");
  const Tensor& qkv = hf.at("in_proj_qkv.weight");
  EXPECT_EQ(found.at("in_proj_qkvz.weight"),
            Concat({Rows(qkv, 1, 2), Rows(qkv, 3, 4), Rows(qkv, 8, 12),
                    Rows(hf.at("in_proj_z.weight"), 4, 8)}));
  EXPECT_EQ(found.at("in_proj_ba.weight"),
            Concat({Rows(hf.at("in_proj_b.weight"), 2, 4),
                    Rows(hf.at("in_proj_a.weight"), 2, 4)}));
}

TEST(VllmFamiliesTest, AModelWithAVisionTowerIsNamedAsVllmsClassNamesIt) {
  const Model model =
      ReadTinyModel(Qwen35("qwen3_5", R"(, "intermediate_size": 8)"));
  const Tensors rank = OnVllm(model, 1)[0];
  EXPECT_TRUE(rank.contains("language_model.lm_head.weight"));
  EXPECT_TRUE(rank.contains("language_model.model.embed_tokens.weight"));
  EXPECT_TRUE(rank.contains("language_model.model.norm.weight"));
  for (const auto& [name, tensor] : rank) {
    EXPECT_TRUE(name.starts_with("language_model.")) << name;
  }
}

TEST(VllmFamiliesTest, StackedExpertsAreCutInEachHalf) {
  const Model model = ReadTinyModel(
      Qwen35("qwen3_5_moe", R"(, "num_experts": 2, "moe_intermediate_size": 4,
                                "shared_expert_intermediate_size": 4)"));
  const Tensors hf =
      Under(Checkpoint(model), "model.language_model.layers.1.mlp.experts.");
  const Tensors found =
      Under(OnVllm(model, 2)[1],
            "language_model.model.layers.1.mlp.experts.routed_experts.");
  const Tensor& gate_up = hf.at("gate_up_proj");  // [2, 8, 4]
  const Tensor& down = hf.at("down_proj");        // [2, 4, 4]
  Tensor w13 = {.shape = {2, 4, 4}, .cells = {}};
  Tensor w2 = {.shape = {2, 4, 2}, .cells = {}};
  for (int64_t expert = 0; expert < 2; ++expert) {
    for (const int64_t row : {2, 3, 6, 7}) {
      for (int64_t in = 0; in < 4; ++in) {
        w13.cells.push_back(gate_up.cells[(expert * 8 + row) * 4 + in]);
      }
    }
    for (int64_t row = 0; row < 4; ++row) {
      for (const int64_t in : {2, 3}) {
        w2.cells.push_back(down.cells[(expert * 4 + row) * 4 + in]);
      }
    }
  }
  EXPECT_EQ(found.at("w13_weight"), w13);
  EXPECT_EQ(found.at("w2_weight"), w2);
}

TEST(VllmFamiliesTest, ANormOverAllHeadsIsCutByHeads) {
  const Model model = ReadTinyModel(absl::StrFormat(
      R"({"model_type": "minimax_m2", %s, "num_hidden_layers": 1,
          "num_local_experts": 2, "intermediate_size": 4,
          "use_routing_bias": true})",
      kSizes));
  const Tensors hf = Under(Checkpoint(model), "model.layers.0.");
  const Tensors found = Under(OnVllm(model, 4)[3], "model.layers.0.");
  EXPECT_EQ(found.at("self_attn.q_norm.weight"),
            Rows(hf.at("self_attn.q_norm.weight"), 6, 8));
  // Two ranks share each key head.
  EXPECT_EQ(found.at("self_attn.k_norm.weight"),
            Rows(hf.at("self_attn.k_norm.weight"), 2, 4));
  EXPECT_TRUE(found.contains("block_sparse_moe.e_score_correction_bias"));
  EXPECT_EQ(BufferOf(model, MakeSide(LayoutKind::kVllm),
                     "model.layers.{0}.block_sparse_moe.gate.weight")
                .dtype,
            DType::kFp32);
}

TEST(VllmFamiliesTest, AnIndexerIsWholeAndItsNormFp32) {
  const Model model = ReadTinyModel(
      R"({"model_type": "deepseek_v32", "hidden_size": 4,
          "num_attention_heads": 4, "vocab_size": 64, "num_hidden_layers": 1,
          "q_lora_rank": 2, "kv_lora_rank": 2, "qk_nope_head_dim": 1,
          "qk_rope_head_dim": 1, "v_head_dim": 1, "first_k_dense_replace": 1,
          "intermediate_size": 4, "n_routed_experts": 2,
          "moe_intermediate_size": 2, "index_n_heads": 3,
          "index_head_dim": 2})");
  const std::string prefix = "model.layers.0.self_attn.indexer.";
  const Tensors hf = Under(Checkpoint(model), prefix);
  const Tensors found = Under(OnVllm(model, 2)[1], prefix);
  ExpectSameTensors(
      found, {{"wq_b.weight", hf.at("wq_b.weight")},
              {"wk_weights_proj.weight",
               Concat({hf.at("wk.weight"), hf.at("weights_proj.weight")})},
              {"k_norm.weight", hf.at("k_norm.weight")},
              {"k_norm.bias", hf.at("k_norm.bias")}});
  EXPECT_EQ(BufferOf(model, MakeSide(LayoutKind::kVllm),
                     "model.layers.{0}.self_attn.indexer.k_norm.bias")
                .dtype,
            DType::kFp32);
}

TEST(VllmFamiliesTest, NormsAroundAnMlpAreWhole) {
  const Model model = ReadTinyModel(absl::StrFormat(
      R"({"model_type": "gemma3_text", %s, "num_hidden_layers": 1,
          "intermediate_size": 8})",
      kSizes));
  EXPECT_TRUE(model.architecture.tied);  // as the class, if no key says it
  const Tensors hf = Under(Checkpoint(model), "model.layers.0.");
  const Tensors found = Under(OnVllm(model, 2)[1], "model.layers.0.");
  for (const std::string name :
       {"input", "post_attention", "pre_feedforward", "post_feedforward"}) {
    const std::string norm = absl::StrCat(name, "_layernorm.weight");
    EXPECT_EQ(found.at(norm), hf.at(norm)) << norm;
  }
}

TEST(VllmFamiliesTest, LayoutsThatDoNotKnowAFamilyRefuseIt) {
  const Model model =
      ReadTinyModel(Qwen35("qwen3_5", R"(, "intermediate_size": 8)"));
  EXPECT_EQ(LayOutErrors(model, MakeSide(LayoutKind::kMegatron)),
            "destination: the layout megatron does not know qwen3_5; wanted "
            "another layout (generic places any tensors)\n");
}

}  // namespace
}  // namespace refit
