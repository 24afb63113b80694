// Sizes that do not fit, each with its message.
#include <gtest/gtest.h>

#include <string>

#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

// That laying out reports `message`, and nothing else.
void ExpectOnly(const Model& model, const SideSpec& side,
                const std::string& message) {
  EXPECT_EQ(LayOutErrors(model, side), message + "\n");
}

SideSpec Megatron() { return MakeSide(LayoutKind::kMegatron); }
SideSpec Vllm() { return MakeSide(LayoutKind::kVllm); }
SideSpec Sglang() { return MakeSide(LayoutKind::kSglang); }

TEST(LayoutErrorTest, TensorParallelDividesAttentionHeads) {
  SideSpec side = Vllm();
  side.tensor_parallel.value = 3;
  ExpectOnly(MakeModel({.heads = 32, .kv_heads = 2, .vocab = 192}), side,
             "destination.tensor_parallel 3 does not divide 32 attention "
             "heads\ndestination.tensor_parallel 3 is not a multiple of 2 "
             "key-value heads");
}

TEST(LayoutErrorTest, TensorParallelDividesKeyValueHeads) {
  SideSpec side = Vllm();
  side.tensor_parallel.value = 3;
  ExpectOnly(MakeModel({.vocab = 192}), side,
             "destination.tensor_parallel 3 does not divide 4 key-value heads");
}

TEST(LayoutErrorTest, EachSizeIsReportedOnce) {
  SideSpec side = Megatron();
  side.tensor_parallel.value = 4;
  ExpectOnly(MakeModel({.layers = 8, .intermediate = 6}), side,
             "destination.tensor_parallel 4 does not divide 6 intermediate "
             "features of the MLP");
}

TEST(LayoutErrorTest, FusedRowsThatDoNotDivideAreReported) {
  SideSpec side = Megatron();
  side.tensor_parallel.value = 4;
  ExpectOnly(MakeModel({.heads = 4, .kv_heads = 1, .head_dim = 1}), side,
             "destination.tensor_parallel 4 does not divide 6 rows of the "
             "fused query, key and value");
}

TEST(LayoutErrorTest, PaddedVocabularyIsDivided) {
  SideSpec side = Vllm();
  side.tensor_parallel.value = 3;
  ExpectOnly(MakeModel({.kv_heads = 3}), side,
             "destination.tensor_parallel 3 does not divide 128 vocabulary "
             "rows (padded to a multiple of 64)");
}

TEST(LayoutErrorTest, ExpertParallelDividesExpertsAndRanks) {
  SideSpec side = Megatron();
  side.expert_parallel.value = 3;
  side.data_parallel.value = 4;
  ExpectOnly(MakeModel({.experts = 8}), side,
             "destination.expert_parallel 3 does not divide 8 experts\n"
             "destination.expert_parallel 3 does not divide 4 ranks of a "
             "pipeline stage (tensor x context x data)");
}

TEST(LayoutErrorTest, ExpertTensorParallelCountsAmongTheRanks) {
  SideSpec side = Megatron();
  side.expert_parallel.value = 2;
  side.expert_tensor_parallel.value = 4;
  side.data_parallel.value = 4;
  ExpectOnly(MakeModel({.experts = 8, .expert_intermediate = 6}), side,
             "destination.expert_tensor_parallel 4 does not divide 6 "
             "intermediate features of an expert\n"
             "destination.expert_parallel 2 x expert_tensor_parallel 4 does "
             "not divide 4 ranks of a pipeline stage (tensor x context x "
             "data)");
}

TEST(LayoutErrorTest, ExpertParallelNeedsExperts) {
  SideSpec side = Vllm();
  side.expert_parallel_enabled.value = true;
  ExpectOnly(MakeModel({}), side,
             "destination.expert_parallel needs a model with experts; this "
             "qwen3 has none");
}

TEST(LayoutErrorTest, ExpertsOfVllmAreCutByDataTimesTensor) {
  SideSpec side = Vllm();
  side.tensor_parallel.value = 2;
  side.data_parallel.value = 4;
  ExpectOnly(MakeModel({.experts = 8}), side,
             "destination.tensor_parallel 2 x data_parallel 4 does not divide "
             "12 intermediate features of an expert");
}

TEST(LayoutErrorTest, PipelineParallelDividesLayers) {
  SideSpec side = Megatron();
  side.pipeline_parallel.value = 3;
  ExpectOnly(MakeModel({}), side,
             "destination.pipeline_parallel 3 does not divide 4 layers");
  side.pipeline_parallel.value = 2;
  side.virtual_pipeline_parallel.value = 3;
  ExpectOnly(MakeModel({}), side,
             "destination.virtual_pipeline_parallel 3 does not divide 2 layers "
             "of a pipeline stage");
}

TEST(LayoutErrorTest, MiddleStagesShareTheRestEvenly) {
  SideSpec side = Megatron();
  side.pipeline_parallel.value = 4;
  side.num_layers_in_first_pipeline_stage = Given<int64_t>(1);
  ExpectOnly(MakeModel({.layers = 9}), side,
             "destination.pipeline_parallel 4 leaves 8 of 9 layers to 3 other "
             "stages, which do not share them evenly");
  side.num_layers_in_first_pipeline_stage = Given<int64_t>(10);
  ExpectOnly(MakeModel({.layers = 9}), side,
             "destination.num_layers_in_first_pipeline_stage is 10; the model "
             "has 9 layers");
}

TEST(LayoutErrorTest, LayersPerStageHasAnEntryPerStageAndAddsUp) {
  SideSpec side = Vllm();
  side.pipeline_parallel.value = 2;
  side.layers_per_stage = Given<std::vector<int64_t>>({1, 2, 1});
  ExpectOnly(MakeModel({}), side,
             "destination.layers_per_stage has 3 entries; wanted 2, one per "
             "stage");
  side.layers_per_stage = Given<std::vector<int64_t>>({1, 2});
  ExpectOnly(MakeModel({}), side,
             "destination.layers_per_stage adds up to 3 layers; the model has "
             "4");
  side.layers_per_stage = Given<std::vector<int64_t>>({5, -1});
  ExpectOnly(MakeModel({}), side,
             "destination.layers_per_stage has an entry of 5 layers; the model "
             "has 4");
}

TEST(LayoutErrorTest, VllmPlacesExpertsInTurnWhereRoutersChooseGroups) {
  SideSpec side = Vllm();
  side.tensor_parallel.value = 2;
  side.expert_parallel_enabled.value = true;
  side.experts.value.kind = ExpertPlacement::Kind::kRoundRobin;
  const std::string refusal =
      "destination.experts.placement is \"round_robin\": vLLM places the "
      "experts of qwen3_moe linearly all the same, because its router chooses "
      "among all experts (n_group is not 2 or more); wanted \"linear\"";
  ExpectOnly(MakeModel({.experts = 8}), side, refusal);
  Model model = MakeModel({.experts = 8});
  model.architecture.expert_groups = 2;
  EXPECT_EQ(LayOutErrors(model, side), "");
  model.architecture.expert_groups = 0;  // the class's own, which may be more
  EXPECT_EQ(LayOutErrors(model, side), "");
}

TEST(LayoutErrorTest, VllmStageWithoutALayerIsRefused) {
  SideSpec side = Vllm();
  side.pipeline_parallel.value = 5;
  ExpectOnly(MakeModel({}), side,
             "destination.pipeline_parallel 5 leaves stages without a layer; "
             "the model has 4");
}

TEST(LayoutErrorTest, VersionIsRead) {
  SideSpec side = Vllm();
  side.version = Given<std::string>("latest");
  ExpectOnly(MakeModel({}), side,
             "destination.version \"latest\" is not a version; wanted one like "
             "0.25");
}

TEST(LayoutErrorTest, ExpertPlacementNeedsExpertParallel) {
  for (SideSpec side : {Vllm(), Sglang()}) {
    side.experts = Given(ExpertPlacement{});
    ExpectOnly(MakeModel({.experts = 4}), side,
               "destination.experts places experts on ranks; wanted "
               "expert_parallel beside it");
  }
}

TEST(LayoutErrorTest, ExpertTablesNameEachExpertAndAsManyOnEachRank) {
  const Model model =
      MakeModel({.layers = 3, .experts = 3, .dense_layers = {1}});
  SideSpec side = Vllm();
  side.tensor_parallel.value = 2;
  side.expert_parallel_enabled.value = true;
  const auto expect = [&](std::vector<std::vector<int64_t>> table,
                          const std::string& message) {
    side.experts =
        Given(ExpertPlacement{.kind = ExpertPlacement::Kind::kTable,
                              .physical_to_logical = std::move(table)});
    ExpectOnly(model, side,
               "destination.experts.physical_to_logical" + message);
  };
  expect({{0, 1, 2}},
         " has 3 physical experts; wanted a multiple of the 2 ranks that "
         "share the experts of a layer");
  expect({{0, 1, 2, 3}}, " names expert 3; the model has 3");
  expect({{0, 1, 1, 0}}, " does not name expert 2");
  expect({{0, 1, 2, 0}, {0, 2, 2, 0}}, "[1] does not name expert 1");
  expect({{0, 1, 2, 0}, {0, 1, 2, 0, 1, 2}},
         "[1] has 6 physical experts and "
         "destination.experts.physical_to_logical[0] 4; "
         "wanted as many in each layer");
  expect({{0, 1, 2, 0}, {0, 1, 2, 0}, {0, 1, 2, 0}, {0, 1, 2, 0}},
         " has 4 lists; wanted 1, or one for each of 2 layers with experts, or "
         "of all 3");
}

TEST(LayoutErrorTest, RedundantExpertsFillTheRanksEvenly) {
  SideSpec side = Sglang();
  side.tensor_parallel.value = 4;
  side.expert_parallel.value = 4;
  side.experts =
      Given(ExpertPlacement{.redundant_experts = 3, .physical_to_logical = {}});
  ExpectOnly(
      MakeModel({.experts = 6}), side,
      "destination.experts.num_redundant_experts 3 makes 9 physical experts; "
      "wanted a multiple of the 4 ranks that share the experts of a "
      "layer");
}

TEST(LayoutErrorTest, MoeBackendThatReordersWeightsIsRefused) {
  for (SideSpec side : {Vllm(), Sglang()}) {
    side.moe_backend = Given<std::string>("marlin");
    ExpectOnly(MakeModel({.experts = 4}), side,
               "destination.moe_backend \"marlin\" transposes and repacks "
               "weights, which a refit cannot write; run the engine with "
               "\"triton\" or \"flashinfer_cutlass\", or leave the key out, "
               "refit tensors in the checkpoint's order and let the engine "
               "process its weights again (process_weights_after_loading)");
    side.moe_backend = Given<std::string>("flash_infer_cutlass");
    ExpectOnly(MakeModel({.experts = 4}), side,
               "destination.moe_backend \"flash_infer_cutlass\" is unknown; "
               "did you mean \"flashinfer_cutlass\"?");
    side.moe_backend = Given<std::string>("magic");
    ExpectOnly(MakeModel({.experts = 4}), side,
               "destination.moe_backend \"magic\" is unknown; wanted "
               "\"triton\" or \"flashinfer_cutlass\"");
    side.moe_backend = Given<std::string>("triton");
    ExpectOnly(MakeModel({}), side,
               "destination.moe_backend needs a model with experts; this "
               "qwen3 has none");
  }
}

TEST(LayoutErrorTest, AxesOfSglangLieWithinTensorParallelism) {
  SideSpec side = Sglang();
  side.tensor_parallel.value = 4;
  side.dp_attention.value = 3;
  side.expert_parallel.value = 8;
  ExpectOnly(MakeModel({.experts = 8}), side,
             "destination.dp_attention 3 does not divide "
             "destination.tensor_parallel 4; wanted 1, 2 or 4\n"
             "destination.expert_parallel 8 does not divide "
             "destination.tensor_parallel 4; wanted 1, 2 or 4");
}

TEST(LayoutErrorTest, SglangsDataParallelismIsOfEnginesOrOfAttention) {
  SideSpec side = Sglang();
  side.tensor_parallel.value = 4;
  side.data_parallel.value = 3;
  side.dp_attention.value = 2;
  ExpectOnly(MakeModel({}), side,
             "destination.data_parallel 3 beside dp_attention 2: SGLang's "
             "dp_size is one or the other; wanted \"replicas\": 3 for as many "
             "engines");
}

TEST(LayoutErrorTest, SizesOfSglangNameWhatTheyAreMadeOf) {
  SideSpec side = Sglang();
  side.tensor_parallel.value = 6;
  side.dp_attention.value = 2;
  side.expert_parallel.value = 2;
  side.embedding.value = EmbeddingCut::kReplicated;
  ExpectOnly(
      MakeModel(
          {.heads = 8, .vocab = 190, .experts = 3, .expert_intermediate = 8}),
      side,
      "destination.tensor_parallel 6 / dp_attention 2 does not divide 8 "
      "attention heads\n"
      "destination.tensor_parallel 6 / dp_attention 2 does not divide 4 "
      "key-value heads\n"
      "destination.tensor_parallel 6 / expert_parallel 2 does not divide "
      "8 intermediate features of an expert\n"
      "destination.expert_parallel 2 does not divide 3 experts");
}

TEST(LayoutErrorTest, CutsByAttentionNeedAttentionDataParallelism) {
  SideSpec side = Sglang();
  side.dp_lm_head.value = true;
  side.embedding.value = EmbeddingCut::kAttention;
  ExpectOnly(MakeModel({}), side,
             "destination.dp_lm_head needs dp_attention of 2 or more; "
             "destination.dp_attention is 1 (the default)\n"
             "destination.embedding \"attention\" needs dp_attention of 2 or "
             "more; destination.dp_attention is 1 (the default)");
}

TEST(LayoutErrorTest, SharedExpertsOfAModelWithoutAreReported) {
  SideSpec side = Sglang();
  side.shared_experts = Given(SharedExperts::kFused);
  ExpectOnly(MakeModel({.experts = 4}), side,
             "destination.shared_experts needs a model with shared experts; "
             "this qwen3_moe has none");
}

TEST(LayoutErrorTest, WhatSglangsModelsLackIsReported) {
  SideSpec side = Sglang();
  side.pipeline_parallel.value = 2;
  ExpectOnly(
      MakeModel({.tied = true, .family = "llama"}), side,
      "destination.pipeline_parallel 2: SGLang's llama takes a tied head "
      "from the embedding, which the last of several stages does not "
      "have; wanted 1");

  side = Sglang();
  side.tensor_parallel.value = 4;
  side.dp_attention.value = 2;
  for (const std::string family : {"llama", "qwen2", "mixtral"}) {
    const int64_t experts = family == "mixtral" ? 4 : 0;
    ExpectOnly(MakeModel({.experts = experts, .family = family}), side,
               "destination.dp_attention 2: SGLang's " + family +
                   " cuts its attention by all of tensor_parallel; wanted 1, "
                   "with \"replicas\" for more engines");
  }

  ExpectOnly(MakeModel({.experts = 4, .dense_layers = {1}}), Sglang(),
             "destination: SGLang's qwen3_moe has experts in every layer, and "
             "the model has a dense MLP \"model.layers.1.mlp.up_proj.weight\"; "
             "wanted another layout (generic places any tensors)");
}

TEST(LayoutErrorTest, SglangsMixtralAndGlmHaveNoRedundantExperts) {
  SideSpec side = Sglang();
  side.tensor_parallel.value = 2;
  side.expert_parallel.value = 2;
  side.experts =
      Given(ExpertPlacement{.redundant_experts = 2, .physical_to_logical = {}});
  for (const std::string family : {"mixtral", "glm4_moe"}) {
    ExpectOnly(
        MakeModel({.experts = 4, .family = family}), side,
        "destination.experts: SGLang's " + family +
            " has 4 physical experts, one for each expert; wanted no redundant "
            "ones");
  }
  side.experts = Given(ExpertPlacement{.kind = ExpertPlacement::Kind::kTable,
                                       .physical_to_logical = {{3, 1, 0, 2}}});
  EXPECT_EQ(LayOutErrors(MakeModel({.experts = 4, .family = "mixtral"}), side),
            "");
}

TEST(LayoutErrorTest, VllmsQwen3MoeHasNoBiasBehindItsAttention) {
  ExpectOnly(MakeModel({.experts = 4, .qkv_bias = true}), Vllm(),
             "vllm has no modules of a qwen3_moe for parameter "
             "\"model.layers.{0}.self_attn.o_proj.bias\"; wanted another "
             "layout (generic places any tensors)");
}

TEST(LayoutErrorTest, RouterDTypeNeedsExperts) {
  for (SideSpec side : {Vllm(), Sglang()}) {
    side.router_dtype = Given(DType::kFp32);
    ExpectOnly(MakeModel({}), side,
               "destination.router_dtype needs a model with experts; this "
               "qwen3 has none");
  }
}

TEST(LayoutErrorTest, ParamWithoutARoleIsNamed) {
  Model model = MakeModel({});
  model.params[3].role = ParamRole::kOther;
  ExpectOnly(model, Megatron(),
             "megatron cannot place parameter "
             "\"model.layers.{0}.self_attn.k_proj.weight\"; wanted a model "
             "family with roles (config.json)");
}

TEST(LayoutErrorTest, ExcludedParamWithoutARoleIsLeftOut) {
  Model model = MakeModel({});
  model.params.push_back({.name = "extra.weight",
                          .index = {},
                          .shape = {2},
                          .dtype = DType::kBf16,
                          .role = ParamRole::kOther,
                          .skip = SkipReason::kExcluded});
  EXPECT_EQ(LayOutErrors(model, Megatron()), "");
}

TEST(LayoutErrorTest, LayerThatLacksAPartOfABufferIsNamed) {
  Model model = MakeModel({});
  model.params[4].index[0].numbers.pop_back();
  ExpectOnly(model, Vllm(),
             "the model gives no param of layer 3 the role \"value\", beside "
             "\"key\" (\"model.layers.0.self_attn.k_proj.weight\"): frameworks "
             "expect them together; wanted one");
}

TEST(LayoutErrorTest, ShapeThatContradictsTheArchitectureIsNamed) {
  Model model = MakeModel({});
  model.params[2].shape[0] = 7;
  ExpectOnly(model, Vllm(),
             "parameter \"model.layers.{0}.self_attn.q_proj.weight\" has 7 "
             "rows; wanted 24");
}

}  // namespace
}  // namespace refit
