#include "compiler/passes/network_rounds.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <utility>

#include "compiler/ir/counting_sort.h"
#include "compiler/passes/relayed_rounds.h"
#include "compiler/passes/tree_rounds.h"
#include "compiler/passes/turns.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// The stride of a walk through 0 .. cycle-1 that visits each number once and
// never stays in one neighbourhood: coprime, near the golden section.
int64_t WalkStride(int64_t cycle) {
  int64_t stride = std::max<int64_t>(1, cycle * 618 / 1000);
  while (std::gcd(stride, cycle) != 1) ++stride;
  return stride;
}

// By rank: its place among the ranks of its side that are planned.
std::vector<int64_t> PlacesOnSides(const Module& module) {
  std::vector<int64_t> places;
  int64_t next = 0;
  for (int32_t rank = 0; rank < module.world_size(); ++rank) {
    if (rank == module.source_ranks()) next = 0;
    places.push_back(next);
    if (module.PartOf(Rank{rank}) == 0) ++next;
  }
  return places;
}

// The most that a rank sends, or receives.
int64_t BusiestBytes(const Module& module,
                     const std::vector<Message*>& messages) {
  std::array<std::vector<int64_t>, 2> bytes;
  for (auto& of : bytes) of.resize(static_cast<size_t>(module.world_size()));
  int64_t most = 0;
  for (const Message* message : messages) {
    for (int64_t* of : {&bytes[kSends][IndexOf(message->source)],
                        &bytes[kReceives][IndexOf(message->destination)]}) {
      *of += AlignStaging(message->size_bytes);
      most = std::max(most, *of);
    }
  }
  return most;
}

// Each in the first round with room for it, and for what is dealt out of it.
void PlaceInOrder(Module& module, const std::vector<Message*>& messages,
                  Scheduler& scheduler) {
  for (Message* message : messages) {
    if (message->dealt_by.count == 0) {
      scheduler.Place(*message);
    } else {
      scheduler.PlaceDealt(*message, DealtBy(module, *message));
    }
  }
}

// The large messages go in turns, so that all ranks have as many in a round,
// and then the others where there is room. A rank has no more than `room` in a
// round in each direction, beside what it is dealt.
void PlaceInTurns(Module& module, const std::vector<Message*>& messages,
                  int64_t room, bool is_last, Scheduler& scheduler) {
  int64_t most = 1;
  for (const Message* message : messages) {
    most = std::max(most, AlignStaging(message->size_bytes));
  }
  std::vector<Message*> large, others;
  std::vector<std::pair<Rank, Rank>> ends;
  double bytes = 0;
  double dealt = 0;
  for (Message* message : messages) {
    if (message->size_bytes <= most / 2) {
      others.push_back(message);
      continue;
    }
    large.push_back(message);
    ends.emplace_back(message->source, message->destination);
    const auto size = static_cast<double>(message->size_bytes);
    bytes += size;
    dealt += size * static_cast<double>(message->dealt_by.count);
  }
  const double others_of_rank = bytes > 0 ? dealt / bytes : 0;
  const std::vector<int32_t> turns = TurnsOf(ends);
  const int64_t count =
      turns.empty() ? 0 : *std::max_element(turns.begin(), turns.end()) + 1;
  // What fits into one round is not cut into two. A rank receives each message,
  // deals one out and is dealt as many.
  const int64_t busiest = BusiestBytes(module, messages);
  int64_t together = busiest <= room ? count : room / most;
  if (module.limits.shape.sizes == RoundShape::Sizes::kEven && busiest > room) {
    const auto rounds =
        static_cast<int64_t>(static_cast<double>(busiest) * kSlackOfRounds /
                             static_cast<double>(room)) +
        1;
    together = std::min(together, (count + rounds - 1) / rounds);
  }
  together = std::min(together,
                      static_cast<int64_t>(module.limits.operations_per_round /
                                           (1 + 2 * others_of_rank)));
  const auto size = static_cast<double>(most);
  const std::vector<int32_t> rounds = RoundsOfTurns(
      static_cast<int32_t>(count),
      static_cast<int32_t>(
          std::clamp<int64_t>(together, 1, module.limits.operations_per_round)),
      {.network = size / module.topology.network_bytes_per_second,
       .dealt = others_of_rank * (size / module.topology.peer_bytes_per_second +
                                  kDealtMessageSeconds)},
      /*ends=*/is_last);
  struct Placed {
    int32_t turn = 0;
    Message* message = nullptr;
  };
  std::vector<Placed> order;
  order.reserve(large.size());
  for (size_t i = 0; i < large.size(); ++i) {
    order.push_back({.turn = turns[i], .message = large[i]});
  }
  CountingSort(order, static_cast<size_t>(count), [](const Placed& placed) {
    return static_cast<size_t>(placed.turn);
  });
  scheduler.StartMessages(messages, std::max(room, most));
  for (const Placed& placed : order) {
    scheduler.PlaceDealt(
        *placed.message, DealtBy(module, *placed.message),
        scheduler.first_round() + rounds[static_cast<size_t>(placed.turn)]);
  }
  PlaceInOrder(module, others, scheduler);
}

}  // namespace

void SortByShift(const Module& module, std::vector<Message*>& messages) {
  const std::vector<int64_t> place = PlacesOnSides(module);
  const int64_t sources = module.source_ranks() / module.parts();
  const int64_t cycle = std::max(
      sources,
      static_cast<int64_t>(module.world_size()) / module.parts() - sources);
  const int64_t stride = WalkStride(cycle);
  struct Keyed {
    int64_t turn = 0;
    int64_t source = 0;
    Message* message = nullptr;
  };
  std::vector<Keyed> keyed;
  keyed.reserve(messages.size());
  for (Message* message : messages) {
    // A relay's sender counts on past the sources.
    const int64_t source = place[IndexOf(message->source)] +
                           (module.IsRelay(message->source) ? sources : 0);
    const int64_t destination = place[IndexOf(message->destination)];
    const int64_t shift = (destination - source % cycle + cycle) % cycle;
    keyed.push_back({shift * stride % cycle, source, message});
  }
  CountingSort(keyed, static_cast<size_t>(sources + cycle),
               [](const Keyed& k) { return static_cast<size_t>(k.source); });
  CountingSort(keyed, static_cast<size_t>(cycle),
               [](const Keyed& k) { return static_cast<size_t>(k.turn); });
  for (size_t i = 0; i < keyed.size(); ++i) messages[i] = keyed[i].message;
}

void PlaceOverNetwork(Module& module, const std::vector<Message*>& messages,
                      bool is_last, Scheduler& scheduler) {
  std::vector<Message*> routed, others;
  bool between_hosts = false;
  double received = 1;
  double passed_on = 0;
  int64_t most = 1;
  // Once: messages are many, and their order is not that in memory.
  for (Message* message : messages) {
    (message->is_routed ? routed : others).push_back(message);
    const bool relays = FedBy(module, *message) != nullptr;
    between_hosts |= relays && message->is_routed;
    const auto bytes = static_cast<double>(message->size_bytes);
    received += bytes;
    passed_on += bytes * static_cast<double>(message->dealt_by.count + relays);
    most = std::max(most, AlignStaging(message->size_bytes));
  }
  // What is passed on is staged beside what is received. Each round has room
  // for its part of both, else senders would wait for receivers.
  const auto room =
      static_cast<int64_t>(static_cast<double>(scheduler.round_bytes_max()) /
                           (1 + passed_on / received));
  if (between_hosts) {
    PlaceAlongTrees(module, routed, scheduler);
  } else {
    // Relays come after what feeds them, whatever their turn.
    if (module.limits.shape.all_in_turns && !module.stats.levels_sources) {
      routed.insert(routed.end(), others.begin(), others.end());
      others.clear();
    }
    if (!routed.empty()) {
      PlaceInTurns(module, routed, room, is_last, scheduler);
    }
  }
  PlaceRelayed(module, others, Route::kNetwork,
               routed.empty() ? std::nullopt : std::optional(room), scheduler);
}

}  // namespace refit
