#include "executor/delta/message_code.h"

#include <cstring>

#include "absl/strings/str_cat.h"

namespace refit {
CodeWriter::CodeWriter(const CodedMessage& message, uint64_t room,
                       std::byte* code)
    : width_(message.element_bytes),
      code_(code),
      values_(code + kCodeHeaderBytes),
      groups_(values_ + room * width_),
      positions_(groups_ + message.groups()) {
  std::memset(groups_, 0, message.groups());
}

void CodeWriter::Add(uint64_t element, const std::byte* value) {
  std::memcpy(values_ + count_ * width_, value, width_);
  std::byte& of_group = groups_[element / kCodeGroupElements];
  of_group = static_cast<std::byte>(static_cast<uint8_t>(of_group) + 1);
  positions_[count_] = static_cast<std::byte>(element % kCodeGroupElements);
  ++count_;
}

void CodeWriter::Finish() {
  const uint32_t header[] = {count_, 0};
  std::memcpy(code_, header, sizeof(header));
}

absl::Status DamagedCode(absl::string_view how) {
  return absl::DataLossError(
      absl::StrCat("what changed is not encoded as it should be: ", how));
}

absl::StatusOr<std::vector<uint64_t>> ElementsOfCode(
    const CodedMessage& message, uint64_t room, const std::byte* code) {
  const uint64_t width = message.element_bytes;
  const std::byte* const groups = ValuesOfCode(code) + room * width;
  const std::byte* const positions = groups + message.groups();
  uint32_t header[2];
  std::memcpy(header, code, sizeof(header));
  const uint64_t count = header[0];
  if (count > room || header[1] != 0) {
    return DamagedCode(absl::StrCat(count, " elements, with room for ", room));
  }
  std::vector<uint64_t> elements;
  elements.reserve(count);
  for (uint64_t group = 0; group < message.groups(); ++group) {
    const auto in_group = static_cast<uint64_t>(groups[group]);
    if (in_group > count - elements.size()) {
      return DamagedCode(
          absl::StrCat("more elements than the ", count, " it has"));
    }
    uint64_t least = 0;  // that the next position may be
    for (uint64_t i = 0; i < in_group; ++i) {
      const auto position = static_cast<uint64_t>(positions[elements.size()]);
      const uint64_t element = group * kCodeGroupElements + position;
      if (position < least || position >= kCodeGroupElements ||
          (element + 1) * width > message.size_bytes) {
        return DamagedCode(
            absl::StrCat("element ", elements.size(), " is at ", element));
      }
      least = position + 1;
      elements.push_back(element);
    }
  }
  if (elements.size() == count) return elements;
  return DamagedCode(absl::StrCat(elements.size(), " elements, not ", count));
}

}  // namespace refit
