// Boxes of tensors, and the copies between them.
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "plan/schedule/copy_batches.h"
#include "plan/schedule/tensor_box.h"

namespace refit {
namespace {

// Where elements are: entry and byte.
using Addresses = std::vector<std::pair<uint64_t, uint64_t>>;

template <typename Loops, typename StrideOf>
Addresses AddressesOf(const CopyAddress& first, const Loops& loops,
                      const StrideOf& stride_of) {
  Addresses addresses = {{first.entry, first.byte_offset}};
  for (const auto& loop : loops) {
    Addresses all;
    for (const auto& [entry, byte] : addresses) {
      for (uint64_t i = 0; i < loop.extent; ++i) {
        all.emplace_back(entry + i * stride_of(loop).entries,
                         byte + i * stride_of(loop).bytes);
      }
    }
    addresses = all;
  }
  return addresses;
}

Addresses AddressesOf(const TensorBox& box) {
  return AddressesOf(box.first, box.loops,
                     [](const BoxLoop& loop) { return loop.stride; });
}

// Twelve elements of each of two tensors.
TensorBox BoxOfTwoTensors() {
  TensorBox box;
  box.first = {.entry = 1, .byte_offset = 10, .dtype = DType::kBf16};
  box.loops = {{.extent = 2, .stride = {.entries = 3}},
               {.extent = 3, .stride = {.bytes = 40}},
               {.extent = 4, .stride = {.bytes = 2}}};
  return box;
}

// Every cut of a box into two or three: the parts hold its elements in order.
TEST(TensorBoxTest, PartsHoldTheElementsInOrder) {
  const TensorBox box = BoxOfTwoTensors();
  const Addresses whole = AddressesOf(box);
  ASSERT_EQ(whole.size(), 24);
  for (uint64_t first = 0; first <= 24; ++first) {
    for (uint64_t second = first; second <= 24; ++second) {
      Addresses seen;
      for (const auto& [begin, end] :
           {std::pair<uint64_t, uint64_t>(0, first), std::pair(first, second),
            std::pair<uint64_t, uint64_t>(second, 24)}) {
        size_t parts = 0;
        ForEachPart(box, begin, end, [&](const TensorBox& part) {
          const Addresses addresses = AddressesOf(part);
          seen.insert(seen.end(), addresses.begin(), addresses.end());
          ++parts;
        });
        EXPECT_LE(parts, 5);
      }
      ASSERT_EQ(seen, whole) << first << " " << second;
    }
  }
}

TEST(TensorBoxTest, OnlyOneRunOfBytesIsOne) {
  const CopyAddress first = {.dtype = DType::kFp32};
  EXPECT_TRUE(RunOf(first, 1).IsOneRun());
  TensorBox box = RunOf(first, 24);
  EXPECT_TRUE(box.IsOneRun());
  EXPECT_EQ(box.Elements(), 24);
  box.loops.insert(box.loops.begin(), {.extent = 2, .stride = {.bytes = 96}});
  EXPECT_TRUE(box.IsOneRun());
  box.loops.front().stride.bytes = 100;
  EXPECT_FALSE(box.IsOneRun());
  box.loops.front().stride = {.entries = 1};
  EXPECT_FALSE(box.IsOneRun());
}

void ExpectCopies(const TensorBox& from, const TensorBox& to) {
  CopyBatch batch;
  batch.loops.resize(3);  // of another copy
  ASSERT_TRUE(AppendCopy(from, to, /*link=*/2, batch));
  ASSERT_EQ(batch.copies.size(), 1);
  const StridedCopy& copy = batch.copies.front();
  EXPECT_EQ(copy.link, 2);
  const auto loops = absl::MakeConstSpan(batch.loops)
                         .subspan(copy.loops_begin, copy.loops_count);
  EXPECT_EQ(AddressesOf(copy.from, loops,
                        [](const CopyLoop& loop) { return loop.from; }),
            AddressesOf(from));
  EXPECT_EQ(
      AddressesOf(copy.to, loops, [](const CopyLoop& loop) { return loop.to; }),
      AddressesOf(to));
}

TEST(CopyBatchesTest, ACopyVisitsBothBoxesInOrder) {
  const TensorBox box = BoxOfTwoTensors();
  const TensorBox run = RunOf({.entry = 9, .dtype = DType::kFp32}, 24);
  TensorBox halves;  // of rows, as another tensor has them
  halves.first = {.entry = 7, .byte_offset = 4, .dtype = DType::kFp32};
  halves.loops = {{.extent = 6, .stride = {.bytes = 64}},
                  {.extent = 2, .stride = {.entries = 1}},
                  {.extent = 2, .stride = {.bytes = 4}}};
  for (const TensorBox& from : {box, run, halves}) {
    for (const TensorBox& to : {box, run, halves}) ExpectCopies(from, to);
  }
  ExpectCopies(RunOf(box.first, 1), RunOf(run.first, 1));
}

TEST(CopyBatchesTest, LoopsThatStraddleEachOtherAreRefused) {
  const TensorBox box = BoxOfTwoTensors();
  TensorBox sixes;
  sixes.loops = {{.extent = 4, .stride = {.bytes = 100}},
                 {.extent = 6, .stride = {.bytes = 2}}};
  CopyBatch batch;
  EXPECT_FALSE(AppendCopy(box, sixes, 0, batch));
  EXPECT_FALSE(AppendCopy(box, RunOf(box.first, 23), 0, batch));
  EXPECT_TRUE(batch.copies.empty() && batch.loops.empty());
}

}  // namespace
}  // namespace refit
