#include <cuda_fp8.h>

#include "executor/device/cast.h"
#include "executor/device/cuda/quantise_kernel.h"
#include "executor/device/quantise.h"

namespace refit::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kWarps = kThreads / kWarpThreads;
// Of the blocks that a device is given at most: one a multiprocessor. A
// multiprocessor's registers then hold one block of the copy kernel as well, so
// that a wave travels while the next is quantised.
constexpr uint32_t kShareOfBlocks = 4;

// The one shape of blocks that is held in registers between the search for its
// largest magnitude and its rounding: a warp's row is 4 elements a thread.
constexpr uint32_t kHeldColumns = 128;
constexpr uint32_t kHeldRows = 128;
constexpr uint32_t kHeldRowsOfWarp = kHeldRows / kWarps;

// One block of a matrix.
struct Block {
  const std::byte* input;
  std::byte* output;
  std::byte* scale;
  uint32_t rows;
  uint32_t columns;
};

__device__ Block BlockAt(const KernelQuantise& op, std::byte* const* table,
                         uint64_t number) {
  const uint64_t across = number % op.blocks_across;
  number /= op.blocks_across;
  const uint64_t down = number % op.blocks_down;
  uint64_t matrix = number / op.blocks_down;
  uint64_t offset[kQuantiseSides];
  uint32_t entry[kQuantiseSides];
  for (uint32_t side = 0; side < kQuantiseSides; ++side) {
    offset[side] = op.offset[side];
    entry[side] = op.entry[side];
  }
  for (uint32_t l = 0; l < op.loops_count; ++l) {
    const KernelQuantiseLoop& loop = op.loops[l];
    const uint64_t i = matrix % loop.extent;
    matrix /= loop.extent;
    for (uint32_t side = 0; side < kQuantiseSides; ++side) {
      offset[side] += i * loop.bytes[side];
      entry[side] += static_cast<uint32_t>(i) * loop.entries[side];
    }
  }
  const uint64_t row = down * op.block_rows;
  const uint64_t column = across * op.block_columns;
  const uint64_t input_bytes = op.dtype == DType::kFp32 ? 4 : 2;
  const uint64_t scale_bytes = op.format == fb::ScaleFormat::kE8m0 ? 1 : 4;
  Block block;
  block.input = table[entry[kInput]] + offset[kInput] +
                row * op.row_bytes[kInput] + column * input_bytes;
  block.output = table[entry[kOutput]] + offset[kOutput] +
                 row * op.row_bytes[kOutput] + column;
  block.scale = table[entry[kScales]] + offset[kScales] +
                down * op.row_bytes[kScales] + across * scale_bytes;
  const uint64_t rows_left = op.rows - row;
  const uint64_t columns_left = op.columns - column;
  block.rows = static_cast<uint32_t>(rows_left < op.block_rows ? rows_left
                                                               : op.block_rows);
  block.columns = static_cast<uint32_t>(
      columns_left < op.block_columns ? columns_left : op.block_columns);
  return block;
}

__device__ __forceinline__ uint32_t Fp32From16(uint16_t bits, DType dtype) {
  return dtype == DType::kBf16 ? Fp32FromBf16(bits) : Fp32FromFp16(bits);
}

__device__ __forceinline__ uint32_t LoadFp32(const std::byte* row, DType dtype,
                                             uint32_t column) {
  if (dtype == DType::kFp32) {
    return reinterpret_cast<const uint32_t*>(row)[column];
  }
  return Fp32From16(reinterpret_cast<const uint16_t*>(row)[column], dtype);
}

__device__ __forceinline__ uint32_t WarpMax(uint32_t value) {
#pragma unroll
  for (uint32_t distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

// The same for all threads of the thread block.
__device__ uint32_t ThreadBlockMax(uint32_t value) {
  __shared__ uint32_t of_warp[kWarps];
  value = WarpMax(value);
  __syncthreads();
  if (threadIdx.x % kWarpThreads == 0) {
    of_warp[threadIdx.x / kWarpThreads] = value;
  }
  __syncthreads();
#pragma unroll
  for (uint32_t warp = 0; warp < kWarps; ++warp) {
    value = of_warp[warp] > value ? of_warp[warp] : value;
  }
  return value;
}

__device__ void StoreScale(const Block& block, fb::ScaleFormat format,
                           const BlockScale& scale) {
  if (format == fb::ScaleFormat::kE8m0) {
    *reinterpret_cast<uint8_t*>(block.scale) =
        static_cast<uint8_t>(scale.stored);
  } else {
    *reinterpret_cast<uint32_t*>(block.scale) = scale.stored;
  }
}

__device__ bool IsHeld(const KernelQuantise& op, const Block& block) {
  const uint64_t input = reinterpret_cast<uint64_t>(block.input);
  const uint64_t output = reinterpret_cast<uint64_t>(block.output);
  return op.dtype != DType::kFp32 && block.columns == kHeldColumns &&
         block.rows <= kHeldRows && ((input | op.row_bytes[kInput]) & 7) == 0 &&
         ((output | op.row_bytes[kOutput]) & 3) == 0;
}

// What QuantisedValue makes of two elements, the first in the low byte.
__device__ __forceinline__ uint16_t QuantisedPair(uint32_t first,
                                                  uint32_t second,
                                                  float inverse) {
#if __CUDA_ARCH__ >= 890
  // The hardware's conversion rounds and saturates in the same way; only which
  // NaN it makes is not said.
  const float2 scaled = make_float2(__uint_as_float(first) * inverse,
                                    __uint_as_float(second) * inverse);
  uint32_t pair = __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
  if (isnan(scaled.x)) pair = (pair & 0xff00u) | 0x7fu;
  if (isnan(scaled.y)) pair = (pair & 0x00ffu) | 0x7f00u;
  return static_cast<uint16_t>(pair);
#else
  return static_cast<uint16_t>(QuantisedValue(first, inverse) |
                               QuantisedValue(second, inverse) << 8);
#endif
}

__device__ void QuantiseHeld(const KernelQuantise& op, const Block& block) {
  const uint32_t warp = threadIdx.x / kWarpThreads;
  const uint32_t lane = threadIdx.x % kWarpThreads;
  ushort4 held[kHeldRowsOfWarp];
  uint32_t amax = 0;
#pragma unroll
  for (uint32_t i = 0; i < kHeldRowsOfWarp; ++i) {
    const uint32_t row = warp + i * kWarps;
    held[i] = make_ushort4(0, 0, 0, 0);
    if (row >= block.rows) continue;
    held[i] = __ldcs(reinterpret_cast<const ushort4*>(
                         block.input + row * op.row_bytes[kInput]) +
                     lane);
    for (const uint16_t bits : {held[i].x, held[i].y, held[i].z, held[i].w}) {
      const uint32_t magnitude = MagnitudeBits(Fp32From16(bits, op.dtype));
      amax = magnitude > amax ? magnitude : amax;
    }
  }
  const BlockScale scale = ScaleOf(ThreadBlockMax(amax), op.format);
  if (threadIdx.x == 0) StoreScale(block, op.format, scale);
#pragma unroll
  for (uint32_t i = 0; i < kHeldRowsOfWarp; ++i) {
    const uint32_t row = warp + i * kWarps;
    if (row >= block.rows) continue;
    const auto pair = [&](uint16_t first, uint16_t second) {
      return QuantisedPair(Fp32From16(first, op.dtype),
                           Fp32From16(second, op.dtype), scale.inverse);
    };
    reinterpret_cast<ushort2*>(block.output +
                               row * op.row_bytes[kOutput])[lane] =
        make_ushort2(pair(held[i].x, held[i].y), pair(held[i].z, held[i].w));
  }
}

// Any block, read twice, by `warps` warps of which this is `warp`.
template <typename Max>
__device__ void QuantiseAny(const KernelQuantise& op, const Block& block,
                            uint32_t warp, uint32_t warps, const Max& max) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  uint32_t amax = 0;
  for (uint32_t row = warp; row < block.rows; row += warps) {
    const std::byte* from = block.input + row * op.row_bytes[kInput];
    for (uint32_t at = lane; at < block.columns; at += kWarpThreads) {
      const uint32_t magnitude = MagnitudeBits(LoadFp32(from, op.dtype, at));
      amax = magnitude > amax ? magnitude : amax;
    }
  }
  const BlockScale scale = ScaleOf(max(amax), op.format);
  if (warp == 0 && lane == 0) StoreScale(block, op.format, scale);
  for (uint32_t row = warp; row < block.rows; row += warps) {
    const std::byte* from = block.input + row * op.row_bytes[kInput];
    std::byte* to = block.output + row * op.row_bytes[kOutput];
    for (uint32_t at = lane; at < block.columns; at += kWarpThreads) {
      reinterpret_cast<uint8_t*>(to)[at] =
          QuantisedValue(LoadFp32(from, op.dtype, at), scale.inverse);
    }
  }
}

// The operation that tile `tile` belongs to.
__device__ uint32_t OperationOf(const QuantiseBatch& batch, uint64_t tile) {
  uint32_t begin = 0;
  uint32_t end = batch.quantises_count;
  while (end - begin > 1) {
    const uint32_t middle = begin + (end - begin) / 2;
    if (batch.quantises[middle].first_tile <= tile) {
      begin = middle;
    } else {
      end = middle;
    }
  }
  return begin;
}

__global__ void __launch_bounds__(kThreads)
    QuantiseKernel(const QuantiseBatch batch, const uint32_t* unless) {
  __shared__ KernelQuantise op;
  __shared__ uint32_t stop;
  // Read once a block: its threads must agree.
  if (threadIdx.x == 0) {
    stop =
        unless != nullptr ? *static_cast<const volatile uint32_t*>(unless) : 0;
  }
  __syncthreads();
  if (stop != 0) return;
  const uint32_t warp = threadIdx.x / kWarpThreads;
  for (uint64_t tile = blockIdx.x; tile < batch.tiles_count;
       tile += gridDim.x) {
    __syncthreads();
    if (threadIdx.x == 0) op = batch.quantises[OperationOf(batch, tile)];
    __syncthreads();
    const uint64_t in_op = tile - op.first_tile;
    if (!IsSmallBlock(op.block_rows, op.block_columns)) {
      const Block block = BlockAt(op, batch.table, in_op);
      if (IsHeld(op, block)) {
        QuantiseHeld(op, block);
      } else {
        QuantiseAny(op, block, warp, kWarps, ThreadBlockMax);
      }
      continue;
    }
    for (uint32_t i = warp; i < kSmallBlocksPerTile; i += kWarps) {
      const uint64_t number = in_op * kSmallBlocksPerTile + i;
      if (number >= op.blocks) break;
      QuantiseAny(op, BlockAt(op, batch.table, number), 0, 1, WarpMax);
    }
  }
}

}  // namespace

cudaError_t LoadQuantiseKernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, QuantiseKernel);
}

cudaError_t LaunchQuantises(const QuantiseBatch& batch, uint32_t blocks_max,
                            const uint32_t* unless, cudaStream_t stream) {
  if (batch.tiles_count == 0) return cudaSuccess;
  const uint32_t most = (blocks_max + kShareOfBlocks - 1) / kShareOfBlocks;
  const auto blocks = static_cast<uint32_t>(
      batch.tiles_count < most ? batch.tiles_count : most);
  QuantiseKernel<<<blocks, kThreads, 0, stream>>>(batch, unless);
  return cudaGetLastError();
}

}  // namespace refit::cuda
