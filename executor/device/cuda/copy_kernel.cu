#include <bit>

#include "executor/device/cast.h"
#include "executor/device/cuda/copy_kernel.h"
#include "executor/device/cuda/tiles.h"

namespace refit::cuda {
namespace {

constexpr uint32_t kThreads = 256;
// Loads in flight of one thread before the first store.
constexpr uint32_t kUnroll = kTileUnits / kThreads;

__device__ __forceinline__ uint32_t Divide(uint32_t n, uint32_t magic,
                                           uint32_t shift) {
  return magic == 0 ? n >> shift : __umulhi(n, magic) >> shift;
}

// Where a row begins on both sides.
struct Row {
  const std::byte* from;
  std::byte* to;
};

__device__ __forceinline__ Row RowAt(const KernelCopy& copy,
                                     std::byte* const* table, uint32_t row) {
  uint64_t from_offset = copy.from_offset;
  uint64_t to_offset = copy.to_offset;
  uint32_t from_entry = copy.from_entry;
  uint32_t to_entry = copy.to_entry;
  for (uint32_t l = 0; l < copy.loops_count; ++l) {
    const KernelLoop& loop = copy.loops[l];
    const uint32_t rest = Divide(row, loop.magic, loop.shift);
    const uint32_t i = row - rest * loop.extent;
    from_offset += i * loop.from_bytes;
    to_offset += i * loop.to_bytes;
    from_entry += i * loop.from_entries;
    to_entry += i * loop.to_entries;
    row = rest;
  }
  return {table[from_entry] + from_offset, table[to_entry] + to_offset};
}

// Calls body(k, row, column) for this thread's units of the tile; `kUnroll` of
// them, with column == row_units where there is none.
template <typename Body>
__device__ __forceinline__ void ForEachUnit(const KernelCopy& copy,
                                            std::byte* const* table,
                                            uint32_t tile, const Body& body) {
  const uint64_t first = uint64_t{tile} * kTileUnits;
  const uint32_t first_row = static_cast<uint32_t>(first / copy.row_units);
  const uint32_t first_column =
      static_cast<uint32_t>(first - uint64_t{first_row} * copy.row_units);
  if (first_column + kTileUnits <= copy.row_units) {
    // The tile lies in one row.
    const Row row = RowAt(copy, table, first_row);
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) {
      body(k, row, first_column + k * kThreads + threadIdx.x);
    }
    return;
  }
#pragma unroll
  for (uint32_t k = 0; k < kUnroll; ++k) {
    const uint32_t unit = first_column + k * kThreads + threadIdx.x;
    const uint32_t down = Divide(unit, copy.row_magic, copy.row_shift);
    if (first_row + down >= copy.rows) {
      body(k, Row{nullptr, nullptr}, copy.row_units);
      continue;
    }
    body(k, RowAt(copy, table, first_row + down), unit - down * copy.row_units);
  }
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

__device__ uint32_t LoadFp32(const std::byte* from, DType dtype, uint32_t at) {
  if (dtype == DType::kFp32) return reinterpret_cast<const uint32_t*>(from)[at];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(from)[at];
  return dtype == DType::kBf16 ? Fp32FromBf16(bits) : Fp32FromFp16(bits);
}

__device__ void StoreFp32(std::byte* to, DType dtype, uint32_t at,
                          uint32_t bits) {
  if (dtype == DType::kFp32) {
    reinterpret_cast<uint32_t*>(to)[at] = bits;
  } else {
    reinterpret_cast<uint16_t*>(to)[at] =
        dtype == DType::kBf16 ? Bf16FromFp32(bits) : Fp16FromFp32(bits);
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
    constexpr uint32_t kWords = sizeof(KernelCopy) / sizeof(uint32_t);
    static_assert(kWords <= kThreads);
    __syncthreads();
    if (threadIdx.x < kWords) {
      reinterpret_cast<uint32_t*>(&copy)[threadIdx.x] =
          reinterpret_cast<const uint32_t*>(
              &batch.copies[tile.copy])[threadIdx.x];
    }
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
