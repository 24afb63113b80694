// Notices that memory of a GPU was freed.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_CUDA_MEMORY_WATCH_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_CUDA_MEMORY_WATCH_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "refit/device.h"

namespace refit {

// Device::Watch. The driver numbers allocations and the physical memory behind
// cuMemMap, and never uses a number again; one is asked for each allocation, of
// which a caching allocator has few, and for each page of its expandable
// segments.
absl::StatusOr<std::unique_ptr<MemoryWatch>> WatchCudaMemory(
    absl::Span<const MemoryRange> ranges);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_MEMORY_WATCH_H_
