#include "compiler/passes/tree_rounds.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "compiler/passes/turns.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// A message along a tree takes its own turn rather than an earlier round, if
// that is not later than so many times all turns.
constexpr int32_t kTurnsAhead = 2;

// Beside a full message along a tree a round has room for small ones, as large
// as this part of it.
constexpr int64_t kSmallBeside = 8;

// Trees that cross would have a rank receive from two others in one round, and
// nothing in the next. So edges between hosts take turns: no rank sends, or
// receives, along two in one turn. Roots share the turns of sources, so that as
// many are fed in one as in another.
class EdgeTurns {
 public:
  EdgeTurns(const Module& module, const std::vector<Message*>& messages)
      : module_(module) {
    std::vector<std::pair<Rank, Rank>> edges;
    std::vector<Rank> roots;
    absl::flat_hash_map<Rank, int32_t> passes_on, receives;
    int32_t degree = 1;
    for (const Message* message : messages) {
      if (message->route != Route::kNetwork) continue;
      const Rank receiver = message->destination;
      if (!module.IsRelay(message->source)) {
        if (source_of_.try_emplace(receiver, receiver).second) {
          roots.push_back(receiver);
          degree = std::max(degree, ++receives[receiver]);
        }
        continue;
      }
      const std::pair<Rank, Rank> edge(message->source, receiver);
      if (!turns_.try_emplace(edge, 0).second) continue;
      edges.push_back(edge);
      degree =
          std::max({degree, ++passes_on[edge.first], ++receives[receiver]});
    }
    std::sort(roots.begin(), roots.end());
    const size_t sources = (roots.size() + static_cast<size_t>(degree) - 1) /
                           static_cast<size_t>(degree);
    for (size_t i = 0; i < roots.size(); ++i) {
      const Rank source{module.world_size() +
                        static_cast<int32_t>(i % sources)};
      source_of_[roots[i]] = source;
      turns_.try_emplace({source, roots[i]}, 0);
      edges.emplace_back(source, roots[i]);
    }
    const std::vector<int32_t> turns = TurnsOf(edges);
    for (size_t i = 0; i < edges.size(); ++i) {
      turns_[edges[i]] = turns[i];
      count_ = std::max(count_, turns[i] + 1);
    }
  }

  int32_t count() const { return count_; }
  // The message goes between hosts.
  int32_t TurnOf(const Message& message) const {
    return turns_.at(EdgeOf(message));
  }
  bool IsTurn(const Message& message, int32_t round) const {
    const auto turn = turns_.find(EdgeOf(message));
    return turn == turns_.end() || round % count_ == turn->second;
  }

 private:
  std::pair<Rank, Rank> EdgeOf(const Message& message) const {
    if (module_.IsRelay(message.source)) {
      return {message.source, message.destination};
    }
    const auto source = source_of_.find(message.destination);
    return {source == source_of_.end() ? message.source : source->second,
            message.destination};
  }

  const Module& module_;
  // By root: a number beyond those of ranks, which stands for its sources.
  absl::flat_hash_map<Rank, Rank> source_of_;
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

// By message that a source sends a root of another host: the round in which it
// would go if nothing else did. In each round a root whose turn it is receives
// one, and a source sends one: those go first whose source, or root, has most
// left. Small ones go beside others, each source's one after the other.
absl::flat_hash_map<uint32_t, int32_t> RoundsOfSources(
    const Module& module, const std::vector<Chunk>& chunks,
    const EdgeTurns& turns) {
  int64_t largest = 0;
  for (const Chunk& chunk : chunks) {
    largest = std::max(largest, module.messages[chunk.number].size_bytes);
  }
  struct Pair {
    Rank source{};
    Rank root{};
    int32_t turn = 0;
    std::vector<uint32_t> numbers;
    size_t next = 0;
  };
  std::vector<Pair> pairs;
  absl::flat_hash_map<std::pair<Rank, Rank>, size_t> number_of;
  absl::flat_hash_map<Rank, int64_t> left;   // bytes
  absl::flat_hash_map<Rank, int32_t> small;  // by source
  absl::flat_hash_map<uint32_t, int32_t> rounds;
  size_t rest = 0;
  for (const Chunk& chunk : chunks) {
    const Message& message = module.messages[chunk.number];
    if (module.IsRelay(message.source) || IsBesideNetwork(message)) continue;
    if (message.size_bytes <= largest / kSmallBeside) {
      rounds[chunk.number] = small[message.source]++;
      continue;
    }
    const std::pair<Rank, Rank> ends(message.source, message.destination);
    const auto [number, is_new] = number_of.try_emplace(ends, pairs.size());
    if (is_new) {
      pairs.push_back({.source = ends.first,
                       .root = ends.second,
                       .turn = turns.TurnOf(message),
                       .numbers = {}});
    }
    pairs[number->second].numbers.push_back(chunk.number);
    left[ends.first] += message.size_bytes;
    left[ends.second] += message.size_bytes;
    ++rest;
  }
  struct Wish {
    int64_t left = 0;
    size_t pair = 0;
  };
  std::vector<Wish> wishes;
  absl::flat_hash_map<Rank, int32_t> busy;  // in which round, last
  for (int32_t round = 0; rest > 0; ++round) {
    wishes.clear();
    for (size_t i = 0; i < pairs.size(); ++i) {
      const Pair& pair = pairs[i];
      if (pair.turn != round % turns.count()) continue;
      if (pair.next == pair.numbers.size()) continue;
      wishes.push_back({std::max(left[pair.source], left[pair.root]), i});
    }
    std::stable_sort(
        wishes.begin(), wishes.end(),
        [](const Wish& a, const Wish& b) { return a.left > b.left; });
    for (const Wish& wish : wishes) {
      Pair& pair = pairs[wish.pair];
      int32_t& source = busy.try_emplace(pair.source, -1).first->second;
      if (source == round) continue;
      int32_t& root = busy.try_emplace(pair.root, -1).first->second;
      if (root == round) continue;
      busy[pair.source] = round;
      busy[pair.root] = round;
      const uint32_t number = pair.numbers[pair.next++];
      rounds[number] = round;
      left[pair.source] -= module.messages[number].size_bytes;
      left[pair.root] -= module.messages[number].size_bytes;
      --rest;
    }
  }
  return rounds;
}

}  // namespace

void PlaceAlongTrees(Module& module, const std::vector<Message*>& messages,
                     Scheduler& scheduler) {
  if (messages.empty()) return;
  int64_t largest = 1;
  for (const Message* message : messages) {
    largest = std::max(largest, AlignStaging(message->size_bytes));
  }
  const int64_t direction_bytes = largest + largest / kSmallBeside;
  struct Wanted {
    int32_t round = 0;    // from the first on
    uint32_t number = 0;  // of Module::messages

    auto operator<=>(const Wanted&) const = default;
  };
  std::vector<Chunk> chunks = ChunksOf(module, messages);
  const double entering = EnteringPerRound(messages);
  absl::flat_hash_map<Rank, int32_t> entered;  // its host, by receivers
  const EdgeTurns turns(module, messages);
  const auto of_sources = RoundsOfSources(module, chunks, turns);
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
                  : of_sources.at(number);
    }
    order.push_back({round, number});
  }
  std::sort(order.begin(), order.end());
  scheduler.StartMessages(messages, direction_bytes);
  scheduler.LimitEntering(direction_bytes *
                          std::max<int64_t>(std::llround(entering), 1));
  for (const Wanted& next : order) {
    Message& message = module.messages[next.number];
    const absl::Span<Message> dealt_by = DealtBy(module, message);
    // The first round up to `last` that has room, and is its turn if one of the
    // next is that.
    const auto find = [&](int32_t round, int32_t last) {
      while (round <= last && !scheduler.FitsDealt(message, dealt_by, round)) {
        ++round;
      }
      for (int32_t later = round;
           later <= last && later < round + kTurnsAhead * turns.count();
           ++later) {
        if (turns.IsTurn(message, later) &&
            scheduler.FitsDealt(message, dealt_by, later)) {
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
      // What came lies in staging until others come there.
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

}  // namespace refit
