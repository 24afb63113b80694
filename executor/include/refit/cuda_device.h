// CudaDevice: one GPU.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_CUDA_DEVICE_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_CUDA_DEVICE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "refit/device.h"

namespace refit {

// Streams are cudaStream_t; a null one is the legacy default stream. The
// calling thread's current device is left as it was.
//
// Error: kNotFound, no such device or no driver; kUnimplemented, a build
// without CUDA.
absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int ordinal);

// 0 without a driver or a GPU, and in a build without CUDA.
int CudaDeviceCount();

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_CUDA_DEVICE_H_
