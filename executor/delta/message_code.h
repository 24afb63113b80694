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
// narrowest one; a wider one is sent with all its parts.
#ifndef REFIT_EXECUTOR_DELTA_MESSAGE_CODE_H_
#define REFIT_EXECUTOR_DELTA_MESSAGE_CODE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "plan/schedule/coded_message.h"

namespace refit {

// Writes a code of CodeBytes(room) from front to back.
class CodeWriter {
 public:
  CodeWriter(const CodedMessage& message, uint64_t room, std::byte* code);

  // Requires: `element` is behind those that were added, which leave it room.
  void Add(uint64_t element, const std::byte* value);
  // What was added is all that changed.
  void Finish();

 private:
  const uint64_t width_;
  std::byte* const code_;
  std::byte* const values_;
  std::byte* const groups_;
  std::byte* const positions_;
  uint32_t count_ = 0;
};

// The elements whose values `code` holds, ascending; all are of the message.
// Error: kDataLoss, no message is encoded like that.
absl::StatusOr<std::vector<uint64_t>> ElementsOfCode(
    const CodedMessage& message, uint64_t room, const std::byte* code);

// The values of the ElementsOfCode, in order.
inline const std::byte* ValuesOfCode(const std::byte* code) {
  return code + kCodeHeaderBytes;
}

// kDataLoss: what was received is encoded like no message.
absl::Status DamagedCode(absl::string_view how);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DELTA_MESSAGE_CODE_H_
