#include "compiler/passes/rounds.h"

#include <algorithm>

namespace refit {

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
  if (!IsBesideNetwork(message)) {
    at.bytes[direction] += AlignStaging(message.size_bytes);
  } else if (!message.is_held && direction == kReceives) {
    at.peer_bytes += AlignStaging(message.size_bytes);
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
  const auto fits = [&](Rank rank, Direction direction) {
    const std::vector<RankRound>& rounds = ranks_[IndexOf(rank)].rounds;
    const auto index = static_cast<size_t>(round);
    return Fits(index < rounds.size() ? rounds[index] : RankRound(), direction,
                bytes);
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
    const int64_t turn = message.round % turns_;
    const RankState& source = ranks_[IndexOf(message.source)];
    if (message.is_held) {
      message.source_staging_offset =
          messages[message.fed_by.begin].destination_staging_offset;
    } else {
      message.source_staging_offset += turn * source.round_bytes;
    }
    message.destination_staging_offset +=
        turn * ranks_[IndexOf(message.destination)].round_bytes;
  }
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
