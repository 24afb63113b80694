#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "compiler/ir/counting_sort.h"
#include "compiler/passes/list_rounds.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/rounds.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// A message, and where it comes in the programs of its ranks.
struct PlacedMessage {
  uint32_t number = 0;  // of Module::messages
  int32_t round = 0;
  Rank source{};
  Rank destination{};
};

// In the order of programs. Stable, so that several messages of a pair in one
// round keep one order at both ends.
std::vector<PlacedMessage> PlacesInOrder(const Module& module) {
  std::vector<PlacedMessage> places;
  places.reserve(module.messages.size());
  for (const Message& message : module.messages) {
    places.push_back({.number = static_cast<uint32_t>(places.size()),
                      .round = message.round,
                      .source = message.source,
                      .destination = message.destination});
  }
  const size_t world = static_cast<size_t>(module.world_size());
  CountingSort(places, world, [](const PlacedMessage& place) {
    return IndexOf(place.destination);
  });
  CountingSort(places, world, [](const PlacedMessage& place) {
    return IndexOf(place.source);
  });
  CountingSort(places, module.rounds.size(), [](const PlacedMessage& place) {
    return static_cast<size_t>(place.round);
  });
  return places;
}

// Gives each message its place in the staging of both ends. In a round a rank
// has one after the other what it receives and then what it sends, both in the
// order of programs, so that the file need not say where. Consecutive rounds
// use `turns` parts of the rank's staging, each as large as the largest round
// needs. What is held lies where it came.
void AssignStaging(const std::vector<PlacedMessage>& places, int32_t turns,
                   Module& module) {
  const auto world = static_cast<size_t>(module.world_size());
  std::vector<int64_t> next(world), most(world, 0);
  // Apart from the messages, which are large and not in this order.
  struct OfMessage {
    int64_t bytes = 0;
    bool packs = true;
    int64_t source = 0;
    int64_t destination = 0;
  };
  std::vector<OfMessage> offsets;
  offsets.reserve(places.size());
  for (const Message& message : module.messages) {
    offsets.push_back(
        {.bytes = message.mechanism == Mechanism::kDirect
                      ? 0
                      : AlignStaging(message.size_bytes),
         .packs = !message.is_held && !message.is_sent_with_other()});
  }
  const auto take = [&](Rank rank, const PlacedMessage& place) {
    int64_t& end = next[IndexOf(rank)];
    const int64_t offset =
        std::exchange(end, end + offsets[place.number].bytes);
    most[IndexOf(rank)] = std::max(most[IndexOf(rank)], end);
    return offset;
  };
  for (size_t begin = 0, end = 0; begin < places.size(); begin = end) {
    while (end < places.size() && places[end].round == places[begin].round) {
      next[IndexOf(places[end].source)] = 0;
      next[IndexOf(places[end].destination)] = 0;
      ++end;
    }
    for (size_t i = begin; i < end; ++i) {
      offsets[places[i].number].destination =
          take(places[i].destination, places[i]);
    }
    for (size_t i = begin; i < end; ++i) {
      if (!offsets[places[i].number].packs) continue;
      offsets[places[i].number].source = take(places[i].source, places[i]);
    }
  }
  for (size_t i = 0; i < offsets.size(); ++i) {
    Message& message = module.messages[i];
    if (message.mechanism == Mechanism::kDirect) continue;
    const int64_t turn = message.round % turns;
    const size_t packed = message.is_sent_with_other()
                              ? static_cast<size_t>(message.broadcast.first)
                              : i;
    message.source_staging_offset =
        message.is_held
            ? module.messages[message.fed_by.begin].destination_staging_offset
            : offsets[packed].source + turn * most[IndexOf(message.source)];
    message.destination_staging_offset =
        offsets[i].destination + turn * most[IndexOf(message.destination)];
  }
}

// How far the rounds so far go.
struct RoundsEnd {
  int32_t all = 0;
  int32_t not_dealt = 0;  // those from here on only deal out

  void Add(const Message& message) {
    all = std::max(all, message.round + 1);
    if (!IsBesideNetwork(message)) {
      not_dealt = std::max(not_dealt, message.round + 1);
    }
  }
};

// Places the messages of one wave, in rounds after all so far: but the first of
// the network has what the wave before deals out last.
absl::Status PlaceWave(Module& module, const std::vector<Message*>& of_wave,
                       bool is_last, RoundsEnd& end, RoundLoads& loads) {
  const RoundsEnd before = end;
  // One route after the other: a round is one group on one communicator, and
  // only one communicator is in use at a time. What the network brought is
  // relayed inside hosts when all of it is there.
  const std::array<std::pair<Route, bool>, 4> order = {
      {{Route::kLocal, false},
       {Route::kPeer, false},
       {Route::kNetwork, false},
       {Route::kPeer, true}}};
  for (const auto& [route, after_network] : order) {
    std::vector<Message*> messages;
    for (Message* message : of_wave) {
      const bool last = message->route == Route::kPeer &&
                        message->relayed_from == Route::kNetwork;
      // Placed with what it deals out, or is broadcast with.
      if (message->is_held || message->is_sent_with_other()) continue;
      const Route of_round =
          IsBesideNetwork(*message) ? Route::kNetwork : message->route;
      if (of_round == route && last == after_network) {
        messages.push_back(message);
      }
    }
    if (messages.empty()) continue;
    const Mechanism mechanism = module.MechanismOf(route);
    if (mechanism == Mechanism::kDirect) {
      for (Message* message : messages) {
        message->round = end.all + message->pipeline_round;
      }
    } else {
      const bool follows = route == Route::kNetwork && end.all == before.all;
      absl::Status placed = PlaceStaged(
          module, messages, follows ? end.not_dealt : end.all, is_last, loads);
      if (!placed.ok()) return placed;
    }
    for (Message* message : messages) {
      ForEachSentWith(module, *message, [&](const Message& received) {
        end.Add(received);
        for (const Message& held : DealtBy(module, received)) end.Add(held);
      });
    }
    module.rounds.resize(static_cast<size_t>(end.all),
                         {.route = route, .mechanism = mechanism});
  }
  return absl::OkStatus();
}

// A wave's rounds, as one rank has them.
struct RoundRange {
  int32_t begin = std::numeric_limits<int32_t>::max();
  int32_t end = 0;

  void Add(int32_t round) {
    begin = std::min(begin, round);
    end = std::max(end, round + 1);
  }
};

// A window lasts as long as the rank has messages of its wave. What replicas
// send in its stead a source need not quantize: without messages there is no
// window.
void KeepWindowsWithRounds(const std::vector<RoundRange>& rounds_of_wave,
                           Module& module, std::vector<BufferId>& buffers,
                           RankQuantizes& quantizes) {
  const size_t first = buffers.size() - quantizes.windows.size();
  constexpr int32_t kDropped = -1;
  std::vector<int32_t> moved(buffers.size());
  std::iota(moved.begin(), moved.end(), 0);
  size_t kept = 0;
  quantizes.arena_bytes = 0;
  for (size_t i = 0; i < quantizes.windows.size(); ++i) {
    const BufferId id = buffers[first + i];
    const Buffer& buffer = module.buffers[id];
    const RoundRange& rounds = rounds_of_wave[static_cast<size_t>(buffer.wave)];
    moved[first + i] = kDropped;
    if (rounds.end == 0) continue;
    const ScratchWindow window = {.offset = quantizes.windows[i].offset,
                                  .begin = rounds.begin,
                                  .end = rounds.end};
    quantizes.arena_bytes =
        std::max(quantizes.arena_bytes,
                 window.offset + buffer.shape[0] * DTypeBytes(buffer.dtype));
    moved[first + i] = static_cast<int32_t>(first + kept);
    buffers[first + kept] = id;
    quantizes.windows[kept++] = window;
  }
  buffers.resize(first + kept);
  quantizes.windows.resize(kept);
  quantizes.scratch_buffers = static_cast<int32_t>(kept);
  std::erase_if(quantizes.quantizes, [&](Quantize& op) {
    for (QuantizeOperand* operand : {&op.input, &op.output, &op.scales}) {
      operand->slot = moved[static_cast<size_t>(operand->slot)];
    }
    return op.input.slot == kDropped || op.output.slot == kDropped;
  });
}

void SetWindows(Module& module) {
  if (!module.HasWindows()) return;
  std::vector<std::vector<RoundRange>> of_rank(
      static_cast<size_t>(module.world_size()),
      std::vector<RoundRange>(static_cast<size_t>(module.waves)));
  for (const Message& message : module.messages) {
    const size_t wave = static_cast<size_t>(message.wave);
    of_rank[IndexOf(message.source)][wave].Add(message.round);
    of_rank[IndexOf(message.destination)][wave].Add(message.round);
  }
  size_t rank = 0;
  for (SideLayout* side : {&module.source, &module.destination}) {
    for (std::vector<BufferId>& buffers : side->ranks) {
      KeepWindowsWithRounds(of_rank[rank], module, buffers,
                            module.quantizes[rank]);
      ++rank;
    }
  }
}

// What ranks store inside their host of what the network brought waits for the
// last wave, so that waves follow each other on the network.
void DeferStores(Module& module) {
  if (!module.DefersStores()) return;
  int32_t last = 0;
  for (const Message& message : module.messages) {
    last = std::max(last, message.wave);
  }
  for (Message& message : module.messages) {
    if (message.mechanism == Mechanism::kDirect &&
        message.relayed_from == Route::kNetwork && !message.is_held) {
      message.wave = last;
    }
  }
}

}  // namespace

absl::Status ScheduleRounds(const PassOptions&, Module& module) {
  DeferStores(module);
  const int32_t turns = StagingTurns(module);
  RoundLoads loads(module, turns);
  RoundsEnd end;
  std::vector<std::vector<Message*>> waves(static_cast<size_t>(module.waves));
  for (Message& message : module.messages) {
    waves[static_cast<size_t>(message.wave)].push_back(&message);
  }
  for (size_t wave = 0; wave < waves.size(); ++wave) {
    absl::Status placed =
        PlaceWave(module, waves[wave], wave + 1 == waves.size(), end, loads);
    if (!placed.ok()) return placed;
  }
  const std::vector<PlacedMessage> places = PlacesInOrder(module);
  AssignStaging(places, turns, module);
  module.message_order.reserve(places.size());
  for (const PlacedMessage& place : places) {
    module.message_order.push_back(place.number);
  }
  SetWindows(module);
  return absl::OkStatus();
}

}  // namespace refit
