// Threads of programs that run all ranks.
#include "runner/rank_threads.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "tests/sanitizers.h"

namespace refit {
namespace {

// In a process of its own, which can have no memory for another stack.
[[noreturn]] void LoopWithoutThreads() {
  rlimit limit = {};
  limit.rlim_cur = limit.rlim_max = 1;
  setrlimit(RLIMIT_AS, &limit);
  std::atomic<size_t> sum = 0;
  ParallelFor(100, [&](size_t item) { sum += item; });
  std::_Exit(sum == 4950 ? 0 : 1);
}

TEST(RankThreadsTest, ALoopNeedsNoOtherThreads) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer ends where memory is limited";
  if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "one core";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(LoopWithoutThreads(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace refit
