#include "executor/device/cast.h"
#include "executor/device/cuda/apply_kernel.h"
#include "executor/device/element_function.h"

namespace refit::cuda {
namespace {

constexpr uint32_t kThreads = 256;

__device__ uint32_t Applied(const KernelApply& op, uint32_t bits) {
  return AppliedTo(bits, op.functions, op.functions_count);
}

__global__ void ApplyKernel(ApplyBatch batch, const uint32_t* unless) {
  if (IsStopped(unless)) return;
  for (uint64_t tile = blockIdx.x; tile < batch.tiles_count;
       tile += gridDim.x) {
    const KernelApply& op = OperationOf(batch, tile);
    std::byte* const elements = batch.table[op.entry] + op.offset;
    const uint64_t begin = (tile - op.first_tile) * kApplyTileElements;
    for (uint32_t at = threadIdx.x; at < kApplyTileElements; at += kThreads) {
      const uint64_t i = begin + at;
      if (i >= op.elements) break;
      if (op.dtype == element::kFp32) {
        auto* const word = reinterpret_cast<uint32_t*>(elements) + i;
        *word = Applied(op, *word);
        continue;
      }
      auto* const half = reinterpret_cast<uint16_t*>(elements) + i;
      *half = op.dtype == element::kBf16
                  ? Bf16FromFp32(Applied(op, Fp32FromBf16(*half)))
                  : Fp16FromFp32(Applied(op, Fp32FromFp16(*half)));
    }
  }
}

}  // namespace

cudaError_t LoadApplyKernel() { return LoadKernel(ApplyKernel); }

cudaError_t LaunchApplies(const ApplyBatch& batch, uint32_t blocks_max,
                          const uint32_t* unless, cudaStream_t stream) {
  return LaunchTiles(ApplyKernel, kThreads, batch, blocks_max, unless, stream);
}

}  // namespace refit::cuda
