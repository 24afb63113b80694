// The kernels of the fence between ranks, and of progress that the host sees.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_FENCE_KERNEL_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_FENCE_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace refit::cuda {

// A word that counts signals is written in halves. The peer stores the lower
// one; only every 2^32 signals it stores the upper one, afterwards, so that the
// word is never ahead of the count. An abort stores this into the upper half:
// a signal that is still on its way cannot undo that, and the word is beyond
// all signals that there will ever be.
inline constexpr uint32_t kReleasedHalf = uint32_t{1} << 30;

inline constexpr int kFencePeersMax = 128;  // of one launch

// Given by value, so that a launch needs no memory.
struct FencePeers {
  int32_t count = 0;
  int32_t peers[kFencePeersMax];
};

// By rank. The tables, counters and `aborted` are in device memory. `waiting`
// and `abort` are host memory that the device reaches, slowly, and so are the
// words of a rank that shares its device, whichever peer writes them.
struct FenceWords {
  int32_t rank = 0;
  uint64_t* const* arrived = nullptr;  // words here: what peers signalled
  uint64_t* const* peers = nullptr;    // words there: what this rank signalled
  uint64_t* sent = nullptr;            // signals from here
  uint64_t* taken = nullptr;           // awaits here
  uint32_t* waiting = nullptr;         // 1 while an Await waits for the peer
  uint32_t* abort = nullptr;           // one word: waits are to pass
  uint32_t* aborted = nullptr;         // one word: ObserveAbort has seen that
};

// As LoadCopyKernel.
cudaError_t LoadFenceKernels();

// Writes `value` to a word of host memory, as the device reaches it.
cudaError_t LaunchMark(uint32_t* word, uint32_t value, cudaStream_t stream);

cudaError_t LaunchSignal(const FenceWords& words, const FencePeers& peers,
                         cudaStream_t stream);
cudaError_t LaunchAwait(const FenceWords& words, const FencePeers& peers,
                        cudaStream_t stream);
// What moves bytes looks at device memory: were the host's word read by each
// block of a copy, the copy would take half a millisecond more.
cudaError_t LaunchObserveAbort(const FenceWords& words, cudaStream_t stream);

}  // namespace refit::cuda

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_FENCE_KERNEL_H_
