// What every Device must do with messages of which only what changed is sent,
// held against the format as docs/plan-format.md tells it. A test file
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
#include "tests/executor/device_conformance.h"

namespace refit {

class MessageCodeConformance : public DeviceConformance {
 protected:
  static constexpr uint64_t kGuardBytes = 64;
  static constexpr std::byte kUnused{0x55};

  // One message in host memory.
  struct Case {
    CodedMessage message;
    Bytes before;
    Bytes now;
    std::vector<uint64_t> changed;  // elements that are coded, ascending
    ChangedElements counted;
  };

  // Elements of `range` that are changed, one of `one_of`; 0: none.
  static Case Changed(CodedMessage message, uint64_t one_of,
                      std::mt19937_64& random) {
    Case c;
    c.before.resize(message.size_bytes);
    for (std::byte& byte : c.before) byte = std::byte(random());
    c.now = c.before;
    for (const ElementRange& range : message.ranges) {
      const uint32_t width = range.element_bytes;
      for (uint64_t at = range.begin_byte; at < range.end_byte; at += width) {
        if (one_of == 0 || random() % one_of != 0) continue;
        c.now[at + random() % width] ^= std::byte(1 << random() % 8);
        if (!range.always) ++c.counted.count;
        if (!range.always) c.counted.room += width / message.element_bytes;
      }
    }
    // What lies in gaps is nobody's.
    for (uint64_t at = 0; at < message.size_bytes; ++at) {
      const auto holds = [&](const ElementRange& range) {
        return at >= range.begin_byte && at < range.end_byte;
      };
      if (message.ranges.size() < 2 ||
          std::any_of(message.ranges.begin(), message.ranges.end(), holds)) {
        continue;
      }
      c.now[at] = std::byte(random());
    }
    const uint32_t width = message.element_bytes;
    for (const ElementRange& range : message.ranges) {
      if (range.always) c.counted.room += range.size_bytes() / width;
      for (uint64_t at = range.begin_byte; at < range.end_byte; at += width) {
        if (!range.always && std::memcmp(&c.now[at], &c.before[at], width) == 0)
          continue;
        c.changed.push_back(at / width);
      }
    }
    c.message = std::move(message);
    return c;
  }

  // Ranges of any elements, gaps between them, `size_bytes` or little more.
  static CodedMessage RandomMessage(uint64_t size_bytes, size_t ranges,
                                    std::mt19937_64& random) {
    CodedMessage message = {.size_bytes = 0, .element_bytes = 8, .ranges = {}};
    uint64_t at = 0;
    for (size_t i = 0; i < ranges; ++i) {
      const uint32_t width = 1U << random() % 4;
      const uint64_t elements =
          std::max<uint64_t>(1, size_bytes / ranges / width);
      const uint64_t end = at + width * (elements + random() % 3);
      message.ranges.push_back({.begin_byte = at,
                                .end_byte = end,
                                .element_bytes = width,
                                .always = ranges > 1 && random() % 4 == 0});
      message.element_bytes = std::min(message.element_bytes, width);
      message.size_bytes = end;
      at = (end + 15) / 16 * 16;
    }
    return message;
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
      std::memcpy(&code[8 + i * width], &c.now[element * width], width);
      std::byte& group = of_groups[element / 128];
      group = std::byte(std::to_integer<int>(group) + 1);
      of_groups[groups + i] = std::byte(element % 128);
    }
    return code;
  }

  // What a device holds of a message.
  struct OnDevice {
    std::unique_ptr<DeviceMemory> now;
    std::unique_ptr<DeviceMemory> before;
    std::unique_ptr<DeviceMemory> code;
  };

  // `shift`: where the elements begin in their memory.
  OnDevice Place(const Case& c, bool send, uint64_t shift,
                 const std::vector<uint64_t>& rooms, MessageToCode& placed) {
    const auto shifted = [&](const Bytes& bytes) {
      Bytes moved(shift, kUnused);
      moved.insert(moved.end(), bytes.begin(), bytes.end());
      moved.resize(moved.size() + kGuardBytes, kUnused);
      return moved;
    };
    OnDevice on;
    on.now = Upload(shifted(send ? c.now : c.before));
    placed = {.message = c.message,
              .rooms = rooms,
              .elements = on.now->data() + shift};
    if (send) {
      on.before = Upload(shifted(c.before));
      placed.before = on.before->data() + shift;
    }
    const uint64_t room = *std::max_element(rooms.begin(), rooms.end());
    on.code = Upload(Bytes(c.message.CodeBytes(room) + kGuardBytes, kUnused));
    placed.code = on.code->data();
    return on;
  }

  void Write(std::byte* to, const Bytes& bytes) {
    ASSERT_TRUE(device_->Copy(to, bytes.data(), bytes.size(), kStream).ok());
    ASSERT_TRUE(device_->Synchronize(kStream).ok());
  }

  // Sends, and receives of the same messages behind each, on one coder.
  void ExpectCoded(const std::vector<Case>& cases,
                   const std::vector<uint64_t>& shifts) {
    std::vector<MessageToCode> messages(2 * cases.size());
    std::vector<OnDevice> memory;
    std::vector<uint64_t> rooms;
    for (size_t i = 0; i < cases.size(); ++i) {
      rooms.push_back(cases[i].counted.room + i % 3);
      // On rung 0 too few, on rung 2 it travels whole.
      const uint64_t few = std::max<uint64_t>(1, rooms[i] / 2);
      memory.push_back(Place(cases[i], true, shifts[i], {few, rooms[i], 0},
                             messages[2 * i]));
      memory.push_back(Place(cases[i], false, shifts[i], {few, rooms[i], 0},
                             messages[2 * i + 1]));
    }
    auto made = device_->PrepareCodes(messages);
    ASSERT_TRUE(made.ok()) << made.status();
    MessageCoder& coder = **made;
    ASSERT_TRUE(coder.Restart(kStream).ok());
    // In two launches, as two rounds.
    const size_t cut = cases.size() / 2 * 2;
    const auto in_two = [&](const auto& call) {
      ASSERT_TRUE(call(0, cut).ok());
      ASSERT_TRUE(call(cut, messages.size() - cut).ok());
    };
    in_two([&](size_t begin, size_t count) {
      return coder.Count(begin, count, kStream);
    });
    ASSERT_TRUE(device_->Synchronize(kStream).ok());
    const auto counted = coder.Counted(kStream);
    ASSERT_TRUE(counted.ok()) << counted.status();
    for (size_t i = 0; i < cases.size(); ++i) {
      ASSERT_EQ((*counted)[2 * i].count, cases[i].counted.count) << i;
      ASSERT_EQ((*counted)[2 * i].room, cases[i].counted.room) << i;
    }
    in_two([&](size_t begin, size_t count) {
      return coder.Encode(begin, count, 2, kStream);
    });
    for (size_t i = 0; i < cases.size(); ++i) {
      const Bytes code = Download(*memory[2 * i].code);
      ASSERT_EQ(std::count(code.begin(), code.end(), kUnused), code.size());
    }
    in_two([&](size_t begin, size_t count) {
      return coder.Encode(begin, count, 1, kStream);
    });
    for (size_t i = 0; i < cases.size(); ++i) {
      if (rooms[i] == 0) continue;
      Bytes wanted = CodeOf(cases[i], rooms[i]);
      Write(messages[2 * i + 1].code, wanted);
      wanted.resize(memory[2 * i].code->size_bytes(), kUnused);
      ASSERT_EQ(Download(*memory[2 * i].code), wanted) << i;
    }
    in_two([&](size_t begin, size_t count) {
      return coder.Apply(begin, count, 1, kStream);
    });
    for (size_t i = 0; i < cases.size(); ++i) {
      const Case& c = cases[i];
      Bytes wanted(shifts[i], kUnused);
      wanted.insert(wanted.end(), c.before.begin(), c.before.end());
      if (rooms[i] != 0) {
        for (const ElementRange& range : c.message.ranges) {
          std::memcpy(&wanted[shifts[i] + range.begin_byte],
                      &c.now[range.begin_byte], range.size_bytes());
        }
      }
      wanted.resize(wanted.size() + kGuardBytes, kUnused);
      ASSERT_EQ(Download(*memory[2 * i + 1].now), wanted) << i;
    }
    const auto failure = coder.FirstFailure(kStream);
    ASSERT_TRUE(failure.ok()) << failure.status();
    ASSERT_FALSE(failure->has_value()) << (*failure)->why;
  }
};

TEST_P(MessageCodeConformance, ElementsOfOneSizeAtAllBorders) {
  std::mt19937_64 random(1);
  for (const uint32_t width : {1U, 2U, 4U, 8U}) {
    for (const uint64_t one_of : {0, 1, 2, 10, 100, 1000}) {
      SCOPED_TRACE(testing::Message() << width << " bytes, 1 of " << one_of);
      std::vector<Case> cases;
      std::vector<uint64_t> shifts;
      const uint64_t group = 128 * width;
      for (const uint64_t base : {uint64_t{16}, group, uint64_t{4096},
                                  uint64_t{16384}, uint64_t{3 * 16384}}) {
        for (const int64_t beyond : {-1, 0, 1}) {
          const uint64_t size = base + static_cast<uint64_t>(beyond * width);
          cases.push_back(Changed({.size_bytes = size,
                                   .element_bytes = width,
                                   .ranges = {{0, size, width}}},
                                  one_of, random));
          shifts.push_back(random() % 2 == 0 ? 0 : random() % 16 * width);
        }
      }
      ExpectCoded(cases, shifts);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(MessageCodeConformance, LongMessages) {
  std::mt19937_64 random(2);
  for (const uint32_t width : {1U, 2U, 8U}) {
    const uint64_t size = (uint64_t{5} << 20) + 3 * width;
    for (const uint64_t one_of : {3, 200}) {
      ExpectCoded({Changed({.size_bytes = size,
                            .element_bytes = width,
                            .ranges = {{0, size, width}}},
                           one_of, random)},
                  {0});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(MessageCodeConformance, GapsAndElementsOfManySizes) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 60; ++i) {
    const uint64_t one_of = std::vector<uint64_t>{0, 1, 3, 20, 300}[i % 5];
    std::vector<Case> cases;
    for (size_t m = 1 + random() % 4; m > 0; --m) {
      cases.push_back(
          Changed(RandomMessage(1 + random() % 60000, 1 + random() % 9, random),
                  one_of, random));
    }
    ExpectCoded(cases, std::vector<uint64_t>(cases.size(), 0));
    if (HasFatalFailure()) return;
  }
}

TEST_P(MessageCodeConformance, WhatIsWrittenAfterItWasCountedFails) {
  std::mt19937_64 random(4);
  const Case c = Changed(
      {.size_bytes = 40000, .element_bytes = 2, .ranges = {{0, 40000, 2}}}, 100,
      random);
  std::vector<MessageToCode> messages(2);
  const OnDevice other = Place(c, true, 0, {c.counted.room}, messages[0]);
  const OnDevice on = Place(c, true, 0, {c.counted.room}, messages[1]);
  auto coder = *device_->PrepareCodes(messages);
  ASSERT_TRUE(coder->Restart(kStream).ok());
  ASSERT_TRUE(coder->Count(0, 2, kStream).ok());
  Bytes now = c.now;
  for (std::byte& byte : now) byte ^= std::byte{1};
  Write(messages[1].elements, now);
  ASSERT_TRUE(coder->Encode(0, 2, 0, kStream).ok());
  const auto failure = *coder->FirstFailure(kStream);
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->message, 1);
  EXPECT_EQ(failure->why.code(), absl::StatusCode::kFailedPrecondition);
  const Bytes code = Download(*on.code);
  for (size_t i = c.message.CodeBytes(c.counted.room); i < code.size(); ++i) {
    EXPECT_EQ(code[i], kUnused);
  }
  ASSERT_TRUE(coder->Restart(kStream).ok());
  EXPECT_FALSE(coder->FirstFailure(kStream)->has_value());
}

// A code that was damaged on its way: the device says so where the host's
// decoder does, and writes nothing beyond the message.
TEST_P(MessageCodeConformance, DamageIsSeenAndStaysInside) {
  std::mt19937_64 random(5);
  for (const uint32_t width : {1U, 2U, 4U, 8U}) {
    const uint64_t size = 20000 / width * width;
    const Case c = Changed({.size_bytes = size,
                            .element_bytes = width,
                            .ranges = {{0, size, width}}},
                           50, random);
    const uint64_t room = c.counted.room + 5;
    const Bytes good = CodeOf(c, room);
    const uint64_t groups_at = 8 + room * width;
    std::vector<MessageToCode> messages(1);
    const OnDevice on = Place(c, false, 0, {room}, messages[0]);
    auto coder = *device_->PrepareCodes(messages);
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
      Bytes held = c.before;
      const bool is_good =
          ApplyChanges(c.message, room, code.data(), held.data()).ok();
      damaged += is_good ? 0 : 1;
      Write(messages[0].elements, c.before);
      Write(messages[0].code, code);
      ASSERT_TRUE(coder->Restart(kStream).ok());
      ASSERT_TRUE(coder->Apply(0, 1, 0, kStream).ok());
      const auto failure = *coder->FirstFailure(kStream);
      ASSERT_EQ(failure.has_value(), !is_good) << width << ", " << i;
      const Bytes after = Download(*on.now);
      for (uint64_t at = size; at < after.size(); ++at) {
        ASSERT_EQ(after[at], kUnused);
      }
      if (is_good) {
        ASSERT_EQ(Bytes(after.begin(), after.end() - kGuardBytes), held);
        continue;
      }
      EXPECT_EQ(failure->message, 0);
      EXPECT_EQ(failure->why.code(), absl::StatusCode::kDataLoss);
    }
    EXPECT_GT(damaged, 50);
  }
}

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_MESSAGE_CODE_CONFORMANCE_H_
