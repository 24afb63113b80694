// The kernel that applies functions to elements, and what it reads.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_APPLY_KERNEL_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_APPLY_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "refit/device.h"

namespace refit::cuda {

inline constexpr uint32_t kApplyFunctionsMax = 16;
// Elements that a thread block takes at a time.
inline constexpr uint32_t kApplyTileElements = 1024;

struct KernelApply {
  uint64_t first_tile;  // of the batch; tiles of an operation follow each other
  uint64_t elements;
  uint64_t offset;
  uint32_t entry;
  uint32_t functions_count;
  ElementFunction functions[kApplyFunctionsMax];
  DType dtype;
};

// All pointers are of device memory; `unless` may be null.
struct ApplyBatch {
  std::byte* const* table = nullptr;
  const KernelApply* applies = nullptr;
  uint32_t applies_count = 0;
  uint64_t tiles_count = 0;
};

// As LoadCopyKernel.
cudaError_t LoadApplyKernel();

// Enqueues the batch on `blocks_max` blocks at most.
cudaError_t LaunchApplies(const ApplyBatch& batch, uint32_t blocks_max,
                          const uint32_t* unless, cudaStream_t stream);

}  // namespace refit::cuda

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_APPLY_KERNEL_H_
