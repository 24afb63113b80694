// What the kernels over tiles of strided boxes share. Only for CUDA sources.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_KERNEL_TILES_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_KERNEL_TILES_H_

#include <cstddef>
#include <cstdint>

#include "executor/device/cast.h"
#include "executor/device/cuda/copy_kernel.h"

namespace refit::cuda {

inline constexpr uint32_t kThreads = 256;
// Units of a tile that one thread takes.
inline constexpr uint32_t kUnroll = kTileUnits / kThreads;

__device__ __forceinline__ uint32_t Divide(uint32_t n, uint32_t magic,
                                           uint32_t shift) {
  return magic == 0 ? n >> shift : __umulhi(n, magic) >> shift;
}

// Where a row begins in both tensors.
struct RowOffsets {
  uint64_t from_offset;
  uint64_t to_offset;
  uint32_t from_entry;
  uint32_t to_entry;
};

__device__ __forceinline__ RowOffsets OffsetsOfRow(const KernelCopy& copy,
                                                   uint32_t row) {
  RowOffsets at = {copy.from_offset, copy.to_offset, copy.from_entry,
                   copy.to_entry};
  for (uint32_t l = 0; l < copy.loops_count; ++l) {
    const KernelLoop& loop = copy.loops[l];
    const uint32_t rest = Divide(row, loop.magic, loop.shift);
    const uint32_t i = row - rest * loop.extent;
    at.from_offset += i * loop.from_bytes;
    at.to_offset += i * loop.to_bytes;
    at.from_entry += i * loop.from_entries;
    at.to_entry += i * loop.to_entries;
    row = rest;
  }
  return at;
}

// Calls body(k, row, column) for this thread's units of the tile, `kUnroll` of
// them; `row` is what `row_at` gives for its number. Where there is no unit,
// column == row_units and the row is `no_row`. A tile of several rows is
// unrolled `kRowsUnroll` times: each time compiles `row_at` and `body` anew.
template <uint32_t kRowsUnroll = kUnroll, typename RowAt, typename Row,
          typename Body>
__device__ __forceinline__ void ForEachTileUnit(const KernelCopy& copy,
                                                uint32_t tile,
                                                const RowAt& row_at,
                                                const Row& no_row,
                                                const Body& body) {
  const uint64_t first = uint64_t{tile} * kTileUnits;
  const uint32_t first_row = static_cast<uint32_t>(first / copy.row_units);
  const uint32_t first_column =
      static_cast<uint32_t>(first - uint64_t{first_row} * copy.row_units);
  if (first_column + kTileUnits <= copy.row_units) {
    // The tile lies in one row.
    const Row row = row_at(first_row);
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) {
      body(k, row, first_column + k * kThreads + threadIdx.x);
    }
    return;
  }
#pragma unroll kRowsUnroll
  for (uint32_t k = 0; k < kUnroll; ++k) {
    const uint32_t unit = first_column + k * kThreads + threadIdx.x;
    const uint32_t down = Divide(unit, copy.row_magic, copy.row_shift);
    if (first_row + down >= copy.rows) {
      body(k, no_row, copy.row_units);
      continue;
    }
    body(k, row_at(first_row + down), unit - down * copy.row_units);
  }
}

__device__ __forceinline__ uint32_t ElementBytes(DType dtype) {
  switch (dtype) {
    case element::kFp64:
    case element::kInt64:
      return 8;
    case element::kFp32:
    case element::kInt32:
      return 4;
    case element::kBf16:
    case element::kFp16:
    case element::kInt16:
      return 2;
    default:
      return 1;
  }
}

// Takes a copy into the block's shared memory. All threads call it, and wait
// for each other before, where one may still read the last copy, and
// afterwards.
__device__ __forceinline__ void LoadToShared(const KernelCopy& from,
                                             KernelCopy& shared) {
  constexpr uint32_t kWords = sizeof(KernelCopy) / sizeof(uint32_t);
  static_assert(kWords <= kThreads);
  if (threadIdx.x < kWords) {
    reinterpret_cast<uint32_t*>(&shared)[threadIdx.x] =
        reinterpret_cast<const uint32_t*>(&from)[threadIdx.x];
  }
}

__device__ __forceinline__ uint32_t LoadFp32(const std::byte* from, DType dtype,
                                             uint32_t at) {
  if (dtype == element::kFp32)
    return reinterpret_cast<const uint32_t*>(from)[at];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(from)[at];
  return dtype == element::kBf16 ? Fp32FromBf16(bits) : Fp32FromFp16(bits);
}

}  // namespace refit::cuda

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_KERNEL_TILES_H_
