// Rounds with the messages that ranks have in them.
#ifndef REFIT_COMPILER_PASSES_ROUNDS_H_
#define REFIT_COMPILER_PASSES_ROUNDS_H_

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "plan/plan_file.h"

namespace refit {

enum Direction : uint8_t { kSends = 0, kReceives = 1 };

// What one rank has in one round so far.
struct RankRound {
  int64_t staging_bytes = 0;
  std::array<int64_t, 2> bytes = {};  // by direction; not inside the host
  int64_t peer_bytes = 0;  // that a source of its host sends it beside these
  int32_t operations = 0;
};

// Messages of similar size look for room alike.
inline constexpr size_t kSizeClasses = 64;
inline size_t SizeClass(int64_t size_bytes) {
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
  // `turns`: how many consecutive rounds share no staging of a rank. `module`
  // must outlive it.
  Scheduler(const Module& module, int32_t turns)
      : limits_(module.limits),
        turns_(turns),
        round_bytes_max_(limits_.staging_bytes / turns /
                         kStagingAlignmentBytes * kStagingAlignmentBytes),
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
  // The same with what deals the message out, in the round after.
  void PlaceDealt(Message& message, absl::Span<Message> dealt_by,
                  int32_t not_before = 0);
  // Whether the message has room in the round, and what deals it out, if
  // anything does, in the next one.
  bool FitsDealt(const Message& message, absl::Span<const Message> dealt_by,
                 int32_t round);
  // In this round, which has room for both.
  void PlaceIn(Message& message, absl::Span<Message> dealt_by, int32_t round);
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
  // For a message that is not dealt out.
  bool FitsAtBoth(const Message& message, int32_t round) {
    const int64_t bytes = message.size_bytes;
    const RankRound& source = At(message.source, round);
    if (message.is_held) {
      return source.operations < limits_.operations_per_round &&
             source.bytes[kSends] + bytes <= direction_bytes_max_ &&
             Fits(At(message.destination, round), kReceives, bytes);
    }
    if (!IsBesideNetwork(message)) {
      return Fits(source, kSends, bytes) &&
             Fits(At(message.destination, round), kReceives, bytes);
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
  const int32_t turns_;
  const int64_t round_bytes_max_;
  int64_t direction_bytes_max_ = 0;
  int64_t peer_bytes_max_ = 0;
  int32_t first_round_ = 0;
  std::vector<RankState> ranks_;
  int32_t round_count_ = 0;
  int32_t not_dealt_end_ = 0;  // rounds from here on only deal out
};

// The message that brings a staged relay its contents; null for any other. It
// is one: in staged rounds what a rank passes on is what it received.
const Message* FedBy(const Module& module, const Message& message);

// Those that deal the message out.
absl::Span<Message> DealtBy(Module& module, const Message& message);

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_ROUNDS_H_
