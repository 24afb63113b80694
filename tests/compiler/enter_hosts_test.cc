// How what ranks of a host want enters it, and what they deal out of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/ir/module.h"
#include "compiler/passes/flows.h"
#include "plan/network_peers.h"
#include "plan/plan_file.h"
#include "tests/compiler/compile_testing.h"

namespace refit {
namespace {

// Eight sources with rows, on two hosts, feed eight ranks, on two others.
std::string HostsJob(const std::string& placement,
                     const std::string& options = "") {
  return GenericJob(
      R"({"name": "w", "shape": [512, 512], "dtype": "bf16"})",
      GenericSide(8, "Shard(0)"), GenericSide(8, placement),
      R"(, "topology": {"peer_gigabytes_per_second": 0.1, )"
      R"("network_gigabytes_per_second": 0.01, )"
      R"("hosts": [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]}, "options": {)" +
          options + "}");
}
constexpr uint64_t kHostBytes = 512 * 512 * 2;

bool Deals(const PlanFile& plan) {
  return (plan.plan().required_features() & kFeatureDealing) != 0;
}

// By rank: what it sends over the network, and receives.
struct NetworkBytes {
  std::vector<uint64_t> sent, received;
};
NetworkBytes NetworkBytesOf(const PlanFile& plan) {
  NetworkBytes bytes;
  for (const fb::RankProgram* program : *plan.body().programs()) {
    uint64_t& sent = bytes.sent.emplace_back(0);
    uint64_t& received = bytes.received.emplace_back(0);
    for (const fb::Message* message : plan.messages().Of(*program)) {
      const bool sends = message->kind() == fb::MessageKind::kSend;
      if (plan.body().rounds()->Get(message->round())->route() !=
          fb::Route::kNetwork) {
        continue;
      }
      // What is dealt out travels inside a host in a round of the network.
      if (sends && IsHeld(plan.body(), *message)) continue;
      (sends ? sent : received) += message->size_bytes();
    }
  }
  return bytes;
}

TEST(EnterHostsTest, AHostIsSentOnceWhatItsRanksWant) {
  const PlanFile plan = OpenJob(HostsJob("Replicate"));
  EXPECT_TRUE(Deals(plan));
  const fb::Stats& stats = *plan.body().stats();
  EXPECT_EQ(stats.network_bytes(), 2 * kHostBytes);
  EXPECT_EQ(stats.peer_bytes(), 6 * kHostBytes);
  EXPECT_EQ(stats.relayed_bytes(), stats.peer_bytes());
  const NetworkBytes bytes = NetworkBytesOf(plan);
  for (size_t source = 0; source < 8; ++source) {
    EXPECT_EQ(bytes.sent[source], kHostBytes / 4) << source;
  }
  // A source feeds one rank of each host, and two sources feed a rank.
  EXPECT_EQ(NetworkPeers(plan.body()), std::vector<uint32_t>(16, 2));
}

// A rank holds for one round what it deals out, so that its receivers are in
// the round after that of the message to it.
TEST(EnterHostsTest, WhatComesInOneRoundLeavesInTheNext) {
  const PlanFile plan = OpenJob(HostsJob("Replicate"));
  int64_t held = 0;
  for (uint32_t rank = 8; rank < 16; ++rank) {
    const fb::RankProgram& program = *plan.body().programs()->Get(rank);
    const MessageVector& messages = plan.messages().Of(program);
    for (uint32_t i = 0; i < messages.size(); ++i) {
      const fb::Message& message = *messages.Get(i);
      if (message.kind() != fb::MessageKind::kSend) continue;
      ++held;
      EXPECT_TRUE(IsHeld(plan.body(), message));
      EXPECT_EQ(message.round(),
                FedBy(plan.messages(), program, i)->round() + 1);
    }
  }
  EXPECT_GT(held, 24);
}

TEST(EnterHostsTest, NothingIsDealtThatNeedNotBe) {
  EXPECT_FALSE(Deals(OpenJob(HostsJob("Shard(1)"))));
  EXPECT_FALSE(Deals(OpenJob(HostsJob("Replicate", R"("delta": true)"))));
}

// What has no room in staging, or too many receivers for a round, is stored
// when the network's rounds are over.
TEST(EnterHostsTest, WhatCannotBeDealtIsStoredAfterwards) {
  const PlanFile no_room = OpenJob(
      HostsJob("Replicate", R"("bucket_bytes": 4096, "staging_bytes": 8192)"));
  const PlanFile many_receivers =
      OpenJob(HostsJob("Replicate"),
              [](Limits& limits) { limits.operations_per_round = 3; });
  for (const PlanFile* plan : {&no_room, &many_receivers}) {
    EXPECT_FALSE(Deals(*plan));
    const fb::Body& body = plan->body();
    EXPECT_EQ(body.stats()->network_bytes(), 2 * kHostBytes);
    EXPECT_EQ(body.rounds()->Get(body.rounds()->size() - 1)->route(),
              fb::Route::kPeer);
  }
}

// Of four rows two ranks of a host want two each, and the third none: it
// receives a third for them.
TEST(EnterHostsTest, ARankThatWantsMoreThanItsPartHasNeighboursReceiveForIt) {
  const PlanFile plan = OpenJob(
      GenericJob(R"({"name": "w", "shape": [4, 65536], "dtype": "bf16"})",
                 GenericSide(4, "Shard(0)"), GenericSide(3, "Shard(0)"),
                 R"(, "topology": {"peer_gigabytes_per_second": 0.1, )"
                 R"("network_gigabytes_per_second": 0.01, )"
                 R"("hosts": [0, 0, 0, 0, 1, 1, 1]})"));
  EXPECT_TRUE(Deals(plan));
  constexpr double kAll = 4 * 65536 * 2;
  EXPECT_NEAR(static_cast<double>(plan.body().stats()->network_bytes()), kAll,
              1);
  EXPECT_NEAR(static_cast<double>(plan.body().stats()->peer_bytes()), kAll / 3,
              kAll / 50);
}

// A source sends a host all by way of one rank, or two.
TEST(EnterHostsTest, FewPeersAreEnoughWhereAJobAsksForThem) {
  const PlanFile many = OpenJob(HostsJob("Shard(1)"));
  EXPECT_EQ(NetworkPeers(many.body())[0], 8u);
  const PlanFile few = OpenJob(HostsJob("Shard(1)", R"("network_peers": 2)"));
  const std::vector<uint32_t> peers = NetworkPeers(few.body());
  EXPECT_EQ(*std::max_element(peers.begin(), peers.end()), 2u);
  // Over the network as much as before; three of four slices once more inside
  // the host.
  EXPECT_EQ(few.body().stats()->network_bytes(), kHostBytes);
  EXPECT_EQ(few.body().stats()->peer_bytes(), kHostBytes * 3 / 4);
  EXPECT_NE(ErrorsOf(HostsJob("Shard(1)", R"("network_peers": 1)"))
                .find("options.network_peers is 1, but rank 0 exchanges with 2 "
                      "ranks of other hosts; wanted at least 2, or meshes "
                      "whose ranks need fewer"),
            std::string::npos);
}

// Sixteen sources, of which two have nothing and the others two rows each, feed
// two replicas of eight ranks on other hosts: a source sends 16 / 14 of what a
// rank receives. Returns the bytes that ranks pass on.
uint64_t BytesPassedOn(int64_t columns) {
  const std::string rows = absl::StrCat(R"({"name": "w", "shape": [28, )",
                                        columns, R"(], "dtype": "bf16"})");
  const std::string replicas =
      R"x({"layout": "generic", "meshes": {"m": {"axes": {"dp": 2, "tp": 8}}},
      "tensors": [{"match": "*", "mesh": "m",
                   "placements": ["Replicate", "Shard(1)"]}]})x";
  const PlanFile plan =
      OpenJob(GenericJob(rows, GenericSide(16, "Shard(0)"), replicas,
                         R"(, "topology": {"gpus_per_host": 1})"));
  return plan.body().stats()->relayed_bytes();
}

TEST(LevelingTest, SourcesAreLeveledWhereBytesTakeTheirTime) {
  EXPECT_GT(BytesPassedOn(1 << 22), uint64_t{0});
  // Here messages take longer to start than on the wire.
  EXPECT_EQ(BytesPassedOn(1 << 15), uint64_t{0});
}

// Sets of ranks that contain each other, or have none in common, are divided so
// that no other division has a less busy busiest rank: the busiest set says how
// busy one must be.
TEST(LevelingTest, NobodyIsBusierThanTheBusiestSetMustBe) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<int64_t> loads(8);
    for (int64_t& load : loads) load = random() % 1000;
    const std::vector<int64_t> before = loads;
    std::map<Holders, int64_t> bytes_of;
    for (int32_t size = 1; size <= 8; size *= 2) {
      for (int32_t first = 0; first < 8; first += size) {
        if (random() % 3 == 0) continue;
        Holders set;
        for (int32_t i = 0; i < size; ++i) set.push_back(Rank{first + i});
        bytes_of[set] = 1 + random() % 5000;
      }
    }
    Leveling leveling(bytes_of, loads);
    // What is inside a set, for each of its ranks.
    int64_t least = *std::max_element(before.begin(), before.end());
    for (const auto& [set, unused] : bytes_of) {
      int64_t sum = 0;
      for (const Rank rank : set) sum += before[IndexOf(rank)];
      for (const auto& [inside, bytes] : bytes_of) {
        if (std::includes(set.begin(), set.end(), inside.begin(),
                          inside.end())) {
          sum += bytes;
        }
      }
      const int64_t ranks = std::ssize(set);
      least = std::max(least, (sum + ranks - 1) / ranks);
    }
    EXPECT_LE(*std::max_element(loads.begin(), loads.end()), least + 3);
    // All is taken, in parts.
    std::vector<int64_t> taken = before;
    for (const auto& [set, bytes] : bytes_of) {
      const int64_t first = bytes / 3;
      for (const int64_t part : {first, bytes - first}) {
        for (const RankBytes& of : leveling.Take(set, part)) {
          taken[IndexOf(of.rank)] += of.bytes;
        }
      }
    }
    EXPECT_EQ(taken, loads);
  }
}

// Four receivers are on one host of an NVLink domain and one on the other, so
// that this one receives more. Another receives for it what it is itself fed by
// its own host: it may not pass that on from its tensor.
TEST(EnterHostsTest, AProxyDoesNotKeepWhatItReceivesForAnother) {
  const std::string job = GenericJob(
      R"({"name": "w", "shape": [569, 128], "dtype": "bf16"})",
      GenericSide(7, "Shard(0)"), GenericSide(5, "Replicate"),
      R"(, "topology": {"hosts": [8, 8, 8, 8, 8, 8, 8, 0, 0, 0, 0, 1], )"
      R"("peer_gigabytes_per_second": 0.7, )"
      R"("network_gigabytes_per_second": 0.1, "hosts_per_nvlink_domain": 2}, )"
      R"("options": {"bucket_bytes": 4096, "staging_bytes": 97320})");
  EXPECT_EQ(ErrorsOf(job), "");
}

}  // namespace
}  // namespace refit
