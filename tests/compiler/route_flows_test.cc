// The pass that sends what several hosts want along trees.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "compiler/passes/packer.h"
#include "compiler/passes/routed_pieces.h"
#include "tests/compiler/flows_testing.h"

namespace refit {
namespace {

// What each rank does, in bytes; the sources feed the destinations of pieces.
struct Traffic {
  std::vector<int64_t> received;
  std::vector<int64_t> sent_between_hosts;
  std::vector<std::set<Rank>> network_peers;
};

Traffic TrafficOf(const Module& module) {
  const auto world = static_cast<size_t>(module.world_size());
  Traffic traffic = {.received = std::vector<int64_t>(world, 0),
                     .sent_between_hosts = std::vector<int64_t>(world, 0),
                     .network_peers = std::vector<std::set<Rank>>(world)};
  for (const Piece& piece : module.pieces) {
    const int64_t bytes = module.WireBytes(piece);
    std::set<Rank> holders(piece.sources.begin(), piece.sources.end());
    const auto send = [&](Rank from, Rank to) {
      EXPECT_TRUE(holders.contains(from)) << "before it was fed";
      EXPECT_TRUE(holders.insert(to).second) << "fed twice";
      traffic.received[IndexOf(to)] += bytes;
      if (module.RouteBetween(from, to) != Route::kNetwork) return;
      traffic.sent_between_hosts[IndexOf(from)] += bytes;
      traffic.network_peers[IndexOf(from)].insert(to);
      traffic.network_peers[IndexOf(to)].insert(from);
    };
    for (const Rank rank : piece.destinations) {
      send(piece.sources.front(), rank);
    }
    for (const Relay& relay : piece.relays) send(relay.sender, relay.receiver);
  }
  return traffic;
}

// Every rank receives all, no rank sends more between hosts than the bytes that
// its share of its host's NICs needs, and ranks have few peers.
TEST(RouteFlowsTest, TreesReachAllAndNobodySendsMoreThanItsShare) {
  std::mt19937 random(20261128);
  for (int run = 0; run < 60; ++run) {
    const auto draw = [&](int32_t most) {
      return static_cast<int32_t>(1 + random() % static_cast<uint32_t>(most));
    };
    const int32_t sources = draw(8);
    const int32_t near = draw(8) - 1;
    const int32_t hosts = 1 + draw(40);
    const int32_t members = draw(8);
    SCOPED_TRACE(testing::Message()
                 << sources << " sources, " << near << " near, " << hosts
                 << " hosts of " << members);
    Module module = ModuleOf(
        {.sources = sources, .near = near, .hosts = hosts, .members = members});
    RouteModule(module);
    if (!module.stats.routes_between_hosts()) continue;
    const Traffic traffic = TrafficOf(module);
    const auto share = static_cast<double>(kBytes) / members;
    for (int32_t rank = sources; rank < module.world_size(); ++rank) {
      EXPECT_EQ(traffic.received[static_cast<size_t>(rank)], kBytes);
    }
    for (int32_t rank = sources + near; rank < module.world_size(); ++rank) {
      EXPECT_LE(static_cast<double>(
                    traffic.sent_between_hosts[static_cast<size_t>(rank)]),
                share * 1.02);
      // Of each tree the one that feeds it, and two that it feeds; a root is
      // fed by sources, or who passes on for them.
      EXPECT_LE(traffic.network_peers[static_cast<size_t>(rank)].size(),
                static_cast<size_t>(3 + sources + near));
    }
    // Whoever stands on the sources' host has as many lanes as the others
    // there, or one more.
    const int32_t senders = sources + near;
    const double lanes = std::max(1, (members + senders - 1) / senders);
    for (int32_t rank = 0; near > 0 && rank < senders; ++rank) {
      EXPECT_LE(static_cast<double>(
                    traffic.sent_between_hosts[static_cast<size_t>(rank)]),
                share * (sources > 1 ? lanes + 1 : lanes) * 1.02);
    }
  }
}

// Of what NVLink joins: the bytes that come from other domains, and those that
// sources send inside their own.
struct DomainTraffic {
  int64_t between = 0;
  int64_t from_sources = 0;
};

DomainTraffic DomainTrafficOf(const Module& module) {
  DomainTraffic traffic;
  for (const Piece& piece : module.pieces) {
    const int64_t bytes = module.WireBytes(piece);
    const auto send = [&](Rank from, Rank to) {
      if (module.LinkBetween(from, to) == Route::kNetwork) {
        traffic.between += bytes;
      } else if (!module.IsRelay(from)) {
        traffic.from_sources += bytes;
      }
    };
    for (const Rank rank : piece.destinations) {
      send(piece.sources.front(), rank);
    }
    for (const Relay& relay : piece.relays) send(relay.sender, relay.receiver);
  }
  return traffic;
}

// Eight sources on host 0, and two engines on each of four: NVLink joins hosts
// 0 and 1, 2 and 3. So many sources feed hosts without trees.
Module ModuleOfDomains(int64_t staging_bytes) {
  Module module = ModuleOf({.sources = 8, .near = 2, .hosts = 3, .members = 2});
  module.limits.staging_bytes = staging_bytes;
  module.limits.bucket_bytes = staging_bytes / 4;
  module.topology.fabric =
      Fabric{.machine = "",
             .hosts_per_nvlink_domain = 2,
             .nic_bytes_per_second = module.topology.network_bytes_per_second};
  return module;
}

TEST(RouteFlowsTest, ADomainIsSentOnceWhatItsHostsWant) {
  Module module = ModuleOfDomains(int64_t{1} << 30);
  RouteModule(module);
  const DomainTraffic traffic = DomainTrafficOf(module);
  EXPECT_EQ(traffic.between, kBytes);
  EXPECT_EQ(traffic.from_sources, kBytes);
  const Traffic of_ranks = TrafficOf(module);
  for (int32_t rank = 8; rank < module.world_size(); ++rank) {
    EXPECT_EQ(of_ranks.received[static_cast<size_t>(rank)], kBytes);
  }
}

// A message that is passed on to another host lies in staging meanwhile.
TEST(RouteFlowsTest, AHostOfADomainIsSentItAllIfStagingHasNoRoom) {
  Module module = ModuleOfDomains(int64_t{32} << 20);
  RouteModule(module);
  EXPECT_EQ(DomainTrafficOf(module).between, 2 * kBytes);
}

TEST(RouteFlowsTest, AHostPassesOnInOneOfTheTrees) {
  Module module = ModuleOf({.hosts = 15});
  RouteModule(module);
  ASSERT_TRUE(module.stats.routes_flows);
  // By the root of a tree: who sends between hosts.
  std::map<Rank, std::set<Rank>> senders;
  for (const Piece& piece : module.pieces) {
    for (const Relay& relay : piece.relays) {
      senders[piece.destinations.front()].insert(relay.sender);
    }
  }
  ASSERT_EQ(senders.size(), 2u);
  std::vector<Rank> both;
  std::set_intersection(
      senders.begin()->second.begin(), senders.begin()->second.end(),
      senders.rbegin()->second.begin(), senders.rbegin()->second.end(),
      std::back_inserter(both));
  EXPECT_TRUE(both.empty());
}

TEST(RouteFlowsTest, SourcesThatAreNotTheLimitFeedAllThemselves) {
  // Eight of them have as many NICs as eight hosts of one rank.
  Module module = ModuleOf({.sources = 8, .hosts = 8});
  RouteModule(module);
  EXPECT_FALSE(module.stats.routes_flows);
  for (const Piece& piece : module.pieces) EXPECT_TRUE(piece.relays.empty());
}

// Each of the sources would have a NIC to feed a host if they shared none.
TEST(RouteFlowsTest, SourcesThatShareANicDoNotFeedAllThemselves) {
  Module module = ModuleOf({.sources = 8, .hosts = 8});
  module.topology.fabric =
      Fabric{.machine = "",
             .gpus_per_nic = 8,
             .nic_bytes_per_second = module.topology.network_bytes_per_second};
  RouteModule(module);
  EXPECT_TRUE(module.stats.routes_between_hosts());
}

// Bytes that leave a leaf of four hosts for another.
int64_t BytesBetweenLeaves(const Module& module) {
  int64_t crossed = 0;
  for (const Piece& piece : module.pieces) {
    const auto leaf = [&](Rank rank) {
      return module.topology.host[IndexOf(rank)] / 4;
    };
    const auto send = [&](Rank from, Rank to) {
      if (leaf(from) != leaf(to)) crossed += module.WireBytes(piece);
    };
    for (const Rank rank : piece.destinations) {
      send(piece.sources.front(), rank);
    }
    for (const Relay& relay : piece.relays) send(relay.sender, relay.receiver);
  }
  return crossed;
}

// Eight sources on a host, and a receiver on each of the others.
Module ModuleOfLeaves(int32_t receivers, int32_t host_of_sources,
                      double spine_oversubscription) {
  Module module = ModuleOf({.sources = 8, .hosts = receivers});
  for (int32_t& host : module.topology.host) {
    host = host == 0                 ? host_of_sources
           : host <= host_of_sources ? host - 1
                                     : host;
  }
  module.topology.fabric =
      Fabric{.machine = "",
             .hosts_per_leaf = 4,
             .spine_oversubscription = spine_oversubscription,
             .nic_bytes_per_second = module.topology.network_bytes_per_second};
  return module;
}

TEST(RouteFlowsTest, ANarrowWayBetweenLeavesIsCrossedOnce) {
  Module wide = ModuleOfLeaves(7, 0, 1);
  RouteModule(wide);
  EXPECT_EQ(BytesBetweenLeaves(wide), 4 * kBytes);
  // Wherever the sources are, and however many hosts there are.
  for (const int32_t receivers : {7, 15}) {
    for (const int32_t host_of_sources : {0, 5, 7}) {
      Module narrow = ModuleOfLeaves(receivers, host_of_sources, 64);
      RouteModule(narrow);
      EXPECT_EQ(BytesBetweenLeaves(narrow), receivers / 4 * kBytes)
          << receivers << " " << host_of_sources;
    }
  }
  // What sources on another leaf hold begins there.
  Module both = ModuleOfLeaves(10, 0, 64);
  std::fill_n(both.topology.host.begin() + 4, 4, 11);
  RouteModule(both);
  EXPECT_EQ(BytesBetweenLeaves(both), 2 * kBytes);
}

// Whatever is not routed has room in a round of staging, too.
TEST(RouteFlowsTest, BucketsAreNoLargerThanARoundOfStaging) {
  Module module = ModuleOf({.hosts = 4});
  module.limits.slots = 3;
  RouteModule(module);
  EXPECT_TRUE(module.stats.routes_between_hosts());
  EXPECT_LE(module.limits.bucket_bytes * (3 + kHeldRounds),
            module.limits.staging_bytes);
}

TEST(RouteFlowsTest, WhatIsCastOnArrivalIsNotPassedOn) {
  Module module = ModuleOf({.hosts = 4});
  module.pieces[0].destination_dtype = DType::kFp32;
  RouteModule(module);
  EXPECT_FALSE(module.stats.routes_flows);
}

TEST(RouteFlowsTest, SourcesOfLittleFeedAllThemselves) {
  Module module = ModuleOf({.sources = 64, .hosts = 96});
  // So slow to start, beside its bytes, is a message here.
  module.topology.network_bytes_per_second = 50e12;
  RouteModule(module);
  EXPECT_FALSE(module.stats.routes_between_hosts());
}

// A row is larger than the last range.
TEST(RoutedPiecesTest, RangesThatDoNotMatterGetNothing) {
  Module module = ModuleOf(FlowShape{});
  const RoutedPieces routed(module);
  const PieceId piece{0};
  std::map<size_t, int64_t> bytes;
  routed.Cut({&piece, 1}, {kBytes / 4, 16, 3 * kBytes / 4 - 32, 16},
             [&](const Packed& packed, size_t range) {
               bytes[range] += packed.box.Volume() * 2;
             });
  EXPECT_EQ(bytes,
            (std::map<size_t, int64_t>{{0, kBytes / 4}, {2, 3 * kBytes / 4}}));
}

}  // namespace
}  // namespace refit
