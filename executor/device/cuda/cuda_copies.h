// Batches of strided copies on a GPU.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_CUDA_COPIES_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_CUDA_COPIES_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "refit/device.h"

namespace refit {

// Of a device.
struct CudaKernelLimits {
  uint32_t multiprocessors = 1;
  bool has_bulk_copies = false;
  // Those that a batch of kLink makes bulk copies on; one of kTwoLinks on twice
  // as many.
  uint32_t link_multiprocessors = 1;
};

// On the current device.
absl::StatusOr<std::unique_ptr<PreparedCopies>> PrepareCudaCopies(
    int device, const CudaKernelLimits& limits,
    absl::Span<std::byte* const> table, absl::Span<const CopyBatch> batches);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_COPIES_H_
