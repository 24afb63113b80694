// What a build without CUDA says of GPUs.
#include "refit/cuda_device.h"

namespace refit {

int CudaDeviceCount() { return 0; }

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int) {
  return absl::UnimplementedError("this build has no CUDA");
}

}  // namespace refit
