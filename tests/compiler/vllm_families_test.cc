// What vLLM's classes of newer families hold that those of others do not: one
// rank written out from whole tensors.
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

constexpr char kFamilySizes[] = R"("hidden_size": 4, "num_attention_heads": 4,
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
      model_type, kFamilySizes, more);
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
      kFamilySizes));
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

// Layer 0 attends to a window and has a table of tokens, layer 1 is sparse.
Model DeepseekV4(const std::string& more = "") {
  return ReadTinyModel(absl::StrFormat(
      R"({"model_type": "deepseek_v4", "hidden_size": 4, "head_dim": 2,
          "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 64,
          "num_hidden_layers": 2, "compress_ratios": [0, 4, 0],
          "num_nextn_predict_layers": 1,
          "num_hash_layers": 1, "q_lora_rank": 2, "o_lora_rank": 3,
          "o_groups": 2, "index_n_heads": 3, "index_head_dim": 2, "hc_mult": 2,
          "n_routed_experts": 2, "num_experts_per_tok": 2,
          "moe_intermediate_size": 4%s})",
      more));
}

// A rank's heads of a vector, and what pads them.
Tensor Padded(const Tensor& sinks, int64_t begin, int64_t end, int64_t heads) {
  Tensor tensor = {.shape = {heads}, .cells = {}};
  tensor.cells.assign(sinks.cells.begin() + begin, sinks.cells.begin() + end);
  tensor.cells.resize(heads, Tensor::kSkip);
  return tensor;
}

TEST(VllmFamiliesTest, DeepseekV4sAttentionIsCutByHeadsAndGroups) {
  const Model model = DeepseekV4();
  const Tensors hf = Under(Checkpoint(model), "layers.1.attn.");
  const Tensors found = Under(OnVllm(model, 2)[1], "model.layers.1.attn.");
  Tensors wanted = {
      {"fused_wqa_wkv.weight",
       Concat({hf.at("wq_a.weight"), hf.at("wkv.weight")})},
      {"q_norm.weight", hf.at("q_norm.weight")},
      {"kv_norm.weight", hf.at("kv_norm.weight")},
      {"wq_b.weight", Rows(hf.at("wq_b.weight"), 4, 8)},
      {"wo_a.weight", Rows(hf.at("wo_a.weight"), 3, 6)},
      {"wo_b.weight", Columns(hf.at("wo_b.weight"), 3, 6)},
      {"attn_sink", Padded(hf.at("attn_sink"), 2, 4, 64)},
      {"indexer.wq_b.weight", hf.at("indexer.wq_b.weight")},
      {"indexer.weights_proj.weight", hf.at("indexer.weights_proj.weight")}};
  for (const std::string module : {"compressor.", "indexer.compressor."}) {
    wanted[module + "ape"] = hf.at(module + "ape");
    wanted[module + "norm.weight"] = hf.at(module + "norm.weight");
    wanted[module + "fused_wkv_wgate.weight"] =
        Concat({hf.at(module + "wkv.weight"), hf.at(module + "wgate.weight")});
  }
  ExpectSameTensors(found, wanted);
}

TEST(VllmFamiliesTest, DeepseekV4sSinksArePaddedAsTheBackendPads) {
  const Model model = DeepseekV4();
  const Tensor sinks = Checkpoint(model).at("layers.0.attn.attn_sink");
  SideSpec side = MakeSide(LayoutKind::kVllm, 2);
  const auto found = [&](AttentionBackend backend) {
    side.attention_backend = Given(backend);
    return LayOutAndExpand(model, side, fb::Side::kDestination)[0].at(
        "model.layers.0.attn.attn_sink");
  };
  EXPECT_EQ(found(AttentionBackend::kFlashMla), Padded(sinks, 0, 2, 64));
  EXPECT_EQ(found(AttentionBackend::kFlashInfer), Padded(sinks, 0, 2, 8));
}

TEST(VllmFamiliesTest, DeepseekV4KeepsItsRoutersTablesAndHyperConnections) {
  const Model model = DeepseekV4();
  const Tensors hf = Checkpoint(model);
  const Tensors found = OnVllm(model, 2)[1];
  EXPECT_EQ(SkippedTensors(found),
            std::vector<std::string>{"model.layers.0.ffn.gate.tid2eid"});
  EXPECT_EQ(found.at("model.layers.0.ffn.gate.tid2eid").shape,
            (std::vector<int64_t>{64, 2}));
  EXPECT_FALSE(
      found.contains("model.layers.0.ffn.gate.e_score_correction_bias"));
  EXPECT_EQ(found.at("model.layers.1.ffn.gate.e_score_correction_bias"),
            hf.at("layers.1.ffn.gate.bias"));
  for (const std::string name : {"hc_attn_fn", "hc_attn_base", "hc_attn_scale",
                                 "hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale"}) {
    EXPECT_EQ(found.at("model.layers.1." + name), hf.at("layers.1." + name));
    EXPECT_EQ(
        BufferOf(model, MakeSide(LayoutKind::kVllm), "model.layers.{0}." + name)
            .dtype,
        DType::kFp32);
  }
  EXPECT_EQ(found.at("model.embed_tokens.weight"),
            Rows(hf.at("embed.weight"), 32, 64));
  EXPECT_EQ(found.at("lm_head.weight"), Rows(hf.at("head.weight"), 32, 64));
  EXPECT_EQ(found.at("model.norm.weight"), hf.at("norm.weight"));
}

TEST(VllmFamiliesTest, DeepseekV4sFirstLayerDerivesItsBroadcast) {
  const Model model = DeepseekV4();
  const SideSpec side = MakeSide(LayoutKind::kVllm, 1, 2);
  const Buffer mix = BufferOf(model, side, "model.layers.{0}.hc_attn_fn");
  EXPECT_EQ(mix.index[0].numbers, std::vector<int32_t>{0});
  ASSERT_EQ(mix.post_hooks.size(), 1);
  EXPECT_EQ(mix.post_hooks[0].name.text(), "derive-hyper-broadcast");
  const std::vector<Tensors> stages =
      LayOutAndExpand(model, side, fb::Side::kDestination);
  // Each stage has the head's, and the last one reads them.
  EXPECT_EQ(SkippedTensors(stages[0]),
            (std::vector<std::string>{"model.hc_head_base", "model.hc_head_fn",
                                      "model.hc_head_scale",
                                      "model.layers.0.ffn.gate.tid2eid"}));
  EXPECT_EQ(stages[1].at("model.hc_head_fn"),
            Checkpoint(model).at("hc_head_fn"));
}

TEST(VllmFamiliesTest, DeepseekV4SharesTokensOutOnOneStageAlone) {
  const Model model = DeepseekV4();
  const std::string name = "layers.0.ffn.shared_experts.";
  const Tensors hf = Under(Checkpoint(model), name);
  const auto found = [&](int64_t stages) {
    SideSpec side = MakeSide(LayoutKind::kVllm, 2, stages);
    side.data_parallel = Given<int64_t>(2);
    side.expert_parallel_enabled = Given(true);
    return LayOutAndExpand(model, side, fb::Side::kDestination)[1].at(
        "model." + name + "down_proj.weight");
  };
  EXPECT_EQ(found(1), hf.at("w2.weight"));
  EXPECT_EQ(found(2), Columns(hf.at("w2.weight"), 2, 4));
}

TEST(VllmFamiliesTest, WhatVllmCannotHoldOfDeepseekV4IsRefused) {
  const Model model = DeepseekV4();
  EXPECT_EQ(LayOutErrors(model, MakeSide(LayoutKind::kVllm, 4)),
            "destination.tensor_parallel 4 does not divide 2 groups of the "
            "output projection\n");
  SideSpec side = MakeSide(LayoutKind::kVllm);
  side.quantized = Given(kFp8Block128);
  EXPECT_EQ(LayOutErrors(model, side),
            "destination.dtype fp8_e4m3_block128: vLLM reorders the scales of "
            "deepseek_v4 after loading (wo_a, by DeepGEMM) or has its experts "
            "in MXFP4; wanted bf16\n");
  side = MakeSide(LayoutKind::kVllm);
  side.attention_backend = Given(AttentionBackend::kFlashMla);
  EXPECT_EQ(LayOutErrors(MakeModel({}), side),
            "destination.attention_backend: the tensors of qwen3 do not "
            "depend on it; wanted no such key\n");
}

TEST(VllmFamiliesTest, ADeepseekV4WithOtherParametersIsRefused) {
  const auto errors = [](const std::string& more) {
    Diagnostics diagnostics;
    const std::string config = absl::StrFormat(
        R"({"model_type": "deepseek_v4", "hidden_size": 4, "head_dim": 2,
            "num_attention_heads": 4, "num_key_value_heads": 1,
            "vocab_size": 64, "num_hidden_layers": 2, "q_lora_rank": 2,
            "o_lora_rank": 3, "o_groups": 2, "index_n_heads": 3,
            "index_head_dim": 2, "hc_mult": 2, "n_routed_experts": 2,
            "num_experts_per_tok": 2, "moe_intermediate_size": 4%s})",
        more);
    EXPECT_FALSE(ReadTinyModel(config, /*mtp=*/false, diagnostics));
    std::string messages;
    std::istringstream rendered(diagnostics.Render());
    for (std::string line; std::getline(rendered, line);) {
      const size_t at = line.find("error: ");
      if (at != std::string::npos) messages += line.substr(at + 7) + "\n";
    }
    return messages;
  };
  EXPECT_EQ(errors(R"(, "compress_ratios": [0, 2])"),
            "compress_ratios has a layer \"2\"; wanted 4, 128 or 0\n");
  EXPECT_EQ(errors(R"(, "layer_types": ["sliding_attention"])"),
            "layer_types has 1 words; wanted 2, one per layer\n");
  EXPECT_EQ(errors(R"(, "compress_ratios": [0, 4],
                      "mlp_layer_types": ["moe", "hash_moe"])"),
            "mlp_layer_types of layer 0 is \"moe\", and by the count of its "
            "words it is \"hash_moe\": frameworks differ in which they read; "
            "wanted both alike\n");
  EXPECT_EQ(errors(R"(, "compress_ratios": [0, 4], "compress_rates":
                      {"compressed_sparse_attention": 8}, "vision_n_layers": 2,
                      "n_shared_experts": 2, "tie_word_embeddings": true)"),
            "tie_word_embeddings true is not supported; wanted false\n"
            "vision_n_layers 2 is not supported; wanted 0\n"
            "n_shared_experts is 2, which frameworks read differently; wanted "
            "1\n"
            "compress_rates is an object, and no other rates are known; wanted "
            "4 for compressed_sparse_attention and 128 for "
            "heavily_compressed_attention\n");
}

TEST(VllmFamiliesTest, NormsAroundAnMlpAreWhole) {
  const Model model = ReadTinyModel(absl::StrFormat(
      R"({"model_type": "gemma3_text", %s, "num_hidden_layers": 1,
          "intermediate_size": 8})",
      kFamilySizes));
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
      model_type, kFamilySizes);
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
  for (const auto& [layout, name] :
       {std::pair(LayoutKind::kMegatron, "megatron"),
        std::pair(LayoutKind::kSglang, "sglang")}) {
    EXPECT_EQ(LayOutErrors(DeepseekV4(), MakeSide(layout)),
              absl::StrFormat("destination: the layout %s does not know "
                              "deepseek_v4; wanted another layout (generic "
                              "places any tensors)\n",
                              name));
  }
}

}  // namespace
}  // namespace refit
