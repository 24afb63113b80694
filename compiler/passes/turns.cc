#include "compiler/passes/turns.h"

#include <algorithm>
#include <array>

#include "absl/container/flat_hash_map.h"

namespace refit {
namespace {

constexpr int32_t kNoEdge = -1;

// Messages are the edges of a bipartite graph, and turns its colors: as many as
// the degree are enough (D. König, 1916).
class TurnFinder {
 public:
  explicit TurnFinder(absl::Span<const std::pair<Rank, Rank>> messages)
      : turns_(messages.size(), kNoEdge) {
    std::array<absl::flat_hash_map<Rank, int32_t>, 2> numbers;
    std::array<std::vector<int32_t>, 2> counts;
    for (const auto& [source, destination] : messages) {
      std::array<int32_t, 2>& ends = ends_.emplace_back();
      for (const size_t side : {kSource, kDestination}) {
        ends[side] = numbers[side]
                         .try_emplace(side == kSource ? source : destination,
                                      static_cast<int32_t>(counts[side].size()))
                         .first->second;
        counts[side].resize(numbers[side].size());
        count_ = std::max(count_, ++counts[side][IndexOf(ends[side])]);
      }
    }
    for (const size_t side : {kSource, kDestination}) {
      at_[side].assign(counts[side].size() * IndexOf(count_), kNoEdge);
    }
  }

  std::vector<int32_t> Find() {
    for (int32_t message = 0; message < std::ssize(turns_); ++message) {
      Add(message);
    }
    return std::move(turns_);
  }

 private:
  static constexpr size_t kSource = 0;
  static constexpr size_t kDestination = 1;

  int32_t& At(size_t side, int32_t rank, int32_t turn) {
    return at_[side][IndexOf(rank) * IndexOf(count_) + IndexOf(turn)];
  }
  int32_t FreeTurn(size_t side, int32_t rank) {
    int32_t turn = 0;
    while (At(side, rank, turn) != kNoEdge) ++turn;
    return turn;
  }
  void Set(int32_t message, int32_t turn) {
    turns_[IndexOf(message)] = turn;
    for (const size_t side : {kSource, kDestination}) {
      At(side, ends_[IndexOf(message)][side], turn) = message;
    }
  }

  // The message takes a turn that its source has free. If its destination has
  // another message in it, that one takes a turn that the destination has free,
  // and so on: the messages of these two turns change places along a path,
  // which never returns to the source.
  void Add(int32_t message) {
    const std::array<int32_t, 2>& ends = ends_[IndexOf(message)];
    const int32_t turn = FreeTurn(kSource, ends[kSource]);
    const int32_t other = FreeTurn(kDestination, ends[kDestination]);
    std::vector<int32_t> path;
    size_t side = kDestination;
    int32_t rank = ends[kDestination];
    int32_t taken = turn;
    for (int32_t next = At(side, rank, taken); next != kNoEdge;
         next = At(side, rank, taken)) {
      path.push_back(next);
      side = side == kSource ? kDestination : kSource;
      rank = ends_[IndexOf(next)][side];
      taken = taken == turn ? other : turn;
    }
    for (const int32_t moved : path) {
      for (const size_t end : {kSource, kDestination}) {
        At(end, ends_[IndexOf(moved)][end], turns_[IndexOf(moved)]) = kNoEdge;
      }
    }
    for (const int32_t moved : path) {
      Set(moved, turns_[IndexOf(moved)] == turn ? other : turn);
    }
    Set(message, turn);
  }

  std::vector<int32_t> turns_;                // by message
  std::vector<std::array<int32_t, 2>> ends_;  // by message: of each side
  int32_t count_ = 0;
  // By side: by rank and turn, the message.
  std::array<std::vector<int32_t>, 2> at_;
};

}  // namespace

std::vector<int32_t> TurnsOf(absl::Span<const std::pair<Rank, Rank>> messages) {
  return TurnFinder(messages).Find();
}

std::vector<int32_t> TurnsOfTrees(
    const Module& module, absl::Span<const std::pair<Rank, Rank>> edges) {
  std::vector<std::pair<Rank, Rank>> distinct;
  absl::flat_hash_map<std::pair<Rank, Rank>, size_t> number_of;
  std::vector<Rank> roots;
  absl::flat_hash_map<Rank, Rank> source_of;
  absl::flat_hash_map<Rank, int32_t> passes_on, receives;
  int32_t degree = 1;
  for (const auto& edge : edges) {
    const auto& [sender, receiver] = edge;
    if (!module.IsRelay(sender)) {
      if (source_of.try_emplace(receiver, receiver).second) {
        roots.push_back(receiver);
        degree = std::max(degree, ++receives[receiver]);
      }
      continue;
    }
    if (!number_of.try_emplace(edge, distinct.size()).second) continue;
    distinct.push_back(edge);
    degree = std::max({degree, ++passes_on[sender], ++receives[receiver]});
  }
  std::sort(roots.begin(), roots.end());
  const size_t sources = (roots.size() + static_cast<size_t>(degree) - 1) /
                         static_cast<size_t>(degree);
  for (size_t i = 0; i < roots.size(); ++i) {
    const Rank source{module.world_size() + static_cast<int32_t>(i % sources)};
    source_of[roots[i]] = source;
    number_of.try_emplace({source, roots[i]}, distinct.size());
    distinct.emplace_back(source, roots[i]);
  }
  const std::vector<int32_t> turns = TurnsOf(distinct);
  std::vector<int32_t> of_edges;
  for (const auto& [sender, receiver] : edges) {
    const Rank source =
        module.IsRelay(sender) ? sender : source_of.at(receiver);
    of_edges.push_back(turns[number_of.at({source, receiver})]);
  }
  return of_edges;
}

}  // namespace refit
