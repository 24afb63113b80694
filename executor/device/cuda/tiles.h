// Batches of operations that are cut into tiles, which thread blocks take in
// turns.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_TILES_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_TILES_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace refit::cuda {

// All pointers are of device memory. `Operation::first_tile` counts in the
// batch; the tiles of an operation follow each other.
template <typename Operation>
struct TiledBatch {
  std::byte* const* table = nullptr;
  const Operation* operations = nullptr;
  uint32_t operations_count = 0;
  uint64_t tiles_count = 0;
  // The order in which tiles are taken. Null: as they are numbered.
  const uint32_t* order = nullptr;
};

// Loads a kernel into the current device's context. Otherwise its first launch
// would, and wait for the whole device: for ever, if a fence of another rank on
// it waits for what comes after that launch.
template <typename... Arguments>
cudaError_t LoadKernel(void (*kernel)(Arguments...)) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes,
                               reinterpret_cast<const void*>(kernel));
}

#ifdef __CUDACC__

// The operation that tile `tile` belongs to.
template <typename Operation>
__device__ const Operation& OperationOf(const TiledBatch<Operation>& batch,
                                        uint64_t tile) {
  uint32_t begin = 0;
  uint32_t end = batch.operations_count;
  while (end - begin > 1) {
    const uint32_t middle = begin + (end - begin) / 2;
    (batch.operations[middle].first_tile <= tile ? begin : end) = middle;
  }
  return batch.operations[begin];
}

// Whether the word at `unless`, which may be null, is not 0. Read once a block,
// whose threads must all call this and agree.
__device__ inline bool IsStopped(const uint32_t* unless) {
  __shared__ uint32_t stop;
  if (threadIdx.x == 0) {
    stop =
        unless != nullptr ? *static_cast<const volatile uint32_t*>(unless) : 0;
  }
  __syncthreads();
  return stop != 0;
}

// Enqueues a kernel of `batch` on `blocks_max` blocks at most.
template <typename Batch>
cudaError_t LaunchTiles(void (*kernel)(Batch, const uint32_t*),
                        uint32_t threads, const Batch& batch,
                        uint32_t blocks_max, const uint32_t* unless,
                        cudaStream_t stream) {
  if (batch.tiles_count == 0) return cudaSuccess;
  const auto blocks = static_cast<uint32_t>(
      batch.tiles_count < blocks_max ? batch.tiles_count : blocks_max);
  kernel<<<blocks, threads, 0, stream>>>(batch, unless);
  return cudaGetLastError();
}

#endif

}  // namespace refit::cuda

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_TILES_H_
