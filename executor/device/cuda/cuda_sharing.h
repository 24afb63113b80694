// Memory of a GPU that other ranks of the host map.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_CUDA_SHARING_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_CUDA_SHARING_H_

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "refit/device.h"

namespace refit {

// Device::Export and Device::Import for `device`. A rank of the same process
// gets the exporter's own addresses, with peer access between their devices;
// one of another process maps whole allocations through CUDA IPC. Ranges may
// lie anywhere inside allocations of cudaMalloc, as those of PyTorch's caching
// allocator do; its expandable segments cannot be shared so.
absl::StatusOr<std::string> ExportCudaMemory(
    int device, absl::Span<const MemoryRange> ranges);
absl::StatusOr<std::unique_ptr<MappedMemory>> ImportCudaMemory(
    int device, std::string_view exported);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_SHARING_H_
