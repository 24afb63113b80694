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
  const CodedMessage message = {.size_bytes = 260, .element_bytes = 2};
  EXPECT_EQ(message.CodeBytes(4), 8 + 4 * 2 + 2 + 4);
  Bytes code(message.CodeBytes(4), std::byte{0x55});
  CodeWriter writer(message, 4, code.data());
  writer.Add(1, BytesOf({0xab, 0}).data());
  writer.Add(128, BytesOf({0, 0xcd}).data());
  writer.Add(129, BytesOf({0xef, 0}).data());
  writer.Finish();
  EXPECT_EQ(code, BytesOf({3,    0, 0, 0,    0,    0, 0,    0,     //
                           0xab, 0, 0, 0xcd, 0xef, 0, 0x55, 0x55,  //
                           1,    2,                                //
                           1,    0, 1, 0x55}));
  const auto elements = ElementsOfCode(message, 4, code.data());
  ASSERT_TRUE(elements.ok()) << elements.status();
  EXPECT_EQ(*elements, (std::vector<uint64_t>{1, 128, 129}));
  EXPECT_EQ(ValuesOfCode(code.data()), code.data() + 8);
}

TEST(MessageCodeTest, RoomIsRoundedUp) {
  const CodedMessage message = {.size_bytes = 130, .element_bytes = 2};
  EXPECT_EQ(message.elements(), 65);
  EXPECT_EQ(message.RoomOn(6), 2);
  EXPECT_EQ(message.RoomOn(2), 17);
}

TEST(MessageCodeTest, WhatIsAlwaysSentHasItsRoom) {
  const CodedMessage message = {
      .size_bytes = 144, .element_bytes = 2, .always_elements = 8};
  EXPECT_EQ(message.RoomOn(6), 8 + 1);
}

TEST(MessageCodeTest, WhatIsWrittenIsRead) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000; ++i) {
    const CodedMessage message = {.size_bytes = 8 + random() % 4000 / 8 * 8,
                                  .element_bytes = 1U << random() % 4};
    const uint64_t one_of = 1 + random() % 200;
    std::vector<uint64_t> wanted;
    for (uint64_t e = 0; e < message.elements(); ++e) {
      if (random() % one_of == 0) wanted.push_back(e);
    }
    const uint64_t room = wanted.size() + random() % 3;
    Bytes code(message.CodeBytes(room));
    CodeWriter writer(message, room, code.data());
    for (const uint64_t element : wanted) {
      writer.Add(element, reinterpret_cast<const std::byte*>(&element));
    }
    writer.Finish();
    const auto elements = ElementsOfCode(message, room, code.data());
    ASSERT_TRUE(elements.ok()) << elements.status();
    ASSERT_EQ(*elements, wanted);
    for (size_t e = 0; e < wanted.size(); ++e) {
      ASSERT_EQ(
          std::memcmp(ValuesOfCode(code.data()) + e * message.element_bytes,
                      &wanted[e], message.element_bytes),
          0);
    }
  }
}

TEST(MessageCodeTest, DamageIsNamed) {
  const CodedMessage message = {.size_bytes = 260, .element_bytes = 2};
  const Bytes good =
      BytesOf({2, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 0, 0, 127});
  ASSERT_EQ(good.size(), message.CodeBytes(2));
  const auto read = [&](const Bytes& code) {
    return std::string(
        ElementsOfCode(message, 2, code.data()).status().message());
  };
  const auto damaged = [&](size_t byte, uint8_t value) {
    Bytes code = good;
    code[byte] = std::byte{value};
    return read(code);
  };
  const std::string start = "what changed is not encoded as it should be: ";
  EXPECT_EQ(read(good), "");
  EXPECT_EQ(damaged(0, 3), start + "3 elements, with room for 2");
  EXPECT_EQ(damaged(4, 1), start + "2 elements, with room for 2");
  EXPECT_EQ(damaged(0, 1), start + "more elements than the 1 it has");
  EXPECT_EQ(damaged(12, 1), start + "1 elements, not 2");
  EXPECT_EQ(damaged(13, 1), start + "more elements than the 2 it has");
  EXPECT_EQ(damaged(14, 127), start + "element 1 is at 127");
  EXPECT_EQ(damaged(15, 128), start + "element 1 is at 128");
  Bytes beyond = good;
  beyond[12] = std::byte{0};
  beyond[13] = std::byte{2};
  EXPECT_EQ(read(beyond), start + "element 1 is at 255");
}

}  // namespace
}  // namespace refit
