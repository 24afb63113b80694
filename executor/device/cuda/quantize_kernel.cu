#include "executor/device/cast.h"
#include "executor/device/cuda/quantize_kernel.h"
#include "executor/device/quantize.h"

namespace refit::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kWarps = kThreads / kWarpThreads;

// The one shape of blocks that is held in registers between the search for its
// largest magnitude and its rounding: 16 threads have a row of 16 bytes each.
constexpr uint32_t kHeldColumns = 128;
constexpr uint32_t kHeldRows = 128;
constexpr uint32_t kHeldRowThreads = 16;
constexpr uint32_t kHeldRowsAtOnce = kThreads / kHeldRowThreads;
constexpr uint32_t kHeldRowsOfThread = kHeldRows / kHeldRowsAtOnce;

// One block of a matrix.
struct Block {
  const std::byte* input;
  std::byte* output;
  std::byte* scale;
  uint64_t input_row_bytes;
  uint64_t output_row_bytes;
  uint32_t rows;
  uint32_t columns;
  DType dtype;  // of the input
  fb::ScaleFormat format;
  // Null: the rows of the input follow each other. Otherwise `input` is unused.
  const KernelRowRun* runs;
  KernelQuantizeCount run_rows;
  uint64_t first_row;  // of the matrix
  uint64_t offset;     // of the input, from the entry's address
  uint32_t entry;
};

__device__ __forceinline__ uint32_t Divide(uint32_t n, uint32_t magic,
                                           uint32_t shift) {
  return magic == 0 ? n >> shift : __umulhi(n, magic) >> shift;
}

// Numbers below it are divided as 31-bit ones.
constexpr uint64_t kNarrowCount = (uint64_t{1} << 31) - 1;

// `row` / run_rows.
__device__ __forceinline__ uint64_t RunOf(const KernelQuantizeCount& run_rows,
                                          uint64_t row) {
  return row <= kNarrowCount && run_rows.count <= kNarrowCount
             ? Divide(static_cast<uint32_t>(row), run_rows.magic,
                      run_rows.shift)
             : row / run_rows.count;
}

// Where row `row` of the matrix begins, from the block's first column on.
__device__ __forceinline__ const std::byte* RowInRuns(const Block& block,
                                                      std::byte* const* table,
                                                      uint64_t row) {
  const uint64_t number = RunOf(block.run_rows, row);
  const KernelRowRun& run = block.runs[number];
  return table[block.entry + run.entries] + block.offset + run.bytes +
         (row - number * block.run_rows.count) * block.input_row_bytes;
}

__device__ Block BlockAt(const QuantizeBatch& batch, const KernelQuantize& op,
                         uint64_t number) {
  std::byte* const* const table = batch.table;
  // Divisions of 64 bits would be most of a small block's time.
  const bool is_narrow = op.blocks <= kNarrowCount;
  const auto take = [&](const KernelQuantizeCount& by) -> uint64_t {
    const uint64_t quotient =
        is_narrow ? Divide(static_cast<uint32_t>(number), by.magic, by.shift)
                  : number / by.count;
    const uint64_t rest = number - quotient * by.count;
    number = quotient;
    return rest;
  };
  const uint64_t across = take(op.blocks_across);
  const uint64_t down = take(op.blocks_down);
  uint64_t offset[kQuantizeOperands];
  uint32_t entry[kQuantizeOperands];
  for (uint32_t operand = 0; operand < kQuantizeOperands; ++operand) {
    offset[operand] = op.offset[operand];
    entry[operand] = op.entry[operand];
  }
  for (uint32_t l = 0; l < op.loops_count; ++l) {
    const KernelQuantizeLoop& loop = op.loops[l];
    const uint64_t i = take(loop.extent);
    for (uint32_t operand = 0; operand < kQuantizeOperands; ++operand) {
      offset[operand] += i * loop.bytes[operand];
      entry[operand] += static_cast<uint32_t>(i) * loop.entries[operand];
    }
  }
  const uint64_t row = down * op.block_rows;
  const uint64_t column = across * op.block_columns;
  const uint64_t input_bytes = op.dtype == element::kFp32 ? 4 : 2;
  const uint64_t scale_bytes = op.format == scale_format::kE8m0 ? 1 : 4;
  Block block;
  block.input = table[entry[kInput]] + offset[kInput] +
                row * op.row_bytes[kInput] + column * input_bytes;
  block.output = table[entry[kOutput]] + offset[kOutput] +
                 row * op.row_bytes[kOutput] + column;
  block.scale = table[entry[kScales]] + offset[kScales] +
                down * op.row_bytes[kScales] + across * scale_bytes;
  block.input_row_bytes = op.row_bytes[kInput];
  block.output_row_bytes = op.row_bytes[kOutput];
  const uint64_t rows_left = op.rows - row;
  const uint64_t columns_left = op.columns - column;
  block.rows = static_cast<uint32_t>(rows_left < op.block_rows ? rows_left
                                                               : op.block_rows);
  block.columns = static_cast<uint32_t>(
      columns_left < op.block_columns ? columns_left : op.block_columns);
  block.dtype = op.dtype;
  block.format = op.format;
  block.runs = nullptr;
  if (op.run_rows.count != 0) {
    block.runs = batch.runs + op.runs_begin;
    block.run_rows = op.run_rows;
    block.first_row = row;
    block.offset = offset[kInput] + column * input_bytes;
    block.entry = entry[kInput];
    const uint64_t run = RunOf(op.run_rows, row);
    if (row + block.rows <= (run + 1) * op.run_rows.count) {
      block.input = RowInRuns(block, table, row);
      block.runs = nullptr;
    }
  }
  return block;
}

__device__ __forceinline__ uint32_t Fp32From16(uint16_t bits, DType dtype) {
  return dtype == element::kBf16 ? Fp32FromBf16(bits) : Fp32FromFp16(bits);
}

__device__ __forceinline__ uint32_t LoadFp32(const std::byte* row, DType dtype,
                                             uint32_t column) {
  if (dtype == element::kFp32) {
    return reinterpret_cast<const uint32_t*>(row)[column];
  }
  return Fp32From16(reinterpret_cast<const uint16_t*>(row)[column], dtype);
}

// Two values as E4m3FromFp32 rounds them, `low` in the low byte.
__device__ __forceinline__ uint16_t TwoE4m3FromFp32(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t both = 0;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(both)
      : "f"(high), "f"(low));
  return both;
#else
  return static_cast<uint16_t>(E4m3FromFp32(__float_as_uint(low)) |
                               E4m3FromFp32(__float_as_uint(high)) << 8);
#endif
}

// The low and the high 16-bit number of a word, as fp32.
__device__ __forceinline__ float LowFp32(uint32_t two, DType dtype) {
  return __uint_as_float(
      Fp32From16(static_cast<uint16_t>(two & 0xffffu), dtype));
}
__device__ __forceinline__ float HighFp32(uint32_t two, DType dtype) {
  return __uint_as_float(Fp32From16(static_cast<uint16_t>(two >> 16), dtype));
}

__device__ __forceinline__ uint32_t WarpMax(uint32_t value) {
  return __reduce_max_sync(0xffffffffu, value);
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

__device__ void StoreScale(const Block& block, const BlockScale& scale) {
  if (block.format == scale_format::kE8m0) {
    *reinterpret_cast<uint8_t*>(block.scale) =
        static_cast<uint8_t>(scale.stored);
  } else {
    *reinterpret_cast<uint32_t*>(block.scale) = scale.stored;
  }
}

// Where the rows of a held block's input begin.
struct HeldRows {
  const std::byte* input[kHeldRows];
};

// The same for all threads of the thread block, which all call it. Fills `rows`
// for a block whose rows lie apart.
__device__ bool IsHeld(const Block& block, std::byte* const* table,
                       HeldRows& rows) {
  const uint64_t output = reinterpret_cast<uint64_t>(block.output);
  if (block.dtype == element::kFp32 || block.columns != kHeldColumns ||
      block.rows > kHeldRows || ((output | block.output_row_bytes) & 7) != 0) {
    return false;
  }
  if (block.runs == nullptr) {
    const uint64_t input = reinterpret_cast<uint64_t>(block.input);
    return ((input | block.input_row_bytes) & 15) == 0;
  }
  uint64_t input = 0;
  if (threadIdx.x < block.rows) {
    rows.input[threadIdx.x] =
        RowInRuns(block, table, block.first_row + threadIdx.x);
    input = reinterpret_cast<uint64_t>(rows.input[threadIdx.x]);
  }
  return __syncthreads_or((input & 15) != 0) == 0;
}

// By all threads of the thread block. 16-bit magnitudes are in the order of
// their values, as those of fp32 are.
template <DType dtype, typename RowAt>
__device__ __forceinline__ void QuantizeHeld(const Block& block,
                                             const RowAt& row_at) {
  const uint32_t first_row = threadIdx.x / kHeldRowThreads;
  const uint32_t unit = threadIdx.x % kHeldRowThreads;
  uint4 held[kHeldRowsOfThread];
  uint32_t magnitudes = 0;  // two largest, of 16 bits each
#pragma unroll
  for (uint32_t i = 0; i < kHeldRowsOfThread; ++i) {
    const uint32_t row = first_row + i * kHeldRowsAtOnce;
    held[i] = make_uint4(0, 0, 0, 0);
    if (row >= block.rows) continue;
    held[i] = __ldcs(reinterpret_cast<const uint4*>(row_at(row)) + unit);
  }
#pragma unroll
  for (uint32_t i = 0; i < kHeldRowsOfThread; ++i) {
    for (const uint32_t two : {held[i].x, held[i].y, held[i].z, held[i].w}) {
      magnitudes = __vmaxu2(magnitudes, two & 0x7fff7fffu);
    }
  }
  const uint32_t low = magnitudes & 0xffffu;
  const uint32_t high = magnitudes >> 16;
  const uint32_t largest = ThreadBlockMax(low > high ? low : high);
  const BlockScale scale =
      ScaleOf(Fp32From16(static_cast<uint16_t>(largest), dtype), block.format,
              Division::kByReciprocal);
  if (threadIdx.x == 0) StoreScale(block, scale);
#pragma unroll
  for (uint32_t i = 0; i < kHeldRowsOfThread; ++i) {
    const uint32_t row = first_row + i * kHeldRowsAtOnce;
    if (row >= block.rows) continue;
    const auto quantized = [&](uint32_t two) -> uint32_t {
      return TwoE4m3FromFp32(LowFp32(two, dtype) * scale.inverse,
                             HighFp32(two, dtype) * scale.inverse);
    };
    reinterpret_cast<uint2*>(block.output +
                             row * block.output_row_bytes)[unit] =
        make_uint2(quantized(held[i].x) | quantized(held[i].y) << 16,
                   quantized(held[i].z) | quantized(held[i].w) << 16);
  }
}

template <typename RowAt>
__device__ __forceinline__ void QuantizeHeldBlock(const Block& block,
                                                  const RowAt& row_at) {
  if (block.dtype == element::kBf16) {
    QuantizeHeld<element::kBf16>(block, row_at);
  } else {
    QuantizeHeld<element::kFp16>(block, row_at);
  }
}

// Any block, read twice, by `threads` threads of which this is `thread`; each
// row is for up to a warp of them. Not inline: its registers would be the
// kernel's, of which four blocks are to run on a multiprocessor.
template <typename Max>
__device__ __noinline__ void QuantizeAny(const Block& block,
                                         std::byte* const* table,
                                         uint32_t thread, uint32_t threads,
                                         const Max& max) {
  const auto row_at = [&](uint32_t row) {
    return block.runs == nullptr
               ? block.input + row * block.input_row_bytes
               : RowInRuns(block, table, block.first_row + row);
  };
  const uint32_t across = threads < kWarpThreads ? threads : kWarpThreads;
  const uint32_t first_row = thread / across;
  const uint32_t first_column = thread % across;
  uint32_t amax = 0;
  for (uint32_t row = first_row; row < block.rows; row += threads / across) {
    const std::byte* from = row_at(row);
    for (uint32_t at = first_column; at < block.columns; at += across) {
      const uint32_t magnitude = MagnitudeBits(LoadFp32(from, block.dtype, at));
      amax = magnitude > amax ? magnitude : amax;
    }
  }
  const BlockScale scale =
      ScaleOf(max(amax), block.format, Division::kByReciprocal);
  if (thread == 0) StoreScale(block, scale);
  for (uint32_t row = first_row; row < block.rows; row += threads / across) {
    const std::byte* from = row_at(row);
    std::byte* to = block.output + row * block.output_row_bytes;
    for (uint32_t at = first_column; at < block.columns; at += across) {
      reinterpret_cast<uint8_t*>(to)[at] =
          QuantizedValue(LoadFp32(from, block.dtype, at), scale.inverse);
    }
  }
}

// Any block, by one thread. A copy, so that only blocks that come here are in
// memory.
__device__ __forceinline__ void QuantizeAlone(const Block& small,
                                              std::byte* const* table) {
  const Block block = small;
  QuantizeAny(block, table, 0, 1, [](uint32_t amax) { return amax; });
}

// A row of 32 numbers of 16 bits.
constexpr uint32_t kRowColumns = 32;
constexpr uint32_t kHalfColumns = kRowColumns / 2;
constexpr uint32_t kHalvesOfThread = 2;
constexpr uint32_t kWideScales = 16;  // bytes that a thread stores at once

__device__ bool IsRow(const Block& block) {
  const uint64_t input = reinterpret_cast<uint64_t>(block.input);
  const uint64_t output = reinterpret_cast<uint64_t>(block.output);
  return block.dtype != element::kFp32 && block.rows == 1 &&
         block.columns == kRowColumns && ((input | output) & 15) == 0;
}

// By one thread. Few thread blocks are faster so than by QuantizeRows, but over
// NVLink its stores are too narrow.
__device__ void QuantizeRow(const Block& block) {
  uint32_t held[kRowColumns / 2];
#pragma unroll
  for (uint32_t i = 0; i < kRowColumns / 8; ++i) {
    reinterpret_cast<uint4*>(held)[i] =
        reinterpret_cast<const uint4*>(block.input)[i];
  }
  uint32_t magnitudes = 0;
#pragma unroll
  for (const uint32_t two : held) {
    magnitudes = __vmaxu2(magnitudes, two & 0x7fff7fffu);
  }
  const uint32_t low = magnitudes & 0xffffu;
  const uint32_t high = magnitudes >> 16;
  const BlockScale scale = ScaleOf(
      Fp32From16(static_cast<uint16_t>(low > high ? low : high), block.dtype),
      block.format, Division::kByReciprocal);
  StoreScale(block, scale);
  uint32_t values[kRowColumns / 4];
#pragma unroll
  for (uint32_t i = 0; i < kRowColumns / 2; ++i) {
    const uint32_t two =
        TwoE4m3FromFp32(LowFp32(held[i], block.dtype) * scale.inverse,
                        HighFp32(held[i], block.dtype) * scale.inverse);
    values[i / 2] = i % 2 == 0 ? two : values[i / 2] | two << 16;
  }
#pragma unroll
  for (uint32_t i = 0; i < kRowColumns / 16; ++i) {
    reinterpret_cast<uint4*>(block.output)[i] =
        reinterpret_cast<const uint4*>(values)[i];
  }
}

// The small blocks of a tile that are rows; others have no input here.
struct Rows {
  const std::byte* input[kSmallBlocksPerTile];
  std::byte* output[kSmallBlocksPerTile];
  uint64_t scale[kSmallBlocksPerTile];  // addresses
  alignas(16) uint8_t e8m0[kSmallBlocksPerTile];
};

// By all threads of the thread block, two a row.
template <DType dtype>
__device__ __forceinline__ void QuantizeRows(Rows& rows,
                                             fb::ScaleFormat format) {
  uint4 held[kHalvesOfThread][2];
#pragma unroll
  for (uint32_t i = 0; i < kHalvesOfThread; ++i) {
    const uint32_t half = i * kThreads + threadIdx.x;
    const std::byte* const input = rows.input[half / 2];
    held[i][0] = held[i][1] = make_uint4(0, 0, 0, 0);
    if (input == nullptr) continue;
    const uint4* const from =
        reinterpret_cast<const uint4*>(input) + half % 2 * 2;
    held[i][0] = __ldcs(from);
    held[i][1] = __ldcs(from + 1);
  }
#pragma unroll
  for (uint32_t i = 0; i < kHalvesOfThread; ++i) {
    const uint32_t half = i * kThreads + threadIdx.x;
    const uint32_t row = half / 2;
    const uint32_t twos[kHalfColumns / 2] = {
        held[i][0].x, held[i][0].y, held[i][0].z, held[i][0].w,
        held[i][1].x, held[i][1].y, held[i][1].z, held[i][1].w};
    uint32_t magnitudes = 0;
#pragma unroll
    for (const uint32_t two : twos) {
      magnitudes = __vmaxu2(magnitudes, two & 0x7fff7fffu);
    }
    magnitudes =
        __vmaxu2(magnitudes, __shfl_xor_sync(0xffffffffu, magnitudes, 1));
    if (rows.input[row] == nullptr) continue;
    const uint32_t low = magnitudes & 0xffffu;
    const uint32_t high = magnitudes >> 16;
    const BlockScale scale = ScaleOf(
        Fp32From16(static_cast<uint16_t>(low > high ? low : high), dtype),
        format, Division::kByReciprocal);
    if (half % 2 == 0) {
      if (format == scale_format::kE8m0) {
        rows.e8m0[row] = static_cast<uint8_t>(scale.stored);
      } else {
        *reinterpret_cast<uint32_t*>(rows.scale[row]) = scale.stored;
      }
    }
    uint32_t values[kHalfColumns / 4];
#pragma unroll
    for (uint32_t two = 0; two < kHalfColumns / 2; ++two) {
      const uint32_t both =
          TwoE4m3FromFp32(LowFp32(twos[two], dtype) * scale.inverse,
                          HighFp32(twos[two], dtype) * scale.inverse);
      values[two / 2] = two % 2 == 0 ? both : values[two / 2] | both << 16;
    }
    reinterpret_cast<uint4*>(rows.output[row])[half % 2] =
        make_uint4(values[0], values[1], values[2], values[3]);
  }
  if (format != scale_format::kE8m0) return;
  __syncthreads();
  // Scales of one byte each: 16 at once where they stand in a row.
  const uint32_t row = threadIdx.x;
  const uint32_t first = row / kWideScales * kWideScales;
  const bool is_next = rows.input[row] != nullptr &&
                       rows.scale[row] == rows.scale[first] + (row - first) &&
                       rows.scale[first] % kWideScales == 0;
  const uint32_t next =
      __ballot_sync(0xffffffffu, is_next) >> (first % kWarpThreads);
  if ((next & 0xffffu) == 0xffffu) {
    if (row == first) {
      *reinterpret_cast<uint4*>(rows.scale[row]) =
          *reinterpret_cast<const uint4*>(&rows.e8m0[row]);
    }
  } else if (rows.input[row] != nullptr) {
    *reinterpret_cast<uint8_t*>(rows.scale[row]) = rows.e8m0[row];
  }
}

// By all threads of the thread block. A tile is of one operation.
__device__ void QuantizeSmall(const QuantizeBatch& batch,
                              const KernelQuantize& op, uint64_t tile,
                              Rows& rows) {
  const uint64_t number = tile * kSmallBlocksPerTile + threadIdx.x;
  if (op.over_link == 0) {
    if (number >= op.blocks) return;
    const Block small = BlockAt(batch, op, number);
    if (IsRow(small)) {
      QuantizeRow(small);
    } else {
      QuantizeAlone(small, batch.table);
    }
    return;
  }
  __syncthreads();
  rows.input[threadIdx.x] = nullptr;
  if (number < op.blocks) {
    const Block small = BlockAt(batch, op, number);
    if (IsRow(small)) {
      rows.input[threadIdx.x] = small.input;
      rows.output[threadIdx.x] = small.output;
      rows.scale[threadIdx.x] = reinterpret_cast<uint64_t>(small.scale);
    } else {
      QuantizeAlone(small, batch.table);
    }
  }
  __syncthreads();
  if (op.dtype == element::kBf16) {
    QuantizeRows<element::kBf16>(rows, op.format);
  } else if (op.dtype == element::kFp16) {
    QuantizeRows<element::kFp16>(rows, op.format);
  }
}

// Tiles whose blocks are located at once, each by a thread: a search and many
// divisions, which would be most of a tile's time.
constexpr uint32_t kTilesAtOnce = 32;
static_assert(kSmallBlocksPerTile == kThreads);

__global__ void __launch_bounds__(kThreads)
    QuantizeKernel(const QuantizeBatch batch, const uint32_t* unless) {
  __shared__ Block blocks[kTilesAtOnce];
  __shared__ Rows rows;
  __shared__ HeldRows held_rows;
  if (IsStopped(unless)) return;
  const auto position_of = [&](uint64_t turn) {
    return turn * gridDim.x + blockIdx.x;
  };
  const auto tile_of = [&](uint64_t turn) -> uint64_t {
    const uint64_t position = position_of(turn);
    return batch.order == nullptr ? position : batch.order[position];
  };
  for (uint64_t turn = 0; position_of(turn) < batch.tiles_count;
       turn += kTilesAtOnce) {
    __syncthreads();
    if (threadIdx.x < kTilesAtOnce &&
        position_of(turn + threadIdx.x) < batch.tiles_count) {
      const uint64_t tile = tile_of(turn + threadIdx.x);
      const KernelQuantize& op = OperationOf(batch, tile);
      // A small one's operation.
      blocks[threadIdx.x].rows = 0;
      blocks[threadIdx.x].columns =
          static_cast<uint32_t>(&op - batch.operations);
      if (!IsSmallBlock(op.block_rows, op.block_columns)) {
        blocks[threadIdx.x] = BlockAt(batch, op, tile - op.first_tile);
      }
    }
    __syncthreads();
    for (uint32_t i = 0;
         i < kTilesAtOnce && position_of(turn + i) < batch.tiles_count; ++i) {
      const Block& block = blocks[i];
      if (block.rows == 0) {
        const uint64_t tile = tile_of(turn + i);
        const KernelQuantize& op = batch.operations[block.columns];
        QuantizeSmall(batch, op, tile - op.first_tile, rows);
      } else if (!IsHeld(block, batch.table, held_rows)) {
        QuantizeAny(block, batch.table, threadIdx.x, kThreads, ThreadBlockMax);
      } else {
        QuantizeHeldBlock(block, [&](uint32_t row) {
          return block.runs == nullptr
                     ? block.input + row * block.input_row_bytes
                     : held_rows.input[row];
        });
      }
    }
  }
}

}  // namespace

cudaError_t LoadQuantizeKernel() { return LoadKernel(QuantizeKernel); }

cudaError_t LaunchQuantizes(const QuantizeBatch& batch, uint32_t blocks_max,
                            const uint32_t* unless, cudaStream_t stream) {
  return LaunchTiles(QuantizeKernel, kThreads, batch, blocks_max, unless,
                     stream);
}

}  // namespace refit::cuda
