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
             "destination.expert_parallel needs a model with experts");
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
             "layer 3 has 1, 1 and 0 parameters beside "
             "\"model.layers.{0}.self_attn.k_proj.weight\"; wanted 1 of each");
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
