// Mamba-2 mixers, gated delta nets, attention with an output gate and experts
// in one tensor: one rank of each framework written out from whole tensors.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/compile.h"
#include "plan/plan_file.h"
#include "tests/compiler/layout_testing.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {
namespace {

using namespace layout_testing;

// Layers: Mamba, MLP, attention, experts of width 3. 4 Mamba heads of 2 rows, 2
// groups of state 3: the rows of in_proj are z 0, x 8, B 16, C 22, dt 28.
constexpr char kNemotron[] = R"({"model_type": "nemotron_h", "hidden_size": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
    "vocab_size": 64, "num_hidden_layers": 4,
    "hybrid_override_pattern": "M-*E", "intermediate_size": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 2, "n_groups": %d,
    "ssm_state_size": 3, "conv_kernel": 2, "n_routed_experts": 4,
    "moe_intermediate_size": 4, "moe_shared_expert_intermediate_size": 8,
    "moe_latent_size": 3})";
// Layer 0 is a delta net of 2 key heads (1 row) and 4 value heads (2 rows):
// per key head [q 1, k 1, v 4, z 4] and [b 2, a 2]. Layer 1 is attention.
constexpr char kQwen3Next[] = R"({"model_type": "qwen3_next", "hidden_size": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1,
    "vocab_size": 64, "num_hidden_layers": 2, "full_attention_interval": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 1, "linear_value_head_dim": 2,
    "linear_conv_kernel_dim": 2, "num_experts": 2, "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 4})";
constexpr char kGptOss[] = R"({"model_type": "gpt_oss", "hidden_size": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 1,
    "vocab_size": 64, "num_hidden_layers": 1, "num_local_experts": 4,
    "intermediate_size": 4})";

// Rows of one tensor in the order of `ranges`.
Tensor Take(const Tensor& tensor,
            const std::vector<std::pair<int64_t, int64_t>>& ranges) {
  std::vector<Tensor> parts;
  for (const auto& [begin, end] : ranges) {
    parts.push_back(Rows(tensor, begin, end));
  }
  return Concat(parts);
}

TEST(MixerLayoutTest, MegatronCutsEachPartOfAMambaMixer) {
  const Model model = ReadTinyModel(absl::StrFormat(kNemotron, 2));
  const Tensors hf = Under(Checkpoint(model), "backbone.layers.0.");
  const std::vector<Tensors> ranks = LayOutAndExpand(
      model, MakeSide(LayoutKind::kMegatron, 2), fb::Side::kSource);
  Tensors wanted = {
      {"in_proj.layer_norm_weight", hf.at("norm.weight")},
      {"in_proj.weight",
       Take(hf.at("mixer.in_proj.weight"),
            {{4, 8}, {12, 16}, {19, 22}, {25, 28}, {30, 32}})},
      {"conv1d.weight",
       Take(hf.at("mixer.conv1d.weight"), {{4, 8}, {11, 14}, {17, 20}})},
      {"conv1d.bias",
       Take(hf.at("mixer.conv1d.bias"), {{4, 8}, {11, 14}, {17, 20}})},
      {"A_log", Rows(hf.at("mixer.A_log"), 2, 4)},
      {"D", Rows(hf.at("mixer.D"), 2, 4)},
      {"dt_bias", Rows(hf.at("mixer.dt_bias"), 2, 4)},
      {"norm.weight", Rows(hf.at("mixer.norm.weight"), 4, 8)},
      {"out_proj.weight", Columns(hf.at("mixer.out_proj.weight"), 4, 8)}};
  ExpectSameTensors(Under(ranks[1], "decoder.layers.0.mixer."), wanted);
}

TEST(MixerLayoutTest, MegatronsMambaMixersHaveNamesAndDTypesOfTheRelease) {
  const Model model = ReadTinyModel(absl::StrFormat(kNemotron, 2));
  const std::string mixer = "decoder.layers.{0}.mixer.";
  SideSpec side = MakeSide(LayoutKind::kMegatron);
  for (const std::string name : {"A_log", "D", "dt_bias"}) {
    EXPECT_EQ(BufferOf(model, side, mixer + name).dtype, DType::kBf16) << name;
  }
  EXPECT_FALSE(BufferOf(model, side, mixer + "conv1d.weight").shape.empty());
  side.mamba_fp32 = Given(true);
  EXPECT_EQ(BufferOf(model, side, mixer + "A_log").dtype, DType::kFp32);
  EXPECT_EQ(BufferOf(model, side, mixer + "D").dtype, DType::kFp32);
  EXPECT_EQ(BufferOf(model, side, mixer + "dt_bias").dtype, DType::kBf16);
  side.version = Given<std::string>("0.17");
  EXPECT_FALSE(BufferOf(model, side, mixer + "conv1d_weight").shape.empty());
}

TEST(MixerLayoutTest, MegatronsHybridLayersHaveTheirOwnNormsAndNoGates) {
  const Model model = ReadTinyModel(absl::StrFormat(kNemotron, 2));
  const Tensors hf = Checkpoint(model);
  SideSpec side = MakeSide(LayoutKind::kMegatron, 2);
  side.expert_tensor_parallel.value = 2;
  const std::vector<Tensors> ranks =
      LayOutAndExpand(model, side, fb::Side::kSource);
  const auto of = [&](int layer, const std::string& name) -> const Tensor& {
    return hf.at(absl::StrFormat("backbone.layers.%d.%s", layer, name));
  };
  ExpectSameTensors(
      Under(ranks[1], "decoder.layers.1."),
      {{"mlp.linear_fc1.layer_norm_weight", of(1, "norm.weight")},
       {"mlp.linear_fc1.weight", Rows(of(1, "mixer.up_proj.weight"), 4, 8)},
       {"mlp.linear_fc2.weight",
        Columns(of(1, "mixer.down_proj.weight"), 4, 8)}});
  Tensors experts = {
      {"pre_mlp_layernorm.weight", of(3, "norm.weight")},
      {"mlp.router.weight", of(3, "mixer.gate.weight")},
      {"mlp.router.expert_bias", of(3, "mixer.gate.e_score_correction_bias")},
      {"mlp.fc1_latent_proj.weight", of(3, "mixer.fc1_latent_proj.weight")},
      {"mlp.fc2_latent_proj.weight", of(3, "mixer.fc2_latent_proj.weight")},
      {"mlp.shared_experts.linear_fc1.weight",
       Rows(of(3, "mixer.shared_experts.up_proj.weight"), 4, 8)},
      {"mlp.shared_experts.linear_fc2.weight",
       Columns(of(3, "mixer.shared_experts.down_proj.weight"), 4, 8)}};
  for (int k = 0; k < 4; ++k) {
    const std::string expert = absl::StrFormat("mixer.experts.%d.", k);
    experts[absl::StrCat("mlp.experts.linear_fc1.weight", k)] =
        Rows(of(3, expert + "up_proj.weight"), 2, 4);
    experts[absl::StrCat("mlp.experts.linear_fc2.weight", k)] =
        Columns(of(3, expert + "down_proj.weight"), 2, 4);
  }
  ExpectSameTensors(Under(ranks[1], "decoder.layers.3."), experts);
  ExpectSameTensors(Under(ranks[1], "decoder.final_norm."),
                    {{"weight", hf.at("backbone.norm_f.weight")}});
}

TEST(MixerLayoutTest, VllmKeepsASingleMambaGroupWholeOnEachRank) {
  const Model model = ReadTinyModel(absl::StrFormat(kNemotron, 1));
  const Tensors hf = Under(Checkpoint(model), "backbone.layers.0.mixer.");
  const std::vector<Tensors> ranks = LayOutAndExpand(
      model, MakeSide(LayoutKind::kVllm, 2), fb::Side::kDestination);
  // z 0, x 8, B 16, C 19, dt 22.
  ExpectSameTensors(
      Under(ranks[1], "model.layers.0.mixer."),
      {{"in_proj.weight",
        Take(hf.at("in_proj.weight"),
             {{4, 8}, {12, 16}, {16, 19}, {19, 22}, {24, 26}})},
       {"conv1d.weight",
        Take(hf.at("conv1d.weight"), {{4, 8}, {8, 11}, {11, 14}})},
       {"conv1d.bias", Take(hf.at("conv1d.bias"), {{4, 8}, {8, 11}, {11, 14}})},
       {"A", Rows(hf.at("A_log"), 2, 4)},
       {"D", Rows(hf.at("D"), 2, 4)},
       {"dt_bias", Rows(hf.at("dt_bias"), 2, 4)},
       {"norm.weight", Rows(hf.at("norm.weight"), 4, 8)},
       {"out_proj.weight", Columns(hf.at("out_proj.weight"), 4, 8)}});
}

TEST(MixerLayoutTest, MambaGroupsThatCannotBeCutAreReported) {
  const Model one = ReadTinyModel(absl::StrFormat(kNemotron, 1));
  EXPECT_EQ(LayOutErrors(one, MakeSide(LayoutKind::kMegatron, 2)),
            "destination.tensor_parallel 2 does not divide 1 Mamba groups\n");
  const Model two = ReadTinyModel(absl::StrFormat(kNemotron, 2));
  EXPECT_EQ(LayOutErrors(two, MakeSide(LayoutKind::kVllm, 4)),
            "destination.tensor_parallel 4 does not divide 2 Mamba groups\n");
}

TEST(MixerLayoutTest, MegatronGathersThePartsOfADeltaNetsHeads) {
  const Model model = ReadTinyModel(kQwen3Next);
  const Tensors hf = Under(Checkpoint(model), "model.layers.0.linear_attn.");
  const std::vector<Tensors> whole = LayOutAndExpand(
      model, MakeSide(LayoutKind::kMegatron, 1), fb::Side::kSource);
  const Tensor& qkvz = hf.at("in_proj_qkvz.weight");
  const Tensor& ba = hf.at("in_proj_ba.weight");
  EXPECT_EQ(whole[0].at("decoder.layers.0.self_attention.in_proj.weight"),
            Concat({Take(qkvz, {{0, 1},
                                {10, 11},
                                {1, 2},
                                {11, 12},
                                {2, 6},
                                {12, 16},
                                {6, 10},
                                {16, 20}}),
                    Take(ba, {{0, 2}, {4, 6}, {2, 4}, {6, 8}})}));
  const std::vector<Tensors> ranks = LayOutAndExpand(
      model, MakeSide(LayoutKind::kMegatron, 2), fb::Side::kSource);
  const Tensors found = Under(ranks[1], "decoder.layers.0.self_attention.");
  // Key head 1.
  EXPECT_EQ(found.at("in_proj.weight"),
            Concat({Rows(qkvz, 10, 20), Rows(ba, 4, 8)}));
  EXPECT_EQ(found.at("conv1d.weight"),
            Take(hf.at("conv1d.weight"), {{1, 2}, {3, 4}, {8, 12}}));
  EXPECT_EQ(found.at("out_norm.weight"), hf.at("norm.weight"));
}

TEST(MixerLayoutTest, MegatronsQueryGroupsHoldTheirOutputGates) {
  const Model model = ReadTinyModel(kQwen3Next);
  const Tensors hf = Under(Checkpoint(model), "model.layers.1.self_attn.");
  const std::vector<Tensors> ranks = LayOutAndExpand(
      model, MakeSide(LayoutKind::kMegatron, 2), fb::Side::kSource);
  // Rows of q_proj: q0, gate0, q1, gate1 … The second group has heads 2 and 3.
  EXPECT_EQ(
      ranks[1].at("decoder.layers.1.self_attention.linear_qkv.weight"),
      Concat({Take(hf.at("q_proj.weight"), {{4, 5}, {6, 7}, {5, 6}, {7, 8}}),
              Rows(hf.at("k_proj.weight"), 1, 2),
              Rows(hf.at("v_proj.weight"), 1, 2)}));
}

TEST(MixerLayoutTest, VllmKeepsTheCheckpointsOrderOfHeads) {
  const Model model = ReadTinyModel(kQwen3Next);
  const Tensors hf = Checkpoint(model);
  const std::vector<Tensors> ranks = LayOutAndExpand(
      model, MakeSide(LayoutKind::kVllm, 2), fb::Side::kDestination);
  const Tensors delta = Under(hf, "model.layers.0.linear_attn.");
  const Tensors found = Under(ranks[1], "model.layers.0.linear_attn.");
  EXPECT_EQ(found.at("in_proj_qkvz.weight"),
            Rows(delta.at("in_proj_qkvz.weight"), 10, 20));
  EXPECT_EQ(found.at("in_proj_ba.weight"),
            Rows(delta.at("in_proj_ba.weight"), 4, 8));
  const Tensors attention = Under(hf, "model.layers.1.self_attn.");
  EXPECT_EQ(ranks[1].at("model.layers.1.self_attn.qkv_proj.weight"),
            Concat({Rows(attention.at("q_proj.weight"), 4, 8),
                    Rows(attention.at("k_proj.weight"), 1, 2),
                    Rows(attention.at("v_proj.weight"), 1, 2)}));
}

// Element (expert, in, out, gate or up) of a whole gate_up_proj.
int64_t GateUp(const Tensor& tensor, int64_t expert, int64_t in, int64_t out,
               int64_t half) {
  const std::vector<int64_t>& shape = tensor.shape;
  return tensor.cells[((expert * shape[1] + in) * shape[2] + out) * 2 + half];
}

TEST(MixerLayoutTest, MegatronPartsTheColumnsOfFusedExperts) {
  const Model model = ReadTinyModel(kGptOss);
  const Tensors hf = Under(Checkpoint(model), "model.layers.0.mlp.experts.");
  SideSpec side = MakeSide(LayoutKind::kMegatron, 2);
  side.data_parallel.value = 2;
  side.expert_parallel.value = 2;
  side.expert_tensor_parallel.value = 2;
  const std::vector<Tensors> ranks =
      LayOutAndExpand(model, side, fb::Side::kSource);
  // Rank 3 has the second halves of experts 2 and 3.
  const Tensors found = Under(ranks[3], "decoder.layers.0.mlp.experts.");
  const Tensor& first = hf.at("gate_up_proj");
  const Tensor& down = hf.at("down_proj");
  Tensor fc1 = {.shape = {4, 3}, .cells = {}};
  for (const int64_t half : {0, 1}) {
    for (const int64_t out : {2, 3}) {
      for (const int64_t in : {0, 1, 2}) {
        fc1.cells.push_back(GateUp(first, 3, in, out, half));
      }
    }
  }
  EXPECT_EQ(found.at("linear_fc1.weight1"), fc1);
  Tensor fc2 = {.shape = {3, 2}, .cells = {}};
  for (const int64_t out : {0, 1, 2}) {
    for (const int64_t in : {2, 3}) {
      fc2.cells.push_back(down.cells[(3 * 4 + in) * 3 + out]);
    }
  }
  EXPECT_EQ(found.at("linear_fc2.weight1"), fc2);
  const Tensor& bias = hf.at("gate_up_proj_bias");
  EXPECT_EQ(found.at("linear_fc1.bias1"),
            (Tensor{.shape = {4},
                    .cells = {bias.cells[3 * 8 + 4], bias.cells[3 * 8 + 6],
                              bias.cells[3 * 8 + 5], bias.cells[3 * 8 + 7]}}));
  EXPECT_EQ(found.size(), 8u);
}

TEST(MixerLayoutTest, VllmAlternatesGateAndUpRowsOfFusedExperts) {
  const Model model = ReadTinyModel(kGptOss);
  const Tensors hf = Under(Checkpoint(model), "model.layers.0.");
  const std::vector<Tensors> ranks = LayOutAndExpand(
      model, MakeSide(LayoutKind::kVllm, 2), fb::Side::kDestination);
  const std::string module = "model.layers.0.mlp.experts.routed_experts.";
  Tensor w13 = {.shape = {4, 4, 3}, .cells = {}};
  for (int64_t expert = 0; expert < 4; ++expert) {
    for (const int64_t out : {2, 3}) {
      for (const int64_t half : {0, 1}) {
        for (const int64_t in : {0, 1, 2}) {
          w13.cells.push_back(
              GateUp(hf.at("mlp.experts.gate_up_proj"), expert, in, out, half));
        }
      }
    }
  }
  EXPECT_EQ(ranks[1].at(module + "w13_weight"), w13);
  EXPECT_EQ(ranks[0].at(module + "w2_bias"),
            hf.at("mlp.experts.down_proj_bias"));
  EXPECT_EQ(ranks[1].at(module + "w2_bias"), Filled({4, 3}, Tensor::kFill));
  EXPECT_EQ(ranks[1].at("model.layers.0.attn.sinks"),
            Rows(hf.at("self_attn.sinks"), 1, 2));
  EXPECT_TRUE(ranks[1].contains("model.embedding.weight"));
}

// "tensor name: hook" of all post-hooks of a plan.
std::set<std::string> PostHooksOf(const std::string& config, LayoutKind source,
                                  LayoutKind destination) {
  const TemporaryDirectory directory;
  Job job;
  job.model.config_path = directory.Write("config.json", config);
  job.source = MakeSide(source);
  job.destination = MakeSide(destination);
  Diagnostics diagnostics;
  absl::StatusOr<std::vector<uint8_t>> bytes = Compile(job, {}, diagnostics);
  EXPECT_TRUE(bytes.ok()) << diagnostics.Render() << bytes.status();
  if (!bytes.ok()) return {};
  const absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(*std::move(bytes));
  EXPECT_TRUE(plan.ok()) << plan.status();
  std::set<std::string> hooks;
  for (const fb::Buffer* buffer : *plan->body().buffers()) {
    if (buffer->post_hooks() == nullptr) continue;
    for (const fb::PostHook* hook : *buffer->post_hooks()) {
      hooks.insert(
          absl::StrCat(TensorName(*buffer, 0), ": ", hook->name()->str()));
    }
  }
  return hooks;
}

TEST(PostHookTest, AreThoseByWhichTheTwoSidesDiffer) {
  using enum LayoutKind;
  const std::string nemotron = absl::StrFormat(kNemotron, 1);
  EXPECT_EQ(PostHooksOf(nemotron, kMegatron, kVllm),
            (std::set<std::string>{"model.layers.0.mixer.A: negative-exp"}));
  EXPECT_EQ(
      PostHooksOf(nemotron, kVllm, kMegatron),
      (std::set<std::string>{"decoder.layers.0.mixer.A_log: log-of-negative"}));
  EXPECT_EQ(PostHooksOf(nemotron, kMegatron, kMegatron),
            std::set<std::string>());
  EXPECT_EQ(PostHooksOf(kQwen3Next, kMegatron, kVllm),
            (std::set<std::string>{
                "model.layers.0.linear_attn.norm.weight: add-one"}));
  EXPECT_EQ(
      PostHooksOf(kQwen3Next, kVllm, kMegatron),
      (std::set<std::string>{"decoder.layers.0.self_attention.out_norm.weight: "
                             "subtract-one"}));
}

}  // namespace
}  // namespace refit
