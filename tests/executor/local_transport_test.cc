#include "refit/local_transport.h"

#include "tests/executor/transport_conformance.h"

namespace refit {
namespace {

TransportWorld MakeLocalWorld(int32_t world_size) {
  TransportWorld world;
  auto fabric = std::make_shared<LocalFabric>(world_size);
  for (int32_t rank = 0; rank < world_size; ++rank) {
    world.ends.push_back(*fabric->CreateTransport(rank));
  }
  world.shared = fabric;
  return world;
}

INSTANTIATE_TEST_SUITE_P(Local, TransportConformance,
                         testing::Values(TransportFactory(MakeLocalWorld)));

// Here nothing is broken by an abort but the refit itself.
class LocalTransportTest : public TransportConformance {};

INSTANTIATE_TEST_SUITE_P(Local, LocalTransportTest,
                         testing::Values(TransportFactory(MakeLocalWorld)));

TEST_P(LocalTransportTest, RefitAfterAnAbortNeedsNoConnect) {
  constexpr int32_t kRanks = 4;
  MakeWorld(kRanks);
  ConnectAll();
  for (int attempt = 0; attempt < 20; ++attempt) {
    const bool fails = attempt % 2 == 0;
    for (const absl::Status& status :
         RingRefit(attempt, 5, [&](int32_t rank, uint32_t round) {
           return fails && rank == attempt % kRanks && round == 3;
         })) {
      EXPECT_EQ(status.ok(), !fails) << status;
      EXPECT_NE(status.code(), absl::StatusCode::kDataLoss);
    }
  }
}

// Rank 0 writes into rank 1's memory when rank 1 has said that it may; rank 1
// reads it when rank 0 has said that it did.
TEST_P(LocalTransportTest, FenceOrdersWritesIntoThePeersMemory) {
  MakeWorld(2);
  ConnectAll();
  int memory = 0;
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    if (absl::Status s = end(rank).BeginRefit(Ample()); !s.ok()) return s;
    Fence& fence = *end(rank).fence();
    const int32_t peer = 1 - rank;
    for (int round = 1; round <= 1000; ++round) {
      absl::Status s = rank == 1 ? fence.Grant({&peer, 1}, nullptr)
                                 : fence.AwaitGrants({&peer, 1}, nullptr);
      if (!s.ok()) return s;
      if (rank == 0) memory = round;
      s = rank == 0 ? fence.Finish({&peer, 1}, nullptr)
                    : fence.AwaitFinishes({&peer, 1}, nullptr);
      if (!s.ok()) return s;
      if (rank == 1 && memory != round) return absl::DataLossError("too early");
    }
    return Finish(rank);
  });
  for (const absl::Status& s : statuses) EXPECT_TRUE(s.ok()) << s;
}

TEST_P(LocalTransportTest, AwaitNamesThePeerThatDoesNotGrant) {
  MakeWorld(3);
  ConnectAll();
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    absl::Status s = end(rank).BeginRefit(
        rank == 0 ? In(std::chrono::milliseconds(100)) : Ample());
    const std::vector<int32_t> peers = {1, 2}, zero = {0};
    if (s.ok() && rank == 1) s = end(rank).fence()->Grant(zero, nullptr);
    if (s.ok() && rank == 0) s = end(rank).fence()->AwaitGrants(peers, nullptr);
    return s.ok() ? Finish(rank) : s;
  });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(statuses[0].message(), "rank 2 did not come before the deadline");
}

// What NCCL leaves undefined is an error here.
class LocalTransportMismatch : public testing::Test {
 protected:
  // Rank 0 sends `sent` bytes in round `round`, rank 1 receives 64 in round 5.
  absl::Status Exchange(size_t sent, uint32_t round) {
    TransportWorld world = MakeLocalWorld(2);
    std::vector<std::byte> out(sent), in(64);
    std::vector<absl::Status> statuses(2);
    EXPECT_TRUE(
        RunRankThreads(2, [&](int32_t rank) {
          const Operation operation =
              rank == 0
                  ? Operation{fb::MessageKind::kSend, 1, out.data(), out.size()}
                  : Operation{fb::MessageKind::kRecv, 0, in.data(), in.size()};
          const Deadline deadline =
              std::chrono::steady_clock::now() + std::chrono::seconds(30);
          statuses[rank] = world.ends[rank]->BeginRefit(deadline);
          if (!statuses[rank].ok()) return;
          statuses[rank] = world.ends[rank]->Exchange(
              {rank == 0 ? round : 5, fb::Route::kPeer, {&operation, 1}},
              nullptr);
        }).ok());
    EXPECT_FALSE(statuses[0].ok());
    return statuses[1];
  }
};

TEST_F(LocalTransportMismatch, DifferentSizesAreNamed) {
  EXPECT_EQ(Exchange(60, 5).message(),
            "round 5: recv of 64 bytes from rank 0 meets a send of 60 bytes in "
            "round 5");
}

TEST_F(LocalTransportMismatch, DifferentRoundsAreNamed) {
  EXPECT_EQ(Exchange(64, 6).message(),
            "round 5: recv of 64 bytes from rank 0 meets a send of 64 bytes in "
            "round 6");
}

TEST(LocalFabricTest, RankHasOneTransport) {
  LocalFabric fabric(2);
  auto transport = fabric.CreateTransport(1);
  ASSERT_TRUE(transport.ok());
  EXPECT_EQ(fabric.CreateTransport(1).status().message(),
            "rank 1 has its transport already");
  EXPECT_EQ(fabric.CreateTransport(2).status().message(),
            "rank 2 is not one of the 2 ranks");
}

}  // namespace
}  // namespace refit
