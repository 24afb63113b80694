#include "executor/device/shared_words.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "control/payload.h"

namespace refit {
namespace {

std::chrono::steady_clock::time_point InTenSeconds() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(10);
}

TEST(SharedWordsTest, AnotherProcessWritesThem) {
  auto words = *SharedWords::Create(600);
  const std::string shown = *words->Show();
  for (size_t i = 0; i < 600; ++i) EXPECT_EQ(words->data()[i], 0);
  const pid_t child = fork();
  if (child == 0) {
    auto theirs = SharedWords::Open(shown, 600, InTenSeconds());
    if (!theirs.ok()) _exit(1);
    (*theirs)->data()[599] = 7;
    _exit((*theirs)->data() == words->data() ? 2 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(words->data()[599], 7);
}

TEST(SharedWordsTest, WordsOutliveTheirMaker) {
  auto words = *SharedWords::Create(2);
  auto theirs = *SharedWords::Open(*words->Show(), 2, InTenSeconds());
  words.reset();
  theirs->data()[1] = 7;
  EXPECT_EQ(theirs->data()[1], 7);
}

TEST(SharedWordsTest, WhatIsNotShownIsNotOpened) {
  auto words = *SharedWords::Create(2);
  const std::string shown = *words->Show();
  EXPECT_EQ(
      SharedWords::Open(shown, 600, InTenSeconds()).status(),
      absl::InvalidArgumentError("what a process shows is not 600 words"));
  for (size_t size = 0; size < shown.size(); ++size) {
    EXPECT_EQ(
        SharedWords::Open(shown.substr(0, size), 2, InTenSeconds()).status(),
        absl::InvalidArgumentError("no words that a process shows"));
  }
  std::string forged = shown;
  forged.back() ^= 1;
  EXPECT_EQ(SharedWords::Open(forged, 2, InTenSeconds()).status(),
            absl::FailedPreconditionError("its owner shows no such words"));
  words.reset();
  EXPECT_EQ(SharedWords::Open(shown, 2, InTenSeconds()).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace refit
