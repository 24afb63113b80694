// What every Device must do with messages of which only what changed is sent,
// held against the format as schema/FORMAT.md tells it. A test file
// instantiates the suite as it does DeviceConformance.
#ifndef REFIT_TESTS_EXECUTOR_MESSAGE_CODE_CONFORMANCE_H_
#define REFIT_TESTS_EXECUTOR_MESSAGE_CODE_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "executor/delta/message_code.h"
#include "executor/device/cast.h"
#include "plan/dtype.h"
#include "tests/executor/device_conformance.h"
#include "tests/sanitizers.h"

namespace refit {

class MessageCodeConformance : public DeviceConformance {
 protected:
  static constexpr std::byte kUnused{0x55};
  static constexpr uint64_t kGuardBytes = 64;
  static constexpr ChangesBy kBoth[] = {ChangesBy::kShadows, ChangesBy::kMarks};

  // How the elements of a box lie in memory.
  enum class Layout {
    kRun,       // one behind the other
    kRows,      // in rows with gaps
    kUnitRows,  // with gaps of 64 bytes
    kEntries,   // each row in a tensor of its own
    kColumn,    // each far from the next
  };

  // A box of a message's elements.
  struct Box {
    uint64_t begin_byte = 0;  // of the message
    DType in_message = DType::kInt8;
    DType in_tensor = DType::kInt8;
    uint64_t rows = 1;
    uint64_t columns = 1;
    bool always = false;
    Layout layout = Layout::kRun;
    uint64_t shift = 0;  // elements before the first
    // Dense, of the tensor's dtype.
    Bytes before;
    Bytes now;
    std::vector<bool> marked;  // by element
    std::vector<bool> coded;   // likewise: its bits in the message are sent

    uint64_t elements() const { return rows * columns; }
    uint64_t tensor_bytes() const { return DTypeBytes(in_tensor); }
    uint64_t message_bytes() const { return DTypeBytes(in_message); }
    uint64_t entries() const { return layout == Layout::kEntries ? rows : 1; }
    // Of a row, in its tensor.
    uint64_t row_stride() const {
      if (layout == Layout::kUnitRows) return columns * step() + 64;
      return (columns + (layout == Layout::kRows ? 3 : 0)) * step();
    }
    uint64_t step() const {
      return tensor_bytes() * (layout == Layout::kColumn ? 5 : 1);
    }
    uint64_t entry_bytes() const {
      const uint64_t in_entry = layout == Layout::kEntries ? 1 : rows;
      return shift * tensor_bytes() + in_entry * row_stride() + kGuardBytes;
    }
    // The entry of element i, and its place there.
    std::pair<uint64_t, uint64_t> PlaceOf(uint64_t i) const {
      const uint64_t row = i / columns;
      const uint64_t at = shift * tensor_bytes() + i % columns * step();
      if (layout == Layout::kEntries) return {row, at};
      return {0, at + row * row_stride()};
    }
  };

  struct Case {
    ChangesBy by = ChangesBy::kShadows;
    CodedMessage message;
    std::vector<Box> boxes;
    Bytes values;                   // of the message, as it is now
    std::vector<uint64_t> changed;  // elements that are coded, ascending
    ChangedElements counted;
  };

  static DType DTypeOf(uint64_t width) {
    return width == 1   ? DType::kInt8
           : width == 2 ? DType::kInt16
           : width == 4 ? DType::kInt32
                        : DType::kInt64;
  }

  static Box BoxOf(uint64_t begin_byte, uint64_t width, uint64_t elements) {
    Box box;
    box.begin_byte = begin_byte;
    box.in_message = box.in_tensor = DTypeOf(width);
    box.columns = elements;
    return box;
  }

  // What a float is after a cast, element by element.
  static Bytes Cast(const Bytes& from, DType from_dtype, DType to_dtype) {
    if (from_dtype == to_dtype) return from;
    const uint64_t elements = from.size() / DTypeBytes(from_dtype);
    Bytes to(elements * DTypeBytes(to_dtype));
    FindCast(from_dtype, to_dtype)(to.data(), from.data(), elements);
    return to;
  }

  // Elements of the boxes are changed, one of `one_of`; 0: none. As many have a
  // mark, which tells by marks alone: of these some did not change, and others
  // changed without one.
  static Case Changed(std::vector<Box> boxes, uint64_t one_of,
                      std::mt19937_64& random,
                      ChangesBy by = ChangesBy::kShadows) {
    Case c;
    c.by = by;
    uint64_t width = 8;
    for (const Box& box : boxes) width = std::min(width, box.message_bytes());
    c.message.element_bytes = static_cast<uint32_t>(width);
    for (Box& box : boxes) {
      const uint64_t size = box.tensor_bytes();
      const bool casts = box.in_tensor != box.in_message;
      box.before.resize(box.elements() * size);
      for (std::byte& byte : box.before) byte = std::byte(random());
      if (casts) {
        // Finite floats.
        std::vector<float> floats(box.elements());
        for (float& value : floats) {
          value = static_cast<float>(random() % 2000) / 7;
        }
        Bytes bytes(floats.size() * sizeof(float));
        std::memcpy(bytes.data(), floats.data(), bytes.size());
        box.before = Cast(bytes, DType::kFp32, box.in_tensor);
      }
      box.now = box.before;
      const uint64_t parts = box.message_bytes() / width;
      c.message.size_bytes =
          box.begin_byte + box.elements() * box.message_bytes();
      if (box.always) c.message.always_elements += box.elements() * parts;
      for (uint64_t i = 0; i < box.elements(); ++i) {
        bool changes = one_of != 0 && random() % one_of == 0;
        if (changes) {
          // Of floats a low byte: some are cast to what they were.
          const uint64_t byte = casts ? random() % (size / 2) : random() % size;
          box.now[i * size + byte] ^= std::byte(1 << random() % 8);
        }
        box.marked.push_back(random() % 8 == 0
                                 ? one_of != 0 && random() % one_of == 0
                                 : changes);
        if (by == ChangesBy::kMarks) {
          changes = box.marked.back();
        } else if (casts) {
          // In the message it may be as it was.
          const auto sent = [&](const Bytes& bytes) {
            const auto at = bytes.begin() + static_cast<ptrdiff_t>(i * size);
            return Cast(Bytes(at, at + static_cast<ptrdiff_t>(size)),
                        box.in_tensor, box.in_message);
          };
          changes = changes && sent(box.now) != sent(box.before);
        }
        box.coded.push_back(changes || box.always);
        if (changes && !box.always) ++c.counted.count;
        if (!changes && !box.always) continue;
        c.counted.room += parts;
        for (uint64_t p = 0; p < parts; ++p) {
          c.changed.push_back(box.begin_byte / width + i * parts + p);
        }
      }
      c.values.resize(c.message.size_bytes);
      const Bytes values = Cast(box.now, box.in_tensor, box.in_message);
      std::copy(values.begin(), values.end(),
                c.values.begin() + static_cast<ptrdiff_t>(box.begin_byte));
    }
    c.boxes = std::move(boxes);
    return c;
  }

  // Boxes of any elements in any layout, gaps between them, together
  // `size_bytes` or little more.
  static std::vector<Box> RandomBoxes(uint64_t size_bytes, size_t count,
                                      std::mt19937_64& random) {
    std::vector<Box> boxes;
    uint64_t at = 0;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t width = 1U << random() % 4;
      const uint64_t elements =
          std::max<uint64_t>(1, size_bytes / count / width);
      Box box = BoxOf(at, width, 1);
      box.layout = static_cast<Layout>(random() % 5);
      box.rows = box.layout == Layout::kRun ? 1 : 1 + random() % 6;
      box.columns = std::max<uint64_t>(1, elements / box.rows + random() % 3);
      box.shift = random() % 3;
      box.always = count > 1 && random() % 4 == 0;
      if (width == 2 && random() % 2 == 0) {
        box.in_message = DType::kBf16;
        box.in_tensor = random() % 2 == 0 ? DType::kFp32 : DType::kBf16;
      } else if (width == 4 && random() % 2 == 0) {
        box.in_message = DType::kFp32;
        box.in_tensor = random() % 2 == 0 ? DType::kBf16 : DType::kFp32;
      }
      at += box.elements() * box.message_bytes();
      at = (at + 15) / 16 * 16;
      boxes.push_back(std::move(box));
    }
    return boxes;
  }

  static Bytes CodeOf(const Case& c, uint64_t room) {
    const uint32_t width = c.message.element_bytes;
    const uint64_t groups = (c.message.elements() + 127) / 128;
    Bytes code(8 + room * width + groups + room, kUnused);
    std::byte* const of_groups = code.data() + 8 + room * width;
    std::memset(code.data(), 0, 8);
    std::memset(of_groups, 0, groups);
    const auto count = static_cast<uint32_t>(c.changed.size());
    std::memcpy(code.data(), &count, sizeof(count));
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t element = c.changed[i];
      std::memcpy(&code[8 + i * width], &c.values[element * width], width);
      std::byte& group = of_groups[element / 128];
      group = std::byte(std::to_integer<int>(group) + 1);
      of_groups[groups + i] = std::byte(element % 128);
    }
    return code;
  }

  void Write(std::byte* to, const Bytes& bytes) {
    ASSERT_TRUE(device_->Copy(to, bytes.data(), bytes.size(), kStream).ok());
    ASSERT_TRUE(device_->Synchronize(kStream).ok());
  }

  // Messages on the device, with their tensors and shadows.
  struct World {
    std::vector<MessageToCode> messages;
    std::vector<std::unique_ptr<DeviceMemory>> tensors;  // by entry
    std::vector<std::unique_ptr<DeviceMemory>> shadows;  // null of receives
    std::vector<std::unique_ptr<DeviceMemory>> marks;    // likewise
    std::vector<std::unique_ptr<DeviceMemory>> codes;    // by message
    std::vector<uint64_t> first_entry;                   // by message
    std::unique_ptr<MessageCoder> coder;
  };

  // What the tensors of a message hold where its elements are `dense`, box by
  // box.
  static std::vector<Bytes> Laid(const Case& c,
                                 const std::vector<Bytes>& dense) {
    std::vector<Bytes> entries;
    for (size_t b = 0; b < c.boxes.size(); ++b) {
      const Box& box = c.boxes[b];
      const size_t first = entries.size();
      entries.resize(first + box.entries(), Bytes(box.entry_bytes(), kUnused));
      for (uint64_t i = 0; i < box.elements(); ++i) {
        const auto [entry, at] = box.PlaceOf(i);
        std::memcpy(&entries[first + entry][at],
                    &dense[b][i * box.tensor_bytes()], box.tensor_bytes());
      }
    }
    return entries;
  }
  static std::vector<Bytes> Laid(const Case& c, Bytes Box::*dense) {
    std::vector<Bytes> of_boxes;
    for (const Box& box : c.boxes) of_boxes.push_back(box.*dense);
    return Laid(c, of_boxes);
  }

  // The marks of the entries of a message, behind a word: they need not be
  // aligned as tensors are. Of what is between a box's elements all are set.
  static std::vector<Bytes> Marks(const Case& c) {
    std::vector<Bytes> entries;
    for (const Box& box : c.boxes) {
      const uint64_t elements = box.entry_bytes() / box.tensor_bytes();
      const size_t first = entries.size();
      entries.resize(first + box.entries(),
                     Bytes(4 + (elements + 31) / 32 * 4, std::byte{0xff}));
      for (uint64_t i = 0; i < box.elements(); ++i) {
        const auto [entry, at] = box.PlaceOf(i);
        const uint64_t mark = 32 + at / box.tensor_bytes();
        if (!box.marked[i]) {
          entries[first + entry][mark / 8] &= ~(std::byte{1} << mark % 8);
        }
      }
    }
    return entries;
  }

  void Add(const Case& c, bool send, const std::vector<uint64_t>& rooms,
           World& world) {
    MessageToCode& of = world.messages.emplace_back();
    of.message = c.message;
    of.is_send = send;
    of.rooms = rooms;
    uint64_t entry = world.tensors.size();
    world.first_entry.push_back(entry);
    for (const Bytes& bytes : Laid(c, send ? &Box::now : &Box::before)) {
      world.tensors.push_back(Upload(bytes));
    }
    for (const Bytes& bytes : Laid(c, &Box::before)) {
      world.shadows.push_back(send ? Upload(bytes) : nullptr);
    }
    for (const Bytes& bytes : Marks(c)) {
      world.marks.push_back(send ? Upload(bytes) : nullptr);
    }
    for (const Box& box : c.boxes) {
      const uint64_t message_bytes = box.message_bytes();
      of.copies.push_back(
          {.from = {entry, box.shift * box.tensor_bytes(), box.in_tensor},
           .to = {0, box.begin_byte, box.in_message},
           .loops_begin = static_cast<uint32_t>(of.loops.size()),
           .loops_count = 2});
      const bool in_entries = box.layout == Layout::kEntries;
      of.loops.push_back(
          {.extent = box.rows,
           .from = {in_entries ? 1U : 0U, in_entries ? 0 : box.row_stride()},
           .to = {0, box.columns * message_bytes}});
      of.loops.push_back({.extent = box.columns,
                          .from = {0, box.step()},
                          .to = {0, message_bytes}});
      of.always.push_back(box.always);
      entry += box.entries();
    }
    const uint64_t most = *std::max_element(rooms.begin(), rooms.end());
    world.codes.push_back(
        Upload(Bytes(c.message.CodeBytes(most) + kGuardBytes, kUnused)));
    of.code = world.codes.back()->data();
  }

  void Prepare(World& world, ChangesBy by = ChangesBy::kShadows) {
    const uint64_t entries = world.tensors.size();
    std::vector<std::byte*> table;
    for (const auto& tensor : world.tensors) table.push_back(tensor->data());
    for (const auto& shadow : world.shadows) {
      table.push_back(shadow == nullptr ? nullptr : shadow->data());
    }
    for (const auto& marks : world.marks) {
      table.push_back(marks == nullptr ? nullptr : marks->data() + 4);
    }
    auto made = device_->PrepareCodes(
        table, {by, by == ChangesBy::kShadows ? entries : 2 * entries},
        world.messages);
    ASSERT_TRUE(made.ok()) << made.status();
    world.coder = *std::move(made);
  }

  void ExpectHeld(const std::vector<std::unique_ptr<DeviceMemory>>& memory,
                  uint64_t first, const std::vector<Bytes>& wanted,
                  const char* what) {
    for (size_t e = 0; e < wanted.size(); ++e) {
      ASSERT_EQ(Download(*memory[first + e]), wanted[e]) << what << " " << e;
    }
  }

  // Sends, and receives of the same messages behind each, on one coder.
  void ExpectCoded(const std::vector<Case>& cases) {
    World world;
    std::vector<uint64_t> rooms;
    for (size_t i = 0; i < cases.size(); ++i) {
      rooms.push_back(cases[i].counted.room + i % 3);
      // On rung 0 too few, on rung 2 it travels whole.
      const uint64_t few = std::max<uint64_t>(1, rooms[i] / 2);
      for (const bool send : {true, false}) {
        Add(cases[i], send, {few, rooms[i], 0}, world);
      }
    }
    const ChangesBy by = cases.front().by;
    Prepare(world, by);
    if (HasFatalFailure()) return;
    MessageCoder& coder = *world.coder;
    // Twice: what was counted first is forgotten.
    for (int times = 0; times < 2; ++times) {
      ASSERT_TRUE(coder.Restart(kStream).ok());
      ASSERT_TRUE(coder.Count(kStream).ok());
    }
    ASSERT_TRUE(device_->Synchronize(kStream).ok());
    const auto counted = coder.Counted(kStream);
    ASSERT_TRUE(counted.ok()) << counted.status();
    for (size_t i = 0; i < cases.size(); ++i) {
      ASSERT_EQ((*counted)[2 * i].count, cases[i].counted.count) << i;
      ASSERT_EQ((*counted)[2 * i].room, cases[i].counted.room) << i;
    }
    // In two launches, as two rounds.
    const size_t cut = cases.size() / 2 * 2;
    const auto in_two = [&](const auto& call) {
      ASSERT_TRUE(call(0, cut).ok());
      ASSERT_TRUE(call(cut, world.messages.size() - cut).ok());
    };
    in_two([&](size_t begin, size_t count) {
      return coder.Encode(begin, count, 2, kStream);
    });
    for (size_t i = 0; i < cases.size(); ++i) {
      const Bytes code = Download(*world.codes[2 * i]);
      ASSERT_EQ(std::count(code.begin(), code.end(), kUnused), code.size());
    }
    in_two([&](size_t begin, size_t count) {
      return coder.Encode(begin, count, 1, kStream);
    });
    for (size_t i = 0; i < cases.size(); ++i) {
      if (rooms[i] == 0) continue;
      Bytes wanted = CodeOf(cases[i], rooms[i]);
      Write(world.codes[2 * i + 1]->data(), wanted);
      wanted.resize(world.codes[2 * i]->size_bytes(), kUnused);
      ASSERT_EQ(Download(*world.codes[2 * i]), wanted) << i;
    }
    in_two([&](size_t begin, size_t count) {
      return coder.Apply(begin, count, 1, kStream);
    });
    ASSERT_TRUE(coder.Keep(kStream).ok());
    for (size_t i = 0; i < cases.size(); ++i) {
      const Case& c = cases[i];
      const uint64_t send = world.first_entry[2 * i];
      const uint64_t receive = world.first_entry[2 * i + 1];
      ExpectHeld(world.tensors, send, Laid(c, &Box::now), "sent");
      std::vector<Bytes> kept;
      std::vector<Bytes> wanted;
      for (const Box& box : c.boxes) {
        kept.push_back(box.before);
        wanted.push_back(box.before);
        const Bytes values = Cast(Cast(box.now, box.in_tensor, box.in_message),
                                  box.in_message, box.in_tensor);
        const uint64_t size = box.tensor_bytes();
        for (uint64_t e = 0; e < box.elements(); ++e) {
          if (!box.coded[e]) continue;
          if (by == ChangesBy::kShadows) {
            std::memcpy(&kept.back()[e * size], &box.now[e * size], size);
          }
          std::memcpy(&wanted.back()[e * size], &values[e * size], size);
        }
      }
      ExpectHeld(world.shadows, send, Laid(c, kept), "kept");
      ExpectHeld(world.marks, send, Marks(c), "marks");
      ExpectHeld(world.tensors, receive, Laid(c, wanted), "received");
      if (HasFatalFailure()) return;
    }
    const auto failure = coder.FirstFailure(kStream);
    ASSERT_TRUE(failure.ok()) << failure.status();
    ASSERT_FALSE(failure->has_value()) << (*failure)->why;
  }
};

TEST_P(MessageCodeConformance, ElementsOfOneSizeAtAllBorders) {
  std::mt19937_64 random(1);
  const std::vector<uint64_t> densities =
      kSanitized ? std::vector<uint64_t>{1, 100}
                 : std::vector<uint64_t>{0, 1, 2, 10, 100, 1000};
  for (const ChangesBy by : kBoth) {
    for (const uint64_t width : {1, 2, 4, 8}) {
      for (const uint64_t one_of : densities) {
        SCOPED_TRACE(testing::Message() << width << " bytes, 1 of " << one_of);
        std::vector<Case> cases;
        for (const uint64_t bytes : {uint64_t{16}, 128 * width, uint64_t{4096},
                                     uint64_t{16384}, uint64_t{3 * 16384}}) {
          for (const int beyond : {-1, 0, 1}) {
            Box box = BoxOf(0, width, bytes / width + beyond);
            if (random() % 2 != 0) box.shift = random() % 16;
            cases.push_back(Changed({box}, one_of, random, by));
          }
        }
        ExpectCoded(cases);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(MessageCodeConformance, LongMessages) {
  std::mt19937_64 random(2);
  for (const ChangesBy by : kBoth) {
    for (const uint64_t width : {1, 2, 8}) {
      for (const uint64_t one_of : {3, 200}) {
        // Of whole words of marks, or not.
        for (const uint64_t beyond : {0, 3}) {
          const uint64_t bytes = kSanitized ? 1 << 16 : 1 << 20;
          Box box = BoxOf(0, width, bytes / width + beyond);
          box.shift = beyond == 0 ? 64 : 0;
          ExpectCoded({Changed({box}, one_of, random, by)});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Runs one behind the other in a message, so that a tile of a GPU meets two of
// its message; marks that begin inside a word, too.
TEST_P(MessageCodeConformance, RunsThatShareTiles) {
  std::mt19937_64 random(9);
  for (const ChangesBy by : kBoth) {
    for (const uint64_t shift : {0, 8, 32}) {
      std::vector<Box> boxes;
      uint64_t begin = 0;
      for (const uint64_t elements : {96, 40000, 64, 8, 20000, 32}) {
        boxes.push_back(BoxOf(begin, 2, elements));
        boxes.back().shift = shift;
        begin += elements * 2;
      }
      ExpectCoded({Changed(boxes, 20, random, by)});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(MessageCodeConformance, BoxesOfAnyElementsAnywhere) {
  std::mt19937_64 random(3);
  for (int i = 0; i < (kSanitized ? 40 : 240); ++i) {
    SCOPED_TRACE(i);
    const uint64_t one_of = std::vector<uint64_t>{0, 1, 3, 20, 300}[i / 2 % 5];
    std::vector<Case> cases;
    const ChangesBy by = kBoth[i % 2];
    for (size_t m = 1 + random() % 4; m > 0; --m) {
      cases.push_back(
          Changed(RandomBoxes(1 + random() % 60000, 1 + random() % 9, random),
                  one_of, random, by));
    }
    ExpectCoded(cases);
    if (HasFatalFailure()) return;
  }
}

// Slices as tensor parallelism cuts them: rows of whole units of 16 bytes, so
// many that a tile of a GPU has several, or a row several tiles.
TEST_P(MessageCodeConformance, RowsOfWholeUnits) {
  std::mt19937_64 random(8);
  for (const uint64_t width : {1, 2, 4, 8}) {
    for (const uint64_t units : {1, 3, 4, 128, 5000}) {
      SCOPED_TRACE(testing::Message() << width << " bytes, " << units);
      std::vector<Box> boxes;
      uint64_t begin = 0;
      for (int i = 0; i < 2; ++i) {
        Box box = BoxOf(begin, width, units * 16 / width);
        box.rows = (kSanitized ? 2000 : 12000) / units + 1;
        box.layout = Layout::kUnitRows;
        begin += box.rows * units * 16;
        boxes.push_back(box);
      }
      for (const ChangesBy by : kBoth) {
        ExpectCoded({Changed(boxes, 30, random, by)});
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Of rows so small that a tile has many boxes.
TEST_P(MessageCodeConformance, ManySmallBoxes) {
  std::mt19937_64 random(6);
  for (const ChangesBy by : kBoth) {
    for (const uint64_t one_of : {1, 7}) {
      ExpectCoded(
          {Changed(RandomBoxes(20000, 900, random), one_of, random, by)});
      if (HasFatalFailure()) return;
    }
  }
}

// A code that was damaged on its way: the device says so where ElementsOfCode
// does, and writes nothing beyond the elements.
TEST_P(MessageCodeConformance, DamageIsSeenAndStaysInside) {
  std::mt19937_64 random(5);
  for (const uint64_t width : {1, 2, 4, 8}) {
    const Case c = Changed({BoxOf(0, width, 20000 / width)}, 50, random);
    const uint64_t room = c.counted.room + 5;
    const Bytes good = CodeOf(c, room);
    const uint64_t groups_at = 8 + room * width;
    World world;
    Add(c, /*send=*/false, {room}, world);
    Prepare(world);
    MessageCoder& coder = *world.coder;
    const Bytes before = Laid(c, &Box::before)[0];
    int damaged = 0;
    for (int i = 0; i < 200; ++i) {
      Bytes code = good;
      // The header or what tells where elements are.
      for (uint64_t times = 1 + random() % 3; times > 0; --times) {
        const uint64_t at =
            random() % 4 == 0
                ? random() % 8
                : groups_at + random() % (code.size() - groups_at);
        code[at] = std::byte(random());
      }
      const auto elements = ElementsOfCode(c.message, room, code.data());
      damaged += elements.ok() ? 0 : 1;
      Write(world.tensors[0]->data(), before);
      Write(world.codes[0]->data(), code);
      ASSERT_TRUE(coder.Restart(kStream).ok());
      ASSERT_TRUE(coder.Apply(0, 1, 0, kStream).ok());
      const auto failure = *coder.FirstFailure(kStream);
      ASSERT_EQ(failure.has_value(), !elements.ok()) << width << ", " << i;
      const Bytes after = Download(*world.tensors[0]);
      for (uint64_t at = c.message.size_bytes; at < after.size(); ++at) {
        ASSERT_EQ(after[at], kUnused);
      }
      if (elements.ok()) {
        Bytes held = before;
        for (size_t e = 0; e < elements->size(); ++e) {
          std::memcpy(&held[(*elements)[e] * width], &code[8 + e * width],
                      width);
        }
        ASSERT_EQ(after, held);
        continue;
      }
      EXPECT_EQ(failure->message, 0);
      EXPECT_EQ(failure->why.code(), absl::StatusCode::kDataLoss);
    }
    EXPECT_GT(damaged, 50);
  }
}

// Elements in a gap, and a part of one that is cast from two.
TEST_P(MessageCodeConformance, WhatHasNoPlaceIsSeen) {
  std::mt19937_64 random(7);
  Box wide = BoxOf(160, 4, 40);
  wide.in_message = DType::kFp32;
  wide.in_tensor = DType::kBf16;
  Case c = Changed({BoxOf(0, 2, 75), wide}, 0, random);
  World world;
  Add(c, /*send=*/false, {4}, world);
  Prepare(world);
  const struct {
    std::vector<uint64_t> elements;
    bool fits;
  } cases[] = {{{74}, true},          {{75}, false},
               {{79}, false},         {{80, 81}, true},
               {{80}, false},         {{81}, false},
               {{81, 82}, false},     {{82, 83, 86, 87}, true},
               {{80, 82, 83}, false}, {{159}, false},
               {{158, 159}, true}};
  for (const auto& [elements, fits] : cases) {
    SCOPED_TRACE(elements.front());
    c.changed = elements;
    Write(world.codes[0]->data(), CodeOf(c, 4));
    ASSERT_TRUE(world.coder->Restart(kStream).ok());
    ASSERT_TRUE(world.coder->Apply(0, 1, 0, kStream).ok());
    EXPECT_EQ(world.coder->FirstFailure(kStream)->has_value(), !fits);
  }
}

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_MESSAGE_CODE_CONFORMANCE_H_
