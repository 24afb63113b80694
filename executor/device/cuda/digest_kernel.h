// The kernel that adds up state digests, and what it reads.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_DIGEST_KERNEL_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_DIGEST_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "executor/device/cuda/copy_kernel.h"
#include "refit/device_types.h"

namespace refit::cuda {

// What a KernelCopy that is digested adds to. Its `to_offset` and `to_bytes`
// are positions in the param's bytes.
struct KernelDigest {
  uint64_t param_key;
  uint64_t sum_offset;
  uint32_t sum_entry;
  uint32_t reserved;
};

// The tiles of a step. Blocks take `chunk` of them at a time.
struct KernelDigestStep {
  uint32_t begin;
  uint32_t end;
  uint32_t chunk;
};

struct DigestBatch {
  KernelBatch batch;
  const KernelDigest* digests;    // one for each of its copies
  const KernelDigestStep* steps;  // in memory of the device
  uint32_t* begun;                // chunks of each step that blocks have taken
};

// As LoadCopyKernel.
cudaError_t LoadDigestKernel();

// Enqueues what is not begun of the steps [steps_begin, steps_end), on
// `blocks_max` blocks at most.
cudaError_t LaunchDigests(const DigestBatch& digests, uint32_t steps_begin,
                          uint32_t steps_end, uint32_t blocks_max,
                          const uint32_t* unless, cudaStream_t stream);

}  // namespace refit::cuda

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_DIGEST_KERNEL_H_
