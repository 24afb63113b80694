#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "compiler/ir/counting_sort.h"
#include "compiler/passes/dealt_turns.h"
#include "compiler/passes/passes.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// What is relayed is packed this many rounds after the one that brings it, so
// that it can be unpacked and packed again while another round is on the wire.
constexpr int32_t kRelayRounds = 2;

// Where relays are less than this part of what is received, they go beside
// what is not relayed, so much faster than that: their rounds end before its.
constexpr double kFewRelays = 0.5;
constexpr double kRelaysAhead = 1.15;

// A relay looks for room in so many of the last rounds. Earlier ones are full
// at one of its ends or the other, and to look at all of them for each message
// takes long in plans of many small ones.
constexpr int32_t kRelaysLookBack = 1024;

enum Direction : uint8_t { kSends = 0, kReceives = 1 };

// What one rank has in one round so far.
struct RankRound {
  int64_t staging_bytes = 0;
  std::array<int64_t, 2> bytes = {};  // by direction; not what is dealt out
  int32_t operations = 0;
};

// Messages of similar size look for room alike.
constexpr size_t kSizeClasses = 64;
size_t SizeClass(int64_t size_bytes) {
  return static_cast<size_t>(std::bit_width(static_cast<uint64_t>(size_bytes)) -
                             1);
}

// Where a message lies in its round's staging, at both ends.
struct StagingOffsets {
  int64_t source = 0;
  int64_t destination = 0;
};

// First-fit of messages into rounds.
class Scheduler {
 public:
  // `turns`: how many consecutive rounds share no staging.
  Scheduler(const Limits& limits, int32_t turns, int32_t world_size)
      : limits_(limits),
        turns_(turns),
        round_bytes_max_(limits.staging_bytes / turns / kStagingAlignmentBytes *
                         kStagingAlignmentBytes),
        ranks_(static_cast<size_t>(world_size)) {}

  // What is placed next goes into rounds after all rounds so far. With
  // `beside_dealt` it may begin in the last one, if that has nothing but what
  // ranks deal out.
  void StartRoute(bool beside_dealt) {
    first_round_ = beside_dealt ? not_dealt_end_ : round_count_;
  }
  // `messages` will be placed next. In no round a rank sends more than
  // `direction_bytes` of them, or receives more.
  void StartMessages(const std::vector<Message*>& messages,
                     int64_t direction_bytes);
  // In round `not_before` or a later one.
  void Place(Message& message, int32_t not_before = 0);
  // What a rank deals out in the round after that in which it came, which is
  // not before `not_before`.
  void PlaceDealt(Message& message, absl::Span<Message> dealt_by,
                  int32_t not_before = 0);
  // `messages` are the next rounds, one for each `pipeline_round`: they need
  // neither staging nor operations.
  void PlaceDirect(const std::vector<Message*>& messages);
  int32_t round_count() const { return round_count_; }
  int32_t first_round() const { return first_round_; }
  int64_t round_bytes_max() const { return round_bytes_max_; }

  // Turns offsets within a round's staging into offsets within the rank's
  // arena. `in_round`, if there are any, replace those in which messages were
  // placed.
  void AssignStaging(const std::vector<StagingOffsets>& in_round,
                     std::vector<Message>& messages) const;

 private:
  // Where the messages of one size class of a rank look for room.
  struct OpenRounds {
    int64_t smallest_bytes = std::numeric_limits<int64_t>::max();
    int32_t first = 0;  // no round before it takes `smallest_bytes`
  };
  struct RankState {
    std::vector<RankRound> rounds;
    std::array<std::array<OpenRounds, kSizeClasses>, 2> open;  // by direction
    int64_t round_bytes = 0;  // the most staging of one round
  };

  OpenRounds& OpenOf(Rank rank, Direction direction, int64_t size_bytes) {
    return ranks_[IndexOf(rank)].open[direction][SizeClass(size_bytes)];
  }
  RankRound& At(Rank rank, int32_t round) {
    std::vector<RankRound>& rounds = ranks_[IndexOf(rank)].rounds;
    const size_t index = static_cast<size_t>(round);
    if (rounds.size() <= index) rounds.resize(index + 1);
    return rounds[index];
  }
  bool HasRoom(const RankRound& at, int64_t size_bytes) const {
    return at.operations < limits_.operations_per_round &&
           at.staging_bytes + size_bytes <= round_bytes_max_;
  }
  bool Fits(const RankRound& at, Direction direction,
            int64_t size_bytes) const {
    return HasRoom(at, size_bytes) &&
           at.bytes[direction] + size_bytes <= direction_bytes_max_;
  }
  // The first round in which the rank may have room. Rounds only fill up, so
  // what was found full is never looked at again.
  int32_t FirstOpen(Rank rank, Direction direction, int64_t size_bytes);
  // The offset of the message in the round's staging.
  int64_t Take(Rank rank, Direction direction, const Message& message);

  void PlaceAt(Message& message, int32_t round);

  const Limits& limits_;
  const int32_t turns_;
  int64_t round_bytes_max_;
  int64_t direction_bytes_max_ = 0;
  int32_t first_round_ = 0;
  std::vector<RankState> ranks_;
  int32_t round_count_ = 0;
  int32_t not_dealt_end_ = 0;  // rounds from here on only deal out
};

void Scheduler::StartMessages(const std::vector<Message*>& messages,
                              int64_t direction_bytes) {
  direction_bytes_max_ = direction_bytes;
  for (RankState& rank : ranks_) {
    for (auto& open : rank.open) open.fill({.first = first_round_});
  }
  for (const Message* message : messages) {
    const int64_t bytes = message->size_bytes;
    for (OpenRounds* open : {&OpenOf(message->source, kSends, bytes),
                             &OpenOf(message->destination, kReceives, bytes)}) {
      open->smallest_bytes = std::min(open->smallest_bytes, bytes);
    }
  }
}

int32_t Scheduler::FirstOpen(Rank rank, Direction direction,
                             int64_t size_bytes) {
  const std::vector<RankRound>& rounds = ranks_[IndexOf(rank)].rounds;
  OpenRounds& open = OpenOf(rank, direction, size_bytes);
  while (open.first < static_cast<int32_t>(rounds.size()) &&
         !Fits(rounds[static_cast<size_t>(open.first)], direction,
               open.smallest_bytes)) {
    ++open.first;
  }
  return open.first;
}

int64_t Scheduler::Take(Rank rank, Direction direction,
                        const Message& message) {
  RankState& state = ranks_[IndexOf(rank)];
  RankRound& at = At(rank, message.round);
  const int64_t offset = at.staging_bytes;
  at.staging_bytes += AlignStaging(message.size_bytes);
  if (!message.is_held) {
    at.bytes[direction] += AlignStaging(message.size_bytes);
  }
  at.operations += 1;
  state.round_bytes = std::max(state.round_bytes, at.staging_bytes);
  return offset;
}

void Scheduler::Place(Message& message, int32_t not_before) {
  const int64_t bytes = message.size_bytes;
  int32_t round =
      std::max({not_before, FirstOpen(message.source, kSends, bytes),
                FirstOpen(message.destination, kReceives, bytes)});
  // No round that a rank does not have yet is full.
  const std::vector<RankRound>& sends = ranks_[IndexOf(message.source)].rounds;
  const std::vector<RankRound>& receives =
      ranks_[IndexOf(message.destination)].rounds;
  const auto fits = [&](const std::vector<RankRound>& rounds,
                        Direction direction) {
    const auto index = static_cast<size_t>(round);
    return index < rounds.size() ? Fits(rounds[index], direction, bytes)
                                 : Fits(RankRound(), direction, bytes);
  };
  while (!fits(sends, kSends) || !fits(receives, kReceives)) ++round;
  PlaceAt(message, round);
}

void Scheduler::PlaceAt(Message& message, int32_t round) {
  message.round = round;
  if (message.is_held) {
    At(message.source, round).operations += 1;
  } else {
    message.source_staging_offset = Take(message.source, kSends, message);
  }
  message.destination_staging_offset =
      Take(message.destination, kReceives, message);
  round_count_ = std::max(round_count_, round + 1);
  if (!message.is_held) not_dealt_end_ = std::max(not_dealt_end_, round + 1);
}

void Scheduler::PlaceDealt(Message& message, absl::Span<Message> dealt_by,
                           int32_t not_before) {
  const int64_t bytes = message.size_bytes;
  const Rank dealer = message.destination;
  const auto fits = [&](int32_t round) {
    if (!Fits(At(message.source, round), kSends, bytes) ||
        !Fits(At(dealer, round), kReceives, bytes) ||
        At(dealer, round + 1).operations +
                static_cast<int32_t>(dealt_by.size()) >
            limits_.operations_per_round) {
      return false;
    }
    return std::all_of(dealt_by.begin(), dealt_by.end(),
                       [&](const Message& held) {
                         return HasRoom(At(held.destination, round + 1), bytes);
                       });
  };
  int32_t round =
      std::max({not_before, FirstOpen(message.source, kSends, bytes),
                FirstOpen(dealer, kReceives, bytes)});
  while (!fits(round)) ++round;
  PlaceAt(message, round);
  for (Message& held : dealt_by) PlaceAt(held, round + 1);
}

void Scheduler::PlaceDirect(const std::vector<Message*>& messages) {
  const int32_t first = round_count_;
  for (Message* message : messages) {
    message->round = first + message->pipeline_round;
    round_count_ = std::max(round_count_, message->round + 1);
  }
  not_dealt_end_ = round_count_;
}

void Scheduler::AssignStaging(const std::vector<StagingOffsets>& in_round,
                              std::vector<Message>& messages) const {
  for (Message& message : messages) {
    if (message.mechanism == Mechanism::kDirect) continue;
    if (!in_round.empty()) {
      const StagingOffsets& offsets =
          in_round[static_cast<size_t>(&message - messages.data())];
      message.source_staging_offset = offsets.source;
      message.destination_staging_offset = offsets.destination;
    }
    const int64_t turn = message.round % turns_;
    if (message.is_held) {
      message.source_staging_offset =
          messages[message.fed_by.begin].destination_staging_offset;
    } else {
      message.source_staging_offset +=
          turn * ranks_[IndexOf(message.source)].round_bytes;
    }
    message.destination_staging_offset +=
        turn * ranks_[IndexOf(message.destination)].round_bytes;
  }
}

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
      int64_t& source = offsets[places[i].number].source;
      if (source != kHeld) source = take(places[i].source, places[i]);
    }
  }
  return offsets;
}

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

// Whom the message is for: where one rank deals it out to one other, that one.
Rank ReceiverOf(const Module& module, const Message& message) {
  return message.dealt_by.count == 1 && !message.is_unpacked
             ? module.messages[message.dealt_by.begin].destination
             : message.destination;
}

// In shifts: at each turn every source talks to a different destination, so
// that a round loads all links alike instead of queueing at one receiver.
// Neighbouring shifts often carry messages of one kind (neighbouring ranks hold
// neighbouring shards), so the shifts are taken far apart from each other.
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
    const int64_t destination = place[IndexOf(ReceiverOf(module, *message))];
    const int64_t shift = (destination - source % cycle + cycle) % cycle;
    keyed.push_back({shift * stride % cycle, source, message});
  }
  CountingSort(keyed, static_cast<size_t>(sources + cycle),
               [](const Keyed& k) { return static_cast<size_t>(k.source); });
  CountingSort(keyed, static_cast<size_t>(cycle),
               [](const Keyed& k) { return static_cast<size_t>(k.turn); });
  for (size_t i = 0; i < keyed.size(); ++i) messages[i] = keyed[i].message;
}

// The message that brings a staged relay its contents; null for any other. It
// is one: in staged rounds what a rank passes on is what it received.
const Message* FedBy(const Module& module, const Message& message) {
  return message.mechanism == Mechanism::kStaged && message.fed_by.count > 0
             ? &module.messages[message.fed_by.begin]
             : nullptr;
}

// By their position among the messages of their pair: all receivers get their
// first message before any gets its second.
void SortByTurn(std::vector<Message*>& messages) {
  absl::flat_hash_map<std::pair<Rank, Rank>, int32_t> count;
  std::vector<std::pair<int32_t, Message*>> turns;
  turns.reserve(messages.size());
  for (Message* message : messages) {
    turns.push_back(
        {count[{message->source, message->destination}]++, message});
  }
  std::stable_sort(
      turns.begin(), turns.end(),
      [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 0; i < turns.size(); ++i) messages[i] = turns[i].second;
}

// Where a wave is among others.
struct WavePlace {
  bool follows = false;  // the wave before has messages
  bool is_last = false;
};

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

absl::Span<Message> DealtBy(Module& module, const Message& message) {
  return absl::MakeSpan(module.messages)
      .subspan(message.dealt_by.begin, message.dealt_by.count);
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

// What receivers deal out: the large messages in turns, so that all ranks have
// as many in a round, and then the others where there is room. A rank has no
// more than `room` in a round, beside what it is dealt.
void PlaceInTurns(Module& module, const std::vector<Message*>& messages,
                  int64_t room, const WavePlace& place, Scheduler& scheduler) {
  int64_t most = 1;     // of what is dealt out
  int64_t largest = 1;  // of all
  for (const Message* message : messages) {
    const int64_t staged = AlignStaging(message->size_bytes);
    largest = std::max(largest, staged);
    if (message->dealt_by.count > 0) most = std::max(most, staged);
  }
  std::vector<Message*> large, others;
  std::vector<std::pair<Rank, Rank>> ends;
  size_t dealt_to = 0;
  for (Message* message : messages) {
    if (message->dealt_by.count == 0 || message->size_bytes <= most / 2) {
      others.push_back(message);
      continue;
    }
    large.push_back(message);
    ends.emplace_back(message->source, message->destination);
    dealt_to = std::max(dealt_to, message->dealt_by.count);
  }
  const std::vector<int32_t> turns = TurnsOf(ends);
  const int32_t count =
      turns.empty() ? 0 : *std::max_element(turns.begin(), turns.end()) + 1;
  // What fits into one round is not cut into two. A rank receives each message,
  // deals one out and is dealt as many.
  const int64_t together = std::min<int64_t>(
      BusiestBytes(module, messages) <= room ? count : room / most,
      module.limits.operations_per_round /
          static_cast<int64_t>(1 + 2 * dealt_to));
  const double bytes = static_cast<double>(most);
  const std::vector<int32_t> rounds = RoundsOfTurns(
      count,
      static_cast<int32_t>(
          std::clamp<int64_t>(together, 1, module.limits.operations_per_round)),
      {.network = bytes / module.topology.network_bytes_per_second,
       .dealt = static_cast<double>(dealt_to) *
                (bytes / module.topology.peer_bytes_per_second +
                 kDealtMessageSeconds)},
      /*ends=*/place.is_last);
  struct Placed {
    int32_t turn = 0;
    Message* message = nullptr;
  };
  std::vector<Placed> order;
  for (size_t i = 0; i < large.size(); ++i) {
    order.push_back({.turn = turns[i], .message = large[i]});
  }
  CountingSort(order, static_cast<size_t>(count), [](const Placed& placed) {
    return static_cast<size_t>(placed.turn);
  });
  scheduler.StartMessages(messages, std::max(room, largest));
  for (const Placed& placed : order) {
    scheduler.PlaceDealt(
        *placed.message, DealtBy(module, *placed.message),
        scheduler.first_round() + rounds[static_cast<size_t>(placed.turn)]);
  }
  PlaceInOrder(module, others, scheduler);
}

// Those that are passed on come first, so that relays have their part early;
// then the relays, in the order in which their contents arrive; what nobody
// passes on fills the room that is left.
//
// Where ranks relay, a round has `relayed_per_round` messages each way for a
// rank: senders of many would only make receivers wait, and the pipeline
// longer.
void PlaceStaged(Module& module, std::vector<Message*> messages,
                 const std::vector<bool>& passed_on, const WavePlace& place,
                 int64_t relayed_per_round, bool beside_dealt,
                 Scheduler& scheduler) {
  const auto fed_by = [&](const Message* message) {
    return FedBy(module, *message);
  };
  SortByShift(module, messages);
  std::vector<Message*> feeds, relays, others;
  int64_t largest = 0;  // of feeds and relays
  bool deals = false;
  double received = 1;
  double relayed = 0;
  double dealt = 0;
  int64_t most = 1;
  // Once: messages are many, and their order is not that in memory.
  for (Message* message : messages) {
    const bool relays_it = fed_by(message) != nullptr;
    const int64_t staged = AlignStaging(message->size_bytes);
    if (relays_it ||
        passed_on[static_cast<size_t>(message - module.messages.data())]) {
      largest = std::max(largest, staged);
      (relays_it ? relays : feeds).push_back(message);
    } else {
      others.push_back(message);
    }
    const auto bytes = static_cast<double>(message->size_bytes);
    received += bytes;
    if (relays_it) relayed += bytes;
    dealt += bytes * static_cast<double>(message->dealt_by.count);
    deals |= message->dealt_by.count > 0;
    most = std::max(most, staged);
  }
  // What is passed on is staged beside what is received. Each round has room
  // for its part of both, else senders would wait for receivers.
  const double room = static_cast<double>(scheduler.round_bytes_max()) /
                      (1 + (relayed + dealt) / received);
  int64_t each_way = largest * relayed_per_round;
  if (relayed < received * kFewRelays) {
    each_way = std::max(
        each_way,
        static_cast<int64_t>(room * relayed / received * kRelaysAhead));
  }
  scheduler.StartRoute(beside_dealt);
  scheduler.StartMessages(feeds, each_way);
  SortByTurn(feeds);
  for (Message* message : feeds) scheduler.Place(*message);
  scheduler.StartMessages(relays, each_way);
  std::stable_sort(relays.begin(), relays.end(),
                   [&](const Message* a, const Message* b) {
                     return fed_by(a)->round < fed_by(b)->round;
                   });
  for (Message* message : relays) {
    scheduler.Place(*message,
                    std::max(fed_by(message)->round + kRelayRounds,
                             scheduler.round_count() - kRelaysLookBack));
  }
  if (deals && !module.limits.deals) {
    PlaceInTurns(module, others, static_cast<int64_t>(room), place, scheduler);
    return;
  }
  int64_t direction_bytes = std::numeric_limits<int64_t>::max();
  if (deals) {
    // Whole messages: each rank has as many as any other, and the order of
    // shifts stays whole.
    direction_bytes =
        most * std::max<int64_t>(static_cast<int64_t>(room) / most, 1);
    const int64_t busiest = BusiestBytes(module, others);
    // What fits into one round is not cut into two.
    if (busiest <= static_cast<int64_t>(room)) direction_bytes = busiest;
  } else if (relayed > 0) {
    direction_bytes = std::max(static_cast<int64_t>(room), most);
  }
  scheduler.StartMessages(others, direction_bytes);
  PlaceInOrder(module, others, scheduler);
}

// Places the messages of one wave, in rounds after all so far: but the first of
// the network has what the wave before deals out last.
void PlaceWave(Module& module, const std::vector<Message*>& of_wave,
               const WavePlace& place, Scheduler& scheduler) {
  std::vector<bool> passed_on(module.messages.size());  // by message
  for (const Message* message : of_wave) {
    if (message->is_held) continue;
    const Message* fed_by = FedBy(module, *message);
    if (fed_by == nullptr) continue;
    passed_on[static_cast<size_t>(fed_by - module.messages.data())] = true;
  }
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
      if (message->route == route && last == after_network) {
        messages.push_back(message);
      }
    }
    if (messages.empty()) continue;
    const Mechanism mechanism = module.MechanismOf(route);
    if (mechanism == Mechanism::kDirect) {
      scheduler.PlaceDirect(messages);
    } else {
      PlaceStaged(module, std::move(messages), passed_on, place,
                  StagedRoundOf(route).relayed_messages,
                  route == Route::kNetwork && place.follows, scheduler);
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

// Where ranks deal out, what came in one round leaves in the next. So a rank
// that also packs in the one after that does so elsewhere.
int32_t TurnsOf(const Module& module) {
  const bool packs =
      std::any_of(module.messages.begin(), module.messages.end(),
                  [&](const Message& message) {
                    return module.IsRelay(message.source) && !message.is_held &&
                           message.mechanism == Mechanism::kStaged;
                  });
  const int32_t slots = module.limits.slots;
  return module.deals.empty() ? slots : std::max(packs ? slots + 1 : slots, 2);
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
  Scheduler scheduler(module.limits, TurnsOf(module), module.world_size());
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
