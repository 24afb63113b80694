// Which allocations of a GPU hold tensors.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_CUDA_ALLOCATIONS_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_CUDA_ALLOCATIONS_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "refit/device.h"

namespace refit {

// One of cudaMalloc, or a page of cuMemMap (see cuda_pages.h).
struct CudaAllocation {
  uint64_t base = 0;
  uint64_t size_bytes = 0;
  size_t range = 0;  // the first that has a byte in it
};

// Visits each allocation that holds a byte of `ranges`, once. Error:
// kFailedPrecondition, an address is not device memory; the allocations that
// there are were visited all the same.
absl::Status VisitCudaAllocations(
    absl::Span<const MemoryRange> ranges,
    const std::function<void(const CudaAllocation&)>& visit);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_ALLOCATIONS_H_
