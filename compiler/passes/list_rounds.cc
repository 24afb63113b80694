#include "compiler/passes/list_rounds.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "compiler/passes/turns.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// Beside its messages of full size a round has room for small ones, as large as
// this part of one.
constexpr int64_t kSmallBeside = 8;

// If more than this part of what is received is relayed, a round has as many
// messages as are in flight along a chain; else relays go beside the rest.
constexpr double kManyRelays = 0.5;

// Larger than any message.
constexpr int64_t kNoBytes = int64_t{1} << 60;

constexpr int32_t kNoRound = -1;
constexpr int32_t kNoTurn = -1;
constexpr int64_t kUnknown = -1;

// Goes before all others: more bytes than any rank has left.
constexpr int64_t kIsItsTurn = int64_t{1} << 50;

// Urgency counts in parts of the largest message, because each time that a
// receiver's urgency changes all senders look at it again. Whole messages cost
// 1 % in the mean of 67 jobs, simulated, and bytes gain nothing. So that the
// work of a round does not grow with the pairs of all senders, the parts grow
// with the square of a sender's pairs beyond so many.
constexpr int64_t kUrgencyParts = 64;
constexpr int64_t kPairsOfFineUrgency = 256;

// Messages of one pair that go one after the other: those of Module::messages
// from `next` to `end` have no round yet.
struct PairStream {
  uint32_t next = 0;
  uint32_t end = 0;
  int64_t left = 0;        // bytes
  int32_t turn = kNoTurn;  // of an edge of a tree
  bool has_large = false;  // a message that is not small
  bool is_ready = false;
  // Of the next message: messages are many, and far apart in memory.
  bool is_beside = false;  // IsBesideNetwork
  Rank receiver{};
  int64_t size_bytes = 0;
  int64_t tail = 0;  // bytes of the longest way on from its receiver
};

// What the messages of a wave and route do to ranks in all.
struct Totals {
  explicit Totals(size_t world)
      : sent(world, 0),
        received(world, 0),
        entering(world, 0),
        staged(world, 0),
        own_operations(world, 0),
        operations(world, 0) {}

  // Bytes, by rank.
  std::vector<int64_t> sent, received;  // not inside a host beside the network
  std::vector<int64_t> entering;  // received inside a host beside the network
  std::vector<int64_t> staged;    // in either direction, and what is dealt out
  // By rank: of messages, and of these and those that deal them out.
  std::vector<int64_t> own_operations, operations;
  int64_t most_bytes = 1;  // of a message
  int64_t most_relayed_bytes = 0;
  double bytes = 0;  // of all messages
  double dealt_bytes = 0;
  double dealt_messages = 0;
  double relayed_bytes = 0;
  bool routes = false;         // any message is routed
  bool between_hosts = false;  // and passed on to another host, or broadcast
  bool on_nvlink = true;       // all go inside a domain that is a site
};

int64_t MostOf(const std::vector<int64_t>& numbers) {
  return *std::max_element(numbers.begin(), numbers.end());
}

Totals TotalsOf(Module& module, const std::vector<Message*>& messages) {
  Totals totals(static_cast<size_t>(module.world_size()));
  totals.on_nvlink = module.JoinsHosts();
  for (Message* message : messages) {
    const size_t source = IndexOf(message->source);
    const int64_t bytes = message->size_bytes;
    const bool relays = FedBy(module, *message) != nullptr;
    totals.most_bytes = std::max(totals.most_bytes, AlignStaging(bytes));
    totals.bytes += static_cast<double>(bytes);
    totals.routes |= message->is_routed;
    totals.between_hosts |=
        message->is_routed && (relays || message->is_broadcast());
    totals.on_nvlink = totals.on_nvlink &&
                       module.LinkBetween(message->source,
                                          message->destination) == Route::kPeer;
    if (relays) {
      totals.relayed_bytes += static_cast<double>(bytes);
      totals.most_relayed_bytes =
          std::max(totals.most_relayed_bytes, AlignStaging(bytes));
    }
    if (!IsBesideNetwork(*message)) totals.sent[source] += bytes;
    // What goes on along a tree lies where it came.
    if (!relays || !message->is_routed) totals.staged[source] += bytes;
    ++totals.own_operations[source];
    ++totals.operations[source];
    ForEachSentWith(module, *message, [&](const Message& received) {
      const size_t destination = IndexOf(received.destination);
      (IsBesideNetwork(received) ? totals.entering
                                 : totals.received)[destination] += bytes;
      totals.staged[destination] += bytes;
      ++totals.own_operations[destination];
      ++totals.operations[destination];
      for (const Message& held : DealtBy(module, received)) {
        totals.dealt_bytes += static_cast<double>(bytes);
        totals.dealt_messages += 1;
        totals.staged[IndexOf(held.destination)] += bytes;
        ++totals.operations[IndexOf(held.source)];
        ++totals.operations[IndexOf(held.destination)];
      }
    });
  }
  return totals;
}

// The stride of a walk through 0 .. cycle-1 that visits each number once and
// never stays in one neighbourhood: coprime, near the golden section.
int64_t WalkStride(int64_t cycle) {
  int64_t stride = std::max<int64_t>(1, cycle * 618 / 1000);
  while (std::gcd(stride, cycle) != 1) ++stride;
  return stride;
}

class ListScheduler {
 public:
  ListScheduler(Module& module, const std::vector<Message*>& messages,
                int32_t first_round, bool ends, RoundLoads& loads)
      : module_(module),
        loads_(loads),
        first_round_(first_round),
        round_(first_round),
        unplaced_(messages.size()),
        tails_(module.messages.size()),
        stream_of_(module.messages.size()),
        ready_(kSendersOfRank * static_cast<size_t>(module.world_size())) {
    const Totals totals = TotalsOf(module, messages);
    SetLimits(totals, ends, messages.front()->route);
    left_ = {totals.sent, totals.received};
    left_[kReceives].push_back(0);
    ListStreams(messages);
    FindTails(messages);
    if (totals.between_hosts) FindTurns();
  }

  absl::Status Place() {
    for (PairStream& stream : streams_) ReadHead(stream);
    for (uint32_t i = 0; i < streams_.size(); ++i) Wait(i);
    int32_t placed = round_;  // the last round with any
    for (; unplaced_ > 0; ++round_) {
      const size_t unplaced = unplaced_;
      FillRound();
      if (unplaced_ < unplaced) placed = round_;
      // What earlier rounds deal out is over by then.
      if (round_ - placed > kRelayRounds + kHeldRounds) {
        return absl::InternalError(
            absl::StrCat(unplaced_, " messages have room in no round"));
      }
    }
    return absl::OkStatus();
  }

 private:
  // A stream that may send.
  struct Entry {
    int64_t own = 0;    // bytes of its urgency, but for its receiver's
    int64_t takes = 0;  // bytes of its receiver's round
    uint32_t receiver = 0;
    uint32_t stream = 0;
  };
  // The streams of a sender. Those that may have room in this round come first,
  // the most urgent one before all, unless its urgency is unknown.
  struct Queue {
    std::vector<Entry> entries;
    size_t open = 0;
    int64_t room = 0;            // bytes that the sender may still send
    int64_t urgency = kUnknown;  // in units, of the first

    void Add(const Entry& entry) {
      entries.push_back(entry);
      std::swap(entries[open++], entries.back());
      urgency = kUnknown;
    }
    void PutOff(size_t index) {
      std::swap(entries[index], entries[--open]);
      urgency = kUnknown;
    }
    void RemoveFirst() {
      PutOff(0);
      std::swap(entries[open], entries.back());
      entries.pop_back();
    }
  };
  // A rank sends over the network and inside its host beside that, and small
  // messages beside large ones: what has no room for one has room for others.
  static constexpr size_t kSendersOfRank = 4;

  Message& Head(const PairStream& stream) {
    return module_.messages[stream.next];
  }
  size_t SenderOf(const Message& message) const {
    return kSendersOfRank * IndexOf(message.source) +
           (IsBesideNetwork(message) ? 2 : 0) + (IsSmall(message) ? 1 : 0);
  }
  bool IsSmall(const Message& message) const {
    return message.size_bytes <= most_bytes_ / kSmallBeside;
  }
  // Whether its source may send it from where it came.
  bool MayHold(const Message& message) const {
    return module_.stats.held_rounds > 0 && message.is_routed &&
           message.route == Route::kNetwork && message.fed_by.count > 0;
  }

  void SetLimits(const Totals& totals, bool ends, Route route);
  void ListStreams(const std::vector<Message*>& messages);
  void FindTails(const std::vector<Message*>& messages);
  void FindTurns();
  // Room for about so many bytes in messages of full size, and for small ones
  // beside them.
  int64_t WholeMessages(int64_t bytes) const {
    const int64_t count =
        std::max<int64_t>((bytes + most_bytes_ / 2) / most_bytes_, 1);
    return count * most_bytes_ + most_bytes_ / kSmallBeside;
  }
  int64_t LimitOfRound() const;
  // Urgency is compared in these.
  int64_t InUnits(int64_t bytes) const { return bytes / urgency_unit_; }
  int64_t UrgencyOf(const PairStream& stream) const;
  // Notes what is said of the stream's next message.
  void ReadHead(PairStream& stream);
  // Whether the sender has a stream whose receiver has room for it. The most
  // urgent one comes first, of several the first of all streams.
  bool HasOpen(size_t sender);
  // Its urgency, or that of all that the sender has to send; -1: there is none.
  int64_t SenderUrgency(size_t sender);
  // From which round on the stream's next message may go; none: what feeds it
  // has no round yet.
  int32_t ReadyRound(const PairStream& stream);
  // Has the stream wait until its next message may go.
  void Wait(uint32_t index);
  void MakeReady(uint32_t index, size_t sender);
  bool TryPlace(uint32_t index);
  // Whether the sender's messages go over the network; whether they are small.
  static bool IsOfNetwork(size_t sender) { return sender % kSendersOfRank < 2; }
  static size_t ClassOf(size_t sender) { return sender % 2; }
  void FillRound();

  Module& module_;
  RoundLoads& loads_;
  const int32_t first_round_;
  int32_t round_;  // that is filled
  size_t unplaced_;

  int64_t most_bytes_ = 1;  // of a message
  int64_t direction_bytes_ = std::numeric_limits<int64_t>::max();  // of a round
  int64_t small_direction_bytes_ = 0;  // the same with small messages
  int64_t urgency_unit_ = 1;           // bytes
  int32_t turns_ = 0;  // of edges between hosts; 0: there are none
  // What is dealt out of a round takes this part of its time.
  double dealt_part_ = 0;

  std::vector<PairStream> streams_;
  std::vector<int64_t> tails_;  // by message: bytes of the longest way from it
  std::vector<uint32_t> stream_of_;  // by message
  // Bytes by direction and rank; the last one of what is received stands for
  // all that comes beside the network.
  std::array<std::vector<int64_t>, 2> left_;
  // By class of size and rank: bytes that it may still receive in this round.
  std::array<std::vector<int64_t>, 2> room_;
  std::vector<Queue> ready_;                   // by sender
  std::vector<std::vector<uint32_t>> waking_;  // by round from the first on
  // By message: the streams whose next one it feeds.
  std::vector<std::vector<uint32_t>> fed_;
};

void ListScheduler::SetLimits(const Totals& totals, bool ends, Route route) {
  const Limits& limits = module_.limits;
  most_bytes_ = totals.most_bytes;
  const int64_t most = std::max(MostOf(totals.sent), MostOf(totals.received));
  // Each round has as large a part of what a rank sends and receives as of what
  // it stages in all.
  const double part_of_staging =
      static_cast<double>(loads_.staging_bytes_max()) /
      static_cast<double>(std::max<int64_t>(MostOf(totals.staged), 1));
  const auto room =
      static_cast<int64_t>(part_of_staging * static_cast<double>(most));
  loads_.LimitEntering(std::numeric_limits<int64_t>::max());
  loads_.LimitSends(1);
  loads_.Reserve({});
  if (totals.dealt_bytes > 0) {
    std::vector<RankRoom> reserved;
    for (size_t rank = 0; rank < totals.sent.size(); ++rank) {
      const auto bytes = static_cast<int64_t>(
          part_of_staging * static_cast<double>(totals.received[rank]));
      reserved.push_back(
          {.staging_bytes = bytes / most_bytes_ * most_bytes_,
           .operations = static_cast<int32_t>(
               limits.operations_per_round * totals.own_operations[rank] /
               std::max<int64_t>(totals.operations[rank], 1))});
    }
    loads_.Reserve(std::move(reserved));
  }
  if (totals.between_hosts) {
    direction_bytes_ = WholeMessages(most_bytes_);
    const double entering =
        static_cast<double>(MostOf(totals.entering)) /
        static_cast<double>(std::max<int64_t>(MostOf(totals.received), 1));
    loads_.LimitEntering(direction_bytes_ *
                         std::max<int64_t>(std::llround(entering), 1));
  } else if (totals.relayed_bytes > totals.bytes * kManyRelays) {
    direction_bytes_ =
        std::max(most_bytes_, totals.most_relayed_bytes *
                                  StagedRoundOf(route).relayed_messages);
  } else if (totals.dealt_bytes > 0) {
    const auto operations =
        static_cast<int64_t>(limits.operations_per_round /
                             (1 + 2 * totals.dealt_bytes / totals.bytes));
    const int64_t count =
        std::max<int64_t>(std::min(room / most_bytes_, operations), 1);
    direction_bytes_ = std::max(
        most_bytes_, std::min(room, WholeMessages(count * most_bytes_)));
    // A source feeds all in each round, for they pass on as much meanwhile.
    if (totals.on_nvlink) {
      direction_bytes_ = WholeMessages(most_bytes_);
      loads_.LimitSends(most / std::max<int64_t>(MostOf(totals.received), 1) +
                        1);
    }
  } else if (totals.routes || totals.relayed_bytes > 0) {
    direction_bytes_ = std::max(room, most_bytes_);
  }
  const double part_of_operations =
      static_cast<double>(limits.operations_per_round) /
      static_cast<double>(MostOf(totals.operations));
  if (!totals.between_hosts && totals.dealt_bytes == 0 &&
      part_of_operations < std::min(part_of_staging, 1.0)) {
    direction_bytes_ = std::min(
        direction_bytes_, WholeMessages(static_cast<int64_t>(
                              part_of_operations * static_cast<double>(most))));
  }
  small_direction_bytes_ = totals.between_hosts
                               ? direction_bytes_
                               : std::max(room, direction_bytes_);
  if (limits.shape.sizes == RoundShape::Sizes::kEven && totals.routes &&
      !totals.between_hosts && most > room) {
    const auto with_slack =
        static_cast<int64_t>(static_cast<double>(most) * kSlackOfRounds);
    direction_bytes_ = std::min(
        direction_bytes_, WholeMessages(with_slack / (with_slack / room + 1)));
  }
  if (ends && !totals.between_hosts && !totals.on_nvlink) {
    const Topology& topology = module_.topology;
    dealt_part_ = topology.network_bytes_per_second *
                  (totals.dealt_bytes / topology.peer_bytes_per_second +
                   totals.dealt_messages * kDealtMessageSeconds) /
                  std::max(totals.bytes, 1.0);
  }
}

// In the order in which at each turn every source talks to a different
// destination. Neighbouring shifts often carry messages of one kind
// (neighbouring ranks hold neighbouring shards), so the shifts are taken far
// apart from each other.
void ListScheduler::ListStreams(const std::vector<Message*>& messages) {
  for (const Message* message : messages) {
    const auto number =
        static_cast<uint32_t>(message - module_.messages.data());
    const bool goes_on =
        !streams_.empty() && streams_.back().end == number &&
        module_.messages[number - 1].source == message->source &&
        module_.messages[number - 1].destination == message->destination &&
        (!message->is_routed || message->pipeline_round > 0);
    if (!goes_on) streams_.push_back({.next = number});
    streams_.back().end = number + 1;
    streams_.back().left += message->size_bytes;
    streams_.back().has_large |= !IsSmall(*message);
  }
  // By rank: its place among the ranks of its side that are planned.
  std::vector<int64_t> places;
  int64_t next = 0;
  for (int32_t rank = 0; rank < module_.world_size(); ++rank) {
    if (rank == module_.source_ranks()) next = 0;
    places.push_back(next);
    if (module_.PartOf(Rank{rank}) == 0) ++next;
  }
  const int64_t sources = module_.source_ranks() / module_.parts();
  const int64_t cycle =
      std::max(sources, module_.world_size() / module_.parts() - sources);
  const int64_t stride = WalkStride(cycle);
  const auto turn_of = [&](const PairStream& stream) {
    const Message& message = Head(stream);
    // A relay's sender counts on past the sources.
    const int64_t source = places[IndexOf(message.source)] +
                           (module_.IsRelay(message.source) ? sources : 0);
    const int64_t shift =
        (places[IndexOf(message.destination)] - source % cycle + cycle) % cycle;
    return std::tuple(shift * stride % cycle, source, stream.next);
  };
  std::vector<std::pair<std::tuple<int64_t, int64_t, uint32_t>, PairStream>>
      order;
  order.reserve(streams_.size());
  for (const PairStream& stream : streams_) {
    order.emplace_back(turn_of(stream), stream);
  }
  std::sort(order.begin(), order.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<int64_t> pairs(static_cast<size_t>(module_.world_size()), 0);
  for (const PairStream& stream : streams_) {
    ++pairs[IndexOf(Head(stream).source)];
  }
  const int64_t coarser =
      std::max<int64_t>(MostOf(pairs) / kPairsOfFineUrgency, 1);
  urgency_unit_ =
      std::max<int64_t>(most_bytes_ * coarser * coarser / kUrgencyParts, 1);
  for (uint32_t i = 0; i < streams_.size(); ++i) {
    streams_[i] = order[i].second;
    for (uint32_t number = streams_[i].next; number < streams_[i].end;
         ++number) {
      stream_of_[number] = i;
    }
  }
}

// Trees that cross would have a rank receive from two others in one round, and
// nothing in the next. So edges between hosts take turns: no rank sends, or
// receives, along two in one turn. Roots share the turns of sources, so that as
// many are fed in one as in another. What is small goes beside others.
void ListScheduler::FindTurns() {
  std::vector<std::pair<Rank, Rank>> edges;
  absl::flat_hash_map<std::pair<Rank, Rank>, size_t> number_of;
  std::vector<Rank> roots;
  absl::flat_hash_map<Rank, Rank> source_of;
  absl::flat_hash_map<Rank, int32_t> passes_on, receives;
  int32_t degree = 1;
  for (const PairStream& stream : streams_) {
    const Message& message = Head(stream);
    if (message.route != Route::kNetwork || !stream.has_large) continue;
    const Rank receiver = message.destination;
    if (!module_.IsRelay(message.source)) {
      if (source_of.try_emplace(receiver, receiver).second) {
        roots.push_back(receiver);
        degree = std::max(degree, ++receives[receiver]);
      }
      continue;
    }
    const std::pair<Rank, Rank> edge(message.source, receiver);
    if (!number_of.try_emplace(edge, edges.size()).second) continue;
    edges.push_back(edge);
    degree = std::max({degree, ++passes_on[edge.first], ++receives[receiver]});
  }
  std::sort(roots.begin(), roots.end());
  const size_t sources = (roots.size() + static_cast<size_t>(degree) - 1) /
                         static_cast<size_t>(degree);
  for (size_t i = 0; i < roots.size(); ++i) {
    const Rank source{module_.world_size() + static_cast<int32_t>(i % sources)};
    source_of[roots[i]] = source;
    number_of.try_emplace({source, roots[i]}, edges.size());
    edges.emplace_back(source, roots[i]);
  }
  const std::vector<int32_t> turns = TurnsOf(edges);
  for (const int32_t turn : turns) turns_ = std::max(turns_, turn + 1);
  for (PairStream& stream : streams_) {
    const Message& message = Head(stream);
    if (message.route != Route::kNetwork || !stream.has_large) continue;
    const Rank source = module_.IsRelay(message.source)
                            ? message.source
                            : source_of.at(message.destination);
    stream.turn = turns[number_of.at({source, message.destination})];
  }
}

void ListScheduler::FindTails(const std::vector<Message*>& messages) {
  // What passes a message on stands behind it.
  for (size_t i = messages.size(); i-- > 0;) {
    const auto number =
        static_cast<size_t>(messages[i] - module_.messages.data());
    ForEachSentWith(module_, *messages[i], [&](const Message& received) {
      tails_[number] = std::max(
          tails_[number],
          tails_[static_cast<size_t>(&received - module_.messages.data())]);
    });
    tails_[number] += messages[i]->size_bytes;
    if (FedBy(module_, *messages[i]) == nullptr) continue;
    int64_t& before = tails_[messages[i]->fed_by.begin];
    before = std::max(before, tails_[number]);
    fed_.resize(module_.messages.size());
    fed_[messages[i]->fed_by.begin].push_back(stream_of_[number]);
  }
}

// What comes in the last round is dealt out alone, so that the last rounds get
// smaller: each so that the next one takes as long as it is dealt out. Not
// where that saves less than the start of a round.
int64_t ListScheduler::LimitOfRound() const {
  if (dealt_part_ == 0) return direction_bytes_;
  const auto left = static_cast<double>(
      std::max(MostOf(left_[kSends]), MostOf(left_[kReceives])));
  const double start =
      kStagedRoundSeconds * module_.topology.network_bytes_per_second;
  const double bytes = (left + start) / (1 + dealt_part_);
  if (bytes * dealt_part_ <= start) return direction_bytes_;
  return std::min(direction_bytes_, WholeMessages(static_cast<int64_t>(bytes)));
}

// But for what its receiver has to receive.
int64_t ListScheduler::UrgencyOf(const PairStream& stream) const {
  const bool is_turn =
      stream.turn != kNoTurn && (round_ - first_round_) % turns_ == stream.turn;
  return stream.tail + stream.left + (is_turn ? kIsItsTurn : 0);
}

// What a receiver has to receive only gets less, so that the first one stays
// the most urgent while its urgency does not change.
bool ListScheduler::HasOpen(size_t sender) {
  Queue& ready = ready_[sender];
  const std::vector<int64_t>& room = room_[ClassOf(sender)];
  const std::vector<int64_t>& left = left_[kReceives];
  const auto fits = [&](const Entry& entry) {
    return entry.takes <= ready.room && entry.takes <= room[entry.receiver];
  };
  const auto urgency = [&](const Entry& entry) {
    return entry.own + left[entry.receiver];
  };
  if (ready.urgency != kUnknown) {
    const Entry& first = ready.entries.front();
    if (fits(first) && InUnits(urgency(first)) == ready.urgency) return true;
  }
  size_t best = 0;
  int64_t least = -urgency_unit_;  // of what is as urgent as the best
  for (size_t i = 0; i < ready.open;) {
    const Entry& entry = ready.entries[i];
    if (!fits(entry)) {
      ready.PutOff(i);
      continue;
    }
    const int64_t bytes = urgency(entry);
    if (bytes >= least + urgency_unit_) {
      best = i;
      least = InUnits(bytes) * urgency_unit_;
    } else if (bytes >= least && entry.stream < ready.entries[best].stream) {
      best = i;
    }
    ++i;
  }
  if (ready.open == 0) return false;
  std::swap(ready.entries.front(), ready.entries[best]);
  ready.urgency = InUnits(least);
  return true;
}

int64_t ListScheduler::SenderUrgency(size_t sender) {
  if (!HasOpen(sender)) return -1;
  const Entry& first = ready_[sender].entries.front();
  const bool is_beside = first.receiver == left_[kReceives].size() - 1;
  return InUnits(first.own) +
         (is_beside
              ? 0
              : InUnits(std::max(left_[kReceives][first.receiver],
                                 left_[kSends][sender / kSendersOfRank])));
}

void ListScheduler::ReadHead(PairStream& stream) {
  if (stream.next == stream.end) return;
  const Message& message = Head(stream);
  stream.is_beside = IsBesideNetwork(message);
  stream.receiver = message.destination;
  stream.size_bytes = message.size_bytes;
  stream.tail = tails_[stream.next] - message.size_bytes;
}

int32_t ListScheduler::ReadyRound(const PairStream& stream) {
  const Message& message = Head(stream);
  const Message* fed_by = FedBy(module_, message);
  if (fed_by == nullptr) return round_;
  if (fed_by->round < 0) return kNoRound;
  return std::max(round_,
                  fed_by->round + (MayHold(message) ? 1 : kRelayRounds));
}

void ListScheduler::Wait(uint32_t index) {
  PairStream& stream = streams_[index];
  if (stream.is_ready || stream.next == stream.end) return;
  const int32_t round = ReadyRound(stream);
  if (round == kNoRound) return;
  if (round > round_) {
    const auto later = static_cast<size_t>(round - first_round_);
    if (waking_.size() <= later) waking_.resize(later + 1);
    waking_[later].push_back(index);
    return;
  }
  MakeReady(index, SenderOf(Head(stream)));
}

void ListScheduler::MakeReady(uint32_t index, size_t sender) {
  PairStream& stream = streams_[index];
  stream.is_ready = true;
  const auto receiver =
      static_cast<uint32_t>(stream.is_beside ? left_[kReceives].size() - 1
                                             : IndexOf(stream.receiver));
  ready_[sender].Add({.own = UrgencyOf(stream),
                      .takes = AlignStaging(stream.size_bytes),
                      .receiver = receiver,
                      .stream = index});
}

bool ListScheduler::TryPlace(uint32_t index) {
  PairStream& stream = streams_[index];
  Message& message = Head(stream);
  if (MayHold(message)) {
    // What came lies in staging until others come there.
    const int32_t came = FedBy(module_, message)->round;
    message.is_held = round_ <= came + module_.stats.held_rounds;
  }
  const bool is_small = IsSmall(message);
  bool fits = loads_.FitsAtSource(message, round_, is_small);
  ForEachSentWith(module_, message, [&](const Message& received) {
    fits = fits && loads_.FitsWhereReceived(
                       received, DealtBy(module_, received), round_, is_small);
  });
  if (!fits) {
    if (MayHold(message)) message.is_held = false;
    return false;
  }
  --unplaced_;
  stream.left -= message.size_bytes;
  ++stream.next;
  ReadHead(stream);
  if (!IsBesideNetwork(message)) {
    left_[kSends][IndexOf(message.source)] -= message.size_bytes;
  }
  ForEachSentWith(module_, message, [&](Message& received) {
    received.is_held = message.is_held;
    loads_.Add(received, DealtBy(module_, received), round_);
    if (!IsBesideNetwork(received)) {
      left_[kReceives][IndexOf(received.destination)] -= received.size_bytes;
    }
    if (fed_.empty()) return;
    const auto number =
        static_cast<size_t>(&received - module_.messages.data());
    for (const uint32_t fed : fed_[number]) {
      const PairStream& next = streams_[fed];
      if (next.next != next.end && Head(next).fed_by.begin == number) Wait(fed);
    }
  });
  return true;
}

// The senders of most urgency first.
void ListScheduler::FillRound() {
  loads_.LimitDirection(LimitOfRound(), small_direction_bytes_);
  const auto at = static_cast<size_t>(round_ - first_round_);
  if (at < waking_.size()) {
    for (const uint32_t index : std::exchange(waking_[at], {})) Wait(index);
  }
  for (std::vector<int64_t>& room : room_) {
    room.assign(left_[kReceives].size(), kNoBytes);
  }
  std::vector<std::pair<int64_t, size_t>> senders;
  for (size_t sender = 0; sender < ready_.size(); ++sender) {
    Queue& ready = ready_[sender];
    if (ready.entries.empty()) continue;
    if (turns_ > 0) {
      for (Entry& entry : ready.entries) {
        entry.own = UrgencyOf(streams_[entry.stream]);
      }
    }
    ready.open = ready.entries.size();
    ready.urgency = kUnknown;
    ready.room = kNoBytes;
    senders.emplace_back(SenderUrgency(sender), ~sender);
  }
  std::make_heap(senders.begin(), senders.end());
  while (!senders.empty()) {
    std::pop_heap(senders.begin(), senders.end());
    const size_t inverse = senders.back().second;
    senders.pop_back();
    const size_t sender = ~inverse;
    const Rank source{static_cast<int32_t>(sender / kSendersOfRank)};
    int64_t now = SenderUrgency(sender);
    if (now >= 0 &&
        (senders.empty() || std::pair(now, inverse) >= senders.front())) {
      Queue& ready = ready_[sender];
      const uint32_t index = ready.entries.front().stream;
      PairStream& stream = streams_[index];
      const Rank receiver = stream.receiver;
      if (TryPlace(index)) {
        stream.is_ready = false;
        ready.RemoveFirst();
        Wait(index);
      } else {
        ready.PutOff(0);
      }
      if (IsOfNetwork(sender)) {
        const bool is_small = ClassOf(sender) == 1;
        room_[ClassOf(sender)][IndexOf(receiver)] =
            loads_.Room(receiver, kReceives, round_, is_small);
        ready.room = loads_.Room(source, kSends, round_, is_small);
      }
      now = SenderUrgency(sender);
    }
    if (now < 0) continue;
    senders.emplace_back(now, inverse);
    std::push_heap(senders.begin(), senders.end());
  }
}

}  // namespace

absl::Status PlaceStaged(Module& module, const std::vector<Message*>& messages,
                         int32_t first_round, bool ends, RoundLoads& loads) {
  return ListScheduler(module, messages, first_round, ends, loads).Place();
}

}  // namespace refit
