// The order in which ranks send each other messages.
#include "compiler/passes/turns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace refit {
namespace {

using Messages = std::vector<std::pair<Rank, Rank>>;

// How often the busiest rank sends, or receives.
int32_t Degree(const Messages& messages) {
  std::map<Rank, int32_t> sent, received;
  int32_t most = 0;
  for (const auto& [source, destination] : messages) {
    most = std::max({most, ++sent[source], ++received[destination]});
  }
  return most;
}

TEST(TurnsTest, NoRankHasTwoMessagesInATurn) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const int ranks = 1 + static_cast<int>(random() % 12);
    Messages messages(random() % 100);
    for (auto& [source, destination] : messages) {
      source = Rank{static_cast<int32_t>(random() % ranks)};
      destination = Rank{static_cast<int32_t>(100 + random() % ranks)};
    }
    const std::vector<int32_t> turns = TurnsOf(messages);
    ASSERT_EQ(turns.size(), messages.size());
    std::set<std::pair<Rank, int32_t>> taken;
    for (size_t i = 0; i < messages.size(); ++i) {
      EXPECT_GE(turns[i], 0);
      EXPECT_LT(turns[i], Degree(messages));
      EXPECT_TRUE(taken.insert({messages[i].first, turns[i]}).second);
      EXPECT_TRUE(taken.insert({messages[i].second, turns[i]}).second);
    }
  }
}

}  // namespace
}  // namespace refit
