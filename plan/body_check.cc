#include "plan/body_check.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "plan/broadcasts.h"
#include "plan/check.h"
#include "plan/declaration_check.h"
#include "plan/group_limit.h"
#include "plan/message_lists.h"
#include "plan/plan_file.h"
#include "plan/quantize_check.h"
#include "plan/stack_check.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

// Of 64 bits it takes several times as long as of 32, where any is needed.
uint64_t Divide(uint64_t a, uint64_t b) {
  if (a < b) return 0;
  if ((a | b) >> 32 == 0) {
    return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  }
  return a / b;
}

class BodyChecker {
 public:
  BodyChecker(const fb::Body& body, size_t body_bytes)
      : body_(body),
        source_ranks_(body.source_ranks()),
        ranks_(Length(body.programs())),
        rounds_(body.rounds()),
        copy_lists_(body.copy_lists()),
        copies_(body.copies()),
        // Honest plans stay far below both; a file that shares a list a
        // million times cannot make the loader slow.
        entries_left_(std::max<uint64_t>(1 << 20, body_bytes)),
        copies_left_(std::max<uint64_t>(1 << 26, 8 * uint64_t{body_bytes})) {}

  absl::Status Check();

 private:
  // `where`: "". Ends as the part of the program with a mistake.
  absl::Status CheckProgram(uint32_t rank, const fb::RankProgram& program,
                            std::string& where);
  bool IsChecked(uint32_t rank, const fb::RankProgram& program);
  // What the messages of a program are held to.
  struct Ends {
    uint32_t rank = 0;
    uint64_t source_shift = 0;
    uint64_t destination_shift = 0;
    uint64_t staging_bytes = 0;

    uint64_t PeerOf(const fb::Message& message, uint32_t source_ranks) const {
      return message.peer() +
             (message.peer() < source_ranks ? source_shift : destination_shift);
    }
  };
  absl::Status CheckMessage(const Ends& ends, const fb::Message& message) const;
  // Of the program whose messages were checked last.
  absl::Status CheckRelays(const fb::RankProgram& program, bool of_source);
  // A copy list that was checked against buffers of some sizes, for a message
  // of `size_bytes`: any larger message is right as well. Ranks share lists,
  // and most have buffers of the same sizes.
  struct CheckedList {
    uint32_t sizes = kNoSizes;
    uint64_t size_bytes = 0;
  };
  static constexpr uint32_t kNoSizes = std::numeric_limits<uint32_t>::max();

  // A program that was checked, and the largest peers of its messages. 0 where
  // it has none on a side.
  struct Shared {
    uint32_t rank = 0;
    uint32_t last_source = 0;
    uint32_t last_destination = 0;

    void Add(uint32_t peer, uint32_t source_ranks) {
      const bool of_source = peer < source_ranks;
      last_source = std::max(last_source, of_source ? peer : 0);
      last_destination = std::max(last_destination, of_source ? 0 : peer);
    }
  };

  // `position`: 0. Ends at the message with a fault, if there is one.
  absl::Status CheckMessages(const fb::RankProgram& program, const Ends& ends,
                             uint32_t sizes, Shared& shared,
                             uint32_t& position);
  // If true, the messages of a packed round, the first of which is `begin`,
  // have no fault, their copies were checked against buffers of `sizes`, and
  // their peers are in `shared`.
  bool IsSound(const PackedColumns& columns, const fb::MessageRound& round,
               size_t begin, const Ends& ends, uint32_t sizes,
               Shared& shared) const;
  // Counts the message, which has no fault, among its round's operations;
  // whether NCCL bears so many.
  bool CountOperation(uint32_t rank, const fb::Message& message);
  // Whether the copies of the message were checked against buffers of `sizes`.
  bool IsChecked(const fb::Message& message, uint32_t sizes) const {
    const CheckedList& checked = checked_[message.copies()];
    return checked.sizes == sizes && checked.size_bytes <= message.size_bytes();
  }
  // The number of the sizes of the program's buffers, which were checked.
  uint32_t SizesOf(const fb::RankProgram& program);
  absl::Status CheckCopies(const fb::RankProgram& program, uint32_t sizes,
                           uint32_t list, uint64_t size_bytes, bool fills);
  absl::Status CheckCopy(const fb::RankProgram& program, const fb::Copy& copy,
                         uint64_t size_bytes, bool fills);

  // The operations of one rank in a round.
  struct Operations {
    uint32_t rank = 0;
    uint32_t count = 0;
  };

  // What the relays of a program are checked with: the round of a message, and
  // whether it is a send. One number, because messages are many.
  class MessageEnd {
   public:
    MessageEnd() = default;
    MessageEnd(uint32_t round, fb::MessageKind kind)
        : value_(round << 1 | (kind == fb::MessageKind::kSend ? 1 : 0)) {}

    bool is_send() const { return (value_ & 1) != 0; }
    uint32_t round() const { return value_ >> 1; }

   private:
    uint32_t value_ = 0;
  };

  const fb::Body& body_;
  // Of the body: to find a field of it takes as long as to check one.
  const uint32_t source_ranks_;
  const uint32_t ranks_;
  const flatbuffers::Vector<const fb::Round*>* const rounds_;
  const flatbuffers::Vector<const fb::CopyList*>* const copy_lists_;
  const flatbuffers::Vector<const fb::Copy*>* const copies_;
  uint64_t entries_left_;
  uint64_t copies_left_;
  // Programs that share all lists cost the loader nothing, but their readers
  // walk them: so many messages and buffers are those of 100,000 ranks.
  uint64_t shared_entries_left_ = 1 << 26;
  std::unordered_map<const void*, Shared> shared_;  // by messages
  std::vector<Operations>
      operations_;                // by round; of the last rank that has it
  RepeatedSends repeated_sends_;  // of the program at hand
  // Of the last program that has relays.
  std::vector<MessageEnd> ends_;
  std::vector<uint32_t> sends_;        // positions in `ends_`
  std::vector<fb::Message> of_round_;  // that is looked at one by one
  std::vector<BufferSize> buffers_;
  std::map<std::vector<BufferSize>, uint32_t> sizes_;  // numbered as they come
  std::vector<CheckedList> checked_;  // by copy list; the last check of each
};

absl::Status BodyChecker::Check() {
  absl::Status status = CheckPools(body_);
  if (!status.ok()) return status;
  uint64_t listed = 0;
  for (const fb::CopyList* list : *copy_lists_) listed += list->count();
  if (listed > copies_left_) return Bad("copy lists share copies too often");
  status = CheckPackedMessages(body_);
  if (status.ok()) status = CheckStacks(body_, buffers_);
  if (status.ok()) status = CheckDeclarations(body_);
  if (status.ok()) status = CheckQuantizations(body_);
  if (status.ok()) status = CheckTopology(body_);
  if (!status.ok()) return status;
  checked_.resize(body_.copy_lists()->size());
  operations_.resize(body_.rounds()->size());
  for (uint32_t rank = 0; rank < body_.programs()->size(); ++rank) {
    std::string where;
    status = CheckProgram(rank, *body_.programs()->Get(rank), where);
    if (status.ok()) continue;
    return Bad("program of rank %u%s: %s", rank, where, status.message());
  }
  // What programs visit is bounded by now.
  return CheckDelta(body_);
}

absl::Status BodyChecker::CheckProgram(uint32_t rank,
                                       const fb::RankProgram& program,
                                       std::string& where) {
  if (program.buffers() == nullptr) return Bad("has no list of buffers");
  if (!ArePacked(program) && program.messages() == nullptr) {
    return Bad("has no list of messages");
  }
  if (!IsAligned(program.messages())) {
    return Bad("messages are not aligned to 8 bytes");
  }
  const uint32_t count = MessageCount(body_, program);
  if (IsChecked(rank, program)) {
    const uint64_t shared = uint64_t{count} + program.buffers()->size();
    if (shared > shared_entries_left_) {
      return Bad("shares its lists too often");
    }
    shared_entries_left_ -= shared;
    return absl::OkStatus();
  }
  const uint64_t entries = uint64_t{count} + program.buffers()->size() +
                           Length(program.quantizes()) +
                           Length(program.relays());
  if (entries > entries_left_) return Bad("shares its lists too often");
  entries_left_ -= entries;
  if (program.staging_bytes() > kLargestStaging) {
    return Bad("staging_bytes %u is above 2^48", program.staging_bytes());
  }
  for (uint32_t slot = 0; slot < program.buffers()->size(); ++slot) {
    const uint32_t buffer = program.buffers()->Get(slot);
    if (buffer >= buffers_.size()) {
      where = absl::StrCat(", buffer slot ", slot);
      return Bad("buffer %u is not below %u", buffer, buffers_.size());
    }
    const auto* hooks = body_.buffers()->Get(buffer)->post_hooks();
    if (hooks == nullptr || hooks->size() == 0) continue;
    const bool of_source = rank < body_.source_ranks();
    if (of_source || uint64_t{slot} + program.scratch_buffers() >=
                         program.buffers()->size()) {
      where = absl::StrCat(", buffer slot ", slot);
      return Bad("buffer %u has post-hooks, %s has none", buffer,
                 of_source ? "a source's" : "scratch");
    }
  }
  absl::Status status = CheckQuantizes(body_, program, buffers_);
  if (!status.ok()) return status;
  if (program.fills() >= body_.copy_lists()->size()) {
    return Bad("fills %u is not below %u", program.fills(),
               body_.copy_lists()->size());
  }
  const uint32_t sizes = SizesOf(program);
  status = CheckCopies(program, sizes, program.fills(), 0, true);
  if (!status.ok()) {
    where = ", fills";
    return status;
  }
  const Ends ends = {.rank = rank,
                     .source_shift = program.source_shift(),
                     .destination_shift = program.destination_shift(),
                     .staging_bytes = program.staging_bytes()};
  Shared shared = {.rank = rank};
  uint32_t position = 0;
  status = CheckMessages(program, ends, sizes, shared, position);
  if (!status.ok()) {
    where = absl::StrCat(", message ", position);
    return status;
  }
  status = CheckRelays(program, rank < body_.source_ranks());
  if (!status.ok()) return status;
  shared_[MessagesKey(body_, program)] = shared;
  return absl::OkStatus();
}

absl::Status BodyChecker::CheckMessages(const fb::RankProgram& program,
                                        const Ends& ends, uint32_t sizes,
                                        Shared& shared, uint32_t& position) {
  repeated_sends_ = {};
  const bool relays = program.relays() != nullptr;
  if (relays) ends_.resize(MessageCount(body_, program));
  sends_.clear();
  const auto check = [&](absl::Span<const fb::Message> messages) {
    for (const fb::Message& message : messages) {
      absl::Status status = CheckMessage(ends, message);
      if (!status.ok()) return status;
      if (!CountOperation(ends.rank, message)) {
        return Bad(
            "round %u has more than %u operations of the rank; NCCL can hang "
            "in larger groups",
            message.round(), kGroupOperationsMax);
      }
      if (!IsChecked(message, sizes)) {
        status = CheckCopies(program, sizes, message.copies(),
                             message.size_bytes(), false);
        if (!status.ok()) return status;
      }
      shared.Add(message.peer(), source_ranks_);
      if (relays) {
        ends_[position] = MessageEnd(message.round(), message.kind());
        if (ends_[position].is_send()) sends_.push_back(position);
      }
      ++position;
    }
    return absl::OkStatus();
  };
  const fb::MessageList* const list = PackedList(body_, program);
  if (list == nullptr) {
    const MessageVector& messages = *program.messages();
    if (messages.size() == 0) return absl::OkStatus();
    return check({messages.Get(0), messages.size()});
  }
  const PackedColumns columns(*body_.packed_messages());
  for (uint32_t i = 0; i < list->rounds_count(); ++i) {
    const fb::MessageRound& round =
        *body_.packed_messages()->rounds()->Get(list->rounds_begin() + i);
    const size_t begin = size_t{list->messages_begin()} + position;
    if (!IsSound(columns, round, begin, ends, sizes, shared)) {
      of_round_.clear();
      columns.ForEachOf(round, !IsDirect(body_, round.round()), begin,
                        [&](const fb::Message& message) {
                          of_round_.push_back(message);
                          return true;
                        });
      if (absl::Status status = check(of_round_); !status.ok()) return status;
      continue;
    }
    if (relays) {
      const auto sends =
          std::fill_n(ends_.begin() + position, round.receives(),
                      MessageEnd(round.round(), fb::MessageKind::kRecv));
      std::fill_n(sends, round.sends(),
                  MessageEnd(round.round(), fb::MessageKind::kSend));
      for (uint32_t send = 0; send < round.sends(); ++send) {
        sends_.push_back(position + round.receives() + send);
      }
    }
    position += uint32_t{round.receives()} + round.sends();
  }
  return absl::OkStatus();
}

// Without a branch for each of the messages, because they are many. May say no
// of sound ones too.
bool BodyChecker::IsSound(const PackedColumns& columns,
                          const fb::MessageRound& round, size_t begin,
                          const Ends& ends, uint32_t sizes,
                          Shared& shared) const {
  const uint32_t count = uint32_t{round.receives()} + round.sends();
  const bool is_staged = !IsDirect(body_, round.round());
  uint64_t offset = round.staging_offset();
  if (is_staged ? count > kGroupOperationsMax || offset > ends.staging_bytes
                : offset != 0) {
    return false;
  }
  // What the file has where the peer is the rank itself.
  const uint64_t self =
      ends.rank -
      (ends.rank < source_ranks_ ? ends.source_shift : ends.destination_shift);
  bool is_sound = true;
  uint64_t end = offset;
  Shared peers = shared;
  for (size_t i = begin; i < begin + count; ++i) {
    const uint32_t peer = columns.Peer(i);
    const uint32_t copies = columns.Copies(i);
    const uint64_t size_bytes = columns.SizeBytes(copies);
    const CheckedList& checked = checked_[copies];
    is_sound &= (peer != self) & (checked.sizes == sizes) &
                (checked.size_bytes <= size_bytes);
    peers.Add(peer, source_ranks_);
    end = offset + size_bytes;
    offset = PackedColumns::OffsetBehind(offset, size_bytes);
  }
  if (!is_sound || (is_staged && end > ends.staging_bytes) ||
      peers.last_source + ends.source_shift >= source_ranks_ ||
      peers.last_destination + ends.destination_shift >= ranks_) {
    return false;
  }
  shared = peers;
  return true;
}

// Whether a program was checked that has the same lists, of a rank of the same
// side, and the peers of this one exist and are others than `rank`.
bool BodyChecker::IsChecked(uint32_t rank, const fb::RankProgram& program) {
  const auto found = shared_.find(MessagesKey(body_, program));
  if (found == shared_.end()) return false;
  const Shared& shared = found->second;
  const fb::RankProgram& checked = *body_.programs()->Get(shared.rank);
  const uint32_t sources = body_.source_ranks();
  const bool of_source = rank < sources;
  if (of_source != (shared.rank < sources)) return false;
  const auto own_shift = [&](const fb::RankProgram& of) {
    return int64_t{of_source ? of.source_shift() : of.destination_shift()};
  };
  // So that no peer is the rank itself, as it was not there.
  return int64_t{rank} - shared.rank ==
             own_shift(program) - own_shift(checked) &&
         AreShared(checked, program) &&
         uint64_t{shared.last_source} + program.source_shift() <
             std::max<uint64_t>(sources, 1) &&
         uint64_t{shared.last_destination} + program.destination_shift() <
             body_.programs()->size();
}

// One for each send, ascending, each fed by a receive of an earlier round.
absl::Status BodyChecker::CheckRelays(const fb::RankProgram& program,
                                      bool of_source) {
  if (program.relays() == nullptr) return absl::OkStatus();
  if (of_source) return Bad("a source rank has relays");
  const uint32_t count = program.relays()->size();
  for (uint32_t i = 0; i < count; ++i) {
    const fb::Relay& relay = *program.relays()->Get(i);
    if (i >= sends_.size() || relay.message() != sends_[i]) {
      return Bad(
          "relay %u is message %u when it should be %s", i, relay.message(),
          i >= sends_.size() ? "none" : absl::StrCat("message ", sends_[i]));
    }
    if (relay.fed_by() >= ends_.size() || ends_[relay.fed_by()].is_send() ||
        ends_[relay.fed_by()].round() >= ends_[sends_[i]].round()) {
      return Bad(
          "relay %u: message %u is fed by message %u, which is no receive of "
          "an earlier round",
          i, sends_[i], relay.fed_by());
    }
  }
  if (count < sends_.size()) {
    return Bad("message %u is sent, and no relay", sends_[count]);
  }
  return absl::OkStatus();
}

absl::Status BodyChecker::CheckMessage(const Ends& ends,
                                       const fb::Message& message) const {
  if (message.round() >= rounds_->size()) {
    return Bad("round %u is not below %u", message.round(), rounds_->size());
  }
  if (message.peer() >= ranks_) {
    return Bad("peer %u is not below %u", message.peer(), ranks_);
  }
  const uint64_t peer = ends.PeerOf(message, source_ranks_);
  const uint32_t bound =
      message.peer() < source_ranks_ ? source_ranks_ : ranks_;
  if (peer >= bound) {
    return Bad("peer %u shifted by %u is not below %u", message.peer(),
               peer - message.peer(), bound);
  }
  if (peer == ends.rank) return Bad("peer is the rank itself");
  if (message.copies() >= copy_lists_->size()) {
    return Bad("copies %u is not below %u", message.copies(),
               copy_lists_->size());
  }
  if (message.kind() != fb::MessageKind::kSend &&
      message.kind() != fb::MessageKind::kRecv) {
    return Bad("unknown kind %u", static_cast<uint32_t>(message.kind()));
  }
  if (message.reserved2() != 0) return Bad("a reserved field is not 0");
  const fb::Round& round = *rounds_->Get(message.round());
  if (message.broadcast() != 0 &&
      (ends.source_shift != 0 || ends.destination_shift != 0)) {
    return Bad("is a broadcast, and its program has shifts");
  }
  if (message.broadcast() != 0 &&
      (round.mechanism() != fb::Mechanism::kStaged ||
       round.route() != fb::Route::kNetwork)) {
    return Bad("is a broadcast, and its round is not staged between hosts");
  }
  if (round.mechanism() == fb::Mechanism::kDirect) {
    if (message.staging_offset() == 0) return absl::OkStatus();
    return Bad("a direct message has a staging_offset");
  }
  if (message.staging_offset() > ends.staging_bytes ||
      message.size_bytes() > ends.staging_bytes - message.staging_offset()) {
    return Bad("%u bytes from %u leave the staging arena of %u bytes",
               message.size_bytes(), message.staging_offset(),
               ends.staging_bytes);
  }
  return absl::OkStatus();
}

bool BodyChecker::CountOperation(uint32_t rank, const fb::Message& message) {
  if (IsDirect(body_, message.round())) return true;
  Operations& operations = operations_[message.round()];
  if (operations.rank != rank) operations = {.rank = rank};
  if (repeated_sends_.Repeats(message)) return true;
  return ++operations.count <= kGroupOperationsMax;
}

uint32_t BodyChecker::SizesOf(const fb::RankProgram& program) {
  std::vector<BufferSize> sizes;
  for (const uint32_t buffer : *program.buffers()) {
    sizes.push_back(buffers_[buffer]);
  }
  return sizes_
      .try_emplace(std::move(sizes), static_cast<uint32_t>(sizes_.size()))
      .first->second;
}

absl::Status BodyChecker::CheckCopies(const fb::RankProgram& program,
                                      uint32_t sizes, uint32_t list,
                                      uint64_t size_bytes, bool fills) {
  const fb::CopyList& range = *copy_lists_->Get(list);
  if (range.count() > copies_left_) return Bad("shares its copies too often");
  copies_left_ -= range.count();
  for (uint32_t i = 0; i < range.count(); ++i) {
    if (absl::Status status = CheckCopy(
            program, *copies_->Get(range.begin() + i), size_bytes, fills);
        !status.ok()) {
      return At(absl::StrCat("copy ", i), status);
    }
  }
  if (!fills) checked_[list] = {sizes, size_bytes};
  return absl::OkStatus();
}

absl::Status BodyChecker::CheckCopy(const fb::RankProgram& program,
                                    const fb::Copy& copy, uint64_t size_bytes,
                                    bool fills) {
  if (copy.buffer_slot() >= program.buffers()->size()) {
    return Bad("buffer_slot %u is not below %u", copy.buffer_slot(),
               program.buffers()->size());
  }
  const BufferSize& buffer =
      buffers_[program.buffers()->Get(copy.buffer_slot())];
  const uint64_t numel = buffer.tensor_elements;
  if (copy.offset() >= buffer.elements()) {
    return Bad("offset %u is not below the buffer's %u elements", copy.offset(),
               buffer.elements());
  }
  // Where the last element lies: loops of whole tensors move `tensor`, all
  // others move `element` and must not carry into the next tensor.
  uint64_t tensor = Divide(copy.offset(), numel);
  uint64_t element = copy.offset() - tensor * numel;
  uint64_t elements = 1;
  for (uint32_t i = 0; i < copy.loops_count(); ++i) {
    const fb::Loop& loop = *body_.loops()->Get(copy.loops_begin() + i);
    uint64_t& position = loop.stride() < numel ? element : tensor;
    const uint64_t bound = loop.stride() < numel ? numel : buffer.tensors;
    const uint64_t tensors = Divide(loop.stride(), numel);
    if (tensors > 0 && loop.stride() != tensors * numel) {
      return Bad(
          "loop %u: stride %u is neither inside a tensor of %u elements nor "
          "whole tensors",
          i, loop.stride(), numel);
    }
    const uint64_t stride = tensors == 0 ? loop.stride() : tensors;
    uint64_t span = 0;
    if (__builtin_mul_overflow(loop.extent() - 1, stride, &span) ||
        __builtin_add_overflow(position, span, &position) ||
        position >= bound) {
      return Bad("loop %u: %u strides of %u leave the %s", i, loop.extent(),
                 loop.stride(), loop.stride() < numel ? "tensor" : "stack");
    }
    if (!Multiply(loop.extent(), elements)) {
      return Bad("loop %u: too many elements", i);
    }
  }
  if (copy.wire_dtype() != buffer.dtype &&
      (fills || !IsSupportedCast(copy.wire_dtype(), buffer.dtype))) {
    return Bad("no cast between %s on the wire and the buffer's %s",
               DTypeName(copy.wire_dtype()), DTypeName(buffer.dtype));
  }
  if (fills) {
    if (copy.staging_offset() != 0) return Bad("a fill has a staging_offset");
    return absl::OkStatus();
  }
  uint64_t end = elements;
  if (!Multiply(DTypeBytes(copy.wire_dtype()), end) ||
      __builtin_add_overflow(end, copy.staging_offset(), &end) ||
      end > size_bytes) {
    return Bad("%u elements of %s from byte %u leave the message's %u bytes",
               elements, DTypeName(copy.wire_dtype()), copy.staging_offset(),
               size_bytes);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckBody(const fb::Body& body, size_t body_bytes) {
  return BodyChecker(body, body_bytes).Check();
}

}  // namespace refit
