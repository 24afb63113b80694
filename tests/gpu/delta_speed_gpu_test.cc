// Storing what workers marked reads little more than the marks and what has
// one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "refit/cuda_device.h"

namespace refit {
namespace {

constexpr uint64_t kBytes = uint64_t{4} << 30;
constexpr uint64_t kTensors = 64;
constexpr uint64_t kTensorBytes = kBytes / kTensors;
constexpr uint64_t kWholeColumns = 16384;  // of a tensor of bf16

struct Case {
  const char* text;
  uint64_t columns;  // of a slice
};

class DeltaSpeedTest : public testing::TestWithParam<Case> {};

// All slices of all tensors, one behind the other, as a rank sends them to the
// ranks that hold them. Both ends are on one GPU.
TEST_P(DeltaSpeedTest, MarkedCopies) {
  const auto& [text, columns] = GetParam();
  auto device = *CreateCudaDevice(0);
  auto from = *device->Allocate(kBytes);
  auto to = *device->Allocate(kBytes);
  auto marks = *device->Allocate(kBytes / 16);
  auto counts = *device->Allocate(sizeof(DeltaCounts));
  auto timer = *device->CreateTimer();
  const uint64_t rows = kTensorBytes / 2 / kWholeColumns;
  // Entries: tensors, receivers, marks, counts.
  std::vector<std::byte*> table;
  for (DeviceMemory* const memory : {from.get(), to.get(), marks.get()}) {
    const uint64_t each = memory->size_bytes() / kTensors;
    for (uint64_t t = 0; t < kTensors; ++t) {
      table.push_back(memory->data() + t * each);
    }
  }
  table.push_back(counts->data());
  CopyBatch batch;
  batch.kind = CopyKind::kMarked;
  batch.delta = {.shadow_entries = 0,
                 .marks_entries = 2 * kTensors,
                 .bytes_per_mark = 2,
                 .marks = false,
                 .counts_entry = 3 * kTensors};
  for (uint64_t t = 0; t < kTensors; ++t) {
    for (uint64_t first = 0; first < kWholeColumns; first += columns) {
      const auto width = std::min(columns, kWholeColumns - first);
      batch.copies.push_back(
          {.from = {t, first * 2, DType::kBf16},
           .to = {t + kTensors, first * 2, DType::kBf16},
           .loops_begin = static_cast<uint32_t>(batch.loops.size()),
           .loops_count = 2});
      const CopyStride down = {0, kWholeColumns * 2};
      batch.loops.push_back({.extent = rows, .from = down, .to = down});
      batch.loops.push_back({.extent = width, .from = {0, 2}, .to = {0, 2}});
    }
  }
  auto copies = *device->Prepare(table, {batch});
  for (const double share : {0.0, 0.001, 0.01, 0.1, 1.0}) {
    std::mt19937_64 random(1);
    std::bernoulli_distribution is_marked(share);
    std::vector<uint32_t> bits(kTensorBytes / 2 / 32);
    uint64_t units = 0;
    for (uint32_t& word : bits) {
      for (uint32_t bit = 0; bit < 32; ++bit) {
        word |= uint32_t{is_marked(random)} << bit;
      }
      for (uint32_t unit = 0; unit < 4; ++unit) {
        units += (word >> 8 * unit & 0xff) != 0 ? 1 : 0;
      }
    }
    for (uint64_t t = 0; t < kTensors; ++t) {
      ASSERT_TRUE(device
                      ->Copy(table[2 * kTensors + t],
                             reinterpret_cast<const std::byte*>(bits.data()),
                             bits.size() * 4, nullptr)
                      .ok());
    }
    ASSERT_TRUE(device->Synchronize(nullptr).ok());
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(timer->Start(nullptr).ok());
      ASSERT_TRUE(copies->Enqueue(0, nullptr).ok());
      ASSERT_TRUE(timer->Stop(nullptr).ok());
      ASSERT_TRUE(device->Synchronize(nullptr).ok());
      best = std::min(best, *timer->Seconds());
    }
    std::printf(
        "%s, %5.1f %% marked: %7.3f ms for %.1f GB, marks %4.0f GB/s, "
        "%5.2f GB moved\n",
        text, 100 * share, best * 1e3, kBytes / 1e9, kBytes / 16 / best / 1e9,
        static_cast<double>(units * 16 * kTensors) / 1e9);
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, DeltaSpeedTest,
                         testing::Values(Case{"runs", kWholeColumns},
                                         Case{"rows of 4 KiB", 2048},
                                         Case{"rows of 768 bytes", 384},
                                         Case{"rows of 784 bytes", 392}));

}  // namespace
}  // namespace refit
