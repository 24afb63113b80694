#include "tests/gpu/plain_read.h"

namespace refit {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kUnroll = 8;

__global__ void __launch_bounds__(kThreads)
    PlainRead(const uint4* data, uint64_t units, uint32_t* result) {
  uint32_t seen = 0;
  const uint64_t step = uint64_t{gridDim.x} * kThreads * kUnroll;
  for (uint64_t begin = uint64_t{blockIdx.x} * kThreads * kUnroll;
       begin < units; begin += step) {
    uint4 loaded[kUnroll];
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) {
      const uint64_t i = begin + k * kThreads + threadIdx.x;
      loaded[k] = i < units ? __ldcs(data + i) : uint4{};
    }
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) {
      seen ^= loaded[k].x ^ loaded[k].y ^ loaded[k].z ^ loaded[k].w;
    }
  }
  atomicXor(result, seen);
}

}  // namespace

cudaError_t LaunchPlainRead(const void* data, uint64_t size_bytes,
                            uint32_t* result, cudaStream_t stream) {
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors,
                                   cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  PlainRead<<<static_cast<uint32_t>(multiprocessors) * 4, kThreads, 0,
              stream>>>(static_cast<const uint4*>(data),
                        size_bytes / sizeof(uint4), result);
  return cudaGetLastError();
}

}  // namespace refit
