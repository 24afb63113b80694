// CUDA results as statuses, and the current device.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_CUDA_STATUS_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"

namespace refit {

// OK for cudaSuccess; else kResourceExhausted (no memory) or kInternal, with
// the call and CUDA's name and text for the error. Clears CUDA's last error, so
// that the worker's own calls do not see it.
absl::Status CudaStatus(cudaError_t error, const char* call);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_STATUS_H_
