#include "executor/device/cast.h"
#include "executor/device/cuda/apply_kernel.h"
#include "executor/device/element_function.h"

namespace refit::cuda {
namespace {

constexpr uint32_t kThreads = 256;

// The last operation that begins at `tile` or before it.
__device__ const KernelApply& OperationOf(const ApplyBatch& batch,
                                          uint64_t tile) {
  uint32_t begin = 0;
  uint32_t end = batch.applies_count;
  while (end - begin > 1) {
    const uint32_t middle = begin + (end - begin) / 2;
    (batch.applies[middle].first_tile <= tile ? begin : end) = middle;
  }
  return batch.applies[begin];
}

__device__ uint32_t Applied(const KernelApply& op, uint32_t bits) {
  return AppliedTo(bits, op.functions, op.functions_count);
}

__global__ void ApplyKernel(ApplyBatch batch, const uint32_t* unless) {
  if (unless != nullptr &&
      *static_cast<const volatile uint32_t*>(unless) != 0) {
    return;
  }
  for (uint64_t tile = blockIdx.x; tile < batch.tiles_count;
       tile += gridDim.x) {
    const KernelApply& op = OperationOf(batch, tile);
    std::byte* const elements = batch.table[op.entry] + op.offset;
    const uint64_t begin = (tile - op.first_tile) * kApplyTileElements;
    for (uint32_t at = threadIdx.x; at < kApplyTileElements; at += kThreads) {
      const uint64_t i = begin + at;
      if (i >= op.elements) break;
      if (op.dtype == DType::kFp32) {
        auto* const word = reinterpret_cast<uint32_t*>(elements) + i;
        *word = Applied(op, *word);
        continue;
      }
      auto* const half = reinterpret_cast<uint16_t*>(elements) + i;
      *half = op.dtype == DType::kBf16
                  ? Bf16FromFp32(Applied(op, Fp32FromBf16(*half)))
                  : Fp16FromFp32(Applied(op, Fp32FromFp16(*half)));
    }
  }
}

}  // namespace

cudaError_t LoadApplyKernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, ApplyKernel);
}

cudaError_t LaunchApplies(const ApplyBatch& batch, uint32_t blocks_max,
                          const uint32_t* unless, cudaStream_t stream) {
  if (batch.tiles_count == 0) return cudaSuccess;
  const auto blocks = static_cast<uint32_t>(
      batch.tiles_count < blocks_max ? batch.tiles_count : blocks_max);
  ApplyKernel<<<blocks, kThreads, 0, stream>>>(batch, unless);
  return cudaGetLastError();
}

}  // namespace refit::cuda
