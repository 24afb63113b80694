#include "control/log.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "control/waiting.h"

namespace refit {
namespace {

class LogTest : public testing::Test {
 protected:
  ~LogTest() override { SetLogSink(nullptr); }
};

TEST_F(LogTest, LinesGoToTheStandardErrorUnlessThereIsASink) {
  std::vector<std::pair<LogLevel, std::string>> lines;
  testing::internal::CaptureStderr();
  Log(LogLevel::kError, "before");
  SetLogSink([&](LogLevel level, std::string_view line) {
    lines.emplace_back(level, line);
  });
  Log(LogLevel::kInfo, "to the sink");
  ReportWait("connect", "ranks 3, 5", 10, "secret differs");
  SetLogSink(nullptr);
  ReportWait("rank 0", "its stream", 20);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "refit: before\nrefit: rank 0: waiting for its stream (20 s)\n");
  EXPECT_EQ(lines, (std::vector<std::pair<LogLevel, std::string>>{
                       {LogLevel::kInfo, "to the sink"},
                       {LogLevel::kWarning,
                        "connect: waiting for ranks 3, 5 (10 s); secret "
                        "differs"}}));
}

// What a sink refers to may go once there is another.
TEST_F(LogTest, ASinkIsNotCalledOnceThereIsAnother) {
  std::atomic<bool> ends = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      while (!ends) Log(LogLevel::kInfo, "line");
    });
  }
  for (int i = 0; i < 200; ++i) {
    // Neither atomic nor locked: only one call at a time leaves it right.
    auto calls = std::make_unique<uint64_t>(0);
    std::atomic<uint64_t> counted = 0;
    SetLogSink([&](LogLevel, std::string_view) {
      ++*calls;
      ++counted;
    });
    while (counted < 100) std::this_thread::yield();
    SetLogSink([](LogLevel, std::string_view) {});
    EXPECT_EQ(*calls, counted);
    calls.reset();
  }
  ends = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace refit
