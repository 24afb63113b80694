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
INSTANTIATE_TEST_SUITE_P(Local, FenceConformance,
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
          statuses[rank] = world.ends[rank]->BeginRefit(deadline, false);
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
