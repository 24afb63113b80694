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

template <bool kReads, bool kWrites>
__global__ void __launch_bounds__(kThreads)
    PlainTouch(const std::byte* from, std::byte* to, const PlainSectors of,
               uint32_t* result) {
  uint32_t seen = 0;
  const uint64_t step = kThreads * kUnroll;
  const uint64_t of_piece = (of.count + step - 1) / step;
  for (uint64_t b = blockIdx.x; b < of_piece * of.pieces; b += gridDim.x) {
    const uint64_t first = b % of_piece * step + threadIdx.x;
    const uint64_t piece = b / of_piece * of.piece_bytes;
    uint64_t at[kUnroll];
    uint16_t loaded[kUnroll] = {};
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) {
      // The last one again rather than a branch.
      const uint64_t i = min(first + k * kThreads, of.count - 1);
      at[k] = piece + of.sectors[i] * of.sector_bytes;
    }
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) {
      if (kReads) loaded[k] = *reinterpret_cast<const uint16_t*>(from + at[k]);
    }
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) {
      if (!kWrites) {
        seen ^= loaded[k];
      } else if (first + k * kThreads < of.count) {
        *reinterpret_cast<uint16_t*>(to + at[k]) = loaded[k];
      }
    }
  }
  if (!kWrites) atomicXor(result, seen);
}

cudaError_t BlocksOf(uint32_t each, uint32_t& blocks) {
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors,
                                   cudaDevAttrMultiProcessorCount, device);
  }
  blocks = static_cast<uint32_t>(multiprocessors) * each;
  return error;
}

}  // namespace

cudaError_t LaunchPlainRead(const void* data, uint64_t size_bytes,
                            uint32_t* result, cudaStream_t stream) {
  uint32_t blocks = 0;
  const cudaError_t error = BlocksOf(4, blocks);
  if (error != cudaSuccess) return error;
  PlainRead<<<blocks, kThreads, 0, stream>>>(
      static_cast<const uint4*>(data), size_bytes / sizeof(uint4), result);
  return cudaGetLastError();
}

cudaError_t LaunchPlainTouch(const std::byte* from, std::byte* to,
                             const PlainSectors& sectors, uint32_t* result,
                             cudaStream_t stream) {
  uint32_t blocks = 0;
  const cudaError_t error = BlocksOf(8, blocks);
  if (error != cudaSuccess || sectors.count == 0) return error;
  const auto kernel = to == nullptr     ? PlainTouch<true, false>
                      : from == nullptr ? PlainTouch<false, true>
                                        : PlainTouch<true, true>;
  kernel<<<blocks, kThreads, 0, stream>>>(from, to, sectors, result);
  return cudaGetLastError();
}

}  // namespace refit
