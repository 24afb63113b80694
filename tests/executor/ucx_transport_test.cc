#include "refit/ucx_transport.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "executor/transport/ucx_worker.h"
#include "tests/executor/plan_builder.h"
#include "tests/executor/transport_conformance.h"
#include "tests/executor/ucx_world.h"

// UCX frees less than it takes, and a worker with a receive that never ends is
// left to it.
// AddressSanitizer, if there is one, asks this.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }
// Its thread still takes a lock that it destroys when the process ends.
extern "C" const char* __tsan_default_suppressions() {
  return "race:libucs.so\n";
}

namespace refit {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

TransportWorld MakeUcxWorld(int32_t world_size) {
  return {.shared = nullptr, .ends = UcxTransports(world_size)};
}

// UCX orders no direct rounds: their messages are sent.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FenceConformance);

INSTANTIATE_TEST_SUITE_P(Ucx, TransportConformance,
                         testing::Values(TransportFactory(MakeUcxWorld)));

// Messages of 8 MiB both ways between all ranks at once: UCX fetches them from
// the sender's memory instead of buffering them.
TEST(UcxTransportTest, LargeMessagesArriveWhole) {
  constexpr int32_t kRanks = 3;
  constexpr size_t kBytes = 8 << 20;
  auto ends = UcxTransports(kRanks);
  std::vector<absl::Status> statuses(kRanks);
  ASSERT_TRUE(RunRankThreads(kRanks, [&](int32_t rank) {
                Transport& end = *ends[rank];
                std::vector<Edge> edges;
                std::vector<std::vector<std::byte>> out(kRanks), in(kRanks);
                std::vector<Operation> operations;
                for (int32_t peer = 0; peer < kRanks; ++peer) {
                  if (peer == rank) continue;
                  out[peer].resize(kBytes);
                  in[peer].resize(kBytes);
                  for (size_t i = 0; i < kBytes; ++i) {
                    out[peer][i] = std::byte((i * 7 + rank * 31 + peer) % 251);
                  }
                  for (const auto kind :
                       {fb::MessageKind::kSend, fb::MessageKind::kRecv}) {
                    edges.push_back({.peer = peer, .kind = kind});
                  }
                  operations.push_back({.kind = fb::MessageKind::kSend,
                                        .peer = peer,
                                        .data = out[peer].data(),
                                        .size_bytes = kBytes});
                  operations.push_back({.kind = fb::MessageKind::kRecv,
                                        .peer = peer,
                                        .data = in[peer].data(),
                                        .size_bytes = kBytes});
                }
                const Deadline deadline = Clock::now() + seconds(60);
                absl::Status& status = statuses[rank];
                status = end.Connect({}, edges, deadline);
                for (uint32_t round = 0; status.ok() && round < 3; ++round) {
                  status = end.BeginRefit(deadline, false);
                  if (!status.ok()) return;
                  status = end.Exchange(
                      {.index = round, .operations = operations}, nullptr);
                  if (status.ok()) status = end.EndRefit(nullptr);
                }
                for (int32_t peer = 0; peer < kRanks; ++peer) {
                  size_t wrong = 0;
                  for (size_t i = 0; peer != rank && i < kBytes; ++i) {
                    wrong += in[peer][i] !=
                             std::byte((i * 7 + peer * 31 + rank) % 251);
                  }
                  EXPECT_EQ(wrong, 0);
                }
              }).ok());
  EXPECT_TRUE(AllOk(statuses));
}

// What NCCL leaves undefined is an error here.
TEST(UcxTransportTest, DifferentSizesAreNamed) {
  for (const size_t sent : {60, 68}) {
    auto ends = UcxTransports(2);
    std::vector<absl::Status> statuses(2);
    ASSERT_TRUE(RunRankThreads(2, [&](int32_t rank) {
                  std::vector<std::byte> bytes(rank == 0 ? sent : 64);
                  const auto kind = rank == 0 ? fb::MessageKind::kSend
                                              : fb::MessageKind::kRecv;
                  const Edge edge = {.peer = 1 - rank, .kind = kind};
                  const Operation operation = {.kind = kind,
                                               .peer = 1 - rank,
                                               .data = bytes.data(),
                                               .size_bytes = bytes.size()};
                  const Deadline deadline = Clock::now() + seconds(60);
                  absl::Status& status = statuses[rank];
                  status = ends[rank]->Connect({}, {&edge, 1}, deadline);
                  if (status.ok())
                    status = ends[rank]->BeginRefit(deadline, false);
                  if (!status.ok()) return;
                  status = ends[rank]->Exchange(
                      {.index = 5, .operations = {&operation, 1}}, nullptr);
                  if (status.ok()) status = ends[rank]->EndRefit(nullptr);
                }).ok());
    EXPECT_EQ(statuses[1].message(),
              std::string("round 5: recv of 64 bytes from rank 0: it meets a "
                          "send of ") +
                  (sent < 64 ? "60 bytes" : "more bytes"));
    EXPECT_FALSE(statuses[0].ok());
  }
}

// A rank that gives up a message, and one that hears of it late.
class UcxGivenUpTest : public testing::TestWithParam<const char*> {
 protected:
  static constexpr size_t kBytes = 16 << 20;  // more than UCX buffers
  static constexpr std::byte kSent{1};
  static constexpr std::byte kOfNext{2};

  // UCX reads the variable when it makes a context.
  UcxGivenUpTest() { setenv("UCX_RNDV_SCHEME", GetParam(), 1); }
  ~UcxGivenUpTest() override { unsetenv("UCX_RNDV_SCHEME"); }

  std::unique_ptr<UcxWorker> MakeWorker() {
    return *UcxWorker::Create(api_, 1);
  }
  // An epoch of both.
  void Meet(UcxWorker& sender, UcxWorker& receiver) {
    const std::string introductions[] = {*sender.Introduce(0, *wake_),
                                         *receiver.Introduce(1, *wake_)};
    ASSERT_TRUE(sender.Meet({1}, {introductions[1]}).ok());
    ASSERT_TRUE(receiver.Meet({0}, {introductions[0]}).ok());
  }
  static absl::Status Send(UcxWorker& worker, std::vector<std::byte>& bytes,
                           const Interruption& interruption) {
    return Exchange(worker, fb::MessageKind::kSend, 1, bytes, interruption);
  }
  static absl::Status Receive(UcxWorker& worker, std::vector<std::byte>& bytes,
                              const Interruption& interruption) {
    return Exchange(worker, fb::MessageKind::kRecv, 0, bytes, interruption);
  }

  const ucx::Api api_ = *ucx::Load();
  const std::unique_ptr<WakeSignal> wake_ = *WakeSignal::Create();

 private:
  static absl::Status Exchange(UcxWorker& worker, fb::MessageKind kind,
                               int32_t peer, std::vector<std::byte>& bytes,
                               const Interruption& interruption) {
    const Operation operation = {.kind = kind,
                                 .peer = peer,
                                 .data = bytes.data(),
                                 .size_bytes = bytes.size()};
    return worker
        .Exchange({&operation, 1}, Clock::now() + seconds(60), interruption)
        .status;
  }
};

INSTANTIATE_TEST_SUITE_P(Schemes, UcxGivenUpTest,
                         testing::Values("auto", "put_zcopy", "put_ppln"));

TEST_P(UcxGivenUpTest, NobodyWritesWhereAMessageWasToGo) {
  auto sender = MakeWorker();
  auto receiver = MakeWorker();
  Meet(*sender, *receiver);
  std::vector<std::byte> sent(kBytes, kSent), received(kBytes), touch(1),
      touched(1);
  std::promise<void> offered, given_up;
  std::atomic<bool> has_stood = false, is_over = false;
  // As a process that is stopped when it has offered its message, and goes on
  // when that is given up.
  std::thread sending([&] {
    ASSERT_TRUE(Send(*sender, touch, [] { return absl::OkStatus(); }).ok());
    (void)Send(*sender, sent, [&] {
      if (!has_stood.exchange(true)) {
        offered.set_value();
        given_up.get_future().wait();
      }
      return is_over ? absl::CancelledError("over") : absl::OkStatus();
    });
  });
  ASSERT_TRUE(
      Receive(*receiver, touched, [] { return absl::OkStatus(); }).ok());
  offered.get_future().wait();
  (void)Receive(*receiver, received,
                [] { return absl::CancelledError("gone"); });
  receiver.reset();
  std::fill(received.begin(), received.end(), kOfNext);
  given_up.set_value();
  // Time enough for the whole message.
  std::this_thread::sleep_for(milliseconds(300));
  is_over = true;
  wake_->Set();
  sending.join();
  EXPECT_EQ(std::count(received.begin(), received.end(), kOfNext), kBytes);
}

// A message of an epoch that is over does not meet a receive of the next one,
// although rank, peer and number are the same.
TEST_P(UcxGivenUpTest, AMessageOfAnEarlierEpochIsDropped) {
  const auto go_on = [] { return absl::OkStatus(); };
  for (const size_t size_bytes : {size_t{64}, kBytes}) {
    auto sender = MakeWorker();
    auto receiver = MakeWorker();
    std::vector<std::byte> stale(size_bytes, kSent), next(size_bytes, kOfNext),
        received(size_bytes);
    for (int epoch = 0; epoch < 3; ++epoch) {
      Meet(*sender, *receiver);
      ASSERT_FALSE(Send(*sender, stale, [] {
                     return absl::CancelledError("gone");
                   }).ok());
      EXPECT_TRUE(sender->End());
      EXPECT_TRUE(receiver->End());
    }
    // The first ends a connection that one end closed, the second keeps it.
    for (int epoch = 0; epoch < 2; ++epoch) {
      Meet(*sender, *receiver);
      std::thread sending(
          [&] { EXPECT_TRUE(Send(*sender, next, go_on).ok()); });
      EXPECT_TRUE(Receive(*receiver, received, go_on).ok());
      sending.join();
      EXPECT_EQ(received, next);
    }
  }
}

// Plans of every kind, on ranks that can reach nothing of each other's memory.
TEST(UcxRefitTest, EveryElementOfEveryKindOfPlanIsRight) {
  RelayOptions relays;
  // A message of 3 MiB is sent in parts.
  const ReshardOptions large = {.layers = 2,
                                .rows = 2048,
                                .columns = 3072,
                                .padding = 7,
                                .mechanism = fb::Mechanism::kDirect};
  for (const PlanBuilder& builder : {ReshardPlan({.source_ranks = 2,
                                    .destination_ranks = 3,
                                    .layers = 3,
                                    .rows = 12,
                                    .columns = 30}),
                                     ReshardPlan({.source_ranks = 2,
                                     .destination_ranks = 3,
                                     .layers = 3,
                                     .rows = 12,
                                     .columns = 30,
                                     .mechanism = fb::Mechanism::kDirect}),
                                     ReshardPlan({.source_dtype = DType::kFp32,
                                     .mechanism = fb::Mechanism::kDirect}),
                                     RelayPlan(relays), ReshardPlan(large)}) {
    const PlanFile plan = builder.Open();
    UcxWorld world(plan);
    world.Bind();
    for (int refit = 0; refit < 2; ++refit) {
      world.ExpectEveryElementRight(plan);
    }
    // A rank may bind again alone, since nobody has mapped its tensors.
    ASSERT_TRUE(world.executor(0).Bind(world.tensors[0]).ok());
    world.ExpectEveryElementRight(plan);
  }
}

TEST(UcxRefitTest, CountersTellThatDirectMessagesWereSent) {
  const PlanFile plan =
      ReshardPlan({.layers = 3, .mechanism = fb::Mechanism::kDirect}).Open();
  UcxWorld world(plan);
  world.Bind();
  world.ExpectEveryElementRight(plan);
  const RunCounters& counters = world.executor(0).counters();
  EXPECT_EQ(counters.by(fb::Route::kPeer, fb::Mechanism::kDirect).bytes_sent,
            0);
  EXPECT_EQ(counters.by(fb::Route::kPeer, fb::Mechanism::kStaged).bytes_sent,
            6 * 32);
}

// Refits that fail: all ranks hear of it, and refits are refused until all
// ranks have connected.
TEST(UcxRefitTest, ARankThatRefusesOrClosesEndsTheOthersAtOnce) {
  const PlanFile plan =
      ReshardPlan({.source_ranks = 2, .destination_ranks = 3}).Open();
  UcxWorld world(plan);
  world.Bind();
  const std::vector<const void*> moved(world.tensors[4].size());
  auto statuses = world.OnAllRanks([&](int32_t rank) {
    RunOptions options;
    if (rank == 4) options.addresses = moved;
    return world.Refit(rank, options);
  });
  EXPECT_EQ(statuses[4].message(), "rank 4: a tensor moved since Bind");
  statuses.pop_back();
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::StrContains(
        status.message(), "aborted by rank 4: a tensor moved since Bind"))
        << status;
  }
  for (const absl::Status& status : world.RefitAll()) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  }
  ASSERT_TRUE(AllOk(world.ConnectAll()));
  world.ExpectEveryElementRight(plan);
  statuses = world.OnAllRanks([&](int32_t rank) {
    if (rank != 4) return world.Refit(rank, {});
    world.CloseRank(rank);
    return absl::UnavailableError("rank 4 has closed its control plane");
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_TRUE(absl::StrContains(status.message(),
                                  "rank 4 has closed its control plane"))
        << status;
  }
}

}  // namespace
}  // namespace refit
