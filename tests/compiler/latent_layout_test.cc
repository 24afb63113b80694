// Latent attention, shared experts and multi-token prediction: one rank of each
// framework written out from whole tensors.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/compiler/layout_testing.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {
namespace {

using namespace layout_testing;

// Layer 0 is dense, layer 1 has experts, layer 2 predicts. Four heads: 12 rows
// of query, 12 of key and value, 4 columns of the output.
Model ReadTinyModel(const std::string& query_rank, bool mtp = true,
                    int64_t shared_experts = 2) {
  const TemporaryDirectory directory;
  Job job;
  job.source.mtp = Given(mtp);
  job.model.config_path = directory.Write(
      "config.json",
      absl::StrFormat(
          R"({"model_type": "deepseek_v3", "hidden_size": 4, "vocab_size": 64,
              "num_hidden_layers": 2, "num_nextn_predict_layers": 1,
              "num_attention_heads": 4, "q_lora_rank": %s, "kv_lora_rank": 3,
              "qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 1,
              "intermediate_size": 8, "moe_intermediate_size": 4,
              "first_k_dense_replace": 1, "n_routed_experts": 8,
              "n_shared_experts": %d})",
          query_rank, shared_experts));
  Diagnostics diagnostics;
  const std::optional<Model> model = ReadModel(job, diagnostics);
  EXPECT_EQ(diagnostics.Render(), "");
  return model.value_or(Model());
}

class LatentLayoutTest : public ::testing::Test {
 protected:
  explicit LatentLayoutTest(bool mtp = true)
      : model_(ReadTinyModel("2", mtp)), hf_(Checkpoint(model_)) {}

  const Tensor& Hf(int64_t layer, const std::string& name) const {
    return hf_.at(absl::StrFormat("model.layers.%d.%s", layer, name));
  }
  Tensor GateAndUp(int64_t layer, const std::string& module, int64_t begin,
                   int64_t end) const {
    return Concat({Rows(Hf(layer, module + ".gate_proj.weight"), begin, end),
                   Rows(Hf(layer, module + ".up_proj.weight"), begin, end)});
  }
  static std::string Expert(int64_t expert) {
    return absl::StrFormat("mlp.experts.%d", expert);
  }

  const Model model_;
  const Tensors hf_;
};

class LatentLayoutWithoutPredictionTest : public LatentLayoutTest {
 protected:
  LatentLayoutWithoutPredictionTest() : LatentLayoutTest(/*mtp=*/false) {}
};

TEST_F(LatentLayoutTest, MegatronsLastStageHoldsThePredictionLayer) {
  SideSpec side = MakeSide(LayoutKind::kMegatron);
  side.tensor_parallel.value = 2;
  side.pipeline_parallel.value = 2;
  side.expert_parallel.value = 2;
  side.make_vocab_size_divisible_by.value = 8;

  // The second tensor rank: heads 2 and 3, experts 4 to 7.
  Tensors wanted;
  for (const auto& [prefix, layer] :
       {std::pair<std::string, int64_t>{"decoder.layers.0.", 1},
        std::pair<std::string, int64_t>{"mtp.layers.0.mtp_model_layer.", 2}}) {
    const auto whole = [&, layer = layer, prefix = prefix](
                           const std::string& name, const std::string& hf) {
      wanted[prefix + name] = Hf(layer, hf);
    };
    const std::string attention = "self_attention.linear_";
    whole("input_layernorm.weight", "input_layernorm.weight");
    whole(attention + "q_down_proj.weight", "self_attn.q_a_proj.weight");
    whole(attention + "q_up_proj.layer_norm_weight",
          "self_attn.q_a_layernorm.weight");
    wanted[prefix + attention + "q_up_proj.weight"] =
        Rows(Hf(layer, "self_attn.q_b_proj.weight"), 6, 12);
    whole(attention + "kv_down_proj.weight",
          "self_attn.kv_a_proj_with_mqa.weight");
    whole(attention + "kv_up_proj.layer_norm_weight",
          "self_attn.kv_a_layernorm.weight");
    wanted[prefix + attention + "kv_up_proj.weight"] =
        Rows(Hf(layer, "self_attn.kv_b_proj.weight"), 6, 12);
    wanted[prefix + attention + "proj.weight"] =
        Columns(Hf(layer, "self_attn.o_proj.weight"), 2, 4);
    whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight");
    whole("mlp.router.weight", "mlp.gate.weight");
    whole("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias");
    wanted[prefix + "mlp.shared_experts.linear_fc1.weight"] =
        GateAndUp(layer, "mlp.shared_experts", 4, 8);
    wanted[prefix + "mlp.shared_experts.linear_fc2.weight"] =
        Columns(Hf(layer, "mlp.shared_experts.down_proj.weight"), 4, 8);
    for (int64_t k = 0; k < 4; ++k) {
      const std::string experts = prefix + "mlp.experts.linear_fc";
      wanted[absl::StrFormat("%s1.weight%d", experts, k)] =
          GateAndUp(layer, Expert(4 + k), 0, 4);
      wanted[absl::StrFormat("%s2.weight%d", experts, k)] =
          Hf(layer, Expert(4 + k) + ".down_proj.weight");
    }
  }
  wanted["mtp.layers.0.enorm.weight"] = Hf(2, "enorm.weight");
  wanted["mtp.layers.0.hnorm.weight"] = Hf(2, "hnorm.weight");
  wanted["mtp.layers.0.eh_proj.weight"] = Rows(Hf(2, "eh_proj.weight"), 2, 4);
  wanted["mtp.layers.0.final_layernorm.weight"] =
      Hf(2, "shared_head.norm.weight");
  wanted["decoder.final_layernorm.weight"] = hf_.at("model.norm.weight");
  wanted["output_layer.weight"] = Rows(hf_.at("lm_head.weight"), 32, 64);
  const std::string embedding = "embedding.word_embeddings.weight";

  wanted[embedding] = Rows(hf_.at("model.embed_tokens.weight"), 32, 64);
  ExpectSameTensors(LayOutAndExpand(model_, side, fb::Side::kDestination).at(3),
                    wanted);
  wanted[embedding] = Filled({32, 4}, Tensor::kSkip);
  ExpectSameTensors(LayOutAndExpand(model_, side, fb::Side::kSource).at(3),
                    wanted);
}

TEST_F(LatentLayoutTest, MegatronsExpertsMayBeOneTensorOfAlternatingBlocks) {
  SideSpec side = MakeSide(LayoutKind::kMegatron);
  side.data_parallel.value = 4;
  side.expert_parallel.value = 4;
  side.moe_mlp_glu_interleave_size = Given<int64_t>(2);
  side.moe_single_grouped_weight = Given(true);
  const Tensors rank =
      LayOutAndExpand(model_, side, fb::Side::kDestination).at(1);
  std::vector<Tensor> first, second;
  for (const int64_t expert : {2, 3}) {
    first.push_back(Concat({GateAndUp(1, Expert(expert), 0, 2),
                            GateAndUp(1, Expert(expert), 2, 4)}));
    second.push_back(Hf(1, Expert(expert) + ".down_proj.weight"));
  }
  const std::string experts = "decoder.layers.1.mlp.experts.linear_fc";
  EXPECT_EQ(rank.at(experts + "1.weight"), Stack(first));
  EXPECT_EQ(rank.at(experts + "2.weight"), Stack(second));
}

TEST_F(LatentLayoutTest, InterleavedBlocksFillARanksPartOfAnExpert) {
  SideSpec side = MakeSide(LayoutKind::kMegatron);
  side.tensor_parallel.value = 2;
  side.expert_tensor_parallel.value = 2;
  side.moe_mlp_glu_interleave_size = Given<int64_t>(4);
  EXPECT_EQ(LayOutErrors(model_, side),
            "destination.moe_mlp_glu_interleave_size 4 does not divide 2 "
            "intermediate features that a rank holds of an expert\n");
}

TEST_F(LatentLayoutTest, VllmsDraftModelIsOnTheLastStage) {
  SideSpec side = MakeSide(LayoutKind::kVllm);
  side.tensor_parallel.value = 2;
  side.pipeline_parallel.value = 2;
  side.data_parallel.value = 2;
  side.expert_parallel_enabled.value = true;

  // The second data rank's second tensor rank of the last stage: heads 2 and 3,
  // experts 6 and 7, all of the shared experts.
  Tensors wanted;
  for (const auto& [prefix, layer] :
       {std::pair<std::string, int64_t>{"model.layers.1.", 1},
        std::pair<std::string, int64_t>{"model.layers.2.mtp_block.", 2}}) {
    for (const char* whole :
         {"input_layernorm.weight", "post_attention_layernorm.weight",
          "self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight",
          "mlp.gate.weight", "mlp.gate.e_score_correction_bias",
          "mlp.shared_experts.down_proj.weight"}) {
      wanted[prefix + whole] = Hf(layer, whole);
    }
    for (const char* by_heads :
         {"self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight"}) {
      wanted[prefix + by_heads] = Rows(Hf(layer, by_heads), 6, 12);
    }
    wanted[prefix + "self_attn.fused_qkv_a_proj.weight"] =
        Concat({Hf(layer, "self_attn.q_a_proj.weight"),
                Hf(layer, "self_attn.kv_a_proj_with_mqa.weight")});
    wanted[prefix + "self_attn.o_proj.weight"] =
        Columns(Hf(layer, "self_attn.o_proj.weight"), 2, 4);
    // Two heads: latent rank 3 to a value of 1, a key of 2 to latent rank 3.
    const std::string derived = prefix + "self_attn.mla_attn.mla_attn.";
    wanted[derived + "W_UV"] = Filled({2, 3, 1}, Tensor::kSkip);
    wanted[derived + "W_UK_T"] = Filled({2, 2, 3}, Tensor::kSkip);
    wanted[prefix + "mlp.shared_experts.gate_up_proj.weight"] =
        GateAndUp(layer, "mlp.shared_experts", 0, 8);
    const std::string experts = prefix + "mlp.experts.routed_experts.";
    wanted[experts + "w13_weight"] = Stack(
        {GateAndUp(layer, Expert(6), 0, 4), GateAndUp(layer, Expert(7), 0, 4)});
    wanted[experts + "w2_weight"] =
        Stack({Hf(layer, Expert(6) + ".down_proj.weight"),
               Hf(layer, Expert(7) + ".down_proj.weight")});
  }
  for (const char* own : {"enorm.weight", "hnorm.weight", "eh_proj.weight",
                          "shared_head.norm.weight"}) {
    wanted[absl::StrFormat("model.layers.2.%s", own)] = Hf(2, own);
  }
  wanted["model.norm.weight"] = hf_.at("model.norm.weight");
  for (const char* vocabulary :
       {"model.embed_tokens.weight", "lm_head.weight"}) {
    wanted[vocabulary] = Rows(hf_.at(vocabulary), 32, 64);
  }
  ExpectSameTensors(LayOutAndExpand(model_, side, fb::Side::kDestination).at(7),
                    wanted);
}

TEST_F(LatentLayoutWithoutPredictionTest, SglangCutsHeadsByItsAttentionRanks) {
  SideSpec side = MakeSide(LayoutKind::kSglang);
  side.tensor_parallel.value = 4;
  side.pipeline_parallel.value = 2;
  side.dp_attention.value = 2;
  side.expert_parallel.value = 2;
  side.embedding.value = EmbeddingCut::kAttention;

  // The third rank of the last stage: heads 0 and 1, the first half of experts
  // 4 to 7, the third quarter of the shared experts and of the head.
  Tensors wanted;
  const std::string prefix = "model.layers.1.";
  for (const char* whole :
       {"input_layernorm.weight", "post_attention_layernorm.weight",
        "self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight",
        "mlp.gate.weight", "mlp.gate.e_score_correction_bias"}) {
    wanted[prefix + whole] = Hf(1, whole);
  }
  for (const char* by_heads :
       {"self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight"}) {
    wanted[prefix + by_heads] = Rows(Hf(1, by_heads), 0, 6);
  }
  wanted[prefix + "self_attn.fused_qkv_a_proj_with_mqa.weight"] =
      Concat({Hf(1, "self_attn.q_a_proj.weight"),
              Hf(1, "self_attn.kv_a_proj_with_mqa.weight")});
  wanted[prefix + "self_attn.o_proj.weight"] =
      Columns(Hf(1, "self_attn.o_proj.weight"), 0, 2);
  wanted[prefix + "mlp.shared_experts.gate_up_proj.weight"] =
      GateAndUp(1, "mlp.shared_experts", 4, 6);
  wanted[prefix + "mlp.shared_experts.down_proj.weight"] =
      Columns(Hf(1, "mlp.shared_experts.down_proj.weight"), 4, 6);
  std::vector<Tensor> w13, w2;
  for (int64_t expert = 4; expert < 8; ++expert) {
    w13.push_back(GateAndUp(1, Expert(expert), 0, 2));
    w2.push_back(Columns(Hf(1, Expert(expert) + ".down_proj.weight"), 0, 2));
  }
  wanted[prefix + "mlp.experts.w13_weight"] = Stack(w13);
  wanted[prefix + "mlp.experts.w2_weight"] = Stack(w2);
  wanted["model.norm.weight"] = hf_.at("model.norm.weight");
  wanted["lm_head.weight"] = Rows(hf_.at("lm_head.weight"), 32, 48);
  ExpectSameTensors(LayOutAndExpand(model_, side, fb::Side::kDestination).at(6),
                    wanted);
}

TEST_F(LatentLayoutWithoutPredictionTest, SglangMayFuseTheSharedExperts) {
  SideSpec side = MakeSide(LayoutKind::kSglang);
  side.tensor_parallel.value = 4;
  side.expert_parallel.value = 2;
  side.shared_experts = Given(SharedExperts::kFused);
  EXPECT_EQ(
      LayOutErrors(model_, side),
      "destination.shared_experts \"fused\" needs shared experts of the "
      "size of one; they have 8 intermediate features, an expert has 4\n");

  side.shared_experts = Given(SharedExperts::kReplicated);
  Tensors rank = LayOutAndExpand(model_, side, fb::Side::kDestination).at(3);
  EXPECT_EQ(rank.at("model.layers.1.mlp.shared_experts.gate_up_proj.weight"),
            GateAndUp(1, "mlp.shared_experts", 0, 8));
  EXPECT_EQ(rank.at("model.layers.1.mlp.shared_experts.down_proj.weight"),
            Hf(1, "mlp.shared_experts.down_proj.weight"));

  // One shared expert: behind the second group's four, the second
  // half of it on the group's second rank.
  const Model model = ReadTinyModel("2", /*mtp=*/false, /*shared_experts=*/1);
  const Tensors hf = Checkpoint(model);
  side.shared_experts = Given(SharedExperts::kFused);
  rank = LayOutAndExpand(model, side, fb::Side::kDestination).at(3);
  const std::string mlp = "model.layers.1.mlp.";
  std::vector<Tensor> w13, w2;
  for (const char* expert :
       {"experts.4", "experts.5", "experts.6", "experts.7", "shared_experts"}) {
    w13.push_back(
        Concat({Rows(hf.at(mlp + expert + ".gate_proj.weight"), 2, 4),
                Rows(hf.at(mlp + expert + ".up_proj.weight"), 2, 4)}));
    w2.push_back(Columns(hf.at(mlp + expert + ".down_proj.weight"), 2, 4));
  }
  EXPECT_EQ(rank.at(mlp + "experts.w13_weight"), Stack(w13));
  EXPECT_EQ(rank.at(mlp + "experts.w2_weight"), Stack(w2));
  EXPECT_FALSE(rank.contains(mlp + "shared_experts.down_proj.weight"));
}

// A model of one layer; `experts` of 2 features, the shared ones of `shared`.
Model ModelWithSharedExperts(const std::string& family, int64_t experts,
                             int64_t shared) {
  const TemporaryDirectory directory;
  Job job;
  job.model.config_path = directory.Write(
      "config.json",
      absl::StrFormat(
          R"({"model_type": "%s", "hidden_size": 2, "vocab_size": 64,
              "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 1, "kv_lora_rank": 3,
              "qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 1,
              "moe_intermediate_size": 2, "first_k_dense_replace": 0,
              "n_routed_experts": %d, "n_shared_experts": %d})",
          family, experts, shared));
  Diagnostics diagnostics;
  const std::optional<Model> model = ReadModel(job, diagnostics);
  EXPECT_EQ(diagnostics.Render(), "");
  return model.value_or(Model());
}

TEST(SglangSharedExpertsTest, AreFusedWhereTheEngineFusesThem) {
  struct Case {
    std::string family;
    int64_t experts, shared, expert_parallel;
    bool fused;
  };
  for (const Case& c :
       {Case{"deepseek_v3", 256, 1, 1, true},
        Case{"deepseek_v3", 256, 1, 2, false},
        Case{"deepseek_v3", 256, 2, 1, false},
        Case{"deepseek_v3", 8, 1, 1, false}, Case{"kimi_k2", 384, 1, 1, false},
        Case{"glm4_moe", 8, 1, 1, true}, Case{"glm4_moe", 8, 1, 2, false},
        Case{"glm4_moe_lite", 8, 1, 1, true},
        Case{"glm4_moe_lite", 8, 2, 1, false}}) {
    SCOPED_TRACE(c.family);
    const Model model = ModelWithSharedExperts(c.family, c.experts, c.shared);
    SideSpec side = MakeSide(LayoutKind::kSglang);
    side.tensor_parallel.value = 2;
    side.expert_parallel.value = c.expert_parallel;
    const std::string mlp = "model.layers.0.mlp.";
    Tensors rank = LayOutAndExpand(model, side, fb::Side::kDestination).at(0);
    EXPECT_EQ(rank.contains(mlp + "shared_experts.down_proj.weight"), !c.fused);
    EXPECT_EQ(rank.at(mlp + "experts.w2_weight").shape[0],
              c.experts / c.expert_parallel + (c.fused ? 1 : 0));
    // The job's word counts.
    side.shared_experts = Given(SharedExperts::kTensor);
    rank = LayOutAndExpand(model, side, fb::Side::kDestination).at(0);
    EXPECT_TRUE(rank.contains(mlp + "shared_experts.down_proj.weight"));
  }
  EXPECT_EQ(LayOutErrors(ModelWithSharedExperts("glm4_moe", 8, 2),
                         MakeSide(LayoutKind::kSglang)),
            "destination.shared_experts \"fused\", SGLang's default here, "
            "needs shared experts of the size of one; they have 4 intermediate "
            "features, an expert has 2\n");
}

TEST(VllmSharedExpertsTest, AreWholeWhereRanksShareTheTokensButForGlm) {
  SideSpec side = MakeSide(LayoutKind::kVllm, 2);
  side.data_parallel.value = 2;
  side.expert_parallel_enabled.value = true;
  const std::string name =
      "model.layers.{0}.mlp.shared_experts.down_proj.weight";
  const auto columns = [&](const std::string& family) {
    return BufferOf(ModelWithSharedExperts(family, 8, 1), side, name).shape[1];
  };
  EXPECT_EQ(columns("deepseek_v3"), 2);
  EXPECT_EQ(columns("kimi_k2"), 2);
  EXPECT_EQ(columns("glm4_moe"), 1);
  EXPECT_EQ(columns("glm4_moe_lite"), 1);
  side.data_parallel.value = 1;
  EXPECT_EQ(columns("deepseek_v3"), 1);
}

TEST_F(LatentLayoutTest, SglangsDraftModelIsAnotherWorker) {
  EXPECT_EQ(LayOutErrors(model_, MakeSide(LayoutKind::kSglang)),
            "destination cannot hold the model's 1 multi-token-prediction "
            "layers: SGLang's draft model is a worker of its own; wanted "
            "\"mtp\": false\n");
}

TEST_F(LatentLayoutTest, QueriesProjectedInOneStepAreCutByHeads) {
  const Model model = ReadTinyModel("null");
  const Tensors hf = Checkpoint(model);
  const std::string vllm_attention = "model.layers.0.self_attn.";
  const Tensor mine = Rows(hf.at(vllm_attention + "q_proj.weight"), 6, 12);
  const Tensor down = hf.at(vllm_attention + "kv_a_proj_with_mqa.weight");

  SideSpec side = MakeSide(LayoutKind::kVllm);
  side.tensor_parallel.value = 2;
  Tensors rank = LayOutAndExpand(model, side, fb::Side::kDestination).at(1);
  EXPECT_EQ(rank.at(vllm_attention + "q_proj.weight"), mine);
  EXPECT_EQ(rank.at(vllm_attention + "kv_a_proj_with_mqa.weight"), down);

  side.layout.value = LayoutKind::kMegatron;
  rank = LayOutAndExpand(model, side, fb::Side::kDestination).at(1);
  const std::string attention = "decoder.layers.0.self_attention.linear_";
  EXPECT_EQ(rank.at(attention + "q_proj.weight"), mine);
  EXPECT_EQ(rank.at(attention + "kv_down_proj.weight"), down);
}

TEST_F(LatentLayoutTest, VllmsLatentProjectionsAreDerivedAgain) {
  BufferTable buffers;
  Diagnostics diagnostics;
  const SideSpec side = MakeSide(LayoutKind::kVllm);
  LayOut({.model = model_,
          .side = side,
          .which = fb::Side::kDestination,
          .buffers = buffers,
          .diagnostics = diagnostics});
  std::vector<std::string> hooked;
  for (const Buffer& buffer : buffers.all()) {
    for (const PostHook& hook : buffer.post_hooks) {
      hooked.push_back(buffer.name + " " + hook.name);
    }
  }
  EXPECT_EQ(hooked, (std::vector<std::string>{
                        "model.layers.{0}.self_attn.kv_b_proj.weight "
                        "derive-latent-projections",
                        "model.layers.{0}.mtp_block.self_attn.kv_b_proj.weight "
                        "derive-latent-projections"}));
}

TEST_F(LatentLayoutTest, HeadsAreNotCutThrough) {
  for (const LayoutKind layout : {LayoutKind::kMegatron, LayoutKind::kVllm}) {
    SideSpec side = MakeSide(layout);
    side.tensor_parallel.value = 8;
    EXPECT_TRUE(
        LayOutErrors(model_, side)
            .starts_with("destination.tensor_parallel 8 does not divide "
                         "4 attention heads\n"));
  }
}

TEST_F(LatentLayoutTest, TheRoutersCorrectionIsFp32OnASideOfAnyDType) {
  for (const LayoutKind layout : {LayoutKind::kMegatron, LayoutKind::kVllm}) {
    SideSpec side = MakeSide(layout);
    side.dtype = Given(DType::kBf16);
    BufferTable buffers;
    Diagnostics diagnostics;
    LayOut({.model = model_,
            .side = side,
            .which = fb::Side::kDestination,
            .buffers = buffers,
            .diagnostics = diagnostics});
    for (const Buffer& buffer : buffers.all()) {
      const bool correction = buffer.name.ends_with("_bias");
      EXPECT_EQ(buffer.dtype, correction ? DType::kFp32 : DType::kBf16)
          << buffer.name;
    }
  }
}

}  // namespace
}  // namespace refit
