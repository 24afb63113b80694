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

// Layer 0 is dense, layer 1 has experts.
std::string Llama4(const std::string& model_type, const std::string& more) {
  const std::string text = absl::StrFormat(
      R"("hidden_size": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 6, "vocab_size": 64, "num_hidden_layers": 2,
         "interleave_moe_layer_step": 2, "num_local_experts": 3,
         "intermediate_size": 4, "intermediate_size_mlp": 8%s)",
      more);
  return model_type == "llama4"
             ? absl::StrFormat(
                   R"({"model_type": "llama4", "text_config": {%s},
                       "vision_config": {"hidden_size": 8}})",
                   text)
             : absl::StrFormat(R"({"model_type": "%s", %s})", model_type, text);
}

// Heads of 6 rows, the first of each rotary pair before the second.
Tensor FirstsThenSeconds(const Tensor& heads) {
  std::vector<Tensor> parts;
  for (int64_t head = 0; head < heads.shape[0] / 6; ++head) {
    for (const int64_t row : {0, 2, 4, 1, 3, 5}) {
      parts.push_back(Rows(heads, 6 * head + row, 6 * head + row + 1));
    }
  }
  return Concat(parts);
}

TEST(VllmFamiliesTest, RotaryPairsOfQueriesAndKeysAreHeldByHalves) {
  const Model model = ReadTinyModel(Llama4("llama4_text", ""));
  const std::string prefix = "model.layers.1.self_attn.";
  const Tensors hf = Under(Checkpoint(model), prefix);
  EXPECT_EQ(hf.at("q_proj.weight").shape, (std::vector<int64_t>{24, 3}));
  const auto heads = [&](const std::string& name, int64_t begin, int64_t end) {
    return Rows(hf.at(name), 6 * begin, 6 * end);
  };
  EXPECT_EQ(Under(OnVllm(model, 2)[1], prefix).at("qkv_proj.weight"),
            Concat({FirstsThenSeconds(heads("q_proj.weight", 2, 4)),
                    FirstsThenSeconds(heads("k_proj.weight", 1, 2)),
                    heads("v_proj.weight", 1, 2)}));
  // Two ranks share each key head.
  EXPECT_EQ(Under(OnVllm(model, 4)[2], prefix).at("qkv_proj.weight"),
            Concat({FirstsThenSeconds(heads("q_proj.weight", 2, 3)),
                    FirstsThenSeconds(heads("k_proj.weight", 1, 2)),
                    heads("v_proj.weight", 1, 2)}));
  EXPECT_EQ(BufferOf(model, MakeSide(LayoutKind::kVllm),
                     "model.layers.{0}.self_attn.qkv_proj.weight")
                .fragments.size(),
            3);  // however many heads
}

TEST(VllmFamiliesTest, TransposedExpertsAreCutInEachHalf) {
  const Model model = ReadTinyModel(Llama4("llama4_text", ""));
  const std::string layer = "model.layers.1.feed_forward.experts.";
  const Tensors hf = Under(Checkpoint(model), layer);
  const Tensor& gate_up = hf.at("gate_up_proj");  // [3, 3, 8]
  const Tensor& down = hf.at("down_proj");        // [3, 4, 3]
  const auto w13 = [&](const std::vector<int64_t>& columns) {
    Tensor of_rank = {.shape = {3, 4, 3}, .cells = {}};
    for (int64_t expert = 0; expert < 3; ++expert) {
      for (const int64_t out : columns) {
        for (int64_t in = 0; in < 3; ++in) {
          of_rank.cells.push_back(gate_up.cells[(expert * 3 + in) * 8 + out]);
        }
      }
    }
    return of_rank;
  };
  Tensor w2 = {.shape = {3, 3, 2}, .cells = {}};
  for (int64_t expert = 0; expert < 3; ++expert) {
    for (int64_t out = 0; out < 3; ++out) {
      for (const int64_t in : {2, 3}) {
        w2.cells.push_back(down.cells[(expert * 4 + in) * 3 + out]);
      }
    }
  }
  SideSpec side = MakeSide(LayoutKind::kVllm, 2);
  const Tensors found =
      Under(LayOutAndExpand(model, side, fb::Side::kDestination)[1],
            layer + "routed_experts.");
  EXPECT_EQ(found.at("w13_weight"), w13({2, 3, 6, 7}));
  EXPECT_EQ(found.at("w2_weight"), w2);
  // Halves that do not alternate change places, unlike gpt_oss's.
  side.moe_backend = Given<std::string>("flashinfer_cutlass");
  EXPECT_EQ(Under(LayOutAndExpand(model, side, fb::Side::kDestination)[1],
                  layer + "routed_experts.")
                .at("w13_weight"),
            w13({6, 7, 2, 3}));
}

TEST(VllmFamiliesTest, Llama4BesideAVisionTowerKeepsItsNames) {
  const Model model = ReadTinyModel(Llama4("llama4", ""));
  const Tensors rank = OnVllm(model, 1)[0];
  EXPECT_TRUE(rank.contains("language_model.lm_head.weight"));
  EXPECT_TRUE(rank.contains("language_model.model.norm.weight"));
  EXPECT_TRUE(rank.contains(
      "language_model.model.layers.0.feed_forward.gate_up_proj.weight"));
  EXPECT_TRUE(
      rank.contains("language_model.model.layers.1.feed_forward."
                    "shared_expert.gate_up_proj.weight"));
  for (const auto& [name, tensor] : rank) {
    EXPECT_TRUE(name.starts_with("language_model.")) << name;
  }
}

// A small qwen3_vl or qwen3_vl_moe.
std::string Qwen3Vl(const std::string& model_type) {
  return absl::StrFormat(
      R"({"model_type": "%s", "tie_word_embeddings": false, "text_config":
          {%s, "num_hidden_layers": 1, "intermediate_size": 8,
           "num_experts": 2, "moe_intermediate_size": 4,
           "tie_word_embeddings": true}})",
      model_type, kSizes);
}

TEST(VllmFamiliesTest, Qwen3BesideAVisionTowerIsNamedAsItsClassNamesIt) {
  for (const std::string type : {"qwen3_vl", "qwen3_vl_moe"}) {
    const Model model = ReadTinyModel(Qwen3Vl(type));
    const Tensors rank = OnVllm(model, 1)[0];
    // Whether the head is tied the whole model's key says.
    EXPECT_TRUE(rank.contains("language_model.lm_head.weight")) << type;
    EXPECT_TRUE(
        rank.contains("language_model.model.layers.0.self_attn.q_norm.weight"));
    for (const auto& [name, tensor] : rank) {
      EXPECT_TRUE(name.starts_with("language_model.")) << name;
    }
    const Tensors sglang = LayOutAndExpand(model, MakeSide(LayoutKind::kSglang),
                                           fb::Side::kDestination)[0];
    EXPECT_TRUE(sglang.contains("model.layers.0.self_attn.qkv_proj.weight"));
    EXPECT_TRUE(sglang.contains("lm_head.weight"));
  }
  EXPECT_EQ(OnVllm(ReadTinyModel(Qwen3Vl("qwen3_vl_moe")), 2)[0]
                .at("language_model.model.layers.0.mlp.experts.routed_experts."
                    "w13_weight")
                .shape,
            (std::vector<int64_t>{2, 4, 4}));
}

TEST(VllmFamiliesTest, LayoutsThatDoNotKnowAFamilyRefuseIt) {
  const Model model =
      ReadTinyModel(Qwen35("qwen3_5", R"(, "intermediate_size": 8)"));
  EXPECT_EQ(LayOutErrors(model, MakeSide(LayoutKind::kMegatron)),
            "destination: the layout megatron does not know qwen3_5; wanted "
            "another layout (generic places any tensors)\n");
  EXPECT_EQ(LayOutErrors(ReadTinyModel(Llama4("llama4", "")),
                         MakeSide(LayoutKind::kMegatron)),
            "destination: the layout megatron does not know llama4; wanted "
            "another layout (generic places any tensors)\n");
}

}  // namespace
}  // namespace refit
