#include "compiler/passes/list_rounds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "compiler/passes/rounds.h"
#include "tests/compiler/compile_testing.h"

namespace refit {
namespace {

constexpr int64_t kLargeBytes = 1 << 20;

Rank RankOf(int32_t number) { return Rank{number}; }

// As many sources and destinations, a host each, whose rounds have room for so
// many large messages.
Module ModuleOf(int32_t sources, int32_t destinations, int64_t room) {
  Module module;
  module.source.ranks.resize(static_cast<size_t>(sources));
  module.destination.ranks.resize(static_cast<size_t>(destinations));
  for (int32_t rank = 0; rank < sources + destinations; ++rank) {
    module.topology.host.push_back(rank);
  }
  module.topology.peer_bytes_per_second = 370e9;
  module.topology.network_bytes_per_second = 50e9;
  module.limits.staging_bytes = room * kLargeBytes;
  return module;
}

Message NetworkMessage(int32_t source, int32_t destination, int64_t bytes) {
  Message message;
  message.source = RankOf(source);
  message.destination = RankOf(destination);
  message.route = Route::kNetwork;
  message.size_bytes = bytes;
  return message;
}

// Places all messages that are not dealt out; returns the number of rounds.
int32_t Place(Module& module) {
  std::vector<Message*> messages;
  for (Message& message : module.messages) {
    if (!message.is_held && !message.is_sent_with_other()) {
      messages.push_back(&message);
    }
  }
  RoundLoads loads(module, /*turns=*/1);
  EXPECT_TRUE(
      PlaceStaged(module, messages, /*first_round=*/0, /*ends=*/true, loads)
          .ok());
  int32_t rounds = 0;
  for (const Message& message : module.messages) {
    rounds = std::max(rounds, message.round + 1);
  }
  return rounds;
}

TEST(ListRoundsTest, RanksOfARegularJobAreFullInNearlyEachRound) {
  for (const int32_t ranks : {1, 2, 5, 8, 13}) {
    Module module = ModuleOf(ranks, ranks, /*room=*/2);
    for (int32_t source = 0; source < ranks; ++source) {
      for (int32_t destination = 0; destination < ranks; ++destination) {
        for (int count = 0; count < 4; ++count) {
          module.messages.push_back(
              NetworkMessage(source, ranks + destination, kLargeBytes));
        }
      }
    }
    // Such a list may leave a message for one round more.
    EXPECT_LE(Place(module), 2 * ranks + 1) << ranks << " ranks";
  }
}

TEST(ListRoundsTest, TheBusiestPairIsServedInEachRound) {
  Module module = ModuleOf(2, 2, /*room=*/1);
  // Destination 3 is wanted by both sources, and source 0 has more for it.
  for (const auto& [source, destination, count] :
       {std::tuple(0, 2, 3), std::tuple(0, 3, 6), std::tuple(1, 3, 3)}) {
    for (int i = 0; i < count; ++i) {
      module.messages.push_back(
          NetworkMessage(source, destination, kLargeBytes));
    }
  }
  EXPECT_EQ(Place(module), 9);
}

// Random messages, of which some are dealt out and some are passed on along
// trees or by relays that pack again.
Module RandomModule(std::mt19937& random) {
  const auto draw = [&](int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(random);
  };
  const int32_t sources = draw(1, 5);
  const int32_t hosts = draw(2, 4);
  const int32_t of_host = draw(1, 3);
  Module module = ModuleOf(sources, hosts * of_host, /*room=*/draw(6, 20));
  for (int32_t rank = 0; rank < hosts * of_host; ++rank) {
    module.topology.host[static_cast<size_t>(sources + rank)] =
        sources + rank / of_host;
  }
  const bool routed = draw(0, 1) == 1;
  const bool relays = draw(0, 1) == 1;
  const bool broadcasts = routed && !relays && draw(0, 1) == 1;
  module.stats.held_rounds = kHeldRounds;
  const auto deal = [&](size_t number) {
    const Message message = module.messages[number];
    const int32_t receiver = static_cast<int32_t>(message.destination);
    const int32_t first = sources + (receiver - sources) / of_host * of_host;
    module.messages[number].dealt_by.begin = module.messages.size();
    for (int32_t rank = first; rank < first + of_host; ++rank) {
      if (rank == receiver || draw(0, 2) == 0) continue;
      ++module.messages[number].dealt_by.count;
      Message dealt;
      dealt.source = RankOf(receiver);
      dealt.destination = RankOf(rank);
      dealt.route = Route::kPeer;
      dealt.size_bytes = message.size_bytes;
      dealt.fed_by = {.begin = number, .count = 1};
      dealt.relayed_from = Route::kNetwork;
      dealt.is_held = true;
      dealt.is_routed = true;
      module.messages.push_back(dealt);
    }
  };
  for (int count = draw(1, 60); count > 0; --count) {
    const int32_t root = draw(0, hosts * of_host - 1);
    const int64_t bytes = draw(0, 3) == 0 ? draw(1, 4096) : kLargeBytes;
    Message message =
        NetworkMessage(draw(0, sources - 1), sources + root, bytes);
    message.is_routed = routed;
    size_t fed = module.messages.size();
    module.messages.push_back(message);
    if (broadcasts) {
      // To the same rank of each host.
      message.broadcast.first = static_cast<int32_t>(fed);
      for (int32_t host = 0; host < hosts; ++host) {
        message.destination =
            RankOf(sources + (root + host * of_host) % (hosts * of_host));
        if (host > 0) module.messages.push_back(message);
      }
      module.messages[fed].broadcast.first = static_cast<int32_t>(fed);
      module.messages[fed].broadcast.others = hosts - 1;
      module.messages[fed].broadcast.stride = 1;
      for (int32_t host = 0; host < hosts; ++host) {
        deal(fed + static_cast<size_t>(host));
      }
      continue;
    }
    if (routed) deal(fed);
    if (!relays) continue;
    for (int32_t host = 1; host < draw(1, hosts); ++host) {
      Message relay = message;
      relay.source = module.messages[fed].destination;
      relay.destination =
          RankOf(sources + (root + host * of_host) % (hosts * of_host));
      relay.fed_by = {.begin = fed, .count = 1};
      relay.relayed_from = Route::kNetwork;
      fed = module.messages.size();
      module.messages.push_back(relay);
      if (routed) deal(fed);
    }
  }
  return module;
}

TEST(ListRoundsTest, RandomMessagesComeBehindWhatFeedsThemAndHaveRoom) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    Module module = RandomModule(random);
    Place(module);
    struct Taken {
      int64_t bytes = 0;
      int32_t operations = 0;
    };
    std::map<std::pair<Rank, int32_t>, Taken> taken;
    for (const Message& message : module.messages) {
      ASSERT_GE(message.round, 0);
      if (message.fed_by.count > 0) {
        const int32_t later =
            message.round - module.messages[message.fed_by.begin].round;
        if (message.route == Route::kPeer) {
          EXPECT_EQ(later, 1);  // dealt out
        } else if (message.is_held) {
          EXPECT_GE(later, 1);
          EXPECT_LE(later, kHeldRounds);
        } else {
          EXPECT_GE(later, kRelayRounds);
        }
      }
      if (message.is_broadcast()) {
        const size_t first = static_cast<size_t>(message.broadcast.first);
        EXPECT_EQ(message.round, module.messages[first].round);
      }
      if (!message.is_sent_with_other()) {
        Taken& source = taken[{message.source, message.round}];
        if (!message.is_held) source.bytes += AlignStaging(message.size_bytes);
        ++source.operations;
      }
      Taken& destination = taken[{message.destination, message.round}];
      destination.bytes += AlignStaging(message.size_bytes);
      ++destination.operations;
    }
    for (const auto& [where, of] : taken) {
      EXPECT_LE(of.bytes, module.limits.staging_bytes);
      EXPECT_LE(of.operations, module.limits.operations_per_round);
    }
  }
}

// Rank 13 deals out what came over the network, and sends what it packs in the
// round after that.
TEST(ListRoundsTest, WhatARankPacksDoesNotLieWhereItStillDeals) {
  EXPECT_EQ(ErrorsOf(R"job({
    "model": {"parameters": [
      {"name": "w", "shape": [500, 128], "dtype": "bf16"}]},
    "source": {"layout": "generic",
      "meshes": {"m": {"axes": {"a": 2, "b": 3}}},
      "tensors": [{"match": "w", "mesh": "m",
                   "placements": ["Shard(0)", "Shard(1)"]}]},
    "destination": {"layout": "generic",
      "meshes": {"m": {"axes": {"a": 2, "b": 4}}},
      "tensors": [{"match": "w", "mesh": "m",
                   "placements": ["Shard(1)", "Replicate"]}]},
    "topology": {"hosts": [2, 2, 2, 2, 3, 3, 3, 2, 1, 3, 3, 2, 1, 1],
                 "network_gigabytes_per_second": 0.1},
    "options": {"peer": "staged", "bucket_bytes": 8192}})job"),
            "");
}

}  // namespace
}  // namespace refit
