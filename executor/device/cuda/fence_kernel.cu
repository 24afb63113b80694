#include <cuda/atomic>

#include "executor/device/cuda/fence_kernel.h"

namespace refit::cuda {
namespace {

using SystemHalf = ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_system>;

__device__ SystemHalf LowerHalf(uint64_t* word) {
  return SystemHalf(reinterpret_cast<uint32_t*>(word)[0]);
}

__device__ SystemHalf UpperHalf(uint64_t* word) {
  return SystemHalf(reinterpret_cast<uint32_t*>(word)[1]);
}

// The upper half first: read in this order too, the word is never ahead.
__device__ uint64_t CountIn(uint64_t* word) {
  const uint64_t upper = UpperHalf(word).load(::cuda::memory_order_acquire);
  return upper << 32 | LowerHalf(word).load(::cuda::memory_order_acquire);
}

// A wait shorter than this is not worth telling the host about.
constexpr int kSpinsBeforeTelling = 4096;

__global__ void SignalKernel(const FenceWords words, const FencePeers peers) {
  // Orders what earlier kernels of the stream stored, for peers to read or into
  // their memory, before the release below.
  __threadfence_system();
  if (threadIdx.x >= peers.count) return;
  const int32_t peer = peers.peers[threadIdx.x];
  const uint64_t count = ++words.sent[peer];
  uint64_t* const word = words.peers[peer];
  const auto lower = static_cast<uint32_t>(count);
  LowerHalf(word).store(lower, ::cuda::memory_order_release);
  if (lower != 0) return;
  UpperHalf(word).store(static_cast<uint32_t>(count >> 32),
                        ::cuda::memory_order_release);
}

__global__ void AwaitKernel(const FenceWords words, const FencePeers peers) {
  if (threadIdx.x < peers.count) {
    const int32_t peer = peers.peers[threadIdx.x];
    const uint64_t wanted = ++words.taken[peer];
    uint64_t* const arrived = words.arrived[peer];
    volatile uint32_t* const abort = words.abort;
    volatile uint32_t* const waiting = &words.waiting[peer];
    bool told = false;
    int spins = 0;
    while (CountIn(arrived) < wanted) {
      if (spins < kSpinsBeforeTelling) {
        ++spins;
        continue;
      }
      if (!told) *waiting = 1;
      told = true;
      if (*abort != 0) break;
      __nanosleep(500);
    }
    if (told) *waiting = 0;
  }
  __syncthreads();
  __threadfence_system();
}

__global__ void ObserveAbortKernel(const FenceWords words) {
  const volatile uint32_t* const abort = words.abort;
  if (*abort != 0) *words.aborted = 1;
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
  error = cudaFuncGetAttributes(&attributes, ObserveAbortKernel);
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

cudaError_t LaunchObserveAbort(const FenceWords& words, cudaStream_t stream) {
  ObserveAbortKernel<<<1, 1, 0, stream>>>(words);
  return cudaGetLastError();
}

}  // namespace refit::cuda
