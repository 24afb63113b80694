#include "executor/transport/refit_supervisor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace refit {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAmple(60000);

Deadline In(milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

// What the supervisor drives, under the test's control; `log` in order.
class RefitSupervisorTest : public testing::Test {
 protected:
  explicit RefitSupervisorTest(bool has_thread = true)
      : supervisor_({.begin_step =
                         [this](StepPurpose) {
                           const uint64_t step = ++steps_;
                           if (while_entering_) while_entering_(step);
                           Log("step " + std::to_string(step));
                           return step;
                         },
                     .tell =
                         [this](const absl::Status& s) {
                           Log("tell " + std::string(s.message()));
                         },
                     .probe = [this](bool is_enqueued) -> absl::StatusOr<bool> {
                       if (fails_) return absl::InternalError("broken");
                       return is_enqueued && is_done_;
                     },
                     .stop =
                         [this](bool is_enqueued) {
                           std::this_thread::sleep_for(milliseconds(50));
                           while (graph_exists_) std::this_thread::yield();
                           Log(is_enqueued ? "stop enqueued" : "stop");
                           return stopped_;
                         },
                     .begin_thread = [] {},
                     .device_failure =
                         [this] {
                           return device_fails_
                                      ? absl::InternalError("device broken")
                                      : absl::OkStatus();
                         }}) {
    if (has_thread) {
      EXPECT_TRUE(supervisor_.Start().ok());
    }
  }

  void Log(const std::string& line) {
    std::lock_guard lock(mutex_);
    log_.push_back(line);
  }
  std::vector<std::string> TakeLog() {
    std::lock_guard lock(mutex_);
    return std::exchange(log_, {});
  }
  absl::Status Begin(bool is_captured = false) {
    return supervisor_.BeginRefit(is_captured, [] {});
  }
  absl::Status End() {
    return supervisor_.EndRefit([] { return absl::OkStatus(); });
  }
  absl::Status Disconnect() { return supervisor_.Disconnect(In(kAmple)); }
  absl::Status Enter() { return supervisor_.Enter(In(kAmple)); }
  absl::Status Wait() {
    return supervisor_.Wait([this] {
      Log("decide");
      return decision_;
    });
  }

  std::mutex mutex_;
  std::vector<std::string> log_;
  uint64_t steps_ = 0;
  std::function<void(uint64_t)> while_entering_;
  absl::Status decision_;
  std::atomic<bool> fails_ = false;
  std::atomic<bool> is_done_ = false;
  std::atomic<bool> device_fails_ = false;
  absl::Status stopped_;
  std::atomic<bool> graph_exists_ = false;  // an abort waits for it
  RefitSupervisor supervisor_;
};

using Lines = std::vector<std::string>;

TEST_F(RefitSupervisorTest, PhasesOfARefitThatGoesWell) {
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kTorn);
  EXPECT_EQ(Begin().code(), absl::StatusCode::kFailedPrecondition);
  supervisor_.Connected();
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kIdle);
  ASSERT_TRUE(Begin().ok());
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kEnqueuing);
  ASSERT_TRUE(End().ok());
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kEnqueued);
  is_done_ = true;
  while (supervisor_.phase() != RefitPhase::kOver) std::this_thread::yield();
  EXPECT_TRUE(Wait().ok());
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kIdle);
  EXPECT_EQ(TakeLog(), (Lines{"step 1", "step 2", "decide"}));
}

TEST_F(RefitSupervisorTest, CapturedRefitIsNotUnderWay) {
  supervisor_.Connected();
  ASSERT_TRUE(Begin(/*is_captured=*/true).ok());
  ASSERT_TRUE(End().ok());
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kIdle);
  EXPECT_TRUE(Wait().ok());
}

// The thread that captures ends and destroys the graph after its calls return.
TEST_F(RefitSupervisorTest, FailureOfACapturedRefitDoesNotWaitForItsGraph) {
  supervisor_.Connected();
  graph_exists_ = true;
  ASSERT_TRUE(Begin(/*is_captured=*/true).ok());
  supervisor_.Hear(1, absl::AbortedError("theirs"));
  EXPECT_EQ(End().message(), "theirs");
  EXPECT_EQ(Wait().message(), "theirs");
  EXPECT_EQ(Begin().message(), "theirs");
  for (const absl::Status& status :
       {supervisor_.Enter(In(milliseconds(50))),
        supervisor_.Disconnect(In(milliseconds(50)))}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_NE(status.message().find("destroy the graph"), std::string::npos);
  }
  graph_exists_ = false;
  EXPECT_TRUE(Disconnect().ok());
  // The others are in the step that this rank could not enter.
  EXPECT_EQ(TakeLog(),
            (Lines{"step 1", "step 2",
                   "tell a graph that captured the refit which failed still "
                   "exists, and its abort waits for that: destroy the graph "
                   "first",
                   "stop"}));
}

TEST_F(RefitSupervisorTest, FailureIsToldBeforeTheWorkIsStopped) {
  supervisor_.Connected();
  ASSERT_TRUE(Begin().ok());
  EXPECT_EQ(supervisor_.Fail(absl::InternalError("mine")).message(), "mine");
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kTorn);
  EXPECT_EQ(TakeLog(), (Lines{"step 1", "tell mine", "stop"}));
  // The first counts.
  EXPECT_EQ(supervisor_.Fail(absl::InternalError("later")).message(), "mine");
  EXPECT_EQ(Begin().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(RefitSupervisorTest, FailureOutsideOfARefitIsNobodyElses) {
  supervisor_.Connected();
  EXPECT_EQ(supervisor_.Fail(absl::InternalError("mine")).message(), "mine");
  EXPECT_TRUE(supervisor_.failure().ok());
  EXPECT_EQ(TakeLog(), Lines{});
}

TEST_F(RefitSupervisorTest, FailureOfAnotherRankIsNotToldAgain) {
  supervisor_.Connected();
  ASSERT_TRUE(Begin().ok());
  ASSERT_TRUE(End().ok());
  supervisor_.Hear(1, absl::AbortedError("theirs"));
  EXPECT_EQ(Wait().message(), "theirs");
  EXPECT_EQ(TakeLog(), (Lines{"step 1", "stop enqueued"}));
}

TEST_F(RefitSupervisorTest, FailureIsHeardOfAStepThatIsYetToBeEntered) {
  supervisor_.Connected();
  supervisor_.Hear(1, absl::AbortedError("theirs"));
  EXPECT_TRUE(supervisor_.failure().ok());
  EXPECT_EQ(Begin().message(), "theirs");
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kTorn);
}

// Neither told in the step that is being entered, nor forgotten by it.
TEST_F(RefitSupervisorTest, FailureWhileAStepIsEnteredEndsBothRefits) {
  supervisor_.Connected();
  ASSERT_TRUE(Begin().ok());
  ASSERT_TRUE(End().ok());
  while_entering_ = [&](uint64_t) {
    fails_ = true;
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_EQ(supervisor_.phase(), RefitPhase::kEntering);
    Log("entering");
  };
  absl::Status status = Begin();
  if (status.ok()) status = End();
  if (status.ok()) status = Wait();
  EXPECT_EQ(status.message(), "broken");
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kTorn);
  const Lines log = TakeLog();
  ASSERT_EQ(log.size(), 5);
  EXPECT_EQ(log[1], "entering");
  EXPECT_EQ(log[2], "step 2");
  EXPECT_EQ(log[3], "tell broken");
}

TEST_F(RefitSupervisorTest, OldStepsFailureHeardWhileEnteringIsCarriedOver) {
  supervisor_.Connected();
  ASSERT_TRUE(Begin().ok());
  ASSERT_TRUE(End().ok());
  while_entering_ = [&](uint64_t) {
    supervisor_.Hear(1, absl::AbortedError("theirs"));
  };
  EXPECT_EQ(Begin().message(), "theirs");
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kTorn);
  // The others are in the new step, which this rank leaves.
  const Lines log = TakeLog();
  ASSERT_EQ(log.size(), 4);
  EXPECT_EQ(log[2], "tell theirs");
}

TEST_F(RefitSupervisorTest, NextRefitReturnsTheFailureOfTheOneInFlight) {
  supervisor_.Connected();
  ASSERT_TRUE(Begin().ok());
  ASSERT_TRUE(End().ok());
  fails_ = true;
  while (supervisor_.failure().ok()) std::this_thread::yield();
  absl::Status status = Begin();
  // The step may have been entered before it was found.
  EXPECT_TRUE(status.message() == "broken" ||
              absl::IsFailedPrecondition(status))
      << status;
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kTorn);
}

TEST_F(RefitSupervisorTest, AllRanksDecisionCountsAndNotAnAbortMeanwhile) {
  supervisor_.Connected();
  ASSERT_TRUE(Begin().ok());
  ASSERT_TRUE(End().ok());
  is_done_ = true;
  EXPECT_TRUE(supervisor_
                  .Wait([&] {
                    EXPECT_EQ(supervisor_.phase(), RefitPhase::kDeciding);
                    supervisor_.Abort(absl::CancelledError("too late"));
                    supervisor_.Hear(1, absl::AbortedError("too late"));
                    return absl::OkStatus();
                  })
                  .ok());
  ASSERT_TRUE(Begin().ok());
  ASSERT_TRUE(End().ok());
  decision_ = absl::AbortedError("not all");
  EXPECT_EQ(Wait().message(), "not all");
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kTorn);
}

TEST_F(RefitSupervisorTest, WaitSeesTheEndOfTheWorkItself) {
  supervisor_.Connected();
  ASSERT_TRUE(Begin().ok());
  ASSERT_TRUE(End().ok());
  std::thread device([&] {
    std::this_thread::sleep_for(milliseconds(30));
    is_done_ = true;
  });
  EXPECT_TRUE(supervisor_.AwaitOver().ok());
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kOver);
  EXPECT_TRUE(Wait().ok());
  device.join();
}

TEST_F(RefitSupervisorTest, DisconnectAndCloseEndWhatIsUnderWay) {
  supervisor_.Connected();
  ASSERT_TRUE(Begin().ok());
  EXPECT_TRUE(Disconnect().ok());
  EXPECT_EQ(TakeLog(), (Lines{"step 1", "tell connecting anew", "stop"}));
  EXPECT_TRUE(Enter().ok());
  supervisor_.Connected();
  ASSERT_TRUE(Begin().ok());
  supervisor_.Close();
  EXPECT_EQ(TakeLog(),
            (Lines{"step 2", "step 3", "tell closed before Wait", "stop"}));
}

TEST_F(RefitSupervisorTest, ADeviceThatFailedEndsTheRefitOfARankThatWaits) {
  supervisor_.Connected();
  ASSERT_TRUE(Begin().ok());
  ASSERT_TRUE(End().ok());
  device_fails_ = true;
  EXPECT_EQ(Wait().message(), "device broken");
  EXPECT_EQ(TakeLog(),
            (Lines{"step 1", "tell device broken", "stop enqueued"}));
}

TEST_F(RefitSupervisorTest, WhatCouldNotBeStoppedIsAddedToTheFailure) {
  stopped_ = absl::InternalError("and it goes on");
  supervisor_.Connected();
  ASSERT_TRUE(Begin().ok());
  EXPECT_EQ(supervisor_.Fail(absl::AbortedError("mine")),
            absl::AbortedError("mine; and it goes on"));
}

class RefitSupervisorWithoutAThread : public RefitSupervisorTest {
 protected:
  RefitSupervisorWithoutAThread() : RefitSupervisorTest(false) {}
};

TEST_F(RefitSupervisorWithoutAThread, WaitProbesAndStops) {
  supervisor_.Connected();
  ASSERT_TRUE(Begin().ok());
  ASSERT_TRUE(End().ok());
  is_done_ = true;
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kEnqueued) << "nobody has looked";
  EXPECT_TRUE(Wait().ok());
  ASSERT_TRUE(Begin().ok());
  ASSERT_TRUE(End().ok());
  TakeLog();
  fails_ = true;
  EXPECT_EQ(Wait().message(), "broken");
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kTorn);
  EXPECT_EQ(TakeLog(), (Lines{"tell broken", "stop enqueued"}));
}

TEST_F(RefitSupervisorWithoutAThread, WhatIsHeardIsStoppedByTheNextCall) {
  supervisor_.Connected();
  ASSERT_TRUE(Begin().ok());
  supervisor_.Hear(1, absl::AbortedError("theirs"));
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(TakeLog(), Lines{"step 1"});
  EXPECT_EQ(End().message(), "theirs");
  EXPECT_EQ(supervisor_.phase(), RefitPhase::kTorn);
  EXPECT_EQ(TakeLog(), Lines{"stop"});
}

TEST_F(RefitSupervisorWithoutAThread, CloseEndsWhatIsUnderWay) {
  supervisor_.Connected();
  ASSERT_TRUE(Begin().ok());
  supervisor_.Close();
  EXPECT_EQ(TakeLog(), (Lines{"step 1", "tell closed before Wait", "stop"}));
}

// Many threads at once, for the thread sanitizer.
TEST_F(RefitSupervisorTest, AbortsAtAnyTimeFailARefitOrNone) {
  std::atomic<bool> is_over = false;
  std::vector<std::thread> users;
  for (int i = 0; i < 3; ++i) {
    users.emplace_back([&] {
      while (!is_over) {
        supervisor_.Abort(absl::CancelledError("a wish"));
        std::this_thread::sleep_for(milliseconds(1));
      }
    });
  }
  is_done_ = true;
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(Disconnect().ok());
    EXPECT_TRUE(Enter().ok());
    supervisor_.Connected();
    absl::Status status = Begin();
    if (status.ok()) status = End();
    if (status.ok()) status = Wait();
    EXPECT_EQ(supervisor_.phase(),
              status.ok() ? RefitPhase::kIdle : RefitPhase::kTorn);
  }
  is_over = true;
  for (std::thread& user : users) user.join();
}

}  // namespace
}  // namespace refit
