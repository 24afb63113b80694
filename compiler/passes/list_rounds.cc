#include "compiler/passes/list_rounds.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/passes/round_limits.h"
#include "compiler/passes/turns.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// Larger than any message.
constexpr int64_t kNoBytes = int64_t{1} << 60;

constexpr int32_t kNone = -1;  // no round, or no turn

// Goes before all others: more bytes than any rank has left.
constexpr int64_t kIsItsTurn = int64_t{1} << 50;

// Urgency counts in parts of the largest message, because each time that a
// receiver's urgency changes all senders look at it again. Whole messages cost
// 1 % in the mean of 67 jobs, simulated, and bytes gain nothing. So that the
// work of a round does not grow with the pairs of all senders, the parts grow
// with the cube of a sender's pairs beyond so many.
constexpr int64_t kUrgencyParts = 64;
constexpr int64_t kPairsOfFineUrgency = 256;

// Messages of one pair that go one after the other: those of Module::messages
// from `next` to `end` have no round yet.
struct PairStream {
  uint32_t next = 0;
  uint32_t end = 0;
  int64_t left = 0;        // bytes
  int32_t turn = kNone;    // of an edge of a tree
  bool has_large = false;  // a message that is not small
  bool is_ready = false;
  // Of the next message: messages are many, and far apart in memory.
  bool is_beside = false;  // IsBesideNetwork
  Rank receiver{};
  int64_t size_bytes = 0;
  int64_t tail = 0;  // bytes of the longest way on from its receiver
};

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
                const RoundTotals& totals, int32_t first_round, bool ends,
                RoundLoads& loads)
      : module_(module),
        loads_(loads),
        limits_(module, totals, ends, messages.front()->route, loads),
        first_round_(first_round),
        round_(first_round),
        unplaced_(messages.size()),
        tails_(module.messages.size()),
        stream_of_(module.messages.size()),
        ready_(kSendersOfRank * static_cast<size_t>(module.world_size())) {
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
  // The streams of a sender. Those that may have room in this round, the open
  // ones, come before the others.
  struct Queue {
    std::vector<Entry> entries;
    size_t open = 0;
    int64_t room = 0;  // bytes that the sender may still send
    // The most urgent are the last of the open, and the very last is the first
    // of all streams. Adding to them makes this unknown.
    size_t most_urgent = 0;   // how many; 0: unknown
    int64_t least_bytes = 0;  // of their urgency

    const Entry& Next() const { return entries[open - 1]; }
    void Add(const Entry& entry) {
      entries.push_back(entry);
      std::swap(entries[open++], entries.back());
      most_urgent = 0;
    }
    void CloseNext() {
      --open;
      if (most_urgent > 0) --most_urgent;
    }
    void RemoveNext() {
      CloseNext();
      std::swap(entries[open], entries.back());
      entries.pop_back();
    }
  };
  // A rank sends over the network and inside its host beside that, and small
  // messages beside large ones: what has no room for one has room for others.
  static constexpr size_t kSendersOfRank = 4;

  Message& Head(const PairStream& of) { return module_.messages[of.next]; }
  size_t SenderOf(const Message& message) const {
    return kSendersOfRank * IndexOf(message.source) +
           (IsBesideNetwork(message) ? 2 : 0) +
           (limits_.IsSmall(message) ? 1 : 0);
  }
  // Whether its source may send it from where it came.
  bool MayHold(const Message& message) const {
    return module_.stats.held_rounds > 0 && message.is_routed &&
           message.route == Route::kNetwork && message.fed_by.count > 0;
  }

  void ListStreams(const std::vector<Message*>& messages);
  void FindTails(const std::vector<Message*>& messages);
  void FindTurns();
  // Urgency is compared in these.
  int64_t InUnits(int64_t bytes) const { return bytes / urgency_unit_; }
  int64_t UrgencyOf(const PairStream& stream) const;
  // Notes what is said of the stream's next message.
  void ReadHead(PairStream& stream);
  // Whether the sender has a stream whose receiver has room for it. The queue's
  // next one is the most urgent, of several the first of all streams.
  bool HasOpen(size_t sender);
  void FindMostUrgent(Queue& ready, const int64_t* room, const int64_t* left);
  // Its urgency, or that of all that the sender has to send; -1: there is none.
  int64_t SenderUrgency(size_t sender);
  // From which round on the stream's next message may go; none: what feeds it
  // has no round yet.
  int32_t ReadyRound(const PairStream& stream);
  // Has the stream wait until its next message may go.
  void Wait(uint32_t index);
  void MakeReady(uint32_t index, size_t sender);
  bool TryPlace(uint32_t index);
  // Whether the sender's messages go over the network; are small.
  static bool IsOfNetwork(size_t sender) { return sender % kSendersOfRank < 2; }
  static bool IsOfSmall(size_t sender) { return sender % 2 == 1; }
  void FillRound();

  Module& module_;
  RoundLoads& loads_;
  const RoundLimits limits_;
  const int32_t first_round_;
  int32_t round_;  // that is filled
  size_t unplaced_;

  int64_t urgency_unit_ = 1;  // bytes
  int32_t turns_ = 0;         // of edges between hosts; 0: there are none

  std::vector<PairStream> streams_;
  std::vector<int64_t> tails_;  // by message: bytes of the longest way from it
  std::vector<uint32_t> stream_of_;  // by message
  // Bytes by direction and rank; the last one of what is received stands for
  // all that comes beside the network.
  std::array<std::vector<int64_t>, 2> left_;
  // By class of size and rank: bytes that it may still receive in this round.
  std::array<std::vector<int64_t>, 2> room_;
  std::vector<Queue> ready_;                   // by sender
  std::vector<size_t> most_urgent_;            // FindMostUrgent's
  std::vector<std::vector<uint32_t>> waking_;  // by round from the first on
  // By message: the streams whose next one it feeds.
  std::vector<std::vector<uint32_t>> fed_;
};

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
    streams_.back().has_large |= !limits_.IsSmall(*message);
  }
  // By rank: its place among the ranks of its side in its part.
  std::vector<int64_t> places;
  std::vector<int64_t> next(static_cast<size_t>(module_.parts()), 0);
  for (int32_t rank = 0; rank < module_.world_size(); ++rank) {
    if (rank == module_.source_ranks()) std::fill(next.begin(), next.end(), 0);
    places.push_back(next[static_cast<size_t>(module_.PartOf(Rank{rank}))]++);
  }
  const auto turn_of = [&](const PairStream& stream) {
    const Message& message = Head(stream);
    const AlikeParts alike = module_.AlikePartsOf(message.source);
    const int64_t sources = alike.sources;
    const int64_t cycle = std::max(sources, int64_t{alike.destinations});
    const int64_t stride = WalkStride(cycle);
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
  std::vector<int64_t> pairs(static_cast<size_t>(module_.world_size()), 0);
  int64_t most_pairs = kPairsOfFineUrgency;  // of a source
  for (const PairStream& stream : streams_) {
    order.emplace_back(turn_of(stream), stream);
    most_pairs = std::max(most_pairs, ++pairs[IndexOf(Head(stream).source)]);
  }
  std::sort(order.begin(), order.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  const int64_t coarser = most_pairs / kPairsOfFineUrgency;
  urgency_unit_ = std::max<int64_t>(
      limits_.most_bytes() * coarser * coarser * coarser / kUrgencyParts, 1);
  for (uint32_t i = 0; i < streams_.size(); ++i) {
    streams_[i] = order[i].second;
    std::fill(stream_of_.begin() + streams_[i].next,
              stream_of_.begin() + streams_[i].end, i);
  }
}

void ListScheduler::FindTurns() {
  std::vector<std::pair<Rank, Rank>> edges;
  std::vector<PairStream*> of_edges;
  for (PairStream& stream : streams_) {
    const Message& message = Head(stream);
    if (message.route != Route::kNetwork || !stream.has_large) continue;
    edges.emplace_back(message.source, message.destination);
    of_edges.push_back(&stream);
  }
  const std::vector<int32_t> turns = TurnsOfTrees(module_, edges);
  for (size_t i = 0; i < turns.size(); ++i) {
    of_edges[i]->turn = turns[i];
    turns_ = std::max(turns_, turns[i] + 1);
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

// But for what its receiver has to receive.
int64_t ListScheduler::UrgencyOf(const PairStream& stream) const {
  const bool is_turn =
      stream.turn != kNone && (round_ - first_round_) % turns_ == stream.turn;
  return stream.tail + stream.left + (is_turn ? kIsItsTurn : 0);
}

// What a receiver has to receive only gets less, so that those that are most
// urgent stay so while their urgency does not change.
bool ListScheduler::HasOpen(size_t sender) {
  Queue& ready = ready_[sender];
  const std::vector<int64_t>& room = room_[IsOfSmall(sender)];
  for (; ready.most_urgent > 0; ready.CloseNext()) {
    const Entry& next = ready.Next();
    if (next.own + left_[kReceives][next.receiver] < ready.least_bytes) break;
    if (next.takes <= std::min(ready.room, room[next.receiver])) return true;
  }
  FindMostUrgent(ready, room.data(), left_[kReceives].data());
  return ready.open > 0;
}

// Most of the time of this pass goes here. So the loop divides only where it
// finds a more urgent one, and nothing that it reads may change in it.
void ListScheduler::FindMostUrgent(Queue& ready, const int64_t* room,
                                   const int64_t* left) {
  Entry* const entries = ready.entries.data();
  const int64_t of_sender = ready.room;
  size_t open = ready.open;
  int64_t least = 0, more = 0;  // bytes of what is as urgent, and more
  for (size_t i = 0; i < open;) {
    const Entry& entry = entries[i];
    if (entry.takes > of_sender || entry.takes > room[entry.receiver]) {
      std::swap(entries[i], entries[--open]);
      continue;
    }
    const int64_t bytes = entry.own + left[entry.receiver];
    if (bytes >= least) {
      if (bytes >= more) {
        least = InUnits(bytes) * urgency_unit_;
        more = least + urgency_unit_;
        most_urgent_.clear();
      }
      most_urgent_.push_back(i);
    }
    ++i;
  }
  ready.open = open;
  ready.least_bytes = least;
  ready.most_urgent = most_urgent_.size();
  for (size_t end = open; !most_urgent_.empty(); most_urgent_.pop_back()) {
    std::swap(entries[most_urgent_.back()], entries[--end]);
  }
  std::sort(entries + (open - ready.most_urgent), entries + open,
            [](const Entry& a, const Entry& b) { return a.stream > b.stream; });
}

int64_t ListScheduler::SenderUrgency(size_t sender) {
  if (!HasOpen(sender)) return -1;
  const Entry& next = ready_[sender].Next();
  const bool is_beside = next.receiver == left_[kReceives].size() - 1;
  return InUnits(next.own) +
         (is_beside
              ? 0
              : InUnits(std::max(left_[kReceives][next.receiver],
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
  if (fed_by->round < 0) return kNone;
  const int32_t rounds = MayHold(message) ? 1 : kRelayRounds;
  return std::max(round_, fed_by->round + rounds);
}

void ListScheduler::Wait(uint32_t index) {
  PairStream& stream = streams_[index];
  if (stream.is_ready || stream.next == stream.end) return;
  const int32_t round = ReadyRound(stream);
  if (round == kNone) return;
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
  const bool is_small = limits_.IsSmall(message);
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
  loads_.LimitDirection(limits_.OfRound(left_),
                        limits_.small_direction_bytes());
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
    ready.most_urgent = 0;
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
      const uint32_t index = ready.Next().stream;
      PairStream& stream = streams_[index];
      const Rank receiver = stream.receiver;
      if (TryPlace(index)) {
        stream.is_ready = false;
        ready.RemoveNext();
        Wait(index);
      } else {
        ready.CloseNext();
      }
      if (IsOfNetwork(sender)) {
        const bool is_small = IsOfSmall(sender);
        room_[is_small][IndexOf(receiver)] =
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
  return ListScheduler(module, messages, TotalsOf(module, messages),
                       first_round, ends, loads)
      .Place();
}

}  // namespace refit
