// The kernels behind copies of what has changed, and what they read.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_DELTA_KERNEL_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_DELTA_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "executor/device/cuda/copy_kernel.h"
#include "refit/device.h"

namespace refit::cuda {

enum class DeltaKind : uint32_t { kChanged = 0, kMarked = 1, kKept = 2 };

// A batch's DeltaCopies, in the kernel's numbers.
struct KernelDelta {
  DeltaKind kind = DeltaKind::kChanged;
  uint32_t marks = 0;       // of a kChanged: 1, it marks
  uint32_t mark_shift = 0;  // log2 of the bytes of a mark
  uint32_t shadow_entries = 0;
  uint32_t marks_entries = 0;
  uint32_t counts_entry = 0;
};

// Loads the kernels into the current device's context (tiles.h).
cudaError_t LoadDeltaKernels();

// Enqueues the batch on `blocks_max` blocks at most.
cudaError_t LaunchDeltas(const KernelBatch& batch, const KernelDelta& delta,
                         uint32_t blocks_max, const uint32_t* unless,
                         cudaStream_t stream);

}  // namespace refit::cuda

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_DELTA_KERNEL_H_
