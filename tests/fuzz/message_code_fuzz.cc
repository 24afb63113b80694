// libFuzzer target: what a staged message of a delta refit may hold. Whatever
// comes, nothing beyond the message is written; what is applied is encoded
// again as it was.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "executor/delta/message_code.h"

namespace {

void Require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  refit::CodedMessage message;
  message.element_bytes = 1U << (data[0] % 4);
  message.size_bytes =
      uint64_t{1 + data[1] + 256U * (data[2] % 4)} * message.element_bytes;
  message.ranges = {{0, message.size_bytes, message.element_bytes}};
  const uint64_t room = message.RoomOn(1 + data[3] % 7);
  // Its own allocations, so that an access beyond them is seen.
  std::vector<std::byte> code(message.CodeBytes(room));
  std::memcpy(code.data(), data + 4, std::min(size - 4, code.size()));
  const std::vector<std::byte> before(message.size_bytes, std::byte{0x5a});
  std::vector<std::byte> elements = before;
  if (!refit::ApplyChanges(message, room, code.data(), elements.data()).ok()) {
    return 0;
  }
  std::vector<std::byte> again(code.size());
  std::vector<std::byte> applied = before;
  const uint64_t changed = refit::EncodeChanges(message, room, elements.data(),
                                                before.data(), again.data());
  Require(changed <= room);
  Require(
      refit::ApplyChanges(message, room, again.data(), applied.data()).ok());
  Require(applied == elements);
  return 0;
}
