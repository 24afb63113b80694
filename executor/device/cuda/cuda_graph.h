// Work of a GPU that was recorded, to be launched again.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_CUDA_GRAPH_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_CUDA_GRAPH_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "refit/device.h"

namespace refit {

// Device::Record for `device`, which is current; `stream` is one of its own
// that nobody else uses.
absl::StatusOr<std::unique_ptr<DeviceGraph>> RecordCudaGraph(
    int device, Stream stream,
    const std::function<absl::Status(Stream)>& enqueue);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_GRAPH_H_
