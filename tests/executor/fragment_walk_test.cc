#include "runner/fragment_walk.h"

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

using Pair = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>;

// Param tensor and element, buffer tensor and element, of each step of a walk.
std::vector<Pair> Steps(const FragmentWalk& walk, uint64_t parts) {
  std::vector<Pair> steps;
  for (uint64_t part = 0; part < parts; ++part) {
    walk.Visit(part, parts, [&](const WalkRow& row) {
      for (uint64_t i = 0; i < row.count; ++i) {
        steps.emplace_back(
            row.param.tensor, row.param.element + i * row.param_stride,
            row.buffer.tensor, row.buffer.element + i * row.buffer_stride);
      }
    });
  }
  return steps;
}

// A param of 3 experts [4, 5] whose transposed columns 1 .. 3 of experts 1 and
// 2 lie in one fused buffer [2, 3, 6] at column 2.
PlanFile FusedPlan() {
  PlanBuilder plan;
  plan.params = {{.name = "experts.{0}", .index = {3}, .shape = {4, 5}}};
  plan.buffers = {{.name = "fused",
                   .shape = {2, 3, 6},
                   .fragments = {{.param = 0,
                                  .lo = {1, 0, 1},
                                  .extent = {2, 4, 3},
                                  .offset = 2,
                                  .stride = {18, 1, 6}}},
                   .regions = {}}};
  plan.ranks = {{.buffers = {0}, .messages = {}, .fills = {}},
                {.buffers = {}, .messages = {}, .fills = {}}};
  return plan.Open();
}

TEST(FragmentWalkTest, EveryElementMeetsItselfOnBothSides) {
  const PlanFile plan = FusedPlan();
  const fb::Buffer& buffer = *plan.body().buffers()->Get(0);
  const FragmentWalk walk(*buffer.fragments()->Get(0),
                          *plan.body().params()->Get(0), buffer);
  std::vector<Pair> expected;
  for (uint64_t expert = 0; expert < 2; ++expert) {
    for (uint64_t row = 0; row < 4; ++row) {
      for (uint64_t column = 0; column < 3; ++column) {
        expected.emplace_back(expert + 1, row * 5 + column + 1, 0,
                              2 + expert * 18 + row + column * 6);
      }
    }
  }
  EXPECT_EQ(walk.elements(), 24);
  EXPECT_EQ(Steps(walk, 1), expected);
  EXPECT_EQ(Steps(walk, 2), expected);
}

TEST(FragmentWalkTest, PartsAreBoundedByTheOutermostLoop) {
  const PlanFile plan = FusedPlan();
  const fb::Buffer& buffer = *plan.body().buffers()->Get(0);
  const FragmentWalk walk(*buffer.fragments()->Get(0),
                          *plan.body().params()->Get(0), buffer);
  EXPECT_EQ(walk.Parts(1), 2);
  EXPECT_EQ(walk.Parts(1000), 1);
}

}  // namespace
}  // namespace refit
