#include "executor/delta/message_code.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "executor/device/message_format.h"

namespace refit {
namespace {

uint64_t GroupsOf(const CodedMessage& message) {
  return (message.elements() + kCodeGroupElements - 1) / kCodeGroupElements;
}

template <typename T>
T At(const std::byte* bytes, uint64_t element) {
  T value;
  std::memcpy(&value, bytes + element * sizeof(T), sizeof(T));
  return value;
}

// Calls `visit(element)` for each that differs, ascending. Most do not, so it
// looks at as many as it can at once.
template <typename T, typename Visit>
void ForEachChangedOf(const ElementRange& range, const std::byte* now,
                      const std::byte* before, const Visit& visit) {
  constexpr uint64_t kPerWord = sizeof(uint64_t) / sizeof(T);
  const uint64_t end = range.end_byte / sizeof(T);
  for (uint64_t i = range.begin_byte / sizeof(T); i < end;) {
    const uint64_t stop =
        std::min(end, (i / kCodeGroupElements + 1) * kCodeGroupElements);
    if (std::memcmp(now + i * sizeof(T), before + i * sizeof(T),
                    (stop - i) * sizeof(T)) == 0) {
      i = stop;
      continue;
    }
    while (i < stop) {
      const uint64_t word_end = std::min(stop, i + kPerWord);
      if (word_end - i == kPerWord &&
          std::memcmp(now + i * sizeof(T), before + i * sizeof(T),
                      sizeof(uint64_t)) == 0) {
        i = word_end;
        continue;
      }
      for (; i < word_end; ++i) {
        if (At<T>(now, i) != At<T>(before, i)) visit(i);
      }
    }
  }
}

template <typename Visit>
void ForEachChanged(const ElementRange& range, uint32_t element_bytes,
                    const std::byte* now, const std::byte* before,
                    const Visit& visit) {
  switch (element_bytes) {
    case 1:
      return ForEachChangedOf<uint8_t>(range, now, before, visit);
    case 2:
      return ForEachChangedOf<uint16_t>(range, now, before, visit);
    case 4:
      return ForEachChangedOf<uint32_t>(range, now, before, visit);
    default:
      return ForEachChangedOf<uint64_t>(range, now, before, visit);
  }
}

absl::Status Damaged(const std::string& how) {
  return absl::DataLossError(
      absl::StrCat("what changed is not encoded as it should be: ", how));
}

}  // namespace

uint64_t CodedMessage::CodeBytes(uint64_t room) const {
  return kCodeHeaderBytes + room * element_bytes + GroupsOf(*this) + room;
}

uint64_t CodedMessage::RoomOn(uint32_t rung) const {
  uint64_t always = 0;
  for (const ElementRange& range : ranges) {
    if (range.always) always += range.size_bytes() / element_bytes;
  }
  const uint64_t others = elements() - always;
  return always + ((others + (uint64_t{1} << rung) - 1) >> rung);
}

ChangedElements CountChanged(const CodedMessage& message, const std::byte* now,
                             const std::byte* before) {
  ChangedElements changed;
  for (const ElementRange& range : message.ranges) {
    if (range.always) {
      changed.room += range.size_bytes() / message.element_bytes;
      continue;
    }
    uint64_t count = 0;
    ForEachChanged(range, range.element_bytes, now, before,
                   [&](uint64_t) { ++count; });
    changed.count += count;
    changed.room += count * (range.element_bytes / message.element_bytes);
  }
  return changed;
}

uint64_t EncodeChanges(const CodedMessage& message, uint64_t room,
                       const std::byte* now, const std::byte* before,
                       std::byte* code) {
  const uint64_t width = message.element_bytes;
  std::byte* const values = code + kCodeHeaderBytes;
  std::byte* const groups = values + room * width;
  std::byte* const positions = groups + GroupsOf(message);
  std::memset(groups, 0, GroupsOf(message));
  uint64_t count = 0;
  const auto add = [&](uint64_t element) {
    if (count++ >= room) return;
    std::memcpy(values + (count - 1) * width, now + element * width, width);
    std::byte& of_group = groups[element / kCodeGroupElements];
    of_group = static_cast<std::byte>(static_cast<uint8_t>(of_group) + 1);
    positions[count - 1] = static_cast<std::byte>(element % kCodeGroupElements);
  };
  for (const ElementRange& range : message.ranges) {
    if (!range.always) {
      ForEachChanged(range, message.element_bytes, now, before, add);
      continue;
    }
    const uint64_t end = range.end_byte / width;
    for (uint64_t i = range.begin_byte / width; i < end; ++i) add(i);
  }
  const uint32_t header[] = {static_cast<uint32_t>(std::min(count, room)), 0};
  std::memcpy(code, header, sizeof(header));
  return count;
}

absl::Status ApplyChanges(const CodedMessage& message, uint64_t room,
                          const std::byte* code, std::byte* elements) {
  const uint64_t width = message.element_bytes;
  const std::byte* const values = code + kCodeHeaderBytes;
  const std::byte* const groups = values + room * width;
  const std::byte* const positions = groups + GroupsOf(message);
  uint32_t header[2];
  std::memcpy(header, code, sizeof(header));
  const uint64_t count = header[0];
  if (count > room || header[1] != 0) {
    return Damaged(absl::StrCat(count, " elements, with room for ", room));
  }
  uint64_t next = 0;
  for (uint64_t group = 0; group < GroupsOf(message); ++group) {
    const auto in_group = static_cast<uint64_t>(groups[group]);
    if (in_group > count - next) {
      return Damaged(absl::StrCat("more elements than the ", count, " it has"));
    }
    uint64_t least = 0;  // that the next position may be
    for (const uint64_t end = next + in_group; next < end; ++next) {
      const auto position = static_cast<uint64_t>(positions[next]);
      const uint64_t element = group * kCodeGroupElements + position;
      if (position < least || position >= kCodeGroupElements ||
          (element + 1) * width > message.size_bytes) {
        return Damaged(absl::StrCat("element ", next, " is at ", element));
      }
      least = position + 1;
      std::memcpy(elements + element * width, values + next * width, width);
    }
  }
  if (next == count) return absl::OkStatus();
  return Damaged(absl::StrCat(next, " elements, not ", count));
}

}  // namespace refit
