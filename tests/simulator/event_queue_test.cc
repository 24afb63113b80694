#include "simulator/event_queue.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <utility>

namespace refit::simulator {
namespace {

TEST(EventQueue, TheNextComesFirstAndOfEqualTimesTheLowerTask) {
  EventQueue queue(4);
  queue.Set({.seconds = 2, .task = 3});
  queue.Set({.seconds = 2, .task = 1});
  queue.Set({.seconds = 1, .task = 2});
  queue.Set({.seconds = 3, .task = 0});
  for (const uint32_t task : {2u, 1u, 3u, 0u}) {
    ASSERT_FALSE(queue.empty());
    EXPECT_EQ(queue.top().task, task);
    queue.Pop();
  }
  EXPECT_TRUE(queue.empty());
}

TEST(EventQueue, IsASortedMapWhateverMoves) {
  constexpr uint32_t kTasks = 50;
  std::mt19937 random(1);
  EventQueue queue(kTasks);
  std::map<uint32_t, double> seconds;  // by task
  for (int step = 0; step < 20000; ++step) {
    if (!seconds.empty() && random() % 3 == 0) {
      std::pair<double, uint32_t> first(1e9, 0);
      for (const auto& [task, at] : seconds) {
        first = std::min(first, {at, task});
      }
      ASSERT_EQ(queue.top().seconds, first.first) << "step " << step;
      ASSERT_EQ(queue.top().task, first.second) << "step " << step;
      queue.Pop();
      seconds.erase(first.second);
      continue;
    }
    const auto task = static_cast<uint32_t>(random() % kTasks);
    seconds[task] = static_cast<double>(random() % 100);
    queue.Set({.seconds = seconds[task], .task = task});
  }
  ASSERT_EQ(queue.empty(), seconds.empty());
}

}  // namespace
}  // namespace refit::simulator
