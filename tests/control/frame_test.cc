#include "control/frame.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "executor/transport/handshake.h"

namespace refit::control {
namespace {

TEST(FrameReaderTest, CutsFramesFromAnyPieces) {
  const Frame first{.type = FrameType::kResult,
                    .step = 0x0102030405060708,
                    .sequence = 9,
                    .rank = -1,
                    .payload = "payload"};
  const Frame second{.type = FrameType::kGoodbye, .rank = 7};
  const std::string bytes = Encode(first) + Encode(second);
  FrameReader reader(100);
  std::vector<Frame> frames;
  for (char byte : bytes) {
    reader.Append({&byte, 1});
    auto frame = reader.Next();
    ASSERT_TRUE(frame.ok()) << frame.status();
    if (frame->has_value()) frames.push_back(**std::move(frame));
  }
  ASSERT_EQ(frames.size(), 2u);
  EXPECT_EQ(Encode(frames[0]), Encode(first));
  EXPECT_EQ(Encode(frames[1]), Encode(second));
}

TEST(FrameReaderTest, HeaderIsLittleEndian) {
  EXPECT_EQ(Encode({.type = FrameType::kResult,
                    .step = 0x0102030405060708,
                    .sequence = 9,
                    .rank = 0x0a0b,
                    .payload = "x"}),
            std::string("RFCP"
                        "\x08\0\0\0"
                        "\x08\x07\x06\x05\x04\x03\x02\x01"
                        "\x09\0\0\0\0\0\0\0"
                        "\x0b\x0a\0\0"
                        "\x01\0\0\0"
                        "x",
                        33));
}

TEST(FrameReaderTest, RefusesWhatExceedsItsLimit) {
  FrameReader reader(3);
  reader.Append(Encode({.payload = "1234"}));
  EXPECT_EQ(reader.Next().status().message(),
            "a payload of 4 bytes exceeds the limit of 3");
}

TEST(PayloadStatusTest, CodeOfAnotherVersionIsUnknown) {
  EXPECT_EQ(PayloadStatus(PayloadWriter().U32(17).String("?").Take()),
            absl::UnknownError("?"));
  EXPECT_EQ(PayloadStatus(StatusPayload(absl::UnauthenticatedError("!"))),
            absl::UnauthenticatedError("!"));
}

TEST(ResultPayloadTest, WhatIsNoResultIsRefused) {
  const std::string payload = ResultPayload({{3, "abc"}, {-1, ""}});
  EXPECT_EQ(payload.size(), ResultBytes({{3, "abc"}, {-1, ""}}));
  const auto results = ParseResult(payload);
  ASSERT_TRUE(results.has_value());
  ASSERT_EQ(results->size(), 2u);
  EXPECT_EQ(results->front().rank, 3);
  EXPECT_EQ(results->front().value, "abc");
  EXPECT_EQ(results->back().rank, -1);
  EXPECT_EQ(results->back().value, "");
  for (size_t size = 0; size < payload.size(); ++size) {
    EXPECT_FALSE(ParseResult(payload.substr(0, size)).has_value()) << size;
  }
  EXPECT_FALSE(ParseResult(payload + "x").has_value());
  // A count that would take all memory.
  EXPECT_FALSE(ParseResult(PayloadWriter().U64(1ull << 60).Take()).has_value());
}

TEST(HandshakeRecordTest, FieldsTravelOneByOne) {
  const HandshakeRecord record = {.stage = HandshakeStage::kBind,
                                  .ready = false,
                                  .why = "no",
                                  .format_version = 0x10002,
                                  .world_size = 3,
                                  .body_digest = fb::Digest(5, 6)};
  PayloadWriter writer;
  WriteFields(record, writer);
  const std::string bytes = writer.Take();
  EXPECT_EQ(bytes, std::string("\x01\0\0\0"
                               "\0"
                               "\x02\0\0\0\0\0\0\0no"
                               "\x02\0\x01\0"
                               "\x03\0\0\0"
                               "\x05\0\0\0\0\0\0\0"
                               "\x06\0\0\0\0\0\0\0",
                               39));
  // None of these is a value of its field.
  for (const size_t at : {size_t{0}, size_t{4}}) {
    std::string forged = bytes;
    forged[at] = 9;
    PayloadReader reader(forged);
    HandshakeRecord read;
    ReadFields(reader, read);
    EXPECT_FALSE(reader.Complete()) << "byte " << at;
  }
  PayloadReader reader(bytes);
  HandshakeRecord read;
  ReadFields(reader, read);
  EXPECT_TRUE(reader.Complete());
  EXPECT_EQ(read.stage, record.stage);
  EXPECT_EQ(read.ready, record.ready);
  EXPECT_EQ(read.why, record.why);
  EXPECT_EQ(read.body_digest.high(), 6u);
}

TEST(PayloadReaderTest, BoolIsZeroOrOne) {
  PayloadReader reader(std::string_view("\x01\x02", 2));
  EXPECT_TRUE(reader.Bool());
  EXPECT_FALSE(reader.Bool());
  EXPECT_FALSE(reader.ok());
}

TEST(PayloadReaderTest, CountIsAtMostWhatFollows) {
  const std::string bytes = PayloadWriter().U64(2).U32(7).U32(8).Take();
  EXPECT_EQ(ParseStruct<std::vector<int32_t>>(bytes), std::vector({7, 8}));
  EXPECT_EQ(PayloadReader(bytes).Count(5), 0u);
}

TEST(PayloadReaderTest, EndsAtTheEnd) {
  PayloadReader reader(std::string_view("\x05\0\0\0\0\0\0\0abc", 11));
  EXPECT_EQ(reader.String(), "");
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(ParseStruct<Contribution>("short"), std::nullopt);
}

}  // namespace
}  // namespace refit::control
