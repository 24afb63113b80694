// How a message of a staged round travels when only what changed is sent.
//
// Of n elements of e bytes, with room for c changed ones, it is
//
//   8 bytes            how many changed, then 0: 32-bit words
//   c x e              their values, in order; behind the last any bytes
//   n / 128, upwards   how many of each 128 elements changed, a byte each
//   c                  each one's position among its 128, a byte each
//
// So its size is known before anybody knows what changed. An alignment gap
// counts as elements that never change. Elements of several sizes count by the
// narrowest one.
#ifndef REFIT_EXECUTOR_DELTA_MESSAGE_CODE_H_
#define REFIT_EXECUTOR_DELTA_MESSAGE_CODE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace refit {

// Bytes of a message that hold elements of one size, between alignment gaps.
struct ElementRange {
  uint64_t begin_byte = 0;
  uint64_t end_byte = 0;
  uint32_t element_bytes = 0;  // 1, 2, 4 or 8
  bool always = false;         // sent whether they changed or not

  uint64_t size_bytes() const { return end_byte - begin_byte; }
};

// A message, or the part of one that travels at once.
struct CodedMessage {
  uint64_t size_bytes = 0;
  uint32_t element_bytes = 0;        // 1, 2, 4 or 8; the narrowest
  std::vector<ElementRange> ranges;  // ascending

  uint64_t elements() const {
    return (size_bytes + element_bytes - 1) / element_bytes;
  }
  // Room for what is always sent, and one changed element of 2^rung others.
  uint64_t RoomOn(uint32_t rung) const;
  uint64_t CodeBytes(uint64_t room) const;
};

struct ChangedElements {
  uint64_t count = 0;  // each of its own size, without those always sent
  uint64_t room = 0;   // enough for them and for those always sent
};

// Which elements of `now` differ from those of `before`, bit by bit.
ChangedElements CountChanged(const CodedMessage& message, const std::byte* now,
                             const std::byte* before);

// Writes CodeBytes(room) to `code`. Returns the room it needs; if that is more
// than `room`, `code` is of no use.
uint64_t EncodeChanges(const CodedMessage& message, uint64_t room,
                       const std::byte* now, const std::byte* before,
                       std::byte* code);

// Makes `elements`, as they were before, what the sender has now. Writes
// nothing beyond the message, whatever `code` holds. Error: kDataLoss, no
// message is encoded like that; some elements may have been written.
absl::Status ApplyChanges(const CodedMessage& message, uint64_t room,
                          const std::byte* code, std::byte* elements);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DELTA_MESSAGE_CODE_H_
