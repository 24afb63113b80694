// What reading memory, and touching scattered parts of it, costs on a GPU when
// nothing else is done: the measure of kernels.
#ifndef REFIT_TESTS_GPU_PLAIN_READ_H_
#define REFIT_TESTS_GPU_PLAIN_READ_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace refit {

// Enqueues a read of `size_bytes`, a multiple of 16, at the aligned `data`; the
// xor of all words goes to `result`, which is of the device.
cudaError_t LaunchPlainRead(const void* data, uint64_t size_bytes,
                            uint32_t* result, cudaStream_t stream);

// Sectors of pieces of memory that follow each other: each piece has the same.
struct PlainSectors {
  const uint32_t* sectors = nullptr;  // of the device, ascending
  uint64_t count = 0;
  uint64_t sector_bytes = 0;
  uint64_t pieces = 0;
  uint64_t piece_bytes = 0;
};

// Enqueues a read of two bytes of each sector at `from`, and a store of two
// bytes to each at `to`; either may be null.
cudaError_t LaunchPlainTouch(const std::byte* from, std::byte* to,
                             const PlainSectors& sectors, uint32_t* result,
                             cudaStream_t stream);

}  // namespace refit

#endif  // REFIT_TESTS_GPU_PLAIN_READ_H_
