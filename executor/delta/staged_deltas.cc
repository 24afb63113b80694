#include "executor/delta/staged_deltas.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "plan/dtype.h"

namespace refit {
namespace {

// A refit sends few messages this much smaller than what one may hold.
constexpr uint64_t kSmallMessages = 256;
constexpr uint64_t kMostAlwaysWholeBytes = 64 << 10;

using Messages = std::vector<const fb::Message*>;

// The receiver's messages of each pair of which `rank` is one, by round. Both
// ends count their messages of a round, a pair and a direction in order.
class Receivers {
 public:
  Receivers(const PlanFile& plan, int32_t rank)
      : body_(plan.body()), rank_(static_cast<uint32_t>(rank)) {}

  // That of number `before` among those that `rank` sends `peer` in `round`;
  // null if there is none, which the proof refuses.
  const fb::Message* Of(uint32_t peer, uint32_t round, size_t before) {
    const auto [found, is_new] = by_peer_.try_emplace(peer);
    if (is_new) {
      const fb::RankProgram& program = *body_.programs()->Get(peer);
      for (const fb::Message* message : *program.messages()) {
        if (message->kind() == fb::MessageKind::kRecv &&
            PeerOf(body_, program, *message) == rank_) {
          found->second[message->round()].push_back(message);
        }
      }
    }
    const Messages& messages = found->second[round];
    return before < messages.size() ? messages[before] : nullptr;
  }

 private:
  const fb::Body& body_;
  const uint32_t rank_;
  std::map<uint32_t, std::map<uint32_t, Messages>> by_peer_;
};

template <typename Visit>
void ForEachCopy(const fb::Body& body, const fb::Message& message,
                 const Visit& visit) {
  const fb::CopyList& list = *body.copy_lists()->Get(message.copies());
  for (uint32_t i = 0; i < list.count(); ++i) {
    visit(*body.copies()->Get(list.begin() + i));
  }
}

// Whether the receiver holds, bit by bit, what an earlier refit sent here.
bool HoldsWhatWasSent(const fb::Buffer& buffer, const fb::Copy& copy) {
  return buffer.dtype() == copy.wire_dtype() &&
         (buffer.post_hooks() == nullptr || buffer.post_hooks()->size() == 0);
}

// Where a part of a message has elements, from its start, by the copies of its
// receiver.
std::vector<ElementRange> RangesOf(const fb::Body& body, uint32_t receiver,
                                   const fb::Message& received,
                                   uint64_t part_begin, uint64_t part_end) {
  const fb::RankProgram& program = *body.programs()->Get(receiver);
  std::vector<ElementRange> ranges;
  ForEachCopy(body, received, [&](const fb::Copy& copy) {
    const fb::Buffer& buffer =
        *body.buffers()->Get(program.buffers()->Get(copy.buffer_slot()));
    const auto element_bytes =
        static_cast<uint32_t>(DTypeBytes(copy.wire_dtype()));
    uint64_t bytes = element_bytes;
    for (uint32_t l = 0; l < copy.loops_count(); ++l) {
      bytes *= body.loops()->Get(copy.loops_begin() + l)->extent();
    }
    const uint64_t begin = std::max(copy.staging_offset(), part_begin);
    const uint64_t end = std::min(copy.staging_offset() + bytes, part_end);
    if (begin >= end) return;
    ranges.push_back({.begin_byte = begin - part_begin,
                      .end_byte = end - part_begin,
                      .element_bytes = element_bytes,
                      .always = !HoldsWhatWasSent(buffer, copy)});
  });
  std::sort(ranges.begin(), ranges.end(),
            [](const ElementRange& a, const ElementRange& b) {
              return a.begin_byte < b.begin_byte;
            });
  std::vector<ElementRange> joined;
  for (const ElementRange& range : ranges) {
    if (!joined.empty() && joined.back().end_byte == range.begin_byte &&
        joined.back().element_bytes == range.element_bytes &&
        joined.back().always == range.always) {
      joined.back().end_byte = range.end_byte;
    } else {
      joined.push_back(range);
    }
  }
  return joined;
}

}  // namespace

StagedDeltas::StagedDeltas(const PlanFile& plan, int32_t rank,
                           const RankSchedule& schedule)
    : schedule_(schedule),
      whole_below_bytes_(
          std::min(kMostAlwaysWholeBytes,
                   plan.body().limits()->bucket_bytes() / kSmallMessages)) {
  const fb::Body& body = plan.body();
  const auto& rungs = *body.delta()->rungs();
  rungs_.assign(rungs.begin(), rungs.end());
  rung_ = rungs_.size();
  messages_.resize(schedule.operations().size());
  const fb::RankProgram& program = *body.programs()->Get(rank);
  // By message: how many of its round and its direction come before it.
  std::vector<size_t> before(program.messages()->size());
  std::map<std::pair<uint32_t, uint32_t>, size_t> sent;  // by round and peer
  for (uint32_t m = 0; m < before.size(); ++m) {
    const fb::Message& message = *program.messages()->Get(m);
    if (message.kind() != fb::MessageKind::kSend) continue;
    before[m] = sent[{message.round(), message.peer()}]++;
  }
  Receivers receivers(plan, rank);
  for (const RoundWork& work : schedule.rounds()) {
    if (work.mechanism != fb::Mechanism::kStaged) continue;
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const uint32_t number = work.operations_begin + i;
      const Operation& operation = schedule.operations()[number];
      const MessagePart& part = schedule.parts()[number];
      const fb::Message& message = *program.messages()->Get(part.message);
      const bool send = operation.kind == fb::MessageKind::kSend;
      const auto receiver = static_cast<uint32_t>(send ? operation.peer : rank);
      const fb::Message* const received =
          send ? receivers.Of(receiver, work.index, before[part.message])
               : &message;
      if (received == nullptr) continue;
      CodedMessage& coded = messages_[number];
      coded.size_bytes = operation.size_bytes;
      coded.ranges = RangesOf(body, receiver, *received, part.begin_byte,
                              part.begin_byte + operation.size_bytes);
      coded.element_bytes = 8;
      uint64_t elements = 0;
      for (const ElementRange& range : coded.ranges) {
        coded.element_bytes =
            std::min(coded.element_bytes, range.element_bytes);
        if (range.always) continue;
        elements += range.size_bytes() / range.element_bytes;
      }
      bool is_coded = false;
      for (size_t r = 0; r < rungs_.size(); ++r) {
        is_coded |= RoomOf(number, r) > 0;
      }
      if (!is_coded) {
        coded = CodedMessage();
      } else if (send) {
        elements_ += elements;
      }
    }
  }
}

void StagedDeltas::Bind(absl::Span<const Operation> whole,
                        std::vector<const std::byte*> before,
                        std::byte* codes) {
  whole_.assign(whole.begin(), whole.end());
  before_ = std::move(before);
  codes_ = codes;
  Take(rungs_.size());
}

void StagedDeltas::ResetCounts() {
  first_rung_ = 0;
  changed_ = 0;
}

void StagedDeltas::CountWork(const RoundWork& work) {
  for (uint32_t i = 0; i < work.operations_count; ++i) {
    const uint32_t number = work.operations_begin + i;
    if (!IsCoded(number) || whole_[number].kind != fb::MessageKind::kSend) {
      continue;
    }
    const ChangedElements changed =
        CountChanged(messages_[number], whole_[number].data, before_[number]);
    changed_ += changed.count;
    while (first_rung_ < rungs_.size()) {
      const uint64_t room = RoomOf(number, first_rung_);
      if (room == 0 || changed.room <= room) break;
      ++first_rung_;
    }
  }
}

uint64_t StagedDeltas::RoomOf(size_t operation, size_t rung) const {
  if (!IsCoded(operation) || rung == rungs_.size()) return 0;
  const CodedMessage& message = messages_[operation];
  if (message.size_bytes < whole_below_bytes_) return 0;
  const uint64_t room = message.RoomOn(rungs_[rung]);
  // The code counts in 32 bits.
  if (room > std::numeric_limits<uint32_t>::max()) return 0;
  return message.CodeBytes(room) < message.size_bytes ? room : 0;
}

void StagedDeltas::Take(size_t rung) {
  rung_ = std::min(rung, rungs_.size());
  takes_whole_ = true;
  operations_ = whole_;
  for (const RoundWork& work : schedule_.rounds()) {
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const uint32_t number = work.operations_begin + i;
      const uint64_t room = RoomOf(number, rung_);
      if (room == 0) continue;
      takes_whole_ = false;
      operations_[number].data =
          codes_ + schedule_.parts()[number].staging_offset;
      operations_[number].size_bytes = messages_[number].CodeBytes(room);
    }
  }
}

absl::Status StagedDeltas::Encode(const RoundWork& work) {
  for (uint32_t i = 0; i < work.operations_count; ++i) {
    const uint32_t number = work.operations_begin + i;
    const uint64_t room = RoomOf(number, rung_);
    if (room == 0 || whole_[number].kind != fb::MessageKind::kSend) continue;
    const uint64_t changed =
        EncodeChanges(messages_[number], room, whole_[number].data,
                      before_[number], operations_[number].data);
    if (changed <= room) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("round ", work.index, ": ", changed,
                     " elements of the message to rank ", whole_[number].peer,
                     " changed, with room for ", room,
                     ": its tensors were written after Run began"));
  }
  return absl::OkStatus();
}

absl::Status StagedDeltas::Apply(const RoundWork& work) {
  for (uint32_t i = 0; i < work.operations_count; ++i) {
    const uint32_t number = work.operations_begin + i;
    const uint64_t room = RoomOf(number, rung_);
    if (room == 0 || whole_[number].kind != fb::MessageKind::kRecv) continue;
    const absl::Status status = ApplyChanges(
        messages_[number], room, operations_[number].data, whole_[number].data);
    if (status.ok()) continue;
    return absl::Status(
        status.code(),
        absl::StrCat("round ", work.index, ": recv of ",
                     operations_[number].size_bytes, " bytes from rank ",
                     whole_[number].peer, ": ", status.message()));
  }
  return absl::OkStatus();
}

uint64_t StagedSendBytes(const RankSchedule& schedule,
                         absl::Span<const Operation> operations) {
  uint64_t bytes = 0;
  for (const RoundWork& work : schedule.rounds()) {
    if (work.mechanism != fb::Mechanism::kStaged) continue;
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const Operation& operation = operations[work.operations_begin + i];
      if (operation.kind != fb::MessageKind::kSend) continue;
      bytes += operation.size_bytes;
    }
  }
  return bytes;
}

}  // namespace refit
