// The generic layout: refusals. Which elements stand where is in
// tests/second_opinion/generic.py and tests/property.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

Placement Replicate() { return {}; }
Placement Shard(int64_t dim) {
  return {.kind = Placement::Kind::kShard, .dim = dim, .place = {}};
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
