// Digests cost a read of the memory, and little more.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iostream>
#include <limits>
#include <vector>

#include "refit/cuda_device.h"
#include "tests/gpu/plain_read.h"

namespace refit {
namespace {

constexpr uint64_t kBytes = uint64_t{8} << 30;
constexpr uint64_t kTensorBytes = uint64_t{1536} << 10;  // an expert's matrix
constexpr uint64_t kRowBytes = 768;  // of its half, cut across its rows

TEST(DigestSpeedTest, RatesBesideAPlainRead) {
  auto device = *CreateCudaDevice(0);
  auto memory = *device->Allocate(kBytes);
  auto sums = *device->Allocate(kBytes / kTensorBytes * sizeof(DigestSum) + 16);
  auto begun = *device->Allocate(sizeof(uint32_t));
  auto word = *device->Allocate(16);
  auto timer = *device->CreateTimer();
  const auto measure = [&](const std::function<void()>& enqueue) {
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 6; ++i) {
      EXPECT_TRUE(timer->Start(nullptr).ok());
      enqueue();
      EXPECT_TRUE(timer->Stop(nullptr).ok());
      EXPECT_TRUE(device->Synchronize(nullptr).ok());
      best = std::min(best, *timer->Seconds());
    }
    return static_cast<double>(kBytes) / best / 1e9;
  };
  // Each tensor is `rows` rows of a param that is twice as wide, or one row.
  const auto digest_rate = [&](uint64_t tensor_bytes, uint64_t place,
                               uint64_t rows = 1) {
    CopyBatch batch;
    batch.kind = CopyKind::kDigest;
    for (uint64_t at = 0; at + tensor_bytes <= kBytes; at += tensor_bytes) {
      StridedCopy& copy = batch.copies.emplace_back();
      copy.from = {0, at, DType::kBf16};
      copy.to = {0, place, DType::kBf16};
      copy.loops_begin = static_cast<uint32_t>(batch.loops.size());
      copy.loops_count = 2;
      const uint64_t row_bytes = tensor_bytes / rows;
      batch.loops.push_back({rows, {0, row_bytes}, {0, 2 * row_bytes}});
      batch.loops.push_back({row_bytes / 2, {0, 2}, {0, 2}});
      batch.digests.push_back(
          {.param_key = at, .entry = 1, .byte_offset = at / tensor_bytes * 16});
    }
    batch.begun = {.entry = 2, .byte_offset = 0};
    CopyBatch clear;
    clear.kind = CopyKind::kZero;
    clear.copies.emplace_back().to = {.entry = 2, .dtype = DType::kInt32};
    std::byte* const table[] = {memory->data(), sums->data(), begun->data()};
    const CopyBatch batches[] = {batch, clear};
    auto prepared = *device->Prepare(table, batches);
    return measure([&] {
      EXPECT_TRUE(prepared->Enqueue(1, nullptr).ok());
      EXPECT_TRUE(prepared->Enqueue(0, nullptr).ok());
    });
  };
  const double plain = measure([&] {
    EXPECT_EQ(
        LaunchPlainRead(memory->data(), kBytes,
                        reinterpret_cast<uint32_t*>(word->data()), nullptr),
        cudaSuccess);
  });
  const double large = digest_rate(kBytes, 0);
  const double small = digest_rate(kTensorBytes, 0);
  std::cout << "plain read " << plain << " GB/s; digest of one tensor " << large
            << ", of tensors of 1.5 MiB " << small << ", of such in rows of "
            << kRowBytes << " bytes "
            << digest_rate(kTensorBytes, 0, kTensorBytes / kRowBytes)
            << ", of tensors that begin inside a block "
            << digest_rate(kTensorBytes, 2) << '\n';
}

}  // namespace
}  // namespace refit
