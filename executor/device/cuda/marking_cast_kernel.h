// The kernel behind MarkingCast.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_MARKING_CAST_KERNEL_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_MARKING_CAST_KERNEL_H_

#include <cuda_runtime_api.h>

#include "refit/device_types.h"

namespace refit::cuda {

// Loads the kernels into the current device's context (tiles.h).
cudaError_t LoadMarkingCastKernels();

// Requires what CheckMarkingCast does.
cudaError_t LaunchMarkingCast(const MarkingCast& cast, cudaStream_t stream);

}  // namespace refit::cuda

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_MARKING_CAST_KERNEL_H_
