#include "executor/device/cuda/cuda_status.h"

#include "absl/strings/str_cat.h"

namespace refit {

absl::Status CudaStatus(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  return absl::Status(error == cudaErrorMemoryAllocation
                          ? absl::StatusCode::kResourceExhausted
                          : absl::StatusCode::kInternal,
                      absl::StrCat(call, ": ", cudaGetErrorName(error), ", ",
                                   cudaGetErrorString(error)));
}

}  // namespace refit
