#include "executor/delta/message_code.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace refit {
namespace {

using Bytes = std::vector<std::byte>;

Bytes BytesOf(const std::vector<uint8_t>& values) {
  Bytes bytes;
  for (const uint8_t value : values) bytes.push_back(std::byte{value});
  return bytes;
}

TEST(MessageCodeTest, IsAsDocsPlanFormatSays) {
  // 130 elements of two bytes; the second and the last two changed.
  CodedMessage message = {
      .size_bytes = 260, .element_bytes = 2, .ranges = {{0, 260, 2}}};
  const Bytes before(260, std::byte{0});
  Bytes now = before;
  now[2] = std::byte{0xab};
  now[257] = std::byte{0xcd};
  now[258] = std::byte{0xef};
  EXPECT_EQ(CountChanged(message, now.data(), before.data()).room, 3);
  EXPECT_EQ(message.CodeBytes(4), 8 + 4 * 2 + 2 + 4);
  Bytes code(message.CodeBytes(4), std::byte{0x55});
  EXPECT_EQ(EncodeChanges(message, 4, now.data(), before.data(), code.data()),
            3);
  EXPECT_EQ(code, BytesOf({3,    0, 0, 0,    0,    0, 0,    0,     //
                           0xab, 0, 0, 0xcd, 0xef, 0, 0x55, 0x55,  //
                           1,    2,                                //
                           1,    0, 1, 0x55}));
  Bytes held = before;
  ASSERT_TRUE(ApplyChanges(message, 4, code.data(), held.data()).ok());
  EXPECT_EQ(held, now);
}

TEST(MessageCodeTest, RoomIsRoundedUp) {
  const CodedMessage message = {
      .size_bytes = 130, .element_bytes = 2, .ranges = {}};
  EXPECT_EQ(message.elements(), 65);
  EXPECT_EQ(message.RoomOn(6), 2);
  EXPECT_EQ(message.RoomOn(2), 17);
}

TEST(MessageCodeTest, WhatIsAlwaysSentHasItsRoom) {
  const CodedMessage message = {
      .size_bytes = 144,
      .element_bytes = 2,
      .ranges = {{0, 128, 2}, {128, 144, 4, /*always=*/true}}};
  EXPECT_EQ(message.RoomOn(6), 8 + 1);
  const Bytes zeros(144);
  const ChangedElements changed =
      CountChanged(message, zeros.data(), zeros.data());
  EXPECT_EQ(changed.count, 0);
  EXPECT_EQ(changed.room, 8);
}

TEST(MessageCodeTest, ElementsCountOnceWhateverTheirSize) {
  const CodedMessage message = {.size_bytes = 48,
                                .element_bytes = 1,
                                .ranges = {{0, 16, 1}, {16, 48, 4}}};
  const Bytes before(48);
  Bytes now = before;
  now[3] = now[16] = now[21] = now[23] = std::byte{1};
  const ChangedElements changed =
      CountChanged(message, now.data(), before.data());
  EXPECT_EQ(changed.count, 3);
  EXPECT_EQ(changed.room, 1 + 2 * 4);
}

// Any bits, any share of changes, gaps, elements of several sizes and some that
// are always sent: what is applied is what the sender has, and gaps stay as the
// receiver's are.
TEST(MessageCodeTest, ChangesArriveAndNothingElse) {
  std::mt19937_64 random(1);
  const auto draw = [&](uint64_t below) { return random() % below; };
  for (int i = 0; i < 3000; ++i) {
    CodedMessage message = {.size_bytes = 0, .element_bytes = 8, .ranges = {}};
    for (uint64_t at = 0, ranges = 1 + draw(3); ranges > 0; --ranges) {
      const uint32_t width = 1U << draw(4);
      const uint64_t end = at + width * (1 + draw(300));
      message.ranges.push_back({at, end, width, /*always=*/draw(4) == 0});
      message.element_bytes = std::min(message.element_bytes, width);
      message.size_bytes = end;
      at = (end + 15) / 16 * 16;
    }
    Bytes before(message.size_bytes);
    for (std::byte& byte : before) byte = static_cast<std::byte>(random());
    Bytes now = before;
    Bytes held = before;
    const uint64_t one_of = 1 + draw(200);
    const auto change = [&](uint64_t byte) {
      now[byte] ^= static_cast<std::byte>(1U << draw(8));
    };
    uint64_t count = 0;
    uint64_t always = 0;  // of the narrowest elements
    uint64_t needed = 0;  // likewise
    for (const ElementRange& range : message.ranges) {
      const uint32_t width = range.element_bytes;
      if (range.always) always += range.size_bytes() / message.element_bytes;
      for (uint64_t at = range.begin_byte; at < range.end_byte; at += width) {
        if (draw(one_of) != 0) continue;
        change(at + draw(width));
        if (range.always) continue;
        ++count;
        needed += 1;
      }
    }
    bool in_gaps = false;
    for (size_t r = 1; r < message.ranges.size(); ++r) {
      const uint64_t gap = message.ranges[r - 1].end_byte;
      if (gap == message.ranges[r].begin_byte || draw(one_of) != 0) continue;
      change(gap);
      in_gaps = true;
    }
    needed += always;
    const ChangedElements changed =
        CountChanged(message, now.data(), before.data());
    ASSERT_EQ(changed.count, count);
    ASSERT_GE(changed.room, needed);
    const uint64_t room = changed.room + draw(3);
    Bytes code(message.CodeBytes(room));
    ASSERT_EQ(
        EncodeChanges(message, room, now.data(), before.data(), code.data()),
        needed);
    ASSERT_TRUE(ApplyChanges(message, room, code.data(), held.data()).ok());
    for (const ElementRange& range : message.ranges) {
      ASSERT_EQ(std::memcmp(held.data() + range.begin_byte,
                            now.data() + range.begin_byte,
                            range.end_byte - range.begin_byte),
                0);
    }
    if (!in_gaps) {
      ASSERT_EQ(held, now);
    }
    if (needed == 0) continue;
    Bytes short_code(message.CodeBytes(needed - 1));
    ASSERT_EQ(EncodeChanges(message, needed - 1, now.data(), before.data(),
                            short_code.data()),
              needed);
  }
}

TEST(MessageCodeTest, DamageIsNamed) {
  const CodedMessage message = {
      .size_bytes = 260, .element_bytes = 2, .ranges = {}};
  const Bytes good =
      BytesOf({2, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 0, 0, 127});
  ASSERT_EQ(good.size(), message.CodeBytes(2));
  const auto applied = [&](size_t byte, uint8_t value) {
    Bytes code = good;
    code[byte] = std::byte{value};
    Bytes elements(260);
    return std::string(
        ApplyChanges(message, 2, code.data(), elements.data()).message());
  };
  const std::string start = "what changed is not encoded as it should be: ";
  EXPECT_EQ(applied(0, 2), "");
  EXPECT_EQ(applied(0, 3), start + "3 elements, with room for 2");
  EXPECT_EQ(applied(4, 1), start + "2 elements, with room for 2");
  EXPECT_EQ(applied(0, 1), start + "more elements than the 1 it has");
  EXPECT_EQ(applied(12, 1), start + "1 elements, not 2");
  EXPECT_EQ(applied(13, 1), start + "more elements than the 2 it has");
  EXPECT_EQ(applied(14, 127), start + "element 1 is at 127");
  EXPECT_EQ(applied(15, 128), start + "element 1 is at 128");
  Bytes beyond = good;
  beyond[12] = std::byte{0};
  beyond[13] = std::byte{2};
  Bytes elements(260);
  EXPECT_EQ(ApplyChanges(message, 2, beyond.data(), elements.data()).message(),
            start + "element 1 is at 255");
}

}  // namespace
}  // namespace refit
