#include "compiler/passes/turns.h"

#include <algorithm>
#include <array>
#include <limits>

#include "absl/container/flat_hash_map.h"

namespace refit {
namespace {

constexpr int32_t kNone = -1;

// Messages are the edges of a bipartite graph, and turns its colors: as many as
// the degree are enough (D. König, 1916).
class TurnFinder {
 public:
  explicit TurnFinder(absl::Span<const std::pair<Rank, Rank>> messages)
      : turns_(messages.size(), kNone) {
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
      at_[side].assign(counts[side].size() * IndexOf(count_), kNone);
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
    while (At(side, rank, turn) != kNone) ++turn;
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
    for (int32_t next = At(side, rank, taken); next != kNone;
         next = At(side, rank, taken)) {
      path.push_back(next);
      side = side == kSource ? kDestination : kSource;
      rank = ends_[IndexOf(next)][side];
      taken = taken == turn ? other : turn;
    }
    for (const int32_t moved : path) {
      for (const size_t end : {kSource, kDestination}) {
        At(end, ends_[IndexOf(moved)][end], turns_[IndexOf(moved)]) = kNone;
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

// More turns than these in one round are not looked at: the search grows with
// their square.
constexpr int32_t kTogetherMost = 64;

// The least that the first turns take, with a number of them in their last
// round, and how many are in the round before that; 0: there is none.
struct Best {
  double seconds = std::numeric_limits<double>::infinity();
  int32_t before = 0;
};

}  // namespace

std::vector<int32_t> TurnsOf(absl::Span<const std::pair<Rank, Rank>> messages) {
  return TurnFinder(messages).Find();
}

std::vector<int32_t> RoundsOfTurns(int32_t turns, int32_t most_together,
                                   const TurnSeconds& seconds, bool ends) {
  if (turns == 0) return {};
  const int32_t most = std::min({turns, most_together, kTogetherMost});
  // By how many turns are done, and how many of these are in the last round.
  std::vector<std::vector<Best>> best(IndexOf(turns) + 1,
                                      std::vector<Best>(IndexOf(most) + 1));
  for (int32_t done = 1; done <= turns; ++done) {
    for (int32_t last = 1; last <= std::min(most, done); ++last) {
      const double network = last * seconds.network + kStagedRoundSeconds;
      Best& of = best[IndexOf(done)][IndexOf(last)];
      if (last == done) of.seconds = network;
      for (int32_t before = 1; before <= std::min(most, done - last);
           ++before) {
        const double total =
            best[IndexOf(done - last)][IndexOf(before)].seconds +
            std::max(network, before * seconds.dealt);
        if (total < of.seconds) of = {.seconds = total, .before = before};
      }
    }
  }
  const auto total_with = [&](int32_t last) {
    return best.back()[IndexOf(last)].seconds +
           (ends ? last * seconds.dealt : 0);
  };
  int32_t last = 1;
  for (int32_t together = 2; together <= most; ++together) {
    if (total_with(together) < total_with(last)) last = together;
  }
  std::vector<int32_t> together;  // from the last round back
  for (int32_t done = turns; last > 0;) {
    together.push_back(last);
    const int32_t before = best[IndexOf(done)][IndexOf(last)].before;
    done -= last;
    last = before;
  }
  std::vector<int32_t> rounds;
  for (size_t round = 0; round < together.size(); ++round) {
    rounds.insert(rounds.end(), IndexOf(together[together.size() - 1 - round]),
                  static_cast<int32_t>(round));
  }
  return rounds;
}

}  // namespace refit
