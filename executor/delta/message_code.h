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

#include "absl/status/status.h"
#include "refit/device.h"

namespace refit {

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
