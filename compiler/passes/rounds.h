// Rounds with the messages that ranks have in them.
#ifndef REFIT_COMPILER_PASSES_ROUNDS_H_
#define REFIT_COMPILER_PASSES_ROUNDS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "plan/plan_file.h"

namespace refit {

enum Direction : uint8_t { kSends = 0, kReceives = 1 };

// Staging and operations of one rank in one round.
struct RankRoom {
  int64_t staging_bytes = 0;
  int32_t operations = 0;
};

// What staged messages take of the ranks' rounds. Not thread-safe.
class RoundLoads {
 public:
  // `turns`: how many consecutive rounds share no staging of a rank. `module`
  // must outlive it.
  RoundLoads(const Module& module, int32_t turns)
      : limits_(module.limits),
        staging_bytes_max_(limits_.staging_bytes / turns /
                           kStagingAlignmentBytes * kStagingAlignmentBytes),
        ranks_(static_cast<size_t>(module.world_size())) {}

  // In no round a rank sends more than so much of what is added next, or
  // receives more; what goes inside a host beside it does not count.
  // A small message may go beside others up to `with_small` in all.
  void LimitDirection(int64_t bytes, int64_t with_small) {
    direction_bytes_max_ = {bytes, with_small};
  }
  // A rank sends up to so many times as much.
  void LimitSends(int64_t factor) { sends_factor_ = factor; }
  // In no round a rank receives more than so much from sources of its host
  // beside what comes over the network.
  void LimitEntering(int64_t bytes) { entering_bytes_max_ = bytes; }
  // What is dealt out in a round leaves so much of it, by rank, to what comes
  // over the network in the same one. Empty: nothing.
  void Reserve(std::vector<RankRoom> reserved) {
    reserved_ = std::move(reserved);
  }

  // Whether the round has room for the message at its source, or where it is
  // received; there the next round must have room for those that deal it out.
  bool FitsAtSource(const Message& message, int32_t round, bool is_small);
  bool FitsWhereReceived(const Message& message,
                         absl::Span<const Message> dealt_by, int32_t round,
                         bool is_small);
  // Puts them there, which must have room. A source sends a broadcast once.
  void Add(Message& message, absl::Span<Message> dealt_by, int32_t round);

  // Bytes of the largest message that the rank may have room to send, or
  // receive, over the network.
  int64_t Room(Rank rank, Direction direction, int32_t round, bool is_small);

  // What a round of a rank has room for.
  int64_t staging_bytes_max() const { return staging_bytes_max_; }

 private:
  // What one rank has in one round.
  struct RankRound {
    RankRoom taken;
    std::array<int64_t, 2> bytes = {};  // by direction; not inside the host
    int64_t entering_bytes = 0;
  };

  RankRound& At(Rank rank, int32_t round) {
    std::vector<RankRound>& rounds = ranks_[IndexOf(rank)];
    const size_t index = static_cast<size_t>(round);
    if (rounds.size() <= index) rounds.resize(index + 1);
    return rounds[index];
  }
  // For so much more.
  bool HasRoom(const RankRound& at, const RankRoom& more) const {
    return at.taken.operations + more.operations <=
               limits_.operations_per_round &&
           at.taken.staging_bytes + more.staging_bytes <= staging_bytes_max_;
  }
  // The same beside what is reserved, unless the rank has nothing in the round.
  bool HasRoomToDeal(Rank rank, int32_t round, RankRoom more);

  int64_t DirectionBytesMax(Direction direction, bool is_small) const {
    return direction_bytes_max_[is_small] *
           (direction == kSends ? sends_factor_ : 1);
  }

  const Limits& limits_;
  const int64_t staging_bytes_max_;
  // Of what is not small, and of all.
  std::array<int64_t, 2> direction_bytes_max_ = {};
  int64_t sends_factor_ = 1;
  int64_t entering_bytes_max_ = std::numeric_limits<int64_t>::max();
  std::vector<RankRoom> reserved_;
  std::vector<std::vector<RankRound>> ranks_;  // by rank, round
};

// The message that brings a staged relay its contents; null for any other. It
// is one: in staged rounds what a rank passes on is what it received.
const Message* FedBy(const Module& module, const Message& message);

// Those that deal the message out.
absl::Span<Message> DealtBy(Module& module, const Message& message);

// Calls `visit` with the message, and with the others of its broadcast if it is
// the first of one.
template <typename Visit>
void ForEachSentWith(Module& module, Message& message, const Visit& visit) {
  visit(message);
  const auto number = static_cast<size_t>(&message - module.messages.data());
  for (int32_t i = 1; i <= message.broadcast.others; ++i) {
    visit(module.messages[number +
                          static_cast<size_t>(i) *
                              static_cast<size_t>(message.broadcast.stride)]);
  }
}

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_ROUNDS_H_
