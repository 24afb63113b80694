// Megatron's layout: stacks, fragments, skips and dtypes. Which bytes stand
// where is the second opinion's (tests/second_opinion/megatron.py).
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

struct Mesh {
  int64_t tp = 1, dp = 1, pp = 1, ep = 1;
};

SideSpec SideOf(const Mesh& mesh) {
  SideSpec side = MakeSide(LayoutKind::kMegatron, mesh.tp, mesh.pp);
  side.data_parallel.value = mesh.dp;
  side.expert_parallel.value = mesh.ep;
  side.make_vocab_size_divisible_by.value = 8;
  return side;
}

// The copy is written too; of a source the first stage's embedding is read.
TEST(MegatronLayoutTest, TiedOutputLayerOfTheLastStageIsNotReadFromASource) {
  const Model model = MakeModel({.tied = true});
  const std::vector<std::string> output_layer = {"output_layer.weight"};
  for (const fb::Side which : {fb::Side::kSource, fb::Side::kDestination}) {
    const std::vector<Tensors> ranks =
        LayOutAndExpand(model, SideOf({.pp = 2}), which);
    ASSERT_EQ(ranks.size(), 2);
    EXPECT_TRUE(ranks[1].contains("output_layer.weight"));
    EXPECT_EQ(SkippedTensors(ranks[1]), which == fb::Side::kSource
                                            ? output_layer
                                            : std::vector<std::string>{});
  }
}

// 12 layers x 16 experts in two fragments: gate and up.
TEST(MegatronLayoutTest, FragmentsFollowDistinctShapesNotLayersTimesExperts) {
  const Model model = MakeModel({.layers = 24, .experts = 64});
  BufferTable buffers;
  Diagnostics diagnostics;
  SideSpec side = SideOf({.dp = 4, .pp = 2, .ep = 4});
  const SideLayout layout = LayOut({.model = model,
                                    .side = side,
                                    .which = fb::Side::kSource,
                                    .buffers = buffers,
                                    .diagnostics = diagnostics});
  ASSERT_TRUE(diagnostics.ok());
  for (const BufferId id : layout.ranks[5]) {
    const Buffer& buffer = buffers[id];
    if (buffer.name != "decoder.layers.{0}.mlp.experts.linear_fc1.weight{1}") {
      continue;
    }
    EXPECT_EQ(buffer.index[0], Consecutive(0, 12));
    EXPECT_EQ(buffer.index[1], Consecutive(0, 16));
    ASSERT_EQ(buffer.fragments.size(), 2);
    const Fragment& up = buffer.fragments[1];
    EXPECT_EQ(BoxText(up.box), "[12:24, 16:32, 0:12, 0:3]");
    EXPECT_EQ(up.offset, 12 * 3);
    EXPECT_EQ(up.stride, (Dims{16 * 24 * 3, 24 * 3, 3, 1}));
    return;
  }
  ADD_FAILURE() << "no experts";
}

// What stands in each tensor of each rank, by names that do not depend on how
// the params are stacked.
using Places = std::map<std::string, std::vector<std::string>>;
std::vector<Places> PlacesByName(const Model& model, const SideSpec& side) {
  std::map<int64_t, std::string> names;
  for (const auto& [name, tensor] : Checkpoint(model)) {
    for (size_t i = 0; i < tensor.cells.size(); ++i) {
      names[tensor.cells[i]] = name + "#" + std::to_string(i);
    }
  }
  std::vector<Places> ranks;
  for (const Tensors& tensors :
       LayOutAndExpand(model, side, fb::Side::kDestination)) {
    Places& rank = ranks.emplace_back();
    for (const auto& [name, tensor] : tensors) {
      for (const int64_t cell : tensor.cells) {
        rank[name].push_back(cell < 0 ? "-" : names.at(cell));
      }
    }
  }
  return ranks;
}

// What an exclude of one expert in one layer leaves: three stacks per role.
TEST(MegatronLayoutTest, SplitStacksFillTheirBuffers) {
  Model whole = MakeModel({.layers = 5, .experts = 4});
  Model split = whole;
  split.params.clear();
  for (const Param& param : whole.params) {
    if (param.index.size() != 2) {
      split.params.push_back(param);
      continue;
    }
    Param others = param, layer = param, excluded = param;
    others.index[0].numbers = {0, 1, 3, 4};
    layer.index[0].numbers = {2};
    layer.index[1].numbers = {0, 2, 3};
    excluded.index[0].numbers = {2};
    excluded.index[1].numbers = {1};
    excluded.skip = SkipReason::kExcluded;
    split.params.insert(split.params.end(), {others, layer, excluded});
  }
  for (const int64_t ep : {1, 2, 4}) {
    const SideSpec side = SideOf({.tp = 4, .ep = ep});
    EXPECT_EQ(PlacesByName(split, side), PlacesByName(whole, side));
  }
}

// The stack of layer 1 lies between two runs of the others' params.
TEST(MegatronLayoutTest, LayersOfAnotherDtypeAreStackedApart) {
  const Model whole = MakeModel({});
  Model mixed = whole;
  mixed.params.clear();
  for (const Param& param : whole.params) {
    mixed.params.push_back(param);
    if (param.role != ParamRole::kQuery) continue;
    mixed.params.back().index[0].numbers = {0, 2, 3};
    mixed.params.push_back(param);
    mixed.params.back().index[0].numbers = {1};
    mixed.params.back().dtype = DType::kFp32;
  }
  const SideSpec side = SideOf({.tp = 2});
  EXPECT_EQ(PlacesByName(mixed, side), PlacesByName(whole, side));
}

TEST(MegatronLayoutTest, SideDtypeReplacesTheModels) {
  const Model model = MakeModel({});
  SideSpec side = SideOf({});
  side.dtype = Given(DType::kFp32);
  BufferTable buffers;
  Diagnostics diagnostics;
  LayOut({.model = model,
          .side = side,
          .which = fb::Side::kSource,
          .buffers = buffers,
          .diagnostics = diagnostics});
  for (const Buffer& buffer : buffers.all()) {
    EXPECT_EQ(buffer.dtype, DType::kFp32) << buffer.name;
  }
}

TEST(MegatronLayoutTest, NormsBehindAttentionAndMlpAreOfTheirProjections) {
  const Model model = ReadTinyModel(
      R"({"model_type": "gemma3_text", "hidden_size": 4, "head_dim": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2,
          "vocab_size": 64, "num_hidden_layers": 1, "intermediate_size": 8})");
  const Tensors hf = Under(Checkpoint(model), "model.layers.0.");
  const Tensors found =
      Under(LayOutAndExpand(model, MakeSide(LayoutKind::kMegatron, 2),
                            fb::Side::kSource)
                .at(1),
            "decoder.layers.0.");
  for (const auto& [megatron, name] :
       {std::pair("self_attention.linear_qkv.layer_norm_weight", "input"),
        std::pair("self_attention.linear_proj.post_layernorm.weight",
                  "post_attention"),
        std::pair("mlp.linear_fc1.layer_norm_weight", "pre_feedforward"),
        std::pair("mlp.linear_fc2.post_layernorm.weight",
                  "post_feedforward")}) {
    EXPECT_EQ(found.at(megatron),
              hf.at(absl::StrCat(name, "_layernorm.weight")))
        << megatron;
  }
}

}  // namespace
}  // namespace refit
