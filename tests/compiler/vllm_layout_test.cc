// vLLM's layout: stacks, fragments and skips. Which bytes stand where is the
// second opinion's (tests/second_opinion/vllm.py).
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

struct VllmMesh {
  int64_t tp = 1, pp = 1;
  bool ep = false;
  ExpertPlacement experts = {};
};

SideSpec VllmSideOf(const VllmMesh& mesh) {
  SideSpec side = MakeSide(LayoutKind::kVllm, mesh.tp, mesh.pp);
  side.expert_parallel_enabled.value = mesh.ep;
  if (mesh.ep) side.experts = Given(mesh.experts);
  return side;
}

// The unread copies of a rank: what a stage builds and never reads.
std::vector<std::string> SkippedOf(const ModelSizes& sizes,
                                   const VllmMesh& mesh, size_t rank) {
  const std::vector<Tensors> ranks = LayOutAndExpand(
      MakeModel(sizes), VllmSideOf(mesh), fb::Side::kDestination);
  return SkippedTensors(ranks.at(rank));
}

TEST(VllmLayoutTest, UnreadCopiesOfMoeModelsAreDeclaredSkips) {
  const std::vector<std::string> head_and_norm = {"lm_head.weight",
                                                  "model.norm.weight"};
  const std::vector<std::string> embedding = {"model.embed_tokens.weight"};
  for (const std::string family : {"qwen3_moe", "mixtral"}) {
    const ModelSizes sizes = {.experts = 4, .family = family};
    EXPECT_EQ(SkippedOf(sizes, {.tp = 2, .pp = 2}, 0), head_and_norm);
    EXPECT_EQ(SkippedOf(sizes, {.tp = 2, .pp = 2}, 3), embedding);
  }
  EXPECT_EQ(SkippedOf({.family = "llama"}, {.pp = 2}, 0),
            std::vector<std::string>{});
}

// All experts of all layers of a stage in two fragments: gate and up.
TEST(VllmLayoutTest, FragmentsFollowDistinctShapesNotLayersTimesExperts) {
  const Model model = MakeModel({.layers = 24, .experts = 64});
  BufferTable buffers;
  Diagnostics diagnostics;
  const SideSpec side = VllmSideOf({.tp = 4, .pp = 2, .ep = true});
  LayOut({.model = model,
          .side = side,
          .which = fb::Side::kDestination,
          .buffers = buffers,
          .diagnostics = diagnostics});
  ASSERT_TRUE(diagnostics.ok());
  for (const Buffer& buffer : buffers.all()) {
    if (buffer.name.ends_with("w13_weight")) {
      EXPECT_EQ(buffer.fragments.size(), 2);
    }
  }
}

// Physical experts an even stride apart are one fragment: here the first copies
// of all experts of a rank, and the second.
TEST(VllmLayoutTest, ExpertsAtEvenStridesAreOneFragment) {
  const Model model = MakeModel({.experts = 8});
  BufferTable buffers;
  Diagnostics diagnostics;
  std::vector<int64_t> table;
  for (int64_t p = 0; p < 16; ++p) table.push_back(p / 2);
  const SideSpec side =
      VllmSideOf({.tp = 2,
                  .ep = true,
                  .experts = {.kind = ExpertPlacement::Kind::kTable,
                              .physical_to_logical = {table}}});
  LayOut({.model = model,
          .side = side,
          .which = fb::Side::kDestination,
          .buffers = buffers,
          .diagnostics = diagnostics});
  ASSERT_TRUE(diagnostics.ok());
  for (const Buffer& buffer : buffers.all()) {
    if (buffer.name.ends_with("w2_weight")) {
      EXPECT_EQ(buffer.fragments.size(), 2);
    }
  }
}

}  // namespace
}  // namespace refit
