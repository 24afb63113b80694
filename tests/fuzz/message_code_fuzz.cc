// libFuzzer target: what a staged message of a delta refit may hold. Whatever
// comes, what is read of it lies inside the message; it is written again as it
// was.
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
  const uint64_t room = message.RoomOn(1 + data[3] % 7);
  // Its own allocation, so that an access beyond it is seen.
  std::vector<std::byte> code(message.CodeBytes(room));
  std::memcpy(code.data(), data + 4, std::min(size - 4, code.size()));
  const auto elements = refit::ElementsOfCode(message, room, code.data());
  if (!elements.ok()) return 0;
  Require(elements->size() <= room);
  std::vector<std::byte> again(code.size());
  refit::CodeWriter writer(message, room, again.data());
  for (size_t i = 0; i < elements->size(); ++i) {
    Require((*elements)[i] < message.elements());
    writer.Add((*elements)[i],
               refit::ValuesOfCode(code.data()) + i * message.element_bytes);
  }
  writer.Finish();
  const auto read = refit::ElementsOfCode(message, room, again.data());
  Require(read.ok() && *read == *elements);
  Require(std::memcmp(refit::ValuesOfCode(again.data()),
                      refit::ValuesOfCode(code.data()),
                      elements->size() * message.element_bytes) == 0);
  return 0;
}
