// The fence of ranks on GPUs: words that peers map.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_CUDA_FENCE_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_CUDA_FENCE_H_

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "control/token.h"
#include "executor/device/cuda/cuda_sharing.h"
#include "executor/device/cuda/fence_kernel.h"
#include "refit/device.h"

namespace refit {

class PinnedWords;

// Each rank counts the signals of each peer in a word that the peer writes. A
// rank that has its GPU alone keeps these words in device memory, and a kernel
// waits for them; the kernel looks at the host's word `abort` too.
//
// A rank that shares its GPU keeps them in pinned host memory, whoever writes
// them, and its streams wait themselves (cuStreamWaitValue64). A kernel that
// waits takes the GPU from the other rank's process for 0.3 ms or more, also
// where it waits for a peer on another GPU: with such kernels a refit of eight
// colocated ranks took 59.9 ms instead of 32.0 (4 x H100). The CPU releases the
// stream by a store to the word, which needs neither a free queue of the device
// nor a lock of the driver: another thread's cudaFree may hold that and wait
// for this very stream.
class CudaFence : public DeviceFence {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // `owner` and `sharing` must outlive the fence. `sharing_peers` use the same
  // device. Counters start at `first`, for tests of those that are large.
  static absl::StatusOr<std::unique_ptr<CudaFence>> Create(
      Device& owner, CudaSharing& sharing, int device, int32_t rank,
      int32_t world_size, absl::Span<const int32_t> sharing_peers,
      uint64_t first = 0);
  ~CudaFence() override;

  absl::StatusOr<std::string> Export() override;
  absl::Status Connect(absl::Span<const int32_t> peers,
                       absl::Span<const std::string> exported,
                       Deadline deadline) override;
  // Two ranks take turns: a grant one way, then what the other way reports. One
  // counter for each direction tells all.
  absl::Status Grant(absl::Span<const int32_t> origins, void* stream) override {
    return Signal(origins, stream);
  }
  absl::Status AwaitGrants(absl::Span<const int32_t> targets,
                           void* stream) override {
    return Await(targets, stream);
  }
  absl::Status Progress(absl::Span<const int32_t> targets,
                        void* stream) override {
    return Signal(targets, stream);
  }
  absl::Status Finish(absl::Span<const int32_t> targets,
                      void* stream) override {
    return Signal(targets, stream);
  }
  absl::Status AwaitFinishes(absl::Span<const int32_t> origins,
                             void* stream) override {
    return Await(origins, stream);
  }
  // Targets wait for words, not for this rank.
  void Withdraw() override {}
  const uint32_t* aborted() const override { return words_.aborted; }
  absl::Status ObserveAbort(void* stream) override;
  void Abort() override;
  std::vector<int32_t> Waiting() const override;

 private:
  using Peers = absl::Span<const int32_t>;

  // A peer of a rank that shares its device with any.
  struct Pair {
    uint64_t awaits = 0;          // awaits enqueued, not captured
    uint64_t signals = 0;         // likewise
    uint64_t* arrived = nullptr;  // its word here, as the device reaches it
    uint64_t* word = nullptr;     // this rank's word there, likewise
  };
  // A wait of a stream for a peer.
  struct Awaited {
    uint64_t number = 0;  // from 1
    int32_t peer = 0;
  };

  CudaFence(Device& owner, CudaSharing& sharing, int device, int32_t rank,
            int32_t world_size, Peers sharing_peers, uint64_t first);
  absl::Status Allocate();
  absl::Status PrepareMemoryOperations();
  absl::Status MapPeer(int32_t peer, const std::string& bytes,
                       std::vector<uint64_t*>& peers, Deadline deadline);
  absl::Status Signal(Peers peers, void* stream);
  absl::Status Await(Peers peers, void* stream);
  // Whether `stream` is captured.
  absl::StatusOr<bool> NoteCapture(void* stream);
  absl::Status Store(void* stream, uint64_t* word, uint64_t value);
  absl::Status StoreHalf(void* stream, uint32_t* half, uint32_t value);
  absl::Status SignalByStores(int32_t peer, void* stream);
  absl::Status AwaitWord(int32_t peer, void* stream);

  using Launch = cudaError_t (*)(const cuda::FenceWords&,
                                 const cuda::FencePeers&, cudaStream_t);
  absl::Status LaunchAll(Launch launch, Peers peers, void* stream,
                         const char* what);

  Device& owner_;
  CudaSharing& sharing_;
  const int device_;
  const int32_t world_size_;
  const uint64_t first_;
  cuda::FenceWords words_;
  // `arrived` of a rank that has its device alone, the counters, both tables
  // and the word `aborted`. Ranks of this process that signal here keep it.
  std::shared_ptr<DeviceMemory> memory_;
  // Words of the host as it reaches them itself; for the device see words_.
  uint32_t* host_waiting_ = nullptr;
  uint32_t* host_abort_ = nullptr;
  // How far the stream is among its own waits: twice the number of the last one
  // it has passed, or that of the one it is in, less 1.
  uint64_t* host_position_ = nullptr;
  uint64_t* position_ = nullptr;              // as the device reaches it
  std::unique_ptr<ExportedMemory> exported_;  // of `memory_`
  std::vector<std::unique_ptr<MappedMemory>> mapped_;

  // A graph needs the kernels: the counts of its replays are known to the
  // device alone. From the first capture on they signal, and come after each
  // wait of a stream, which then may end too early.
  bool was_captured_ = false;
  std::vector<Pair> pairs_;  // by rank; empty: no peer shares the device
  // Those that peers write, where one of them shares the device; else null.
  std::shared_ptr<PinnedWords> shown_;
  std::optional<Token> shown_token_;  // of shown_, since Export
  std::vector<std::shared_ptr<PinnedWords>> written_;  // those of peers
  int (*wait_word_)(void*, uint64_t, uint64_t, unsigned int) = nullptr;
  int (*write_word_)(void*, uint64_t, uint64_t, unsigned int) = nullptr;
  int (*write_half_)(void*, uint64_t, uint32_t, unsigned int) = nullptr;

  mutable std::mutex mutex_;
  uint64_t awaits_ = 0;           // guarded by mutex_
  std::deque<Awaited> awaiting_;  // not passed yet; guarded by mutex_
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_FENCE_H_
