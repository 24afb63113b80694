// How ranks meet, and whom else they may meet.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "control/frame.h"
#include "control/server.h"
#include "control/tcp_socket.h"
#include "refit/control_plane.h"
#include "refit/unique_id.h"
#include "tests/control/control_plane_fixture.h"
#include "tests/control/stranger.h"

namespace refit {
namespace {

// While it lives, one name has a name server that does not answer.
class SlowName {
 public:
  static constexpr char kHost[] = "slow.invalid";

  SlowName() { is_slow_ = true; }
  ~SlowName() {
    is_slow_ = false;
    is_slow_.notify_all();
  }
  static void Await() { is_slow_.wait(true); }

 private:
  static std::atomic<bool> is_slow_;
};

std::atomic<bool> SlowName::is_slow_ = false;

}  // namespace
}  // namespace refit

// In the place of the C library's.
extern "C" int getaddrinfo(const char* host, const char* service,
                           const addrinfo* hints, addrinfo** found) {
  static const auto resolve =
      reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  const bool is_numeric = (hints->ai_flags & AI_NUMERICHOST) != 0;
  if (!is_numeric && host == std::string(refit::SlowName::kHost)) {
    refit::SlowName::Await();
  }
  return resolve(host, service, hints, found);
}

namespace refit {
namespace {

using control::Encode;
using control::FrameType;

using ControlMeetingTest = ControlPlaneTest;

TEST_F(ControlMeetingTest, GarbageDoesNotDisturb) {
  const std::string oversized =
      Encode({.type = FrameType::kHello, .payload = std::string(5000, 'x')});
  const std::string out_of_turn = Encode({.type = FrameType::kBegin});
  planes_.resize(2);
  std::thread rank0([&] { planes_[0] = *Connect(0, 2); });
  const Socket silent = ConnectAsStranger(port_);
  const auto send_garbage = [&] {
    for (const std::string& text :
         {std::string("GET / HTTP/1.1\r\n\r\n"),
          std::string("\x16\x03\x01\x02"), oversized, out_of_turn}) {
      const Socket stranger = ConnectAsStranger(port_);
      SendText(stranger, text);
      EXPECT_TRUE(IsDropped(stranger));
    }
    ConnectAsStranger(port_).Close();
  };
  send_garbage();
  planes_[1] = *Connect(1, 2);
  rank0.join();
  send_garbage();
  for (const Gathered& gathered :
       GatherOn({0, 1}, [&](int32_t rank) { return Gather(rank); })) {
    EXPECT_EQ(Joined(gathered), "[of 0][of 1]");
  }
}

// Joins by hand, as far as it goes without the other ranks.
TalkingStranger MeetByHand(uint16_t port, int32_t rank, int32_t world_size) {
  TalkingStranger stranger(port);
  EXPECT_EQ(stranger.Prove({"127.0.0.1", port, rank, world_size}),
            FrameType::kAccepted);
  return stranger;
}

TEST_F(ControlMeetingTest, RankThatDoesNotReadBlocksNobody) {
  constexpr uint64_t kGathers = 16;
  std::thread world([&] { MakeWorld(3, {0, 1}); });
  const TalkingStranger mute = MeetByHand(port_, 2, 3);
  world.join();
  for (uint64_t sequence = 1; sequence <= kGathers; ++sequence) {
    SendText(mute.socket(),
             Encode({.type = FrameType::kContribution,
                     .sequence = sequence,
                     .rank = 2,
                     .payload = StructBytes(control::Contribution{
                         true, 60'000, "plans", {0, 1, 2}, {0, 1, 2}})}));
  }
  const std::string megabyte(1 << 20, 'x');
  for (const Gathered& gathered : GatherOn({0, 1}, [&](int32_t rank) {
         for (uint64_t i = 1; i < kGathers; ++i) {
           EXPECT_TRUE(
               GatherAll(*planes_[rank], megabyte, "plans", Ample()).ok());
         }
         return GatherAll(*planes_[rank], megabyte, "plans", Ample());
       })) {
    EXPECT_TRUE(gathered.ok()) << gathered.status();
  }
}

TEST_F(ControlMeetingTest, RankThatDoesNotKeepToTheProtocolIsNamed) {
  std::thread world([&] { MakeWorld(3, {0, 1}); });
  const TalkingStranger odd = MeetByHand(port_, 2, 3);
  world.join();
  SendText(odd.socket(), "and now for something else");
  for (const Gathered& gathered :
       GatherOn({0, 1}, [&](int32_t rank) { return Gather(rank); })) {
    ExpectStatus(gathered.status(), absl::StatusCode::kUnavailable,
                 "rank 2 is gone: these bytes are of another protocol");
  }
}

TEST_F(ControlMeetingTest, RankThatDiesBeforeAllHaveMetMayComeAgain) {
  std::vector<std::string> gathered(3);
  const auto gather = [&](ControlPlane& plane) {
    gathered[plane.rank()] = Joined(GatherAll(plane, "", "ids", Ample()));
  };
  OnRanks({0, 1}, [&](int32_t rank) {
    if (rank == 0) return gather(**Connect(0, 3));
    MeetByHand(port_, 1, 3);
    absl::StatusOr<std::unique_ptr<ControlPlane>> plane;
    std::thread rank2([&] { gather(**Connect(2, 3)); });
    do {  // until rank 0 has seen that it is gone
      plane = Connect(1, 3);
    } while (absl::IsAlreadyExists(plane.status()));
    gather(**plane);
    rank2.join();
  });
  EXPECT_EQ(gathered, std::vector<std::string>({"[][][]", "[][][]", "[][][]"}));
}

TEST_F(ControlMeetingTest, MeetingNamesTheMissingRankOnAllRanks) {
  OnRanks({0, 1}, [&](int32_t rank) {
    const auto plane =
        ConnectTcp(Rendezvous(rank, 4), In(std::chrono::seconds(3)));
    ExpectStatus(plane.status(), absl::StatusCode::kDeadlineExceeded,
                 "connect: 2 of 4 ranks did not come before the deadline, the "
                 "first is rank 2");
  });
}

TEST_F(ControlMeetingTest, RankZeroMayComeLate) {
  std::thread rank1([&] {
    auto plane = Connect(1, 2);
    ASSERT_TRUE(plane.ok()) << plane.status();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  auto plane = Connect(0, 2);
  EXPECT_TRUE(plane.ok()) << plane.status();
  rank1.join();
}

TEST_F(ControlMeetingTest, SaysWhereNobodyListens) {
  ExpectStatus(
      ConnectTcp(Rendezvous(1, 2), In(std::chrono::milliseconds(50))).status(),
      absl::StatusCode::kUnavailable,
      "connect: rank 0 was not reached at 127.0.0.1:" + std::to_string(port_) +
          " before the deadline, in 0 s: connect: Connection refused");
}

// It may be started later.
TEST_F(ControlMeetingTest, RankZeroThatNeverCameIsWaitedFor) {
  std::thread rank1([&] { EXPECT_TRUE(Connect(1, 2).ok()); });
  std::this_thread::sleep_for(std::chrono::seconds(4));
  EXPECT_TRUE(Connect(0, 2).ok());
  rank1.join();
}

TEST_F(ControlMeetingTest, RankZeroThatDiesBeforeAllHaveMetIsGone) {
  const pid_t rank0 = fork();
  if (rank0 == 0) {
    (void)Connect(0, 3);
    _exit(1);
  }
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::seconds(2));
    kill(rank0, SIGKILL);
  });
  const absl::Status status = Connect(1, 3).status();
  killer.join();
  waitpid(rank0, nullptr, 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(status.message().find(
                "connect: rank 0 is gone: it had let this rank in at "
                "127.0.0.1:" +
                std::to_string(port_) +
                ", then the connection ended (connect: Connection refused), "
                "after "),
            0u)
      << status;
  EXPECT_NE(status.message().find(" s; see how its process ended"),
            std::string::npos)
      << status;
}

// The child has the port too, and never answers.
TEST_F(ControlMeetingTest, ChildOfRankZeroThatLivesOnDoesNotHideItsDeath) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const UniqueId id = *CreateUniqueId();
  const pid_t rank0 = fork();
  if (rank0 == 0) {
    close(ends[1]);
    char none;
    if (fork() == 0) _exit(static_cast<int>(read(ends[0], &none, 1)));
    (void)ConnectTcp(*RendezvousFromUniqueId(id, 0, 3), Ample());
    _exit(1);
  }
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::seconds(2));
    kill(rank0, SIGKILL);
  });
  const absl::Status status =
      ConnectTcp(*RendezvousFromUniqueId(id, 1, 3), Ample()).status();
  killer.join();
  waitpid(rank0, nullptr, 0);
  close(ends[0]);
  close(ends[1]);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(status.message().find("connect: rank 0 is gone: it had let this "
                                  "rank in at "),
            0u)
      << status;
}

TEST_F(ControlMeetingTest, RankThatDiesBeforeAllHaveMetEndsTheMeeting) {
  OnRanks({0, 2}, [&](int32_t rank) {
    if (rank == 2) MeetByHand(port_, 1, 4);
    const absl::Status status = Connect(rank, 4).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(status.message().find("rank 1 is gone: "), 0u) << status;
    EXPECT_NE(status.message().find(
                  " had come, then the connection was closed, and it did not "
                  "come again"),
              std::string::npos)
        << status;
  });
}

TEST_F(ControlMeetingTest, SaysThatThePortIsTaken) {
  const auto listener =
      control::Listen("127.0.0.1", port_, control::Interfaces::kAll, Ample());
  ASSERT_TRUE(listener.ok());
  ExpectStatus(Connect(0, 2).status(), absl::StatusCode::kUnavailable,
               "connect: rank 0 cannot listen at port " +
                   std::to_string(port_) + ": bind: Address already in use");
}

TEST_F(ControlMeetingTest, PortOfALoopbackMeetingIsKeptForIt) {
  const TcpRendezvous meeting = *LoopbackRendezvous(2);
  EXPECT_FALSE(IsFree(meeting.port));
  OnRanks({0, 1}, [&](int32_t rank) {
    TcpRendezvous mine = meeting;
    mine.rank = rank;
    const auto plane = ConnectTcp(mine, Ample());
    EXPECT_TRUE(plane.ok()) << plane.status();
  });
}

// A name server that does not answer takes getaddrinfo half a minute.
TEST_F(ControlMeetingTest, NameThatIsNotResolvedEndsAtTheDeadline) {
  SlowName name;
  for (const int32_t rank : {0, 1}) {
    SCOPED_TRACE(rank);
    const TcpRendezvous by_name = {SlowName::kHost, port_, rank, 2};
    const std::string late =
        "the name \"slow.invalid\" was not resolved before the deadline";
    const Deadline begin = std::chrono::steady_clock::now();
    const absl::Status status =
        ConnectTcp(by_name, In(std::chrono::milliseconds(100))).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_NE(status.message().find(late), std::string::npos) << status;
    const ScopedInterruption scope =
        InterruptedAfter(std::chrono::milliseconds(200));
    ExpectStatus(ConnectTcp(by_name, Ample()).status(),
                 absl::StatusCode::kCancelled, "the worker stops");
    EXPECT_LT(std::chrono::steady_clock::now() - begin,
              std::chrono::seconds(5));
  }
}

TEST_F(ControlMeetingTest, HostThatHasNoAddressIsWrong) {
  const auto plane = ConnectTcp({"256.0.0.1.invalid", port_, 1, 2}, In({}));
  EXPECT_EQ(plane.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(
      plane.status().message().find("\"256.0.0.1.invalid\" has no address: "),
      std::string::npos)
      << plane.status();
}

TEST_F(ControlMeetingTest, RendezvousMustMakeSense) {
  constexpr auto kWrong = absl::StatusCode::kInvalidArgument;
  ExpectStatus(ConnectTcp({"h", 1, 2, 2}, Ample()).status(), kWrong,
               "rank 2 is not one of the 2 ranks");
  ExpectStatus(ConnectTcp({"h", 1, 0, 0}, Ample()).status(), kWrong,
               "world size 0 is not between 1 and 1048576");
  ExpectStatus(ConnectTcp({"h", 0, 1, 2}, Ample()).status(), kWrong,
               "ranks cannot meet at \"h:0\"");
}

TEST_F(ControlMeetingTest, OtherWorldSizeIsRefused) {
  std::thread world([&] { MakeWorld(2, {0}); });
  ExpectStatus(Connect(1, 3).status(), absl::StatusCode::kInvalidArgument,
               "world size differs: 2 on rank 0, 3 on rank 1");
  auto plane = Connect(1, 2);
  EXPECT_TRUE(plane.ok()) << plane.status();
  world.join();
}

TEST_F(ControlMeetingTest, MeetingThatFailsTellsWhomItRefused) {
  std::thread rank1([&] { EXPECT_FALSE(Connect(1, 3).ok()); });
  ExpectStatus(
      ConnectTcp(Rendezvous(0, 2), In(std::chrono::seconds(2))).status(),
      absl::StatusCode::kDeadlineExceeded,
      "connect: 1 of 2 ranks did not come before the deadline, the first is "
      "rank 1; world size differs: 2 on rank 0, 3 on rank 1");
  rank1.join();
}

TEST_F(ControlMeetingTest, SecondProcessOfARankIsRefused) {
  const std::string process = control::ProcessText();
  std::atomic<int> refused = 0;
  std::atomic<bool> refused_late = false;
  OnRanks({0, 1, 1}, [&](int32_t rank) {
    auto plane = Connect(rank, 3);
    if (!plane.ok()) {
      ++refused;
      ExpectStatus(plane.status(), absl::StatusCode::kAlreadyExists,
                   "two processes are rank 1: " + process + " and " + process);
      plane = Connect(2, 3);
    }
    EXPECT_TRUE(plane.ok()) << plane.status();
    // Nobody may come after all have met either.
    if (rank == 0) {
      EXPECT_EQ(Connect(2, 3).status().code(),
                absl::StatusCode::kAlreadyExists);
      refused_late = true;
      refused_late.notify_all();
    }
    refused_late.wait(false);
  });
  EXPECT_EQ(refused, 1);
}

// It may have closed, and come for the next meeting, before rank 0 did.
TEST_F(ControlMeetingTest, RankThatLeftMeetsAgainOnceRankZeroHasClosed) {
  std::atomic<bool> put_off = false;
  OnRanks({0, 1, 2}, [&](int32_t rank) {
    auto plane = Connect(rank, 3);
    ASSERT_TRUE(plane.ok()) << plane.status();
    if (rank == 1) {
      plane->reset();
      ExpectStatus(
          ConnectTcp(Rendezvous(1, 3), In(std::chrono::milliseconds(300)))
              .status(),
          absl::StatusCode::kUnavailable,
          absl::StrCat(
              "connect: rank 0 was not reached at 127.0.0.1:", port_,
              " before the deadline, in 0 s: it has not closed its last "
              "meeting yet, which rank 1 left"));
      put_off = true;
      put_off.notify_all();
    }
    put_off.wait(false);
    // The next meeting may be of fewer ranks.
    if (rank == 2) return;
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      plane->reset();
    }
    plane = Connect(rank, 2);
    EXPECT_TRUE(plane.ok()) << plane.status();
  });
}

TEST_F(ControlMeetingTest, InterruptionEndsTheMeetingOnAllRanks) {
  for (const int32_t interrupted : {0, 1}) {
    const Deadline begun = std::chrono::steady_clock::now();
    OnRanks({0, 1}, [&](int32_t rank) {
      const auto connect = [&] { return Connect(rank, 3).status(); };
      if (rank != interrupted) {
        ExpectStatus(connect(), absl::StatusCode::kAborted,
                     absl::StrCat("aborted by rank ", interrupted,
                                  ": the worker stops"));
        return;
      }
      const ScopedInterruption scope =
          InterruptedAfter(std::chrono::milliseconds(300));
      ExpectStatus(connect(), absl::StatusCode::kCancelled, "the worker stops");
    });
    EXPECT_LT(std::chrono::steady_clock::now() - begun,
              std::chrono::seconds(5));
  }
}

// Longer than what a rank reads of a stranger.
const std::string& WrongMesh() {
  static const auto& text =
      *new std::string("wrong mesh" + std::string(5000, '.'));
  return text;
}

absl::Status EndFor(const TcpRendezvous& rendezvous,
                    Deadline deadline = Ample()) {
  return EndMeetingTcp(rendezvous, absl::InvalidArgumentError(WrongMesh()),
                       deadline);
}

std::string Ended() { return "the meeting was ended: " + WrongMesh(); }

TEST_F(ControlMeetingTest, EndedMeetingIsOverForThoseThatComeLater) {
  const Deadline begun = std::chrono::steady_clock::now();
  OnRanks({0, 1, 2, 3}, [&](int32_t rank) {
    std::this_thread::sleep_for(rank * std::chrono::milliseconds(200));
    if (rank == 1 || rank == 2) {
      const absl::Status ended = EndFor(Rendezvous(rank, 5));
      EXPECT_TRUE(ended.ok()) << ended;
    } else {
      ExpectStatus(Connect(rank, 5).status(), absl::StatusCode::kAborted,
                   Ended());
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(5));
}

TEST_F(ControlMeetingTest, RankZeroEndsTheMeeting) {
  OnRanks({0, 1}, [&](int32_t rank) {
    if (rank == 0) {
      const absl::Status ended = EndFor(Rendezvous(0, 3));
      EXPECT_TRUE(ended.ok()) << ended;
    } else {
      ExpectStatus(Connect(1, 3).status(), absl::StatusCode::kAborted, Ended());
    }
  });
}

TEST_F(ControlMeetingTest, MeetingEndsBeforeRankZeroHasCome) {
  OnRanks({0, 1}, [&](int32_t rank) {
    if (rank == 1) {
      EXPECT_EQ(EndFor(Rendezvous(1, 3)), absl::OkStatus());
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    ExpectStatus(Connect(0, 3).status(), absl::StatusCode::kAborted, Ended());
  });
}

TEST_F(ControlMeetingTest, RankZeroOfNoWorldEndsNothing) {
  EXPECT_EQ(EndFor(Rendezvous(0, 0)).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(ControlMeetingTest, MeetingOfAllRanksGoesOn) {
  MakeWorld(2);
  ExpectStatus(EndFor(Rendezvous(1, 2)), absl::StatusCode::kFailedPrecondition,
               "all ranks have met already, so the meeting cannot be ended");
  for (const Gathered& gathered :
       GatherOn({0, 1}, [&](int32_t rank) { return Gather(rank); })) {
    EXPECT_EQ(Joined(gathered), "[of 0][of 1]");
  }
}

TEST_F(ControlMeetingTest, RanksMeetAgainAfterAMeetingThatWasEnded) {
  std::atomic<bool> ended = false;
  OnRanks({0, 1, 2}, [&](int32_t rank) {
    if (rank == 0) {
      EXPECT_EQ(Connect(0, 3).status().code(), absl::StatusCode::kAborted);
      ended = true;
    } else if (rank == 1) {
      EXPECT_EQ(EndFor(Rendezvous(1, 3)), absl::OkStatus());
    }
    while (!ended) std::this_thread::yield();
    const auto plane = Connect(rank, 3);
    EXPECT_TRUE(plane.ok()) << plane.status();
  });
}

TEST_F(ControlMeetingTest, StrangersDoNotEndTheMeeting) {
  OnRanks({0, 1}, [&](int32_t rank) {
    if (rank == 1) {
      TcpRendezvous other = Rendezvous(1, 2);
      other.secret = "of another job's ranks";
      EXPECT_EQ(EndFor(other).code(), absl::StatusCode::kPermissionDenied);
    }
    const auto plane = Connect(rank, 2);
    EXPECT_TRUE(plane.ok()) << plane.status();
  });
}

TEST_F(ControlMeetingTest, EndOfAMeetingSaysThatNobodyListens) {
  EXPECT_EQ(EndFor(Rendezvous(1, 2), In(std::chrono::milliseconds(100))).code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(ControlMeetingTest, InterruptionEndsTheSearchForRank0) {
  const ScopedInterruption scope =
      InterruptedAfter(std::chrono::milliseconds(200));
  ExpectStatus(Connect(1, 2).status(), absl::StatusCode::kCancelled,
               "the worker stops");
}

}  // namespace
}  // namespace refit
