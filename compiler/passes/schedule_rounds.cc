#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
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

// A message along a tree takes its own turn rather than an earlier round, if
// that is not later than so many times all turns.
constexpr int32_t kTurnsAhead = 2;

// Beside a full message along a tree a round has room for small ones, as large
// as this part of it.
constexpr int64_t kSmallBeside = 8;

// Where relays are less than this part of what is received, they go beside
// what is not relayed, so much faster than that: their rounds end before its.
constexpr double kFewRelays = 0.5;
constexpr double kRelaysAhead = 1.15;

// What ranks pack may lie apart if it takes no more than this part of staging.
constexpr int64_t kPackedPart = 4;

// A relay looks for room in so many of the last rounds. Earlier ones are full
// at one of its ends or the other, and to look at all of them for each message
// takes long in plans of many small ones.
constexpr int32_t kRelaysLookBack = 1024;

enum Direction : uint8_t { kSends = 0, kReceives = 1 };

// What one rank has in one round so far.
struct RankRound {
  int64_t staging_bytes = 0;
  int64_t packed_bytes = 0;           // of what lies apart
  std::array<int64_t, 2> bytes = {};  // by direction; not inside the host
  int64_t peer_bytes = 0;  // that a source of its host sends it beside these
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

// How a rank's staging is divided.
struct StagingShape {
  int32_t turns = 0;  // how many consecutive rounds share none of it
  // Most that a destination packs for one round if that lies apart: behind what
  // it receives, for `slots` rounds. 0: it lies beside what it receives.
  int64_t packed_bytes = 0;
};

// First-fit of messages into rounds.
class Scheduler {
 public:
  Scheduler(const Module& module, const StagingShape& shape)
      : limits_(module.limits),
        shape_(shape),
        source_ranks_(static_cast<size_t>(module.source_ranks())),
        round_bytes_max_(
            (limits_.staging_bytes - shape.packed_bytes * limits_.slots) /
            shape.turns / kStagingAlignmentBytes * kStagingAlignmentBytes),
        ranks_(static_cast<size_t>(module.world_size())) {}

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
  // In no round a rank receives more than `bytes` from sources of its host
  // beside what comes over the network.
  void LimitEntering(int64_t bytes) { peer_bytes_max_ = bytes; }
  // In round `not_before` or a later one.
  void Place(Message& message, int32_t not_before = 0);
  // What a rank deals out in the round after that in which it came, which is
  // not before `not_before`.
  void PlaceDealt(Message& message, absl::Span<Message> dealt_by,
                  int32_t not_before = 0);
  // Whether it could do so in that round.
  bool FitsDealt(const Message& message, absl::Span<const Message> dealt_by,
                 int32_t round);
  // Whether the message has room in the round, and what is dealt out of it in
  // the next one.
  bool FitsIn(const Message& message, absl::Span<const Message> dealt_by,
              int32_t round);
  // There.
  void PlaceIn(Message& message, absl::Span<Message> dealt_by, int32_t round);
  // `messages` are the next rounds, one for each `pipeline_round`: they need
  // neither staging nor operations.
  void PlaceDirect(const std::vector<Message*>& messages);
  int32_t round_count() const { return round_count_; }
  int32_t first_round() const { return first_round_; }
  int64_t round_bytes_max() const { return round_bytes_max_; }
  bool PacksApart(Rank rank) const {
    return shape_.packed_bytes > 0 && IndexOf(rank) >= source_ranks_;
  }

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
    int64_t round_bytes = 0;   // the most staging of one round
    int64_t packed_bytes = 0;  // the most that lies apart
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
  bool Fits(Rank rank, const RankRound& at, Direction direction,
            int64_t size_bytes) const {
    const bool room =
        direction == kSends && PacksApart(rank)
            ? at.operations < limits_.operations_per_round &&
                  at.packed_bytes + size_bytes <= shape_.packed_bytes
            : HasRoom(at, size_bytes);
    return room && at.bytes[direction] + size_bytes <= direction_bytes_max_;
  }
  // Of a message that is not dealt out.
  bool FitsAtBoth(const Message& message, int32_t round) {
    const int64_t bytes = message.size_bytes;
    const RankRound& source = At(message.source, round);
    if (message.is_held) {
      return source.operations < limits_.operations_per_round &&
             source.bytes[kSends] + bytes <= direction_bytes_max_ &&
             Fits(message.destination, At(message.destination, round),
                  kReceives, bytes);
    }
    if (!IsBesideNetwork(message)) {
      return Fits(message.source, source, kSends, bytes) &&
             Fits(message.destination, At(message.destination, round),
                  kReceives, bytes);
    }
    if (!HasRoom(source, bytes)) return false;
    const RankRound& destination = At(message.destination, round);
    return HasRoom(destination, bytes) &&
           destination.peer_bytes + bytes <= peer_bytes_max_;
  }
  // The first round in which the rank may have room. Rounds only fill up, so
  // what was found full is never looked at again.
  int32_t FirstOpen(Rank rank, Direction direction, int64_t size_bytes);
  // The offset of the message in the round's staging.
  int64_t Take(Rank rank, Direction direction, const Message& message);

  void PlaceAt(Message& message, int32_t round);

  const Limits& limits_;
  const StagingShape shape_;
  const size_t source_ranks_;
  int64_t round_bytes_max_;
  int64_t direction_bytes_max_ = 0;
  int64_t peer_bytes_max_ = 0;
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
         !Fits(rank, rounds[static_cast<size_t>(open.first)], direction,
               open.smallest_bytes)) {
    ++open.first;
  }
  return open.first;
}

int64_t Scheduler::Take(Rank rank, Direction direction,
                        const Message& message) {
  RankState& state = ranks_[IndexOf(rank)];
  RankRound& at = At(rank, message.round);
  const bool apart = direction == kSends && PacksApart(rank);
  int64_t& end = apart ? at.packed_bytes : at.staging_bytes;
  int64_t& most = apart ? state.packed_bytes : state.round_bytes;
  const int64_t offset = end;
  end += AlignStaging(message.size_bytes);
  if (!IsBesideNetwork(message)) {
    at.bytes[direction] += AlignStaging(message.size_bytes);
  } else if (!message.is_held && direction == kReceives) {
    at.peer_bytes += AlignStaging(message.size_bytes);
  }
  at.operations += 1;
  most = std::max(most, end);
  return offset;
}

void Scheduler::Place(Message& message, int32_t not_before) {
  const int64_t bytes = message.size_bytes;
  int32_t round =
      std::max({not_before, FirstOpen(message.source, kSends, bytes),
                FirstOpen(message.destination, kReceives, bytes)});
  // No round that a rank does not have yet is full.
  const auto fits = [&](Rank rank, Direction direction) {
    const std::vector<RankRound>& rounds = ranks_[IndexOf(rank)].rounds;
    const auto index = static_cast<size_t>(round);
    return Fits(rank, index < rounds.size() ? rounds[index] : RankRound(),
                direction, bytes);
  };
  while (!fits(message.source, kSends) ||
         !fits(message.destination, kReceives)) {
    ++round;
  }
  PlaceAt(message, round);
}

void Scheduler::PlaceAt(Message& message, int32_t round) {
  message.round = round;
  if (message.is_held) {
    RankRound& at = At(message.source, round);
    at.operations += 1;
    if (!IsBesideNetwork(message)) {
      at.bytes[kSends] += AlignStaging(message.size_bytes);
    }
  } else {
    message.source_staging_offset = Take(message.source, kSends, message);
  }
  message.destination_staging_offset =
      Take(message.destination, kReceives, message);
  round_count_ = std::max(round_count_, round + 1);
  if (!IsBesideNetwork(message)) {
    not_dealt_end_ = std::max(not_dealt_end_, round + 1);
  }
}

bool Scheduler::FitsDealt(const Message& message,
                          absl::Span<const Message> dealt_by, int32_t round) {
  const int64_t bytes = message.size_bytes;
  const Rank dealer = message.destination;
  if (!FitsAtBoth(message, round) ||
      At(dealer, round + 1).operations + static_cast<int32_t>(dealt_by.size()) >
          limits_.operations_per_round) {
    return false;
  }
  return std::all_of(dealt_by.begin(), dealt_by.end(),
                     [&](const Message& held) {
                       return HasRoom(At(held.destination, round + 1), bytes);
                     });
}

void Scheduler::PlaceDealt(Message& message, absl::Span<Message> dealt_by,
                           int32_t not_before) {
  const int64_t bytes = message.size_bytes;
  int32_t round =
      std::max({not_before, FirstOpen(message.source, kSends, bytes),
                FirstOpen(message.destination, kReceives, bytes)});
  while (!FitsDealt(message, dealt_by, round)) ++round;
  PlaceIn(message, dealt_by, round);
}

bool Scheduler::FitsIn(const Message& message,
                       absl::Span<const Message> dealt_by, int32_t round) {
  return dealt_by.empty() ? FitsAtBoth(message, round)
                          : FitsDealt(message, dealt_by, round);
}

void Scheduler::PlaceIn(Message& message, absl::Span<Message> dealt_by,
                        int32_t round) {
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
    const int64_t turn = message.round % shape_.turns;
    const RankState& source = ranks_[IndexOf(message.source)];
    if (message.is_held) {
      message.source_staging_offset =
          messages[message.fed_by.begin].destination_staging_offset;
    } else if (PacksApart(message.source)) {
      message.source_staging_offset +=
          shape_.turns * source.round_bytes +
          message.round % limits_.slots * source.packed_bytes;
    } else {
      message.source_staging_offset += turn * source.round_bytes;
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
    const Module& module, const Scheduler& scheduler,
    const std::vector<PlacedMessage>& places) {
  // Apart from the messages, which are large and not in this order.
  constexpr int64_t kHeld = -1;
  std::vector<StagingOffsets> offsets(module.messages.size());
  std::vector<int64_t> sizes(module.messages.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    sizes[i] = AlignStaging(module.messages[i].size_bytes);
    if (module.messages[i].is_held) offsets[i].source = kHeld;
  }
  std::vector<int64_t> next(static_cast<size_t>(module.world_size()));
  std::vector<int64_t> next_apart = next;
  const auto take = [&](Rank rank, const PlacedMessage& place, bool apart) {
    int64_t& end = (apart ? next_apart : next)[IndexOf(rank)];
    return std::exchange(end, end + sizes[place.number]);
  };
  for (size_t begin = 0, end = 0; begin < places.size(); begin = end) {
    while (end < places.size() && places[end].round == places[begin].round) {
      next[IndexOf(places[end].source)] = 0;
      next_apart[IndexOf(places[end].source)] = 0;
      next[IndexOf(places[end].destination)] = 0;
      ++end;
    }
    for (size_t i = begin; i < end; ++i) {
      offsets[places[i].number].destination =
          take(places[i].destination, places[i], /*apart=*/false);
    }
    for (size_t i = begin; i < end; ++i) {
      const Rank rank = places[i].source;
      int64_t& source = offsets[places[i].number].source;
      if (source == kHeld) continue;
      source = take(rank, places[i], scheduler.PacksApart(rank));
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

// What whole hosts are dealt. Large messages go in turns: in each a pair takes
// what is passed on first, so that relays have their part early, or a message
// for the receiver that is dealt least in the round. What has no room in the
// round of its turn comes after all turns, and so do small messages.
class HostTurns {
 public:
  HostTurns(Module& module, const std::vector<bool>& passed_on,
            Scheduler& scheduler)
      : module_(module), passed_on_(passed_on), scheduler_(scheduler) {}

  // `dealt_part`: of what ranks receive, so much is dealt out.
  void Place(const std::vector<Message*>& messages, double dealt_part);

 private:
  using Ends = std::pair<Rank, Rank>;
  struct Pair {
    std::vector<Message*> first;  // relays, or what they pass on; in order
    size_t taken = 0;             // of `first`
    std::vector<std::pair<Rank, std::vector<Message*>>> rest;  // by receiver
  };

  void Add(Message* message, Pair& pair);
  // The turns, those with few relays first: relays wait for what feeds them.
  std::vector<std::vector<size_t>> OrderTurns(
      absl::Span<const Ends> ends, absl::Span<const size_t> pairs) const;
  bool Fits(const Message& message, int32_t round);
  // Takes a message out of the pair; first it looks for one that fits.
  Message* Next(Pair& pair, int32_t round);
  void PlaceOne(Message& message, int32_t not_before);
  // Wherever there is room.
  void PlaceRest(std::vector<Message*>& messages);

  Module& module_;
  const std::vector<bool>& passed_on_;  // by message
  Scheduler& scheduler_;
  std::vector<Pair> pairs_;
  absl::flat_hash_map<Rank, int32_t> dealt_;  // messages of the round
};

void HostTurns::Add(Message* message, Pair& pair) {
  if (FedBy(module_, *message) != nullptr ||
      passed_on_[static_cast<size_t>(message - module_.messages.data())]) {
    pair.first.push_back(message);
    return;
  }
  const Rank receiver = ReceiverOf(module_, *message);
  auto of_receiver =
      std::find_if(pair.rest.begin(), pair.rest.end(),
                   [&](const auto& of) { return of.first == receiver; });
  if (of_receiver == pair.rest.end()) {
    of_receiver =
        pair.rest.emplace(pair.rest.end(), receiver, std::vector<Message*>());
  }
  of_receiver->second.push_back(message);
}

std::vector<std::vector<size_t>> HostTurns::OrderTurns(
    absl::Span<const Ends> ends, absl::Span<const size_t> pairs) const {
  struct Turn {
    std::vector<size_t> pairs;
    int32_t relays = 0;
  };
  std::vector<Turn> turns;
  const std::vector<int32_t> numbers = TurnsOf(ends);
  for (size_t i = 0; i < ends.size(); ++i) {
    const auto number = static_cast<size_t>(numbers[i]);
    if (turns.size() <= number) turns.resize(number + 1);
    turns[number].pairs.push_back(pairs[i]);
    if (module_.IsRelay(ends[i].first)) ++turns[number].relays;
  }
  std::stable_sort(
      turns.begin(), turns.end(),
      [](const Turn& a, const Turn& b) { return a.relays < b.relays; });
  std::vector<std::vector<size_t>> order;
  for (Turn& turn : turns) order.push_back(std::move(turn.pairs));
  return order;
}

bool HostTurns::Fits(const Message& message, int32_t round) {
  if (const Message* fed_by = FedBy(module_, message);
      fed_by != nullptr &&
      (fed_by->round < 0 || fed_by->round + kRelayRounds > round)) {
    return false;
  }
  return scheduler_.FitsDealt(message, DealtBy(module_, message), round);
}

Message* HostTurns::Next(Pair& pair, int32_t round) {
  if (pair.taken < pair.first.size()) return pair.first[pair.taken++];
  std::sort(
      pair.rest.begin(), pair.rest.end(), [&](const auto& a, const auto& b) {
        return std::tuple(dealt_[a.first], -std::ssize(a.second), a.first) <
               std::tuple(dealt_[b.first], -std::ssize(b.second), b.first);
      });
  auto best = std::find_if(
      pair.rest.begin(), pair.rest.end(),
      [&](const auto& of) { return Fits(*of.second.back(), round); });
  if (best == pair.rest.end()) best = pair.rest.begin();
  Message* message = best->second.back();
  best->second.pop_back();
  if (best->second.empty()) pair.rest.erase(best);
  return message;
}

void HostTurns::PlaceOne(Message& message, int32_t not_before) {
  if (message.dealt_by.count == 0) {
    scheduler_.Place(message, not_before);
  } else {
    scheduler_.PlaceDealt(message, DealtBy(module_, message), not_before);
  }
}

void HostTurns::PlaceRest(std::vector<Message*>& messages) {
  const auto relays = std::stable_partition(
      messages.begin(), messages.end(), [&](const Message* message) {
        return FedBy(module_, *message) == nullptr;
      });
  for (auto it = messages.begin(); it != relays; ++it) PlaceOne(**it, 0);
  for (auto it = relays; it != messages.end(); ++it) {
    PlaceOne(**it, FedBy(module_, **it)->round + kRelayRounds);
  }
}

void HostTurns::Place(const std::vector<Message*>& messages,
                      double dealt_part) {
  int64_t most = 1;
  for (const Message* message : messages) {
    most = std::max(most, AlignStaging(message->size_bytes));
  }
  std::vector<Message*> late, small;
  std::vector<Ends> ends;
  std::vector<size_t> pairs;  // by `ends`
  absl::flat_hash_map<Ends, size_t> numbers;
  for (Message* message : messages) {
    if (message->dealt_by.count > 1 || message->size_bytes <= most / 2) {
      small.push_back(message);
      continue;
    }
    ends.emplace_back(message->source, message->destination);
    pairs.push_back(
        numbers.try_emplace(ends.back(), pairs_.size()).first->second);
    pairs_.resize(numbers.size());
    Add(message, pairs_[pairs.back()]);
  }
  // What fits into one round is not cut into two.
  const int64_t busiest = BusiestBytes(module_, messages);
  const bool one_round = static_cast<double>(busiest) * (1 + dealt_part) <=
                         static_cast<double>(scheduler_.round_bytes_max());
  const int64_t together =
      one_round ? std::ssize(messages)
                : module_.DealtTurnsOfRound(scheduler_.round_bytes_max() / most,
                                            dealt_part);
  scheduler_.StartMessages(messages, one_round ? busiest : together * most);
  int32_t round = scheduler_.first_round();
  int64_t in_round = 0;
  for (const std::vector<size_t>& turn : OrderTurns(ends, pairs)) {
    if (in_round++ == together) {
      ++round;
      in_round = 1;
      dealt_.clear();
    }
    for (const size_t pair : turn) {
      Message* message = Next(pairs_[pair], round);
      if (!Fits(*message, round)) {
        late.push_back(message);
        continue;
      }
      ++dealt_[ReceiverOf(module_, *message)];
      PlaceOne(*message, round);
    }
  }
  PlaceRest(late);
  // Rounds that small messages make longer are better than more of them.
  const auto room = static_cast<int64_t>(
      static_cast<double>(scheduler_.round_bytes_max()) / (1 + dealt_part));
  scheduler_.StartMessages(
      small, one_round ? busiest : std::max(together * most, room));
  PlaceRest(small);
}

// Trees that cross would have a rank receive from two others in one round, and
// nothing in the next. So edges between hosts take turns: no rank sends, or
// receives, along two in one turn. What sources send a root is one edge, since
// they share its turns.
class EdgeTurns {
 public:
  EdgeTurns(const Module& module, const std::vector<Message*>& messages)
      : module_(module) {
    std::vector<std::pair<Rank, Rank>> edges;
    for (const Message* message : messages) {
      if (message->route == Route::kNetwork &&
          turns_.try_emplace(EdgeOf(*message), 0).second) {
        edges.push_back(EdgeOf(*message));
      }
    }
    const std::vector<int32_t> turns = TurnsOf(edges);
    for (size_t i = 0; i < edges.size(); ++i) {
      turns_[edges[i]] = turns[i];
      count_ = std::max(count_, turns[i] + 1);
    }
  }

  int32_t count() const { return count_; }
  bool IsTurn(const Message& message, int32_t round) const {
    const auto turn = turns_.find(EdgeOf(message));
    return turn == turns_.end() || round % count_ == turn->second;
  }

 private:
  std::pair<Rank, Rank> EdgeOf(const Message& message) const {
    return {module_.IsRelay(message.source)
                ? message.source
                : Rank{module_.world_size() +
                       static_cast<int32_t>(message.destination)},
            message.destination};
  }

  const Module& module_;
  absl::flat_hash_map<std::pair<Rank, Rank>, int32_t> turns_;
  int32_t count_ = 1;
};

// A message of a stream, or of a relay of what it brings.
struct Chunk {
  int32_t chunk = 0;
  int32_t of = 0;       // so many
  uint32_t number = 0;  // of Module::messages
};

// In the order in which sources send what they feed, so that of each stream as
// large a part has gone at any time as of the others. What passes a chunk on
// stands behind what brings it.
std::vector<Chunk> ChunksOf(const Module& module,
                            const std::vector<Message*>& messages) {
  // By message, from behind: those of a stream stand one after the other.
  std::vector<int32_t> of(module.messages.size());
  for (size_t i = of.size(); i-- > 0;) {
    const int32_t next = module.messages[i].pipeline_round + 1;
    const bool goes_on =
        i + 1 < of.size() && module.messages[i + 1].pipeline_round == next;
    of[i] = goes_on ? of[i + 1] : next;
  }
  std::vector<Chunk> chunks;
  for (const Message* message : messages) {
    const auto number = static_cast<uint32_t>(message - module.messages.data());
    chunks.push_back(
        {.chunk = message->pipeline_round, .of = of[number], .number = number});
  }
  std::sort(chunks.begin(), chunks.end(), [](const Chunk& a, const Chunk& b) {
    const int64_t of_a = int64_t{2 * a.chunk + 1} * b.of;
    const int64_t of_b = int64_t{2 * b.chunk + 1} * a.of;
    return std::pair(of_a, a.number) < std::pair(of_b, b.number);
  });
  return chunks;
}

// How many messages of the sources of its host a rank receives while it, or
// another one, receives one between hosts.
double EnteringPerRound(const std::vector<Message*>& messages) {
  absl::flat_hash_map<std::pair<Rank, bool>, int64_t> received;
  int64_t inside = 0;
  int64_t between = 1;
  for (const Message* message : messages) {
    const bool is_inside = IsBesideNetwork(*message);
    int64_t& bytes = received[{message->destination, is_inside}];
    bytes += message->size_bytes;
    int64_t& most = is_inside ? inside : between;
    most = std::max(most, bytes);
  }
  return static_cast<double>(inside) / static_cast<double>(between);
}

// What goes along trees. If links were never in use by others, a source would
// send its messages one round after the other, and a rank would pass each on a
// round after it came, to one rank after the other. In this order each takes
// the first round that has room for it, at its turn if that comes soon. A rank
// sends one over the network in a round, and receives one. What cannot leave
// within kHeldRounds is packed again, kRelayRounds after it came.
void PlaceFlows(Module& module, const std::vector<Message*>& messages,
                int64_t direction_bytes, Scheduler& scheduler) {
  if (messages.empty()) return;
  struct Wanted {
    int32_t round = 0;    // from the first on
    uint32_t number = 0;  // of Module::messages

    auto operator<=>(const Wanted&) const = default;
  };
  std::vector<Chunk> chunks = ChunksOf(module, messages);
  const double entering = EnteringPerRound(messages);
  absl::flat_hash_map<Rank, int32_t> entered;  // its host, by receivers
  absl::flat_hash_map<Rank, int32_t> sent;     // by sources
  std::vector<int32_t> round_of(module.messages.size(), 0);
  std::vector<int32_t> passed_on(module.messages.size(), 0);
  std::vector<Wanted> order;
  for (const auto& [chunk, of, number] : chunks) {
    const Message& message = module.messages[number];
    int32_t& round = round_of[number];
    if (FedBy(module, message) != nullptr) {
      round = round_of[message.fed_by.begin] + 1 +
              passed_on[message.fed_by.begin]++;
    } else {
      // Inside a host a rank sends several in a round. They are spread over as
      // many rounds as what goes between hosts takes.
      round = IsBesideNetwork(message)
                  ? static_cast<int32_t>(
                        static_cast<double>(entered[message.destination]++) /
                        std::max(entering, 1.0))
                  : sent[message.source]++;
    }
    order.push_back({round, number});
  }
  std::sort(order.begin(), order.end());
  const EdgeTurns turns(module, messages);
  scheduler.StartMessages(messages, direction_bytes);
  scheduler.LimitEntering(direction_bytes *
                          std::max<int64_t>(std::llround(entering), 1));
  for (const Wanted& next : order) {
    Message& message = module.messages[next.number];
    const absl::Span<Message> dealt_by = DealtBy(module, message);
    // The first round up to `last` that has room, and is its turn if one of the
    // next is that.
    const auto find = [&](int32_t round, int32_t last) {
      while (round <= last && !scheduler.FitsIn(message, dealt_by, round)) {
        ++round;
      }
      for (int32_t later = round;
           later <= last && later < round + kTurnsAhead * turns.count();
           ++later) {
        if (turns.IsTurn(message, later) &&
            scheduler.FitsIn(message, dealt_by, later)) {
          return later;
        }
      }
      return round;
    };
    constexpr int32_t kLast = std::numeric_limits<int32_t>::max() / 2;
    const Message* fed_by = FedBy(module, message);
    int32_t round =
        scheduler.first_round() + (IsBesideNetwork(message) ? next.round : 0);
    if (fed_by != nullptr) {
      // It lies in staging until others come there.
      message.is_held = true;
      round = fed_by->round + 1;
      const int32_t last = fed_by->round + kHeldRounds;
      const int32_t found = find(round, last);
      if (found <= last) {
        scheduler.PlaceIn(message, dealt_by, found);
        continue;
      }
      message.is_held = false;
      round = fed_by->round + kRelayRounds;
    }
    scheduler.PlaceIn(message, dealt_by, find(round, kLast));
  }
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
                 Route route, bool beside_dealt, Scheduler& scheduler) {
  const int64_t relayed_per_round =
      StagedRoundOf(route, module.limits).relayed_messages;
  const auto fed_by = [&](const Message* message) {
    return FedBy(module, *message);
  };
  SortByShift(module, messages);
  std::vector<Message*> feeds, relays, flows, others;
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
    if (message->is_routed && route == Route::kNetwork) {
      largest = std::max(largest, staged);
      flows.push_back(message);
    } else if (relays_it || passed_on[static_cast<size_t>(
                                message - module.messages.data())]) {
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
  const bool few_relays = relayed < received * kFewRelays;
  if (deals && module.limits.deals && few_relays) {
    scheduler.StartRoute(beside_dealt);
    HostTurns(module, passed_on, scheduler).Place(messages, dealt / received);
    return;
  }
  int64_t each_way = largest * relayed_per_round;
  if (few_relays) {
    each_way = std::max(
        each_way,
        static_cast<int64_t>(room * relayed / received * kRelaysAhead));
  }
  scheduler.StartRoute(beside_dealt);
  PlaceFlows(module, flows, largest + largest / kSmallBeside, scheduler);
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
      PlaceStaged(module, std::move(messages), passed_on, place, route,
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
// that also packs in the one after that does so elsewhere. Where hosts are
// dealt all that they are sent, it packs little: that lies apart.
StagingShape StagingShapeOf(const Module& module) {
  const int32_t slots = module.limits.slots;
  if (module.stats.routes_flows) return {.turns = slots + kHeldRounds};
  if (std::none_of(module.messages.begin(), module.messages.end(),
                   [](const Message& message) { return message.is_held; })) {
    return {.turns = slots};
  }
  int64_t largest = 0;
  for (const Message& message : module.messages) {
    if (module.IsRelay(message.source) && !message.is_held &&
        message.mechanism == Mechanism::kStaged) {
      largest = std::max(largest, AlignStaging(message.size_bytes));
    }
  }
  if (largest == 0) return {.turns = std::max(slots, 2)};
  const int64_t packed = largest * module.limits.relayed_per_round;
  if (module.limits.deals &&
      packed * slots <= module.limits.staging_bytes / kPackedPart) {
    return {.turns = std::max(slots, 2), .packed_bytes = packed};
  }
  return {.turns = std::max(slots + 1, 2)};
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
  Scheduler scheduler(module, StagingShapeOf(module));
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
  scheduler.AssignStaging(module.is_compact
                              ? OffsetsInOrder(module, scheduler, places)
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
