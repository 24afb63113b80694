// Points of a GPU's streams that the host asks about: times and progress.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_CUDA_MARKS_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_CUDA_MARKS_H_

#include <memory>

#include "absl/status/statusor.h"
#include "refit/device.h"

namespace refit {

// Device::CreateTimer and CreateProgress for `device`, which is current.
absl::StatusOr<std::unique_ptr<DeviceTimer>> CreateCudaTimer(int device);
absl::StatusOr<std::unique_ptr<DeviceProgress>> CreateCudaProgress(int device);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_MARKS_H_
