#include <cuda/atomic>

#include "executor/device/cuda/fence_kernel.h"

namespace refit::cuda {
namespace {

using SystemWord = ::cuda::atomic_ref<uint64_t, ::cuda::thread_scope_system>;

// A wait shorter than this is not worth telling the host about.
constexpr int kSpinsBeforeTelling = 4096;

__global__ void SignalKernel(const FenceWords words, const FencePeers peers) {
  // Orders what earlier kernels of the stream stored, for peers to read or into
  // their memory, before the release below.
  __threadfence_system();
  if (threadIdx.x >= peers.count) return;
  const int32_t peer = peers.peers[threadIdx.x];
  const uint64_t count = ++words.sent[peer];
  SystemWord(words.peers[peer][words.rank])
      .store(count, ::cuda::memory_order_release);
}

__global__ void AwaitKernel(const FenceWords words, const FencePeers peers) {
  if (threadIdx.x < peers.count) {
    const int32_t peer = peers.peers[threadIdx.x];
    const uint64_t wanted = ++words.taken[peer];
    SystemWord arrived(words.arrived[peer]);
    volatile uint32_t* const abort = words.abort;
    volatile uint32_t* const waiting = &words.waiting[peer];
    bool told = false;
    int spins = 0;
    while (arrived.load(::cuda::memory_order_acquire) < wanted) {
      if (spins < kSpinsBeforeTelling) {
        ++spins;
        continue;
      }
      if (!told) *waiting = 1;
      told = true;
      if (*abort != 0) {
        *words.aborted = 1;
        break;
      }
      __nanosleep(500);
    }
    if (told) *waiting = 0;
    // Raised by an abort, not by a peer.
    if (arrived.load(::cuda::memory_order_relaxed) >= kReleased) {
      *words.aborted = 1;
    }
  }
  __syncthreads();
  __threadfence_system();
}

__global__ void MarkKernel(volatile uint32_t* word, uint32_t value) {
  *word = value;
}

}  // namespace

cudaError_t LoadFenceKernels() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, SignalKernel);
  if (error != cudaSuccess) return error;
  error = cudaFuncGetAttributes(&attributes, AwaitKernel);
  if (error != cudaSuccess) return error;
  return cudaFuncGetAttributes(&attributes, MarkKernel);
}

cudaError_t LaunchMark(uint32_t* word, uint32_t value, cudaStream_t stream) {
  MarkKernel<<<1, 1, 0, stream>>>(word, value);
  return cudaGetLastError();
}

cudaError_t LaunchSignal(const FenceWords& words, const FencePeers& peers,
                         cudaStream_t stream) {
  SignalKernel<<<1, kFencePeersMax, 0, stream>>>(words, peers);
  return cudaGetLastError();
}

cudaError_t LaunchAwait(const FenceWords& words, const FencePeers& peers,
                        cudaStream_t stream) {
  AwaitKernel<<<1, kFencePeersMax, 0, stream>>>(words, peers);
  return cudaGetLastError();
}

}  // namespace refit::cuda
