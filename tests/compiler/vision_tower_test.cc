// Vision towers: what families say of them, and what the layouts hold.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "tests/compiler/layout_testing.h"
#include "tests/compiler/model_listing.h"

namespace refit {
namespace {

using namespace layout_testing;

constexpr char kText[] = R"({"hidden_size": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 64,
    "num_hidden_layers": 2, "intermediate_size": 8})";

// A qwen3_vl; `more`: keys of its tower of two blocks.
std::string Qwen3VlTower(const std::string& more = "", int heads = 4,
                         int intermediate = 6) {
  return absl::StrFormat(
      R"({"model_type": "qwen3_vl", "tie_word_embeddings": false,
          "text_config": %s, "vision_config": {"depth": 2, "hidden_size": 8,
          "num_heads": %d, "intermediate_size": %d, "patch_size": 2,
          "spatial_merge_size": 1, "out_hidden_size": 4,
          "num_position_embeddings": 5,
          "deepstack_visual_indexes": [0]%s}})",
      kText, heads, intermediate, more);
}

std::vector<Tensors> OnEngine(const Model& model, const SideSpec& side) {
  return LayOutAndExpand(model, side, fb::Side::kDestination);
}

// Messages alone.
std::string ReadErrors(const std::string& config) {
  Diagnostics diagnostics;
  ReadTinyTower(config, diagnostics);
  const std::string rendered = diagnostics.Render();
  const std::string word = "error: ";
  const size_t at = rendered.find(word);
  if (at == std::string::npos) return rendered;
  return rendered.substr(at + word.size(),
                         rendered.find('\n') - at - word.size());
}

TEST(VisionTowerTest, TensorParallelismCutsTheLinearLayersOfVllmsTower) {
  const Model model = ReadTinyTower(Qwen3VlTower());
  const Tensors hf = Under(Checkpoint(model), "model.visual.");
  const std::vector<Tensors> ranks =
      OnEngine(model, MakeSide(LayoutKind::kVllm, 2));
  const Tensors found = Under(ranks[1], "visual.");
  Tensors wanted = hf;
  const auto rows = [&](const std::string& name, int64_t begin, int64_t end) {
    wanted[name] = Rows(hf.at(name), begin, end);
  };
  const auto columns = [&](const std::string& name, int64_t begin,
                           int64_t end) {
    wanted[name] = Columns(hf.at(name), begin, end);
  };
  for (const std::string block : {"blocks.0.", "blocks.1."}) {
    for (const std::string leaf : {"weight", "bias"}) {
      const Tensor& qkv = hf.at(block + "attn.qkv." + leaf);
      wanted[block + "attn.qkv." + leaf] =
          Concat({Rows(qkv, 4, 8), Rows(qkv, 12, 16), Rows(qkv, 20, 24)});
      rows(block + "mlp.linear_fc1." + leaf, 3, 6);
    }
    columns(block + "attn.proj.weight", 4, 8);
    columns(block + "mlp.linear_fc2.weight", 3, 6);
  }
  for (const std::string merger : {"merger.", "deepstack_merger_list.0."}) {
    rows(merger + "linear_fc1.weight", 4, 8);
    rows(merger + "linear_fc1.bias", 4, 8);
    columns(merger + "linear_fc2.weight", 4, 8);
  }
  ExpectSameTensors(found, wanted);
  EXPECT_TRUE(ranks[1].contains("language_model.model.norm.weight"));
}

TEST(VisionTowerTest, InDataModeEachRankOfVllmHasTheWholeTower) {
  const Model model = ReadTinyTower(Qwen3VlTower());
  SideSpec side = MakeSide(LayoutKind::kVllm, 2);
  side.mm_encoder_tp_mode = Given(EncoderCut::kData);
  const Tensors hf = Under(Checkpoint(model), "model.visual.");
  for (const Tensors& rank : OnEngine(model, side)) {
    ExpectSameTensors(Under(rank, "visual."), hf);
  }
}

TEST(VisionTowerTest, EachStageOfVllmHasTheTower) {
  const Model model = ReadTinyTower(Qwen3VlTower());
  const std::vector<Tensors> ranks =
      OnEngine(model, MakeSide(LayoutKind::kVllm, 1, 2));
  ASSERT_EQ(ranks.size(), 2u);
  ExpectSameTensors(Under(ranks[1], "visual."),
                    Under(Checkpoint(model), "model.visual."));
}

TEST(VisionTowerTest, SglangCutsATowersPositionsAsAVocabulary) {
  const Model model = ReadTinyTower(Qwen3VlTower());
  const Tensors hf = Under(Checkpoint(model), "model.visual.");
  const std::vector<Tensors> ranks =
      OnEngine(model, MakeSide(LayoutKind::kSglang, 2, 2));
  const Tensor& qkv = hf.at("blocks.1.attn.qkv.weight");
  EXPECT_EQ(ranks[1].at("visual.blocks.1.attn.qkv_proj.weight"),
            Concat({Rows(qkv, 4, 8), Rows(qkv, 12, 16), Rows(qkv, 20, 24)}));
  // 5 rows, padded to 64.
  EXPECT_EQ(
      ranks[0].at("visual.pos_embed.weight"),
      Concat({hf.at("pos_embed.weight"), Filled({27, 8}, Tensor::kFill)}));
  EXPECT_EQ(ranks[1].at("visual.pos_embed.weight"),
            Filled({32, 8}, Tensor::kFill));
  // On the first stage alone, unlike the rest.
  EXPECT_FALSE(ranks[2].contains("visual.pos_embed.weight"));
  EXPECT_TRUE(ranks[2].contains("visual.merger.norm.weight"));
}

TEST(VisionTowerTest, SglangCutsATowerByItsAttentionRanks) {
  const Model model = ReadTinyTower(Qwen3VlTower());
  const Tensors hf = Under(Checkpoint(model), "model.visual.");
  SideSpec side = MakeSide(LayoutKind::kSglang, 2);
  side.dp_attention = Given(int64_t{2});
  const std::string proj = "blocks.0.attn.proj.weight";
  EXPECT_EQ(OnEngine(model, side)[1].at("visual." + proj), hf.at(proj));
  side.dp_attention = {.value = 1};
  EXPECT_EQ(OnEngine(model, side)[1].at("visual." + proj),
            Columns(hf.at(proj), 4, 8));
  side.mm_encoder_tp_mode = Given(EncoderCut::kData);
  EXPECT_EQ(OnEngine(model, side)[1].at("visual." + proj), hf.at(proj));
}

TEST(VisionTowerTest, AnExcludedPartOfATowerIsSkippedByName) {
  Model model = ReadTinyTower(Qwen3VlTower());
  const std::vector<Tensors> all =
      OnEngine(model, MakeSide(LayoutKind::kVllm, 2));
  OptionsSpec options;
  options.exclude.value = {"model.visual.blocks.0.*"};
  Diagnostics diagnostics;
  ApplyExcludes(options, model, diagnostics);
  int64_t skipped = 0;
  for (const Param& param : model.params) {
    if (param.skip != SkipReason::kExcluded) continue;
    EXPECT_TRUE(param.FirstName().starts_with("model.visual.blocks.0."));
    ++skipped;
  }
  EXPECT_EQ(skipped, 12);
  // The engine has its tensors all the same.
  EXPECT_EQ(OnEngine(model, MakeSide(LayoutKind::kVllm, 2))[1].size(),
            all[1].size());
}

TEST(VisionTowerTest, FsdpCutsATowersRowsUnderTheCheckpointsNames) {
  const Model model = ReadTinyTower(Qwen3VlTower());
  SideSpec side = MakeSide(LayoutKind::kFsdp);
  side.data_parallel.value = 3;
  const Tensors rank = LayOutAndExpand(model, side, fb::Side::kSource)[1];
  const std::string patches = "model.visual.patch_embed.proj.weight";
  const Tensor whole = Checkpoint(model).at(patches);
  EXPECT_EQ(whole.shape, (std::vector<int64_t>{8, 3, 2, 2, 2}));
  EXPECT_EQ(rank.at(patches), Rows(whole, 3, 6));
}

// A qwen3_5; `more`: keys of its tower of one block.
std::string Qwen35(const std::string& more) {
  return absl::StrFormat(
      R"({"model_type": "qwen3_5", "tie_word_embeddings": false,
          "text_config": {"hidden_size": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 64,
          "num_hidden_layers": 1, "intermediate_size": 8,
          "layer_types": ["full_attention"], "linear_num_key_heads": 2,
          "linear_num_value_heads": 4, "linear_key_head_dim": 2,
          "linear_value_head_dim": 2, "linear_conv_kernel_dim": 2},
          "vision_config": {"depth": 1, "hidden_size": 8, "num_heads": 4,
          "intermediate_size": 6, "patch_size": 2, "spatial_merge_size": 1,
          "out_hidden_size": 4, "num_position_embeddings": 5%s}})",
      more);
}

TEST(VisionTowerTest, MergersOfLayersThatAClassDoesNotHaveAreRefused) {
  EXPECT_EQ(ReadErrors(Qwen35("")), "");
  EXPECT_EQ(ReadErrors(Qwen35(R"(, "deepstack_visual_indexes": [])")), "");
  Diagnostics diagnostics;
  ReadTinyTower(Qwen35(R"(, "deepstack_visual_indexes": [8, 16])"),
                diagnostics);
  EXPECT_EQ(diagnostics.error_count(), 1);
  EXPECT_NE(diagnostics.Render().find(
                "deepstack_visual_indexes is an array, which gives the tower "
                "mergers of layers that no checkpoint of a qwen3_5 has; wanted "
                "[]\n"),
            std::string::npos)
      << diagnostics.Render();
  EXPECT_NE(diagnostics.Render().find("^"), std::string::npos);
}

TEST(VisionTowerTest, ATowerHasTheDefaultsOfItsClass) {
  const Tensors hf = Checkpoint(ReadTinyTower(absl::StrFormat(
      R"({"model_type": "qwen3_vl", "text_config": %s, "vision_config":
          {"hidden_size": 16, "intermediate_size": 2, "patch_size": 1,
           "out_hidden_size": 2}})",
      kText)));
  EXPECT_TRUE(hf.contains("model.visual.blocks.26.norm1.weight"));
  EXPECT_FALSE(hf.contains("model.visual.blocks.27.norm1.weight"));
  EXPECT_TRUE(hf.contains("model.visual.deepstack_merger_list.2.norm.weight"));
  EXPECT_EQ(hf.at("model.visual.pos_embed.weight").shape,
            (std::vector<int64_t>{2304, 16}));
}

// A llama4 with a tower of two layers; `more`: keys of the tower.
std::string Llama4(const std::string& more = "") {
  return absl::StrFormat(
      R"({"model_type": "llama4", "text_config": {"hidden_size": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
          "vocab_size": 64, "num_hidden_layers": 1, "num_local_experts": 2,
          "interleave_moe_layer_step": 2, "intermediate_size": 4,
          "intermediate_size_mlp": 8}, "vision_config": {"hidden_size": 8,
          "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 2,
          "image_size": 6, "intermediate_size": 16, "vision_output_dim": 6,
          "projector_input_dim": 4%s}})",
      more);
}

// No framework builds a tower in a dtype of its own.
TEST(VisionTowerTest, ATowerHasTheModelsDType) {
  const auto dtypes = [](const std::string& beside, const std::string& tower) {
    std::string config = Qwen3VlTower(tower);
    config.insert(1, beside);
    const Model model = ReadTinyTower(config);
    return std::pair(model.params.front().dtype, model.params.back().dtype);
  };
  const std::pair bf16(DType::kBf16, DType::kBf16);
  const std::pair fp32(DType::kFp32, DType::kFp32);
  const std::string beside = R"("dtype": "bfloat16", )";
  EXPECT_EQ(dtypes("", ""), bf16);
  EXPECT_EQ(dtypes(beside, R"(, "dtype": "float32")"), bf16);
  EXPECT_EQ(dtypes(beside, R"(, "torch_dtype": "float32")"), bf16);
  EXPECT_EQ(dtypes("", R"(, "dtype": "bfloat16")"), bf16);
  EXPECT_EQ(
      dtypes(R"("torch_dtype": "float32", )", R"(, "torch_dtype": "bfloat16")"),
      fp32);
}

// vLLM then takes the tower's for the whole model, SGLang takes float16.
TEST(VisionTowerTest, ADTypeThatTheTowerAloneHasIsRefused) {
  for (const std::string key : {"dtype", "torch_dtype"}) {
    for (const std::string& config :
         {Qwen3VlTower(", \"" + key + R"(": "float32")"),
          Llama4(R"(, "projector_output_dim": 4, ")" + key +
                 R"(": "float32")")}) {
      Diagnostics diagnostics;
      ReadTinyTower(config, diagnostics);
      EXPECT_EQ(diagnostics.error_count(), 1);
      EXPECT_EQ(ReadErrors(config),
                key +
                    " float32 is of the vision tower alone, and frameworks "
                    "differ in what dtype the model then has; wanted \"" +
                    key + "\" beside vision_config");
    }
  }
}

TEST(VisionTowerTest, SeparateQueriesKeysAndValuesOfATowerAreFused) {
  const Model model = ReadTinyTower(Llama4(R"(, "projector_output_dim": 4)"));
  const Tensors hf = Checkpoint(model);
  const Tensors rank = OnEngine(model, MakeSide(LayoutKind::kVllm, 2))[1];
  const std::string attention = "vision_model.model.layers.1.self_attn.";
  for (const std::string leaf : {".weight", ".bias"}) {
    EXPECT_EQ(rank.at(attention + "qkv_proj" + leaf),
              Concat({Rows(hf.at(attention + "q_proj" + leaf), 4, 8),
                      Rows(hf.at(attention + "k_proj" + leaf), 4, 8),
                      Rows(hf.at(attention + "v_proj" + leaf), 4, 8)}));
    EXPECT_FALSE(rank.contains(attention + "k_proj" + leaf));
  }
  EXPECT_EQ(rank.at(attention + "o_proj.weight"),
            Columns(hf.at(attention + "o_proj.weight"), 4, 8));
  EXPECT_EQ(rank.at("vision_model.positional_embedding_vlm").shape,
            (std::vector<int64_t>{10, 8}));
}

TEST(VisionTowerTest, WhatJoinsATowerIsCutAlsoInDataMode) {
  const Model model = ReadTinyTower(Llama4(R"(, "projector_output_dim": 4)"));
  const Tensors hf = Checkpoint(model);
  SideSpec side = MakeSide(LayoutKind::kVllm, 2);
  side.mm_encoder_tp_mode = Given(EncoderCut::kData);
  const Tensors rank = OnEngine(model, side)[1];
  const std::string joint = "multi_modal_projector.linear_1.weight";
  EXPECT_EQ(rank.at(joint), Rows(hf.at(joint), 2, 4));
  const std::string patches = "vision_model.patch_embedding.linear.weight";
  EXPECT_EQ(rank.at(patches), hf.at(patches));
}

TEST(VisionTowerTest, SglangCutsTheTowerOfALlama4ByAllOfTensorParallelism) {
  const Model model = ReadTinyTower(Llama4(R"(, "projector_output_dim": 4)"));
  const Tensors hf = Checkpoint(model);
  SideSpec side = MakeSide(LayoutKind::kSglang, 2);
  const Tensors rank = OnEngine(model, side)[1];
  const std::string attention = "vision_model.model.layers.1.self_attn.";
  EXPECT_EQ(rank.at(attention + "proj.weight"),
            Columns(hf.at(attention + "o_proj.weight"), 4, 8));
  const std::string patches = "vision_model.patch_embedding.linear.weight";
  EXPECT_EQ(rank.at(patches), Rows(hf.at(patches), 4, 8));
  const std::string joint = "multi_modal_projector.linear_1.weight";
  EXPECT_EQ(rank.at(joint), hf.at(joint));
  side.mm_encoder_tp_mode = Given(EncoderCut::kData);
  EXPECT_EQ(LayOutErrors(model, side),
            "destination.mm_encoder_tp_mode \"data\": SGLang cuts the vision "
            "tower of llama4 all the same; wanted \"weights\"\n");
  side.mm_encoder_tp_mode = {};
  side.dp_attention = Given(int64_t{2});
  EXPECT_EQ(LayOutErrors(model, side),
            "destination.dp_attention 2: SGLang's llama4 cuts parts of its "
            "vision tower by it and others by tensor_parallel; wanted 1, or "
            "\"vision\": false\n");
}

TEST(VisionTowerTest, SglangsProjectorOfALlama4NeedsNoDivisor) {
  const Model model = ReadTinyTower(
      absl::StrReplaceAll(Llama4(R"(, "projector_output_dim": 4)"),
                          {{"\"text_config\": {\"hidden_size\": 4",
                            "\"text_config\": {\"hidden_size\": 6"}}));
  EXPECT_EQ(LayOutErrors(model, MakeSide(LayoutKind::kSglang, 4)), "");
  EXPECT_EQ(LayOutErrors(model, MakeSide(LayoutKind::kSglang, 8)),
            "destination.tensor_parallel 8 does not divide 4 attention heads\n"
            "destination.tensor_parallel 8 does not divide 4 attention heads "
            "of the vision tower; wanted a divisor\n"
            "destination.tensor_parallel 8 does not divide 4 features of the "
            "vision tower; wanted a divisor\n");
  EXPECT_EQ(LayOutErrors(model, MakeSide(LayoutKind::kVllm, 4)),
            "destination.tensor_parallel 4 does not divide 6 rows of what "
            "joins the vision tower to the language model\n");
}

TEST(VisionTowerTest, AnAdapterThatClassesReadDifferentlyIsRefused) {
  EXPECT_EQ(ReadErrors(Llama4(R"(, "projector_output_dim": 5)")),
            "projector_output_dim is 5, which is not the projector_input_dim, "
            "and classes differ in what that means; wanted both alike");
  EXPECT_EQ(ReadErrors(Llama4(R"(, "projector_output_dim": 4,
                "multi_modal_projector_bias": true)")),
            "multi_modal_projector_bias true is not supported; wanted false");
}

// A gemma3 with a tower of two layers; `more`: keys of the tower.
std::string Gemma3(const std::string& more = R"(, "vision_use_head": false)") {
  return absl::StrFormat(
      R"({"model_type": "gemma3", "text_config": %s, "vision_config":
          {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
           "patch_size": 2, "image_size": 6, "intermediate_size": 12%s}})",
      kText, more);
}

TEST(VisionTowerTest, TensorParallelismCutsTheTowerOfAGemma) {
  const Model model = ReadTinyTower(Gemma3());
  const Tensors hf = Checkpoint(model);
  const Tensors rank = OnEngine(model, MakeSide(LayoutKind::kVllm, 2))[1];
  const std::string layer = "vision_tower.vision_model.encoder.layers.1.";
  for (const std::string leaf : {".weight", ".bias"}) {
    const std::string attention = layer + "self_attn.";
    EXPECT_EQ(rank.at(attention + "qkv_proj" + leaf),
              Concat({Rows(hf.at(attention + "q_proj" + leaf), 4, 8),
                      Rows(hf.at(attention + "k_proj" + leaf), 4, 8),
                      Rows(hf.at(attention + "v_proj" + leaf), 4, 8)}));
    EXPECT_EQ(rank.at(layer + "mlp.fc1" + leaf),
              Rows(hf.at(layer + "mlp.fc1" + leaf), 6, 12));
  }
  EXPECT_EQ(rank.at(layer + "self_attn.out_proj.weight"),
            Columns(hf.at(layer + "self_attn.out_proj.weight"), 4, 8));
  EXPECT_EQ(rank.at(layer + "mlp.fc2.weight"),
            Columns(hf.at(layer + "mlp.fc2.weight"), 6, 12));
  for (const std::string whole :
       {"vision_tower.vision_model.embeddings.position_embedding.weight",
        "vision_tower.vision_model.post_layernorm.bias",
        "multi_modal_projector.mm_input_projection_weight",
        "language_model.model.norm.weight"}) {
    EXPECT_EQ(rank.at(whole), hf.at(whole)) << whole;
  }
}

TEST(VisionTowerTest, SglangHoldsTheTowerOfAGemma) {
  const Model model = ReadTinyTower(Gemma3());
  const Tensors hf = Checkpoint(model);
  const std::vector<Tensors> ranks =
      OnEngine(model, MakeSide(LayoutKind::kSglang, 2));
  const std::string attention =
      "vision_tower.vision_model.encoder.layers.0.self_attn.";
  EXPECT_EQ(ranks[1].at(attention + "proj.weight"),
            Columns(hf.at(attention + "out_proj.weight"), 4, 8));
  // 9 rows, padded to 64.
  const std::string positions =
      "vision_tower.vision_model.embeddings.position_embedding.weight";
  EXPECT_EQ(ranks[0].at(positions),
            Concat({hf.at(positions), Filled({23, 8}, Tensor::kFill)}));
}

TEST(VisionTowerTest, Transformers5NamesTheTowerOfAGemmaAnew) {
  const Model model = ReadTinyTower(Gemma3());
  SideSpec side = MakeSide(LayoutKind::kFsdp);
  const auto names = [&](const std::string& name) {
    return LayOutAndExpand(model, side, fb::Side::kSource)[0].contains(name);
  };
  EXPECT_TRUE(names("vision_tower.vision_model.post_layernorm.weight"));
  EXPECT_TRUE(names("language_model.model.norm.weight"));
  side.version = Given(std::string("5.24"));
  EXPECT_TRUE(names("model.vision_tower.post_layernorm.weight"));
  EXPECT_TRUE(names("model.multi_modal_projector.mm_soft_emb_norm.weight"));
  EXPECT_TRUE(names("model.language_model.norm.weight"));
}

TEST(VisionTowerTest, ATowerThatEnginesAlwaysCutIsNotWhole) {
  const Model model = ReadTinyTower(Gemma3());
  for (const auto& [layout, name] :
       {std::pair(LayoutKind::kVllm, "vLLM"),
        std::pair(LayoutKind::kSglang, "SGLang")}) {
    SideSpec side = MakeSide(layout, 2);
    side.mm_encoder_tp_mode = Given(EncoderCut::kData);
    EXPECT_EQ(
        LayOutErrors(model, side),
        absl::StrFormat("destination.mm_encoder_tp_mode \"data\": %s cuts "
                        "the vision tower of gemma3 all the same; wanted "
                        "\"weights\"\n",
                        name));
  }
  EXPECT_EQ(LayOutErrors(model, MakeSide(LayoutKind::kVllm, 8)),
            "destination.tensor_parallel 8 does not divide 4 attention heads\n"
            "destination.tensor_parallel 8 does not divide 4 attention heads "
            "of the vision tower; wanted a divisor\n"
            "destination.tensor_parallel 8 does not divide 12 features of the "
            "vision tower; wanted a divisor\n");
}

TEST(VisionTowerTest, AHeadOnTheTowerOfAGemmaIsRefused) {
  for (const std::string more : {"", R"(, "vision_use_head": true)"}) {
    EXPECT_EQ(ReadErrors(Gemma3(more)),
              absl::StrFormat("vision_use_head is %s, which gives the tower a "
                              "head that no engine holds; wanted false",
                              more.empty() ? "missing" : "true"));
  }
}

// A kimi_k25 or kimi_vl with a tower of two blocks; `more`: keys of the tower.
std::string Kimi(const std::string& model_type, const std::string& more = "") {
  return absl::StrFormat(
      R"({"model_type": "%s", "tie_word_embeddings": false, "projection_hidden_size": 8,
          "text_config": {"hidden_size": 4,
          "num_attention_heads": 2, "vocab_size": 64, "num_hidden_layers": 1,
          "intermediate_size": 8, "first_k_dense_replace": 1,
          "n_routed_experts": 2, "n_shared_experts": null, "q_lora_rank": null, "kv_lora_rank": 2, "qk_nope_head_dim": 2,
          "qk_rope_head_dim": 2, "v_head_dim": 2}, "vision_config": {"vt_hidden_size": 8,
          "vt_num_hidden_layers": 2, "vt_num_attention_heads": 4,
          "patch_size": 2, "init_pos_emb_height": 3, "init_pos_emb_width": 2,
          "merge_kernel_size": [2, 1], "vt_intermediate_size": 6%s}})",
      model_type, more);
}

TEST(VisionTowerTest, VllmCutsTheTowerOfAKimi) {
  const Model model = ReadTinyTower(Kimi("kimi_k25"));
  const Tensors hf = Checkpoint(model);
  const Tensors rank = OnEngine(model, MakeSide(LayoutKind::kVllm, 2))[1];
  const std::string block = "vision_tower.encoder.blocks.1.";
  for (const std::string leaf : {"weight", "bias"}) {
    const Tensor& qkv = hf.at(block + "wqkv." + leaf);
    EXPECT_EQ(rank.at(block + "wqkv." + leaf),
              Concat({Rows(qkv, 4, 8), Rows(qkv, 12, 16), Rows(qkv, 20, 24)}));
    EXPECT_EQ(rank.at(block + "mlp.fc0." + leaf),
              Rows(hf.at(block + "mlp.fc0." + leaf), 3, 6));
    EXPECT_EQ(rank.at("mm_projector.linear_1." + leaf),
              hf.at("mm_projector.proj.0." + leaf));
  }
  EXPECT_EQ(rank.at(block + "wo.weight"),
            Columns(hf.at(block + "wo.weight"), 4, 8));
  EXPECT_EQ(rank.at("mm_projector.linear_2.weight").shape,
            (std::vector<int64_t>{4, 16}));
  EXPECT_EQ(rank.at("vision_tower.patch_embed.pos_emb.weight").shape,
            (std::vector<int64_t>{3, 2, 8}));
  EXPECT_TRUE(
      rank.contains("language_model.model.layers.0.mlp.down_proj.weight"));
}

TEST(VisionTowerTest, SglangHoldsMlpsOfATowerWholeForOneKimiAlone) {
  for (const std::string family : {"kimi_k25", "kimi_vl"}) {
    const Model model = ReadTinyTower(Kimi(family));
    const Tensors hf = Checkpoint(model);
    const Tensors rank = OnEngine(model, MakeSide(LayoutKind::kSglang, 2))[1];
    const std::string block = "vision_tower.encoder.blocks.0.";
    EXPECT_EQ(rank.at(block + "attn.proj.weight"),
              Columns(hf.at(block + "wo.weight"), 4, 8));
    const Tensor& fc0 = hf.at(block + "mlp.fc0.weight");
    const Tensor& fc1 = hf.at(block + "mlp.fc1.weight");
    const bool whole = family == "kimi_k25";
    EXPECT_EQ(rank.at(block + "mlp.fc0.weight"), whole ? fc0 : Rows(fc0, 3, 6));
    EXPECT_EQ(rank.at(block + "mlp.fc1.weight"),
              whole ? fc1 : Columns(fc1, 3, 6));
  }
}

TEST(VisionTowerTest, KeysOfAKimisTowerThatDisagreeAreRefused) {
  EXPECT_EQ(ReadErrors(Kimi("kimi_k25", R"(, "hidden_size": 8)")), "");
  EXPECT_EQ(ReadErrors(Kimi("kimi_k25", R"(, "hidden_size": 16)")),
            "hidden_size is 16, and vt_hidden_size is 8: frameworks differ in "
            "which they read; wanted both alike");
  EXPECT_EQ(ReadErrors(Kimi("kimi_k25", R"(, "text_hidden_size": 8)")),
            "text_hidden_size is 8, which is not the language model's "
            "hidden_size, and frameworks differ in which they read; wanted "
            "both alike");
  EXPECT_EQ(
      ReadErrors(Kimi("kimi_k25", R"(, "mm_projector_type": "patchmergerv2")")),
      "mm_projector_type \"patchmergerv2\" is not supported; wanted "
      "\"patchmerger\"");
}

TEST(VisionTowerTest, ATowerThatTransformers5HoldsOtherwiseIsRefused) {
  const std::string config = Kimi("kimi_k25");
  SideSpec side = MakeSide(LayoutKind::kFsdp);
  side.version = Given(std::string("5.24"));
  EXPECT_EQ(LayOutErrors(ReadTinyTower(config), side),
            "destination: transformers 5 holds rows of the vision tower of "
            "kimi_k25 in an order that no plan has; wanted \"vision\": false, "
            "or neither version nor fused_experts for modules named as in the "
            "checkpoint\n");
  EXPECT_TRUE(LayOutAndExpand(ReadTinyModel(config), side, fb::Side::kSource)[0]
                  .contains("model.language_model.norm.weight"));
}

TEST(VisionTowerTest, AModelWithoutATowerIsRefusedOne) {
  EXPECT_EQ(
      ReadErrors(R"({"model_type": "qwen3", "hidden_size": 4,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
      "vocab_size": 64, "num_hidden_layers": 2, "intermediate_size": 8})"),
      "source.vision is true, and no vision tower of this qwen3 is known; "
      "wanted \"vision\": false");
  EXPECT_EQ(ReadErrors(Qwen3VlTower("", /*heads=*/3)),
            "num_heads 3 does not divide hidden_size 8");
}

// Older files have the language model's keys beside the tower's.
TEST(VisionTowerTest, ATowerThatNoLayoutKnowsIsLeftOut) {
  const auto config = [](const std::string& text) {
    return R"({"model_type": "qwen2_5_vl", "tie_word_embeddings": false,
               "vision_config": {"depth": 2}, )" +
           text + "}";
  };
  std::string keys = kText;
  const std::string nested = config("\"text_config\": " + keys);
  keys = keys.substr(1, keys.size() - 2);
  const Model model = ReadTinyModel(nested);
  EXPECT_EQ(ModelListing(model), ModelListing(ReadTinyModel(config(keys))));
  EXPECT_TRUE(OnEngine(model, MakeSide(LayoutKind::kVllm))[0].contains(
      "language_model.model.layers.1.self_attn.qkv_proj.bias"));
  EXPECT_EQ(ReadErrors(nested),
            "source.vision is true, and no vision tower of this qwen2_5_vl is "
            "known; wanted \"vision\": false");
}

TEST(VisionTowerTest, ParametersWithoutAFamilyHaveNoTower) {
  Job job;
  job.model.parameters = {
      {.name = "a", .shape = {2}, .dtype = DType::kBf16, .place = {}}};
  job.destination.key = "destination";
  job.destination.vision = Given(false);
  Diagnostics diagnostics;
  ReadModel(job, diagnostics);
  EXPECT_NE(diagnostics.Render().find(
                "destination.vision: no parameter of this model is known to be "
                "of a vision tower; wanted options.exclude with the names to "
                "leave out"),
            std::string::npos);
}

TEST(VisionTowerTest, SizesThatDoNotFitATowerAreRefused) {
  const Model model = ReadTinyTower(Qwen3VlTower());
  const std::string wanted =
      " of the vision tower; wanted a divisor, or \"mm_encoder_tp_mode\": "
      "\"data\"\n";
  EXPECT_EQ(
      LayOutErrors(model, MakeSide(LayoutKind::kVllm, 4)),
      "destination.tensor_parallel 4 does not divide 6 features" + wanted);
  const Model wide =
      ReadTinyTower(Qwen3VlTower("", /*heads=*/2, /*intermediate=*/8));
  EXPECT_EQ(LayOutErrors(wide, MakeSide(LayoutKind::kVllm, 4)),
            "destination.tensor_parallel 4 does not divide 2 attention heads" +
                wanted);
  SideSpec side = MakeSide(LayoutKind::kVllm, 4);
  side.mm_encoder_tp_mode = Given(EncoderCut::kData);
  EXPECT_EQ(LayOutErrors(wide, side), "");
  for (const std::string& config : {Qwen3VlTower(), Gemma3()}) {
    EXPECT_EQ(
        LayOutErrors(ReadTinyModel(config), side),
        "destination.mm_encoder_tp_mode is of a vision tower, and this job "
        "moves none; wanted \"vision\": true beside it\n");
  }
}

TEST(VisionTowerTest, LayoutsThatDoNotKnowATowerRefuseIt) {
  const Model model = ReadTinyTower(Qwen3VlTower());
  EXPECT_EQ(
      LayOutErrors(model, MakeSide(LayoutKind::kFsdp, 2)),
      "destination.tensor_parallel 2 cannot place parameter "
      "\"model.visual.patch_embed.proj.weight\"; wanted a dense model and "
      "\"vision\": false, or layout \"generic\" with its placements\n");
}

}  // namespace
}  // namespace refit
