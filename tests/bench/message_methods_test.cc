// The ways to send a plan's messages, over the fake libnccl. Its one-sided
// sends are those below: what the calling thread puts is there at once, and
// counted as NCCL counts.
#include "bench/message_methods.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/staged_messages.h"
#include "refit/host_device.h"
#include "runner/world_rank.h"
#include "tests/bench/method_runs.h"
#include "tests/executor/fake_nccl/fake_nccl.h"
#include "tests/executor/nccl_world.h"

namespace refit {
namespace {

constexpr int kRanksMax = 8;
constexpr uint64_t kSlots = 2;  // of all plans here

struct OneSided {
  // By sender and receiver: how many rounds must be ready for each put of a
  // run, and how many there are in a run.
  std::vector<uint64_t> needed[kRanksMax][kRanksMax];
  uint64_t rounds[kRanksMax][kRanksMax] = {};
  std::atomic<uint64_t> puts[kRanksMax][kRanksMax] = {};
  std::atomic<uint64_t> ready[kRanksMax][kRanksMax] = {};
  std::atomic<uint64_t> early_puts = 0;
  // Receivers that gave away what they still waited for.
  std::atomic<uint64_t> early_signals = 0;
  std::atomic<std::byte*> windows[kRanksMax] = {};
  std::atomic<uint64_t> signals[kRanksMax][kRanksMax] = {};  // from, to
  uint64_t awaited[kRanksMax][kRanksMax] = {};
  // Ranks that made their first call, for which all wait.
  std::atomic<int> joined = 0;
  bool has_joined[kRanksMax] = {};
  int ranks = 0;
  std::atomic<bool> corrupts = false;
  std::atomic<bool> is_stuck = false;
};
OneSided* one_sided = nullptr;
thread_local int own_rank = 0;

nccl::Window WindowNumber() { return reinterpret_cast<nccl::Window>(1); }

// Whether `done` came true in time.
bool Await(const std::function<bool()>& done) {
  const auto limit =
      std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!done()) {
    if (std::chrono::steady_clock::now() > limit) {
      one_sided->is_stuck = true;
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

// NCCL prepares one-sided sends on all ranks together.
bool Join() {
  if (std::exchange(one_sided->has_joined[own_rank], true)) return true;
  ++one_sided->joined;
  return Await([] { return one_sided->joined == one_sided->ranks; });
}

nccl::WindowApi FakeWindows() {
  nccl::WindowApi api;
  api.MemAlloc = [](void** data, size_t size) {
    *data = std::malloc(size);
    return nccl::kSuccess;
  };
  api.MemFree = [](void* data) {
    std::free(data);
    return nccl::kSuccess;
  };
  api.CommWindowRegister = [](nccl::Comm, void* data, size_t,
                              nccl::Window* window, int flags) {
    EXPECT_EQ(flags, 1);
    one_sided->windows[own_rank] = static_cast<std::byte*>(data);
    *window = WindowNumber();
    return nccl::kSuccess;
  };
  api.CommWindowDeregister = [](nccl::Comm, nccl::Window) {
    return nccl::kSuccess;
  };
  api.PutSignal = [](const void* data, size_t count, nccl::DataType, int peer,
                     nccl::Window, size_t offset, int, int, unsigned int,
                     nccl::Comm, nccl::CudaStream) {
    const std::vector<uint64_t>& needed = one_sided->needed[own_rank][peer];
    const uint64_t put = one_sided->puts[own_rank][peer];
    if (one_sided->ready[peer][own_rank] <
        put / needed.size() * one_sided->rounds[own_rank][peer] +
            needed[put % needed.size()]) {
      ++one_sided->early_puts;
    }
    std::byte* const to = one_sided->windows[peer] + offset;
    std::memcpy(to, data, count);
    if (one_sided->corrupts) to[count - 1] ^= std::byte{1};
    ++one_sided->puts[own_rank][peer];
    ++one_sided->signals[own_rank][peer];
    return nccl::kSuccess;
  };
  api.Signal = [](int peer, int, int, unsigned int, nccl::Comm,
                  nccl::CudaStream) {
    if (!Join()) return nccl::kInternalError;
    if (peer == own_rank) {
      ++one_sided->signals[own_rank][peer];
      return nccl::kSuccess;
    }
    // The round that had the same staging is over.
    const std::vector<uint64_t>& needed = one_sided->needed[peer][own_rank];
    const uint64_t rounds = one_sided->rounds[peer][own_rank];
    const uint64_t round = one_sided->ready[own_rank][peer] % rounds + 1;
    const uint64_t over =
        one_sided->ready[own_rank][peer] / rounds * needed.size() +
        static_cast<uint64_t>(
            std::count_if(needed.begin(), needed.end(),
                          [&](uint64_t of) { return of + kSlots <= round; }));
    if (one_sided->puts[peer][own_rank] < over) ++one_sided->early_signals;
    ++one_sided->ready[own_rank][peer];
    ++one_sided->signals[own_rank][peer];
    return nccl::kSuccess;
  };
  api.WaitSignal = [](int count, nccl::AwaitedSignals* awaited, nccl::Comm,
                      nccl::CudaStream) {
    if (!Join()) return nccl::kInternalError;
    for (int i = 0; i < count; ++i) {
      uint64_t& wanted = one_sided->awaited[awaited[i].peer][own_rank];
      wanted += static_cast<uint64_t>(awaited[i].count);
      const std::atomic<uint64_t>& signals =
          one_sided->signals[awaited[i].peer][own_rank];
      if (!Await([&] { return signals >= wanted; })) {
        return nccl::kInternalError;
      }
    }
    return nccl::kSuccess;
  };
  return api;
}

class MessageMethodsTest : public testing::Test {
 protected:
  MessageMethodsTest() { fake_nccl_reset(); }

  // Runs the way three times on all ranks; the bytes that are wrong then.
  uint64_t WrongBytes(const PlanFile& plan, const MessageOptions& options) {
    one_sided_ = std::make_unique<OneSided>();
    one_sided_->corrupts = corrupts_;
    one_sided_->ranks = plan.world_size();
    one_sided = one_sided_.get();
    HostDevice device;
    std::vector<uint32_t> hosts;
    for (const fb::RankProgram* program : *plan.body().programs()) {
      hosts.push_back(program->host());
    }
    const std::vector<std::unique_ptr<Transport>> ends =
        MakeNcclTransports(device, hosts);
    const absl::StatusOr<nccl::Api> api = nccl::Load();
    EXPECT_TRUE(api.ok()) << api.status();
    const nccl::WindowApi windows = FakeWindows();
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      for (const auto& round : StagedRounds(plan, rank)) {
        std::set<int32_t> peers;
        for (const StagedMessage& message : round) {
          if (!message.is_send) continue;
          uint64_t& rounds = one_sided_->rounds[rank][message.peer];
          if (peers.insert(message.peer).second) ++rounds;
          one_sided_->needed[rank][message.peer].push_back(rounds);
        }
      }
    }
    const std::vector<int32_t> everyone = AllRanks(plan);
    const MethodBytes bytes = RunMethod(
        plan, {.times = 3,
               .on_thread = [](int32_t rank) { own_rank = rank; },
               .make =
                   [&](int32_t rank) {
                     return MakeMessageMethod(plan, *ends[rank], device, *api,
                                              windows, options);
                   },
               // Nobody's memory goes while others put into it.
               .at_end =
                   [&](int32_t rank) {
                     return ends[rank]
                         ->ExchangeBytes("", everyone, everyone,
                                         std::chrono::steady_clock::now() +
                                             std::chrono::seconds(30))
                         .status();
                   }});
    sent_bytes_ += bytes.sent;
    EXPECT_FALSE(one_sided_->is_stuck);
    EXPECT_EQ(one_sided_->early_puts, 0u);
    EXPECT_EQ(one_sided_->early_signals, 0u);
    return bytes.wrong;
  }

  std::unique_ptr<OneSided> one_sided_;
  bool corrupts_ = false;
  uint64_t sent_bytes_ = 0;
};

constexpr char kSmallRounds[] =
    R"("peer": "staged", "bucket_bytes": 32768, "staging_bytes": 131072)";

constexpr MessageWay kWays[] = {MessageWay::kSendRecv, MessageWay::kRegistered,
                                MessageWay::kPutSignal};

TEST_F(MessageMethodsTest, EveryWayDeliversAllMessages) {
  const PlanFile plan = CompiledPlan(ReshardJob(2, 2, kSmallRounds));
  EXPECT_GT(StagedRounds(plan, 0).size(), 2u);
  for (const MessageWay way : kWays) {
    sent_bytes_ = 0;
    EXPECT_EQ(WrongBytes(plan, {.way = way}), 0u) << static_cast<int>(way);
    uint64_t planned = 0;
    for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
      for (const auto& round : StagedRounds(plan, rank)) {
        for (const StagedMessage& message : round) {
          if (message.is_send) planned += message.size_bytes;
        }
      }
    }
    EXPECT_EQ(sent_bytes_, planned);
  }
}

// Receivers that relay send to each other: a pair's signals have one counter.
TEST_F(MessageMethodsTest, PairsThatSendBothWays) {
  const PlanFile plan = CompiledPlan(
      R"({"model": {"parameters": [
            {"name": "w", "shape": [4096, 512], "dtype": "bf16"}]},
          "source": {"layout": "fsdp", "data_parallel": 1},
          "destination": {"layout": "generic",
            "meshes": {"m": {"axes": {"x": 3}}}, "tensors": [{"match": "*",
            "mesh": "m", "placements": ["Replicate"]}]},
          "topology": {"peer_gigabytes_per_second": 1},
          "options": {"peer": "staged", "bucket_bytes": 65536,
                      "staging_bytes": 1048576}})");
  bool both_ways = false;
  for (const auto& round : StagedRounds(plan, 1)) {
    for (const StagedMessage& message : round) both_ways |= message.is_send;
  }
  ASSERT_TRUE(both_ways) << "the plan does not relay";
  for (const MessageWay way : kWays) {
    EXPECT_EQ(WrongBytes(plan, {.way = way}), 0u) << static_cast<int>(way);
  }
}

TEST_F(MessageMethodsTest, RanksWithoutMessagesTakePart) {
  const PlanFile plan = CompiledPlan(
      R"({"model": {"parameters": [
            {"name": "w", "shape": [1], "dtype": "bf16"}]},
          "source": {"layout": "generic", "meshes": {"m": {"axes": {"x": 2}}},
            "tensors": [{"match": "*", "mesh": "m",
                         "placements": ["Replicate"]}]},
          "destination": {"layout": "fsdp", "data_parallel": 1},
          "options": {"peer": "staged"}})");
  ASSERT_TRUE(StagedRounds(plan, 0).empty() != StagedRounds(plan, 1).empty());
  EXPECT_EQ(WrongBytes(plan, {.way = MessageWay::kPutSignal}), 0u);
}

TEST_F(MessageMethodsTest, CountsWrongBytes) {
  corrupts_ = true;
  const PlanFile plan = CompiledPlan(ReshardJob(1, 1, kSmallRounds));
  EXPECT_GT(WrongBytes(plan, {.way = MessageWay::kPutSignal}), 0u);
}

}  // namespace
}  // namespace refit
