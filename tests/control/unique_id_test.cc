// Ranks that meet by a unique id, and by one that does not serve.
#include "refit/unique_id.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "control/tcp_socket.h"
#include "tests/control/control_plane_fixture.h"

namespace refit {
namespace {

class UniqueIdTest : public ControlPlaneTest {
 protected:
  void SetUp() override { Unset(); }
  // With a sanitizer other tests follow in the same process.
  void TearDown() override { Unset(); }
  // Then hosts of meetings that are over have ended too: who forks must have no
  // thread there.
  static void TearDownTestSuite() { std::this_thread::sleep_for(kEndedTime); }
  static void Unset() {
    unsetenv("REFIT_HOST");
    unsetenv("NCCL_SOCKET_IFNAME");
  }

  static absl::StatusOr<std::unique_ptr<ControlPlane>> Meet(
      const UniqueId& id, int32_t rank, int32_t world_size,
      Deadline deadline = Ample()) {
    const auto place = RendezvousFromUniqueId(id, rank, world_size);
    if (!place.ok()) return place.status();
    return ConnectTcp(*place, deadline);
  }

  // How long whoever comes hears that a meeting was ended, and some more.
  static constexpr std::chrono::milliseconds kEndedTime{2500};
  static void End(const UniqueId& id) {
    const absl::Status ended =
        EndMeetingTcp(*RendezvousFromUniqueId(id, 1, 2),
                      absl::InternalError("no GPU"), Ample());
    EXPECT_TRUE(ended.ok()) << ended;
  }

  void MeetAll(const UniqueId& id, int32_t world_size) {
    planes_.resize(static_cast<size_t>(world_size));
    std::vector<int32_t> ranks;
    for (int32_t rank = 0; rank < world_size; ++rank) ranks.push_back(rank);
    OnRanks(ranks, [&](int32_t rank) {
      auto plane = Meet(id, rank, world_size);
      ASSERT_TRUE(plane.ok()) << plane.status();
      planes_[static_cast<size_t>(rank)] = *std::move(plane);
    });
    if (HasFatalFailure()) return;
    for (const Gathered& gathered :
         GatherOn({0, 1}, [&](int32_t rank) { return Gather(rank); })) {
      EXPECT_EQ(Joined(gathered), "[of 0][of 1]");
    }
  }
};

// What a process has created that is gone.
UniqueId IdOfDeadProcess() {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto id = CreateUniqueId();
    const bool sent =
        id.ok() && write(ends[1], &*id, sizeof(*id)) == sizeof(*id);
    _exit(sent ? 0 : 1);
  }
  UniqueId id;
  EXPECT_EQ(read(ends[0], &id, sizeof(id)), static_cast<ssize_t>(sizeof(id)));
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  close(ends[0]);
  close(ends[1]);
  return id;
}

TEST_F(UniqueIdTest, DeadCreatorIsNamedByItsAddress) {
  setenv("REFIT_HOST", "127.0.0.1", 1);
  const UniqueId id = IdOfDeadProcess();
  const auto place = RendezvousFromUniqueId(id, 1, 2);
  ASSERT_TRUE(place.ok()) << place.status();
  ExpectStatus(
      Meet(id, 1, 2, In(std::chrono::milliseconds(100))).status(),
      absl::StatusCode::kUnavailable,
      "connect: rank 0 was not reached at 127.0.0.1:" +
          std::to_string(place->port) +
          ", where its unique id is from, before the deadline, in 0 s: "
          "connect: Connection refused");
}

TEST_F(UniqueIdTest, DeadCreatorIsNotWaitedForUntilTheDeadline) {
  setenv("REFIT_HOST", "127.0.0.1", 1);
  const UniqueId id = IdOfDeadProcess();
  const auto place = RendezvousFromUniqueId(id, 1, 2);
  ASSERT_TRUE(place.ok()) << place.status();
  const std::string gone =
      "connect: rank 0 is gone: nobody listens at 127.0.0.1:" +
      std::to_string(place->port) +
      ", where its unique id is from (connect: Connection refused), after ";
  const std::string look =
      " s; see how the process ended that made the id, or whether its "
      "REFIT_HOST is reached from here";
  for (const absl::Status& status :
       {Meet(id, 1, 2).status(),
        EndMeetingTcp(*place, absl::InternalError("in vain"), Ample())}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(status.message().find(gone), 0u) << status;
    EXPECT_NE(status.message().find(look), std::string::npos) << status;
  }
}

TEST_F(UniqueIdTest, CreatorThatDiesWhileARankWaitsIsNoticed) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t creator = fork();
  if (creator == 0) {
    const auto id = CreateUniqueId();
    if (!id.ok() || write(ends[1], &*id, sizeof(*id)) != sizeof(*id)) _exit(1);
    pause();
  }
  UniqueId id;
  ASSERT_EQ(read(ends[0], &id, sizeof(id)), static_cast<ssize_t>(sizeof(id)));
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    kill(creator, SIGKILL);
  });
  const absl::Status status = Meet(id, 1, 2).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(status.message().find("connect: rank 0 is gone: nobody listens"),
            0u)
      << status;
  killer.join();
  waitpid(creator, nullptr, 0);
  close(ends[0]);
  close(ends[1]);
}

// Longer: a network may be away for a moment.
// Rank 0 may be late, and more ranks wait than its queue holds.
TEST_F(UniqueIdTest, CreatorWithoutRoomForConnectionsIsWaitedFor) {
  setenv("REFIT_HOST", "127.0.0.1", 1);
  const UniqueId id = IdOfDeadProcess();
  const uint16_t port = RendezvousFromUniqueId(id, 1, 2)->port;
  // Has no room for connections: the kernel answers no further one.
  const int full = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(
      bind(full, reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
      0);
  ASSERT_EQ(listen(full, 0), 0);
  std::vector<Socket> filling;
  while (true) {
    auto one =
        control::Connect("127.0.0.1", port, In(std::chrono::milliseconds(500)));
    if (!one.ok()) break;
    filling.push_back(*std::move(one));
  }
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status status =
      ConnectTcp(*RendezvousFromUniqueId(id, 1, 2), In(std::chrono::seconds(5)))
          .status();
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_NE(status.message().find("before the deadline"), std::string::npos)
      << status;
  close(full);
}

// Else a rank that comes back before rank 0 would take it for gone.
TEST_F(UniqueIdTest, ItsCreatorListensBetweenMeetings) {
  const UniqueId id = *CreateUniqueId();
  MeetAll(id, 2);
  planes_.clear();
  EXPECT_FALSE(IsFree(RendezvousFromUniqueId(id, 0, 2)->port));
  std::thread rank1([&] { EXPECT_TRUE(Meet(id, 1, 2).ok()); });
  std::this_thread::sleep_for(std::chrono::seconds(4));
  EXPECT_TRUE(Meet(id, 0, 2).ok());
  rank1.join();
}

// Which meets nobody, so it has no server to give the listener to.
TEST_F(UniqueIdTest, ItsCreatorListensBehindAMeetingOfOneRank) {
  const UniqueId id = *CreateUniqueId();
  EXPECT_TRUE(Meet(id, 0, 1).ok());
  EXPECT_FALSE(IsFree(RendezvousFromUniqueId(id, 0, 1)->port));
}

TEST_F(UniqueIdTest, ChildOfItsCreatorMayBeRankZero) {
  const UniqueId id = *CreateUniqueId();
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t rank0 = fork();
  if (rank0 == 0) {
    close(ends[1]);
    const auto plane = Meet(id, 0, 2);
    char none;
    (void)!read(ends[0], &none, 1);  // until rank 1 has met as well
    _exit(plane.ok() ? 0 : 1);
  }
  close(ends[0]);
  EXPECT_TRUE(Meet(id, 1, 2).ok());
  close(ends[1]);
  int status = 0;
  waitpid(rank0, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(UniqueIdTest, RankZeroMustBeItsCreator) {
  const absl::Status status = Meet(IdOfDeadProcess(), 0, 2).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("was not created in this process (process " +
                                  std::to_string(getpid())),
            std::string::npos)
      << status;
}

// The process that made the id listens, but is not the rank 0 that came.
TEST_F(UniqueIdTest, RankZeroThatDoesNotComeIsWaitedForUntilTheDeadline) {
  const UniqueId id = *CreateUniqueId("127.0.0.1");
  const TcpRendezvous place = *RendezvousFromUniqueId(id, 1, 2);
  const auto in_a_second = [] { return In(std::chrono::seconds(1)); };
  for (const bool ends : {false, true}) {
    const auto begin = std::chrono::steady_clock::now();
    const absl::Status status =
        ends
            ? EndMeetingTcp(place, absl::InternalError("no GPU"), in_a_second())
            : ConnectTcp(place, in_a_second()).status();
    EXPECT_LT(std::chrono::steady_clock::now() - begin,
              std::chrono::seconds(3));
    ExpectStatus(status, absl::StatusCode::kDeadlineExceeded,
                 "connect: rank 0 was not reached at 127.0.0.1:" +
                     std::to_string(place.port) +
                     ", where its unique id is from, before the deadline, in "
                     "1 s: it does not answer");
  }
}

TEST_F(UniqueIdTest, RanksMeetByItAgainAndAgain) {
  const UniqueId id = *CreateUniqueId();
  MeetAll(id, 2);
  planes_.clear();
  MeetAll(id, 2);
}

TEST_F(UniqueIdTest, RanksThatComeBeforeRankZeroWait) {
  const UniqueId id = *CreateUniqueId();
  std::thread rank1([&] { EXPECT_TRUE(Meet(id, 1, 2).ok()); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_TRUE(Meet(id, 0, 2).ok());
  rank1.join();
}

// A rank that was told why a meeting ended, and comes again while its server
// stays for others, waits for the next one.
TEST_F(UniqueIdTest, RankThatWasToldComesForTheNextMeeting) {
  const UniqueId id = *CreateUniqueId();
  OnRanks({0, 1, 2}, [&](int32_t rank) {
    if (rank == 1) {
      EXPECT_TRUE(EndMeetingTcp(*RendezvousFromUniqueId(id, 1, 3),
                                absl::AbortedError("a reason"), Ample())
                      .ok());
    } else {
      EXPECT_FALSE(Meet(id, rank, 3).ok());
    }
    // As long as a rank that was let in waits for one that is gone, and more.
    if (rank != 2) std::this_thread::sleep_for(std::chrono::seconds(7));
    const auto plane = Meet(id, rank, 3);
    EXPECT_TRUE(plane.ok()) << plane.status();
  });
}

TEST_F(UniqueIdTest, RanksOfAHostedMeetingMeetWithoutTheHost) {
  const UniqueId id = *HostMeeting(2, "127.0.0.1");
  MeetAll(id, 2);
  // Any of them may be lost: the other hears of it.
  planes_[0].reset();
  planes_[1]->BeginStep();
  const absl::Status lost = planes_[1]->Compare("", "a step", Ample()).status();
  EXPECT_EQ(lost.code(), absl::StatusCode::kUnavailable) << lost;
  EXPECT_NE(lost.message().find("rank 0"), std::string::npos) << lost;
  // Those that are left meet by another id.
  planes_.clear();
  MeetAll(*HostMeeting(2, "127.0.0.1"), 2);
}

TEST_F(UniqueIdTest, RanksOfAHostedMeetingThatFailedTryAgain) {
  const UniqueId id = *HostMeeting(2, "127.0.0.1");
  const auto alone = Meet(id, 0, 2, In(std::chrono::milliseconds(200)));
  EXPECT_EQ(alone.status().code(), absl::StatusCode::kDeadlineExceeded)
      << alone.status();
  MeetAll(id, 2);
}

TEST_F(UniqueIdTest, AHostedMeetingThatWasEndedIsOver) {
  const UniqueId id = *HostMeeting(2, "127.0.0.1");
  End(id);
  EXPECT_EQ(Meet(id, 0, 2).status().message(), "the meeting was ended: no GPU");
  std::this_thread::sleep_for(kEndedTime);
  const absl::Status late = Meet(id, 1, 2).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(late.message().find("its meeting was ended"), std::string::npos)
      << late;
}

// As by ranks that replace their plan with the id of the meeting before.
TEST_F(UniqueIdTest, AHostedIdThatWasUsedIsToldFromAHostThatIsGone) {
  const UniqueId id = *HostMeeting(2, "127.0.0.1");
  MeetAll(id, 2);
  const auto expect_used = [&](int32_t rank, const std::string& who_left) {
    ExpectStatus(
        Meet(id, rank, 2).status(), absl::StatusCode::kFailedPrecondition,
        "the unique id was used already: its ranks have met, and " + who_left +
            " left; wanted a new id, as a host serves one meeting");
  };
  planes_[0].reset();
  expect_used(0, "rank 0");
  planes_.clear();
  expect_used(0, "ranks 0, 1");
  expect_used(1, "ranks 0, 1");
  // The host has told all of them.
  const absl::Status late = Meet(id, 1, 2).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(late.message().find("connect: the unique id was used already, or "
                                "the meeting's host is gone: nobody listens"),
            0u)
      << late;
}

TEST_F(UniqueIdTest, HostedMeetingsThatNobodyComesToDoNotHoldPortsForEver) {
  const UniqueId first = *HostMeeting(2, "127.0.0.1");
  const uint16_t port = RendezvousFromUniqueId(first, 0, 2)->port;
  EXPECT_FALSE(IsFree(port));
  std::vector<UniqueId> ids;
  for (int i = 0; i < 64; ++i) ids.push_back(*HostMeeting(2, "127.0.0.1"));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_TRUE(IsFree(port));
  // Later tests fork, beside no other threads.
  for (const UniqueId& id : ids) End(id);
  std::this_thread::sleep_for(kEndedTime);
}

TEST_F(UniqueIdTest, AHostedMeetingIsOfOneWorldSizeAndOneRankEach) {
  EXPECT_EQ(HostMeeting(0).status().code(), absl::StatusCode::kInvalidArgument);
  const UniqueId id = *HostMeeting(2, "127.0.0.1");
  const absl::Status other = Meet(id, 0, 3).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(other.message(),
            "world size differs: 2 on the meeting's host, 3 on rank 0");
  MeetAll(id, 2);
}

TEST_F(UniqueIdTest, IdsAreDistinct) {
  const UniqueId a = *CreateUniqueId();
  const UniqueId b = *CreateUniqueId();
  EXPECT_NE(a.bytes, b.bytes);
  EXPECT_NE(RendezvousFromUniqueId(a, 0, 1)->port,
            RendezvousFromUniqueId(b, 0, 1)->port);
}

TEST_F(UniqueIdTest, IdsThatNobodyUsesDoNotHoldPortsForEver) {
  const auto open_descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator());
  };
  UniqueId oldest;
  do {
    oldest = *CreateUniqueId();
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(CreateUniqueId().ok());
    // Another process may have taken its port.
  } while (!IsFree(RendezvousFromUniqueId(oldest, 0, 2)->port));
  const auto before = open_descriptors();
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(CreateUniqueId().ok());
  EXPECT_EQ(open_descriptors(), before);
  MeetAll(oldest, 2);
}

// As when a port is another id's by now.
TEST_F(UniqueIdTest, RankWithAnotherIdIsRefused) {
  const UniqueId id = *CreateUniqueId();
  std::thread rank0([&] { EXPECT_TRUE(Meet(id, 0, 2).ok()); });
  TcpRendezvous stale = *RendezvousFromUniqueId(id, 1, 2);
  for (const uint64_t name : {stale.id_name + 1, uint64_t{0}}) {
    stale.id_name = name;
    ExpectStatus(ConnectTcp(stale, Ample()).status(),
                 absl::StatusCode::kInvalidArgument,
                 "unique id differs: rank 1 has another than rank 0, or none");
  }
  EXPECT_TRUE(Meet(id, 1, 2).ok());
  rank0.join();
}

// Who saw an id's name on the wire still has no secret.
TEST_F(UniqueIdTest, NameOfAnIdIsNotEnough) {
  const UniqueId id = *CreateUniqueId();
  std::thread rank0([&] { EXPECT_TRUE(Meet(id, 0, 2).ok()); });
  TcpRendezvous overheard = *RendezvousFromUniqueId(id, 1, 2);
  EXPECT_EQ(overheard.secret.size(), 16u);
  for (const std::string& secret : {std::string(), std::string(16, '\0')}) {
    overheard.secret = secret;
    EXPECT_EQ(ConnectTcp(overheard, Ample()).status().code(),
              absl::StatusCode::kPermissionDenied);
  }
  EXPECT_TRUE(Meet(id, 1, 2).ok());
  rank0.join();
}

TEST_F(UniqueIdTest, BytesThatAreNoneAreRefused) {
  UniqueId foreign;
  foreign.bytes.fill('n');
  ExpectStatus(RendezvousFromUniqueId(foreign, 0, 2).status(),
               absl::StatusCode::kInvalidArgument,
               "not a unique id of Refit, which CreateUniqueId or "
               "refit_unique_id_create makes; one of NCCL does not serve");
  const UniqueId whole = *CreateUniqueId();
  for (size_t byte = 8; byte < whole.bytes.size(); ++byte) {
    UniqueId damaged = whole;
    damaged.bytes[byte] ^= 0x20;
    EXPECT_EQ(RendezvousFromUniqueId(damaged, 0, 2).status().message(),
              "a unique id of Refit that was damaged: all 128 bytes must reach "
              "every rank")
        << "byte " << byte;
  }
}

TEST_F(UniqueIdTest, HostIsTheUsersIfGiven) {
  setenv("REFIT_HOST", "localhost", 1);
  EXPECT_EQ(RendezvousFromUniqueId(*CreateUniqueId(), 0, 2)->host, "localhost");
  setenv("REFIT_HOST", std::string(92, 'h').c_str(), 1);
  EXPECT_EQ(RendezvousFromUniqueId(*CreateUniqueId(), 0, 2)->host,
            std::string(92, 'h'));
  setenv("REFIT_HOST", std::string(93, 'h').c_str(), 1);
  ExpectStatus(CreateUniqueId().status(), absl::StatusCode::kInvalidArgument,
               "REFIT_HOST has 93 characters, it should have 92 at most");
  EXPECT_EQ(RendezvousFromUniqueId(*CreateUniqueId("there"), 0, 2)->host,
            "there");
  ExpectStatus(CreateUniqueId(std::string(93, 'h')).status(),
               absl::StatusCode::kInvalidArgument,
               "the host has 93 characters, it should have 92 at most");
}

TEST_F(UniqueIdTest, HostIsThatOfNcclsInterface) {
  setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  EXPECT_EQ(RendezvousFromUniqueId(*CreateUniqueId(), 0, 2)->host, "127.0.0.1");
  setenv("NCCL_SOCKET_IFNAME", "=no-such-interface", 1);
  const absl::Status refused = CreateUniqueId().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  setenv("REFIT_HOST", "127.0.0.1", 1);
  EXPECT_TRUE(CreateUniqueId().ok());
}

}  // namespace
}  // namespace refit
