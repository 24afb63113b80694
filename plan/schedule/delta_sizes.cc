#include "plan/schedule/delta_sizes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "plan/dtype.h"
#include "plan/sent_ranges.h"

namespace refit {
namespace {

using Messages = std::vector<const fb::Message*>;

// The receiver's messages of each pair of which `rank` is one, by round. Both
// ends count their messages of a round, a pair and a direction in order.
class Receivers {
 public:
  Receivers(const PlanFile& plan, int32_t rank)
      : lists_(plan.messages()), rank_(static_cast<uint32_t>(rank)) {}

  // That of number `before` among those that `rank` sends `peer` in `round`;
  // null if there is none, which the proof refuses.
  const fb::Message* Of(uint32_t peer, uint32_t round, size_t before) {
    const auto [found, is_new] = by_peer_.try_emplace(peer);
    if (is_new) {
      const fb::Body& body = lists_.body();
      for (const fb::Message* message : lists_.Of(peer)) {
        if (message->kind() == fb::MessageKind::kRecv &&
            PeerOf(body, peer, *message) == rank_) {
          found->second[message->round()].push_back(message);
        }
      }
    }
    const Messages& messages = found->second[round];
    return before < messages.size() ? messages[before] : nullptr;
  }

 private:
  const MessageLists& lists_;
  const uint32_t rank_;
  std::map<uint32_t, std::map<uint32_t, Messages>> by_peer_;
};

// Whether the receiver holds, bit by bit, what an earlier refit sent here.
bool HoldsWhatWasSent(const fb::Buffer& buffer, const fb::Copy& copy) {
  return buffer.dtype() == copy.wire_dtype() &&
         (buffer.post_hooks() == nullptr || buffer.post_hooks()->size() == 0);
}

// Bytes of a message that hold elements of one size.
struct ElementRange {
  uint64_t begin_byte = 0;
  uint64_t end_byte = 0;
  uint32_t element_bytes = 0;
  bool always = false;  // sent whether they changed or not
};

// Ascending, by the copies of the receiver. Empty if several of them read the
// same byte.
std::vector<ElementRange> RangesOf(const fb::Body& body, uint32_t receiver,
                                   const fb::Message& received) {
  const fb::RankProgram& program = *body.programs()->Get(receiver);
  std::vector<ElementRange> ranges;
  for (const fb::Copy& copy : CopiesOf(body, received.copies())) {
    const fb::Buffer& buffer =
        *body.buffers()->Get(program.buffers()->Get(copy.buffer_slot()));
    const auto element_bytes =
        static_cast<uint32_t>(DTypeBytes(copy.wire_dtype()));
    const uint64_t bytes = element_bytes * CopyElements(body, copy);
    if (bytes == 0) continue;
    ranges.push_back({.begin_byte = copy.staging_offset(),
                      .end_byte = copy.staging_offset() + bytes,
                      .element_bytes = element_bytes,
                      .always = !HoldsWhatWasSent(buffer, copy)});
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const ElementRange& a, const ElementRange& b) {
              return a.begin_byte < b.begin_byte;
            });
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin_byte < ranges[i - 1].end_byte) return {};
  }
  return ranges;
}

}  // namespace

DeltaSizes::DeltaSizes(const PlanFile& plan, int32_t rank,
                       const RankSchedule& schedule)
    : schedule_(schedule),
      whole_below_bytes_(
          WholeBelowBytes(plan.body().limits()->bucket_bytes())) {
  const fb::Body& body = plan.body();
  const auto& rungs = *body.delta()->rungs();
  rungs_.assign(rungs.begin(), rungs.end());
  operations_.resize(schedule.operations().size());
  const MessageVector& messages = plan.messages().Of(rank);
  // By message: how many of its round and its direction come before it.
  std::vector<size_t> before(messages.size());
  std::map<std::pair<uint32_t, uint32_t>, size_t> sent;  // by round and peer
  for (uint32_t m = 0; m < before.size(); ++m) {
    const fb::Message& message = *messages.Get(m);
    if (message.kind() != fb::MessageKind::kSend) continue;
    before[m] = sent[{message.round(), message.peer()}]++;
  }
  Receivers receivers(plan, rank);
  for (const RoundWork& work : schedule.rounds()) {
    if (!work.IsStagedRound()) continue;
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const uint32_t number = work.operations_begin + i;
      const Operation& operation = schedule.operations()[number];
      const uint32_t position = schedule.parts()[number].message;
      const fb::Message& message = *messages.Get(position);
      const bool send = operation.kind == fb::MessageKind::kSend;
      const auto receiver = static_cast<uint32_t>(send ? operation.peer : rank);
      const fb::Message* const received =
          send ? receivers.Of(receiver, work.index, before[position])
               : &message;
      if (received == nullptr) continue;
      const std::vector<ElementRange> ranges =
          RangesOf(body, receiver, *received);
      if (ranges.empty()) continue;
      CodedOperation& of = operations_[number];
      of.message.size_bytes = operation.size_bytes;
      of.message.element_bytes =
          std::min_element(ranges.begin(), ranges.end(),
                           [](const ElementRange& a, const ElementRange& b) {
                             return a.element_bytes < b.element_bytes;
                           })
              ->element_bytes;
      uint64_t elements = 0;
      for (const ElementRange& range : ranges) {
        const uint64_t size_bytes = range.end_byte - range.begin_byte;
        of.received.push_back({range.begin_byte, range.end_byte, range.always});
        if (range.always) {
          of.message.always_elements += size_bytes / of.message.element_bytes;
        } else {
          elements += size_bytes / range.element_bytes;
        }
      }
      of.rooms = RoomsOf(of.message);
      if (std::all_of(of.rooms.begin(), of.rooms.end(),
                      [](uint64_t room) { return room == 0; })) {
        of = CodedOperation();
      } else if (send) {
        elements_ += elements;
      }
    }
  }
}

std::vector<uint64_t> DeltaSizes::RoomsOf(const CodedMessage& message) const {
  std::vector<uint64_t> rooms;
  for (const uint8_t rung : rungs_) {
    const uint64_t room = message.RoomOn(rung);
    // The code counts in 32 bits.
    const bool is_coded = message.size_bytes >= whole_below_bytes_ &&
                          room <= std::numeric_limits<uint32_t>::max() &&
                          message.CodeBytes(room) < message.size_bytes;
    rooms.push_back(is_coded ? room : 0);
  }
  return rooms;
}

uint64_t DeltaSizes::RoomOf(size_t operation, size_t rung) const {
  return IsCoded(operation) && rung < rungs_.size()
             ? operations_[operation].rooms[rung]
             : 0;
}

uint64_t DeltaSizes::SizeBytes(size_t operation, size_t rung) const {
  const uint64_t room = RoomOf(operation, rung);
  return room == 0 ? schedule_.operations()[operation].size_bytes
                   : operations_[operation].message.CodeBytes(room);
}

bool DeltaSizes::IsAllWhole(size_t rung) const {
  for (size_t i = 0; i < operations_.size(); ++i) {
    if (!IsWhole(i, rung)) return false;
  }
  return true;
}

size_t DeltaSizes::ExpectedRung(double change_rate, int32_t senders) const {
  const auto is_sent = [this](size_t operation) {
    return IsCoded(operation) &&
           schedule_.operations()[operation].kind == fb::MessageKind::kSend;
  };
  size_t sent = 0;
  for (size_t i = 0; i < operations_.size(); ++i) sent += is_sent(i) ? 1 : 0;
  if (sent == 0) return 0;
  // The largest of n normal values is expected at about this many deviations.
  const double deviations =
      std::sqrt(2 * std::log(static_cast<double>(sent) * senders));
  size_t first = 0;
  for (size_t i = 0; i < operations_.size(); ++i) {
    if (!is_sent(i)) continue;
    const CodedMessage& message = operations_[i].message;
    const auto elements =
        static_cast<double>(message.elements() - message.always_elements);
    const double expected = elements * change_rate;
    const double most = std::min(
        elements,
        expected + deviations * std::sqrt(expected * (1 - change_rate)));
    while (first < rungs_.size()) {
      const uint64_t room = RoomOf(i, first);
      if (room == 0 ||
          most <= static_cast<double>(room - message.always_elements)) {
        break;
      }
      ++first;
    }
  }
  return first;
}

}  // namespace refit
