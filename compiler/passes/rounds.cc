#include "compiler/passes/rounds.h"

#include <algorithm>

namespace refit {

bool RoundLoads::HasRoomToDeal(Rank rank, int32_t round, RankRoom more) {
  const RankRound& at = At(rank, round);
  if (!reserved_.empty() && at.taken.operations > 0) {
    more.staging_bytes += reserved_[IndexOf(rank)].staging_bytes;
    more.operations += reserved_[IndexOf(rank)].operations;
  }
  return HasRoom(at, more);
}

bool RoundLoads::FitsAtSource(const Message& message, int32_t round,
                              bool is_small) {
  const int64_t bytes = AlignStaging(message.size_bytes);
  const RankRound& source = At(message.source, round);
  // What is held lies in staging already.
  return HasRoom(source, {.staging_bytes = message.is_held ? 0 : bytes,
                          .operations = 1}) &&
         (IsBesideNetwork(message) ||
          source.bytes[kSends] <= DirectionBytesMax(kSends, is_small) - bytes);
}

bool RoundLoads::FitsWhereReceived(const Message& message,
                                   absl::Span<const Message> dealt_by,
                                   int32_t round, bool is_small) {
  const int64_t bytes = AlignStaging(message.size_bytes);
  const RankRoom one = {.staging_bytes = bytes, .operations = 1};
  const RankRound& destination = At(message.destination, round);
  if (!HasRoom(destination, one)) return false;
  if (IsBesideNetwork(message)
          ? destination.entering_bytes + bytes > entering_bytes_max_
          : destination.bytes[kReceives] >
                DirectionBytesMax(kReceives, is_small) - bytes) {
    return false;
  }
  if (dealt_by.empty()) return true;
  return HasRoomToDeal(message.destination, round + 1,
                       {.operations = static_cast<int32_t>(dealt_by.size())}) &&
         std::all_of(dealt_by.begin(), dealt_by.end(),
                     [&](const Message& held) {
                       return HasRoomToDeal(held.destination, round + 1, one);
                     });
}

void RoundLoads::Add(Message& message, absl::Span<Message> dealt_by,
                     int32_t round) {
  message.round = round;
  const int64_t bytes = AlignStaging(message.size_bytes);
  if (!message.is_sent_with_other()) {
    RankRound& source = At(message.source, round);
    source.taken.operations += 1;
    if (!message.is_held) source.taken.staging_bytes += bytes;
    if (!IsBesideNetwork(message)) source.bytes[kSends] += bytes;
  }
  RankRound& destination = At(message.destination, round);
  destination.taken.operations += 1;
  destination.taken.staging_bytes += bytes;
  if (!IsBesideNetwork(message)) {
    destination.bytes[kReceives] += bytes;
  } else if (!message.is_held) {
    destination.entering_bytes += bytes;
  }
  for (Message& held : dealt_by) Add(held, {}, round + 1);
}

int64_t RoundLoads::Room(Rank rank, Direction direction, int32_t round,
                         bool is_small) {
  const RankRound& at = At(rank, round);
  if (at.taken.operations >= limits_.operations_per_round) return 0;
  const int64_t bytes =
      DirectionBytesMax(direction, is_small) - at.bytes[direction];
  // What is sent may lie in staging already.
  return direction == kSends
             ? bytes
             : std::min(bytes, staging_bytes_max_ - at.taken.staging_bytes);
}

const Message* FedBy(const Module& module, const Message& message) {
  return message.mechanism == Mechanism::kStaged && message.fed_by.count > 0
             ? &module.messages[message.fed_by.begin]
             : nullptr;
}

absl::Span<Message> DealtBy(Module& module, const Message& message) {
  return absl::MakeSpan(module.messages)
      .subspan(message.dealt_by.begin, message.dealt_by.count);
}

}  // namespace refit
