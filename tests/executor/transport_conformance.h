// What every Transport must do. A test file instantiates the suite with a
// factory that makes connected-to-be ends of a new world, all on one host.
#ifndef REFIT_TESTS_EXECUTOR_TRANSPORT_CONFORMANCE_H_
#define REFIT_TESTS_EXECUTOR_TRANSPORT_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "refit/transport.h"
#include "runner/rank_threads.h"
#include "tests/executor/all_ok.h"

namespace refit {

// The ends of one world.
struct TransportWorld {
  std::shared_ptr<void> shared;                  // destroyed after the ends
  std::vector<std::unique_ptr<Transport>> ends;  // by rank
};
using TransportFactory = std::function<TransportWorld(int32_t world_size)>;

class TransportConformance : public testing::TestWithParam<TransportFactory> {
 protected:
  static Deadline In(std::chrono::milliseconds time) {
    return std::chrono::steady_clock::now() + time;
  }
  static Deadline Ample() { return In(std::chrono::minutes(1)); }

  void MakeWorld(int32_t size) {
    // Assignment would free the old world's shared part first.
    world_.ends.clear();
    world_ = GetParam()(size);
  }

  Transport& end(int32_t rank) { return *world_.ends[rank]; }

  // `body(rank)` on a thread per rank; its statuses by rank.
  std::vector<absl::Status> OnAllRanks(
      const std::function<absl::Status(int32_t)>& body) {
    std::vector<absl::Status> statuses(world_.ends.size());
    EXPECT_TRUE(
        RunRankThreads(static_cast<int32_t>(statuses.size()), [&](int32_t r) {
          statuses[r] = body(r);
          // As the executor does after a refit that failed.
          if (!statuses[r].ok()) {
            statuses[r] = world_.ends[r]->Settle(statuses[r], nullptr);
          }
        }).ok());
    return statuses;
  }

  // Both ways between all ranks, staged and direct.
  std::vector<Edge> EdgesOf(int32_t rank) const {
    std::vector<Edge> edges;
    for (int32_t peer = 0; peer < std::ssize(world_.ends); ++peer) {
      if (peer == rank) continue;
      for (const auto kind : {fb::MessageKind::kSend, fb::MessageKind::kRecv}) {
        for (const auto mechanism :
             {fb::Mechanism::kStaged, fb::Mechanism::kDirect}) {
          edges.push_back({.peer = peer,
                           .kind = kind,
                           .route = fb::Route::kPeer,
                           .mechanism = mechanism});
        }
      }
    }
    return edges;
  }

  void ConnectAll() {
    ASSERT_TRUE(AllOk(OnAllRanks([&](int32_t rank) {
      return end(rank).Connect({}, EdgesOf(rank), Ample());
    })));
  }

  absl::Status Exchange(int32_t rank, uint32_t round,
                        const std::vector<Operation>& operations) {
    return end(rank).Exchange({round, fb::Route::kPeer, operations}, nullptr);
  }
  // The end of a rank's refit.
  absl::Status Finish(int32_t rank) {
    absl::Status status = end(rank).EndRefit(nullptr);
    return status.ok() ? end(rank).Wait() : status;
  }
  // A refit in which every rank sends `value` round the ring, in `rounds`
  // rounds; `fails_at(rank, round)` aborts it there.
  std::vector<absl::Status> RingRefit(
      int value, uint32_t rounds,
      const std::function<bool(int32_t, uint32_t)>& fails_at =
          [](int32_t, uint32_t) { return false; });

  static Operation Send(int32_t peer, std::vector<std::byte>& bytes) {
    return {fb::MessageKind::kSend, peer, bytes.data(), bytes.size()};
  }
  static Operation Recv(int32_t peer, std::vector<std::byte>& bytes) {
    return {fb::MessageKind::kRecv, peer, bytes.data(), bytes.size()};
  }
  static std::vector<std::byte> Filled(size_t size, int value) {
    return std::vector<std::byte>(size, std::byte(value));
  }

  TransportWorld world_;
};

inline std::vector<absl::Status> TransportConformance::RingRefit(
    int value, uint32_t rounds,
    const std::function<bool(int32_t, uint32_t)>& fails_at) {
  const auto ranks = static_cast<int32_t>(world_.ends.size());
  return OnAllRanks([&](int32_t rank) -> absl::Status {
    if (absl::Status s = end(rank).BeginRefit(Ample(), false); !s.ok())
      return s;
    for (uint32_t round = 0; round < rounds; ++round) {
      if (fails_at(rank, round)) {
        const absl::Status status = absl::InternalError("on purpose");
        end(rank).Abort(status);
        return status;
      }
      const int sent = value + static_cast<int>(round);
      auto out = Filled(50, sent), in = Filled(50, 0xff);
      absl::Status s = Exchange(rank, round,
                                {Recv((rank + ranks - 1) % ranks, in),
                                 Send((rank + 1) % ranks, out)});
      if (!s.ok()) return s;
      if (in != Filled(50, sent)) {
        return absl::DataLossError("bytes of another refit");
      }
    }
    return Finish(rank);
  });
}

TEST_P(TransportConformance, HandshakeNamesBothPlansOfRanksThatDiffer) {
  MakeWorld(3);
  const auto statuses = OnAllRanks([&](int32_t rank) {
    HandshakeRecord record;
    record.format_version = 1 << 16;
    record.body_digest = fb::Digest(rank == 2 ? 7 : 5, 0);
    return end(rank).Connect(record, {}, Ample());
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(status.message(),
              "plan digest differs: 00000000000000000000000000000005 on rank "
              "0, 00000000000000000000000000000007 on rank 2");
  }
}

TEST_P(TransportConformance, HandshakeNamesBothVersionsOfRanksThatDiffer) {
  MakeWorld(2);
  const auto statuses = OnAllRanks([&](int32_t rank) {
    HandshakeRecord record;
    record.format_version = (1 << 16) + rank;
    return end(rank).Connect(record, {}, Ample());
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.message(),
              "format version differs: 1.0 on rank 0, 1.1 on rank 1");
  }
}

TEST_P(TransportConformance, HandshakeNamesThePlansBeforeTheirVersions) {
  MakeWorld(2);
  const auto statuses = OnAllRanks([&](int32_t rank) {
    HandshakeRecord record;
    record.format_version = (1 << 16) + rank;
    record.body_digest = fb::Digest(rank == 0 ? 5 : 6, 0);
    return end(rank).Connect(record, {}, Ample());
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.message(),
              "plan digest differs: 00000000000000000000000000000005 on rank "
              "0, 00000000000000000000000000000006 on rank 1");
  }
}

TEST_P(TransportConformance, RankThatIsNotReadyStopsAllOthers) {
  MakeWorld(2);
  const auto statuses = OnAllRanks([&](int32_t rank) {
    HandshakeRecord record;
    record.ready = rank != 1;
    return end(rank).Connect(record, {}, Ample());
  });
  EXPECT_EQ(statuses[0].message(),
            "rank 1 cannot go on; its own error says why");
}

TEST_P(TransportConformance, HandshakeNamesTheRankThatDoesNotCome) {
  MakeWorld(3);
  const auto statuses = OnAllRanks([&](int32_t rank) {
    return rank == 1
               ? absl::OkStatus()
               : end(rank).Connect({}, {}, In(std::chrono::milliseconds(50)));
  });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(statuses[0].message().find("rank 1"), std::string::npos)
      << statuses[0];
}

TEST_P(TransportConformance, PeerOutsideTheWorldIsRefusedOnAllRanks) {
  MakeWorld(2);
  const auto statuses = OnAllRanks([&](int32_t rank) {
    const Edge edge = {.peer = 2 - 2 * rank, .route = fb::Route::kPeer};
    return end(rank).Connect({}, {&edge, 1}, Ample());
  });
  EXPECT_EQ(statuses[0].message(), "peer 2 is not one of the 2 ranks");
  EXPECT_EQ(statuses[1].message(),
            "aborted by rank 0: peer 2 is not one of the 2 ranks");
  ConnectAll();
}

TEST_P(TransportConformance, EveryPairExchangesInEveryRound) {
  constexpr int32_t kRanks = 5;
  constexpr uint32_t kRounds = 20;
  MakeWorld(kRanks);
  ConnectAll();
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    if (absl::Status s = end(rank).BeginRefit(Ample(), false); !s.ok())
      return s;
    for (uint32_t round = 0; round < kRounds; ++round) {
      std::vector<std::vector<std::byte>> out(kRanks), in(kRanks);
      std::vector<Operation> operations;
      for (int32_t peer = 0; peer < kRanks; ++peer) {
        if (peer == rank) continue;
        out[peer] = Filled(100 + rank, 10 * rank + peer + round);
        in[peer] = Filled(100 + peer, 0xff);
        operations.push_back(Recv(peer, in[peer]));
        operations.push_back(Send(peer, out[peer]));
      }
      absl::Status s = Exchange(rank, round, operations);
      if (!s.ok()) return s;
      for (int32_t peer = 0; peer < kRanks; ++peer) {
        if (peer == rank) continue;
        if (in[peer] != Filled(100 + peer, 10 * peer + rank + round)) {
          return absl::InternalError("wrong bytes");
        }
      }
    }
    return Finish(rank);
  });
  EXPECT_TRUE(AllOk(statuses));
}

TEST_P(TransportConformance, OperationsToOnePeerMatchInIssueOrder) {
  MakeWorld(2);
  ConnectAll();
  auto first = Filled(8, 1), second = Filled(8, 2);
  auto first_in = Filled(8, 0), second_in = Filled(8, 0);
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    if (absl::Status s = end(rank).BeginRefit(Ample(), false); !s.ok())
      return s;
    std::vector<Operation> operations;
    if (rank == 0) {
      operations = {Send(1, first), Send(1, second)};
    } else {
      operations = {Recv(0, first_in), Recv(0, second_in)};
    }
    absl::Status s = Exchange(rank, 0, operations);
    return s.ok() ? Finish(rank) : s;
  });
  EXPECT_TRUE(AllOk(statuses));
  EXPECT_EQ(first_in, first);
  EXPECT_EQ(second_in, second);
}

TEST_P(TransportConformance, ReceiveWithoutSenderEndsAtTheDeadline) {
  MakeWorld(2);
  ConnectAll();
  auto bytes = Filled(64, 0);
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    absl::Status s =
        end(rank).BeginRefit(In(std::chrono::milliseconds(100)), false);
    if (s.ok() && rank == 1) s = Exchange(rank, 3, {Recv(0, bytes)});
    return s.ok() ? Finish(rank) : s;
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  }
  EXPECT_EQ(statuses[1].message().find("round 3: recv of 64 bytes from rank 0"),
            0)
      << statuses[1];
}

TEST_P(TransportConformance, AbortWakesEveryRankAndNamesWhereItWas) {
  MakeWorld(3);
  ConnectAll();
  auto bytes = Filled(64, 0), out = Filled(32, 0);
  std::latch begun(2);
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    if (absl::Status s = end(rank).BeginRefit(Ample(), false); !s.ok())
      return s;
    if (rank == 0) {
      begun.wait();
      end(rank).Abort(absl::InternalError("out of luck"));
      return absl::InternalError("out of luck");
    }
    begun.count_down();
    return Exchange(rank, 4, {rank == 1 ? Recv(0, bytes) : Send(0, out)});
  });
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kAborted);
  EXPECT_EQ(statuses[1].message(),
            "round 4: recv of 64 bytes from rank 0: aborted by rank 0: out of "
            "luck");
  EXPECT_EQ(statuses[2].message(),
            "round 4: send of 32 bytes to rank 0: aborted by rank 0: out of "
            "luck");
}

TEST_P(TransportConformance, ConnectAfterAnAbortMakesTheTransportWhole) {
  constexpr int32_t kRanks = 4;
  MakeWorld(kRanks);
  for (int attempt = 0; attempt < 10; ++attempt) {
    ConnectAll();
    EXPECT_TRUE(AllOk(RingRefit(attempt, 5)));
    const auto failed =
        RingRefit(100 + attempt, 5, [&](int32_t rank, uint32_t round) {
          return rank == attempt % kRanks && round == 3;
        });
    for (const absl::Status& status : failed) {
      EXPECT_FALSE(status.ok());
      EXPECT_NE(status.code(), absl::StatusCode::kDataLoss) << status;
    }
  }
}

TEST_P(TransportConformance, ManyRefitsFollowOneConnect) {
  MakeWorld(3);
  ConnectAll();
  for (int refit = 0; refit < 20; ++refit) {
    ASSERT_TRUE(AllOk(RingRefit(refit, 2)));
  }
}

TEST_P(TransportConformance, RankThatAloneChecksARefitEndsItForAllAtOnce) {
  for (const int32_t checks : {0, 1, 2}) {
    MakeWorld(3);
    ConnectAll();
    auto bytes = Filled(64, 0);
    const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
      if (rank == checks) {
        HandshakeRecord record;
        record.stage = HandshakeStage::kCheck;
        return end(rank).Handshake(record, Ample());
      }
      const absl::Status s = end(rank).BeginRefit(Ample(), false);
      return s.ok() ? Exchange(rank, 0, {Recv(checks, bytes)}) : s;
    });
    for (const absl::Status& status : statuses) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_NE(std::string(status.message())
                    .find("check differs: rank " + std::to_string(checks) +
                          " runs a refit that is checked, rank "),
                std::string::npos)
          << status;
    }
    ConnectAll();
    EXPECT_TRUE(AllOk(RingRefit(3, 2)));
  }
}

// Its Connect goes on to that of the others.
TEST_P(TransportConformance, RankThatLeftOutACheckThatFailedMissedAStep) {
  for (const bool differs : {false, true}) {
    MakeWorld(3);
    ConnectAll();
    std::atomic<int> failed = 0;
    OnAllRanks([&](int32_t rank) -> absl::Status {
      HandshakeRecord record;
      if (rank == 2) {
        while (failed < 2) std::this_thread::yield();
        EXPECT_FALSE(end(2).Connect(record, {}, Ample()).ok());
        EXPECT_TRUE(end(2).TakeMissedStep()) << differs;
        return absl::OkStatus();
      }
      absl::Status status;
      if (rank == 1 && differs) {
        // The other has come to its handshake by then.
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        status = end(1).BeginRefit(Ample(), false);
        if (status.ok()) status = Finish(1);
      } else {
        record.stage = HandshakeStage::kCheck;
        status = end(rank).Handshake(
            record, differs ? Ample()
                            : std::chrono::steady_clock::now() +
                                  std::chrono::milliseconds(100));
      }
      EXPECT_FALSE(status.ok());
      ++failed;
      return absl::OkStatus();
    });
  }
}

TEST_P(TransportConformance, RankThatLeftARefitOutIsToldByItsNextCall) {
  MakeWorld(3);
  ConnectAll();
  auto bytes = Filled(64, 0);
  const auto refit = OnAllRanks([&](int32_t rank) -> absl::Status {
    if (rank == 2) return absl::OkStatus();
    absl::Status s =
        end(rank).BeginRefit(In(std::chrono::milliseconds(100)), false);
    if (s.ok() && rank == 0) s = Exchange(rank, 1, {Recv(2, bytes)});
    return s.ok() ? Finish(rank) : s;
  });
  EXPECT_EQ(refit[0].code(), absl::StatusCode::kDeadlineExceeded) << refit[0];
  EXPECT_EQ(refit[1].code(), absl::StatusCode::kDeadlineExceeded) << refit[1];
  EXPECT_EQ(end(2).Handshake({}, Ample()).code(),
            absl::StatusCode::kDeadlineExceeded);
  ConnectAll();
  EXPECT_TRUE(AllOk(RingRefit(1, 2)));
}

TEST_P(TransportConformance, ExchangeBytesGivesEachWhatWasMeantForIt) {
  constexpr int32_t kRanks = 5;
  MakeWorld(kRanks);
  ConnectAll();
  std::vector<std::vector<std::string>> given(kRanks);
  // Rank 4 gives to nobody; who gives what changes from call to call.
  for (const std::string text : {"first", "", "third"}) {
    const auto statuses = OnAllRanks([&](int32_t rank) {
      const std::string mine = std::string(1, '\0') + text;
      std::vector<int32_t> to, from;
      if (rank < 4) to = {(rank + 1) % 4, 4};
      if (rank < 4) from = {(rank + 3) % 4};
      if (rank == 4) from = {3, 1, 0, 2};
      auto shared = end(rank).ExchangeBytes(mine + std::to_string(rank), to,
                                            from, Ample());
      if (shared.ok()) given[rank] = *std::move(shared);
      return shared.status();
    });
    ASSERT_TRUE(AllOk(statuses));
    const auto by = [&](int32_t rank) {
      return std::string(1, '\0') + text + std::to_string(rank);
    };
    for (int32_t rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(given[rank], std::vector<std::string>{by((rank + 3) % 4)});
    }
    EXPECT_EQ(given[4], (std::vector<std::string>{by(3), by(1), by(0), by(2)}));
  }
}

TEST_P(TransportConformance, ExchangeBytesEndsAtTheDeadlineWithoutARank) {
  MakeWorld(3);
  ConnectAll();
  const auto statuses = OnAllRanks([&](int32_t rank) {
    if (rank == 1) return absl::OkStatus();
    return end(rank)
        .ExchangeBytes("", {}, {}, In(std::chrono::milliseconds(100)))
        .status();
  });
  for (const int32_t rank : {0, 2}) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_NE(statuses[rank].message().find(
                  "sharing: 1 of 3 ranks did not come before the deadline, the "
                  "first is rank 1"),
              std::string::npos)
        << statuses[rank];
  }
}

// Of transports that reach peers' memory.
class FenceConformance : public TransportConformance {};

// Rank 0 writes into rank 1's memory when rank 1 has said that it may; rank 1
// reads it when rank 0 has said that it did.
TEST_P(FenceConformance, FenceOrdersWritesIntoThePeersMemory) {
  MakeWorld(2);
  ConnectAll();
  int memory = 0;
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    if (absl::Status s = end(rank).BeginRefit(Ample(), false); !s.ok())
      return s;
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
  EXPECT_TRUE(AllOk(statuses));
}

// In each round every rank moves bytes at some peers, reading there and
// storing, while others do so here; 0 and 1 at each other.
TEST_P(FenceConformance, RankMayBeOriginToOnePeerAndTargetToAnother) {
  MakeWorld(3);
  ConnectAll();
  const std::vector<std::vector<int32_t>> targets = {{1}, {0, 2}, {0}};
  const std::vector<std::vector<int32_t>> origins = {{1, 2}, {0}, {1}};
  int written[3] = {};    // by its target
  int stored[3][3] = {};  // by target and origin
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    if (absl::Status s = end(rank).BeginRefit(Ample(), false); !s.ok())
      return s;
    Fence& fence = *end(rank).fence();
    for (int round = 1; round <= 1000; ++round) {
      written[rank] = round;
      absl::Status s = fence.Grant(origins[rank], nullptr);
      if (s.ok()) s = fence.AwaitGrants(targets[rank], nullptr);
      if (!s.ok()) return s;
      for (const int32_t target : targets[rank]) {
        if (written[target] != round) s = absl::DataLossError("read early");
        stored[target][rank] = round;
      }
      s.Update(fence.Finish(targets[rank], nullptr));
      s.Update(fence.AwaitFinishes(origins[rank], nullptr));
      for (const int32_t origin : origins[rank]) {
        if (stored[rank][origin] != round)
          s = absl::DataLossError("stored late");
      }
      if (!s.ok()) return s;
    }
    return Finish(rank);
  });
  EXPECT_TRUE(AllOk(statuses));
}

// Under one grant rank 0 reports three times what it has written, and goes on.
TEST_P(FenceConformance, AnOriginReportsWhatItHasMovedSoFar) {
  MakeWorld(2);
  ConnectAll();
  int memory[3] = {};
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    if (absl::Status s = end(rank).BeginRefit(Ample(), false); !s.ok())
      return s;
    Fence& fence = *end(rank).fence();
    const int32_t peer = 1 - rank;
    for (int round = 1; round <= 300; ++round) {
      absl::Status s = rank == 1 ? fence.Grant({&peer, 1}, nullptr)
                                 : fence.AwaitGrants({&peer, 1}, nullptr);
      for (int part = 0; part < 3 && s.ok(); ++part) {
        if (rank == 0) memory[part] = round;
        s = rank == 0 ? fence.Progress({&peer, 1}, nullptr)
                      : fence.AwaitFinishes({&peer, 1}, nullptr);
        if (s.ok() && rank == 1 && memory[part] != round) {
          return absl::DataLossError("too early");
        }
      }
      if (!s.ok()) return s;
      s = rank == 0 ? fence.Finish({&peer, 1}, nullptr)
                    : fence.AwaitFinishes({&peer, 1}, nullptr);
      if (!s.ok()) return s;
    }
    return Finish(rank);
  });
  EXPECT_TRUE(AllOk(statuses));
}

TEST_P(FenceConformance, AwaitNamesThePeerThatDoesNotGrant) {
  MakeWorld(3);
  ConnectAll();
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    absl::Status s = end(rank).BeginRefit(
        rank == 0 ? In(std::chrono::milliseconds(100)) : Ample(), false);
    const std::vector<int32_t> peers = {1, 2}, zero = {0};
    if (s.ok() && rank == 1) s = end(rank).fence()->Grant(zero, nullptr);
    if (s.ok() && rank == 0) s = end(rank).fence()->AwaitGrants(peers, nullptr);
    return s.ok() ? Finish(rank) : s;
  });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(statuses[0].message().find("rank 2 did not"), std::string::npos)
      << statuses[0];
}

TEST_P(FenceConformance, AbortEndsTheAwaitsOfTheFence) {
  MakeWorld(3);
  ConnectAll();
  std::latch begun(2);
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    if (absl::Status s = end(rank).BeginRefit(Ample(), false); !s.ok())
      return s;
    const int32_t two = 2;
    if (rank == 2) {
      begun.wait();
      end(rank).Abort(absl::InternalError("out of luck"));
      return absl::InternalError("out of luck");
    }
    begun.count_down();
    Fence& fence = *end(rank).fence();
    return rank == 0 ? fence.AwaitGrants({&two, 1}, nullptr)
                     : fence.AwaitFinishes({&two, 1}, nullptr);
  });
  for (const int32_t rank : {0, 1}) {
    EXPECT_EQ(statuses[rank].code(), absl::StatusCode::kAborted);
    EXPECT_NE(statuses[rank].message().find("aborted by rank 2: out of luck"),
              std::string::npos)
        << statuses[rank];
  }
  ConnectAll();
  EXPECT_TRUE(AllOk(RingRefit(1, 2)));
}

// Rank 0 stores into rank 1's memory while rank 2 fails.
TEST_P(FenceConformance, NobodyStoresAfterAnAwaitHasFailed) {
  for (int attempt = 0; attempt < 20; ++attempt) {
    MakeWorld(3);
    ConnectAll();
    std::latch granted(2);
    std::atomic<bool> storing = false, stored_late = false;
    OnAllRanks([&](int32_t rank) -> absl::Status {
      if (absl::Status s = end(rank).BeginRefit(Ample(), false); !s.ok())
        return s;
      Fence& fence = *end(rank).fence();
      const std::vector<int32_t> zero = {0}, one = {1};
      if (rank == 2) {
        granted.arrive_and_wait();
        end(rank).Abort(absl::InternalError("on purpose"));
        return absl::InternalError("on purpose");
      }
      if (rank == 1) {
        if (absl::Status s = fence.Grant(zero, nullptr); !s.ok()) return s;
        const absl::Status status = fence.AwaitFinishes(zero, nullptr);
        if (storing) stored_late = true;
        return status.ok() ? Finish(rank) : status;
      }
      if (absl::Status s = fence.AwaitGrants(one, nullptr); !s.ok()) return s;
      storing = true;
      granted.count_down();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      storing = false;
      const absl::Status s = fence.Finish(one, nullptr);
      return s.ok() ? Finish(rank) : s;
    });
    EXPECT_FALSE(stored_late);
  }
}

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_TRANSPORT_CONFORMANCE_H_
