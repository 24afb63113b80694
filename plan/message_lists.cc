#include "plan/message_lists.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/check.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

// `high`: the upper halves of the numbers, absent where all are 0.
absl::Status CheckHalves(const char* name,
                         const flatbuffers::Vector<uint16_t>& low,
                         const flatbuffers::Vector<uint16_t>* high) {
  if (high == nullptr || high->size() == low.size()) return absl::OkStatus();
  return Bad("%u upper halves of %u %s", high->size(), low.size(), name);
}

absl::Status CheckNumbers(const fb::PackedMessages& packed, uint32_t lists) {
  if (packed.copies()->size() != packed.peers()->size()) {
    return Bad("%u peers have %u copies", packed.peers()->size(),
               packed.copies()->size());
  }
  absl::Status status =
      CheckHalves("peers", *packed.peers(), packed.peers_high());
  status.Update(CheckHalves("copies", *packed.copies(), packed.copies_high()));
  if (!status.ok()) return status;
  const uint32_t count = packed.copies()->size();
  if (count == 0) return absl::OkStatus();
  uint32_t most = 0;
  if (packed.copies_high() == nullptr) {  // as a rule; messages are many
    const uint16_t* const copies = packed.copies()->data();
    for (uint32_t i = 0; i < count; ++i) {
      most = std::max<uint32_t>(most, copies[i]);
    }
  } else {
    const PackedColumns columns(packed);
    for (uint32_t i = 0; i < count; ++i) {
      most = std::max(most, columns.Copies(i));
    }
  }
  if (most < lists) return absl::OkStatus();
  return Bad("copies %u is not below %u", most, lists);
}

absl::Status CheckList(const fb::Body& body, const fb::MessageList& list) {
  const fb::PackedMessages& packed = *body.packed_messages();
  const auto ends_behind = [](uint32_t begin, uint32_t count, uint32_t size) {
    return uint64_t{begin} + count > size;
  };
  if (ends_behind(list.rounds_begin(), list.rounds_count(),
                  packed.rounds()->size())) {
    return Bad("rounds end at %u of %u",
               uint64_t{list.rounds_begin()} + list.rounds_count(),
               packed.rounds()->size());
  }
  if (ends_behind(list.messages_begin(), list.messages_count(),
                  packed.peers()->size())) {
    return Bad("messages end at %u of %u",
               uint64_t{list.messages_begin()} + list.messages_count(),
               packed.peers()->size());
  }
  uint64_t messages = 0;
  int64_t last = -1;
  for (uint32_t i = 0; i < list.rounds_count(); ++i) {
    const fb::MessageRound& round =
        *packed.rounds()->Get(list.rounds_begin() + i);
    if (round.round() <= last) {
      return Bad("round %u follows round %d", round.round(), last);
    }
    if (round.round() >= body.rounds()->size()) {
      return Bad("round %u is not below %u", round.round(),
                 body.rounds()->size());
    }
    if (round.receives() + round.sends() == 0) {
      return Bad("round %u has no messages", round.round());
    }
    last = round.round();
    messages += uint64_t{round.receives()} + round.sends();
  }
  if (messages == list.messages_count()) return absl::OkStatus();
  return Bad("its rounds have %u messages when it has %u", messages,
             list.messages_count());
}

absl::Status CheckPacked(const fb::Body& body) {
  const fb::PackedMessages& packed = *body.packed_messages();
  if (packed.lists() == nullptr || packed.rounds() == nullptr ||
      packed.peers() == nullptr || packed.copies() == nullptr ||
      packed.sizes() == nullptr) {
    return Bad("a part is missing");
  }
  if (!IsAligned(packed.rounds()) || !IsAligned(packed.sizes())) {
    return Bad("rounds and sizes are not aligned to 8 bytes");
  }
  const uint32_t lists = body.copy_lists()->size();
  if (packed.sizes()->size() != lists) {
    return Bad("%u sizes of %u copy lists", packed.sizes()->size(), lists);
  }
  for (uint32_t i = 0; i < lists; ++i) {
    if (packed.sizes()->Get(i) <= kLargestStaging) continue;
    return Bad("size %u is %u, above 2^48", i, packed.sizes()->Get(i));
  }
  if (absl::Status s = CheckNumbers(packed, lists); !s.ok()) return s;
  // Lists may share their rounds. A small file is not to take long.
  uint64_t rounds = 0;
  for (const fb::MessageList* list : *packed.lists()) {
    rounds += std::min(list->rounds_count(), packed.rounds()->size());
  }
  const uint64_t parts = uint64_t{packed.lists()->size()} +
                         packed.rounds()->size() + packed.peers()->size();
  if (rounds > std::max<uint64_t>(1 << 20, 16 * parts)) {
    return Bad("its lists share rounds too often");
  }
  for (uint32_t i = 0; i < packed.lists()->size(); ++i) {
    if (absl::Status s = CheckList(body, *packed.lists()->Get(i)); !s.ok()) {
      return At(absl::StrCat("list ", i), s);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckPackedMessages(const fb::Body& body) {
  if (body.packed_messages() != nullptr) {
    if (absl::Status s = CheckPacked(body); !s.ok()) {
      return At("packed messages", s);
    }
  }
  const int64_t lists = body.packed_messages() == nullptr
                            ? 0
                            : body.packed_messages()->lists()->size();
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    const fb::RankProgram& program = *body.programs()->Get(rank);
    const int32_t list = program.message_list();
    if (list == -1) continue;
    if (list < 0 || list >= lists) {
      return Bad("program of rank %u: message_list %d is not below %d", rank,
                 list, lists);
    }
    if (program.messages() != nullptr) {
      return Bad("program of rank %u: has messages and a message_list", rank);
    }
  }
  return absl::OkStatus();
}

uint64_t* MessageMemory::Take(size_t words) {
  if (words > words_left_) {
    // Blocks grow. Large ones are huge pages, where the system has them: to
    // touch many small ones for the first time takes longer than to write.
    constexpr size_t kHugePageBytes = size_t{2} << 20;
    constexpr size_t kMostWords = 4 * kHugePageBytes / sizeof(uint64_t);
    block_words_ = std::max(words, std::min(2 * block_words_, kMostWords));
    const bool is_huge = block_words_ * sizeof(uint64_t) >= kHugePageBytes;
    const size_t alignment = is_huge ? kHugePageBytes : sizeof(uint64_t);
    const size_t bytes = (block_words_ * sizeof(uint64_t) + alignment - 1) /
                         alignment * alignment;
    void* const block = std::aligned_alloc(alignment, bytes);
    if (block == nullptr) throw std::bad_alloc();
    if (is_huge) madvise(block, bytes, MADV_HUGEPAGE);
    blocks_.emplace_back(block);
    next_ = static_cast<uint64_t*>(block);
    words_left_ = bytes / sizeof(uint64_t);
  }
  words_left_ -= words;
  return std::exchange(next_, next_ + words);
}

MessageLists::MessageLists(const fb::Body& body)
    : body_(body),
      written_(body.packed_messages() == nullptr
                   ? 0
                   : body.packed_messages()->lists()->size()) {}

const MessageVector& MessageLists::Write(const fb::RankProgram& program) const {
  const std::lock_guard lock(mutex_);
  std::atomic<const MessageVector*>& written =
      written_[static_cast<size_t>(program.message_list())];
  if (const MessageVector* other = written.load(std::memory_order_relaxed)) {
    return *other;  // was faster
  }
  const uint32_t count = MessageCount(body_, program);
  // As in a file: the length, and aligned behind it the messages.
  static_assert(sizeof(fb::Message) % sizeof(uint64_t) == 0);
  constexpr size_t kWords = sizeof(fb::Message) / sizeof(uint64_t);
  uint64_t* const words = memory_.Take(1 + kWords * size_t{count});
  auto* const length = reinterpret_cast<flatbuffers::uoffset_t*>(words) + 1;
  flatbuffers::WriteScalar(length, count);
  auto* next = reinterpret_cast<fb::Message*>(words + 1);
  ForEachMessage(body_, program, [&](const fb::Message& message) {
    ::new (next++) fb::Message(message);
    return true;
  });
  const auto* const vector = reinterpret_cast<const MessageVector*>(length);
  written.store(vector, std::memory_order_release);
  return *vector;
}

}  // namespace refit
