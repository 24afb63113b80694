#include <bit>

#include "executor/device/cast.h"
#include "executor/device/cuda/copy_kernel.h"
#include "executor/device/cuda/kernel_tiles.h"
#include "executor/device/cuda/tiles.h"

namespace refit::cuda {
namespace {

// Where a row begins in both tensors.
struct Row {
  const std::byte* from;
  std::byte* to;
};

// Calls body(k, row, column) as ForEachTileUnit does.
template <typename Body>
__device__ __forceinline__ void ForEachUnit(const KernelCopy& copy,
                                            std::byte* const* table,
                                            uint32_t tile, const Body& body) {
  const auto row_at = [&](uint32_t row) {
    const RowOffsets at = OffsetsOfRow(copy, row);
    return Row{table[at.from_entry] + at.from_offset,
               table[at.to_entry] + at.to_offset};
  };
  ForEachTileUnit(copy, tile, row_at, Row{nullptr, nullptr}, body);
}

template <typename Unit>
__device__ void CopyTile(const KernelCopy& copy, std::byte* const* table,
                         uint32_t tile) {
  Unit units[kUnroll];
  Unit* targets[kUnroll];
  ForEachUnit(copy, table, tile, [&](uint32_t k, const Row& row, uint32_t at) {
    targets[k] = nullptr;
    if (at == copy.row_units) return;
    targets[k] = reinterpret_cast<Unit*>(row.to) + at;
    // Read once: kept out of the way of what the caches hold for others.
    units[k] = __ldcs(reinterpret_cast<const Unit*>(row.from) + at);
  });
#pragma unroll
  for (uint32_t k = 0; k < kUnroll; ++k) {
    if (targets[k] != nullptr) *targets[k] = units[k];
  }
}

template <typename Unit>
__device__ void ZeroTile(const KernelCopy& copy, std::byte* const* table,
                         uint32_t tile) {
  ForEachUnit(copy, table, tile, [&](uint32_t, const Row& row, uint32_t at) {
    if (at == copy.row_units) return;
    reinterpret_cast<Unit*>(row.to)[at] = Unit{};
  });
}

__device__ void StoreFp32(std::byte* to, DType dtype, uint32_t at,
                          uint32_t bits) {
  if (dtype == element::kFp32) {
    reinterpret_cast<uint32_t*>(to)[at] = bits;
  } else {
    reinterpret_cast<uint16_t*>(to)[at] =
        dtype == element::kBf16 ? Bf16FromFp32(bits) : Fp16FromFp32(bits);
  }
}

__device__ void CastTile(const KernelCopy& copy, std::byte* const* table,
                         uint32_t tile) {
  ForEachUnit(copy, table, tile, [&](uint32_t, const Row& row, uint32_t at) {
    if (at == copy.row_units) return;
    StoreFp32(row.to, copy.to_dtype, at,
              LoadFp32(row.from, copy.from_dtype, at));
  });
}

template <typename Unit>
__device__ __forceinline__ void MoveTile(const KernelCopy& copy,
                                         std::byte* const* table,
                                         uint32_t tile) {
  if (copy.kind == KernelKind::kZero) {
    ZeroTile<Unit>(copy, table, tile);
  } else {
    CopyTile<Unit>(copy, table, tile);
  }
}

__global__ void __launch_bounds__(kThreads)
    CopyKernel(const KernelBatch batch, const uint32_t* unless) {
  __shared__ KernelCopy copy;
  if (IsStopped(unless)) return;
  for (uint32_t t = blockIdx.x; t < batch.tiles_count; t += gridDim.x) {
    const KernelTile tile = batch.tiles[t];
    __syncthreads();
    LoadToShared(batch.copies[tile.copy], copy);
    __syncthreads();
    if (copy.kind == KernelKind::kCast) {
      CastTile(copy, batch.table, tile.tile);
      continue;
    }
    switch (copy.unit_bytes) {
      case 16:
        MoveTile<uint4>(copy, batch.table, tile.tile);
        break;
      case 8:
        MoveTile<uint2>(copy, batch.table, tile.tile);
        break;
      case 4:
        MoveTile<uint32_t>(copy, batch.table, tile.tile);
        break;
      case 2:
        MoveTile<uint16_t>(copy, batch.table, tile.tile);
        break;
      default:
        MoveTile<uint8_t>(copy, batch.table, tile.tile);
    }
  }
}

}  // namespace

// T. Granlund and P. Montgomery, "Division by Invariant Integers using
// Multiplication" (1994): with 2^(s-1) < d <= 2^s and m = ceil(2^(31+s) / d),
// floor(n / d) = m * n >> (31 + s) for all n < 2^31.
void DivisionBy(uint32_t divisor, uint32_t& magic, uint32_t& shift) {
  const uint32_t bits = std::bit_width(divisor - 1);
  if (std::has_single_bit(divisor)) {
    magic = 0;
    shift = bits;
    return;
  }
  magic = static_cast<uint32_t>(((uint64_t{1} << (31 + bits)) + divisor - 1) /
                                divisor);
  shift = bits - 1;
}

cudaError_t LoadCopyKernel() { return LoadKernel(CopyKernel); }

cudaError_t LaunchCopies(const KernelBatch& batch, uint32_t blocks_max,
                         const uint32_t* unless, cudaStream_t stream) {
  return LaunchTiles(CopyKernel, kThreads, batch, blocks_max, unless, stream);
}

}  // namespace refit::cuda
