// The fake libnccl is held to what its header says, since the tests of the
// NCCL transport believe it: what it says no to, and what it records. One
// thread can be all ranks in turn. Faults are seen in nccl_failure_test.cc, and
// kernels in nccl_budget_test.cc.
#include "tests/executor/fake_nccl/fake_nccl.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "executor/transport/nccl_api.h"

namespace refit::nccl {
namespace {

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

  // A communicator that is about to be.
  Comm Start(const UniqueId& id, int ranks, int rank) {
    fake_nccl_set_rank(rank);
    Config config;
    config.blocking = 0;
    Comm comm = nullptr;
    EXPECT_EQ(api_.CommInitRankConfig(&comm, ranks, id, rank, &config),
              kInProgress);
    return comm;
  }

  // Connected communicators, by rank.
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
}

TEST_F(FakeNcclTest, OpenGroupIsRecorded) {
  const std::vector<Comm> comms = MakeComms(1);
  std::thread([&] {
    api_.GroupStart();
    api_.Send(out_.data(), 8, kUint8, 0, comms[0], nullptr);
  }).join();
  EXPECT_EQ(fake_nccl_violations(), 1);
  EXPECT_STREQ(fake_nccl_first_violation(), "a thread ended inside a group");
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
    EXPECT_EQ(api_.CommAbort(comm), kSuccess);
  }
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

}  // namespace
}  // namespace refit::nccl
