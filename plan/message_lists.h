// The messages of programs. A file has them as they are, or packed: without
// what follows from their order.
#ifndef REFIT_PLAN_MESSAGE_LISTS_H_
#define REFIT_PLAN_MESSAGE_LISTS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "plan_generated.h"

namespace refit {

using MessageVector = flatbuffers::Vector<const fb::Message*>;

// Alignment of staging ranges and of each copy inside a message, so that the
// widest vector access of a GPU (16 bytes) never straddles two copies.
inline constexpr int64_t kStagingAlignmentBytes = 16;

// `bytes` rounded up to kStagingAlignmentBytes.
constexpr int64_t AlignStaging(int64_t bytes) {
  return (bytes + kStagingAlignmentBytes - 1) / kStagingAlignmentBytes *
         kStagingAlignmentBytes;
}

// Whether the packed messages, if there are any, can be read: every range,
// index and count of them, but for what they say about their rank. The other
// functions require that.
absl::Status CheckPackedMessages(const fb::Body& body);

inline bool ArePacked(const fb::RankProgram& program) {
  return program.message_list() >= 0;
}

// Null: they are not packed.
inline const fb::MessageList* PackedList(const fb::Body& body,
                                         const fb::RankProgram& program) {
  return ArePacked(program) ? body.packed_messages()->lists()->Get(
                                  static_cast<uint32_t>(program.message_list()))
                            : nullptr;
}

// Equal for programs that share their list of messages.
inline const void* MessagesKey(const fb::Body& body,
                               const fb::RankProgram& program) {
  const fb::MessageList* const list = PackedList(body, program);
  return list != nullptr ? static_cast<const void*>(list) : program.messages();
}

inline uint32_t MessageCount(const fb::Body& body,
                             const fb::RankProgram& program) {
  const fb::MessageList* const list = PackedList(body, program);
  return list != nullptr ? list->messages_count() : program.messages()->size();
}

// What the file has of each packed message.
class PackedColumns {
 public:
  explicit PackedColumns(const fb::PackedMessages& packed)
      : peers_(packed.peers()->data()),
        peers_high_(packed.peers_high() == nullptr
                        ? nullptr
                        : packed.peers_high()->data()),
        copies_(packed.copies()->data()),
        copies_high_(packed.copies_high() == nullptr
                         ? nullptr
                         : packed.copies_high()->data()),
        sizes_(packed.sizes()->data()) {}

  uint32_t Peer(size_t message) const {
    return Join(peers_, peers_high_, message);
  }
  uint32_t Copies(size_t message) const {
    return Join(copies_, copies_high_, message);
  }
  uint64_t SizeBytes(uint32_t copies) const { return sizes_[copies]; }

  // Calls `visit` with each message of a round, the first of which is `begin`,
  // until it returns false. Whether it never did.
  template <typename Visit>
  bool ForEachOf(const fb::MessageRound& round, bool is_staged, size_t begin,
                 const Visit& visit) const {
    const size_t sends_begin = begin + round.receives();
    const size_t end = sends_begin + round.sends();
    uint64_t offset = round.staging_offset();
    for (size_t i = begin; i < end; ++i) {
      const uint32_t copies = Copies(i);
      const uint64_t size_bytes = SizeBytes(copies);
      if (!visit(fb::Message(
              round.round(), Peer(i), copies,
              i < sends_begin ? fb::MessageKind::kRecv : fb::MessageKind::kSend,
              /*broadcast=*/0, /*reserved2=*/0, offset, size_bytes))) {
        return false;
      }
      if (is_staged) offset = OffsetBehind(offset, size_bytes);
    }
    return true;
  }

  // Where the next message of a staged round lies.
  static uint64_t OffsetBehind(uint64_t offset, uint64_t size_bytes) {
    constexpr uint64_t kBytes = kStagingAlignmentBytes;
    return offset + (size_bytes + kBytes - 1) / kBytes * kBytes;
  }

 private:
  static uint32_t Join(const uint16_t* low, const uint16_t* high,
                       size_t message) {
    const uint32_t number = low[message];
    return high == nullptr ? number : number | uint32_t{high[message]} << 16;
  }

  const uint16_t* peers_;
  const uint16_t* peers_high_;
  const uint16_t* copies_;
  const uint16_t* copies_high_;
  const uint64_t* sizes_;
};

// Whether a round of the plan is a direct one; else it is staged.
inline bool IsDirect(const fb::Body& body, uint32_t round) {
  return body.rounds()->Get(round)->mechanism() == fb::Mechanism::kDirect;
}

// Calls `visit` with the messages of a packed list in order, until it returns
// false. Whether it never did.
template <typename Visit>
bool ForEachPacked(const fb::Body& body, const fb::MessageList& list,
                   const Visit& visit) {
  const PackedColumns columns(*body.packed_messages());
  size_t begin = list.messages_begin();
  for (uint32_t i = 0; i < list.rounds_count(); ++i) {
    const fb::MessageRound& round =
        *body.packed_messages()->rounds()->Get(list.rounds_begin() + i);
    if (!columns.ForEachOf(round, !IsDirect(body, round.round()), begin,
                           visit)) {
      return false;
    }
    begin += size_t{round.receives()} + round.sends();
  }
  return true;
}

// The same of any program's messages.
template <typename Visit>
bool ForEachMessage(const fb::Body& body, const fb::RankProgram& program,
                    const Visit& visit) {
  const fb::MessageList* const list = PackedList(body, program);
  if (list != nullptr) return ForEachPacked(body, *list, visit);
  for (const fb::Message* message : *program.messages()) {
    if (!visit(*message)) return false;
  }
  return true;
}

// The same of what the program sends. It does not say where in staging packed
// messages lie: for that all others have to be looked at.
template <typename Visit>
bool ForEachSend(const fb::Body& body, const fb::RankProgram& program,
                 const Visit& visit) {
  const fb::MessageList* const list = PackedList(body, program);
  if (list == nullptr) {
    return ForEachMessage(body, program, [&](const fb::Message& message) {
      return message.kind() != fb::MessageKind::kSend || visit(message);
    });
  }
  const PackedColumns columns(*body.packed_messages());
  size_t next = list->messages_begin();
  for (uint32_t i = 0; i < list->rounds_count(); ++i) {
    const fb::MessageRound& of_round =
        *body.packed_messages()->rounds()->Get(list->rounds_begin() + i);
    next += of_round.receives();
    const fb::MessageRound sends(/*staging_offset=*/0, of_round.round(),
                                 /*receives=*/0, of_round.sends());
    if (!columns.ForEachOf(sends, /*is_staged=*/false, next, visit)) {
      return false;
    }
    next += of_round.sends();
  }
  return true;
}

// Memory for lists of messages, of which one rank wants few and a proof all.
class MessageMemory {
 public:
  // For `words` numbers, as long as this lives.
  uint64_t* Take(size_t words);

 private:
  struct Free {
    void operator()(void* block) const { std::free(block); }
  };
  std::vector<std::unique_ptr<void, Free>> blocks_;
  uint64_t* next_ = nullptr;
  size_t words_left_ = 0;
  size_t block_words_ = 0;  // of the last
};

// All messages of a plan for who looks at them more than once. Packed ones are
// written out in memory, those of a program when it is first asked for.
// Thread-safe.
class MessageLists {
 public:
  // `body` was checked, and must outlive the lists.
  explicit MessageLists(const fb::Body& body);

  const fb::Body& body() const { return body_; }
  // The same vector for programs that share their list, as long as this lives.
  const MessageVector& Of(const fb::RankProgram& program) const {
    if (!ArePacked(program)) return *program.messages();
    const MessageVector* const written =
        written_[static_cast<size_t>(program.message_list())].load(
            std::memory_order_acquire);
    return written != nullptr ? *written : Write(program);
  }
  const MessageVector& Of(uint32_t rank) const {
    return Of(*body_.programs()->Get(rank));
  }

 private:
  const MessageVector& Write(const fb::RankProgram& program) const;

  const fb::Body& body_;
  mutable std::mutex mutex_;  // of those who write
  mutable std::vector<std::atomic<const MessageVector*>> written_;  // by list
  mutable MessageMemory memory_;
};

}  // namespace refit

#endif  // REFIT_PLAN_MESSAGE_LISTS_H_
