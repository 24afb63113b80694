// What several hosts want, and their ranks' broadcasts of it.
#include "compiler/passes/broadcast_flows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "tests/compiler/flows_testing.h"

namespace refit {
namespace {

// What broadcasts may carry goes by them.
Module BroadcastModule(const FlowShape& shape) {
  Module module = ModuleOf(shape);
  module.limits.broadcasts = true;
  RouteModule(module);
  return module;
}

// What each rank is sent, and to which ranks of other hosts it broadcasts;
// fails where something is passed on before it came, or comes twice.
struct Traffic {
  std::vector<int64_t> received, broadcast;  // bytes, by rank
  std::map<Rank, std::set<std::set<Rank>>> to;
};

Traffic TrafficOf(const Module& module) {
  const auto world = static_cast<size_t>(module.world_size());
  Traffic traffic = {.received = std::vector<int64_t>(world, 0),
                     .broadcast = std::vector<int64_t>(world, 0),
                     .to = {}};
  for (const Piece& piece : module.pieces) {
    const int64_t bytes = module.WireBytes(piece);
    std::set<Rank> holders(piece.sources.begin(), piece.sources.end());
    std::map<Rank, std::set<Rank>> far;
    const auto send = [&](Rank from, Rank to) {
      EXPECT_TRUE(holders.contains(from)) << "before it was fed";
      EXPECT_TRUE(holders.insert(to).second) << "fed twice";
      traffic.received[IndexOf(to)] += bytes;
      if (module.RouteBetween(from, to) == Route::kNetwork) {
        far[from].insert(to);
      }
    };
    for (const Rank rank : piece.destinations) {
      send(piece.sources.front(), rank);
    }
    for (const Relay& relay : piece.relays) send(relay.sender, relay.receiver);
    for (const auto& [from, to] : far) {
      EXPECT_TRUE(piece.broadcasts);
      traffic.to[from].insert(to);
      traffic.broadcast[IndexOf(from)] += bytes;
    }
  }
  return traffic;
}

TEST(BroadcastFlowsTest,
     AllReceiveAllAndEachRankBroadcastsToOneRankOfEachHost) {
  std::mt19937 random(20261129);
  int broadcast = 0;
  for (int run = 0; run < 80; ++run) {
    const auto draw = [&](int32_t most) {
      return static_cast<int32_t>(1 + random() % static_cast<uint32_t>(most));
    };
    const FlowShape shape = {.sources = draw(8),
                             .near = draw(8) - 1,
                             .hosts = 1 + draw(20),
                             .members = draw(8)};
    SCOPED_TRACE(testing::Message()
                 << shape.sources << " sources, " << shape.near << " near, "
                 << shape.hosts << " hosts of " << shape.members);
    const Module module = BroadcastModule(shape);
    if (std::none_of(module.pieces.begin(), module.pieces.end(),
                     [](const Piece& piece) { return piece.broadcasts; })) {
      continue;
    }
    ++broadcast;
    const Traffic traffic = TrafficOf(module);
    for (int32_t rank = shape.sources; rank < module.world_size(); ++rank) {
      EXPECT_EQ(traffic.received[static_cast<size_t>(rank)], kBytes);
    }
    std::vector<int> broadcasts_of(traffic.received.size(), 0);
    for (const auto& [root, sets] : traffic.to) {
      ASSERT_EQ(sets.size(), 1u) << "of rank " << IndexOf(root);
      std::set<int32_t> hosts;
      for (const Rank rank : *sets.begin()) {
        hosts.insert(module.topology.host[IndexOf(rank)]);
        ++broadcasts_of[IndexOf(rank)];
      }
      EXPECT_EQ(hosts.size(), static_cast<size_t>(shape.hosts));
      EXPECT_EQ(sets.begin()->size(), static_cast<size_t>(shape.hosts));
      ++broadcasts_of[IndexOf(root)];
    }
    EXPECT_LE(*std::max_element(broadcasts_of.begin(), broadcasts_of.end()), 2);
    // Whoever stands on the sources' host sends as much as the others there.
    const double share =
        static_cast<double>(kBytes) / (shape.sources + shape.near);
    for (const int64_t bytes : traffic.broadcast) {
      EXPECT_LE(static_cast<double>(bytes), share * 1.02);
    }
  }
  EXPECT_GE(broadcast, 40);
}

// The rank of a host that a source broadcasts to may not want it.
TEST(BroadcastFlowsTest, RanksReceiveForOthersOfTheirHost) {
  const Module module =
      BroadcastModule({.sources = 8, .hosts = 6, .members = 8, .halves = true});
  const Traffic traffic = TrafficOf(module);
  ASSERT_EQ(traffic.to.size(), 8u);
  for (const auto& [root, sets] : traffic.to) EXPECT_EQ(sets.size(), 1u);
  bool any_alone = false;
  for (const Piece& piece : module.pieces) any_alone |= !piece.root_keeps;
  EXPECT_TRUE(any_alone);
}

// A rank that keeps nothing of what it receives deals it out in one round.
TEST(BroadcastFlowsTest, RanksReceiveForAsManyAsARoundHasOperationsFor) {
  const Module module = BroadcastModule(
      {.sources = 1, .hosts = 3, .members = 66, .halves = true});
  for (const Piece& piece : module.pieces) {
    EXPECT_TRUE(!piece.broadcasts || piece.root_keeps);
  }
}

// Each would need a communicator for every source.
TEST(BroadcastFlowsTest, ManySourcesOfFewRanksGoAlongTrees) {
  const Module module =
      BroadcastModule({.sources = 8, .hosts = 12, .members = 2});
  for (const Piece& piece : module.pieces) EXPECT_FALSE(piece.broadcasts);
  EXPECT_TRUE(module.stats.routes_between_hosts());
}

}  // namespace
}  // namespace refit
