// What every Device must do to digest tensors, beside the formula of
// refit/state_digest.h taken byte by byte. Instantiated as device_conformance.h
// is.
#ifndef REFIT_TESTS_EXECUTOR_DIGEST_CONFORMANCE_H_
#define REFIT_TESTS_EXECUTOR_DIGEST_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "executor/device/cast.h"
#include "tests/executor/device_conformance.h"
#include "tests/sanitizers.h"

namespace refit {

class DigestConformance : public DeviceConformance {
 protected:
  static constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;
  static constexpr uint64_t kKey = 0x1234567890abcdefu;

  static uint64_t Modulo(unsigned __int128 x) {
    return static_cast<uint64_t>(x % kPrime);
  }

  // The part of one byte that stands at `place` of a param.
  static uint64_t OfByte(std::byte byte, uint64_t place, uint64_t key) {
    constexpr uint64_t kMasks[4] = {0x243f6a8885a308d3u, 0x13198a2e03707344u,
                                    0xa4093822299f31d0u, 0x082efa98ec4e6c89u};
    const uint64_t x = key + place / 16 * 0x9e3779b97f4a7c15u;
    const unsigned __int128 product =
        static_cast<unsigned __int128>(x) * (x ^ 0x452821e638d01377u);
    const uint64_t r =
        static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    const uint64_t c =
        ((r ^ kMasks[place / 4 % 4]) & ((uint64_t{1} << 58) - 1)) | 1;
    return Modulo(static_cast<unsigned __int128>(std::to_integer<uint64_t>(byte)
                                                 << 8 * (place % 4)) *
                  c);
  }

  static uint64_t OfBytes(const Bytes& bytes, uint64_t place, uint64_t key) {
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      sum = Modulo(static_cast<unsigned __int128>(sum) +
                   OfByte(bytes[i], place + i, key));
    }
    return sum;
  }

  // What a sum in memory is mod p.
  static uint64_t Value(const Bytes& bytes, size_t at) {
    DigestSum sum;
    std::memcpy(&sum, bytes.data() + at, sizeof(sum));
    return Modulo(static_cast<unsigned __int128>(sum.high) << 64 | sum.low);
  }

  // The box `from` of `entries` as the bytes that `to` places.
  static CopyBatch DigestBatch(const Shape& from, DType from_dtype,
                               const Shape& to, DType to_dtype,
                               uint64_t sum_entry) {
    CopyBatch batch =
        BatchOf(CopyKind::kDigest, from, from_dtype, to, to_dtype);
    batch.digests = {
        {.param_key = kKey, .entry = sum_entry, .byte_offset = 16}};
    batch.begun = {.entry = sum_entry, .byte_offset = 0};
    return batch;
  }

  // `places` says where the elements stand in the param.
  void CheckDigest(const Shape& from, DType from_dtype, const Shape& places,
                   DType dtype, const std::vector<size_t>& entry_bytes) {
    SCOPED_TRACE(testing::Message()
                 << "dtype " << static_cast<int>(from_dtype) << " as "
                 << static_cast<int>(dtype) << ", loops " << from.loops.size()
                 << ", place " << places.byte_offset);
    std::vector<Bytes> tensors;
    std::vector<std::unique_ptr<DeviceMemory>> memory;
    std::vector<std::byte*> table;
    for (const size_t size : entry_bytes) {
      tensors.push_back(RandomBytes(size));
      memory.push_back(Upload(tensors.back()));
      table.push_back(memory.back()->data());
    }
    Bytes sums(64, std::byte{0});
    // A sum that the first addition carries over.
    std::fill_n(sums.begin() + 16, 8, std::byte{0xff});
    uint64_t expected = Value(sums, 16);
    const auto sum_memory = Upload(sums);
    table.push_back(sum_memory->data());
    Bytes element(DTypeBytes(dtype));
    for (uint64_t i = 0; i < from.elements(); ++i) {
      const auto [entry, offset] = AddressOf(from, i);
      const std::byte* bits = &tensors[entry][offset];
      if (from_dtype == dtype) {
        std::copy_n(bits, element.size(), element.begin());
      } else {
        FindCast(from_dtype, dtype)(element.data(), bits, 1);
      }
      expected = Modulo(static_cast<unsigned __int128>(expected) +
                        OfBytes(element, AddressOf(places, i).second, kKey));
    }
    CopyBatch batch =
        DigestBatch(from, from_dtype, places, dtype, table.size() - 1);
    batch.begun.byte_offset = 48;
    auto prepared = device_->Prepare(table, {&batch, 1});
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    ASSERT_TRUE((*prepared)->Enqueue(0, kStream).ok());
    const Bytes after = Download(*sum_memory);
    EXPECT_EQ(Value(after, 16), expected);
    EXPECT_EQ(Value(after, 0), 0);
    EXPECT_EQ(Value(after, 32), 0);
    for (size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_TRUE(Download(*memory[i]) == tensors[i]) << "entry " << i;
    }
  }

  // The digest of one tensor, which starts at `place` of a param.
  uint64_t DigestOf(const Bytes& bytes, uint64_t place = 0) {
    const auto memory = Upload(bytes);
    const auto sum = Upload(Bytes(32, std::byte{0}));
    std::byte* const table[] = {memory->data(), sum->data()};
    const CopyBatch batch =
        DigestBatch({0, 0, {{bytes.size(), 0, 1}}}, DType::kUint8,
                    {0, place, {{bytes.size(), 0, 1}}}, DType::kUint8, 1);
    auto prepared = device_->Prepare(table, {&batch, 1});
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    EXPECT_TRUE((*prepared)->Enqueue(0, kStream).ok());
    return Value(Download(*sum), 16);
  }
};

TEST_P(DigestConformance, EveryLoopShapeOfEveryElementSizeIsTheFormula) {
  for (const DType dtype :
       {DType::kUint8, DType::kBf16, DType::kFp32, DType::kInt64}) {
    const uint64_t e = DTypeBytes(dtype);
    const std::vector<std::pair<Shape, Shape>> pairs = {
        {{0, 0, {}}, {0, 0, {}}},
        {{1, 3 * e, {}}, {0, 7 * e, {}}},
        {{0, 5 * e, {{7, 0, e}}}, {0, e, {{7, 0, e}}}},
        {{0, e, {{9, 0, 4 * e}}}, {0, 6 * e, {{9, 0, e}}}},
        {{0, 2 * e, {{5, 0, 40 * e}, {13, 0, e}}},
         {0, 3 * e, {{5, 0, 29 * e}, {13, 0, e}}}},
        // Transposed.
        {{0, 0, {{6, 0, e}, {7, 0, 6 * e}}},
         {0, 0, {{6, 0, 7 * e}, {7, 0, e}}}},
        // Whole blocks in rows, and the same one element further on.
        {{1, 16, {{5, 0, 64 * e}, {48, 0, e}}},
         {0, 16 * e, {{5, 0, 96 * e}, {48, 0, e}}}},
        {{1, 16, {{5, 0, 64 * e}, {48, 0, e}}},
         {0, 17 * e, {{5, 0, 96 * e}, {48, 0, e}}}},
        // Over the tensors of the rank.
        {{0, 2 * e, {{2, 2, 0}, {2, 1, 0}, {3, 0, 9 * e}, {4, 0, e}}},
         {0, 0, {{2, 0, 24 * e}, {2, 0, 12 * e}, {3, 0, 4 * e}, {4, 0, e}}}},
        {{0,
          0,
          {{2, 0, 64 * e},
           {2, 0, 16 * e},
           {2, 1, 0},
           {2, 0, 4 * e},
           {3, 0, e}}},
         {0,
          e,
          {{2, 0, 240 * e},
           {2, 0, 60 * e},
           {2, 0, 30 * e},
           {2, 0, 10 * e},
           {3, 0, e}}}},
    };
    for (const auto& [from, places] : pairs) {
      CheckDigest(from, dtype, places, dtype, {4096, 4096, 4096, 4096});
    }
  }
}

TEST_P(DigestConformance, RunsOfEveryLengthAndAlignmentAreTheFormula) {
  for (const uint64_t run : {1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64, 200,
                             1025, 4096, 40'000, 100'001}) {
    for (const auto& [offset, place] :
         std::vector<std::pair<uint64_t, uint64_t>>{{0, 0},
                                                    {0, 16},
                                                    {16, 48},
                                                    {0, 3},
                                                    {1, 1},
                                                    {8, 8},
                                                    {4, 12},
                                                    {7, uint64_t{1} << 40}}) {
      CheckDigest({0, offset, {{run, 0, 1}}}, DType::kUint8,
                  {0, place, {{run, 0, 1}}}, DType::kUint8, {run + 64});
    }
  }
}

// As of a tensor whose other columns are on other ranks.
TEST_P(DigestConformance, RowsOfEveryLengthAreTheFormula) {
  constexpr uint64_t kElementBytes = 8;
  for (const uint64_t row_bytes :
       {16, 48, 768, 16 * 1536, 16 * 2048, 16 * 2049, 16 * 5000}) {
    const uint64_t rows = 16 * 7000 / row_bytes + 1;
    const uint64_t row = row_bytes / kElementBytes;
    for (const uint64_t apart : {row_bytes, row_bytes + 16, 3 * row_bytes}) {
      CheckDigest({0, 32, {{rows, 0, row_bytes}, {row, 0, kElementBytes}}},
                  DType::kInt64,
                  {0, 48, {{rows, 0, apart}, {row, 0, kElementBytes}}},
                  DType::kInt64, {rows * row_bytes + 64});
    }
    // Of a tensor that is wider itself.
    CheckDigest({0, 32, {{rows, 0, 2 * row_bytes}, {row, 0, kElementBytes}}},
                DType::kInt64,
                {0, 48, {{rows, 0, 3 * row_bytes}, {row, 0, kElementBytes}}},
                DType::kInt64, {2 * rows * row_bytes + 64});
    // Two strides in the param.
    CheckDigest({0,
                 32,
                 {{2, 0, rows * row_bytes},
                  {rows, 0, row_bytes},
                  {row, 0, kElementBytes}}},
                DType::kInt64,
                {0,
                 48,
                 {{2, 0, 16 * 9'999'999},
                  {rows, 0, 2 * row_bytes},
                  {row, 0, kElementBytes}}},
                DType::kInt64, {2 * rows * row_bytes + 64});
  }
}

TEST_P(DigestConformance, ElementsAreDigestedAsTheirCastsAre) {
  const DType floats[] = {DType::kBf16, DType::kFp16, DType::kFp32};
  for (const DType from : floats) {
    for (const DType as : floats) {
      if (from == as) continue;
      const uint64_t f = DTypeBytes(from);
      const uint64_t e = DTypeBytes(as);
      CheckDigest({0, 3 * f, {{3, 0, 1100 * f}, {1000, 0, f}}}, from,
                  {0, 5 * e, {{3, 0, 1000 * e}, {1000, 0, e}}}, as, {16'384});
      CheckDigest({0, 0, {{30, 0, f}, {20, 0, 30 * f}}}, from,
                  {0, 0, {{30, 0, 20 * e}, {20, 0, e}}}, as, {4096});
    }
  }
}

TEST_P(DigestConformance, DigestsThatShareASumAddUpInIt) {
  const Bytes bytes = RandomBytes(3 << 20);
  const auto memory = Upload(bytes);
  const auto sums = Upload(Bytes(32, std::byte{0}));
  std::byte* const table[] = {memory->data(), sums->data()};
  CopyBatch batch;
  batch.kind = CopyKind::kDigest;
  std::mt19937 random(3);
  for (uint64_t begin = 0; begin < bytes.size();) {
    const uint64_t size =
        std::min<uint64_t>(bytes.size() - begin, 1 + random() % 70'000);
    StridedCopy& copy = batch.copies.emplace_back();
    copy.from = {0, begin, DType::kUint8};
    copy.to = {0, begin, DType::kUint8};
    copy.loops_begin = static_cast<uint32_t>(batch.loops.size());
    copy.loops_count = 1;
    batch.loops.push_back({size, {0, 1}, {0, 1}});
    batch.digests.push_back({.param_key = kKey, .entry = 1, .byte_offset = 16});
    begin += size;
  }
  batch.begun = {.entry = 1, .byte_offset = 0};
  auto prepared = device_->Prepare(table, {&batch, 1});
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  ASSERT_TRUE((*prepared)->Enqueue(0, kStream).ok());
  EXPECT_EQ(Value(Download(*sums), 16), OfBytes(bytes, 0, kKey));
}

TEST_P(DigestConformance, WhatIsEnqueuedAgainDoesWhatIsLeft) {
  constexpr uint64_t kTensorBytes = 1'000'016;
  constexpr uint32_t kSteps = 5;
  const Bytes bytes = RandomBytes(kSteps * kTensorBytes);
  const auto memory = Upload(bytes);
  const auto sums = Upload(Bytes(64, std::byte{0}));
  std::byte* const table[] = {memory->data(), sums->data()};
  CopyBatch batch;
  batch.kind = CopyKind::kDigest;
  batch.begun = {.entry = 1, .byte_offset = 32};
  batch.loops.push_back({kTensorBytes, {0, 1}, {0, 1}});
  for (uint64_t i = 0; i < 2 * kSteps; ++i) {
    // Two copies of a step, of which one begins inside a block.
    StridedCopy& copy = batch.copies.emplace_back();
    copy.from = {0, i / 2 * kTensorBytes, DType::kUint8};
    copy.to = {0, i / 2 * kTensorBytes + i % 2, DType::kUint8};
    copy.loops_count = 1;
    copy.step = static_cast<uint32_t>(i / 2);
    batch.digests.push_back({.param_key = kKey, .entry = 1, .byte_offset = 0});
  }
  auto prepared = device_->Prepare(table, {&batch, 1});
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  const uint64_t whole =
      Modulo(static_cast<unsigned __int128>(OfBytes(bytes, 0, kKey)) +
             OfBytes(bytes, 1, kKey));
  for (const uint32_t step : {1u, 3u, 1u}) {
    ASSERT_TRUE((*prepared)->EnqueueStep(0, step, kStream).ok());
  }
  EXPECT_NE(Value(Download(*sums), 0), whole);
  ASSERT_TRUE((*prepared)->Enqueue(0, kStream).ok());
  EXPECT_EQ(Value(Download(*sums), 0), whole);
  ASSERT_TRUE((*prepared)->Enqueue(0, kStream).ok());
  EXPECT_EQ(Value(Download(*sums), 0), whole);
}

// Both at the same time, as behind the rounds of a checked refit.
TEST_P(DigestConformance, TwoStreamsShareWhatIsLeft) {
  const Bytes bytes = RandomBytes(kSanitized ? 1 << 20 : 32 << 20);
  const uint64_t whole = DigestOf(bytes);
  const auto memory = Upload(bytes);
  auto sums = Upload(Bytes(32, std::byte{0}));
  std::byte* const table[] = {memory->data(), sums->data()};
  CopyBatch batch = DigestBatch({0, 0, {{bytes.size(), 0, 1}}}, DType::kUint8,
                                {0, 0, {{bytes.size(), 0, 1}}}, DType::kUint8,
                                /*sum_entry=*/1);
  CopyBatch zero = BatchOf(CopyKind::kZero, {1, 0, {{32, 0, 1}}}, DType::kUint8,
                           {1, 0, {{32, 0, 1}}}, DType::kUint8);
  const CopyBatch batches[] = {batch, zero};
  auto prepared = device_->Prepare(table, batches);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  auto one = *device_->CreateStream();
  auto other = *device_->CreateStream();
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE((*prepared)->Enqueue(1, one->get()).ok());
    ASSERT_TRUE(device_->Synchronize(one->get()).ok());
    ASSERT_TRUE((*prepared)
                    ->EnqueueStep(0, 0, one->get(), nullptr,
                                  {.way = DeviceUse::Way::kBesideRounds})
                    .ok());
    ASSERT_TRUE((*prepared)->Enqueue(0, other->get()).ok());
    ASSERT_TRUE(device_->Synchronize(one->get()).ok());
    ASSERT_TRUE(device_->Synchronize(other->get()).ok());
    EXPECT_EQ(Value(Download(*sums), 16), whole);
  }
}

TEST_P(DigestConformance, EveryFlippedBitIsSeen) {
  const Bytes bytes = RandomBytes(67);
  const uint64_t right = DigestOf(bytes, 5);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    Bytes flipped = bytes;
    flipped[bit / 8] ^= std::byte{1} << bit % 8;
    EXPECT_NE(DigestOf(flipped, 5), right) << "bit " << bit;
  }
}

// Among them what sums and shifts of plain words would not see.
TEST_P(DigestConformance, WhatIsSwappedOrMovedIsSeen) {
  const Bytes bytes = RandomBytes(8192);
  const uint64_t right = DigestOf(bytes);
  std::mt19937 random(5);
  for (const size_t size : {2, 4, 16, 512}) {
    for (int i = 0; i < 20; ++i) {
      const size_t a = random() % (bytes.size() / size);
      const size_t b = random() % (bytes.size() / size);
      Bytes swapped = bytes;
      std::swap_ranges(swapped.begin() + a * size,
                       swapped.begin() + (a + 1) * size,
                       swapped.begin() + b * size);
      if (swapped == bytes) continue;
      EXPECT_NE(DigestOf(swapped), right)
          << a << " and " << b << " of " << size;
    }
  }
  for (int shift = 1; shift < 40; ++shift) {
    Bytes moved = bytes;
    std::rotate(moved.begin(), moved.begin() + shift, moved.end());
    EXPECT_NE(DigestOf(moved), right) << shift;
  }
  // The sign bits of two elements: the highest bits of their words.
  for (int i = 0; i < 20; ++i) {
    Bytes flipped = bytes;
    const size_t a = random() % 2048;
    const size_t b = (a + 1 + random() % 2000) % 2048;
    flipped[4 * a + 3] ^= std::byte{0x80};
    flipped[4 * b + 3] ^= std::byte{0x80};
    EXPECT_NE(DigestOf(flipped), right) << a << ", " << b;
  }
}

// Bits, not values: +0 is not -0, and NaNs differ by their payloads.
TEST_P(DigestConformance, ZerosAndNansAreDigestedBySign) {
  const auto of = [&](uint16_t bits) {
    Bytes bytes(32, std::byte{0});
    std::memcpy(bytes.data() + 6, &bits, sizeof(bits));
    return DigestOf(bytes);
  };
  EXPECT_EQ(of(0), 0);
  EXPECT_NE(of(0x8000), 0);
  EXPECT_NE(of(0x7fc0), of(0x7fc1));
  EXPECT_NE(of(0x7fc0), of(0xffc0));
}

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_DIGEST_CONFORMANCE_H_
