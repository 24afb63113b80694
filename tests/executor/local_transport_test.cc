#include "refit/local_transport.h"

#include <latch>
#include <string>

#include "absl/strings/str_cat.h"
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

// A rank comes back to no later step once its transport is gone.
TEST_P(LocalTransportTest, RankThatClosesBeforeARefitEndsItForTheOthers) {
  const std::string wanted = " has closed its transport";
  for (const int32_t closes : {0, 2}) {
    // What the others wait in: for bytes, for a fence, for the end.
    for (const int wait : {0, 1, 2}) {
      for (const bool before : {true, false}) {
        MakeWorld(3);
        ConnectAll();
        if (before) world_.ends[closes].reset();
        for (const absl::Status& status :
             OnAllRanks([&](int32_t rank) -> absl::Status {
               if (rank == closes) {
                 world_.ends[closes].reset();
                 return absl::UnavailableError(
                     absl::StrCat("rank ", closes, wanted));
               }
               absl::Status begun = end(rank).BeginRefit(Ample(), false);
               if (!begun.ok()) return begun;
               auto in = Filled(8, 0);
               if (wait == 0) return Exchange(rank, 0, {Recv(closes, in)});
               if (wait == 1) {
                 return end(rank).fence()->AwaitGrants({{closes}}, nullptr);
               }
               return Finish(rank);
             })) {
          EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
          EXPECT_NE(
              status.message().find(absl::StrCat("rank ", closes, wanted)),
              std::string::npos)
              << status;
        }
      }
    }
  }
}

TEST_P(LocalTransportTest, RankThatClosesInsideARefitEndsIt) {
  MakeWorld(3);
  ConnectAll();
  std::latch begun(3);
  const auto statuses = OnAllRanks([&](int32_t rank) {
    const absl::Status status = end(rank).BeginRefit(Ample(), false);
    begun.arrive_and_wait();
    if (!status.ok()) return status;
    if (rank == 1) {
      world_.ends[1].reset();
      return absl::OkStatus();
    }
    return Finish(rank);
  });
  for (const int32_t rank : {0, 2}) {
    EXPECT_EQ(statuses[rank].message(),
              "aborted by rank 1: it closed its transport inside the refit");
  }
}

TEST_P(LocalTransportTest, RankThatClosesAfterTheRefitDisturbsNobody) {
  for (int attempt = 0; attempt < 50; ++attempt) {
    MakeWorld(3);
    ConnectAll();
    for (const absl::Status& status : OnAllRanks([&](int32_t rank) {
           absl::Status ended = end(rank).BeginRefit(Ample(), false);
           if (ended.ok()) ended = Finish(rank);
           if (rank != 1) world_.ends[rank].reset();
           return ended;
         })) {
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST_P(LocalTransportTest, AnAbortIsToldThoughTheRankHasClosedSince) {
  MakeWorld(2);
  ConnectAll();
  ASSERT_TRUE(end(0).BeginRefit(Ample(), false).ok());
  end(0).Abort(absl::InternalError("on purpose"));
  world_.ends[0].reset();
  EXPECT_EQ(end(1).BeginRefit(Ample(), false).message(),
            "aborted by rank 0: on purpose");
  EXPECT_EQ(end(1).BeginRefit(Ample(), false).message(),
            "rank 0 has closed its transport");
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
