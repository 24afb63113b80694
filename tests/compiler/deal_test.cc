// The pass that has one rank of a host receive for all of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "compiler/ir/module.h"
#include "compiler/simulated_seconds.h"
#include "plan/network_peers.h"
#include "plan/plan_file.h"
#include "tests/compiler/compile_testing.h"

namespace refit {
namespace {

// Four sources with rows, on two hosts, feed eight ranks with columns, on two
// others.
std::string DealtJob(const std::string& deal, const std::string& more = "") {
  return GenericJob(
      R"({"name": "w", "shape": [512, 512], "dtype": "bf16"})",
      GenericSide(4, "Shard(0)"), GenericSide(8, "Shard(1)"),
      R"(, "topology": {"hosts": [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]},
           "options": {"deal": ")" +
          deal + "\"" + more + "}");
}

// Links so slow that half a megabyte takes longer than messages take to start.
std::string SlowSpeeds() {
  return R"("peer_gigabytes_per_second": 0.1, )"
         R"("network_gigabytes_per_second": 0.01, )";
}

TEST(DealTest, ASourceHasOnePeerOnEachHost) {
  const std::vector<uint32_t> never =
      NetworkPeers(OpenJob(DealtJob("never")).body());
  const PlanFile plan = OpenJob(DealtJob("always"));
  const std::vector<uint32_t> always = NetworkPeers(plan.body());
  for (int32_t source = 0; source < 4; ++source) {
    EXPECT_EQ(never[source], 8u);
    EXPECT_EQ(always[source], 2u);
  }
  // Two sources share a rail; the second of them takes a rank that has nothing
  // yet.
  EXPECT_EQ(*std::max_element(always.begin() + 4, always.end()), 1u);
  EXPECT_EQ(*std::max_element(never.begin() + 4, never.end()), 4u);
  // Over the network as much as before; three of four slices once more inside
  // the host.
  const fb::Stats& stats = *plan.body().stats();
  EXPECT_EQ(stats.network_bytes(), 512u * 512 * 2);
  EXPECT_EQ(stats.peer_bytes(), 512u * 512 * 2 * 3 / 4);
  EXPECT_EQ(stats.relayed_bytes(), stats.peer_bytes());
}

TEST(DealTest, WhatAllRanksOfAHostWantIsSentToItOnce) {
  const std::string job =
      absl::StrReplaceAll(DealtJob("always"), {{"Shard(1)", "Replicate"}});
  const PlanFile plan = OpenJob(job);
  const fb::Stats& stats = *plan.body().stats();
  EXPECT_EQ(stats.network_bytes(), 2u * 512 * 512 * 2);
  EXPECT_EQ(stats.peer_bytes(), 6u * 512 * 512 * 2);
}

// A rank holds for one round what it deals out, so that its receivers are in
// the round after that of the message to it.
TEST(DealTest, WhatComesInOneRoundLeavesInTheNext) {
  const PlanFile plan = OpenJob(DealtJob("always", R"(, "bucket_bytes": 4096,
                                                    "staging_bytes": 16384)"));
  int64_t held = 0;
  for (uint32_t rank = 4; rank < 12; ++rank) {
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

// All of a host's ranks are fed in one round.
TEST(DealTest, AHostOfMoreRanksThanARoundHasOperationsIsNotDealt) {
  const std::string few = R"(, "operations_per_round": 2)";
  EXPECT_EQ(OpenJob(DealtJob("always", few)).bytes().size(),
            OpenJob(DealtJob("never", few)).bytes().size());
}

TEST(DealTest, DeltasAreRefused) {
  EXPECT_NE(ErrorsOf(DealtJob("always", R"(, "delta": true)"))
                .find("options.deal is \"always\" beside options.delta: a rank "
                      "that deals out does not know what changed; wanted "
                      "\"never\", or no delta"),
            std::string::npos);
}

TEST(DealTest, StagingHoldsARoundMore) {
  const std::string job = DealtJob("always", R"(, "bucket_bytes": 4096,
                                               "staging_bytes": 8192)");
  EXPECT_NE(ErrorsOf(job).find("options.staging_bytes 8192 is too small; "
                               "wanted at least 12288 (slots 2 + 1 to deal x "
                               "bucket_bytes 4096)"),
            std::string::npos);
}

// One rank of each host receives: nobody deals out.
TEST(DealTest, StagingHoldsNoRoundMoreWhereNothingIsDealt) {
  const std::string tight = R"(, "bucket_bytes": 4096, "staging_bytes": 8192)";
  const std::string job = absl::StrReplaceAll(
      DealtJob("always", tight), {{"[0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]",
                                   "[0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9]"}});
  EXPECT_EQ(OpenJob(job).plan().required_features() & kFeatureDealing, 0u);
  // Not even `slots` of them.
  EXPECT_NE(ErrorsOf(absl::StrReplaceAll(job, {{"8192", "4096"}}))
                .find("options.staging_bytes 4096 is too small; wanted at "
                      "least 8192 (slots 2 x bucket_bytes 4096)"),
            std::string::npos);
}

// Four sources with a shard each feed four replicas of another host.
std::string RelayedJob(const std::string& deal, const std::string& more = "",
                       const std::string& speeds = SlowSpeeds()) {
  return GenericJob(R"({"name": "w", "shape": [512, 512], "dtype": "bf16"})",
                    GenericSide(4, "Shard(0)"), GenericSide(4, "Replicate"),
                    R"(, "topology": {)" + speeds +
                        R"("hosts": [0, 0, 0, 0, 1, 1, 1, 1]},
           "options": {"deal": ")" +
                        deal + "\"" + more + "}");
}

bool Deals(const PlanFile& plan) {
  return (plan.plan().required_features() & kFeatureDealing) != 0;
}

TEST(DealTest, RelaysInsideAHostGoBesideTheNetwork) {
  const PlanFile never = OpenJob(RelayedJob("never"));
  const PlanFile relays = OpenJob(RelayedJob("relays"));
  EXPECT_FALSE(Deals(never));
  EXPECT_TRUE(Deals(relays));
  // The same bytes, to each rank from one source.
  EXPECT_EQ(relays.body().stats()->relayed_bytes(),
            never.body().stats()->relayed_bytes());
  EXPECT_EQ(NetworkPeers(relays.body()), std::vector<uint32_t>(8, 1));
  EXPECT_EQ(NetworkPeers(never.body()), std::vector<uint32_t>(8, 4));
  EXPECT_LT(EstimatesOf(relays).predicted_seconds,
            EstimatesOf(never).predicted_seconds);
  for (const fb::Round* round : *relays.body().rounds()) {
    EXPECT_EQ(round->route(), fb::Route::kNetwork);
  }
}

std::pair<uint64_t, uint64_t> BodyOf(const PlanFile& plan) {
  const fb::Digest& digest = *plan.plan().body_digest();
  return {digest.low(), digest.high()};
}

// The simulator finds it faster.
TEST(DealTest, ByDefaultRanksDealWhereThatIsFaster) {
  const PlanFile plan =
      OpenJob(absl::StrReplaceAll(RelayedJob("x"), {{R"("deal": "x")", ""}}));
  EXPECT_EQ(BodyOf(plan), BodyOf(OpenJob(RelayedJob("relays"))));
  EXPECT_EQ(BodyOf(plan), BodyOf(OpenJob(RelayedJob("auto"))));
}

// The compiler prints what passes made of the plan that it keeps.
TEST(DealTest, ThePassesOfTheKeptPlanAreShown) {
  const TemporaryDirectory directory;
  const auto shown = [&](const std::string& deal) {
    const std::string path = directory.Write("job.json", RelayedJob(deal));
    Diagnostics diagnostics;
    std::ostringstream text;
    EXPECT_TRUE(
        CompileFile(path, {.print_after = "deal", .shown = &text}, diagnostics)
            .ok());
    return text.str();
  };
  EXPECT_EQ(shown("auto"), shown("relays"));
  EXPECT_NE(shown("auto"), shown("never"));
}

// Also of a job that is refused for what they made.
TEST(DealTest, ThePassesOfARefusedPlanAreShown) {
  const TemporaryDirectory directory;
  const std::string path =
      directory.Write("job.json", DealtJob("auto", R"(, "network_peers": 2)"));
  Diagnostics diagnostics;
  std::ostringstream text;
  EXPECT_FALSE(
      CompileFile(path, {.print_after = "deal", .shown = &text}, diagnostics)
          .ok());
  EXPECT_EQ(text.str().substr(0, 13), "// after deal");
}

// What staging has no room for, and what no other plan beats, is as with
// "never": older executors run it.
TEST(DealTest, ByDefaultRanksDealNothingWhereThatIsNotFaster) {
  const std::string fast =
      R"("peer_gigabytes_per_second": 10, "network_gigabytes_per_second": 1, )";
  EXPECT_FALSE(Deals(OpenJob(RelayedJob("auto", "", fast))));
  EXPECT_FALSE(Deals(OpenJob(
      RelayedJob("auto", R"(, "bucket_bytes": 4096, "staging_bytes": 8192)"))));
  EXPECT_FALSE(Deals(OpenJob(RelayedJob("auto", R"(, "fan_out": "none")"))));
  EXPECT_FALSE(Deals(OpenJob(RelayedJob("auto", R"(, "delta": true)"))));
}

// Eight replicas on one host. To deal all out takes longer than the network, so
// that each rank deals to some of the others and stores to the rest.
TEST(DealTest, RanksDealToAsManyAsTheNetworkLeavesTimeFor) {
  const auto job = [](const std::string& deal) {
    return GenericJob(
        R"({"name": "w", "shape": [65536, 65536], "dtype": "bf16"})",
        GenericSide(8, "Shard(0)"), GenericSide(8, "Replicate"),
        R"(, "topology": {"gpus_per_host": 8, "peer_gigabytes_per_second": 200},
             "options": {"deal": ")" +
            deal + R"("})");
  };
  const PlanFile plan = OpenJob(job("relays"));
  const fb::Body& body = plan.body();
  for (uint32_t rank = 8; rank < 16; ++rank) {
    std::set<uint32_t> dealt, stored;
    for (const fb::Message* message : plan.messages().Of(rank)) {
      if (message->kind() != fb::MessageKind::kSend) continue;
      (IsHeld(body, *message) ? dealt : stored).insert(message->peer());
    }
    EXPECT_GE(dealt.size(), 2u) << rank;
    EXPECT_GE(stored.size(), 1u) << rank;
    EXPECT_EQ(dealt.size() + stored.size(), 7u) << rank;
  }
  const PlanFile never = OpenJob(job("never"));
  EXPECT_EQ(body.stats()->relayed_bytes(),
            never.body().stats()->relayed_bytes());
  EXPECT_LT(EstimatesOf(plan).predicted_seconds,
            EstimatesOf(never).predicted_seconds * 0.9);
  // As "auto" finds by simulation.
  EXPECT_EQ(BodyOf(OpenJob(job("auto"))), BodyOf(plan));
}

// Five sources cannot feed four receivers alike, unless all feed all.
TEST(DealTest, UnevenSidesDealStripes) {
  const auto job = [](int32_t sources, const std::string& deal) {
    return GenericJob(
        R"({"name": "w", "shape": [131072, 4096], "dtype": "bf16"})",
        GenericSide(sources, "Shard(0)"), GenericSide(4, "Replicate"),
        R"(, "topology": {"hosts": [)" +
            std::string(sources == 5 ? "0, 0, 0, 0, 0" : "0, 0, 0, 0") +
            R"(, 1, 1, 1, 1]}, "options": {"deal": ")" + deal + R"("})");
  };
  const auto receivers_peers = [&](int32_t sources, const std::string& deal) {
    const std::vector<uint32_t> peers =
        NetworkPeers(OpenJob(job(sources, deal)).body());
    return std::vector<uint32_t>(peers.begin() + sources, peers.end());
  };
  for (const std::string deal : {"relays", "auto"}) {
    EXPECT_EQ(receivers_peers(5, deal), std::vector<uint32_t>(4, 5)) << deal;
    EXPECT_EQ(receivers_peers(4, deal), std::vector<uint32_t>(4, 1)) << deal;
  }
}

// What a flat buffer holds is one row: it is cut for all receivers too.
TEST(DealTest, EachReceiverDealsAPartOfAFlatTensor) {
  const PlanFile plan = OpenJob(
      GenericJob(R"({"name": "w", "shape": [268435456], "dtype": "bf16"})",
                 GenericSide(2, "Shard(0)"), GenericSide(8, "Replicate"),
                 R"(, "topology": {"hosts": [0, 1, 2, 2, 2, 2, 2, 2, 2, 2]},
           "options": {"deal": "relays"})"));
  for (uint32_t rank = 2; rank < 10; ++rank) {
    const MessageVector& messages = plan.messages().Of(rank);
    EXPECT_TRUE(std::any_of(messages.begin(), messages.end(),
                            [](const fb::Message* message) {
                              return message->kind() == fb::MessageKind::kSend;
                            }))
        << rank;
  }
}

// What a rank deals out starts message by message; what it stores does not.
TEST(DealTest, RelaysGoAfterTheNetworkWhereTheirStartsTakeLonger) {
  const std::string fast =
      R"("peer_gigabytes_per_second": 10, "network_gigabytes_per_second": 1, )";
  EXPECT_FALSE(Deals(OpenJob(RelayedJob("relays", "", fast))));
}

TEST(DealTest, RelaysGoAfterTheNetworkWhereStagingIsSmall) {
  const std::string small = R"(, "bucket_bytes": 4096, "staging_bytes": 8192)";
  const std::string enough =
      R"(, "bucket_bytes": 65536, "staging_bytes": 196608)";
  EXPECT_FALSE(Deals(OpenJob(RelayedJob("relays", small))));
  EXPECT_TRUE(Deals(OpenJob(RelayedJob("relays", enough))));
}

// The last ones are dealt out alone.
TEST(DealTest, RelaysTakeTwoRoundsAtLeast) {
  EXPECT_GE(OpenJob(RelayedJob("relays")).body().rounds()->size(), 3u);
}

// 28 of 32 sources hold seven rows each. Each of eight engines of four ranks
// wants all: a source sends 56 rows, and a rank is sent 49.
constexpr int64_t kLongRowBytes = int64_t{16384} * 2;
constexpr double kLongNetwork = 1e7;
PlanFile OpenLongStages(int64_t staging_bytes) {
  return OpenJob(GenericJob(
      R"({"name": "w", "shape": [196, 16384], "dtype": "bf16"})",
      GenericSide(32, "Shard(0)"),
      R"({"layout": "generic", "meshes": {"m": {"axes": {"r": 8, "t": 4}}}, )"
      R"("tensors": [{"match": "*", "mesh": "m", )"
      R"_("placements": ["Replicate", "Shard(1)"]}]})_",
      absl::StrCat(R"(, "topology": {)", SlowSpeeds(),
                   R"("gpus_per_host": 4}, "options": {"deal": "always", )",
                   R"("bucket_bytes": 8192, "staging_bytes": )", staging_bytes,
                   "}")));
}

struct NetworkSends {
  int64_t bytes = 0;
  std::set<int32_t> receivers;
};

// By rank. Without what ranks deal out.
std::vector<NetworkSends> NetworkSendsOf(const PlanFile& plan) {
  std::vector<NetworkSends> sends;
  for (const fb::RankProgram* program : *plan.body().programs()) {
    NetworkSends& of_rank = sends.emplace_back();
    for (const fb::Message* message : plan.messages().Of(*program)) {
      if (message->kind() != fb::MessageKind::kSend ||
          IsHeld(plan.body(), *message)) {
        continue;
      }
      of_rank.bytes += static_cast<int64_t>(message->size_bytes());
      of_rank.receivers.insert(PeerOf(plan.body(), *program, *message));
    }
  }
  return sends;
}

TEST(DealTest, RanksPassOnAPartOfWhatTheBusiestSourcesSend) {
  const PlanFile plan = OpenLongStages(131072);
  const std::vector<NetworkSends> sends = NetworkSendsOf(plan);
  int64_t relayed = 0;
  for (int32_t rank = 0; rank < 64; ++rank) {
    const NetworkSends& of_rank = sends[static_cast<size_t>(rank)];
    // All stay on one rail, so that peers stay few.
    for (const int32_t receiver : of_rank.receivers) {
      EXPECT_EQ((receiver - rank) % 4, 0) << rank << " to " << receiver;
    }
    if (rank < 32) {
      EXPECT_LE(of_rank.bytes, 49 * kLongRowBytes) << rank;
    } else {
      relayed += of_rank.bytes;
    }
  }
  EXPECT_GE(relayed, 28 * 7 * kLongRowBytes);
  const std::vector<uint32_t> peers = NetworkPeers(plan.body());
  EXPECT_EQ(*std::max_element(peers.begin(), peers.begin() + 32), 8u);
  EXPECT_LE(*std::max_element(peers.begin() + 32, peers.end()), 7u + 7u);
}

TEST(DealTest, InFewRoundsRanksPassNothingOn) {
  const std::vector<NetworkSends> sends =
      NetworkSendsOf(OpenLongStages(262144));
  for (size_t rank = 32; rank < 64; ++rank) EXPECT_EQ(sends[rank].bytes, 0);
}

// Behind what it receives, which two parts of staging take turns for.
TEST(DealTest, WhatADealerPacksLiesApart) {
  const PlanFile plan = OpenLongStages(131072);
  bool packs = false;
  for (uint32_t rank = 32; rank < 64; ++rank) {
    uint64_t received = 0;
    uint64_t packed = std::numeric_limits<uint64_t>::max();
    for (const fb::Message* message : plan.messages().Of(rank)) {
      const uint64_t begin = message->staging_offset();
      if (message->kind() == fb::MessageKind::kRecv) {
        received = std::max(received, begin + message->size_bytes());
      } else if (!IsHeld(plan.body(), *message)) {
        packed = std::min(packed, begin);
      }
    }
    EXPECT_LE(received, packed) << rank;
    packs |= packed != std::numeric_limits<uint64_t>::max();
  }
  EXPECT_TRUE(packs);
}

// Every rank has about as many bytes in a round.
TEST(DealTest, HostsAreDealtAllInFullRounds) {
  const PlanFile plan = OpenLongStages(1048576);
  Topology topology;
  topology.network_bytes_per_second = kLongNetwork;
  topology.peer_bytes_per_second = 10 * kLongNetwork;
  const absl::StatusOr<double> seconds = SimulatedSeconds(plan, topology);
  ASSERT_TRUE(seconds.ok());
  EXPECT_LT(*seconds, 56 * kLongRowBytes / kLongNetwork * 1.03);
}

TEST(DealTest, TheBoundOfPeersHoldsWhatDealingGives) {
  EXPECT_EQ(ErrorsOf(DealtJob("always", R"(, "network_peers": 2)")), "");
  EXPECT_NE(ErrorsOf(DealtJob("never", R"(, "network_peers": 2)")), "");
}

}  // namespace
}  // namespace refit
