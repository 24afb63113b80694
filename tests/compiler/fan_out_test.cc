// The pass that lets receivers pass on what many of them want.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "compiler/simulated_seconds.h"
#include "plan/plan_file.h"
#include "tests/compiler/compile_testing.h"

namespace refit {
namespace {

// Links so slow that a few kilobytes are worth relaying.
std::string SlowLinks(const std::string& more = "") {
  return R"(, "topology": {"peer_gigabytes_per_second": 0.1, )"
         R"("transport": "ucx", "network_gigabytes_per_second": 0.01)" +
         more + "}";
}

// One rank's tensors for `replicas` ranks, w and a small v.
std::string FanOutJob(int replicas, const std::string& more) {
  return GenericJob(R"({"name": "w", "shape": [960, 64], "dtype": "bf16"},
                       {"name": "v", "shape": [64, 2], "dtype": "bf16"})",
                    GenericSide(1, "Replicate"),
                    GenericSide(replicas, "Replicate"), more);
}
constexpr uint64_t kFanOutBytes = (960 * 64 + 64 * 2) * 2;

// By route.
std::map<fb::Route, uint64_t> SentBytes(const PlanFile& plan, uint32_t rank) {
  std::map<fb::Route, uint64_t> bytes;
  for (const fb::Message* message : plan.messages().Of(rank)) {
    if (message->kind() != fb::MessageKind::kSend) continue;
    bytes[plan.body().rounds()->Get(message->round())->route()] +=
        message->size_bytes();
  }
  return bytes;
}

TEST(FanOutTest, ASourceSendsOnceWhatReplicasRelay) {
  const PlanFile plan = OpenJob(FanOutJob(3, SlowLinks()));
  EXPECT_EQ(SentBytes(plan, 0)[fb::Route::kPeer], kFanOutBytes);
  uint64_t relayed = 0;
  for (uint32_t rank = 1; rank <= 3; ++rank) {
    const uint64_t bytes = SentBytes(plan, rank)[fb::Route::kPeer];
    relayed += bytes;
    EXPECT_NEAR(static_cast<double>(bytes), kFanOutBytes * 2 / 3,
                kFanOutBytes / 20);
  }
  EXPECT_EQ(relayed, kFanOutBytes * 2);
  EXPECT_EQ(plan.body().stats()->relayed_bytes(), relayed);
  EXPECT_EQ(plan.body().stats()->moved_bytes(), kFanOutBytes * 3);
}

TEST(FanOutTest, AHostIsSentOnceWhatItsReplicasRelay) {
  const PlanFile plan =
      OpenJob(FanOutJob(4, SlowLinks(R"(, "hosts": [0, 1, 1, 1, 1])")));
  EXPECT_EQ(SentBytes(plan, 0)[fb::Route::kNetwork], kFanOutBytes);
  EXPECT_EQ(plan.body().stats()->relayed_bytes(), kFanOutBytes * 3);
}

// What ranks 1 and up send, by route.
std::map<fb::Route, uint64_t> RelayedBytes(const PlanFile& plan) {
  std::map<fb::Route, uint64_t> relayed;
  for (uint32_t rank = 1; rank < plan.body().programs()->size(); ++rank) {
    for (const auto& [route, bytes] : SentBytes(plan, rank)) {
      relayed[route] += bytes;
    }
  }
  return relayed;
}

TEST(FanOutTest, ASourceSendsOnceWhatReplicasRelayInStages) {
  const PlanFile plan =
      OpenJob(FanOutJob(3, SlowLinks() + R"(, "options": {"peer": "staged"})"));
  EXPECT_EQ(SentBytes(plan, 0)[fb::Route::kPeer], kFanOutBytes);
  EXPECT_EQ(RelayedBytes(plan)[fb::Route::kPeer], kFanOutBytes * 2);
}

TEST(FanOutTest, HostsPassOnToEachOtherWhatASourceSendsOnce) {
  const PlanFile plan =
      OpenJob(FanOutJob(3, SlowLinks(R"(, "hosts": [0, 1, 2, 3])")));
  EXPECT_EQ(SentBytes(plan, 0)[fb::Route::kNetwork], kFanOutBytes);
  for (uint32_t rank = 1; rank <= 3; ++rank) {
    EXPECT_LE(SentBytes(plan, rank)[fb::Route::kNetwork], kFanOutBytes * 1.01)
        << "rank " << rank;
  }
  EXPECT_EQ(RelayedBytes(plan)[fb::Route::kNetwork], kFanOutBytes * 2);
}

// In two broadcasts a rank has up to four peers.
TEST(FanOutTest, HostsPassOnToEachOtherWhereABroadcastWouldNeedMorePeers) {
  const auto job = [](int peers) {
    return GenericJob(R"({"name": "w", "shape": [4096, 64], "dtype": "bf16"})",
                      GenericSide(1, "Replicate"), GenericSide(4, "Replicate"),
                      R"(, "topology": {"hosts": [0, 5, 5, 0, 2], )"
                      R"("peer_gigabytes_per_second": 0.3, )"
                      R"("network_gigabytes_per_second": 0.05}, )"
                      R"("options": {"network_peers": )" +
                          std::to_string(peers) + "}");
  };
  EXPECT_TRUE(HasBroadcasts(OpenJob(job(4)).body()));
  EXPECT_FALSE(HasBroadcasts(OpenJob(job(3)).body()));
}

TEST(FanOutTest, WhatComesFromAnotherHostIsRelayedInTheHost) {
  const PlanFile plan =
      OpenJob(FanOutJob(6, SlowLinks(R"(, "hosts": [0, 1, 1, 1, 2, 2, 2])")));
  EXPECT_EQ(SentBytes(plan, 0)[fb::Route::kNetwork], kFanOutBytes);
  const fb::Stats& stats = *plan.body().stats();
  EXPECT_EQ(stats.network_bytes(), 2 * kFanOutBytes);
  EXPECT_EQ(stats.peer_bytes(), 2 * 2 * kFanOutBytes);
}

// Every rank of the pipeline sends one message and receives one in a round, so
// that the rounds are hardly more than those that one receiver's bytes need.
TEST(FanOutTest, HostsPassOnWhileTheyReceive) {
  const PlanFile plan = OpenJob(FanOutJob(
      4, SlowLinks(R"(, "hosts": [0, 1, 2, 3, 4])") +
             R"(, "options": {"bucket_bytes": 4096, "staging_bytes": 65536})"));
  std::map<uint32_t, uint64_t> received_in;  // rounds of rank 1
  for (const fb::Message* message : plan.messages().Of(1)) {
    if (message->kind() == fb::MessageKind::kRecv) {
      received_in[message->round()] += message->size_bytes();
    }
  }
  EXPECT_LE(plan.body().rounds()->size(), received_in.size() + 6);
}

bool UsesRelays(const PlanFile& plan) {
  return (RequiredFeatures(plan.body()) & kFeatureRelays) != 0;
}

double SecondsOf(const PlanFile& plan, double peer, double network) {
  Topology topology;
  topology.peer_bytes_per_second = peer;
  topology.network_bytes_per_second = network;
  const absl::StatusOr<double> seconds = SimulatedSeconds(plan, topology);
  EXPECT_TRUE(seconds.ok());
  return seconds.value_or(0);
}

TEST(FanOutTest, HostsPassOnWhereSourcesWouldBeTheLimit) {
  const std::string job =
      GenericJob(R"({"name": "w", "shape": [6144, 64], "dtype": "bf16"})",
                 GenericSide(4, "Shard(0)"), GenericSide(8, "Replicate"),
                 R"(, "topology": {"peer_gigabytes_per_second": 0.1, )"
                 R"("network_gigabytes_per_second": 0.1, )"
                 R"("hosts": [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]})");
  const auto relayed = [](const PlanFile& plan) {
    uint64_t bytes = 0;
    for (uint32_t rank = 4; rank < 12; ++rank) {
      bytes += SentBytes(plan, rank)[fb::Route::kNetwork];
    }
    return bytes;
  };
  const PlanFile plan = OpenJob(job);
  const PlanFile alone =
      OpenJob(job, [](Limits& limits) { limits.relays = false; });
  EXPECT_EQ(relayed(alone), 0);
  EXPECT_GT(relayed(plan), 0);
  EXPECT_LT(SecondsOf(plan, 1e8, 1e8), SecondsOf(alone, 1e8, 1e8) * 0.98);
}

TEST(FanOutTest, NothingIsRelayedThatNeedNotBe) {
  const auto relays = [](const std::string& job) {
    return UsesRelays(OpenJob(job));
  };
  EXPECT_TRUE(relays(FanOutJob(3, SlowLinks())));
  // A rank that relays does not know what changed.
  EXPECT_FALSE(
      relays(FanOutJob(3, SlowLinks() + R"(, "options": {"delta": true})")));
  // A round takes longer than such links need for all.
  EXPECT_FALSE(relays(FanOutJob(3, "")));
  // Each receiver has a source of its own.
  const std::string w = R"({"name": "w", "shape": [960, 64], "dtype": "bf16"})";
  EXPECT_FALSE(relays(GenericJob(w, GenericSide(3, "Replicate"),
                                 GenericSide(3, "Replicate"), SlowLinks())));
  // The sources hold shards: none sends more than a receiver gets.
  EXPECT_FALSE(relays(GenericJob(w, GenericSide(4, "Shard(0)"),
                                 GenericSide(4, "Replicate"), SlowLinks())));
}

// Relays would save 60 µs of the network, and take several rounds of 25 µs or
// more.
TEST(FanOutTest, NothingIsRelayedInStagesThatIsSoonFed) {
  const auto relays = [](int64_t rows) {
    return UsesRelays(OpenJob(
        GenericJob(absl::StrCat(R"({"name": "w", "shape": [)", rows,
                                R"(, 64], "dtype": "bf16"})"),
                   GenericSide(1, "Replicate"), GenericSide(4, "Replicate"),
                   R"(, "topology": {"hosts": [0, 1, 1, 1, 1]}, )"
                   R"("options": {"peer": "staged"})")));
  };
  EXPECT_FALSE(relays(8192));
  EXPECT_TRUE(relays(8 * 8192));
}

// Thirteen of sixteen sources hold four rows each, the others none. Each engine
// of four ranks wants all: without relays a source sends 16 rows, a rank of an
// engine gets 13.
TEST(FanOutTest, ReceiversPassOnAPartOfWhatTheBusiestSourcesSend) {
  const std::string engines =
      R"({"layout": "generic", "meshes": {"m": {"axes": {"r": 4, "t": 4}}}, )"
      R"("tensors": [{"match": "*", "mesh": "m", )"
      R"_("placements": ["Replicate", "Shard(1)"]}]})_";
  std::string hosts = R"(, "hosts": [0)";
  for (int rank = 1; rank < 32; ++rank) hosts += ", " + std::to_string(rank);
  const PlanFile plan = OpenJob(
      GenericJob(R"({"name": "w", "shape": [52, 4096], "dtype": "bf16"})",
                 GenericSide(16, "Shard(0)"), engines, SlowLinks(hosts + "]")));
  constexpr uint64_t kRowBytes = 4096 * 2;
  uint64_t relayed = 0;
  for (uint32_t rank = 0; rank < 32; ++rank) {
    const uint64_t bytes = SentBytes(plan, rank)[fb::Route::kNetwork];
    if (rank < 16) {
      EXPECT_EQ(bytes, rank < 13 ? kRowBytes * 13 : 0) << "rank " << rank;
      continue;
    }
    relayed += bytes;
    EXPECT_LE(bytes, kRowBytes * 3) << "rank " << rank;
  }
  EXPECT_EQ(relayed, kRowBytes * 3 * 13);
}

// Engines that sleep beside their trainers hold memory that no other process
// can map.
TEST(FanOutTest, NothingIsRelayedToTheMemoryOfColocatedEngines) {
  const auto direct_relays = [](const std::string& job, bool allowed) {
    const PlanFile plan =
        OpenJob(job, [&](Limits& limits) { limits.relays_directly = allowed; });
    int64_t relays = 0;
    for (auto rank = static_cast<uint32_t>(plan.source_ranks());
         rank < plan.body().programs()->size(); ++rank) {
      for (const fb::Message* message : plan.messages().Of(rank)) {
        const auto& round = *plan.body().rounds()->Get(message->round());
        relays += message->kind() == fb::MessageKind::kSend &&
                  round.mechanism() == fb::Mechanism::kDirect;
      }
    }
    return relays;
  };
  const auto colocated = [](const std::string& source, int ranks,
                            const std::string& hosts,
                            const std::string& options) {
    return GenericJob(
        R"({"name": "w", "shape": [1024, 640], "dtype": "bf16"},
           {"name": "v", "shape": [64, 2], "dtype": "bf16"})",
        source, GenericSide(ranks, "Replicate"),
        SlowLinks(absl::StrCat(R"(, "hosts": [)", hosts,
                               R"(]}, "colocated": true, "options": {)",
                               options)));
  };
  // One source holds what three others want.
  const std::string one_host = colocated(
      R"json({"layout": "generic",
          "meshes": {"one": {"axes": {"x": 1}}, "all": {"axes": {"x": 4}}},
          "tensors": [
            {"match": "w", "mesh": "one", "placements": ["Shard(0)"]},
            {"match": "v", "mesh": "all", "placements": ["Shard(0)"]}]})json",
      4, "0, 0, 0, 0, 0, 0, 0, 0", "");
  // Staging has no room to pass on what the network brings.
  const std::string two_hosts =
      colocated(GenericSide(16, "Shard(0)"), 16,
                "0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, "
                "0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1",
                R"("bucket_bytes": 4096, "staging_bytes": 8192)");
  for (const std::string& job : {one_host, two_hosts}) {
    EXPECT_GT(direct_relays(job, true), 0) << job;
    EXPECT_EQ(direct_relays(job, false), 0) << job;
  }
}

TEST(FanOutTest, WhatIsCastOnArrivalIsNotRelayed) {
  const auto relays = [](const std::string& from, const std::string& to) {
    const std::string side = GenericSide(3, "Replicate");
    const std::string w =
        R"({"name": "w", "shape": [960, 64], "dtype": ")" + from + R"("})";
    return UsesRelays(OpenJob(GenericJob(
        w, GenericSide(1, "Replicate"),
        R"({"dtype": ")" + to + R"(", )" + side.substr(1), SlowLinks())));
  };
  EXPECT_FALSE(relays("bf16", "fp32"));
  EXPECT_TRUE(relays("fp32", "bf16"));
}

TEST(FanOutTest, WhatIsRelayedIsCutIntoChunks) {
  const auto rounds = [](const std::string& gigabytes_per_second) {
    const PlanFile plan =
        OpenJob(FanOutJob(3, R"(, "topology": {"peer_gigabytes_per_second": )" +
                                 gigabytes_per_second + "}"));
    return plan.body().rounds()->size();
  };
  // 120 KiB take 1.2 ms; a round 20 us, a sixtieth: about eight chunks.
  EXPECT_EQ(rounds("0.1"), 8 + 1);
  EXPECT_EQ(rounds("8"), 1 + 1);
}

}  // namespace
}  // namespace refit
