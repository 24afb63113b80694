// What reading memory costs on a GPU when nothing is done with it: the measure
// of kernels that read.
#ifndef REFIT_TESTS_GPU_PLAIN_READ_H_
#define REFIT_TESTS_GPU_PLAIN_READ_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace refit {

// Enqueues a read of `size_bytes`, a multiple of 16, at the aligned `data`; the
// xor of all words goes to `result`, which is of the device.
cudaError_t LaunchPlainRead(const void* data, uint64_t size_bytes,
                            uint32_t* result, cudaStream_t stream);

}  // namespace refit

#endif  // REFIT_TESTS_GPU_PLAIN_READ_H_
