// The driver's functions, without linking the driver.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_DRIVER_FUNCTION_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_DRIVER_FUNCTION_H_

#include <cuda_runtime_api.h>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "executor/device/cuda/cuda_status.h"

namespace refit {

// Error: kInternal, this driver has none of that name.
template <typename Function>
absl::StatusOr<Function> FindDriverFunction(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  absl::Status status =
      CudaStatus(cudaGetDriverEntryPointByVersion(name, &found, 12000,
                                                  cudaEnableDefault, &result),
                 "cudaGetDriverEntryPointByVersion");
  if (!status.ok()) return status;
  if (found == nullptr) {
    return absl::InternalError(absl::StrCat("the driver has no ", name));
  }
  return reinterpret_cast<Function>(found);
}

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_DRIVER_FUNCTION_H_
