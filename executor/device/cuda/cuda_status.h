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

// Makes `device` the calling thread's current one, until the end of scope. The
// thread then has what it had before, also none: a cudaSetDevice back would make
// a context on the first GPU for a thread that has called no CUDA, in 0.2 s.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device);
  ~ScopedDevice();
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  bool is_pushed_ = false;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_STATUS_H_
