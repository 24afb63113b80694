// The kernel that quantizes blocks, and what it reads.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_QUANTIZE_KERNEL_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_QUANTIZE_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "executor/device/cuda/tiles.h"
#include "plan/element_types.h"

namespace refit::cuda {

// The three tensors of an operation, in this order.
enum QuantizeOperand : uint32_t { kInput = 0, kOutput = 1, kScales = 2 };
inline constexpr uint32_t kQuantizeOperands = 3;

// A count of blocks or matrices, and how numbers below 2^31 are divided by it
// (DivisionBy).
struct KernelQuantizeCount {
  uint64_t count;
  uint32_t magic;
  uint32_t shift;
};

// A loop over matrices.
struct KernelQuantizeLoop {
  KernelQuantizeCount extent;
  uint64_t bytes[kQuantizeOperands];
  uint32_t entries[kQuantizeOperands];
  uint32_t reserved;
};

inline constexpr uint32_t kQuantizeLoopsMax = 4;

// How far a run of rows of the input lies from its address; sums wrap.
struct KernelRowRun {
  uint64_t bytes;
  uint32_t entries;
  uint32_t reserved;
};

struct KernelQuantize {
  uint64_t first_tile;
  uint64_t blocks;  // of all matrices
  uint64_t rows;    // of one matrix
  uint64_t columns;
  KernelQuantizeCount blocks_down;
  KernelQuantizeCount blocks_across;
  KernelQuantizeCount run_rows;  // 0: the rows follow each other
  uint64_t offset[kQuantizeOperands];
  uint64_t row_bytes[kQuantizeOperands];
  uint32_t entry[kQuantizeOperands];
  uint32_t block_rows;
  uint32_t block_columns;
  uint32_t loops_count;
  DType dtype;  // of the input
  fb::ScaleFormat format;
  uint16_t over_link;  // 1: what is stored or loaded may cross NVLink
  uint32_t runs_begin;
  uint32_t reserved;
  KernelQuantizeLoop loops[kQuantizeLoopsMax];  // innermost first
};

// A tile is what a thread block does at a time: one block of the matrix, or
// many of few elements, one for each warp in turn.
inline constexpr uint32_t kSmallBlockElements = 256;
inline constexpr uint32_t kSmallBlocksPerTile = 256;

constexpr bool IsSmallBlock(uint32_t rows, uint32_t columns) {
  return uint64_t{rows} * columns <= kSmallBlockElements;
}

struct QuantizeBatch : TiledBatch<KernelQuantize> {
  const KernelRowRun* runs = nullptr;
};

// As LoadCopyKernel.
cudaError_t LoadQuantizeKernel();

// Enqueues the batch on `blocks_max` blocks at most. `unless` may be null.
cudaError_t LaunchQuantizes(const QuantizeBatch& batch, uint32_t blocks_max,
                            const uint32_t* unless, cudaStream_t stream);

}  // namespace refit::cuda

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_QUANTIZE_KERNEL_H_
