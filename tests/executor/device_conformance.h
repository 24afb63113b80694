// What every Device must do. A test file instantiates the suite with a factory:
//
//   INSTANTIATE_TEST_SUITE_P(Host, DeviceConformance, testing::Values(
//       DeviceFactory([] { return std::make_unique<HostDevice>(); })));
#ifndef REFIT_TESTS_EXECUTOR_DEVICE_CONFORMANCE_H_
#define REFIT_TESTS_EXECUTOR_DEVICE_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "executor/device/cast.h"
#include "refit/device.h"

namespace refit {

using DeviceFactory = std::function<std::unique_ptr<Device>()>;

class DeviceConformance : public testing::TestWithParam<DeviceFactory> {
 protected:
  static constexpr Stream kStream = nullptr;

  void SetUp() override { device_ = GetParam()(); }

  using Bytes = std::vector<std::byte>;

  static Bytes RandomBytes(size_t size) {
    static std::mt19937_64 random(1);
    Bytes bytes(size);
    for (std::byte& byte : bytes) byte = std::byte(random());
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

  // A copy and how its elements lie, in a form that a plain loop can follow.
  struct Shape {
    uint64_t first_tensor = 0;
    uint64_t byte_offset = 0;
    std::vector<CopyLoop> loops;
  };

  // Calls visit(tensor, byte offset, position in staging) per element.
  template <typename Visitor>
  static void Visit(const Shape& shape, Visitor visit) {
    uint64_t elements = 1;
    for (const CopyLoop& loop : shape.loops) elements *= loop.extent;
    for (uint64_t i = 0; i < elements; ++i) {
      uint64_t rest = i;
      uint64_t tensor = shape.first_tensor;
      uint64_t offset = shape.byte_offset;
      for (size_t d = shape.loops.size(); d-- > 0;) {
        const uint64_t step = rest % shape.loops[d].extent;
        rest /= shape.loops[d].extent;
        tensor += step * shape.loops[d].tensor_step;
        offset += step * shape.loops[d].byte_step;
      }
      visit(tensor, offset, i);
    }
  }

  // Runs one copy in all directions and compares with the plain loop. The
  // staging begins `misalignment` bytes into its memory.
  void Check(const Shape& shape, DType tensor_dtype, DType staging_dtype,
             size_t tensors, size_t tensor_bytes) {
    SCOPED_TRACE(testing::Message()
                 << "dtype " << static_cast<int>(tensor_dtype) << " to "
                 << static_cast<int>(staging_dtype) << ", loops "
                 << shape.loops.size());
    const size_t tensor_element = DTypeBytes(tensor_dtype);
    const size_t staging_element = DTypeBytes(staging_dtype);
    size_t elements = 1;
    for (const CopyLoop& loop : shape.loops) elements *= loop.extent;
    const Bytes staging_before = RandomBytes(elements * staging_element + 32);
    std::vector<Bytes> tensors_before;
    for (size_t i = 0; i < tensors; ++i) {
      tensors_before.push_back(RandomBytes(tensor_bytes));
    }
    for (const CopyKind kind :
         {CopyKind::kPack, CopyKind::kUnpack, CopyKind::kZero}) {
      Bytes staging_expected = staging_before;
      std::vector<Bytes> tensors_expected = tensors_before;
      Visit(shape, [&](uint64_t tensor, uint64_t offset, uint64_t position) {
        std::byte* in_tensor = &tensors_expected[tensor][offset];
        std::byte* in_staging =
            &staging_expected[16 + position * staging_element];
        if (kind == CopyKind::kZero) {
          std::fill_n(in_tensor, tensor_element, std::byte{0});
        } else if (tensor_dtype == staging_dtype) {
          if (kind == CopyKind::kPack) {
            std::copy_n(in_tensor, tensor_element, in_staging);
          } else {
            std::copy_n(in_staging, tensor_element, in_tensor);
          }
        } else if (kind == CopyKind::kPack) {
          FindCast(tensor_dtype, staging_dtype)(in_staging, in_tensor, 1);
        } else {
          FindCast(staging_dtype, tensor_dtype)(in_tensor, in_staging, 1);
        }
      });

      auto staging = Upload(staging_before);
      std::vector<std::unique_ptr<DeviceMemory>> memory;
      std::vector<std::byte*> addresses;
      for (const Bytes& bytes : tensors_before) {
        memory.push_back(Upload(bytes));
        addresses.push_back(memory.back()->data());
      }
      CopyBatch batch;
      batch.kind = kind;
      batch.loops = shape.loops;
      batch.copies = {{.first_tensor = shape.first_tensor,
                       .byte_offset = shape.byte_offset,
                       .loops_begin = 0,
                       .loops_count = static_cast<uint32_t>(shape.loops.size()),
                       .tensor_dtype = tensor_dtype,
                       .staging_dtype = staging_dtype,
                       .staging = staging->data() + 16}};
      auto prepared = device_->Prepare(addresses, {&batch, 1});
      ASSERT_TRUE(prepared.ok()) << prepared.status();
      ASSERT_TRUE((*prepared)->Enqueue(0, kStream).ok());
      EXPECT_TRUE(Download(*staging) == staging_expected)
          << "staging after kind " << static_cast<int>(kind);
      for (size_t i = 0; i < tensors; ++i) {
        EXPECT_TRUE(Download(*memory[i]) == tensors_expected[i])
            << "tensor " << i << " after kind " << static_cast<int>(kind);
      }
    }
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

TEST_P(DeviceConformance, BatchesOfOnePreparationRunAlone) {
  auto tensor = Upload(Bytes(64, std::byte{1}));
  auto staging = Upload(Bytes(64, std::byte{2}));
  std::vector<CopyBatch> batches(3);
  for (size_t i = 0; i < 3; ++i) {
    batches[i].kind = CopyKind::kUnpack;
    batches[i].loops = {{.extent = 4, .byte_step = 1}};
    batches[i].copies = {{.byte_offset = 16 * i,
                          .loops_count = 1,
                          .tensor_dtype = DType::kUint8,
                          .staging_dtype = DType::kUint8,
                          .staging = staging->data()}};
  }
  batches[2].copies.clear();
  std::byte* const address = tensor->data();
  auto prepared = device_->Prepare({&address, 1}, batches);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  ASSERT_TRUE((*prepared)->Enqueue(2, kStream).ok());
  ASSERT_TRUE((*prepared)->Enqueue(1, kStream).ok());
  Bytes expected(64, std::byte{1});
  std::fill_n(expected.begin() + 16, 4, std::byte{2});
  EXPECT_EQ(Download(*tensor), expected);
}

TEST_P(DeviceConformance, ZeroAndCopyReachExactlyTheirRange) {
  auto memory = Upload(Bytes(300, std::byte{7}));
  ASSERT_TRUE(device_->Zero(memory->data() + 100, 100, kStream).ok());
  ASSERT_TRUE(
      device_->Copy(memory->data() + 250, memory->data() + 150, 33, kStream)
          .ok());
  Bytes expected(300, std::byte{7});
  std::fill_n(expected.begin() + 100, 100, std::byte{0});
  std::fill_n(expected.begin() + 250, 33, std::byte{0});
  EXPECT_EQ(Download(*memory), expected);
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
