// The kernel behind all strided copies, and what it reads.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_COPY_KERNEL_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_COPY_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "plan/element_types.h"

namespace refit::cuda {

// A loop over rows. `magic` and `shift` divide a 32-bit number by `extent`.
struct KernelLoop {
  uint32_t extent;
  uint32_t magic;
  uint32_t shift;
  uint32_t from_entries;
  uint32_t to_entries;
  uint32_t reserved;
  uint64_t from_bytes;
  uint64_t to_bytes;
};

inline constexpr uint32_t kKernelLoopsMax = 4;

enum class KernelKind : uint32_t { kCopy = 0, kZero = 1, kCast = 2 };

// Rows of units. A unit is what one thread moves at a time: 1 to 16 bytes of a
// copy, one element of a cast. A row is contiguous in both tensors.
struct KernelCopy {
  KernelKind kind;
  uint32_t unit_bytes;  // of a copy; of a cast 0
  DType from_dtype;     // a copy's is that of its elements
  DType to_dtype;
  uint32_t from_entry;
  uint32_t to_entry;
  uint32_t row_units;
  uint32_t row_magic;  // divide by row_units
  uint32_t row_shift;
  uint32_t rows;
  uint32_t loops_count;
  uint64_t from_offset;
  uint64_t to_offset;
  KernelLoop loops[kKernelLoopsMax];  // innermost first
};

// A part of a copy that one block moves: kTileUnits units from
// `tile * kTileUnits` on.
struct KernelTile {
  uint32_t copy;
  uint32_t tile;
};

inline constexpr uint32_t kTileUnits = 2048;
// Of a batch, so that parts of tiles can be counted too.
inline constexpr uint32_t kTilesMax = 1u << 28;

// The numbers with which the kernel divides 32-bit dividends below 2^31 by
// `divisor`: q = umulhi(n, magic) >> shift, or n >> shift if magic is 0.
void DivisionBy(uint32_t divisor, uint32_t& magic, uint32_t& shift);

// All pointers are of device memory; `unless` may be null.
struct KernelBatch {
  std::byte* const* table = nullptr;
  const KernelCopy* copies = nullptr;
  const KernelTile* tiles = nullptr;
  uint32_t tiles_count = 0;
};

// Loads the kernel into the current device's context (tiles.h).
cudaError_t LoadCopyKernel();

// Enqueues the batch on `blocks_max` blocks at most.
cudaError_t LaunchCopies(const KernelBatch& batch, uint32_t blocks_max,
                         const uint32_t* unless, cudaStream_t stream);

}  // namespace refit::cuda

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_COPY_KERNEL_H_
