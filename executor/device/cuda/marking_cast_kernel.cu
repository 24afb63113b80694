#include "executor/device/cast.h"
#include "executor/device/cuda/marking_cast_kernel.h"
#include "executor/device/cuda/tiles.h"

namespace refit::cuda {
namespace {

constexpr uint32_t kCastThreads = 256;
constexpr uint32_t kWordBits = 32;  // and threads of a warp
constexpr uint64_t kCastBlocksMax = 8192;

// A warp takes a word of the bitmap: its lanes are the bits.
template <bool to_bf16>
__global__ void __launch_bounds__(kCastThreads)
    MarkingCastKernel(const uint32_t* from, uint16_t* to, uint32_t* changes,
                      uint64_t first, uint64_t end) {
  const uint32_t lane = threadIdx.x % kWordBits;
  const uint64_t warps = uint64_t{gridDim.x} * (kCastThreads / kWordBits);
  const uint64_t warp = uint64_t{blockIdx.x} * (kCastThreads / kWordBits) +
                        threadIdx.x / kWordBits;
  const uint64_t words_end = (end + kWordBits - 1) / kWordBits;
  for (uint64_t word = first / kWordBits + warp; word < words_end;
       word += warps) {
    const uint64_t element = word * kWordBits + lane;
    bool differs = false;
    if (element >= first && element < end) {
      const uint64_t i = element - first;
      const uint32_t bits = __ldcs(from + i);
      const uint16_t made = to_bf16 ? Bf16FromFp32(bits) : Fp16FromFp32(bits);
      differs = made != to[i];
      if (differs) to[i] = made;
    }
    const uint32_t marks = __ballot_sync(0xffffffffu, differs);
    // Casts of neighbouring elements may share the word.
    if (lane == 0 && marks != 0) atomicOr(changes + word, marks);
  }
}

}  // namespace

cudaError_t LoadMarkingCastKernels() {
  const cudaError_t loaded = LoadKernel(MarkingCastKernel<true>);
  return loaded == cudaSuccess ? LoadKernel(MarkingCastKernel<false>) : loaded;
}

cudaError_t LaunchMarkingCast(const MarkingCast& cast, cudaStream_t stream) {
  if (cast.elements == 0) return cudaSuccess;
  const uint64_t end = cast.first_element + cast.elements;
  const uint64_t words =
      (end - 1) / kWordBits - cast.first_element / kWordBits + 1;
  constexpr uint64_t kWordsOfBlock = kCastThreads / kWordBits;
  const uint64_t wanted = (words + kWordsOfBlock - 1) / kWordsOfBlock;
  const auto blocks =
      static_cast<uint32_t>(wanted < kCastBlocksMax ? wanted : kCastBlocksMax);
  const auto* const from = reinterpret_cast<const uint32_t*>(cast.from);
  auto* const to = static_cast<uint16_t*>(cast.to);
  if (cast.to_dtype == element::kBf16) {
    MarkingCastKernel<true><<<blocks, kCastThreads, 0, stream>>>(
        from, to, cast.changes, cast.first_element, end);
  } else {
    MarkingCastKernel<false><<<blocks, kCastThreads, 0, stream>>>(
        from, to, cast.changes, cast.first_element, end);
  }
  return cudaGetLastError();
}

}  // namespace refit::cuda
