#include "refit/control_plane.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "control/collective_steps.h"
#include "tests/control/control_plane_fixture.h"

namespace refit {
namespace {

TEST_F(ControlPlaneTest, GathersByRank) {
  MakeWorld(3);
  for (const Gathered& gathered :
       GatherOn({0, 1, 2}, [&](int32_t rank) { return Gather(rank); })) {
    EXPECT_EQ(Joined(gathered), "[of 0][of 1][of 2]");
  }
}

TEST_F(ControlPlaneTest, OneRankNeedsNoPort) {
  const auto plane = ConnectTcp({.host = "", .port = 0}, Ample());
  ASSERT_TRUE(plane.ok()) << plane.status();
  EXPECT_EQ((*plane)->world_size(), 1);
  (*plane)->BeginStep();
  EXPECT_EQ(Joined(GatherAll(**plane, "me", "ids", Ample())), "[me]");
}

TEST_F(ControlPlaneTest, MeetsAtAHostName) {
  std::vector<std::string> gathered(2);
  OnRanks({0, 1}, [&](int32_t rank) {
    auto plane = ConnectTcp({"localhost", port_, rank, 2}, Ample());
    ASSERT_TRUE(plane.ok()) << plane.status();
    gathered[rank] = Joined(GatherAll(**plane, "", "ids", Ample()));
  });
  EXPECT_EQ(gathered, std::vector<std::string>({"[][]", "[][]"}));
}

TEST_F(ControlPlaneTest, EmptyAndLargePartsArrive) {
  MakeWorld(3);
  const auto part = [](int32_t rank) {
    return std::string(rank * (size_t{4} << 20), static_cast<char>(rank));
  };
  for (const Gathered& gathered : GatherOn({0, 1, 2}, [&](int32_t rank) {
         return GatherAll(*planes_[rank], part(rank), "plans", Ample());
       })) {
    ASSERT_TRUE(gathered.ok()) << gathered.status();
    EXPECT_EQ(*gathered, std::vector<std::string>({part(0), part(1), part(2)}));
  }
}

// Each value with its first rank: "0:a 2:b".
std::string ComparedBy(ControlPlane& plane, std::string_view mine,
                       std::string_view what = "ids") {
  const auto values = plane.Compare(mine, what, Ample());
  if (!values.ok()) return std::string(values.status().message());
  std::string text;
  for (const auto& [rank, value] : *values) {
    absl::StrAppend(&text, text.empty() ? "" : " ", rank, ":", value);
  }
  return text;
}

TEST_F(ControlPlaneTest, ComparesValuesByTheirFirstRank) {
  MakeWorld(5);
  struct Case {
    std::vector<std::string> values;  // by rank
    std::string told;
  };
  for (const Case& of : {Case{{"a", "a", "a", "a", "a"}, "0:a"},
                         Case{{"a", "b", "a", "b", ""}, "0:a 1:b 4:"},
                         Case{{"", "", "", "", "x"}, "0: 4:x"}}) {
    OnRanks({0, 1, 2, 3, 4}, [&](int32_t rank) {
      EXPECT_EQ(ComparedBy(*planes_[rank], of.values[rank]), of.told);
    });
  }
}

TEST_F(ControlPlaneTest, ComparesNoMoreThanTheFirstValues) {
  constexpr int32_t kRanks = 18;
  MakeWorld(kRanks);
  std::vector<int32_t> ranks;
  for (int32_t rank = 0; rank < kRanks; ++rank) ranks.push_back(rank);
  OnRanks(ranks, [&](int32_t rank) {
    EXPECT_EQ(ComparedBy(*planes_[rank], absl::StrCat("v", rank)),
              "0:v0 1:v1 2:v2 3:v3 4:v4 5:v5 6:v6 7:v7 8:v8 9:v9 10:v10 "
              "11:v11 12:v12 13:v13 14:v14 15:v15");
  });
}

TEST_F(ControlPlaneTest, ComparisonAndExchangeAreDifferentCalls) {
  MakeWorld(2);
  std::vector<std::string> said(2);
  OnRanks({0, 1}, [&](int32_t rank) {
    said[rank] = rank == 0 ? ComparedBy(*planes_[0], "")
                           : std::string(Gather(1).status().message());
  });
  EXPECT_EQ(said[0], said[1]);
  // The rank that came first is named first.
  EXPECT_TRUE(said[0] ==
                  "ranks do not call the same: rank 0 is in comparison "
                  "\"ids\", rank 1 in exchange \"ids\"" ||
              said[0] ==
                  "ranks do not call the same: rank 1 is in exchange "
                  "\"ids\", rank 0 in comparison \"ids\"")
      << said[0];
}

TEST_F(ControlPlaneTest, ExchangeDeliversOnlyToTheNamed) {
  MakeWorld(4);
  // 0 -> 1, 2; 2 -> 1; 3 -> 3.
  const std::vector<std::vector<int32_t>> to = {{1, 2}, {}, {1}, {3}};
  const std::vector<std::vector<int32_t>> from = {{}, {2, 0}, {0}, {3}};
  const auto results = GatherOn({0, 1, 2, 3}, [&](int32_t rank) {
    return planes_[rank]->Exchange("from " + std::to_string(rank), to[rank],
                                   from[rank], "ids", Ample());
  });
  EXPECT_EQ(Joined(results[0]), "");
  EXPECT_EQ(Joined(results[1]), "[from 2][from 0]");
  EXPECT_EQ(Joined(results[2]), "[from 0]");
  EXPECT_EQ(Joined(results[3]), "[from 3]");
}

TEST_F(ControlPlaneTest, ExchangeNamesRanksThatDoNotAgree) {
  MakeWorld(2);
  const std::vector<int32_t> one = {1}, nobody;
  for (const Gathered& result : GatherOn({0, 1}, [&](int32_t rank) {
         return planes_[rank]->Exchange("", rank == 0 ? one : nobody, nobody,
                                        "ids", Ample());
       })) {
    ExpectStatus(result.status(), absl::StatusCode::kInternal,
                 "ids: rank 0 gives to rank 1, which does not expect it");
  }
  for (const auto& plane : planes_) plane->BeginStep();
  for (const Gathered& result : GatherOn({0, 1}, [&](int32_t rank) {
         return planes_[rank]->Exchange("", nobody, rank == 0 ? one : nobody,
                                        "ids", Ample());
       })) {
    ExpectStatus(result.status(), absl::StatusCode::kInternal,
                 "ids: rank 0 expects from rank 1, which does not give to it");
  }
}

TEST_F(ControlPlaneTest, ExchangeWithNoSuchRankFailsOnAll) {
  MakeWorld(2);
  const std::vector<int32_t> two = {2}, nobody;
  const auto results = GatherOn({0, 1}, [&](int32_t rank) {
    return planes_[rank]->Exchange("", rank == 0 ? two : nobody, nobody, "ids",
                                   Ample());
  });
  ExpectStatus(results[0].status(), absl::StatusCode::kInvalidArgument,
               "ids: rank 2 is not one of the 2 ranks");
  ExpectStatus(results[1].status(), absl::StatusCode::kAborted,
               "aborted by rank 0: ids: rank 2 is not one of the 2 ranks");
}

TEST_F(ControlPlaneTest, RanksInDifferentCallsAreNamed) {
  MakeWorld(2);
  const auto results = GatherOn({0, 1}, [&](int32_t rank) {
    return Gather(rank, rank == 0 ? "ids" : "plans");
  });
  const std::string one = "ranks do not call the same: ";
  for (const Gathered& result : results) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
    EXPECT_EQ(result.status().message(), results[0].status().message());
    EXPECT_TRUE(result.status().message() ==
                    one +
                        "rank 0 is in exchange \"ids\", rank 1 in exchange "
                        "\"plans\"" ||
                result.status().message() ==
                    one +
                        "rank 1 is in exchange \"plans\", rank 0 in exchange "
                        "\"ids\"")
        << result.status();
  }
}

TEST_F(ControlPlaneTest, MissingRankIsNamedOnAllRanks) {
  MakeWorld(3);
  const auto results = GatherOn({0, 2}, [&](int32_t rank) {
    return Gather(rank, "bind",
                  rank == 0 ? In(std::chrono::seconds(2)) : Ample());
  });
  const std::string missing =
      "bind: 1 of 3 ranks did not come before the deadline, the first is rank "
      "1";
  ExpectStatus(results[0].status(), absl::StatusCode::kDeadlineExceeded,
               missing);
  ExpectStatus(results[1].status(), absl::StatusCode::kDeadlineExceeded,
               "aborted by rank 0: " + missing);
  // What the late rank brings is of no use any more, and is not kept.
  ExpectStatus(Gather(1).status(), absl::StatusCode::kDeadlineExceeded,
               "aborted by rank 0: " + missing);
  for (const Gathered& gathered : GatherOn({0, 1, 2}, [&](int32_t rank) {
         planes_[rank]->BeginStep();
         return Gather(rank);
       })) {
    EXPECT_EQ(Joined(gathered), "[of 0][of 1][of 2]");
  }
}

TEST_F(ControlPlaneTest, DeadlineThatHasPassedIsStillAnswered) {
  MakeWorld(2);
  ExpectStatus(Gather(1, "ids", In(std::chrono::seconds(-1))).status(),
               absl::StatusCode::kDeadlineExceeded,
               "ids: 1 of 2 ranks did not come before the deadline, the first "
               "is rank 0");
}

TEST_F(ControlPlaneTest, NoDeadlineIsPossible) {
  MakeWorld(2);
  for (const Gathered& gathered : GatherOn({0, 1}, [&](int32_t rank) {
         return Gather(rank, "ids", Deadline::max());
       })) {
    EXPECT_EQ(Joined(gathered), "[of 0][of 1]");
  }
}

TEST_F(ControlPlaneTest, AbortReachesRanksThatWaitAndThatComeLater) {
  MakeWorld(3);
  const std::string message = "aborted by rank 1: the disk is full";
  for (int32_t rank : {0, 1}) planes_[rank]->BeginStep();
  const auto results = GatherOn({0, 1}, [&](int32_t rank) -> Gathered {
    if (rank == 0) return Gather(rank);
    planes_[rank]->Abort(absl::DataLossError("the disk is full"));
    planes_[rank]->Abort(absl::InternalError("only the first counts"));
    return Gather(rank);
  });
  for (const Gathered& result : results) {
    ExpectStatus(result.status(), absl::StatusCode::kAborted, message);
  }
  // Rank 2 is in the step before, which was not aborted, and is not disturbed.
  planes_[2]->BeginStep();
  ExpectStatus(Gather(2).status(), absl::StatusCode::kAborted, message);
}

TEST_F(ControlPlaneTest, ARankThatWasNotCalledKnowsIt) {
  MakeWorld(2);
  for (const auto& [what, missed] :
       {std::pair("sharing", true), std::pair("handshake", false)}) {
    SCOPED_TRACE(what);
    planes_[0]->BeginStep();
    EXPECT_FALSE(GatherAll(*planes_[0], "", what,
                           std::chrono::steady_clock::now() +
                               std::chrono::milliseconds(100))
                     .ok());
    EXPECT_FALSE(planes_[0]->TakeMissedStep());
    planes_[1]->BeginStep();
    EXPECT_FALSE(GatherAll(*planes_[1], "", what, Ample()).ok());
    EXPECT_EQ(planes_[1]->TakeMissedStep(), missed);
  }
}

TEST_F(ControlPlaneTest, NextStepIsNotTouchedByAnAbort) {
  MakeWorld(3);
  for (int step = 0; step < 20; ++step) {
    const bool aborts = step % 2 == 1;
    for (const Gathered& gathered : GatherOn({0, 1, 2}, [&](int32_t rank) {
           planes_[rank]->BeginStep();
           if (aborts && rank == step % 3) {
             planes_[rank]->Abort(absl::InternalError("no"));
           }
           return Gather(rank);
         })) {
      EXPECT_EQ(gathered.ok(), !aborts) << gathered.status();
    }
  }
}

TEST_F(ControlPlaneTest, AbortForLatenessIsLate) {
  MakeWorld(2);
  planes_[1]->Abort(absl::DeadlineExceededError("round 3"));
  ExpectStatus(Gather(0).status(), absl::StatusCode::kDeadlineExceeded,
               "aborted by rank 1: round 3");
}

TEST_F(ControlPlaneTest, AbortFromAnotherThreadEndsTheWait) {
  MakeWorld(2);
  std::thread other(
      [&] { planes_[0]->Abort(absl::CancelledError("the user's wish")); });
  ExpectStatus(Gather(0).status(), absl::StatusCode::kAborted,
               "aborted by rank 0: the user's wish");
  other.join();
}

// Counts its calls, and lets a test wait for the first.
struct Heard {
  std::promise<absl::Status> first;
  std::atomic<uint64_t> step = 0;
  std::atomic<int> calls = 0;

  void Hear(ControlPlane& plane) {
    plane.OnAbort([this](uint64_t failed_step, const absl::Status& status) {
      step = failed_step;
      if (++calls == 1) first.set_value(status);
    });
  }
  absl::Status Await() {
    std::future<absl::Status> future = first.get_future();
    if (future.wait_until(Ample()) == std::future_status::ready) {
      return future.get();
    }
    return absl::OkStatus();
  }
};

TEST_F(ControlPlaneTest, CallbackHearsOfAnAbortOncePerStep) {
  MakeWorld(3);
  std::vector<Heard> heard(3);
  for (int32_t rank = 0; rank < 3; ++rank) heard[rank].Hear(*planes_[rank]);
  const uint64_t step = planes_[0]->BeginStep();
  EXPECT_EQ(planes_[1]->BeginStep(), step);
  planes_[1]->Abort(absl::InternalError("no"));
  ExpectStatus(heard[0].Await(), absl::StatusCode::kAborted,
               "aborted by rank 1: no");
  EXPECT_EQ(heard[0].step, step);
  // Once this returns, rank 2 has read what was sent to it before.
  EXPECT_FALSE(Gather(2, "ids", In(std::chrono::milliseconds(1))).ok());
  // Its present step is not touched. It hears before it can do anything in the
  // one that was aborted, and waits for nothing.
  EXPECT_EQ(heard[2].calls, 0);
  EXPECT_EQ(planes_[2]->BeginStep(), step);
  EXPECT_EQ(heard[2].calls, 1);
  ExpectStatus(heard[2].Await(), absl::StatusCode::kAborted,
               "aborted by rank 1: no");
  EXPECT_EQ(heard[2].step, step);
  for (const Gathered& gathered : GatherOn({0, 1, 2}, [&](int32_t rank) {
         EXPECT_FALSE(Gather(rank).ok());
         planes_[rank]->BeginStep();
         return Gather(rank);
       })) {
    EXPECT_TRUE(gathered.ok()) << gathered.status();
  }
  EXPECT_EQ(heard[0].calls, 1);
  EXPECT_EQ(heard[1].calls, 0);  // it aborted itself
  EXPECT_EQ(heard[2].calls, 1);
}

TEST_F(ControlPlaneTest, StepsMayOverlap) {
  MakeWorld(2);
  // Rank 0 is a step ahead, and fails there; rank 1 is in the step before.
  planes_[0]->BeginStep();
  planes_[0]->Abort(absl::InternalError("no"));
  EXPECT_FALSE(Gather(0).ok());
  ExpectStatus(Gather(1, "ids", In(std::chrono::seconds(1))).status(),
               absl::StatusCode::kDeadlineExceeded,
               "ids: 1 of 2 ranks did not come before the deadline, the first "
               "is rank 0");
}

TEST_F(ControlPlaneTest, RankThatHasClosedIsNamed) {
  MakeWorld(3);
  planes_[2].reset();
  for (const Gathered& result :
       GatherOn({0, 1}, [&](int32_t rank) { return Gather(rank); })) {
    ExpectStatus(result.status(), absl::StatusCode::kUnavailable,
                 "rank 2 has closed its control plane");
  }
}

TEST_F(ControlPlaneTest, RankZeroThatHasClosedIsNamed) {
  MakeWorld(2);
  planes_[0].reset();
  for (int step = 0; step < 2; ++step) {
    ExpectStatus(Gather(1).status(), absl::StatusCode::kUnavailable,
                 "rank 0 has closed its control plane");
    planes_[1]->BeginStep();
  }
}

// A refit waits on devices, in no collective: the callback ends it.
TEST_F(ControlPlaneTest, CallbackHearsOfARankThatClosedWithoutTheStep) {
  for (const int32_t closes : {0, 2}) {
    for (const bool before : {true, false}) {
      MakeWorld(3);
      Heard heard;
      heard.Hear(*planes_[1]);
      if (before) planes_[closes].reset();
      const uint64_t step = planes_[1]->BeginStep();
      planes_[closes].reset();
      ExpectStatus(
          heard.Await(), absl::StatusCode::kUnavailable,
          "rank " + std::to_string(closes) + " has closed its control plane");
      EXPECT_EQ(heard.step, step);
      planes_.clear();
    }
  }
}

TEST_F(ControlPlaneTest, RankThatClosesAfterTheStepDisturbsNobody) {
  for (const int32_t closes : {0, 2}) {
    MakeWorld(3);
    Heard heard;
    heard.Hear(*planes_[1]);
    const auto all = GatherOn({0, 1, 2}, [&](int32_t rank) {
      planes_[rank]->BeginStep();
      return Gather(rank);
    });
    for (const Gathered& gathered : all) {
      EXPECT_TRUE(gathered.ok()) << gathered.status();
    }
    planes_[closes].reset();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_EQ(heard.calls, 0);
    planes_.clear();
  }
}

TEST_F(ControlPlaneTest, ResultsReachRanksOfWhichOthersCloseAtOnce) {
  for (int i = 0; i < 30; ++i) {
    const auto results = GatherOn({0, 1, 2}, [&](int32_t rank) -> Gathered {
      auto plane = Connect(rank, 3);
      if (!plane.ok()) return plane.status();
      return GatherAll(**plane, std::string(100'000, 'x'), "ids", Ample());
    });
    for (const Gathered& gathered : results) {
      ASSERT_TRUE(gathered.ok()) << gathered.status();
    }
  }
}

// A rank in a process of its own, which dies.
class DyingRank {
 public:
  enum class Death { kExits, kIsKilled, kIsKilledButNotItsChild };

  // Fork before this process has threads.
  DyingRank(const TcpRendezvous& rendezvous, Death death) : death_(death) {
    EXPECT_EQ(pipe(order_), 0);
    pid_ = fork();
    if (pid_ == 0) Live(rendezvous);
  }
  ~DyingRank() {
    Die();
    close(order_[0]);
    close(order_[1]);
    waitpid(pid_, nullptr, 0);
  }

  void Die() const {
    if (death_ != Death::kExits) kill(pid_, SIGKILL);
    EXPECT_EQ(write(order_[1], "x", 1), 1);
  }

 private:
  [[noreturn]] void Live(const TcpRendezvous& rendezvous) const {
    close(order_[1]);  // so that it does not outlive the test
    auto plane = ConnectTcp(rendezvous, Ample());
    if (!plane.ok()) _exit(1);
    (*plane)->BeginStep();
    if (!GatherAll(**plane, "dying", "ids", Ample()).ok()) _exit(1);
    char order;
    if (death_ == Death::kIsKilledButNotItsChild && fork() == 0) {
      while (read(order_[0], &order, 1) > 0) continue;  // to the test's end
      _exit(0);
    }
    _exit(read(order_[0], &order, 1) == 1 ? 0 : 1);
  }

  const Death death_;
  int order_[2] = {};  // a pipe
  pid_t pid_ = -1;
};

class RankDies : public ControlPlaneTest,
                 public testing::WithParamInterface<DyingRank::Death> {
 protected:
  // `dead` is one of three.
  void ExpectNamed(int32_t dead) {
    const DyingRank process(Rendezvous(dead, 3), GetParam());
    std::vector<int32_t> here;
    for (int32_t rank = 0; rank < 3; ++rank) {
      if (rank != dead) here.push_back(rank);
    }
    MakeWorld(3, here);
    std::vector<Heard> heard(3);
    for (int32_t rank : here) {
      heard[rank].Hear(*planes_[rank]);
      planes_[rank]->BeginStep();
    }
    for (const Gathered& gathered :
         GatherOn(here, [&](int32_t rank) { return Gather(rank); })) {
      ASSERT_TRUE(gathered.ok()) << gathered.status();
    }
    process.Die();
    const std::string gone = "rank " + std::to_string(dead) + " is gone: ";
    for (int32_t rank : here) {
      const absl::Status status = heard[rank].Await();
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_EQ(status.message().find(gone), 0u) << status;
    }
    // In this step and in all that come.
    for (int step = 0; step < 3; ++step) {
      for (const Gathered& gathered :
           GatherOn(here, [&](int32_t rank) { return Gather(rank); })) {
        const absl::Status status = gathered.status();
        EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
        EXPECT_EQ(status.message().find(gone), 0u) << status;
      }
      for (int32_t rank : here) planes_[rank]->BeginStep();
    }
    planes_.clear();  // before `heard`
  }
};

INSTANTIATE_TEST_SUITE_P(
    ControlPlane, RankDies,
    testing::Values(DyingRank::Death::kExits, DyingRank::Death::kIsKilled,
                    DyingRank::Death::kIsKilledButNotItsChild),
    [](const auto& info) {
      return info.param == DyingRank::Death::kExits ? "Exits"
             : info.param == DyingRank::Death::kIsKilled
                 ? "IsKilled"
                 : "IsKilledButNotItsChild";
    });

TEST_P(RankDies, IsNamedOnAllRanks) { ExpectNamed(1); }
TEST_P(RankDies, RankZeroIsNamedOnAllRanks) { ExpectNamed(0); }

// What could not be sent meanwhile follows.
TEST_F(ControlPlaneTest, RankZeroThatWasStoppedIsNotLost) {
  const pid_t rank0 = fork();
  if (rank0 == 0) {
    auto plane = Connect(0, 2);
    if (!plane.ok()) _exit(1);
    (*plane)->BeginStep();
    (void)(*plane)->Exchange("", {}, {}, "plans", Ample());
    (*plane)->BeginStep();
    const bool goes_on = GatherAll(**plane, "of 0", "ids", Ample()).ok();
    plane->reset();
    _exit(goes_on ? 0 : 1);
  }
  MakeWorld(2, {1});
  kill(rank0, SIGSTOP);
  planes_[1]->BeginStep();
  const std::string more_than_sockets_hold(size_t{48} << 20, 'x');
  const Gathered late =
      planes_[1]->Exchange(more_than_sockets_hold, {}, {}, "plans",
                           In(std::chrono::milliseconds(100)));
  ExpectStatus(late.status(), absl::StatusCode::kDeadlineExceeded,
               "plans: rank 0 did not answer before the deadline");
  kill(rank0, SIGCONT);
  planes_[1]->BeginStep();
  EXPECT_EQ(Joined(Gather(1)), "[of 0][of 1]");
  planes_.clear();
  int status = 0;
  waitpid(rank0, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(ControlPlaneTest, ManyRanksMeetInOneProcessWithFewDescriptors) {
  constexpr int32_t kRanks = 256;
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit few{std::min<rlim_t>(400, limit.rlim_max), limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::atomic<int32_t> complete = 0;
  EXPECT_TRUE(RunRankThreads(kRanks, [&](int32_t rank) {
                auto plane = Connect(rank, kRanks);
                ASSERT_TRUE(plane.ok()) << plane.status();
                const std::string mine(100, static_cast<char>(rank));
                const Gathered gathered =
                    GatherAll(**plane, mine, "ids", Ample());
                ASSERT_TRUE(gathered.ok()) << gathered.status();
                for (int32_t peer = 0; peer < kRanks; ++peer) {
                  complete += (*gathered)[peer] ==
                              std::string(100, static_cast<char>(peer));
                }
              }).ok());
  EXPECT_EQ(complete, kRanks * kRanks);
  setrlimit(RLIMIT_NOFILE, &limit);
}

TEST_F(ControlPlaneTest, InterruptionEndsTheStepOnAllRanks) {
  MakeWorld(3);
  const Deadline begun = std::chrono::steady_clock::now();
  const auto statuses = GatherOn({0, 1}, [&](int32_t rank) -> Gathered {
    planes_[rank]->BeginStep();
    if (rank == 0) return Gather(rank);
    const ScopedInterruption scope =
        InterruptedAfter(std::chrono::milliseconds(300));
    return Gather(rank);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(5));
  ExpectStatus(statuses[0].status(), absl::StatusCode::kAborted,
               "aborted by rank 1: the worker stops");
  ExpectStatus(statuses[1].status(), absl::StatusCode::kCancelled,
               "the worker stops");
  // The one that was not waiting hears of it in that step; the next is whole.
  planes_[2]->BeginStep();
  ExpectStatus(Gather(2).status(), absl::StatusCode::kAborted,
               "aborted by rank 1: the worker stops");
  for (const Gathered& gathered : GatherOn({0, 1, 2}, [&](int32_t rank) {
         planes_[rank]->BeginStep();
         return Gather(rank);
       })) {
    EXPECT_EQ(Joined(gathered), "[of 0][of 1][of 2]");
  }
}

// A rank that is yet to begin a step knows that it has failed, so that it never
// uses memory that others have freed since.
TEST(CollectiveStepsTest, FailuresOfStepsToComeAreSentAtOnceAndOnce) {
  std::string sent;
  control::CollectiveSteps steps(3, [&](int32_t rank,
                                        const control::SharedBytes& bytes) {
    control::FrameReader reader(control::kPayloadBytesMax);
    reader.Append(*bytes);
    const control::Frame frame = **reader.Next();
    absl::StrAppend(&sent, rank, " of step ", frame.step, ": ",
                    control::PayloadStatus(frame.payload).message(),
                    frame.sequence == control::kMissed ? " (missed)\n" : "\n");
  });
  steps.Begin(0, 1, 0);
  steps.Begin(1, 1, 0);
  steps.Abort(1, 1, absl::CancelledError("the disk is full"));
  EXPECT_EQ(std::exchange(sent, ""),
            "0 of step 1: aborted by rank 1: the disk is full\n"
            "1 of step 1: aborted by rank 1: the disk is full\n"
            "2 of step 1: aborted by rank 1: the disk is full (missed)\n");
  steps.Begin(2, 1, 0);
  EXPECT_EQ(sent, "");
  // Nobody was called for the step that the others are told of.
  steps.Leave(1);
  EXPECT_EQ(std::exchange(sent, ""),
            "0 of step 2: rank 1 has closed its control plane\n"
            "2 of step 2: rank 1 has closed its control plane\n");
  steps.Begin(0, 2, 0);
  EXPECT_EQ(sent,
            "0 of step 3: rank 1 has closed its control plane\n"
            "2 of step 3: rank 1 has closed its control plane\n");
}

// What is written to stderr at `now`.
std::string ReportOf(control::CollectiveSteps& steps,
                     control::CollectiveSteps::TimePoint now) {
  testing::internal::CaptureStderr();
  steps.ReportMissing(now);
  return testing::internal::GetCapturedStderr();
}

TEST(CollectiveStepsTest, RanksThatOthersWaitForAreReportedSparsely) {
  using std::chrono::seconds;
  control::CollectiveSteps steps(12, [](int32_t, control::SharedBytes) {});
  const Deadline start = std::chrono::steady_clock::now();
  EXPECT_EQ(ReportOf(steps, start), "");
  EXPECT_EQ(ReportOf(steps, start + seconds(1000)), "");
  const Deadline begun = start + seconds(1000);
  for (int32_t rank = 0; rank < 9; ++rank) steps.Begin(rank, 1, 0);
  EXPECT_EQ(ReportOf(steps, begun), "");
  EXPECT_EQ(steps.NextReport(), begun + seconds(10));
  EXPECT_EQ(ReportOf(steps, begun + seconds(9)), "");
  EXPECT_EQ(ReportOf(steps, begun + seconds(11)),
            "refit: run: waiting for ranks 9, 10, 11 (11 s)\n");
  EXPECT_EQ(ReportOf(steps, begun + seconds(19)), "");
  EXPECT_EQ(ReportOf(steps, begun + seconds(20)),
            "refit: run: waiting for ranks 9, 10, 11 (20 s)\n");
  EXPECT_EQ(steps.NextReport(), begun + seconds(40));
  // A collective of the step is another wait.
  const Deadline asked = begun + seconds(30);
  steps.Contribute(0, 1, 1, {.remaining_ms = 600'000, .what = "sharing"},
                   asked);
  EXPECT_EQ(ReportOf(steps, asked), "");
  EXPECT_EQ(ReportOf(steps, asked + seconds(10)),
            "refit: sharing: waiting for ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 "
            "more (10 s)\n");
  steps.Abort(3, 1, absl::CancelledError("the worker stops"));
  EXPECT_EQ(ReportOf(steps, asked + seconds(600)), "");
  EXPECT_EQ(steps.NextReport(), Deadline::max());
}

}  // namespace
}  // namespace refit
