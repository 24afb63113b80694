// SGLang's layout: skips. Which bytes stand where is the second opinion's
// (tests/second_opinion/sglang.py).
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/compiler/layout_testing.h"

namespace refit {
namespace {

using namespace layout_testing;

std::vector<std::string> SkippedOf(const ModelSizes& sizes, fb::Side which,
                                   size_t stage) {
  const std::vector<Tensors> stages = LayOutAndExpand(
      MakeModel(sizes), MakeSide(LayoutKind::kSglang, 1, 2), which);
  return SkippedTensors(stages.at(stage));
}

const std::vector<std::string> kNone;
const std::vector<std::string> kHead = {"lm_head.weight"};

TEST(SglangLayoutTest, CopyOfATiedHeadIsNotReadFromASource) {
  const ModelSizes sizes = {.tied = true, .family = "qwen3"};
  EXPECT_EQ(SkippedOf(sizes, fb::Side::kSource, 1), kHead);
  EXPECT_EQ(SkippedOf(sizes, fb::Side::kDestination, 1), kNone);
}

TEST(SglangLayoutTest, UnreadHeadsOfMoeModelsAreDeclaredSkips) {
  for (const ModelSizes& sizes :
       {ModelSizes{.experts = 4}, ModelSizes{.experts = 4, .tied = true},
        ModelSizes{.experts = 4, .family = "mixtral"}}) {
    EXPECT_EQ(SkippedOf(sizes, fb::Side::kDestination, 0), kHead);
    EXPECT_EQ(SkippedOf(sizes, fb::Side::kDestination, 1), kNone);
  }
}

TEST(SglangLayoutTest, EveryStageOfALlamaHasAHead) {
  EXPECT_EQ(SkippedOf({.family = "llama"}, fb::Side::kDestination, 0), kHead);
  EXPECT_EQ(SkippedOf({.family = "qwen3"}, fb::Side::kDestination, 0), kNone);
}

}  // namespace
}  // namespace refit
