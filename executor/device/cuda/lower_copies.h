// Batches of copies in the form that kernels read, still on the host.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_LOWER_COPIES_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_LOWER_COPIES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "executor/device/cuda/apply_kernel.h"
#include "executor/device/cuda/copy_kernel.h"
#include "executor/device/cuda/digest_kernel.h"
#include "executor/device/cuda/quantize_kernel.h"
#include "plan/schedule/copy_batch.h"

namespace refit {

// How many tiles of a step are of bulk copies, and how many are not.
struct KernelStep {
  uint32_t others = 0;
  uint32_t bulk = 0;
};

inline KernelStep SumOfSteps(absl::Span<const KernelStep> steps) {
  KernelStep sum;
  for (const KernelStep& step : steps) {
    sum.others += step.others;
    sum.bulk += step.bulk;
  }
  return sum;
}

// A batch in the kernel's form, on the host.
struct KernelProgram {
  std::vector<cuda::KernelCopy> copies;
  // Step by step; those of a step interleaved over links.
  std::vector<cuda::KernelTile> tiles;
  // The same tiles with those of bulk copies last, for a run on few
  // multiprocessors. Empty if `tiles` are in such an order.
  std::vector<cuda::KernelTile> parted_tiles;
  std::vector<KernelStep> steps;  // of the tiles
  // One for each copy where these are digested; else empty.
  std::vector<cuda::KernelDigest> digests;
  CopyAddress begun;  // CopyBatch's
  std::vector<cuda::KernelQuantize> quantizes;
  std::vector<cuda::KernelRowRun> row_runs;
  uint64_t quantize_tiles = 0;
  // Numbers of these tiles, interleaved over links; empty if there is one link.
  std::vector<uint32_t> quantize_order;
  std::vector<cuda::KernelApply> applies;
  uint64_t apply_tiles = 0;
  DeviceShare share = DeviceShare::kAll;
};

// `table` holds the addresses that the copies will meet: units are as wide as
// these, the offsets and the strides allow.
KernelProgram LowerForKernel(const CopyBatch& batch,
                             absl::Span<std::byte* const> table);

// Of a copy whose `to` is a position in a message, which rows continue without
// gaps. Ascending as these.
std::vector<cuda::KernelCopy> LowerPositions(
    const StridedCopy& copy, absl::Span<const CopyLoop> loops,
    absl::Span<std::byte* const> table);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_LOWER_COPIES_H_
