#include "executor/device/cuda/cuda_fence.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "executor/device/cuda/cuda_status.h"
#include "executor/device/cuda/driver_function.h"
#include "executor/device/cuda/scoped_device.h"

namespace refit {
absl::StatusOr<std::unique_ptr<CudaFence>> CudaFence::Create(
    Device& owner, int device, int32_t rank, int32_t world_size,
    bool shares_device) {
  std::unique_ptr<CudaFence> fence(new CudaFence(owner, device, world_size));
  absl::Status status = fence->Allocate(rank);
  if (status.ok()) status = fence->PrepareAbort();
  if (status.ok() && shares_device) status = fence->PrepareMemoryOperations();
  if (!status.ok()) return status;
  return fence;
}

absl::Status CudaFence::Allocate(int32_t rank) {
  const ScopedDevice current(device_);
  const size_t world = static_cast<size_t>(world_size_);
  absl::StatusOr<std::unique_ptr<DeviceMemory>> memory =
      owner_.Allocate((4 * world + 1) * sizeof(uint64_t));
  if (!memory.ok()) return memory.status();
  memory_ = *std::move(memory);
  void* host = nullptr;
  absl::Status status =
      CudaStatus(cudaHostAlloc(&host, (world + 1) * sizeof(uint32_t),
                               cudaHostAllocMapped | cudaHostAllocPortable),
                 "cudaHostAlloc");
  if (!status.ok()) return status;
  host_words_ = static_cast<uint32_t*>(host);
  std::fill_n(host_words_, world + 1, 0);
  void* mapped = nullptr;
  status = CudaStatus(cudaHostGetDevicePointer(&mapped, host, 0),
                      "cudaHostGetDevicePointer");
  auto* counters = reinterpret_cast<uint64_t*>(memory_->data());
  words_.rank = rank;
  words_.arrived = counters;
  words_.sent = counters + world;
  words_.taken = counters + 2 * world;
  words_.aborted = reinterpret_cast<uint32_t*>(counters + 3 * world);
  words_.peers = reinterpret_cast<uint64_t* const*>(counters + 3 * world + 1);
  words_.waiting = static_cast<uint32_t*>(mapped);
  words_.abort = static_cast<uint32_t*>(mapped) + world;
  return status;
}

absl::Status CudaFence::PrepareMemoryOperations() {
  const ScopedDevice current(device_);
  const auto wait = FindDriverFunction<MemoryOperation>("cuStreamWaitValue64");
  const auto write =
      FindDriverFunction<MemoryOperation>("cuStreamWriteValue64");
  if (!wait.ok()) return wait.status();
  if (!write.ok()) return write.status();
  wait_value_ = *wait;
  write_value_ = *write;
  awaits_.assign(static_cast<size_t>(world_size_), 0);
  signals_.assign(static_cast<size_t>(world_size_), 0);
  return absl::OkStatus();
}

absl::Status CudaFence::PrepareAbort() {
  const ScopedDevice current(device_);
  const size_t words = static_cast<size_t>(world_size_) + 1;
  void* host = nullptr;
  absl::Status status = CudaStatus(
      cudaHostAlloc(&host, words * sizeof(uint64_t), cudaHostAllocPortable),
      "cudaHostAlloc");
  if (!status.ok()) return status;
  host_released_ = static_cast<uint64_t*>(host);
  // Its lower half, of which `aborted` is one, is not 0 either.
  std::fill_n(host_released_, words, cuda::kReleased);
  absl::StatusOr<std::unique_ptr<DeviceStream>> stream = owner_.CreateStream();
  if (stream.ok()) abort_stream_ = *std::move(stream);
  return stream.status();
}

CudaFence::~CudaFence() {
  const ScopedDevice current(device_);
  abort_stream_.reset();
  cudaFreeHost(host_released_);
  cudaFreeHost(host_words_);
}

absl::StatusOr<std::string> CudaFence::Export() {
  const MemoryRange arrived = {
      .data = memory_->data(),
      .size_bytes = static_cast<uint64_t>(world_size_) * sizeof(uint64_t)};
  absl::StatusOr<std::unique_ptr<ExportedMemory>> exported =
      owner_.Export({&arrived, 1});
  if (!exported.ok()) return exported.status();
  exported_ = *std::move(exported);
  return exported_->bytes();
}

absl::Status CudaFence::Connect(absl::Span<const int32_t> peers,
                                absl::Span<const std::string> exported) {
  const ScopedDevice current(device_);
  const size_t world = static_cast<size_t>(world_size_);
  addresses_.assign(world, nullptr);
  mapped_.clear();
  for (size_t i = 0; i < peers.size(); ++i) {
    absl::StatusOr<std::unique_ptr<MappedMemory>> mapped =
        owner_.Import(exported[i], {world * sizeof(uint64_t)},
                      std::chrono::steady_clock::time_point::max());
    if (!mapped.ok()) {
      return absl::Status(mapped.status().code(),
                          absl::StrCat("fence of rank ", peers[i], ": ",
                                       mapped.status().message()));
    }
    addresses_[static_cast<size_t>(peers[i])] =
        reinterpret_cast<uint64_t*>((*mapped)->addresses().front());
    mapped_.push_back(*std::move(mapped));
  }
  absl::Status status = CudaStatus(
      cudaMemset(memory_->data(), 0, (3 * world + 1) * sizeof(uint64_t)),
      "cudaMemset");
  status.Update(CudaStatus(
      cudaMemcpy(memory_->data() + (3 * world + 1) * sizeof(uint64_t),
                 addresses_.data(), world * sizeof(uint64_t*),
                 cudaMemcpyHostToDevice),
      "cudaMemcpy"));
  status.Update(CudaStatus(cudaDeviceSynchronize(), "cudaDeviceSynchronize"));
  std::fill_n(host_words_, world + 1, 0);
  std::fill(awaits_.begin(), awaits_.end(), 0);
  std::fill(signals_.begin(), signals_.end(), 0);
  was_captured_ = false;
  return status;
}

absl::Status CudaFence::LaunchAll(Launch launch,
                                  absl::Span<const int32_t> peers, void* stream,
                                  const char* what) {
  const ScopedDevice current(device_);
  while (!peers.empty()) {
    cuda::FencePeers some;
    some.count = static_cast<int32_t>(
        std::min<size_t>(peers.size(), cuda::kFencePeersMax));
    std::copy_n(peers.begin(), some.count, some.peers);
    absl::Status status = CudaStatus(
        launch(words_, some, static_cast<cudaStream_t>(stream)), what);
    if (!status.ok()) return status;
    peers.remove_prefix(static_cast<size_t>(some.count));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> CudaFence::NoteCapture(void* stream) {
  const absl::StatusOr<bool> capturing = owner_.IsCapturing(stream);
  if (capturing.ok()) was_captured_ |= *capturing;
  return capturing;
}

// What the stream stored before comes before it, for all of the system.
absl::Status CudaFence::Store(void* stream, uint64_t* word, uint64_t value) {
  const int error =
      write_value_(stream, reinterpret_cast<uint64_t>(word), value,
                   /*CU_STREAM_WRITE_VALUE_DEFAULT=*/0);
  if (error == 0) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("cuStreamWriteValue64: CUDA driver error ", error));
}

// The device's own counts stay right, for kernels of later captures.
absl::Status CudaFence::SignalByStores(absl::Span<const int32_t> peers,
                                       void* stream) {
  const ScopedDevice current(device_);
  for (const int32_t peer : peers) {
    const auto at = static_cast<size_t>(peer);
    const uint64_t count = ++signals_[at];
    absl::Status status = Store(stream, &words_.sent[peer], count);
    status.Update(Store(stream, &addresses_[at][words_.rank], count));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Once there was a capture, the value may be too low, never too high: the
// kernel that follows then waits for the right one.
absl::Status CudaFence::AwaitWords(absl::Span<const int32_t> peers,
                                   void* stream) {
  const ScopedDevice current(device_);
  for (const int32_t peer : peers) {
    const uint64_t wanted = ++awaits_[static_cast<size_t>(peer)];
    const int error = wait_value_(
        stream, reinterpret_cast<uint64_t>(&words_.arrived[peer]), wanted,
        /*CU_STREAM_WAIT_VALUE_GEQ=*/0);
    if (error != 0) {
      return absl::InternalError(
          absl::StrCat("cuStreamWaitValue64: CUDA driver error ", error));
    }
    if (was_captured_) continue;
    absl::Status status = Store(stream, &words_.taken[peer], wanted);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CudaFence::Signal(absl::Span<const int32_t> peers, void* stream) {
  if (write_value_ != nullptr) {
    const absl::StatusOr<bool> capturing = NoteCapture(stream);
    if (!capturing.ok()) return capturing.status();
    if (!was_captured_) return SignalByStores(peers, stream);
  }
  return LaunchAll(cuda::LaunchSignal, peers, stream,
                   "launch of the signal kernel");
}

absl::Status CudaFence::Await(absl::Span<const int32_t> peers, void* stream) {
  if (wait_value_ != nullptr) {
    const absl::StatusOr<bool> capturing = NoteCapture(stream);
    if (!capturing.ok()) return capturing.status();
    if (!*capturing) {
      const absl::Status status = AwaitWords(peers, stream);
      if (!status.ok() || !was_captured_) return status;
    }
  }
  return LaunchAll(cuda::LaunchAwait, peers, stream,
                   "launch of the await kernel");
}

void CudaFence::Abort() {
  __atomic_store_n(&host_words_[world_size_], 1, __ATOMIC_SEQ_CST);
  // The counters only where streams wait for them: kernels look at the host's
  // word. `aborted` always, for copies whose grants were there before.
  const auto copy = [&](void* to, uint64_t words) {
    (void)owner_.Copy(static_cast<std::byte*>(to),
                      reinterpret_cast<const std::byte*>(host_released_),
                      words * sizeof(uint64_t), abort_stream_->get());
  };
  copy(words_.aborted, 1);
  if (wait_value_ != nullptr) {
    copy(words_.arrived, static_cast<uint64_t>(world_size_));
  }
}

std::vector<int32_t> CudaFence::Waiting() const {
  std::vector<int32_t> peers;
  for (int32_t peer = 0; peer < world_size_; ++peer) {
    if (__atomic_load_n(&host_words_[peer], __ATOMIC_SEQ_CST) != 0) {
      peers.push_back(peer);
    }
  }
  return peers;
}

}  // namespace refit
