// The kernel that applies functions to elements, and what it reads.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_APPLY_KERNEL_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_APPLY_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "executor/device/cuda/tiles.h"
#include "refit/device_types.h"

namespace refit::cuda {

inline constexpr uint32_t kApplyFunctionsMax = 16;
// Elements that a thread block takes at a time.
inline constexpr uint32_t kApplyTileElements = 1024;

struct KernelApply {
  uint64_t first_tile;
  uint64_t elements;
  uint64_t offset;
  uint32_t entry;
  uint32_t functions_count;
  ElementFunction functions[kApplyFunctionsMax];
  DType dtype;
};

using ApplyBatch = TiledBatch<KernelApply>;

// As LoadCopyKernel.
cudaError_t LoadApplyKernel();

// Enqueues the batch on `blocks_max` blocks at most. `unless` may be null.
cudaError_t LaunchApplies(const ApplyBatch& batch, uint32_t blocks_max,
                          const uint32_t* unless, cudaStream_t stream);

}  // namespace refit::cuda

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_APPLY_KERNEL_H_
