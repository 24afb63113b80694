// The fake libnccl is held to what its header says, since the tests of the
// NCCL transport believe it. Most facts need one thread only: non-blocking
// communicators let it be all ranks in turn.
#include "tests/executor/fake_nccl/fake_nccl.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "executor/transport/nccl_api.h"
#include "runner/rank_threads.h"

namespace refit::nccl {
namespace {

using std::chrono::milliseconds;
using Bytes = std::vector<std::byte>;

Bytes Filled(size_t size, int value) { return Bytes(size, std::byte(value)); }

// One operation of a group.
struct Op {
  bool is_send;
  int peer;
  std::byte* data;
  size_t count;
};
Op Send(int peer, Bytes& bytes) {
  return {true, peer, bytes.data(), bytes.size()};
}
Op Recv(int peer, Bytes& bytes) {
  return {false, peer, bytes.data(), bytes.size()};
}

class FakeNcclTest : public testing::Test {
 protected:
  FakeNcclTest() {
    fake_nccl_reset();
    absl::StatusOr<Api> api = Load();
    EXPECT_TRUE(api.ok()) << api.status();
    api_ = *api;
  }
  ~FakeNcclTest() override { fake_nccl_set_rank(-1); }

  UniqueId NewId() {
    UniqueId id;
    EXPECT_EQ(api_.GetUniqueId(&id), kSuccess);
    return id;
  }

  // A non-blocking communicator that is about to be.
  Comm Start(const UniqueId& id, int ranks, int rank) {
    fake_nccl_set_rank(rank);
    Config config;
    config.blocking = 0;
    Comm comm = nullptr;
    EXPECT_EQ(api_.CommInitRankConfig(&comm, ranks, id, rank, &config),
              kInProgress);
    return comm;
  }

  // Connected non-blocking communicators, by rank.
  std::vector<Comm> MakeComms(int ranks) {
    const UniqueId id = NewId();
    std::vector<Comm> comms;
    for (int rank = 0; rank < ranks; ++rank) {
      comms.push_back(Start(id, ranks, rank));
    }
    for (Comm comm : comms) EXPECT_EQ(Now(comm), kSuccess);
    return comms;
  }

  // The asynchronous state at this moment.
  Result Now(Comm comm) {
    Result state = kInternalError;
    EXPECT_EQ(api_.CommGetAsyncError(comm, &state), kSuccess);
    return state;
  }

  // The asynchronous state after the work; kInProgress if that hangs.
  Result Wait(Comm comm, milliseconds time = milliseconds(10000)) {
    const auto deadline = std::chrono::steady_clock::now() + time;
    Result state = Now(comm);
    while (state == kInProgress &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(1));
      state = Now(comm);
    }
    return state;
  }

  Result Issue(Comm comm, const std::vector<Op>& operations) {
    EXPECT_EQ(api_.GroupStart(), kSuccess);
    for (const Op& op : operations) {
      if (op.is_send) {
        api_.Send(op.data, op.count, kUint8, op.peer, comm, nullptr);
      } else {
        api_.Recv(op.data, op.count, kUint8, op.peer, comm, nullptr);
      }
    }
    return api_.GroupEnd();
  }

  std::string LastError(Comm comm) { return api_.GetLastError(comm); }

  Api api_;
  Bytes out_ = Filled(8, 1), out2_ = Filled(8, 2);
  Bytes in_ = Filled(8, 0), in2_ = Filled(8, 0);
};

TEST_F(FakeNcclTest, InitIsDoneWhenAllRanksCame) {
  const UniqueId id = NewId();
  const Comm first = Start(id, 2, 0);
  EXPECT_EQ(Now(first), kInProgress);
  const Comm second = Start(id, 2, 1);
  EXPECT_EQ(Now(first), kSuccess);
  EXPECT_EQ(Now(second), kSuccess);
}

TEST_F(FakeNcclTest, DuplicateRankFailsOnAllRanks) {
  const UniqueId id = NewId();
  const std::vector<Comm> comms = {Start(id, 3, 0), Start(id, 3, 1),
                                   Start(id, 3, 1)};
  for (Comm comm : comms) {
    EXPECT_EQ(Now(comm), kInvalidUsage);
    EXPECT_EQ(LastError(comm), "two ranks are rank 1");
  }
  EXPECT_EQ(Now(Start(id, 3, 2)), kInvalidUsage);
}

TEST_F(FakeNcclTest, DifferentWorldSizesFailOnAllRanks) {
  const UniqueId id = NewId();
  const std::vector<Comm> comms = {Start(id, 3, 0), Start(id, 2, 1)};
  for (Comm comm : comms) {
    EXPECT_EQ(Now(comm), kInvalidUsage);
    EXPECT_EQ(LastError(comm), "rank 1 wants 2 ranks, others 3");
  }
}

TEST_F(FakeNcclTest, InitRefusesWhatItCannotUse) {
  Comm comm = nullptr;
  Config config;
  const UniqueId id = NewId();
  EXPECT_EQ(api_.CommInitRankConfig(&comm, 2, UniqueId{}, 0, &config),
            kInvalidArgument);
  EXPECT_EQ(LastError(nullptr), "ncclCommInitRankConfig: unknown unique id");
  EXPECT_EQ(api_.CommInitRankConfig(&comm, 2, id, 2, &config),
            kInvalidArgument);
  EXPECT_EQ(LastError(nullptr), "ncclCommInitRankConfig: rank 2 of 2");
  config.magic = 0;
  EXPECT_EQ(api_.CommInitRankConfig(&comm, 2, id, 0, &config),
            kInvalidArgument);
  EXPECT_EQ(api_.CommInitRankConfig(&comm, 1, id, 0, nullptr), kSuccess);
  EXPECT_EQ(api_.CommInitRankConfig(&comm, 1, id, 0, nullptr), kInvalidUsage);
  EXPECT_EQ(LastError(nullptr),
            "ncclCommInitRankConfig: all ranks of this unique id came");
}

TEST_F(FakeNcclTest, WrongCallsAreRefusedWithAText) {
  const std::vector<Comm> comms = MakeComms(2);
  EXPECT_EQ(api_.Send(out_.data(), 8, kUint8, 1, comms[0], nullptr),
            kInvalidUsage);
  EXPECT_EQ(LastError(comms[0]), "ncclSend outside a group");
  EXPECT_EQ(api_.GroupEnd(), kInvalidUsage);
  EXPECT_EQ(LastError(nullptr), "ncclGroupEnd without ncclGroupStart");
  EXPECT_EQ(Issue(reinterpret_cast<Comm>(&in_), {Send(1, out_)}),
            kInvalidArgument);
  EXPECT_EQ(LastError(nullptr), "ncclSend: unknown communicator");
  EXPECT_EQ(Issue(comms[0], {{false, 1, nullptr, 8}}), kInvalidArgument);
  EXPECT_EQ(LastError(comms[0]), "ncclRecv: null pointer");
  EXPECT_EQ(Issue(comms[0], {Send(2, out_)}), kInvalidArgument);
  EXPECT_EQ(LastError(comms[0]), "ncclSend: peer 2 of 2 ranks");
  EXPECT_EQ(Issue(comms[0], {Send(0, out_)}), kInvalidUsage);
  EXPECT_EQ(LastError(comms[0]),
            "rank 0 has a send to itself without its match in the group");
  // None of it left anything behind.
  EXPECT_EQ(Issue(comms[0], {Send(0, out_), Recv(0, in_)}), kInProgress);
  EXPECT_EQ(Now(comms[0]), kSuccess);
  EXPECT_EQ(in_, out_);
}

TEST_F(FakeNcclTest, CommunicatorIsNotUsedAfterItsEnd) {
  const std::vector<Comm> comms = MakeComms(2);
  EXPECT_EQ(api_.CommAbort(comms[0]), kSuccess);
  EXPECT_EQ(api_.CommDestroy(comms[1]), kSuccess);
  EXPECT_EQ(Issue(comms[0], {Send(1, out_)}), kInvalidArgument);
  EXPECT_EQ(LastError(comms[0]), "ncclSend: the communicator was aborted");
  EXPECT_EQ(api_.CommDestroy(comms[1]), kInvalidArgument);
  EXPECT_EQ(LastError(comms[1]),
            "ncclCommDestroy: the communicator was destroyed");
}

TEST_F(FakeNcclTest, NothingIsIssuedBeforeTheLastCallWasSeenToEnd) {
  const UniqueId id = NewId();
  const Comm comm = Start(id, 1, 0);
  EXPECT_EQ(Issue(comm, {Send(0, out_), Recv(0, in_)}), kInvalidArgument);
  EXPECT_EQ(LastError(comm),
            "ncclRecv: attempt to use communicator before the previous "
            "operation returned ncclSuccess");
  EXPECT_EQ(Now(comm), kSuccess);
  EXPECT_EQ(Issue(comm, {Send(0, out_), Recv(0, in_)}), kInProgress);
  EXPECT_EQ(Issue(comm, {Send(0, out_), Recv(0, in_)}), kInvalidArgument);
  EXPECT_EQ(api_.CommFinalize(comm), kInvalidArgument);
}

TEST_F(FakeNcclTest, OpenGroupIsRefusedAndRecorded) {
  const std::vector<Comm> comms = MakeComms(1);
  std::thread([&] {
    api_.GroupStart();
    api_.Send(out_.data(), 8, kUint8, 0, comms[0], nullptr);
    EXPECT_EQ(api_.CommFinalize(comms[0]), kInvalidUsage);
    EXPECT_EQ(LastError(comms[0]), "ncclCommFinalize inside a group");
  }).join();
  EXPECT_EQ(fake_nccl_violations(), 1);
  EXPECT_STREQ(fake_nccl_first_violation(), "a thread ended inside a group");
}

TEST_F(FakeNcclTest, GroupIsInProgressUntilItsBytesAreThere) {
  const std::vector<Comm> comms = MakeComms(2);
  for (Bytes* out : {&out_, &out2_}) {  // the second finds the edge connected
    EXPECT_EQ(Issue(comms[0], {Recv(1, in_)}), kInProgress);
    EXPECT_EQ(Now(comms[0]), kInProgress);
    EXPECT_FALSE(fake_nccl_is_deadlocked());  // rank 1 may still come
    EXPECT_EQ(Issue(comms[1], {Send(0, *out)}), kInProgress);
    EXPECT_EQ(Now(comms[1]), kSuccess);
    EXPECT_EQ(Now(comms[0]), kSuccess);
    EXPECT_EQ(in_, *out);
  }
}

TEST_F(FakeNcclTest, OperationsOfAnEdgeMatchInIssueOrder) {
  const std::vector<Comm> comms = MakeComms(2);
  Issue(comms[0], {Send(1, out_), Send(1, out2_)});
  Issue(comms[1], {Recv(0, in_), Recv(0, in2_)});
  EXPECT_EQ(Now(comms[0]), kSuccess);
  EXPECT_EQ(in_, out_);
  EXPECT_EQ(in2_, out2_);
  EXPECT_EQ(fake_nccl_messages(), 2);
}

TEST_F(FakeNcclTest, DifferentCountsFailOnBothEndsAndNameThem) {
  const std::vector<Comm> comms = MakeComms(2);
  Bytes longer = Filled(9, 0);
  Issue(comms[0], {Send(1, out_)});
  Issue(comms[1], {Recv(0, longer)});
  for (Comm comm : comms) {
    EXPECT_EQ(Now(comm), kInvalidUsage);
    EXPECT_EQ(LastError(comm),
              "rank 0 sends 8 uint8 to rank 1, but rank 1 receives 9 uint8 "
              "from rank 0");
    EXPECT_EQ(Issue(comm, {}), kSuccess);  // it is nobody's group
    EXPECT_EQ(api_.CommDestroy(comm), kInvalidUsage);
    EXPECT_EQ(api_.CommAbort(comm), kSuccess);
  }
}

TEST_F(FakeNcclTest, DifferentTypesFailOnBothEnds) {
  const std::vector<Comm> comms = MakeComms(2);
  Issue(comms[0], {Send(1, out_)});
  api_.GroupStart();
  api_.Recv(in_.data(), 8, kInt8, 0, comms[1], nullptr);
  api_.GroupEnd();
  EXPECT_EQ(Now(comms[0]), kInvalidUsage);
  EXPECT_EQ(Now(comms[1]), kInvalidUsage);
  EXPECT_EQ(in_, Filled(8, 0));
}

// Rank 0 sends to ranks 1 and 2 and hears from 1, each twice. With two
// operations per kernel rank 0 takes, by rounds, (to 1, to 2) (to 1, to 2)
// (from 1, from 1), but rank 1 (from 0, to 0) (from 0, to 0): its first kernel
// waits for the third of rank 0, whose second waits for the second of rank 1.
class FakeNcclBudgetTest : public FakeNcclTest {
 protected:
  void IssueTimes(const std::vector<Comm>& comms, int times) {
    std::vector<Op> zero, one, two;
    for (int i = 0; i < times; ++i) {
      zero.insert(zero.end(), {Send(1, out_), Send(2, out2_), Recv(1, in_)});
      one.insert(one.end(), {Recv(0, in_), Send(0, out_)});
      two.insert(two.end(), {Recv(0, in2_)});
    }
    EXPECT_EQ(Issue(comms[0], zero), kInProgress);
    EXPECT_EQ(Issue(comms[1], one), kInProgress);
    EXPECT_EQ(Issue(comms[2], two), kInProgress);
  }
};

TEST_F(FakeNcclBudgetTest, GroupOverTheBudgetHangsWhenItsCutDiffersOnTwoRanks) {
  const std::vector<Comm> comms = MakeComms(4);
  fake_nccl_set_budget(2);
  IssueTimes(comms, 2);
  EXPECT_TRUE(fake_nccl_is_deadlocked());
  EXPECT_EQ(Wait(comms[0], milliseconds(50)), kInProgress);
  EXPECT_EQ(Now(comms[1]), kInProgress);
  EXPECT_EQ(fake_nccl_cut_groups(), 2);
}

TEST_F(FakeNcclBudgetTest, SameOperationsPassInLockStepGroupsBelowTheBudget) {
  const std::vector<Comm> comms = MakeComms(4);
  fake_nccl_set_budget(3);
  for (int times = 0; times < 2; ++times) {
    IssueTimes(comms, 1);
    for (Comm comm : comms) EXPECT_EQ(Now(comm), kSuccess);
  }
  EXPECT_FALSE(fake_nccl_is_deadlocked());
  EXPECT_EQ(fake_nccl_cut_groups(), 0);
  EXPECT_EQ(fake_nccl_largest_group(), 3);
  EXPECT_EQ(fake_nccl_messages(), 6);
}

TEST_F(FakeNcclBudgetTest, GroupOverTheBudgetPassesWhenItsCutIsTheSame) {
  const std::vector<Comm> comms = MakeComms(2);
  fake_nccl_set_budget(2);
  Issue(comms[0], {Send(1, out_), Send(1, out_), Recv(1, in_), Recv(1, in_)});
  Issue(comms[1], {Send(0, out_), Send(0, out_), Recv(0, in2_), Recv(0, in2_)});
  EXPECT_EQ(Now(comms[0]), kSuccess);
  EXPECT_EQ(Now(comms[1]), kSuccess);
  EXPECT_EQ(fake_nccl_cut_groups(), 2);
}

TEST_F(FakeNcclTest, EdgeConnectsOnceForEachDirection) {
  const std::vector<Comm> comms = MakeComms(2);
  for (int times = 0; times < 2; ++times) {
    Issue(comms[0], {Send(1, out_)});
    Issue(comms[1], {Recv(0, in_)});
    EXPECT_EQ(Now(comms[0]), kSuccess);
    EXPECT_EQ(Now(comms[1]), kSuccess);
    EXPECT_EQ(fake_nccl_lazy_connects(), 1);
  }
  Issue(comms[0], {Recv(1, in_), Send(0, out_), Recv(0, in2_)});
  Issue(comms[1], {Send(0, out_)});
  EXPECT_EQ(Now(comms[0]), kSuccess);
  EXPECT_EQ(fake_nccl_lazy_connects(), 2);
}

TEST_F(FakeNcclTest, ConnectingTakesItsTime) {
  const std::vector<Comm> comms = MakeComms(2);
  fake_nccl_set_connect_delay(20000);
  const auto start = std::chrono::steady_clock::now();
  Issue(comms[0], {Send(1, out_)});
  Issue(comms[1], {Recv(0, in_)});
  EXPECT_EQ(Now(comms[0]), kInProgress);
  EXPECT_EQ(Wait(comms[0]), kSuccess);
  EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(20));
}

// Both peers of rank 0 are in a group, but rank 1 in one without rank 0, that
// waits for rank 2, that waits for rank 0.
TEST_F(FakeNcclTest, ConnectNeedsThePeerInAGroupWithTheSameEdge) {
  const std::vector<Comm> comms = MakeComms(3);
  Issue(comms[0], {Send(1, out_)});
  Issue(comms[1], {Send(2, out_)});
  EXPECT_FALSE(fake_nccl_is_deadlocked());
  Issue(comms[2], {Send(0, out_)});
  EXPECT_EQ(Now(comms[0]), kInProgress);
  EXPECT_TRUE(fake_nccl_is_deadlocked());
  EXPECT_EQ(fake_nccl_lazy_connects(), 0);
}

TEST_F(FakeNcclTest, MessageAcrossDifferentGroupsIsRecorded) {
  const std::vector<Comm> comms = MakeComms(2);
  Issue(comms[0], {Send(1, out_)});
  Issue(comms[1], {Recv(0, in_), Recv(0, in2_)});
  EXPECT_EQ(Now(comms[0]), kSuccess);
  EXPECT_EQ(fake_nccl_group_mismatches(), 0);
  Issue(comms[0], {Send(1, out2_)});
  EXPECT_EQ(Now(comms[1]), kSuccess);
  EXPECT_EQ(in2_, out2_);
  EXPECT_EQ(fake_nccl_group_mismatches(), 1);
  EXPECT_STREQ(fake_nccl_first_violation(),
               "rank 0 sends 8 uint8 to rank 1 in their group 2, which "
               "receives it in their group 1");
}

TEST_F(FakeNcclTest, GroupsWithoutTheOtherEndAreNoMismatch) {
  const std::vector<Comm> comms = MakeComms(3);
  Issue(comms[0], {Send(1, out_)});
  Issue(comms[1], {Recv(0, in_)});
  EXPECT_EQ(Now(comms[0]), kSuccess);
  Issue(comms[0], {Send(2, out_)});
  Issue(comms[2], {Recv(0, in_)});
  EXPECT_EQ(Now(comms[0]), kSuccess);
  EXPECT_EQ(fake_nccl_group_mismatches(), 0);
}

TEST_F(FakeNcclTest, TwoCommunicatorsInUseAtATimeAreRecorded) {
  const Comm a = MakeComms(1)[0], b = MakeComms(1)[0];
  Issue(a, {Send(0, out_), Recv(0, in_)});
  EXPECT_EQ(Now(a), kSuccess);
  Issue(b, {Send(0, out_), Recv(0, in_)});
  EXPECT_EQ(fake_nccl_violations(), 0);
  Issue(a, {Send(0, out_), Recv(0, in_)});  // the end of b was not seen yet
  EXPECT_EQ(fake_nccl_violations(), 1);
  EXPECT_STREQ(fake_nccl_first_violation(),
               "rank 0 starts a group while another communicator of it is in "
               "use");
}

TEST_F(FakeNcclTest, TwoCommunicatorsInOneGroupAreRecorded) {
  const Comm a = MakeComms(1)[0], b = MakeComms(1)[0];
  api_.GroupStart();
  for (Comm comm : {a, b}) {
    api_.Send(out_.data(), 8, kUint8, 0, comm, nullptr);
    api_.Recv(in_.data(), 8, kUint8, 0, comm, nullptr);
  }
  EXPECT_EQ(api_.GroupEnd(), kInProgress);
  EXPECT_EQ(fake_nccl_violations(), 1);
}

// Rank 0 sends two messages to rank 1 in one group.
class FakeNcclFaultTest : public FakeNcclTest {
 protected:
  void Exchange() {
    Issue(comms_[0], {Send(1, out_), Send(1, out2_)});
    Issue(comms_[1], {Recv(0, in_), Recv(0, in2_)});
  }
  std::vector<Comm> comms_ = MakeComms(2);
};

TEST_F(FakeNcclFaultTest, DelayedRankIsSlow) {
  fake_nccl_delay(1, 20000);
  const auto start = std::chrono::steady_clock::now();
  Exchange();
  EXPECT_EQ(Wait(comms_[0]), kSuccess);
  EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(40));
}

TEST_F(FakeNcclFaultTest, FailedOperationIsTheRanksErrorAndItsPeerHangs) {
  fake_nccl_fail_at(0, 1, kUnhandledCudaError);
  Exchange();
  EXPECT_EQ(Now(comms_[0]), kUnhandledCudaError);
  EXPECT_EQ(LastError(comms_[0]),
            "rank 0 sends 8 uint8 to rank 1: fault of the test");
  EXPECT_EQ(Now(comms_[1]), kInProgress);
  EXPECT_EQ(in_, out_);
  EXPECT_EQ(in2_, Filled(8, 0));
  EXPECT_TRUE(fake_nccl_is_deadlocked());
}

TEST_F(FakeNcclFaultTest, FailedReceiveMovesNothing) {
  fake_nccl_fail_at(1, 0, kInternalError);
  Exchange();
  EXPECT_EQ(Now(comms_[0]), kInProgress);
  EXPECT_EQ(Now(comms_[1]), kInternalError);
  EXPECT_EQ(in_, Filled(8, 0));
  EXPECT_EQ(fake_nccl_messages(), 0);
}

TEST_F(FakeNcclFaultTest, PeerOfAFailedRankGetsARemoteErrorIfAsked) {
  fake_nccl_set_remote_errors(true);
  fake_nccl_fail_at(0, 1, kSystemError);
  Exchange();
  EXPECT_EQ(Now(comms_[0]), kSystemError);
  EXPECT_EQ(Now(comms_[1]), kRemoteError);
  EXPECT_EQ(LastError(comms_[1]),
            "rank 1 receives 8 uint8 from rank 0, which is lost");
}

TEST_F(FakeNcclFaultTest, HungOperationHangsBothEnds) {
  fake_nccl_set_remote_errors(true);
  fake_nccl_hang_at(1, 1);
  Exchange();
  EXPECT_EQ(Wait(comms_[0], milliseconds(20)), kInProgress);
  EXPECT_EQ(Now(comms_[1]), kInProgress);
  EXPECT_EQ(in_, out_);
  EXPECT_TRUE(fake_nccl_is_deadlocked());
}

TEST_F(FakeNcclFaultTest, CorruptedByteArrives) {
  fake_nccl_corrupt_at(0, 1, 3);
  Exchange();
  EXPECT_EQ(Now(comms_[1]), kSuccess);
  EXPECT_EQ(in_, out_);
  out2_[3] ^= std::byte{0xff};
  EXPECT_EQ(in2_, out2_);
}

TEST_F(FakeNcclFaultTest, OperationsAreCountedFromTheCall) {
  Exchange();
  EXPECT_EQ(Now(comms_[0]), kSuccess);
  EXPECT_EQ(Now(comms_[1]), kSuccess);
  fake_nccl_corrupt_at(1, 0, 0);
  Exchange();
  EXPECT_EQ(Now(comms_[1]), kSuccess);
  EXPECT_NE(in_, out_);
  EXPECT_EQ(in2_, out2_);
}

TEST_F(FakeNcclFaultTest, CallsOfAKilledRankBlock) {
  fake_nccl_set_remote_errors(true);
  fake_nccl_kill(0);
  std::atomic<bool> has_returned = false;
  std::thread killed([&] {
    Result state;
    EXPECT_EQ(api_.CommGetAsyncError(comms_[0], &state), kSystemError);
    has_returned = true;
  });
  Issue(comms_[1], {Recv(0, in_)});
  EXPECT_EQ(Wait(comms_[1]), kRemoteError);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_FALSE(has_returned);
  fake_nccl_release();
  killed.join();
}

TEST_F(FakeNcclFaultTest, PeersOfAKilledRankHang) {
  Issue(comms_[0], {Send(1, out_)});
  fake_nccl_kill(0);
  Issue(comms_[1], {Recv(0, in_)});
  EXPECT_EQ(Now(comms_[1]), kInProgress);
  EXPECT_TRUE(fake_nccl_is_deadlocked());
}

TEST_F(FakeNcclFaultTest, AbortTakesTheRanksOperationsBack) {
  Issue(comms_[0], {Send(1, out_)});
  EXPECT_EQ(api_.CommAbort(comms_[0]), kSuccess);
  Issue(comms_[1], {Recv(0, in_)});
  EXPECT_EQ(Now(comms_[1]), kInProgress);
  EXPECT_TRUE(fake_nccl_is_deadlocked());
  EXPECT_EQ(api_.CommAbort(comms_[1]), kSuccess);
  EXPECT_FALSE(fake_nccl_is_deadlocked());
  EXPECT_EQ(in_, Filled(8, 0));
}

TEST_F(FakeNcclFaultTest, AbortReachesPeersAsARemoteErrorIfAsked) {
  fake_nccl_set_remote_errors(true);
  Issue(comms_[1], {Recv(0, in_)});
  EXPECT_EQ(Now(comms_[1]), kInProgress);
  EXPECT_EQ(api_.CommAbort(comms_[0]), kSuccess);
  EXPECT_EQ(Now(comms_[1]), kRemoteError);
}

TEST_F(FakeNcclTest, InitWithAnAbortedRankNeverEnds) {
  const UniqueId id = NewId();
  const Comm first = Start(id, 2, 0);
  EXPECT_EQ(api_.CommAbort(first), kSuccess);
  const Comm second = Start(id, 2, 1);
  EXPECT_EQ(Now(second), kInProgress);
  fake_nccl_set_remote_errors(true);
  EXPECT_EQ(Now(second), kRemoteError);
}

TEST_F(FakeNcclTest, CommunicatorsLiveUntilTheirDestroyOrAbort) {
  const std::vector<Comm> comms = MakeComms(3);
  EXPECT_EQ(fake_nccl_live_communicators(), 3);
  EXPECT_EQ(api_.CommAbort(comms[0]), kSuccess);
  EXPECT_EQ(fake_nccl_live_communicators(), 2);
  EXPECT_EQ(api_.CommFinalize(comms[1]), kInProgress);
  EXPECT_EQ(Now(comms[1]), kInProgress);  // rank 2 is still there
  EXPECT_EQ(api_.CommDestroy(comms[1]), kInvalidArgument);
  EXPECT_EQ(api_.CommFinalize(comms[2]), kInProgress);
  for (Comm comm : {comms[1], comms[2]}) {
    EXPECT_EQ(Now(comm), kSuccess);
    EXPECT_EQ(Issue(comm, {Send(0, out_)}), kInvalidUsage);
    EXPECT_EQ(api_.CommDestroy(comm), kSuccess);
  }
  EXPECT_EQ(fake_nccl_live_communicators(), 0);
}

// Threads.

TEST_F(FakeNcclTest, AbortEndsABlockedCallOfItsOwnRank) {
  const UniqueId id = NewId();
  std::atomic<Comm> waiting = nullptr;
  ASSERT_TRUE(RunRankThreads(2, [&](int32_t rank) {
                Comm comm = nullptr;
                EXPECT_EQ(api_.CommInitRankConfig(&comm, 2, id, rank, nullptr),
                          kSuccess);
                if (rank == 0) {
                  waiting = comm;
                  EXPECT_EQ(Issue(comm, {Recv(1, in_)}), kInternalError);
                } else {
                  while (waiting == nullptr) std::this_thread::yield();
                  std::this_thread::sleep_for(milliseconds(20));
                  EXPECT_EQ(api_.CommAbort(waiting), kSuccess);
                }
              }).ok());
}

TEST_F(FakeNcclTest, ReleaseEndsAHang) {
  const UniqueId id = NewId();
  std::thread alone([&] {
    Comm comm = nullptr;
    EXPECT_EQ(api_.CommInitRankConfig(&comm, 2, id, 0, nullptr), kSystemError);
  });
  std::this_thread::sleep_for(milliseconds(10));
  fake_nccl_release();
  alone.join();
}

}  // namespace
}  // namespace refit::nccl
