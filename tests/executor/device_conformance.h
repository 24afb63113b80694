// What every Device must do. A test file instantiates the suite with a factory:
//
//   INSTANTIATE_TEST_SUITE_P(Host, DeviceConformance, testing::Values(
//       DeviceFactory([] { return std::make_unique<HostDevice>(); })));
#ifndef REFIT_TESTS_EXECUTOR_DEVICE_CONFORMANCE_H_
#define REFIT_TESTS_EXECUTOR_DEVICE_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "executor/device/cast.h"
#include "executor/time_sum.h"
#include "refit/device.h"
#include "tests/sanitizers.h"

namespace refit {

using DeviceFactory = std::function<std::unique_ptr<Device>()>;

class DeviceConformance : public testing::TestWithParam<DeviceFactory> {
 protected:
  static constexpr Stream kStream = nullptr;
  static constexpr auto kNoDeadline =
      std::chrono::steady_clock::time_point::max();

  void SetUp() override { device_ = GetParam()(); }

  using Bytes = std::vector<std::byte>;

  static Bytes RandomBytes(size_t size) {
    static std::mt19937_64 random(1);
    Bytes bytes(size);
    for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
      const uint64_t drawn = random();
      std::memcpy(&bytes[at], &drawn, std::min(sizeof(drawn), size - at));
    }
    return bytes;
  }

  std::unique_ptr<DeviceMemory> Upload(const Bytes& bytes) {
    auto memory = device_->Allocate(bytes.size());
    EXPECT_TRUE(memory.ok()) << memory.status();
    EXPECT_TRUE(
        device_->Copy((*memory)->data(), bytes.data(), bytes.size(), kStream)
            .ok());
    return *std::move(memory);
  }

  Bytes Download(const DeviceMemory& memory) {
    Bytes bytes(memory.size_bytes());
    EXPECT_TRUE(
        device_->Copy(bytes.data(), memory.data(), bytes.size(), kStream).ok());
    EXPECT_TRUE(device_->Synchronize(kStream).ok());
    return bytes;
  }

  // How the elements of one tensor of a copy lie, in a form that a plain loop
  // can follow.
  struct Loop {
    uint64_t extent = 1;
    uint64_t tensor_stride = 0;
    uint64_t byte_stride = 0;
  };
  struct Shape {
    uint64_t first_tensor = 0;
    uint64_t byte_offset = 0;
    std::vector<Loop> loops;

    uint64_t elements() const {
      uint64_t count = 1;
      for (const Loop& loop : loops) count *= loop.extent;
      return count;
    }
  };

  // The same loops over dense elements, from byte 16 of entry `entry` on.
  static Shape Dense(const Shape& shape, uint64_t entry, uint64_t element) {
    Shape dense = {entry, 16, shape.loops};
    for (size_t d = dense.loops.size(); d-- > 0;) {
      dense.loops[d].tensor_stride = 0;
      dense.loops[d].byte_stride = element;
      element *= dense.loops[d].extent;
    }
    return dense;
  }

  // The place of element `i` in the order of the loops.
  static std::pair<uint64_t, uint64_t> AddressOf(const Shape& shape,
                                                 uint64_t i) {
    uint64_t tensor = shape.first_tensor;
    uint64_t offset = shape.byte_offset;
    for (size_t d = shape.loops.size(); d-- > 0;) {
      const uint64_t index = i % shape.loops[d].extent;
      i /= shape.loops[d].extent;
      tensor += index * shape.loops[d].tensor_stride;
      offset += index * shape.loops[d].byte_stride;
    }
    return {tensor, offset};
  }

  static CopyBatch BatchOf(CopyKind kind, const Shape& from, DType from_dtype,
                           const Shape& to, DType to_dtype) {
    CopyBatch batch;
    batch.kind = kind;
    StridedCopy& copy = batch.copies.emplace_back();
    copy.from = {from.first_tensor, from.byte_offset, from_dtype};
    copy.to = {to.first_tensor, to.byte_offset, to_dtype};
    copy.loops_count = static_cast<uint32_t>(to.loops.size());
    for (size_t d = 0; d < to.loops.size(); ++d) {
      batch.loops.push_back(
          {to.loops[d].extent,
           {from.loops[d].tensor_stride, from.loops[d].byte_stride},
           {to.loops[d].tensor_stride, to.loops[d].byte_stride}});
    }
    return batch;
  }

  // Runs one copy over a table of random entries and compares all of them with
  // the plain loop.
  void CheckCopy(CopyKind kind, const Shape& from, DType from_dtype,
                 const Shape& to, DType to_dtype,
                 const std::vector<size_t>& entry_bytes) {
    SCOPED_TRACE(testing::Message()
                 << "kind " << static_cast<int>(kind) << ", dtype "
                 << static_cast<int>(from_dtype) << " to "
                 << static_cast<int>(to_dtype) << ", loops "
                 << to.loops.size());
    std::vector<Bytes> expected;
    std::vector<std::unique_ptr<DeviceMemory>> memory;
    std::vector<std::byte*> table;
    for (const size_t size : entry_bytes) {
      expected.push_back(RandomBytes(size));
      memory.push_back(Upload(expected.back()));
      table.push_back(memory.back()->data());
    }
    const size_t to_bytes = DTypeBytes(to_dtype);
    for (uint64_t i = 0; i < to.elements(); ++i) {
      const auto [to_entry, to_offset] = AddressOf(to, i);
      std::byte* target = &expected[to_entry][to_offset];
      if (kind == CopyKind::kZero) {
        std::fill_n(target, to_bytes, std::byte{0});
        continue;
      }
      const auto [from_entry, from_offset] = AddressOf(from, i);
      const std::byte* source = &expected[from_entry][from_offset];
      if (from_dtype == to_dtype) {
        std::copy_n(source, to_bytes, target);
      } else {
        FindCast(from_dtype, to_dtype)(target, source, 1);
      }
    }
    const CopyBatch batch = BatchOf(kind, from, from_dtype, to, to_dtype);
    auto prepared = device_->Prepare(table, {&batch, 1});
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    ASSERT_TRUE((*prepared)->Enqueue(0, kStream).ok());
    for (size_t i = 0; i < table.size(); ++i) {
      EXPECT_TRUE(Download(*memory[i]) == expected[i]) << "entry " << i;
    }
  }

  // Packs and unpacks `shape` of `tensors` tensors, and zeroes it.
  void Check(const Shape& shape, DType tensor_dtype, DType staging_dtype,
             size_t tensors, size_t tensor_bytes) {
    const Shape staging = Dense(shape, tensors, DTypeBytes(staging_dtype));
    std::vector<size_t> entries(tensors, tensor_bytes);
    entries.push_back(shape.elements() * DTypeBytes(staging_dtype) + 32);
    CheckCopy(CopyKind::kCopy, shape, tensor_dtype, staging, staging_dtype,
              entries);
    CheckCopy(CopyKind::kCopy, staging, staging_dtype, shape, tensor_dtype,
              entries);
    CheckCopy(CopyKind::kZero, shape, tensor_dtype, shape, tensor_dtype,
              entries);
  }

  std::unique_ptr<Device> device_;
};

TEST_P(DeviceConformance, EveryLoopShapeOfEveryElementSizeCopiesExactly) {
  for (const DType dtype :
       {DType::kUint8, DType::kBf16, DType::kFp32, DType::kInt64}) {
    const uint64_t e = DTypeBytes(dtype);
    const std::vector<Shape> shapes = {
        {0, 0, {}},
        {1, 3 * e, {}},
        {0, 5 * e, {{7, 0, e}}},                   // contiguous
        {0, 1 * e, {{9, 0, 4 * e}}},               // strided elements
        {0, 2 * e, {{5, 0, 40 * e}, {13, 0, e}}},  // rows
        {0, 2 * e, {{5, 0, 13 * e}, {13, 0, e}}},  // rows that touch
        {0, 0, {{6, 0, e}, {7, 0, 6 * e}}},        // transposed
        {0, e, {{2, 0, 90 * e}, {3, 0, 30 * e}, {4, 0, 5 * e}, {3, 0, e}}},
        {0, 0, {{3, 1, 0}, {8, 0, e}}},  // over tensors
        {0, 2 * e, {{2, 2, 0}, {2, 1, 0}, {3, 0, 9 * e}, {4, 0, e}}},
        {0, 7 * e, {{4, 1, 0}}},                        // one of each tensor
        {0, 0, {{5, 0, 3 * e}, {3, 1, 0}}},             // tensors innermost
        {0, 0, {{2, 0, 8 * e}, {4, 1, 0}, {8, 0, e}}},  // tensors between
    };
    for (const Shape& shape : shapes) Check(shape, dtype, dtype, 4, 256 * 8);
  }
}

TEST_P(DeviceConformance, RunsOfEveryLengthAndAlignmentCopyExactly) {
  for (const uint64_t run : {1, 15, 16, 17, 63, 64, 65, 127, 128, 200, 1023,
                             1024, 1025, 1100, 4097}) {
    for (const uint64_t offset : {0, 1, 7, 31}) {
      Check({0, offset, {{3, 0, run + 29}, {run, 0, 1}}}, DType::kUint8,
            DType::kUint8, 1, 3 * (run + 29) + 64);
    }
  }
}

TEST_P(DeviceConformance, EveryCastWorksInEveryLoopShape) {
  const DType floats[] = {DType::kBf16, DType::kFp16, DType::kFp32};
  for (const DType tensor : floats) {
    for (const DType staging : floats) {
      if (tensor == staging) continue;
      const uint64_t e = DTypeBytes(tensor);
      const std::vector<Shape> shapes = {
          {0, 0, {}},
          {0, 3 * e, {{700, 0, e}}},
          {0, 3 * e, {{600, 0, 2 * e}}},
          {0, 0, {{5, 0, 100 * e}, {33, 0, e}}},
          {0, 0, {{2, 1, 0}, {30, 0, e}, {20, 0, 30 * e}}},
      };
      for (const Shape& shape : shapes) Check(shape, tensor, staging, 2, 8192);
    }
  }
}

TEST_P(DeviceConformance, CopiesStridedOnBothSidesAreExact) {
  for (const DType dtype : {DType::kUint8, DType::kBf16, DType::kFp32}) {
    const uint64_t e = DTypeBytes(dtype);
    const std::vector<std::pair<Shape, Shape>> pairs = {
        // Rows of other widths: a column slice of one matrix into another.
        {{0, 3 * e, {{6, 0, 40 * e}, {11, 0, e}}},
         {1, 2 * e, {{6, 0, 24 * e}, {11, 0, e}}}},
        // Transposed in one tensor.
        {{0, 0, {{9, 0, e}, {10, 0, 9 * e}}},
         {1, 4 * e, {{9, 0, 10 * e}, {10, 0, e}}}},
        // Over tensors at one end and inside one at the other.
        {{0, e, {{2, 1, 0}, {3, 0, 20 * e}, {8, 0, e}}},
         {2, 0, {{2, 0, 30 * e}, {3, 0, 10 * e}, {8, 0, e}}}},
        // Wide rows, so that vectors are used, from an odd place.
        {{0, 5 * e, {{3, 0, 300 * e}, {256, 0, e}}},
         {1, 8 * e, {{3, 0, 264 * e}, {256, 0, e}}}},
    };
    for (const auto& [from, to] : pairs) {
      CheckCopy(CopyKind::kCopy, from, dtype, to, dtype, {4096, 4096, 4096});
    }
    if (dtype == DType::kUint8) continue;
    const DType other = dtype == DType::kBf16 ? DType::kFp32 : DType::kFp16;
    const uint64_t o = DTypeBytes(other);
    CheckCopy(CopyKind::kCopy, {0, e, {{7, 0, 50 * e}, {33, 0, e}}}, dtype,
              {1, 0, {{7, 0, 35 * o}, {33, 0, o}}}, other, {4096, 4096});
    CheckCopy(CopyKind::kCopy, {0, e, {{7, 0, e}, {33, 0, 7 * e}}}, dtype,
              {1, 0, {{7, 0, 35 * o}, {33, 0, o}}}, other, {4096, 4096});
  }
}

TEST_P(DeviceConformance, LargeCopiesOverManyLinksAreExact) {
  constexpr size_t kBytes = 3 << 20;
  std::vector<std::unique_ptr<DeviceMemory>> memory;
  std::vector<std::byte*> table;
  std::vector<Bytes> before;
  CopyBatch batch;
  batch.loops = {{kBytes / 2 - 5, {0, 1}, {0, 1}}};
  for (uint32_t link = 0; link < 3; ++link) {
    for (int end = 0; end < 2; ++end) {
      before.push_back(RandomBytes(kBytes));
      memory.push_back(Upload(before.back()));
      table.push_back(memory.back()->data());
    }
    StridedCopy& copy = batch.copies.emplace_back();
    copy.from = {2 * link, 16 * link, DType::kUint8};
    copy.to = {2 * link + 1, 3 * link, DType::kUint8};
    copy.loops_count = 1;
    copy.link = link;
  }
  auto prepared = device_->Prepare(table, {&batch, 1});
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  ASSERT_TRUE((*prepared)->Enqueue(0, kStream).ok());
  for (size_t link = 0; link < 3; ++link) {
    Bytes expected = before[2 * link + 1];
    std::copy_n(before[2 * link].begin() + 16 * link, kBytes / 2 - 5,
                expected.begin() + 3 * link);
    EXPECT_TRUE(Download(*memory[2 * link + 1]) == expected) << link;
    EXPECT_TRUE(Download(*memory[2 * link]) == before[2 * link]) << link;
  }
}

// Rows that a GPU's multiprocessors copy in bulk, whole and in parts, and rows
// that they cannot.
TEST_P(DeviceConformance, CopiesOnFewMultiprocessorsAreExact) {
  struct Rows {
    uint64_t bytes, count, from_stride, to_stride, offset;
  };
  for (const Rows& rows :
       std::vector<Rows>{{768, 700, 1536, 768, 0},    // to one run
                         {768, 700, 768, 1536, 32},   // from one run
                         {256, 999, 512, 272, 16},    // the shortest
                         {240, 999, 512, 272, 16},    // shorter
                         {8208, 77, 9008, 8208, 48},  // longer than a slice
                         {3000016, 1, 3000016, 3000016, 0},
                         {4096, 300, 8192, 12288, 0},
                         {4096, 300, 8192, 4096, 8}}) {  // not aligned
    using Way = DeviceUse::Way;
    for (const DeviceUse& use :
         std::vector<DeviceUse>{{.way = Way::kBulk},
                                {.way = Way::kBulk, .at_most = 1},
                                {.way = Way::kBulk, .at_most = 3},
                                {.way = Way::kBulk, .at_most = 1000},
                                {.way = Way::kFew},
                                {.way = Way::kMost}}) {
      SCOPED_TRACE(testing::Message()
                   << rows.bytes << " bytes, way " << static_cast<int>(use.way)
                   << ", at most " << use.at_most);
      std::vector<std::unique_ptr<DeviceMemory>> memory;
      std::vector<std::byte*> table;
      std::vector<Bytes> expected;
      CopyBatch batch;
      batch.loops = {{rows.count, {0, rows.from_stride}, {0, rows.to_stride}},
                     {rows.bytes, {0, 1}, {0, 1}}};
      for (uint32_t lane = 0; lane < 2; ++lane) {
        for (const uint64_t stride : {rows.from_stride, rows.to_stride}) {
          expected.push_back(RandomBytes(rows.count * stride + 64));
          memory.push_back(Upload(expected.back()));
          table.push_back(memory.back()->data());
        }
        StridedCopy& copy = batch.copies.emplace_back();
        copy.from = {2 * lane, rows.offset, DType::kUint8};
        copy.to = {2 * lane + 1, rows.offset, DType::kUint8};
        copy.loops_count = 2;
        copy.link = lane;
        for (uint64_t row = 0; row < rows.count; ++row) {
          std::copy_n(
              expected[2 * lane].begin() + rows.offset + row * rows.from_stride,
              rows.bytes,
              expected[2 * lane + 1].begin() + rows.offset +
                  row * rows.to_stride);
        }
      }
      auto prepared = device_->Prepare(table, {&batch, 1});
      ASSERT_TRUE(prepared.ok()) << prepared.status();
      ASSERT_TRUE((*prepared)->Enqueue(0, kStream, nullptr, use).ok());
      for (size_t i = 0; i < table.size(); ++i) {
        EXPECT_TRUE(Download(*memory[i]) == expected[i]) << "entry " << i;
      }
    }
  }
}

// Long rows and short ones, two of each step, on all multiprocessors and beside
// digests.
TEST_P(DeviceConformance, StepsOfABatchAreEnqueuedAlone) {
  constexpr uint64_t kRows = 300;
  const std::vector<uint32_t> steps = {2, 0, 5, 2, 0, 5};
  const std::vector<uint64_t> row_bytes = {4096, 4096, 4096, 24, 24, 24};
  for (const DeviceUse& use :
       std::vector<DeviceUse>{{},
                              {.way = DeviceUse::Way::kBulk, .at_most = 2},
                              {.way = DeviceUse::Way::kBesideDigests}}) {
    SCOPED_TRACE(static_cast<int>(use.way));
    std::vector<std::unique_ptr<DeviceMemory>> memory;
    std::vector<std::byte*> table;
    std::vector<Bytes> from, to;
    CopyBatch batch;
    for (size_t i = 0; i < steps.size(); ++i) {
      from.push_back(RandomBytes(kRows * row_bytes[i]));
      to.push_back(RandomBytes(kRows * row_bytes[i]));
      for (const Bytes* bytes : {&from.back(), &to.back()}) {
        memory.push_back(Upload(*bytes));
        table.push_back(memory.back()->data());
      }
      StridedCopy& copy = batch.copies.emplace_back();
      copy.from = {2 * i, 0, DType::kUint8};
      copy.to = {2 * i + 1, 0, DType::kUint8};
      copy.loops_begin = static_cast<uint32_t>(batch.loops.size());
      copy.loops_count = 1;
      copy.link = static_cast<uint32_t>(i % 2);
      copy.step = steps[i];
      batch.loops.push_back({kRows * row_bytes[i], {0, 1}, {0, 1}});
    }
    auto prepared = device_->Prepare(table, {&batch, 1});
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    for (const uint32_t step : {1u, 2u, 5u, 0u, 9u}) {
      ASSERT_TRUE(
          (*prepared)->EnqueueStep(0, step, kStream, nullptr, use).ok());
      for (size_t i = 0; i < steps.size(); ++i) {
        if (steps[i] == step) to[i] = from[i];
        EXPECT_TRUE(Download(*memory[2 * i + 1]) == to[i])
            << "copy " << i << " after step " << step;
      }
    }
  }
}

TEST_P(DeviceConformance, BatchesOfOnePreparationRunAlone) {
  auto tensor = Upload(Bytes(64, std::byte{1}));
  auto staging = Upload(Bytes(64, std::byte{2}));
  std::vector<CopyBatch> batches;
  for (uint64_t i = 0; i < 3; ++i) {
    batches.push_back(BatchOf(CopyKind::kCopy, {1, 0, {{4, 0, 1}}},
                              DType::kUint8, {0, 16 * i, {{4, 0, 1}}},
                              DType::kUint8));
  }
  batches[2].copies.clear();
  std::byte* const table[] = {tensor->data(), staging->data()};
  auto prepared = device_->Prepare(table, batches);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  ASSERT_TRUE((*prepared)->Enqueue(2, kStream).ok());
  ASSERT_TRUE((*prepared)->Enqueue(1, kStream).ok());
  Bytes expected(64, std::byte{1});
  std::fill_n(expected.begin() + 16, 4, std::byte{2});
  EXPECT_EQ(Download(*tensor), expected);
}

TEST_P(DeviceConformance, CopyReachesExactlyItsRange) {
  const Bytes before = RandomBytes(300);
  auto memory = Upload(before);
  ASSERT_TRUE(
      device_->Copy(memory->data() + 250, memory->data() + 150, 33, kStream)
          .ok());
  Bytes expected = before;
  std::copy_n(before.begin() + 150, 33, expected.begin() + 250);
  EXPECT_EQ(Download(*memory), expected);
}

TEST_P(DeviceConformance, BatchDoesNothingOnceItsWordIsSet) {
  auto memory = Upload(Bytes(32, std::byte{7}));
  auto word = Upload(Bytes(4, std::byte{1}));
  const Shape all = {0, 0, {{32, 0, 1}}};
  const CopyBatch zero =
      BatchOf(CopyKind::kZero, all, DType::kUint8, all, DType::kUint8);
  std::byte* const address = memory->data();
  auto prepared = device_->Prepare({&address, 1}, {&zero, 1});
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  ASSERT_TRUE(
      (*prepared)
          ->Enqueue(0, kStream, reinterpret_cast<const uint32_t*>(word->data()))
          .ok());
  EXPECT_EQ(Download(*memory), Bytes(32, std::byte{7}));
}

TEST_P(DeviceConformance, MappedMemoryIsWhatWasExported) {
  auto first = Upload(Bytes(512, std::byte{1}));
  auto second = Upload(Bytes(512, std::byte{2}));
  const std::vector<MemoryRange> ranges = {
      {first->data(), 512}, {nullptr, 0}, {second->data() + 100, 50}};
  const auto exported = device_->Export(ranges);
  ASSERT_TRUE(exported.ok()) << exported.status();
  const auto mapped =
      device_->Import((*exported)->bytes(), {512, 0, 50}, kNoDeadline);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  ASSERT_EQ((*mapped)->addresses().size(), 3);
  EXPECT_EQ((*mapped)->addresses()[1], nullptr);
  ASSERT_TRUE(device_
                  ->Copy((*mapped)->addresses()[2], (*mapped)->addresses()[0],
                         50, kStream)
                  .ok());
  Bytes expected(512, std::byte{2});
  std::fill_n(expected.begin() + 100, 50, std::byte{1});
  EXPECT_EQ(Download(*second), expected);
}

// Whatever a peer sends, an address comes out only for memory that is exported
// at that moment, with the sizes that this rank expects.
TEST_P(DeviceConformance, ImportBelievesNoAddressAndNoSize) {
  auto memory = Upload(Bytes(512, std::byte{1}));
  const std::vector<MemoryRange> ranges = {{memory->data(), 512},
                                           {memory->data() + 16, 32}};
  auto exported = *device_->Export(ranges);
  const std::string bytes = exported->bytes();
  const auto address = reinterpret_cast<uintptr_t>(memory->data());
  EXPECT_EQ(bytes.find(std::string(reinterpret_cast<const char*>(&address),
                                   sizeof(address))),
            std::string::npos);
  const auto code = [&](const std::string& text,
                        const std::vector<uint64_t>& sizes) {
    return device_->Import(text, sizes, kNoDeadline).status().code();
  };
  EXPECT_EQ(code(bytes, {512, 32}), absl::StatusCode::kOk);
  EXPECT_EQ(device_->Import(bytes, {512, 33}, kNoDeadline).status().message(),
            "shows tensor 1 with 32 bytes when it should have 33");
  EXPECT_EQ(device_->Import(bytes, {512}, kNoDeadline).status().message(),
            "shows 2 tensors when it should be 1");
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(code(bytes.substr(0, size), {512, 32}),
              absl::StatusCode::kInvalidArgument);
  }
  // A bit of it changed: what comes out, if anything, is this memory.
  for (size_t i = 0; i < 8 * bytes.size(); ++i) {
    std::string forged = bytes;
    forged[i / 8] = static_cast<char>(forged[i / 8] ^ 1 << i % 8);
    for (const std::vector<uint64_t>& sizes :
         {std::vector<uint64_t>{512, 32}, {512, 33}, {513, 32}}) {
      const auto mapped = device_->Import(forged, sizes, kNoDeadline);
      if (!mapped.ok()) continue;
      EXPECT_EQ(sizes, std::vector<uint64_t>({512, 32})) << "bit " << i;
      EXPECT_EQ((*mapped)->addresses()[1], memory->data() + 16) << "bit " << i;
    }
  }
  exported.reset();
  EXPECT_EQ(code(bytes, {512, 32}), absl::StatusCode::kNotFound);
}

TEST_P(DeviceConformance, EventsAreReachedInTheOrderOfStreams) {
  auto stream = device_->CreateStream();
  auto other = device_->CreateStream();
  auto event = device_->CreateEvent();
  ASSERT_TRUE(stream.ok() && other.ok() && event.ok());
  auto memory = Upload(Bytes(64, std::byte{3}));
  Bytes bytes(64);
  ASSERT_TRUE(
      device_->Copy(memory->data() + 32, memory->data(), 32, (*stream)->get())
          .ok());
  ASSERT_TRUE((*event)->Record((*stream)->get()).ok());
  ASSERT_TRUE((*event)->Await((*other)->get()).ok());
  ASSERT_TRUE(
      device_->Copy(bytes.data(), memory->data(), 64, (*other)->get()).ok());
  ASSERT_TRUE(device_->Synchronize((*other)->get()).ok());
  const auto reached = (*event)->Reached();
  ASSERT_TRUE(reached.ok()) << reached.status();
  EXPECT_TRUE(*reached);
  EXPECT_EQ(bytes, Bytes(64, std::byte{3}));
}

// So many that a GPU takes more than the microsecond that the tests expect.
constexpr size_t kTimedBytes = kSanitized ? 4 << 20 : 64 << 20;

TEST_P(DeviceConformance, TimerMeasuresWhatLiesBetweenItsPoints) {
  auto timer = device_->CreateTimer();
  ASSERT_TRUE(timer.ok()) << timer.status();
  auto from = Upload(RandomBytes(kTimedBytes));
  auto to = Upload(RandomBytes(kTimedBytes));
  ASSERT_TRUE((*timer)->Start(kStream).ok());
  ASSERT_TRUE(
      device_->Copy(to->data(), from->data(), to->size_bytes(), kStream).ok());
  ASSERT_TRUE((*timer)->Stop(kStream).ok());
  auto behind = device_->CreateTimer();
  ASSERT_TRUE(behind.ok() && (*behind)->Start(kStream).ok());
  ASSERT_TRUE(device_->Synchronize(kStream).ok());
  const auto seconds = (*timer)->Seconds();
  ASSERT_TRUE(seconds.ok()) << seconds.status();
  EXPECT_GT(*seconds, 1e-6);  // 64 TB/s
  EXPECT_LT(*seconds, 60);
  const auto after = (*behind)->SecondsAfter(**timer);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_GE(*after, *seconds);
}

// Of three copies one behind the other, the first and the last.
TEST_P(DeviceConformance, TimesOfPartsAddUp) {
  auto stream = device_->CreateStream();
  auto all = device_->CreateTimer();
  ASSERT_TRUE(stream.ok() && all.ok()) << stream.status() << all.status();
  const auto from = Upload(RandomBytes(kTimedBytes));
  const auto to = Upload(RandomBytes(kTimedBytes));
  const Stream on = (*stream)->get();
  const auto copy = [&] {
    return device_->Copy(to->data(), from->data(), to->size_bytes(), on);
  };
  TimeSum sum, first, last;
  ASSERT_TRUE(sum.Time(on, copy).ok());
  EXPECT_EQ(sum.Seconds().value(), 0) << "without room";
  ASSERT_TRUE(sum.Reserve(2, *device_).ok());
  ASSERT_TRUE(first.Reserve(1, *device_).ok());
  ASSERT_TRUE(last.Reserve(1, *device_).ok());
  for (int refit = 0; refit < 2; ++refit) {
    for (TimeSum* const each : {&sum, &first, &last}) each->Restart();
    EXPECT_EQ(sum.Seconds().value(), 0);
    ASSERT_TRUE((*all)->Start(on).ok());
    ASSERT_TRUE(sum.Time(on, [&] { return first.Time(on, copy); }).ok());
    ASSERT_TRUE(copy().ok());
    ASSERT_TRUE(sum.Time(on, [&] { return last.Time(on, copy); }).ok());
    ASSERT_TRUE((*all)->Stop(on).ok());
    ASSERT_TRUE(device_->Synchronize(on).ok());
    EXPECT_GT(first.Seconds().value(), 1e-6);  // 64 TB/s
    EXPECT_GT(last.Seconds().value(), 1e-6);
    EXPECT_GE(sum.Seconds().value(),
              first.Seconds().value() + last.Seconds().value());
    EXPECT_LT(sum.Seconds().value(), (*all)->Seconds().value());
  }
}

TEST_P(DeviceConformance, ProgressIsTheLastMarkReached) {
  auto progress = device_->CreateProgress();
  ASSERT_TRUE(progress.ok()) << progress.status();
  EXPECT_EQ((*progress)->reached(), 0);
  for (const uint32_t value : {1u, 2u, 7u}) {
    ASSERT_TRUE((*progress)->Mark(value, kStream).ok());
    ASSERT_TRUE(device_->Synchronize(kStream).ok());
    EXPECT_EQ((*progress)->reached(), value);
  }
  (*progress)->Reset();
  EXPECT_EQ((*progress)->reached(), 0);
}

TEST_P(DeviceConformance, MemoryIsAlignedAndMayBeEmpty) {
  auto memory = device_->Allocate(1);
  ASSERT_TRUE(memory.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>((*memory)->data()) % 256, 0);
  EXPECT_TRUE(device_->Allocate(0).ok());
}

TEST_P(DeviceConformance, TooMuchMemoryIsAnError) {
  EXPECT_EQ(device_->Allocate(uint64_t{1} << 62).status().code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_DEVICE_CONFORMANCE_H_
