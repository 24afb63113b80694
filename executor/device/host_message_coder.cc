#include "executor/device/host_message_coder.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "executor/delta/message_code.h"
#include "executor/device/cast.h"
#include "plan/schedule/copy_batches.h"

namespace refit {
namespace {

constexpr uint64_t kCodedElementBytesMax = 8;

// A bit for each element of a message.
class ElementBits {
 public:
  explicit ElementBits(uint64_t elements)
      : words_((elements + kWordBits - 1) / kWordBits) {}

  void Clear() { std::fill(words_.begin(), words_.end(), 0); }
  void Set(uint64_t element) {
    words_[element / kWordBits] |= uint64_t{1} << element % kWordBits;
  }
  // Calls `visit(element)` for those of [begin, end) that are set, ascending.
  template <typename Visit>
  void ForEach(uint64_t begin, uint64_t end, const Visit& visit) const {
    for (uint64_t i = begin; i < end;) {
      const uint64_t word = words_[i / kWordBits] >> i % kWordBits;
      if (word == 0) {
        i += kWordBits - i % kWordBits;
        continue;
      }
      i += static_cast<uint64_t>(std::countr_zero(word));
      if (i >= end) return;
      visit(i++);
    }
  }

 private:
  static constexpr uint64_t kWordBits = 64;
  std::vector<uint64_t> words_;
};

// A copy of a message whose innermost part is runs of elements that are
// contiguous in their tensor.
struct CodedBox {
  CopyAddress first;
  uint64_t begin_element = 0;   // of the message
  uint64_t tensor_bytes = 0;    // of an element in the tensor
  uint64_t parts = 1;           // elements of the message for one of these
  CastFunction pack = nullptr;  // of a copy that casts
  CastFunction unpack = nullptr;
  bool always = false;
  uint64_t run_elements = 1;  // of the tensor
  CopyLoops loops;            // around the runs, outermost first
};

// A run of a box: its elements of the message, and where they are.
struct CodedRun {
  CopyAddress first;
  uint64_t begin = 0;
  uint64_t end = 0;
};

CodedBox MakeCodedBox(const MessageToCode& of, size_t number) {
  const StridedCopy& copy = of.copies[number];
  CodedBox box;
  box.first = copy.from;
  box.begin_element = copy.to.byte_offset / of.message.element_bytes;
  box.tensor_bytes = static_cast<uint64_t>(DTypeBytes(copy.from.dtype));
  box.parts = static_cast<uint64_t>(DTypeBytes(copy.to.dtype)) /
              of.message.element_bytes;
  if (copy.from.dtype != copy.to.dtype) {
    box.pack = FindCast(copy.from.dtype, copy.to.dtype);
    box.unpack = FindCast(copy.to.dtype, copy.from.dtype);
  }
  box.always = of.is_send && of.always[number];
  box.loops = MergedLoops(absl::MakeConstSpan(of.loops).subspan(
      copy.loops_begin, copy.loops_count));
  if (box.loops.empty()) return box;
  const CopyLoop& inner = box.loops.back();
  if (inner.from.entries == 0 && inner.from.bytes == box.tensor_bytes) {
    box.run_elements = inner.extent;
    box.loops.pop_back();
  }
  return box;
}

template <typename Visit>
void ForEachCodedRun(const CodedBox& box, const Visit& visit) {
  const uint64_t elements = box.run_elements * box.parts;
  uint64_t begin = box.begin_element;
  ForEachIteration(
      box.loops, box.first, CopyAddress(),
      [&](const CopyAddress& first, const CopyAddress&) {
        visit(
            CodedRun{.first = first, .begin = begin, .end = begin + elements});
        begin += elements;
      });
}

template <typename T>
T At(const std::byte* bytes, uint64_t element) {
  T value;
  std::memcpy(&value, bytes + element * sizeof(T), sizeof(T));
  return value;
}

// Calls `visit(element)` for each of `count` that differs, ascending. Most do
// not, so it looks at as many as it can at once.
template <typename T, typename Visit>
void ForEachChangedOf(const std::byte* now, const std::byte* before,
                      uint64_t count, const Visit& visit) {
  constexpr uint64_t kBlock = 256 / sizeof(T);
  constexpr uint64_t kPerWord = sizeof(uint64_t) / sizeof(T);
  const auto same = [&](uint64_t begin, uint64_t end) {
    return std::memcmp(now + begin * sizeof(T), before + begin * sizeof(T),
                       (end - begin) * sizeof(T)) == 0;
  };
  for (uint64_t block = 0; block < count; block += kBlock) {
    const uint64_t block_end = std::min(count, block + kBlock);
    if (same(block, block_end)) continue;
    for (uint64_t word = block; word < block_end; word += kPerWord) {
      const uint64_t word_end = std::min(block_end, word + kPerWord);
      if (word_end - word == kPerWord &&
          At<uint64_t>(now, word / kPerWord) ==
              At<uint64_t>(before, word / kPerWord)) {
        continue;
      }
      for (uint64_t i = word; i < word_end; ++i) {
        if (At<T>(now, i) != At<T>(before, i)) visit(i);
      }
    }
  }
}

template <typename Visit>
void ForEachChanged(const std::byte* now, const std::byte* before,
                    uint64_t element_bytes, uint64_t count,
                    const Visit& visit) {
  switch (element_bytes) {
    case 1:
      return ForEachChangedOf<uint8_t>(now, before, count, visit);
    case 2:
      return ForEachChangedOf<uint16_t>(now, before, count, visit);
    case 4:
      return ForEachChangedOf<uint32_t>(now, before, count, visit);
    default:
      return ForEachChangedOf<uint64_t>(now, before, count, visit);
  }
}

// Calls `visit(i)` for each i below `count` whose mark, `first` + i of the
// words at `marks`, is set.
template <typename Visit>
void ForEachMarked(const std::byte* marks, uint64_t first, uint64_t count,
                   const Visit& visit) {
  constexpr uint64_t kWordBits = 32;
  for (uint64_t mark = first; mark < first + count;) {
    const uint32_t word =
        At<uint32_t>(marks, mark / kWordBits) >> mark % kWordBits;
    if (word == 0) {
      mark += kWordBits - mark % kWordBits;
      continue;
    }
    mark += static_cast<uint64_t>(std::countr_zero(word));
    if (mark >= first + count) return;
    visit(mark++ - first);
  }
}

class HostMessageCoder : public MessageCoder {
 public:
  HostMessageCoder(absl::Span<std::byte* const> table,
                   const ChangeEntries& changes,
                   absl::Span<const MessageToCode> messages)
      : table_(table.begin(), table.end()),
        changes_(changes),
        counted_(messages.size()) {
    for (const MessageToCode& of : messages) {
      Message& message = messages_.emplace_back();
      if (of.message.element_bytes == 0) continue;
      message.message = of.message;
      message.is_send = of.is_send;
      message.rooms = of.rooms;
      message.code = of.code;
      if (of.is_send) message.changed.emplace(of.message.elements());
      for (size_t i = 0; i < of.copies.size(); ++i) {
        message.boxes.push_back(MakeCodedBox(of, i));
      }
    }
  }

  absl::Status Restart(Stream) override {
    std::fill(counted_.begin(), counted_.end(), ChangedElements());
    failure_.reset();
    return absl::OkStatus();
  }
  absl::Status Count(Stream) override {
    for (size_t i = 0; i < messages_.size(); ++i) {
      if (messages_[i].is_send) counted_[i] = CountOne(messages_[i]);
    }
    return absl::OkStatus();
  }
  absl::StatusOr<absl::Span<const ChangedElements>> Counted(Stream) override {
    return counted_;
  }
  absl::Status Encode(size_t begin, size_t count, size_t rung,
                      Stream) override {
    for (size_t i = begin; i < begin + count; ++i) {
      const Message& message = messages_[i];
      if (message.is_send && message.RoomOn(rung) != 0) {
        EncodeOne(message, rung);
      }
    }
    return absl::OkStatus();
  }
  absl::Status Apply(size_t begin, size_t count, size_t rung, Stream) override {
    for (size_t i = begin; i < begin + count; ++i) {
      const Message& message = messages_[i];
      if (message.is_send || message.RoomOn(rung) == 0) continue;
      const absl::Status status = ApplyOne(message, rung);
      if (!status.ok() && !failure_.has_value()) failure_ = {i, status};
    }
    return absl::OkStatus();
  }
  absl::Status Keep(Stream) override {
    if (changes_.by == ChangesBy::kMarks) return absl::OkStatus();
    for (const Message& message : messages_) {
      if (message.is_send) KeepOne(message);
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::optional<CodingFailure>> FirstFailure(Stream) override {
    return failure_;
  }

 private:
  // One that some rung does not send whole; else empty.
  struct Message {
    CodedMessage message;
    bool is_send = false;
    std::vector<uint64_t> rooms;
    std::byte* code = nullptr;
    std::vector<CodedBox> boxes;
    std::optional<ElementBits> changed;  // of a send: what was counted

    uint64_t RoomOn(size_t rung) const {
      return rung < rooms.size() ? rooms[rung] : 0;
    }
  };

  std::byte* AddressOf(const CopyAddress& at) const {
    return table_[at.entry] + at.byte_offset;
  }
  std::byte* ShadowOf(const CopyAddress& at) const {
    return table_[at.entry + changes_.entries] + at.byte_offset;
  }
  const std::byte* MarksOf(const CopyAddress& at) const {
    return table_[at.entry + changes_.entries];
  }

  // Calls `visit(i)` for each element of a run that changed, ascending.
  template <typename Visit>
  void ForEachChangedOfRun(const CodedBox& box, const CodedRun& run,
                           const Visit& visit) const {
    const uint64_t size = box.tensor_bytes;
    if (changes_.by == ChangesBy::kMarks) {
      ForEachMarked(MarksOf(run.first), run.first.byte_offset / size,
                    box.run_elements, visit);
      return;
    }
    const std::byte* const now = AddressOf(run.first);
    const std::byte* const before = ShadowOf(run.first);
    ForEachChanged(now, before, size, box.run_elements, [&](uint64_t i) {
      if (box.pack != nullptr &&
          IsSameCast(box, now + i * size, before + i * size)) {
        return;
      }
      visit(i);
    });
  }

  // Whether two elements are sent as the same bits.
  static bool IsSameCast(const CodedBox& box, const std::byte* a,
                         const std::byte* b) {
    uint64_t cast_a = 0;
    uint64_t cast_b = 0;
    box.pack(&cast_a, a, 1);
    box.pack(&cast_b, b, 1);
    return cast_a == cast_b;
  }

  ChangedElements CountOne(Message& message) const {
    ChangedElements counted;
    message.changed->Clear();
    for (const CodedBox& box : message.boxes) {
      ForEachCodedRun(box, [&](const CodedRun& run) {
        if (box.always) {
          for (uint64_t i = run.begin; i < run.end; ++i) {
            message.changed->Set(i);
          }
          counted.room += run.end - run.begin;
          return;
        }
        ForEachChangedOfRun(box, run, [&](uint64_t i) {
          for (uint64_t p = 0; p < box.parts; ++p) {
            message.changed->Set(run.begin + i * box.parts + p);
          }
          counted.count += 1;
          counted.room += box.parts;
        });
      });
    }
    return counted;
  }

  void EncodeOne(const Message& message, size_t rung) const {
    const uint64_t width = message.message.element_bytes;
    CodeWriter writer(message.message, message.RoomOn(rung), message.code);
    for (const CodedBox& box : message.boxes) {
      ForEachCodedRun(box, [&](const CodedRun& run) {
        const std::byte* const elements = AddressOf(run.first);
        message.changed->ForEach(run.begin, run.end, [&](uint64_t i) {
          const uint64_t part = i - run.begin;
          if (box.pack == nullptr) {
            writer.Add(i, elements + part * width);
            return;
          }
          std::byte cast[kCodedElementBytesMax];
          box.pack(cast, elements + part / box.parts * box.tensor_bytes, 1);
          writer.Add(i, cast + part % box.parts * width);
        });
      });
    }
    writer.Finish();
  }

  absl::Status ApplyOne(const Message& message, size_t rung) const {
    const std::byte* const code = message.code;
    const absl::StatusOr<std::vector<uint64_t>> elements =
        ElementsOfCode(message.message, message.RoomOn(rung), code);
    if (!elements.ok()) return elements.status();
    const uint64_t width = message.message.element_bytes;
    const std::byte* const values = ValuesOfCode(code);
    size_t next = 0;
    bool fits = true;
    for (const CodedBox& box : message.boxes) {
      ForEachCodedRun(box, [&](const CodedRun& run) {
        std::byte* const to = AddressOf(run.first);
        while (fits && next < elements->size() && (*elements)[next] < run.end) {
          const uint64_t element = (*elements)[next];
          const uint64_t part = element - run.begin;
          const std::byte* const value = values + next * width;
          fits = element >= run.begin;
          if (!fits) return;
          if (box.unpack == nullptr) {
            std::memcpy(to + part * width, value, width);
            ++next;
            continue;
          }
          // It is cast from all its parts.
          fits = part % box.parts == 0 &&
                 next + box.parts <= elements->size() &&
                 (*elements)[next + box.parts - 1] == element + box.parts - 1;
          if (!fits) return;
          std::byte whole[kCodedElementBytesMax];
          std::memcpy(whole, value, box.parts * width);
          box.unpack(to + part / box.parts * box.tensor_bytes, whole, 1);
          next += box.parts;
        }
      });
    }
    if (next == elements->size()) return absl::OkStatus();
    return DamagedCode(absl::StrCat("element ", next, " is at ",
                                    (*elements)[next],
                                    ", where the message has none to store"));
  }

  void KeepOne(const Message& message) const {
    const uint64_t width = message.message.element_bytes;
    for (const CodedBox& box : message.boxes) {
      ForEachCodedRun(box, [&](const CodedRun& run) {
        const std::byte* const elements = AddressOf(run.first);
        std::byte* const shadow = ShadowOf(run.first);
        const bool casts = box.pack != nullptr;
        const uint64_t size = casts ? box.tensor_bytes : width;
        message.changed->ForEach(run.begin, run.end, [&](uint64_t i) {
          const uint64_t part = i - run.begin;
          const uint64_t at = (casts ? part / box.parts : part) * size;
          std::memcpy(shadow + at, elements + at, size);
        });
      });
    }
  }

  const std::vector<std::byte*> table_;
  const ChangeEntries changes_;
  std::vector<Message> messages_;
  std::vector<ChangedElements> counted_;
  std::optional<CodingFailure> failure_;
};

}  // namespace

std::unique_ptr<MessageCoder> MakeHostMessageCoder(
    absl::Span<std::byte* const> table, const ChangeEntries& changes,
    absl::Span<const MessageToCode> messages) {
  return std::make_unique<HostMessageCoder>(table, changes, messages);
}

}  // namespace refit
