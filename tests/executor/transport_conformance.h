// What every Transport must do. A test file instantiates the suite with a
// factory that makes connected-to-be ends of a new world.
#ifndef REFIT_TESTS_EXECUTOR_TRANSPORT_CONFORMANCE_H_
#define REFIT_TESTS_EXECUTOR_TRANSPORT_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "refit/transport.h"
#include "runner/rank_threads.h"

namespace refit {

// The ends of one world. `device` is where the operations' memory must be.
struct TransportWorld {
  std::vector<std::unique_ptr<Transport>> ends;  // by rank
  std::shared_ptr<void> shared;                  // outlives the ends
};
using TransportFactory = std::function<TransportWorld(int32_t world_size)>;

class TransportConformance : public testing::TestWithParam<TransportFactory> {
 protected:
  static Deadline In(std::chrono::milliseconds time) {
    return std::chrono::steady_clock::now() + time;
  }
  static Deadline Ample() { return In(std::chrono::minutes(1)); }

  void MakeWorld(int32_t size) { world_ = GetParam()(size); }

  Transport& end(int32_t rank) { return *world_.ends[rank]; }

  // `body(rank)` on a thread per rank; its statuses by rank.
  std::vector<absl::Status> OnAllRanks(
      const std::function<absl::Status(int32_t)>& body) {
    std::vector<absl::Status> statuses(world_.ends.size());
    EXPECT_TRUE(
        RunRankThreads(static_cast<int32_t>(statuses.size()), [&](int32_t r) {
          statuses[r] = body(r);
        }).ok());
    return statuses;
  }

  void ConnectAll() {
    for (const absl::Status& status : OnAllRanks([&](int32_t rank) {
           return end(rank).Connect({}, {}, Ample());
         })) {
      ASSERT_TRUE(status.ok()) << status;
    }
  }

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

TEST_P(TransportConformance, EveryPairExchangesInEveryRound) {
  constexpr int32_t kRanks = 5;
  constexpr uint32_t kRounds = 20;
  MakeWorld(kRanks);
  ConnectAll();
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    if (absl::Status s = end(rank).BeginRefit(Ample()); !s.ok()) return s;
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
      absl::Status s =
          end(rank).Exchange({round, fb::Route::kPeer, operations}, nullptr);
      if (!s.ok()) return s;
      for (int32_t peer = 0; peer < kRanks; ++peer) {
        if (peer == rank) continue;
        if (in[peer] != Filled(100 + peer, 10 * peer + rank + round)) {
          return absl::InternalError("wrong bytes");
        }
      }
    }
    return end(rank).EndRefit(nullptr);
  });
  for (const absl::Status& status : statuses)
    EXPECT_TRUE(status.ok()) << status;
}

TEST_P(TransportConformance, OperationsToOnePeerMatchInIssueOrder) {
  MakeWorld(2);
  ConnectAll();
  auto first = Filled(8, 1), second = Filled(8, 2);
  auto first_in = Filled(8, 0), second_in = Filled(8, 0);
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    if (absl::Status s = end(rank).BeginRefit(Ample()); !s.ok()) return s;
    std::vector<Operation> operations;
    if (rank == 0) {
      operations = {Send(1, first), Send(1, second)};
    } else {
      operations = {Recv(0, first_in), Recv(0, second_in)};
    }
    absl::Status s =
        end(rank).Exchange({0, fb::Route::kPeer, operations}, nullptr);
    return s.ok() ? end(rank).EndRefit(nullptr) : s;
  });
  for (const absl::Status& status : statuses)
    EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(first_in, first);
  EXPECT_EQ(second_in, second);
}

TEST_P(TransportConformance, ReceiveWithoutSenderEndsAtTheDeadline) {
  MakeWorld(2);
  ConnectAll();
  auto bytes = Filled(64, 0);
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    absl::Status s = end(rank).BeginRefit(In(std::chrono::milliseconds(100)));
    if (!s.ok()) return s;
    if (rank == 1) {
      const std::vector<Operation> operations = {Recv(0, bytes)};
      s = end(rank).Exchange({3, fb::Route::kPeer, operations}, nullptr);
      if (!s.ok()) return s;
    }
    return end(rank).EndRefit(nullptr);
  });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_P(TransportConformance, AbortWakesEveryRankAndNamesWhereItWas) {
  MakeWorld(3);
  ConnectAll();
  auto bytes = Filled(64, 0), out = Filled(32, 0);
  const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
    if (absl::Status s = end(rank).BeginRefit(Ample()); !s.ok()) return s;
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      end(rank).Abort(absl::InternalError("out of luck"));
      return absl::InternalError("out of luck");
    }
    const std::vector<Operation> operations = {rank == 1 ? Recv(0, bytes)
                                                         : Send(0, out)};
    return end(rank).Exchange({4, fb::Route::kPeer, operations}, nullptr);
  });
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kAborted);
  EXPECT_EQ(statuses[1].message(),
            "round 4: recv of 64 bytes from rank 0: aborted by rank 0: out of "
            "luck");
  EXPECT_EQ(statuses[2].message(),
            "round 4: send of 32 bytes to rank 0: aborted by rank 0: out of "
            "luck");
}

TEST_P(TransportConformance, RefitAfterAnAbortStartsAfresh) {
  constexpr int32_t kRanks = 4;
  MakeWorld(kRanks);
  ConnectAll();
  for (int attempt = 0; attempt < 20; ++attempt) {
    const bool fails = attempt % 2 == 0;
    const auto statuses = OnAllRanks([&](int32_t rank) -> absl::Status {
      if (absl::Status s = end(rank).BeginRefit(Ample()); !s.ok()) return s;
      for (uint32_t round = 0; round < 5; ++round) {
        if (fails && rank == attempt % kRanks && round == 3) {
          end(rank).Abort(absl::InternalError("on purpose"));
          return absl::InternalError("on purpose");
        }
        auto out = Filled(50, attempt + round), in = Filled(50, 0xff);
        const std::vector<Operation> operations = {
            Recv((rank + kRanks - 1) % kRanks, in),
            Send((rank + 1) % kRanks, out)};
        absl::Status s =
            end(rank).Exchange({round, fb::Route::kPeer, operations}, nullptr);
        if (!s.ok()) return s;
        if (in != Filled(50, attempt + round)) {
          return absl::DataLossError("bytes of another refit");
        }
      }
      return end(rank).EndRefit(nullptr);
    });
    for (const absl::Status& status : statuses) {
      EXPECT_EQ(status.ok(), !fails) << status;
      EXPECT_NE(status.code(), absl::StatusCode::kDataLoss);
    }
  }
}

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_TRANSPORT_CONFORMANCE_H_
