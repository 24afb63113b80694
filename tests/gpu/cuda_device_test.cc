#include "refit/cuda_device.h"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "executor/device/cast.h"
#include "executor/device/cuda/cuda_fence.h"
#include "executor/device/cuda/cuda_sharing.h"
#include "executor/device/cuda/driver_function.h"
#include "tests/executor/apply_conformance.h"
#include "tests/executor/device_conformance.h"
#include "tests/executor/digest_conformance.h"
#include "tests/executor/marking_cast_conformance.h"
#include "tests/executor/message_code_conformance.h"
#include "tests/executor/quantize_conformance.h"
#include "tests/gpu/mapped_segment.h"
#include "tests/gpu/spin.h"

namespace refit {
namespace {

INSTANTIATE_TEST_SUITE_P(Cuda, ApplyConformance,
                         testing::Values(DeviceFactory([] {
                           return *CreateCudaDevice(0);
                         })));
INSTANTIATE_TEST_SUITE_P(Cuda, DigestConformance,
                         testing::Values(DeviceFactory([] {
                           return *CreateCudaDevice(0);
                         })));
INSTANTIATE_TEST_SUITE_P(Cuda, MarkingCastConformance,
                         testing::Values(DeviceFactory([] {
                           return *CreateCudaDevice(0);
                         })));
INSTANTIATE_TEST_SUITE_P(Cuda, MessageCodeConformance,
                         testing::Values(DeviceFactory([] {
                           return *CreateCudaDevice(0);
                         })));
INSTANTIATE_TEST_SUITE_P(Cuda, QuantizeConformance,
                         testing::Values(DeviceFactory([] {
                           return *CreateCudaDevice(0);
                         })));
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceConformance,
                         testing::Values(DeviceFactory([] {
                           return *CreateCudaDevice(0);
                         })));

std::vector<std::byte> RunCast(Device& device, DType from, DType to,
                               const std::vector<std::byte>& input) {
  const uint64_t elements = input.size() / DTypeBytes(from);
  auto source = *device.Allocate(input.size());
  auto target = *device.Allocate(elements * DTypeBytes(to));
  EXPECT_TRUE(
      device.Copy(source->data(), input.data(), input.size(), nullptr).ok());
  CopyBatch batch;
  CopyLoop& loop = batch.loops.emplace_back();
  loop.extent = elements;
  loop.from.bytes = DTypeBytes(from);
  loop.to.bytes = DTypeBytes(to);
  StridedCopy& copy = batch.copies.emplace_back();
  copy.from = {0, 0, from};
  copy.to = {1, 0, to};
  copy.loops_count = 1;
  std::byte* const table[] = {source->data(), target->data()};
  auto prepared = *device.Prepare(table, {&batch, 1});
  EXPECT_TRUE(prepared->Enqueue(0, nullptr).ok());
  std::vector<std::byte> output(target->size_bytes());
  EXPECT_TRUE(
      device.Copy(output.data(), target->data(), output.size(), nullptr).ok());
  EXPECT_TRUE(device.Synchronize(nullptr).ok());
  return output;
}

std::vector<std::byte> HostCast(DType from, DType to,
                                const std::vector<std::byte>& input) {
  const uint64_t elements = input.size() / DTypeBytes(from);
  std::vector<std::byte> output(elements * DTypeBytes(to));
  FindCast(from, to)(output.data(), input.data(), elements);
  return output;
}

TEST(CudaCastTest, EveryHalfIsCastAsTheHostCastsIt) {
  auto device = *CreateCudaDevice(0);
  std::vector<std::byte> every(2 << 16);
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    std::memcpy(&every[2 * bits], &half, sizeof(half));
  }
  for (const DType from : {DType::kBf16, DType::kFp16}) {
    for (const DType to : {DType::kBf16, DType::kFp16, DType::kFp32}) {
      if (from == to) continue;
      EXPECT_TRUE(RunCast(*device, from, to, every) ==
                  HostCast(from, to, every));
    }
  }
}

TEST(CudaCastTest, EveryFourThousandthFloatIsCastAsTheHostCastsIt) {
  auto device = *CreateCudaDevice(0);
  std::vector<std::byte> floats;
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 4093) {
    const auto word = static_cast<uint32_t>(bits);
    const auto* bytes = reinterpret_cast<const std::byte*>(&word);
    floats.insert(floats.end(), bytes, bytes + sizeof(word));
  }
  for (const DType to : {DType::kBf16, DType::kFp16}) {
    EXPECT_TRUE(RunCast(*device, DType::kFp32, to, floats) ==
                HostCast(DType::kFp32, to, floats));
  }
}

// Two ranks of this process on one device.
class CudaFenceTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    for (int32_t rank = 0; rank < 2; ++rank) {
      const int32_t peer = 1 - rank;
      fences_[rank] = *CudaFence::Create(
          *device_, sharing_, 0, rank, 2,
          absl::Span<const int32_t>(&peer, GetParam() ? 1 : 0), first_);
      streams_[rank] = *device_->CreateStream();
    }
    for (int32_t rank = 0; rank < 2; ++rank) {
      const int32_t peer = 1 - rank;
      const std::string exported = *fences_[peer]->Export();
      ASSERT_TRUE(fences_[rank]
                      ->Connect({&peer, 1}, {&exported, 1},
                                std::chrono::steady_clock::time_point::max())
                      .ok());
    }
  }

  bool Reached(DeviceEvent& event) {
    for (int i = 0; i < 200 && !*event.Reached(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return *event.Reached();
  }

  uint64_t first_ = 0;
  std::unique_ptr<Device> device_ = *CreateCudaDevice(0);
  CudaSharing sharing_{0};
  std::unique_ptr<DeviceFence> fences_[2];
  std::unique_ptr<DeviceStream> streams_[2];
};

// The counters come to the upper half of their words.
class CudaFenceOfManySignalsTest : public CudaFenceTest {
 protected:
  CudaFenceOfManySignalsTest() { first_ = (uint64_t{7} << 32) - 3; }
};

INSTANTIATE_TEST_SUITE_P(SharesDevice, CudaFenceTest, testing::Bool());
INSTANTIATE_TEST_SUITE_P(SharesDevice, CudaFenceOfManySignalsTest,
                         testing::Bool());

TEST_P(CudaFenceOfManySignalsTest, AwaitPassesOncePerSignal) {
  const int32_t peers[] = {1, 0};
  auto event = *device_->CreateEvent();
  const auto await = [&] {
    return fences_[0]->AwaitGrants({&peers[0], 1}, streams_[0]->get());
  };
  const auto signal = [&] {
    return fences_[1]->Grant({&peers[1], 1}, streams_[1]->get());
  };
  for (int i = 0; i < 8; ++i) {
    SCOPED_TRACE(i);
    ASSERT_TRUE(await().ok());
    ASSERT_TRUE(event->Record(streams_[0]->get()).ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(*event->Reached());
    ASSERT_TRUE(signal().ok());
    EXPECT_TRUE(Reached(*event));
  }
  // A peer may be ahead.
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(signal().ok());
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(await().ok());
  ASSERT_TRUE(event->Record(streams_[0]->get()).ok());
  EXPECT_TRUE(Reached(*event));
}

// The stream of a rank that goes on writes to words of one that is gone.
TEST_P(CudaFenceTest, AFenceThatIsGoneIsSignalledAllTheSame) {
  const int32_t peers[] = {1, 0};
  fences_[0].reset();
  auto memory = *device_->Allocate(1 << 20);
  ASSERT_EQ(cudaMemset(memory->data(), 0, 1 << 20), cudaSuccess);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(fences_[1]->Grant({&peers[1], 1}, streams_[1]->get()).ok());
  }
  EXPECT_TRUE(device_->Synchronize(streams_[1]->get()).ok());
  std::vector<uint64_t> words((1 << 20) / sizeof(uint64_t), 1);
  ASSERT_EQ(
      cudaMemcpy(words.data(), memory->data(), 1 << 20, cudaMemcpyDeviceToHost),
      cudaSuccess);
  EXPECT_EQ(words, std::vector<uint64_t>(words.size(), 0));
}

TEST_P(CudaFenceTest, AwaitPassesOncePerSignal) {
  auto event = *device_->CreateEvent();
  const int32_t peers[] = {1, 0};
  ASSERT_TRUE(fences_[1]->Grant({&peers[1], 1}, streams_[1]->get()).ok());
  ASSERT_TRUE(fences_[0]->AwaitGrants({&peers[0], 1}, streams_[0]->get()).ok());
  ASSERT_TRUE(event->Record(streams_[0]->get()).ok());
  EXPECT_TRUE(Reached(*event));
  ASSERT_TRUE(fences_[0]->AwaitGrants({&peers[0], 1}, streams_[0]->get()).ok());
  ASSERT_TRUE(event->Record(streams_[0]->get()).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(*event->Reached());
  EXPECT_EQ(fences_[0]->Waiting(), std::vector<int32_t>{1});
  ASSERT_TRUE(fences_[1]->Grant({&peers[1], 1}, streams_[1]->get()).ok());
  EXPECT_TRUE(Reached(*event));
  EXPECT_TRUE(fences_[0]->Waiting().empty());
}

TEST_P(CudaFenceTest, AbortLetsAwaitPassAndStopsWhatFollows) {
  auto event = *device_->CreateEvent();
  const int32_t peer = 1;
  ASSERT_TRUE(fences_[0]->AwaitGrants({&peer, 1}, streams_[0]->get()).ok());
  ASSERT_TRUE(event->Record(streams_[0]->get()).ok());
  ASSERT_TRUE(fences_[0]->ObserveAbort(streams_[0]->get()).ok());
  EXPECT_FALSE(*event->Reached());
  fences_[0]->Abort();
  EXPECT_TRUE(Reached(*event));
  ASSERT_TRUE(device_->Synchronize(streams_[0]->get()).ok());
  uint32_t word = 0;
  ASSERT_TRUE(
      device_
          ->Copy(reinterpret_cast<std::byte*>(&word),
                 reinterpret_cast<const std::byte*>(fences_[0]->aborted()),
                 sizeof(word), nullptr)
          .ok());
  ASSERT_TRUE(device_->Synchronize(nullptr).ok());
  EXPECT_EQ(word, 1);
  EXPECT_TRUE(fences_[0]->Waiting().empty());
}

// Peers may have signalled behind work of theirs, and the signal arrives after
// the abort: waits beyond it pass all the same.
TEST_P(CudaFenceTest, ASignalAfterAnAbortDoesNotUndoIt) {
  const int32_t peers[] = {1, 0};
  auto event = *device_->CreateEvent();
  auto signalled = *device_->CreateEvent();
  // Both streams are busy at first, the one that waits for longer.
  for (const int32_t rank : {0, 1}) {
    ASSERT_EQ(LaunchSpin(std::chrono::milliseconds(rank == 0 ? 600 : 300),
                         static_cast<cudaStream_t>(streams_[rank]->get())),
              cudaSuccess);
  }
  ASSERT_TRUE(fences_[1]->Grant({&peers[1], 1}, streams_[1]->get()).ok());
  ASSERT_TRUE(signalled->Record(streams_[1]->get()).ok());
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(
        fences_[0]->AwaitGrants({&peers[0], 1}, streams_[0]->get()).ok());
  }
  ASSERT_TRUE(event->Record(streams_[0]->get()).ok());
  fences_[0]->Abort();
  EXPECT_FALSE(*signalled->Reached());
  EXPECT_TRUE(Reached(*event));
  // Without this nothing of the device could be freed, were it wrong.
  ASSERT_TRUE(fences_[1]->Grant({&peers[1], 1}, streams_[1]->get()).ok());
}

TEST_P(CudaFenceTest, FencesReplayInAGraph) {
  const int32_t peers[] = {1, 0};
  cudaGraph_t graphs[2];
  cudaGraphExec_t replays[2];
  for (int32_t rank = 0; rank < 2; ++rank) {
    auto stream = static_cast<cudaStream_t>(streams_[rank]->get());
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
              cudaSuccess);
    ASSERT_TRUE(fences_[rank]->Grant({&peers[rank], 1}, stream).ok());
    ASSERT_TRUE(fences_[rank]->AwaitGrants({&peers[rank], 1}, stream).ok());
    ASSERT_EQ(cudaStreamEndCapture(stream, &graphs[rank]), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&replays[rank], graphs[rank], 0),
              cudaSuccess);
  }
  for (int i = 0; i < 10; ++i) {
    for (int32_t rank = 0; rank < 2; ++rank) {
      ASSERT_EQ(cudaGraphLaunch(replays[rank], static_cast<cudaStream_t>(
                                                   streams_[rank]->get())),
                cudaSuccess);
    }
  }
  auto event = *device_->CreateEvent();
  for (int32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(event->Record(streams_[rank]->get()).ok());
    EXPECT_TRUE(Reached(*event));
    cudaGraphExecDestroy(replays[rank]);
    cudaGraphDestroy(graphs[rank]);
  }
}

// Each turn waits for both signals of its own, and not for more.
TEST_P(CudaFenceTest, FencesAreCapturedBetweenOthers) {
  const int32_t peers[] = {1, 0};
  auto event = *device_->CreateEvent();
  const auto signal = [&](int32_t rank) {
    return fences_[rank]->Grant({&peers[rank], 1}, streams_[rank]->get());
  };
  const auto await = [&](int32_t rank) {
    return fences_[rank]->AwaitGrants({&peers[rank], 1}, streams_[rank]->get());
  };
  std::unique_ptr<DeviceGraph> graphs[2];
  for (int turn = 0; turn < 6; ++turn) {
    SCOPED_TRACE(turn);
    if (turn == 2) {
      for (int32_t rank = 0; rank < 2; ++rank) {
        auto graph = device_->Record([&](Stream stream) {
          const auto* const peer = &peers[rank];
          absl::Status status =
              rank == 1 ? absl::OkStatus()
                        : fences_[rank]->AwaitGrants({peer, 1}, stream);
          status.Update(fences_[rank]->Grant({peer, 1}, stream));
          if (rank == 1) {
            status.Update(fences_[rank]->AwaitGrants({peer, 1}, stream));
          }
          return status;
        });
        ASSERT_TRUE(graph.ok()) << graph.status();
        graphs[rank] = *std::move(graph);
      }
    }
    const bool replays = turn == 3 || turn == 4;
    if (replays) {
      ASSERT_TRUE(graphs[0]->Launch(streams_[0]->get()).ok());
    } else {
      ASSERT_TRUE(await(0).ok());
      ASSERT_TRUE(signal(0).ok());
    }
    ASSERT_TRUE(event->Record(streams_[0]->get()).ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_FALSE(*event->Reached());
    if (replays) {
      ASSERT_TRUE(graphs[1]->Launch(streams_[1]->get()).ok());
    } else {
      ASSERT_TRUE(signal(1).ok());
      ASSERT_TRUE(await(1).ok());
    }
    EXPECT_TRUE(Reached(*event));
    ASSERT_TRUE(event->Record(streams_[1]->get()).ok());
    EXPECT_TRUE(Reached(*event));
  }
}

TEST(CudaMemoryWatchTest, FreedMemoryIsNoticedThoughItsAddressIsInUseAgain) {
  auto device = *CreateCudaDevice(0);
  constexpr size_t kBytes = 32 << 20;
  void* kept = nullptr;
  void* freed = nullptr;
  ASSERT_EQ(cudaMalloc(&kept, kBytes), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&freed, kBytes), cudaSuccess);
  const auto range = [](void* data, size_t offset) {
    return MemoryRange{static_cast<std::byte*>(data) + offset, 256};
  };
  const std::vector<MemoryRange> ranges = {
      {nullptr, 0}, range(kept, 0), range(kept, 512), range(freed, 1024)};
  auto watch = device->Watch(ranges);
  ASSERT_TRUE(watch.ok()) << watch.status();
  EXPECT_EQ((*watch)->FirstGone(), std::nullopt);
  ASSERT_EQ(cudaFree(freed), cudaSuccess);
  EXPECT_EQ((*watch)->FirstGone(), 3);
  void* again = nullptr;
  ASSERT_EQ(cudaMalloc(&again, kBytes), cudaSuccess);
  printf("the address is %s again\n", again == freed ? "in use" : "not in use");
  EXPECT_EQ((*watch)->FirstGone(), 3);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  cudaFree(again);
  cudaFree(kept);
}

TEST(CudaMemoryWatchTest, PagesThatWereMappedAnewAreNoticed) {
  auto device = *CreateCudaDevice(0);
  MappedSegment segment(3);
  for (size_t page = 0; page < 3; ++page) segment.Map(page);
  const size_t page_bytes = segment.page_bytes();
  const std::vector<MemoryRange> ranges = {
      segment.Range(0, 256), segment.Range(page_bytes - 256, 2 * page_bytes)};
  auto watch = device->Watch(ranges);
  ASSERT_TRUE(watch.ok()) << watch.status();
  EXPECT_EQ((*watch)->FirstGone(), std::nullopt);
  segment.Unmap(2);
  EXPECT_EQ((*watch)->FirstGone(), 1);
  segment.Map(2);
  EXPECT_EQ((*watch)->FirstGone(), 1);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(CudaGraphTest, RecordedWorkRunsAtEachLaunchOnly) {
  auto device = *CreateCudaDevice(0);
  auto progress = *device->CreateProgress();
  auto graph =
      device->Record([&](Stream stream) { return progress->Mark(5, stream); });
  ASSERT_TRUE(graph.ok()) << graph.status();
  ASSERT_NE(*graph, nullptr);
  ASSERT_TRUE(device->Synchronize(nullptr).ok());
  EXPECT_EQ(progress->reached(), 0);
  for (int launch = 0; launch < 3; ++launch) {
    progress->Reset();
    ASSERT_TRUE((*graph)->Launch(nullptr).ok());
    ASSERT_TRUE(device->Synchronize(nullptr).ok());
    EXPECT_EQ(progress->reached(), 5);
  }
}

TEST(CudaGraphTest, WorkThatFailsToRecordLeavesTheDeviceAsItWas) {
  auto device = *CreateCudaDevice(0);
  EXPECT_EQ(device->Record([](Stream) { return absl::InternalError("no"); })
                .status()
                .message(),
            "no");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  auto memory = device->Allocate(16);
  EXPECT_TRUE(memory.ok());
}

TEST(CudaDeviceTest, MissingDeviceIsNamed) {
  EXPECT_EQ(CreateCudaDevice(1000).status().code(),
            absl::StatusCode::kNotFound);
}

// In a process of its own. A new thread's current GPU is the first, without a
// context. 0: it is so after calls on the second, and they made no context on
// the first.
[[noreturn]] void CallTheSecondGpuFromANewThread() {
  bool is_first_left_alone = false;
  std::thread([&] {
    auto device = *CreateCudaDevice(1);
    auto memory = *device->Allocate(1024);
    cudaPointerAttributes where = {};
    int current = -1;
    unsigned flags = 0;
    int is_active = -1;
    const auto state =
        *FindDriverFunction<PFN_cuDevicePrimaryCtxGetState_v7000>(
            "cuDevicePrimaryCtxGetState");
    is_first_left_alone =
        cudaPointerGetAttributes(&where, memory->data()) == cudaSuccess &&
        where.device == 1 && cudaGetDevice(&current) == cudaSuccess &&
        current == 0 && state(0, &flags, &is_active) == CUDA_SUCCESS &&
        is_active == 0;
  }).join();
  std::_Exit(is_first_left_alone ? 0 : 1);
}

TEST(CudaDeviceTest, ANewThreadMakesNoContextOnTheFirstGpu) {
  if (CudaDeviceCount() < 2) GTEST_SKIP() << "needs two GPUs";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(CallTheSecondGpuFromANewThread(), testing::ExitedWithCode(0), "");
}

TEST(CudaDeviceTest, HostMemoryCannotBeExported) {
  auto device = *CreateCudaDevice(0);
  std::vector<std::byte> memory(64);
  const MemoryRange range = {memory.data(), memory.size()};
  EXPECT_EQ(device->Export({&range, 1}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace refit
