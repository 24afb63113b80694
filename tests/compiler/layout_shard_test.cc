// The index arithmetic that the layouts share.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "compiler/layout/common/shard.h"
#include "compiler/layout/generic/generic.h"
#include "plan/glob.h"

namespace refit {
namespace {

std::vector<int64_t> Sizes(Range (*shard)(int64_t, int64_t, int64_t),
                           int64_t size, int64_t count) {
  std::vector<int64_t> sizes;
  int64_t next = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Range range = shard(size, count, i);
    EXPECT_EQ(range.begin, next);
    next = range.end;
    sizes.push_back(range.size());
  }
  EXPECT_EQ(next, size);
  return sizes;
}

TEST(ShardTest, ChunkShardsAreTorchChunks) {
  EXPECT_EQ(Sizes(ChunkShard, 10, 4), (std::vector<int64_t>{3, 3, 3, 1}));
  EXPECT_EQ(Sizes(ChunkShard, 5, 4), (std::vector<int64_t>{2, 2, 1, 0}));
  EXPECT_EQ(Sizes(ChunkShard, 2, 4), (std::vector<int64_t>{1, 1, 0, 0}));
  EXPECT_EQ(Sizes(ChunkShard, 0, 2), (std::vector<int64_t>{0, 0}));
}

TEST(ShardTest, LinearShardsGiveTheRestToTheFirst) {
  EXPECT_EQ(Sizes(LinearShard, 8, 3), (std::vector<int64_t>{3, 3, 2}));
  EXPECT_EQ(Sizes(LinearShard, 2, 3), (std::vector<int64_t>{1, 1, 0}));
}

TEST(ShardTest, EvenShardsAreEqual) {
  EXPECT_EQ(Sizes(EvenShard, 6, 3), (std::vector<int64_t>{2, 2, 2}));
}

TEST(ShardTest, StridedShardOfOneRankMergesToTheWhole) {
  EXPECT_EQ(StridedShardRuns({{0, 8}}, 4, 1, 0), (Runs{{0, 8}}));
  EXPECT_EQ(StridedShardRuns({{0, 8}}, 2, 2, 1), (Runs{{2, 4}, {6, 8}}));
}

TEST(ShardTest, ASplitFactorBeyondTheSizeCostsNothing) {
  EXPECT_EQ(StridedShardRuns({{0, 2}}, int64_t{1} << 60, 2, 0), (Runs{{0, 2}}));
}

Param Stack(std::string name, std::vector<IndexDim> index) {
  Param param;
  param.name = std::move(name);
  param.index = std::move(index);
  return param;
}

TEST(RulePartitionTest, PartsGiveEveryMemberItsFirstRule) {
  const Param param =
      Stack("layers.{0}.experts.{1}.w", {Consecutive(8, 5), Consecutive(0, 4)});
  const std::vector<std::vector<std::string_view>> lists = {
      {"*"},
      {"*.w", "*"},
      {"nothing", "layers.*.experts.*.w"},
      {"layers.1*", "*.1.w"},
      {"layers.?.*", "*.experts.2.*", "layers.12.experts.3.w", "*"},
      {"*1*", "*0*w"},
      {"layers.9.experts.1.w"},
      {"layers.*2.*", "layers.*.e*.?.w"},
  };
  for (const std::vector<std::string_view>& globs : lists) {
    std::vector<int32_t> rules(5 * 4, -2);
    for (const RulePart& part : PartitionByRule(param, globs)) {
      for (const int32_t layer : part.positions[0]) {
        for (const int32_t expert : part.positions[1]) {
          EXPECT_EQ(rules[layer * 4 + expert], -2);
          rules[layer * 4 + expert] = part.rule;
        }
      }
    }
    for (int32_t layer = 0; layer < 5; ++layer) {
      for (int32_t expert = 0; expert < 4; ++expert) {
        const std::string name = "layers." + std::to_string(8 + layer) +
                                 ".experts." + std::to_string(expert) + ".w";
        int32_t wanted = -1;
        for (size_t i = globs.size(); i-- > 0;) {
          if (GlobMatches(globs[i], name)) wanted = static_cast<int32_t>(i);
        }
        EXPECT_EQ(rules[layer * 4 + expert], wanted) << name;
      }
    }
  }
}

TEST(RulePartitionTest, UniformStacksStayWhole) {
  const Param param = Stack("a.{0}.b", {Consecutive(0, 1000)});
  const std::vector<std::string_view> matching = {"c*", "a.*.b"};
  const std::vector<std::string_view> other = {"c*"};
  EXPECT_EQ(PartitionByRule(param, matching).size(), 1);
  EXPECT_EQ(PartitionByRule(param, other).size(), 1);
}

}  // namespace
}  // namespace refit
