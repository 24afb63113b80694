#include "compiler/emit/pack_messages.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "plan/message_lists.h"

namespace refit {
namespace {

constexpr uint32_t kRounds = 6;  // every third is direct
constexpr uint32_t kLists = 70000;

Module ModuleOfRounds() {
  Module module;
  for (uint32_t i = 0; i < kRounds; ++i) {
    module.rounds.push_back(
        {.route = Route::kNetwork,
         .mechanism = i % 3 == 2 ? Mechanism::kDirect : Mechanism::kStaged});
  }
  return module;
}

uint64_t SizeOf(uint32_t copies) { return copies % 3 * 100 + 8; }

// As refitc has them: a rank's messages of a staged round follow each other.
std::vector<fb::Message> DrawMessages(std::mt19937& random, uint32_t ranks,
                                      uint32_t lists) {
  std::vector<fb::Message> messages;
  for (uint32_t round = 0; round < kRounds; ++round) {
    uint64_t offset = round % 3 == 2 ? 0 : random() % 4 * 4096;
    for (const auto kind : {fb::MessageKind::kRecv, fb::MessageKind::kSend}) {
      for (uint32_t count = random() % 4; count > 0; --count) {
        const auto copies = static_cast<uint32_t>(random() % lists);
        messages.emplace_back(round, static_cast<uint32_t>(random() % ranks),
                              copies, kind, 0, 0, offset, SizeOf(copies));
        if (round % 3 != 2) offset += (SizeOf(copies) + 15) / 16 * 16;
      }
    }
  }
  return messages;
}

std::optional<int32_t> Pack(MessagePacker& packer,
                            const std::vector<fb::Message>& messages) {
  return packer.Pack(messages.size(), [&](size_t i) -> const fb::Message& {
    return messages[i];
  });
}

// A body with the packed messages, and a program for each list.
std::vector<uint8_t> BodyWith(const MessagePacker& packer, size_t lists) {
  flatbuffers::FlatBufferBuilder builder;
  const auto packed = packer.Emit(builder);
  std::vector<fb::Round> rounds;
  for (const Round& round : ModuleOfRounds().rounds) {
    rounds.emplace_back(round.route, round.mechanism, 0);
  }
  const auto rounds_vector = builder.CreateVectorOfStructs(rounds);
  const auto copy_lists = builder.CreateVectorOfStructs(
      std::vector<fb::CopyList>(kLists, fb::CopyList(0, 0)));
  std::vector<flatbuffers::Offset<fb::RankProgram>> programs;
  for (size_t i = 0; i < lists; ++i) {
    fb::RankProgramBuilder program(builder);
    program.add_message_list(static_cast<int32_t>(i));
    programs.push_back(program.Finish());
  }
  const auto programs_vector = builder.CreateVector(programs);
  fb::BodyBuilder body(builder);
  body.add_packed_messages(packed);
  body.add_rounds(rounds_vector);
  body.add_copy_lists(copy_lists);
  body.add_programs(programs_vector);
  builder.Finish(body.Finish());
  return {builder.GetBufferPointer(),
          builder.GetBufferPointer() + builder.GetSize()};
}

// Ranks and lists of up to 32 bits, and lists without messages.
TEST(PackMessagesTest, WhatIsPackedIsReadAgain) {
  std::mt19937 random(20261126);
  const Module module = ModuleOfRounds();
  for (const uint32_t ranks : {8u, 100000u}) {
    for (const uint32_t copy_lists : {5u, kLists}) {
      MessagePacker packer(module);
      packer.StartLists(kLists);
      std::vector<std::vector<fb::Message>> lists;
      for (int i = 0; i < 50; ++i) {
        lists.push_back(DrawMessages(random, ranks, copy_lists));
        ASSERT_EQ(Pack(packer, lists.back()), i);
      }
      const std::vector<uint8_t> bytes = BodyWith(packer, lists.size());
      const auto& body = *flatbuffers::GetRoot<fb::Body>(bytes.data());
      ASSERT_EQ(CheckPackedMessages(body).message(), "");
      EXPECT_EQ(body.packed_messages()->peers_high() != nullptr, ranks > 65536);
      EXPECT_EQ(body.packed_messages()->copies_high() != nullptr,
                copy_lists > 65536);
      const MessageLists written(body);
      for (uint32_t i = 0; i < lists.size(); ++i) {
        const MessageVector& found = written.Of(i);
        ASSERT_EQ(found.size(), lists[i].size());
        for (uint32_t m = 0; m < found.size(); ++m) {
          ASSERT_EQ(
              std::memcmp(found.Get(m), &lists[i][m], sizeof(fb::Message)), 0)
              << i << ", " << m;
        }
      }
    }
  }
}

// They are written as they are, and leave nothing behind.
TEST(PackMessagesTest, WhatDoesNotFollowFromItsOrderIsNotPacked) {
  const Module module = ModuleOfRounds();
  MessagePacker packer(module);
  packer.StartLists(kLists);
  const auto recv = [](uint32_t copies, uint64_t offset, uint64_t size) {
    return fb::Message(0, 1, copies, fb::MessageKind::kRecv, 0, 0, offset,
                       size);
  };
  const fb::Message send(0, 1, 2, fb::MessageKind::kSend, 0, 0, 32, 20);
  EXPECT_EQ(Pack(packer, {recv(1, 0, 20), recv(2, 16, 20)}), std::nullopt);
  EXPECT_EQ(Pack(packer, {send, recv(2, 64, 20)}), std::nullopt);
  EXPECT_EQ(Pack(packer, {recv(3, 0, 20), recv(3, 32, 30)}), std::nullopt);
  EXPECT_EQ(Pack(packer, std::vector<fb::Message>(65536, recv(0, 0, 0))),
            std::nullopt);
  EXPECT_EQ(Pack(packer, {recv(1, 0, 20), recv(2, 32, 20)}), 0);
  const std::vector<uint8_t> bytes = BodyWith(packer, 1);
  const auto& body = *flatbuffers::GetRoot<fb::Body>(bytes.data());
  EXPECT_EQ(body.packed_messages()->peers()->size(), 2u);
  EXPECT_EQ(body.packed_messages()->rounds()->size(), 1u);
}

}  // namespace
}  // namespace refit
