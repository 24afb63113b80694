// The fsdp layout: refusals, and how many fragments there are. Which rows stand
// where is in tests/second_opinion/fsdp.py.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "compiler/layout/common/shard.h"
#include "compiler/layout/generic/generic.h"
#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

SideSpec MakeFsdp(int64_t data, int64_t tensor = 1, int64_t replicas = 1) {
  SideSpec side = MakeSide(LayoutKind::kFsdp);
  side.data_parallel = Given(data);
  side.tensor_parallel = Given(tensor);
  side.replicas = Given(replicas);
  return side;
}

TEST(FsdpLayoutTest, ExpertMeshThatDoesNotFitIsRefused) {
  const Model model = MakeModel({.experts = 6});
  const auto errors = [&](int64_t data, int64_t expert, int64_t dim,
                          bool fused) {
    SideSpec side = MakeFsdp(data);
    side.expert_parallel = Given(expert);
    side.fused_experts = Given(fused);
    if (dim >= 0) side.expert_shard_dim = Given(dim);
    return LayOutErrors(model, side);
  };
  EXPECT_NE(
      errors(8, 4, -1, true)
          .find("destination.expert_parallel 4 does not divide 6 experts"),
      std::string::npos);
  EXPECT_NE(errors(8, 3, -1, true)
                .find("destination.expert_parallel 3 does not divide 8 "
                      "data-parallel ranks"),
            std::string::npos);
  EXPECT_NE(errors(14, 2, 1, true)
                .find("destination.data_parallel 14 over expert_parallel 2 "
                      "leaves 7 shards of dim 1 of gate_up_proj, which do not "
                      "divide its "),
            std::string::npos);
  EXPECT_NE(errors(4, 2, 1, false)
                .find("destination.expert_shard_dim 1 is of stacked experts; "
                      "wanted fused_experts beside it"),
            std::string::npos);
  SideSpec dense = MakeFsdp(2);
  dense.expert_parallel = Given(int64_t{2});
  EXPECT_NE(LayOutErrors(MakeModel({}), dense)
                .find("destination.expert_parallel needs a model with experts"),
            std::string::npos);
}

// What torch 2.13 does with 7 rows on a mesh of three FSDP ranks by two
// tensor-parallel ones. `fsdp` is what fully_shard leaves of modules that
// parallelize_module has cut. `generic` is what distribute_tensor makes of
// [_StridedShard(0, split_factor=2), Shard(0)], which torch prints for both.
TEST(FsdpLayoutTest, UnevenRowsInsideTensorParallelismAreCutAsTorchCutsThem) {
  const Model model = MakeModel({.vocab = 7});
  const Tensor head = Checkpoint(model).at("lm_head.weight");
  const std::vector<Tensors> ranks =
      LayOutAndExpand(model, MakeFsdp(3, 2), fb::Side::kDestination);
  const std::vector<Range> fully_shard = {{0, 2}, {4, 5}, {2, 4},
                                          {5, 6}, {4, 4}, {6, 7}};
  ASSERT_EQ(ranks.size(), fully_shard.size());
  const std::vector<Runs> distribute_tensor = {{{0, 2}}, {{4, 5}}, {{2, 4}},
                                               {{5, 6}}, {{6, 7}}, {}};
  MeshSpec mesh;
  mesh.shape = {3, 2};
  const std::vector<Placement> placements = {
      {.kind = Placement::Kind::kStridedShard,
       .dim = 0,
       .split_factor = 2,
       .place = {}},
      {.kind = Placement::Kind::kShard, .dim = 0, .place = {}}};
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto [begin, end] = fully_shard[rank];
    EXPECT_EQ(ranks[rank].at("lm_head.weight"), Rows(head, begin, end)) << rank;
    const std::vector<int64_t> at =
        Coordinates(mesh, static_cast<int64_t>(rank));
    EXPECT_EQ(LocalRuns({7}, mesh, placements, at)[0], distribute_tensor[rank])
        << rank;
  }
}

TEST(FsdpLayoutTest, OneFragmentPerStackAndRank) {
  const Model model = MakeModel({.layers = 40, .experts = 64});
  BufferTable buffers;
  Diagnostics diagnostics;
  const SideSpec side = MakeFsdp(2);
  LayOut({.model = model,
          .side = side,
          .which = fb::Side::kSource,
          .buffers = buffers,
          .diagnostics = diagnostics});
  EXPECT_LE(buffers.all().size(), 2 * model.params.size());
  for (const Buffer& buffer : buffers.all()) {
    EXPECT_LE(buffer.fragments.size(), 1);
  }
}

TEST(FsdpLayoutTest, Transformers5HoldsExpertsOfQwen3VlTransposed) {
  const Model model = ReadTinyModel(R"({"model_type": "qwen3_vl_moe",
      "text_config": {"hidden_size": 6, "num_attention_heads": 1,
      "num_key_value_heads": 1, "head_dim": 2, "vocab_size": 8,
      "num_hidden_layers": 1, "num_experts": 2, "moe_intermediate_size": 2}})");
  const std::string name =
      "model.language_model.layers.0.mlp.experts.gate_up_proj";
  const Tensor stored = Checkpoint(model).at(name);
  EXPECT_EQ(stored.shape, (std::vector<int64_t>{2, 6, 4}));
  const auto held = [&](const SideSpec& side) {
    return LayOutAndExpand(model, side, fb::Side::kSource).at(1).at(name);
  };
  EXPECT_EQ(held(MakeFsdp(2)), Rows(stored, 1, 2));

  SideSpec side = MakeFsdp(2);
  side.version = Given<std::string>("5.19.0");
  const auto transposed = [&](Range experts, Range out) {
    Tensor tensor = {.shape = {experts.size(), out.size(), 6}, .cells = {}};
    for (int64_t expert = experts.begin; expert < experts.end; ++expert) {
      for (int64_t row = out.begin; row < out.end; ++row) {
        for (int64_t in = 0; in < 6; ++in) {
          tensor.cells.push_back(stored.cells[(expert * 6 + in) * 4 + row]);
        }
      }
    }
    return tensor;
  };
  EXPECT_EQ(held(side), transposed({1, 2}, {0, 4}));
  side.expert_shard_dim = Given(int64_t{1});
  EXPECT_EQ(held(side), transposed({0, 2}, {2, 4}));
  // Of 4 rows, which the checkpoint's 6 would hide.
  side.data_parallel = Given(int64_t{3});
  EXPECT_NE(LayOutErrors(model, side).find("which do not divide its 4"),
            std::string::npos);
}

TEST(FsdpLayoutTest, ScalarIsRefused) {
  Model model;
  model.params.push_back(
      {.name = "scale", .index = {}, .shape = {}, .dtype = DType::kBf16});
  EXPECT_NE(LayOutErrors(model, MakeFsdp(2))
                .find("parameter \"scale\" has no dims; FSDP cuts dim 0, "
                      "wanted one or more"),
            std::string::npos);
}

TEST(FsdpLayoutTest, FusedExpertsNeedExpertsAndRoles) {
  SideSpec side = MakeFsdp(2);
  side.fused_experts = Given(true);
  EXPECT_NE(LayOutErrors(MakeModel({}), side)
                .find("destination.fused_experts needs a model with experts"),
            std::string::npos);
  Model model;
  model.params.push_back(
      {.name = "w", .index = {}, .shape = {4}, .dtype = DType::kBf16});
  EXPECT_NE(LayOutErrors(model, side)
                .find("fsdp cannot place parameter \"w\"; wanted a model "
                      "family with roles (config.json)"),
            std::string::npos);
  EXPECT_EQ(LayOutErrors(model, MakeFsdp(2)), "");
}

TEST(FsdpLayoutTest, TensorParallelismNeedsADenseModelWhoseHeadsItDivides) {
  EXPECT_NE(LayOutErrors(MakeModel({.experts = 2}), MakeFsdp(1, 2))
                .find("destination.tensor_parallel 2 cannot place parameter "
                      "\"model.layers.0.mlp.gate.weight\"; wanted a dense "
                      "model, or layout \"generic\" with its placements"),
            std::string::npos);
  EXPECT_NE(LayOutErrors(MakeModel({}), MakeFsdp(1, 8))
                .find("destination.tensor_parallel 8 does not divide 4 "
                      "key-value heads"),
            std::string::npos);
}

}  // namespace
}  // namespace refit
