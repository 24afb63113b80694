#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "compiler/ir/counting_sort.h"
#include "compiler/passes/network_rounds.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/relayed_rounds.h"
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

// By message: the offsets that follow from the order of programs, so that the
// file need not say them. What is held lies where it came.
std::vector<StagingOffsets> OffsetsInOrder(
    const Module& module, const std::vector<PlacedMessage>& places) {
  // Apart from the messages, which are large and not in this order.
  constexpr int64_t kHeld = -1;
  std::vector<StagingOffsets> offsets(module.messages.size());
  std::vector<int64_t> sizes(module.messages.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    sizes[i] = AlignStaging(module.messages[i].size_bytes);
    if (module.messages[i].is_held) offsets[i].source = kHeld;
  }
  std::vector<int64_t> next(static_cast<size_t>(module.world_size()));
  const auto take = [&](Rank rank, const PlacedMessage& place) {
    int64_t& end = next[IndexOf(rank)];
    return std::exchange(end, end + sizes[place.number]);
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
      const Rank rank = places[i].source;
      int64_t& source = offsets[places[i].number].source;
      if (source == kHeld) continue;
      source = take(rank, places[i]);
    }
  }
  return offsets;
}

// Where a wave is among others.
struct WavePlace {
  bool follows = false;  // the wave before has messages
  bool is_last = false;
};

// Places the messages of one wave, in rounds after all so far: but the first of
// the network has what the wave before deals out last.
void PlaceWave(Module& module, const std::vector<Message*>& of_wave,
               const WavePlace& place, Scheduler& scheduler) {
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
      // Placed with what it deals out.
      if (message->is_held) continue;
      const Route of_round =
          IsBesideNetwork(*message) ? Route::kNetwork : message->route;
      if (of_round == route && last == after_network) {
        messages.push_back(message);
      }
    }
    if (messages.empty()) continue;
    const Mechanism mechanism = module.MechanismOf(route);
    if (mechanism == Mechanism::kDirect) {
      scheduler.PlaceDirect(messages);
    } else {
      scheduler.StartRoute(route == Route::kNetwork && place.follows);
      SortByShift(module, messages);
      if (route == Route::kNetwork) {
        PlaceOverNetwork(module, messages, place.is_last, scheduler);
      } else {
        PlaceRelayed(module, messages, route, /*most_each_way=*/std::nullopt,
                     scheduler);
      }
    }
    module.rounds.resize(static_cast<size_t>(scheduler.round_count()),
                         {.route = route, .mechanism = mechanism});
  }
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
  Scheduler scheduler(module, StagingTurns(module));
  std::vector<std::vector<Message*>> waves(static_cast<size_t>(module.waves));
  for (Message& message : module.messages) {
    waves[static_cast<size_t>(message.wave)].push_back(&message);
  }
  for (size_t wave = 0; wave < waves.size(); ++wave) {
    PlaceWave(module, waves[wave],
              {.follows = wave > 0 && !waves[wave - 1].empty(),
               .is_last = wave + 1 == waves.size()},
              scheduler);
  }
  const std::vector<PlacedMessage> places = PlacesInOrder(module);
  scheduler.AssignStaging(module.is_compact ? OffsetsInOrder(module, places)
                                            : std::vector<StagingOffsets>(),
                          module.messages);
  module.message_order.reserve(places.size());
  for (const PlacedMessage& place : places) {
    module.message_order.push_back(place.number);
  }
  SetWindows(module);
  return absl::OkStatus();
}

}  // namespace refit
