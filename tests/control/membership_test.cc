// Who is let in, and what strangers can do to a meeting: nothing.
#include "control/membership.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "control/frame.h"
#include "control/tcp_socket.h"
#include "refit/unique_id.h"
#include "tests/control/control_plane_fixture.h"
#include "tests/control/stranger.h"

namespace refit {
namespace {

using control::End;
using control::FrameType;
using control::Membership;
using control::Transcript;
using std::chrono::seconds;

constexpr char kSecret[] = "of the three ranks";

class ControlMembershipTest : public ControlPlaneTest {
 protected:
  TcpRendezvous WithSecret(int32_t rank, const std::string& secret) const {
    TcpRendezvous rendezvous = Rendezvous(rank, 3);
    rendezvous.secret = secret;
    return rendezvous;
  }

  // Three ranks meet. Rank 0 listens while the strangers do what they do; the
  // others come after that.
  void ExpectMeetingDespite(const std::function<void()>& strangers) {
    planes_.resize(3);
    const auto join = [&](int32_t rank) {
      auto plane = ConnectTcp(WithSecret(rank, kSecret), Ample());
      EXPECT_TRUE(plane.ok()) << "rank " << rank << ": " << plane.status();
      if (plane.ok()) planes_[static_cast<size_t>(rank)] = *std::move(plane);
    };
    std::thread rank0([&] { join(0); });
    strangers();
    std::thread rank1([&] { join(1); });
    join(2);
    rank0.join();
    rank1.join();
    if (HasFailure()) return;
    for (const Gathered& gathered :
         GatherOn({0, 1, 2}, [&](int32_t rank) { return Gather(rank); })) {
      EXPECT_EQ(Joined(gathered), "[of 0][of 1][of 2]");
    }
  }
};

TEST_F(ControlMembershipTest, WrongSecretIsRefused) {
  ExpectMeetingDespite([&] {
    for (const char* secret :
         {"", "of the three rank", "of the three ranks "}) {
      ExpectStatus(
          ConnectTcp(WithSecret(2, secret), Ample()).status(),
          absl::StatusCode::kPermissionDenied,
          "secret differs: rank 2 has another than rank 0, or one of them has "
          "none (REFIT_SECRET, REFIT_SECRET_FILE)");
    }
  });
}

// What rank 0 says while it waits tells why it does.
TEST_F(ControlMembershipTest, WaitForARankThatWasRefusedSaysWhy) {
  testing::internal::CaptureStderr();
  std::thread rank2([&] {
    EXPECT_FALSE(ConnectTcp(WithSecret(2, "of another job"), Ample()).ok());
  });
  EXPECT_FALSE(
      ConnectTcp(WithSecret(0, kSecret), In(std::chrono::seconds(11))).ok());
  rank2.join();
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("refit: connect: waiting for ranks 1, 2 (10 s); secret "
                      "differs: rank 2 has another than rank 0"),
            std::string::npos)
      << said;
}

TEST_F(ControlMembershipTest, RankWithASecretDoesNotJoinWhereAnybodyMay) {
  std::thread rank0([&] {
    EXPECT_EQ(ConnectTcp(Rendezvous(0, 3), In(seconds(2))).status().code(),
              absl::StatusCode::kDeadlineExceeded);
  });
  EXPECT_EQ(ConnectTcp(WithSecret(1, kSecret), Ample()).status().code(),
            absl::StatusCode::kPermissionDenied);
  rank0.join();
}

TEST_F(ControlMembershipTest, ReplayedHelloAndProofAreRefused) {
  ExpectMeetingDespite([&] {
    std::string heard;
    {
      TalkingStranger member(port_);
      EXPECT_EQ(member.Prove(WithSecret(2, kSecret)), FrameType::kAccepted);
      heard = member.said();
    }
    TalkingStranger replay(port_);
    SendText(replay.socket(), heard);
    EXPECT_EQ(replay.Hear().type, FrameType::kChallenge);
    const control::Frame answer = replay.Hear();
    EXPECT_EQ(answer.type, FrameType::kRefused);
    EXPECT_EQ(control::PayloadStatus(answer.payload).code(),
              absl::StatusCode::kPermissionDenied);
  });
}

// Listens where rank 0 should, and says of itself what rank 1 said.
TEST_F(ControlMembershipTest, ReflectedProofIsRefused) {
  const auto listener =
      control::Listen("127.0.0.1", port_, control::Interfaces::kAll, Ample());
  ASSERT_TRUE(listener.ok()) << listener.status();
  std::thread rank1([&] {
    ExpectStatus(ConnectTcp(WithSecret(1, kSecret), Ample()).status(),
                 absl::StatusCode::kPermissionDenied,
                 "connect: who listens at 127.0.0.1:" + std::to_string(port_) +
                     " is not rank 0: it does not prove to have the secret of "
                     "rank 1");
  });
  ASSERT_TRUE(control::Await(*listener, POLLIN, Ample()));
  TalkingStranger impostor(*control::Accept(*listener));
  const auto hello = control::ParseHello(impostor.Hear().payload);
  impostor.Say(FrameType::kChallenge, -1, StructBytes(hello->nonce));
  const auto proof = ParseStruct<control::Proof>(impostor.Hear().payload);
  impostor.Say(FrameType::kAccepted, -1, StructBytes(proof->mac));
  rank1.join();
}

TEST_F(ControlMembershipTest, EachFieldOfTheTranscriptIsProved) {
  const Membership membership(kSecret);
  const Transcript told = {.rank = 1,
                           .hello = {.world_size = 3, .id_name = 7},
                           .challenge = {'c'},
                           .claims = {.remaining_ms = 5, .process = "p"}};
  const control::Mac mac = membership.Prove(End::kRank, told);
  EXPECT_TRUE(membership.Verify(mac, End::kRank, told));
  EXPECT_FALSE(membership.Verify(mac, End::kRankZero, told));
  EXPECT_FALSE(Membership("").Verify(mac, End::kRank, told));
  const std::vector<std::function<void(Transcript&)>> changes = {
      [](Transcript& t) { t.rank = 2; },
      [](Transcript& t) { t.hello.version += 1; },
      [](Transcript& t) { t.hello.world_size = 4; },
      [](Transcript& t) { t.hello.id_name = 8; },
      [](Transcript& t) { t.hello.nonce[31] = 1; },
      [](Transcript& t) { t.challenge[31] = 1; },
      [](Transcript& t) { t.claims.remaining_ms = 0; },
      [](Transcript& t) { t.claims.process = "q"; }};
  for (size_t i = 0; i < changes.size(); ++i) {
    Transcript other = told;
    changes[i](other);
    EXPECT_FALSE(membership.Verify(mac, End::kRank, other)) << "change " << i;
  }
}

TEST_F(ControlMembershipTest, AnothersRankIsNotTakenWithoutProof) {
  ExpectMeetingDespite([&] {
    TalkingStranger waiting(port_);
    waiting.Greet(Rendezvous(2, 3));
    TalkingStranger guessing(port_);
    EXPECT_EQ(guessing.Prove(WithSecret(2, "guessed")), FrameType::kRefused);
  });
}

TEST_F(ControlMembershipTest, StrangersDeadlineEndsNothing) {
  ExpectMeetingDespite([&] {
    for (int32_t rank : {0, 1, 2}) {
      TalkingStranger stranger(port_);
      const Transcript transcript = stranger.Greet(Rendezvous(rank, 3));
      stranger.Say(FrameType::kProof, rank,
                   StructBytes(control::Proof{
                       {.remaining_ms = 0, .process = "in a hurry"}, {}}));
      EXPECT_EQ(stranger.Hear().type, FrameType::kRefused);
    }
  });
}

TEST_F(ControlMembershipTest, HalfAFrameDelaysNobodyAndIsDropped) {
  const std::string hello = control::Encode(
      {.type = FrameType::kHello,
       .rank = 2,
       .payload = StructBytes(control::Hello{.world_size = 3})});
  std::vector<Socket> strangers;
  ExpectMeetingDespite([&] {
    for (size_t size : {size_t{1}, size_t{20}, hello.size() - 1}) {
      strangers.push_back(ConnectAsStranger(port_));
      SendText(strangers.back(), hello.substr(0, size));
    }
  });
  for (const Socket& stranger : strangers) {
    EXPECT_TRUE(IsDropped(stranger));
  }
}

TEST_F(ControlMembershipTest, TenThousandSilentConnectionsDelayNobody) {
  constexpr uint64_t kStrangers = 10'000;
  const absl::Status allowed =
      control::AllowDescriptors(kStrangers + 2000, kStrangers + 2000);
  ASSERT_TRUE(allowed.ok()) << allowed;
  std::vector<Socket> strangers;
  std::chrono::steady_clock::time_point all_there;
  ExpectMeetingDespite([&] {
    for (uint64_t i = 0; i < kStrangers; ++i) {
      strangers.push_back(ConnectAsStranger(port_));
    }
    all_there = std::chrono::steady_clock::now();
  });
  // Less than the strangers have time: the ranks do not wait for it to pass.
  EXPECT_LT(std::chrono::steady_clock::now() - all_there, seconds(4));
}

TEST_F(ControlMembershipTest, SharedKeyFollowsFromTheSecret) {
  ExpectMeetingDespite([] {});
  const std::string key = planes_[0]->SharedKey("one");
  EXPECT_EQ(key.size(), 64u);
  EXPECT_EQ(planes_[2]->SharedKey("one"), key);
  EXPECT_NE(planes_[2]->SharedKey("other"), key);
  EXPECT_NE(Membership("guessed").KeyFor("one"), key);
  planes_.clear();
  MakeWorld(2);
  EXPECT_EQ(planes_[1]->SharedKey("one"), "");
}

// An address at which others reach this host; a host without any has nothing to
// protect.
std::string OuterAddress() {
  unsetenv("REFIT_HOST");
  const auto id = CreateUniqueId();
  return id.ok() ? RendezvousFromUniqueId(*id, 0, 1)->host : "127.0.0.1";
}

TEST_F(ControlMembershipTest, WithoutASecretRankZeroListensAtItsAddressAlone) {
  const std::string host = OuterAddress();
  if (host == "127.0.0.1") GTEST_SKIP() << "no network";
  for (const std::string& secret : {std::string(), std::string(kSecret)}) {
    TcpRendezvous at_host = WithSecret(0, secret);
    at_host.host = host;
    at_host.world_size = 2;
    std::thread rank0([&] { EXPECT_TRUE(ConnectTcp(at_host, Ample()).ok()); });
    absl::StatusOr<Socket> socket;
    do {
      socket = control::Connect(host, port_, Ample());
    } while (!socket.ok());
    EXPECT_EQ(control::Connect("127.0.0.1", port_, Ample()).ok(),
              !secret.empty());
    TcpRendezvous rank1 = at_host;
    rank1.rank = 1;
    EXPECT_TRUE(ConnectTcp(rank1, Ample()).ok());
    rank0.join();
  }
}

TEST_F(ControlMembershipTest, AddressOfAnotherHostNeedsASecret) {
  TcpRendezvous elsewhere = Rendezvous(0, 2);
  elsewhere.host = "192.0.2.1";
  ExpectStatus(
      ConnectTcp(elsewhere, Ample()).status(), absl::StatusCode::kUnavailable,
      "connect: rank 0 cannot listen at port " + std::to_string(port_) +
          ": bind: Cannot assign requested address; \"192.0.2.1\" is no "
          "address of this host, and only with a secret (REFIT_SECRET) does "
          "rank 0 listen at others");
}

// In a process of its own, which has not said it yet.
[[noreturn]] void MeetTwiceAndReport(uint16_t port) {
  testing::internal::CaptureStderr();
  for (int meeting = 0; meeting < 2; ++meeting) {
    std::thread rank0([&] {
      (void)ConnectTcp({"127.0.0.1", port, 0, 2}, Ample());
    });
    const bool met = ConnectTcp({"127.0.0.1", port, 1, 2}, Ample()).ok();
    rank0.join();
    if (!met) exit(1);
  }
  const std::string said = testing::internal::GetCapturedStderr();
  fprintf(stderr, "said: %s", said.c_str());
  exit(said == "refit: rank 0 listens at 127.0.0.1:" + std::to_string(port) +
                   " and lets in whoever reaches it, since neither "
                   "REFIT_SECRET nor REFIT_SECRET_FILE is set\n"
           ? 0
           : 2);
}

TEST_F(ControlMembershipTest, SaysOnceThatAnybodyMayJoin) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(MeetTwiceAndReport(port_), testing::ExitedWithCode(0),
              "said: refit: rank 0 listens");
}

}  // namespace
}  // namespace refit
