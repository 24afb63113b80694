// The generic layout against DTensor's placements applied to whole tensors.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

Placement Replicate() { return {}; }
Placement Shard(int64_t dim) {
  return {.kind = Placement::Kind::kShard, .dim = dim, .place = {}};
}
Placement StridedShard(int64_t dim, int64_t split_factor) {
  return {.kind = Placement::Kind::kStridedShard,
          .dim = dim,
          .split_factor = split_factor,
          .place = {}};
}

Model OneParam(Dims shape) {
  Model model;
  model.params.push_back({.name = "w",
                          .index = {},
                          .shape = std::move(shape),
                          .dtype = DType::kBf16});
  return model;
}

MeshSpec MakeMesh(std::string name, std::vector<int64_t> shape,
                  int64_t first_rank = 0) {
  MeshSpec mesh;
  mesh.name = std::move(name);
  mesh.shape = std::move(shape);
  for (size_t i = 0; i < mesh.shape.size(); ++i) {
    mesh.axes.push_back("axis" + std::to_string(i));
  }
  mesh.ranks.resize(std::accumulate(mesh.shape.begin(), mesh.shape.end(),
                                    int64_t{1}, std::multiplies<>()));
  std::iota(mesh.ranks.begin(), mesh.ranks.end(), first_rank);
  return mesh;
}

TensorRule MakeRule(std::string match, std::string mesh,
                    std::vector<Placement> placements) {
  TensorRule rule;
  rule.match = std::move(match);
  rule.mesh = std::move(mesh);
  rule.placements = std::move(placements);
  return rule;
}

SideSpec MakeGeneric(std::vector<MeshSpec> meshes,
                     std::vector<TensorRule> tensors) {
  SideSpec side = MakeSide(LayoutKind::kGeneric);
  side.generic.meshes = std::move(meshes);
  side.generic.tensors = std::move(tensors);
  return side;
}

// torch.chunk of a list, with empty lists for the chunks it does not return.
std::vector<std::vector<int64_t>> TorchChunk(const std::vector<int64_t>& list,
                                             int64_t chunks) {
  std::vector<std::vector<int64_t>> out(chunks);
  const auto size = static_cast<int64_t>(list.size());
  const int64_t each = (size + chunks - 1) / chunks;
  for (int64_t i = 0; i < size; ++i) out[i / each].push_back(list[i]);
  return out;
}

// The local tensor at a mesh coordinate: placements from the left.
Tensor Local(const Tensor& whole, const std::vector<int64_t>& mesh,
             const std::vector<Placement>& placements, int64_t index) {
  std::vector<std::vector<int64_t>> indices;
  for (const int64_t size : whole.shape) {
    indices.emplace_back(size);
    std::iota(indices.back().begin(), indices.back().end(), 0);
  }
  std::vector<int64_t> coordinates(mesh.size());
  for (size_t axis = mesh.size(); axis-- > 0;) {
    coordinates[axis] = index % mesh[axis];
    index /= mesh[axis];
  }
  for (size_t axis = 0; axis < mesh.size(); ++axis) {
    const Placement& placement = placements[axis];
    if (placement.kind == Placement::Kind::kReplicate) continue;
    const int64_t splits = placement.kind == Placement::Kind::kStridedShard
                               ? placement.split_factor
                               : 1;
    std::vector<int64_t> kept;
    for (const std::vector<int64_t>& part :
         TorchChunk(indices[placement.dim], splits)) {
      const std::vector<int64_t> mine =
          TorchChunk(part, mesh[axis])[coordinates[axis]];
      kept.insert(kept.end(), mine.begin(), mine.end());
    }
    indices[placement.dim] = kept;
  }
  Tensor out;
  int64_t count = 1;
  for (const std::vector<int64_t>& dim : indices) {
    out.shape.push_back(static_cast<int64_t>(dim.size()));
    count *= out.shape.back();
  }
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, element = 0, scale = 1;
    for (size_t dim = indices.size(); dim-- > 0;) {
      element += indices[dim][rest % out.shape[dim]] * scale;
      rest /= out.shape[dim];
      scale *= whole.shape[dim];
    }
    out.cells.push_back(whole.cells[element]);
  }
  return out;
}

void ExpectMatchesDTensor(const Dims& shape, const std::vector<int64_t>& mesh,
                          const std::vector<Placement>& placements) {
  const Model model = OneParam(shape);
  const Tensor whole = Checkpoint(model).at("w");
  const std::vector<Tensors> ranks = LayOutAndExpand(
      model,
      MakeGeneric({MakeMesh("m", mesh)}, {MakeRule("*", "m", placements)}),
      fb::Side::kDestination);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    SCOPED_TRACE(rank);
    ExpectSameTensors(
        ranks[rank],
        {{"w", Local(whole, mesh, placements, static_cast<int64_t>(rank))}});
  }
}

TEST(GenericLayoutTest, UnevenShardsAreTorchChunks) {
  const Model model = OneParam({10});
  const std::vector<Tensors> ranks = LayOutAndExpand(
      model,
      MakeGeneric({MakeMesh("m", {4})}, {MakeRule("w", "m", {Shard(0)})}),
      fb::Side::kDestination);
  ASSERT_EQ(ranks.size(), 4);
  EXPECT_EQ(ranks[0].at("w").cells, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(ranks[2].at("w").cells, (std::vector<int64_t>{6, 7, 8}));
  EXPECT_EQ(ranks[3].at("w").cells, (std::vector<int64_t>{9}));
}

TEST(GenericLayoutTest, EmptyShardsArePresent) {
  const std::vector<Tensors> ranks = LayOutAndExpand(
      OneParam({5, 2}),
      MakeGeneric({MakeMesh("m", {4})}, {MakeRule("w", "m", {Shard(0)})}),
      fb::Side::kDestination);
  ASSERT_EQ(ranks.size(), 4);
  EXPECT_EQ(ranks[3].at("w").shape, (std::vector<int64_t>{0, 2}));
}

// FSDP inside tensor parallelism: rank (f, t) holds chunk f of TP chunk t.
TEST(GenericLayoutTest, StridedShardIsRightToLeft) {
  const std::vector<Tensors> ranks = LayOutAndExpand(
      OneParam({8}),
      MakeGeneric({MakeMesh("m", {2, 2})},
                  {MakeRule("w", "m", {StridedShard(0, 2), Shard(0)})}),
      fb::Side::kDestination);
  ASSERT_EQ(ranks.size(), 4);
  EXPECT_EQ(ranks[0].at("w").cells, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(ranks[1].at("w").cells, (std::vector<int64_t>{4, 5}));
  EXPECT_EQ(ranks[2].at("w").cells, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(ranks[3].at("w").cells, (std::vector<int64_t>{6, 7}));
}

TEST(GenericLayoutTest, RandomPlacementsMatchDTensor) {
  std::mt19937 random(20240607);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int trial = 0; trial < 400; ++trial) {
    Dims shape;
    for (int64_t dim = draw(1, 4); dim > 0; --dim) shape.push_back(draw(0, 9));
    std::vector<int64_t> mesh;
    std::vector<Placement> placements;
    for (int64_t axis = draw(1, 3); axis > 0; --axis) {
      mesh.push_back(draw(1, 4));
      const int64_t dim = draw(0, static_cast<int64_t>(shape.size()) - 1);
      const int64_t kind = draw(0, 3);
      placements.push_back(kind == 0   ? Replicate()
                           : kind == 1 ? StridedShard(dim, draw(1, 5))
                                       : Shard(dim));
    }
    SCOPED_TRACE(trial);
    ExpectMatchesDTensor(shape, mesh, placements);
  }
}

TEST(GenericLayoutTest, MeshMayPermuteItsRanks) {
  MeshSpec mesh = MakeMesh("m", {2, 2});
  mesh.ranks = {3, 1, 2, 0};
  const std::vector<Tensors> ranks = LayOutAndExpand(
      OneParam({4}),
      MakeGeneric({mesh}, {MakeRule("w", "m", {Shard(0), Shard(0)})}),
      fb::Side::kSource);
  ASSERT_EQ(ranks.size(), 4);
  EXPECT_EQ(ranks[3].at("w").cells, (std::vector<int64_t>{0}));
  EXPECT_EQ(ranks[1].at("w").cells, (std::vector<int64_t>{1}));
  EXPECT_EQ(ranks[2].at("w").cells, (std::vector<int64_t>{2}));
  EXPECT_EQ(ranks[0].at("w").cells, (std::vector<int64_t>{3}));
}

// Placements name a tensor's own dims; the stack's index keeps its numbers.
TEST(GenericLayoutTest, StacksKeepTheirIndex) {
  const Model model = MakeModel({.layers = 3, .experts = 2});
  const Tensors checkpoint = Checkpoint(model);
  const std::vector<Tensors> ranks = LayOutAndExpand(
      model,
      MakeGeneric({MakeMesh("m", {3})}, {MakeRule("*", "m", {Shard(0)})}),
      fb::Side::kDestination);
  ASSERT_EQ(ranks.size(), 3);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    Tensors wanted;
    for (const auto& [name, tensor] : checkpoint) {
      wanted[name] = Local(tensor, {3}, {Shard(0)}, static_cast<int64_t>(rank));
    }
    ExpectSameTensors(ranks[rank], wanted);
  }
}

TEST(GenericLayoutTest, RulesMayTellMembersOfAStackApart) {
  const Model model = MakeModel({.layers = 4, .experts = 5});
  const Tensors checkpoint = Checkpoint(model);
  const std::vector<Tensors> ranks = LayOutAndExpand(
      model,
      MakeGeneric({MakeMesh("left", {2}), MakeMesh("right", {3}, 2)},
                  {MakeRule("model.layers.2.*.experts.?.up_proj.*", "right",
                            {Shard(1)}),
                   MakeRule("*.experts.3.*", "left", {Shard(0)}),
                   MakeRule("*", "right", {Replicate()})}),
      fb::Side::kDestination);
  ASSERT_EQ(ranks.size(), 5);
  std::vector<Tensors> wanted(5);
  for (const auto& [name, tensor] : checkpoint) {
    if (name.starts_with("model.layers.2.mlp.experts.") &&
        name.ends_with("up_proj.weight")) {
      for (int64_t i = 0; i < 3; ++i) {
        wanted[2 + i][name] = Local(tensor, {3}, {Shard(1)}, i);
      }
    } else if (name.find(".experts.3.") != std::string::npos) {
      for (int64_t i = 0; i < 2; ++i) {
        wanted[i][name] = Local(tensor, {2}, {Shard(0)}, i);
      }
    } else {
      for (int64_t i = 0; i < 3; ++i) wanted[2 + i][name] = tensor;
    }
  }
  for (size_t rank = 0; rank < 5; ++rank) {
    SCOPED_TRACE(rank);
    ExpectSameTensors(ranks[rank], wanted[rank]);
  }
}

TEST(GenericLayoutTest, RenameKeepsTheNumbers) {
  TensorRule rule = MakeRule("*", "m", {Replicate()});
  rule.rename = "module.{name}";
  const Model model = MakeModel({.layers = 2});
  const std::vector<Tensors> ranks = LayOutAndExpand(
      model, MakeGeneric({MakeMesh("m", {1})}, {rule}), fb::Side::kSource);
  ASSERT_EQ(ranks.size(), 1);
  EXPECT_TRUE(
      ranks[0].contains("module.model.layers.1.self_attn.q_proj.weight"));
}

TEST(GenericLayoutTest, RuleDtypeComesBeforeTheSides) {
  TensorRule rule = MakeRule("w", "m", {Replicate()});
  SideSpec side = MakeGeneric({MakeMesh("m", {1})}, {rule});
  side.dtype = Given(DType::kFp32);
  const Model model = OneParam({2});
  const auto dtype = [&] {
    BufferTable buffers;
    Diagnostics diagnostics;
    LayOut({.model = model,
            .side = side,
            .which = fb::Side::kSource,
            .buffers = buffers,
            .diagnostics = diagnostics});
    return buffers.all().at(0).dtype;
  };
  EXPECT_EQ(dtype(), DType::kFp32);
  side.generic.tensors[0].dtype = DType::kFp16;
  EXPECT_EQ(dtype(), DType::kFp16);
}

TEST(GenericLayoutTest, TwoParamsOfOneNameOnARankAreRefused) {
  Model model = OneParam({2});
  model.params.push_back(model.params[0]);
  model.params[1].name = "v";
  TensorRule rule = MakeRule("v", "m", {Replicate()});
  rule.rename = "w";
  EXPECT_NE(
      LayOutErrors(model, MakeGeneric({MakeMesh("m", {2})},
                                      {rule, MakeRule("*", "m", {Shard(0)})}))
          .find("parameters \"w\" and \"v\" would both be tensor \"w\" "
                "of rank 0"),
      std::string::npos);
  EXPECT_EQ(LayOutErrors(
                model, MakeGeneric({MakeMesh("m", {2}), MakeMesh("n", {2}, 2)},
                                   {rule, MakeRule("*", "n", {Shard(0)})})),
            "");
}

TEST(GenericLayoutTest, MembersOfAStackRenamedToOneNameAreRefused) {
  TensorRule rule = MakeRule("*.q_proj.weight", "m", {Replicate()});
  rule.rename = "q";
  EXPECT_NE(
      LayOutErrors(MakeModel({}),
                   MakeGeneric({MakeMesh("m", {1})},
                               {rule, MakeRule("*", "m", {Replicate()})}))
          .find("parameters \"model.layers.0.self_attn.q_proj.weight\" and "
                "\"model.layers.1.self_attn.q_proj.weight\" would both be "
                "tensor \"q\" of rank 0"),
      std::string::npos);
}

TEST(GenericLayoutTest, ParamWithoutARuleIsNamedUnlessItIsSkipped) {
  Model model = OneParam({2});
  model.params.push_back(model.params[0]);
  model.params[1].name = "v1";
  const SideSpec side =
      MakeGeneric({MakeMesh("m", {1})}, {MakeRule("v*", "m", {Replicate()})});
  EXPECT_NE(LayOutErrors(model, side)
                .find("no rule of destination.tensors matches parameter \"w\""),
            std::string::npos);
  model.params[0].skip = SkipReason::kExcluded;
  EXPECT_EQ(LayOutErrors(model, side), "");
}

TEST(GenericLayoutTest, ShardDimBeyondTheTensorIsRefused) {
  EXPECT_NE(LayOutErrors(OneParam({2, 2}),
                         MakeGeneric({MakeMesh("m", {1})},
                                     {MakeRule("*", "m", {Shard(2)})}))
                .find("shard dim is 2 but \"w\" has 2 dims"),
            std::string::npos);
}

TEST(GenericLayoutTest, ARuleBeyondManyTensorsIsOneError) {
  Model model = OneParam({2, 2});
  model.params.push_back(model.params[0]);
  model.params[1].name = "v";
  const std::string errors = LayOutErrors(
      model,
      MakeGeneric({MakeMesh("m", {1})}, {MakeRule("*", "m", {Shard(2)})}));
  EXPECT_NE(errors.find("shard dim is 2 but \"w\" has 2 dims (1 other name of "
                        "the rule: too few as well)"),
            std::string::npos)
      << errors;
  EXPECT_EQ(errors.find("error: "), errors.rfind("error: ")) << errors;
}

TEST(GenericLayoutTest, RuleThatPlacesNothingIsRefused) {
  const Model model = MakeModel({.layers = 2});
  const auto errors = [&](const std::string& first, const std::string& second) {
    return LayOutErrors(model,
                        MakeGeneric({MakeMesh("m", {1})},
                                    {MakeRule(first, "m", {Replicate()}),
                                     MakeRule(second, "m", {Replicate()})}));
  };
  EXPECT_EQ(errors("*.q_proj.weight", "*"), "");
  EXPECT_EQ(errors("*.layers.1.*", "*"), "");
  EXPECT_NE(errors("*.q_prj.weight", "*")
                .find("\"*.q_prj.weight\" matches no parameter; the nearest is "
                      "\"model.layers.0.self_attn.q_proj.weight\""),
            std::string::npos);
  EXPECT_NE(errors("something", "*").find("\"something\" matches no parameter"),
            std::string::npos);
  EXPECT_NE(errors("*", "*.q_proj.weight")
                .find("earlier rules place every parameter that "
                      "\"*.q_proj.weight\" matches; rules count in order"),
            std::string::npos);
}

}  // namespace
}  // namespace refit
