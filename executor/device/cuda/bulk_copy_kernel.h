// Copies between GPUs that take few multiprocessors: bulk copies through shared
// memory, which the copy engine of a multiprocessor (TMA) does by itself.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_BULK_COPY_KERNEL_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_BULK_COPY_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "executor/device/cuda/copy_kernel.h"

namespace refit::cuda {

// Whether the kernel can move `copy`: its rows are aligned to what a bulk copy
// wants, and long enough for it.
bool IsBulkCopy(const KernelCopy& copy);

// Whether the device has bulk copies. Loads the kernel into the current
// device's context then, as LoadCopyKernel does.
cudaError_t LoadBulkCopyKernel(int device, bool& has_bulk_copies);

// Enqueues the batch, whose copies are all IsBulkCopy, on at most `blocks_max`
// blocks, of which a multiprocessor runs one.
cudaError_t LaunchBulkCopies(const KernelBatch& batch, uint32_t blocks_max,
                             const uint32_t* unless, cudaStream_t stream);

}  // namespace refit::cuda

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_BULK_COPY_KERNEL_H_
