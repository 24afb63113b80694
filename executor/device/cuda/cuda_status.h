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

// Makes `device` the calling thread's current one, until the end of scope.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device) : device_(device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = device;
    if (before_ != device_) cudaSetDevice(device_);
  }
  ~ScopedDevice() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  const int device_;
  int before_ = 0;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_STATUS_H_
