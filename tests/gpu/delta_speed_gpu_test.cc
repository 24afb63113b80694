// Storing what changed reads little more than what tells it and what did: the
// marks, or both copies of all.
#include <cuda_runtime_api.h>
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

// Bits of a tensor's elements, each set with probability `share`.
std::vector<uint32_t> RandomBits(double share) {
  std::mt19937_64 random(1);
  std::bernoulli_distribution is_set(share);
  std::vector<uint32_t> bits(kTensorBytes / 2 / 32);
  for (uint32_t& word : bits) {
    for (uint32_t bit = 0; bit < 32; ++bit) {
      word |= uint32_t{is_set(random)} << bit;
    }
  }
  return bits;
}

// Of all tensors, what units of 16 bytes with a set bit hold.
double MovedGigabytes(const std::vector<uint32_t>& bits) {
  uint64_t units = 0;
  for (const uint32_t word : bits) {
    for (uint32_t unit = 0; unit < 4; ++unit) {
      units += (word >> 8 * unit & 0xff) != 0 ? 1 : 0;
    }
  }
  return static_cast<double>(units * 16 * kTensors) / 1e9;
}

class DeltaSpeedTest : public testing::TestWithParam<Case> {
 protected:
  // Entries of the table: tensors, receivers, `beside`, counts.
  static constexpr uint64_t kReceivers = kTensors;
  static constexpr uint64_t kBeside = 2 * kTensors;
  static constexpr uint64_t kCounts = 3 * kTensors;

  void FillTable(DeviceMemory& receivers, DeviceMemory& beside) {
    for (DeviceMemory* const memory : {from_.get(), &receivers, &beside}) {
      const uint64_t each = memory->size_bytes() / kTensors;
      for (uint64_t t = 0; t < kTensors; ++t) {
        table_.push_back(memory->data() + t * each);
      }
    }
    table_.push_back(counts_->data());
  }

  // All slices of all tensors, one behind the other, as a rank sends them to
  // the ranks that hold them.
  static CopyBatch Slices(CopyKind kind) {
    const uint64_t columns = GetParam().columns;
    const uint64_t rows = kTensorBytes / 2 / kWholeColumns;
    CopyBatch batch;
    batch.kind = kind;
    batch.delta = {.shadow_entries = kBeside,
                   .marks_entries = kBeside,
                   .bytes_per_mark = 2,
                   .marks = false,
                   .counts_entry = kCounts};
    for (uint64_t t = 0; t < kTensors; ++t) {
      for (uint64_t first = 0; first < kWholeColumns; first += columns) {
        const auto width = std::min(columns, kWholeColumns - first);
        batch.copies.push_back(
            {.from = {t, first * 2, DType::kBf16},
             .to = {t + kReceivers, first * 2, DType::kBf16},
             .loops_begin = static_cast<uint32_t>(batch.loops.size()),
             .loops_count = 2});
        const CopyStride down = {0, kWholeColumns * 2};
        batch.loops.push_back({.extent = rows, .from = down, .to = down});
        batch.loops.push_back({.extent = width, .from = {0, 2}, .to = {0, 2}});
      }
    }
    return batch;
  }

  void Copy(std::byte* to, const void* from, uint64_t size_bytes) {
    ASSERT_TRUE(
        device_
            ->Copy(to, static_cast<const std::byte*>(from), size_bytes, nullptr)
            .ok());
  }

  // The least seconds of four times, each after `prepare`.
  template <typename Prepare>
  double Seconds(PreparedCopies& copies, const Prepare& prepare) {
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 4; ++i) {
      prepare();
      EXPECT_TRUE(timer_->Start(nullptr).ok());
      EXPECT_TRUE(copies.Enqueue(0, nullptr).ok());
      EXPECT_TRUE(timer_->Stop(nullptr).ok());
      EXPECT_TRUE(device_->Synchronize(nullptr).ok());
      best = std::min(best, *timer_->Seconds());
    }
    return best;
  }

  // Stores what differs from a snapshot.
  void StoreChanges(DeviceMemory& receivers, const char* where) {
    auto snapshot = *device_->Allocate(kBytes);
    auto before = *device_->Allocate(kTensorBytes);
    auto after = *device_->Allocate(kTensorBytes);
    FillTable(receivers, *snapshot);
    auto copies = *device_->Prepare(table_, {Slices(CopyKind::kChanged)});
    std::vector<uint16_t> values(kTensorBytes / 2, 1);
    Copy(before->data(), values.data(), kTensorBytes);
    for (const double share : {0.0, 0.001, 0.01, 0.03, 0.1}) {
      const std::vector<uint32_t> bits = RandomBits(share);
      for (uint64_t i = 0; i < values.size(); ++i) {
        values[i] = 1 + (bits[i / 32] >> i % 32 & 1);
      }
      Copy(after->data(), values.data(), kTensorBytes);
      const double best = Seconds(*copies, [&] {
        for (uint64_t t = 0; t < kTensors; ++t) {
          Copy(table_[t], after->data(), kTensorBytes);
          Copy(table_[kBeside + t], before->data(), kTensorBytes);
        }
      });
      std::printf(
          "%s, %s, %5.1f %% changed: %7.3f ms, both copies %4.0f GB/s, "
          "%5.2f GB moved\n",
          GetParam().text, where, 100 * share, best * 1e3,
          2 * kBytes / best / 1e9, MovedGigabytes(bits));
    }
  }

  const std::unique_ptr<Device> device_ = *CreateCudaDevice(0);
  const std::unique_ptr<DeviceTimer> timer_ = *device_->CreateTimer();
  const std::unique_ptr<DeviceMemory> from_ = *device_->Allocate(kBytes);
  const std::unique_ptr<DeviceMemory> counts_ =
      *device_->Allocate(sizeof(DeltaCounts));
  std::vector<std::byte*> table_;
};

TEST_P(DeltaSpeedTest, MarkedCopies) {
  auto to = *device_->Allocate(kBytes);
  auto marks = *device_->Allocate(kBytes / 16);
  FillTable(*to, *marks);
  auto copies = *device_->Prepare(table_, {Slices(CopyKind::kMarked)});
  for (const double share : {0.0, 0.001, 0.01, 0.1, 1.0}) {
    const std::vector<uint32_t> bits = RandomBits(share);
    for (uint64_t t = 0; t < kTensors; ++t) {
      Copy(table_[kBeside + t], bits.data(), bits.size() * 4);
    }
    ASSERT_TRUE(device_->Synchronize(nullptr).ok());
    const double best = Seconds(*copies, [] {});
    std::printf(
        "%s, %5.1f %% marked: %7.3f ms for %.1f GB, marks %4.0f GB/s, "
        "%5.2f GB moved\n",
        GetParam().text, 100 * share, best * 1e3, kBytes / 1e9,
        kBytes / 16 / best / 1e9, MovedGigabytes(bits));
  }
}

TEST_P(DeltaSpeedTest, ChangedCopies) {
  auto to = *device_->Allocate(kBytes);
  StoreChanges(*to, "same GPU");
}

TEST_P(DeltaSpeedTest, ChangedCopiesToAnotherGpu) {
  if (CudaDeviceCount() < 2) GTEST_SKIP() << "needs two GPUs";
  ASSERT_TRUE(device_->MakeCurrent().ok());
  const cudaError_t error = cudaDeviceEnablePeerAccess(1, 0);
  ASSERT_TRUE(error == cudaSuccess ||
              error == cudaErrorPeerAccessAlreadyEnabled);
  cudaGetLastError();
  auto other = *CreateCudaDevice(1);
  auto to = *other->Allocate(kBytes);
  StoreChanges(*to, "another GPU");
}

INSTANTIATE_TEST_SUITE_P(Cuda, DeltaSpeedTest,
                         testing::Values(Case{"runs", kWholeColumns},
                                         Case{"rows of 4 KiB", 2048},
                                         Case{"rows of 768 bytes", 384},
                                         Case{"rows of 784 bytes", 392}));

}  // namespace
}  // namespace refit
