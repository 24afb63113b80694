// The kernels of the fence between ranks, and of progress that the host sees.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_FENCE_KERNEL_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_FENCE_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace refit::cuda {

// What an abort raises counters to, so that streams that wait go on: more
// signals than there will ever be.
inline constexpr uint64_t kReleased = (uint64_t{1} << 62) + 1;

inline constexpr int kFencePeersMax = 128;  // of one launch

// Given by value, so that a launch needs no memory.
struct FencePeers {
  int32_t count = 0;
  int32_t peers[kFencePeersMax];
};

// Counters are by rank. All but `waiting` and `abort` are device memory; those
// two are host memory that the device reaches, slowly: only waits look there.
struct FenceWords {
  int32_t rank = 0;
  uint64_t* arrived = nullptr;       // raised by peers: their signals to here
  uint64_t* sent = nullptr;          // signals from here
  uint64_t* taken = nullptr;         // awaits here
  uint64_t* const* peers = nullptr;  // each peer's `arrived`, as mapped here
  uint32_t* waiting = nullptr;       // 1 while an Await waits for the peer
  uint32_t* abort = nullptr;         // one word: waits are to pass
  uint32_t* aborted = nullptr;       // one word: a wait has passed so
};

// As LoadCopyKernel.
cudaError_t LoadFenceKernels();

// Writes `value` to a word of host memory, as the device reaches it.
cudaError_t LaunchMark(uint32_t* word, uint32_t value, cudaStream_t stream);

cudaError_t LaunchSignal(const FenceWords& words, const FencePeers& peers,
                         cudaStream_t stream);
cudaError_t LaunchAwait(const FenceWords& words, const FencePeers& peers,
                        cudaStream_t stream);

}  // namespace refit::cuda

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_FENCE_KERNEL_H_
