// Refits over NcclTransport that fail: all ranks hear of it in time, nothing is
// left behind, and the ranks can start again.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "refit/interruption.h"
#include "tests/executor/fake_nccl/fake_nccl.h"
#include "tests/executor/nccl_world.h"
#include "tests/executor/observed_device.h"
#include "tests/executor/plan_builder.h"

namespace refit {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

constexpr int kInternalError = 3;
constexpr int kSystemError = 2;
// Of a refit that ends when it has passed, and of one that is to end before.
constexpr milliseconds kShort(500);
constexpr seconds kAmple(120);
// For what takes no time; the machine may be busy.
constexpr seconds kSoon(60);

class NcclFailureTest : public testing::Test {
 protected:
  // Sources 0, 1; destinations 2, 3, 4; three rounds. A source sends three
  // messages in a round, in the order of the ranks.
  explicit NcclFailureTest(fb::Mechanism mechanism = fb::Mechanism::kStaged)
      : plan_(ReshardPlan({.source_ranks = 2,
                           .destination_ranks = 3,
                           .layers = 3,
                           .rows = 12,
                           .columns = 30,
                           .mechanism = mechanism})
                  .Open()) {
    fake_nccl_reset();
    world_ = std::make_unique<NcclWorld>(plan_);
    world_->Bind();
  }

  absl::Status Refit(int32_t rank, std::chrono::nanoseconds timeout) {
    RunOptions options;
    options.timeout = timeout;
    const Clock::time_point begin = Clock::now();
    const absl::Status status = world_->Refit(rank, options);
    EXPECT_LT(Clock::now() - begin, kSoon);
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(world_->executor(rank).state(), ExecutorState::kTorn);
    return status;
  }
  std::vector<absl::Status> RefitOnAll(std::chrono::nanoseconds timeout) {
    return world_->OnAllRanks(
        [&](int32_t rank) { return Refit(rank, timeout); });
  }

  // Refits again are refused, until all ranks have connected.
  void ExpectWholeAfterConnect() {
    EXPECT_EQ(fake_nccl_live_communicators(), 0);
    for (const absl::Status& status : RefitOnAll(kAmple)) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    }
    ASSERT_TRUE(AllOk(world_->ConnectAll()));
    world_->ExpectEveryElementRight(plan_);
    for (int32_t rank = 0; rank < world_->world_size(); ++rank) {
      EXPECT_EQ(world_->executor(rank).state(), ExecutorState::kBound);
    }
    EXPECT_EQ(fake_nccl_violations(), 0) << fake_nccl_first_violation();
  }

  // Worlds of new processes.
  void ExpectWholeAfterRestart() {
    world_.reset();
    fake_nccl_reset();
    world_ = std::make_unique<NcclWorld>(plan_);
    world_->Bind();
    world_->ExpectEveryElementRight(plan_);
  }

  static void ExpectContains(const absl::Status& status,
                             const std::string& text) {
    EXPECT_NE(status.message().find(text), std::string::npos)
        << status << "\nlacks: " << text;
  }

  const PlanFile plan_;
  std::unique_ptr<NcclWorld> world_;
};

TEST_F(NcclFailureTest, FailedOperationIsNamedOnAllRanks) {
  fake_nccl_fail_at(0, 4, kInternalError);
  const auto statuses = RefitOnAll(kAmple);
  const std::string place =
      "round 1: send of 120 bytes to rank 2 and 2 more operations: ";
  ExpectContains(statuses[0], "rank 0: " + place);
  ExpectContains(statuses[0],
                 "NCCL error 3, internal error: rank 0 sends 120 ");
  for (int32_t rank = 1; rank < 5; ++rank) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kAborted);
    ExpectContains(statuses[rank], "round ");
    ExpectContains(statuses[rank], "aborted by rank 0: " + place);
  }
  ExpectWholeAfterConnect();
}

TEST_F(NcclFailureTest, EveryOperationMayFail) {
  for (const int32_t rank : {0, 3}) {
    const uint64_t operations = rank == 0 ? 9 : 6;
    for (uint64_t operation = 0; operation < operations; ++operation) {
      SCOPED_TRACE(testing::Message() << rank << " at " << operation);
      fake_nccl_fail_at(rank, operation, kSystemError);
      RefitOnAll(kAmple);
      ExpectWholeAfterConnect();
    }
  }
}

TEST_F(NcclFailureTest, PeersOfAFailedRankMayFailThemselves) {
  fake_nccl_set_remote_errors(true);
  fake_nccl_fail_at(3, 2, kInternalError);
  for (const absl::Status& status : RefitOnAll(kAmple)) {
    ExpectContains(status, "round ");
    ExpectContains(status, "NCCL error ");
  }
  ExpectWholeAfterConnect();
}

TEST_F(NcclFailureTest, HangingOperationEndsAtTheDeadline) {
  fake_nccl_hang_at(1, 5);
  const auto statuses = RefitOnAll(kShort);
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    ExpectContains(status, "before the deadline");
    // Rank 0 may be in round 2 already.
    ExpectContains(status, "round ");
    ExpectContains(status, " of 120 bytes ");
  }
  ExpectContains(statuses[1],
                 "rank 1: round 1: send of 120 bytes to rank 2 and 2 more "
                 "operations");
  ExpectContains(statuses[4],
                 "rank 4: round 1: recv of 120 bytes from rank 0 and 1 more "
                 "operations");
  ExpectWholeAfterConnect();
}

// Ranks that have done their part wait in Wait, and are told what others wait
// for.
TEST_F(NcclFailureTest, RankThatIsDoneHearsOfAHangElsewhere) {
  // Rank 4's last operation.
  fake_nccl_hang_at(4, 5);
  const auto statuses = RefitOnAll(kShort);
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    ExpectContains(status, "round 2: ");
  }
  ExpectContains(statuses[2], "aborted by rank ");
  ExpectWholeAfterConnect();
}

TEST_F(NcclFailureTest, InterruptedRankEndsTheRefitOnAllRanks) {
  const auto statuses = world_->OnAllRanks([&](int32_t rank) {
    if (rank == 0) return absl::OkStatus();  // does not come
    if (rank != 2) return Refit(rank, kAmple);
    const ScopedInterruption interruption([end = Clock::now() + kShort] {
      return Clock::now() < end ? absl::OkStatus()
                                : absl::CancelledError("the worker stops");
    });
    return Refit(rank, kAmple);
  });
  EXPECT_EQ(statuses[2].code(), absl::StatusCode::kCancelled) << statuses[2];
  ExpectContains(statuses[2], "the worker stops");
  for (const int32_t rank : {1, 3, 4}) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kAborted);
    ExpectContains(statuses[rank], "aborted by rank 2: ");
    ExpectContains(statuses[rank], "the worker stops");
  }
  fake_nccl_set_rank(0);
  ExpectContains(Refit(0, kAmple), "aborted by rank 2: ");
  ExpectWholeAfterConnect();
}

TEST_F(NcclFailureTest, RankThatClosesDuringARefitEndsItAtOnce) {
  const auto statuses = world_->OnAllRanks([&](int32_t rank) {
    if (rank != 4) return Refit(rank, kAmple);
    world_->CloseRank(rank);
    return absl::OkStatus();
  });
  for (int32_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kUnavailable);
    EXPECT_NE(
        statuses[rank].message().find("rank 4 has closed its control plane"),
        std::string::npos)
        << statuses[rank];
  }
}

// Kills rank `killed` when all ranks wait, and lets its calls end when the
// others are at their end.
class NcclKilledRankTest : public NcclFailureTest {
 protected:
  std::vector<absl::Status> RefitAndKill(int32_t killed,
                                         std::chrono::nanoseconds timeout) {
    std::thread killer([killed] {
      while (!fake_nccl_is_deadlocked()) std::this_thread::yield();
      fake_nccl_kill(killed);
    });
    std::atomic<int32_t> ended = 0;
    const auto statuses = world_->OnAllRanks([&](int32_t rank) {
      const absl::Status status = Refit(rank, timeout);
      if (rank != killed && ++ended == 4) {
        // The killed rank cannot abort its own.
        EXPECT_EQ(fake_nccl_live_communicators(), 1);
        fake_nccl_release();
      }
      return status;
    });
    killer.join();
    return statuses;
  }
};

TEST_F(NcclKilledRankTest, OthersEndAtTheDeadline) {
  fake_nccl_hang_at(3, 2);
  const auto statuses = RefitAndKill(3, kShort);
  for (const int32_t rank : {0, 1, 2, 4}) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kDeadlineExceeded)
        << statuses[rank];
    ExpectContains(statuses[rank], "round ");
  }
  ExpectContains(statuses[0], "rank 0: round 1: send of 120 bytes to rank 2");
  ExpectWholeAfterRestart();
}

TEST_F(NcclKilledRankTest, OthersEndAtOnceIfNcclNoticesIt) {
  fake_nccl_set_remote_errors(true);
  fake_nccl_hang_at(3, 2);
  const auto statuses = RefitAndKill(3, kAmple);
  for (const int32_t rank : {0, 1, 2, 4}) {
    ExpectContains(statuses[rank], "NCCL error 6, remote process exited");
    ExpectContains(statuses[rank], "round ");
  }
  ExpectWholeAfterRestart();
}

// Ends the connection of some rank with the middle of the control plane.
void BreakAControlConnection(uint16_t port) {
  for (int fd = 3; fd < 1024; ++fd) {
    sockaddr_in peer{};
    socklen_t size = sizeof(peer);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0 ||
        peer.sin_family != AF_INET || ntohs(peer.sin_port) != port) {
      continue;
    }
    shutdown(fd, SHUT_RDWR);
    return;
  }
  ADD_FAILURE() << "nobody is connected with port " << port;
}

TEST_F(NcclFailureTest, LostControlConnectionEndsTheRefitOnAllRanks) {
  fake_nccl_hang_at(1, 3);
  std::thread breaker([&] {
    while (!fake_nccl_is_deadlocked()) std::this_thread::yield();
    BreakAControlConnection(world_->port());
  });
  const auto statuses = RefitOnAll(kAmple);
  breaker.join();
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    ExpectContains(status, "round ");
    ExpectContains(status, " is gone: ");
  }
  EXPECT_EQ(fake_nccl_live_communicators(), 0);
  // Nothing can succeed in this world, and nothing waits in it.
  for (const absl::Status& status : world_->OnAllRanks([&](int32_t rank) {
         return world_->executor(rank).Connect(kAmple);
       })) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  }
  ExpectWholeAfterRestart();
}

// What is under way has ended when a call returns its error: the worker frees
// its tensors, or loads others there.
TEST_F(NcclFailureTest, NothingTouchesTheTensorsAfterAFailure) {
  for (int round = 0; round < 5; ++round) {
    const int32_t failing = round;
    fake_nccl_fail_at(failing, failing < 2 ? 4 : 3, kInternalError);
    fake_nccl_delay(4 - round, 300);
    const ValueCheck check(plan_);
    check.FillSources(world_->tensors);
    world_->OnAllRanks([&](int32_t rank) {
      const absl::Status status = Refit(rank, kAmple);
      for (const BoundTensor& tensor : world_->tensors[rank]) {
        std::memset(tensor.data, 0x77, tensor.size_bytes);
      }
      return status;
    });
    std::this_thread::sleep_for(milliseconds(5));
    for (const std::vector<BoundTensor>& tensors : world_->tensors) {
      for (const BoundTensor& tensor : tensors) {
        const auto* bytes = static_cast<const unsigned char*>(tensor.data);
        for (uint64_t i = 0; i < tensor.size_bytes; ++i) {
          ASSERT_EQ(bytes[i], 0x77);
        }
      }
    }
    fake_nccl_delay(4 - round, 0);
    ExpectWholeAfterConnect();
  }
}

TEST_F(NcclFailureTest, CorruptedByteIsSeenByTheCheck) {
  fake_nccl_corrupt_at(0, 1, 7);
  const ValueCheck check(plan_);
  check.FillSources(world_->tensors);
  EXPECT_TRUE(AllOk(world_->RefitAll()));
  EXPECT_EQ(check.Check(world_->tensors).wrong_elements, 1);
}

// Its threads capture a caller's graph while they say so. Nothing is copied
// then.
class CapturingDevice : public ObservedDevice {
 public:
  CapturingDevice() {
    on_enqueue = [](const Enqueued&) { return !is_capturing; };
  }
  bool IsHost() const override { return false; }
  absl::StatusOr<bool> IsCapturing(Stream) override { return is_capturing; }

  static thread_local bool is_capturing;
};

thread_local bool CapturingDevice::is_capturing = false;

// NCCL puts a group into a graph in a thread of its own.
TEST_F(NcclFailureTest, FailureWhileAGroupIsCapturedLetsItEnd) {
  CapturingDevice device;
  world_ =
      std::make_unique<NcclWorld>(plan_, ExecutorOptions{.device = &device});
  world_->Bind();
  world_->ExpectEveryElementRight(plan_);
  fake_nccl_set_capture_delay(300'000);
  std::atomic<int> begun = 0;
  std::atomic<int> left_in_capture = 0;
  std::thread other([&] {
    while (begun < plan_.world_size()) std::this_thread::yield();
    std::this_thread::sleep_for(milliseconds(50));
    world_->transport(0).Abort(absl::CancelledError("the user's wish"));
  });
  for (const absl::Status& status : world_->OnAllRanks([&](int32_t rank) {
         ++begun;
         CapturingDevice::is_capturing = true;
         fake_nccl_set_captures(true);
         const absl::Status captured =
             world_->executor(rank).Run(nullptr, {.timeout = kAmple});
         left_in_capture += fake_nccl_unawaited();
         fake_nccl_set_captures(false);
         CapturingDevice::is_capturing = false;
         return captured.ok() ? world_->executor(rank).Wait() : captured;
       })) {
    EXPECT_FALSE(status.ok());
  }
  other.join();
  EXPECT_EQ(left_in_capture, 0);
  EXPECT_EQ(fake_nccl_violations(), 0) << fake_nccl_first_violation();
  fake_nccl_set_capture_delay(0);
  ASSERT_TRUE(AllOk(world_->ConnectAll()));
  world_->ExpectEveryElementRight(plan_);
  world_.reset();
}

// Its driver did not call it, and goes on with all ranks.
TEST_F(NcclFailureTest, RankLeftOutOfTwoRefitsJoinsAtConnect) {
  for (int refit = 0; refit < 2; ++refit) {
    world_->OnAllRanks([&](int32_t rank) {
      return rank == 4 ? absl::OkStatus() : Refit(rank, kShort);
    });
  }
  EXPECT_EQ(world_->executor(4).state(), ExecutorState::kBound);
  EXPECT_TRUE(AllOk(world_->ConnectAll()));
  EXPECT_EQ(world_->executor(4).state(), ExecutorState::kTorn);
  world_->ExpectEveryElementRight(plan_);
}

// Its end of the connections does not come, as if a graph held it.
TEST_F(NcclFailureTest, RankThatCannotConnectAnewEndsTheOthersHandshake) {
  fake_nccl_kill(0);
  const Clock::time_point begin = Clock::now();
  const auto statuses = world_->OnAllRanks([&](int32_t rank) {
    return rank == 0 ? world_->executor(0).Connect(kShort)
                     : world_->executor(rank).Connect(kAmple);
  });
  EXPECT_LT(Clock::now() - begin, kSoon);
  for (const absl::Status& status : statuses) {
    ExpectContains(status, "a graph that captured a refit still exists");
  }
  fake_nccl_release();
}

// The same rounds, stored directly.
class NcclDirectFailureTest : public NcclFailureTest {
 protected:
  NcclDirectFailureTest() : NcclFailureTest(fb::Mechanism::kDirect) {}
};

TEST_F(NcclDirectFailureTest, SenderThatDoesNotComeIsNamedAtTheDeadline) {
  // One rank alone has a short deadline: whoever is first to notice says it for
  // all.
  const auto statuses = world_->OnAllRanks([&](int32_t rank) {
    return rank == 0 ? absl::OkStatus()
                     : Refit(rank, rank == 2 ? kShort : kAmple);
  });
  for (int32_t rank = 1; rank < 5; ++rank) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kDeadlineExceeded);
  }
  ExpectContains(statuses[2],
                 "direct round with rank 0 did not end before the "
                 "deadline");
  fake_nccl_set_rank(0);
  ExpectContains(Refit(0, kAmple), "aborted by rank ");
  ExpectWholeAfterConnect();
}

// Rank 0 may store into the tensors of rank 2, whose Run is refused.
TEST_F(NcclDirectFailureTest, ARunThatFailsNamesWhoStillUsesTensors) {
  world_ = std::make_unique<NcclWorld>(plan_, ExecutorOptions(),
                                       /*abort_time=*/milliseconds(100));
  world_->Bind();
  ASSERT_TRUE(
      world_->transport(0).BeginRefit(Clock::now() + kAmple, false).ok());
  const std::vector<const void*> moved(world_->tensors[2].size());
  EXPECT_EQ(world_->executor(2)
                .Run(nullptr, {.timeout = kAmple, .addresses = moved})
                .message(),
            "rank 2: a tensor moved since Bind; rank 0 did not stop within "
            "0.1 s and may still use this rank's tensors: restart the process "
            "before you free them");
}

}  // namespace
}  // namespace refit
