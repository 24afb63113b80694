#include "executor/device/cuda/digest_kernel.h"
#include "executor/device/cuda/kernel_tiles.h"
#include "executor/device/cuda/tiles.h"
#include "executor/device/element_digest.h"

namespace refit::cuda {
namespace {

constexpr uint32_t kWarpThreads = 32;
// Thread blocks that a multiprocessor holds at a time: as many as the device
// layer launches for each.
constexpr uint32_t kResidentBlocks = 4;

// Where a row begins: in memory, and in the param's bytes.
struct Row {
  const std::byte* from;
  uint64_t position;
};

// Not unrolled: what is rare takes long to compile.
template <typename Body>
__device__ __forceinline__ void ForEachUnit(const KernelCopy& copy,
                                            std::byte* const* table,
                                            uint32_t tile, const Body& body) {
  const auto row_at = [&](uint32_t row) {
    const RowOffsets at = OffsetsOfRow(copy, row);
    return Row{table[at.from_entry] + at.from_offset, at.to_offset};
  };
  ForEachTileUnit<1>(copy, tile, row_at, Row{nullptr, 0}, body);
}

static_assert(kUnroll % 2 == 0 && kDigestProductsMax == 8);

// Two whole blocks: sums of their words need no shifts. `x` is the formula's.
__device__ __forceinline__ void AddTwoBlocks(const uint4& first,
                                             uint64_t first_x,
                                             const uint4& second,
                                             uint64_t second_x, uint64_t& sum) {
  DigestProducts products;
  const auto add = [&](const uint4& block, uint64_t x) {
    const uint64_t block_key = DigestBlockKey(x);
    products.Add(block.x, block_key, 0);
    products.Add(block.y, block_key, 1);
    products.Add(block.z, block_key, 2);
    products.Add(block.w, block_key, 3);
  };
  add(first, first_x);
  add(second, second_x);
  sum = DigestFold(sum) + products.Folded();
}

// Blocks of rows that several strides take apart, or that lie in several
// tensors: rare.
__device__ void AddScatteredBlocks(const KernelCopy& copy,
                                   std::byte* const* table, uint32_t tile,
                                   uint64_t param_key, uint64_t& sum) {
  ForEachUnit(copy, table, tile, [&](uint32_t, const Row& row, uint32_t at) {
    if (at == copy.row_units) return;
    const uint64_t block = row.position / kDigestBlockBytes + at;
    AddTwoBlocks(__ldcs(reinterpret_cast<const uint4*>(row.from) + at),
                 param_key + block * kDigestBlockStep, uint4{}, 0, sum);
  });
}

// A thread issues all its loads before it computes the first product. Which
// row a unit is of takes a division, so rows that follow each other are read
// without knowing.
__device__ __forceinline__ void AddBlocks(const KernelCopy& copy,
                                          std::byte* const* table,
                                          uint32_t tile, uint64_t param_key,
                                          uint64_t& sum) {
  const uint64_t first = uint64_t{tile} * kTileUnits;
  const auto row = static_cast<uint32_t>(first / copy.row_units);
  const uint64_t row_begin = uint64_t{row} * copy.row_units;
  // This thread's first unit, from the begin of the row.
  const uint32_t unit = static_cast<uint32_t>(first - row_begin) + threadIdx.x;
  // What the end of a row adds, in blocks: to the place in memory, and to that
  // in the param.
  uint64_t memory_gap = 0;
  uint64_t param_gap = 0;
  if (first - row_begin + kTileUnits > copy.row_units && copy.rows > 1) {
    if (copy.loops_count > 1 || copy.loops[0].from_entries != 0) {
      AddScatteredBlocks(copy, table, tile, param_key, sum);
      return;
    }
    memory_gap = copy.loops[0].from_bytes / kDigestBlockBytes - copy.row_units;
    param_gap = copy.loops[0].to_bytes / kDigestBlockBytes - copy.row_units;
  }
  const auto rows_before = [&](uint32_t k) {
    return uint64_t{
        Divide(unit + k * kThreads, copy.row_magic, copy.row_shift)};
  };
  const RowOffsets begin = OffsetsOfRow(copy, row);
  const auto* const from = reinterpret_cast<const uint4*>(
      table[begin.from_entry] + begin.from_offset);
  const uint64_t end = uint64_t{copy.rows} * copy.row_units - row_begin;
  uint4 units[kUnroll];
  const auto load = [&](uint32_t k, uint64_t skipped) {
    const uint32_t at = unit + k * kThreads;
    // Read once: kept out of the way of what the caches hold for others. Zeros
    // add nothing, whatever their block.
    units[k] = at < end ? __ldcs(from + at + skipped) : uint4{};
  };
  if (memory_gap == 0) {
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) load(k, 0);
  } else {
#pragma unroll
    for (uint32_t k = 0; k < kUnroll; ++k) load(k, rows_before(k) * memory_gap);
  }
  uint64_t x = param_key +
               (begin.to_offset / kDigestBlockBytes + unit) * kDigestBlockStep;
  constexpr uint64_t kThreadsStep = kThreads * kDigestBlockStep;
  const uint64_t gap = param_gap * kDigestBlockStep;
#pragma unroll
  for (uint32_t k = 0; k < kUnroll; k += 2) {
    uint64_t x_of[2] = {x, x + kThreadsStep};
    if (gap != 0) {
      x_of[0] += rows_before(k) * gap;
      x_of[1] += rows_before(k + 1) * gap;
    }
    AddTwoBlocks(units[k], x_of[0], units[k + 1], x_of[1], sum);
    x += 2 * kThreadsStep;
  }
}

// `bits` of an element, or of a part of one, which lie inside one word.
__device__ __forceinline__ void AddBits(uint32_t bits, uint64_t position,
                                        uint64_t param_key, uint64_t& sum) {
  DigestProducts products;
  products.Add(bits << (8 * (position % 4)),
               DigestBlockKey(param_key, position / kDigestBlockBytes),
               static_cast<uint32_t>(position / 4 % 4));
  sum = DigestFold(sum) + products.Folded();
}

// So are small units, and casts.
template <typename Bits>
__device__ void AddUnits(const KernelCopy& copy, std::byte* const* table,
                         uint32_t tile, uint64_t param_key, uint64_t& sum) {
  ForEachUnit(copy, table, tile, [&](uint32_t, const Row& row, uint32_t at) {
    if (at == copy.row_units) return;
    AddBits(reinterpret_cast<const Bits*>(row.from)[at],
            row.position + uint64_t{at} * sizeof(Bits), param_key, sum);
  });
}

__device__ void AddWordPairs(const KernelCopy& copy, std::byte* const* table,
                             uint32_t tile, uint64_t param_key, uint64_t& sum) {
  ForEachUnit(copy, table, tile, [&](uint32_t, const Row& row, uint32_t at) {
    if (at == copy.row_units) return;
    const uint2 pair = reinterpret_cast<const uint2*>(row.from)[at];
    const uint64_t position = row.position + uint64_t{at} * sizeof(pair);
    AddBits(pair.x, position, param_key, sum);
    AddBits(pair.y, position + 4, param_key, sum);
  });
}

// Elements as they are after a cast.
__device__ void AddCasts(const KernelCopy& copy, std::byte* const* table,
                         uint32_t tile, uint64_t param_key, uint64_t& sum) {
  ForEachUnit(copy, table, tile, [&](uint32_t, const Row& row, uint32_t at) {
    if (at == copy.row_units) return;
    const uint32_t fp32 = LoadFp32(row.from, copy.from_dtype, at);
    if (copy.to_dtype == element::kFp32) {
      AddBits(fp32, row.position + uint64_t{at} * 4, param_key, sum);
    } else {
      AddBits(copy.to_dtype == element::kBf16 ? Bf16FromFp32(fp32)
                                              : Fp16FromFp32(fp32),
              row.position + uint64_t{at} * 2, param_key, sum);
    }
  });
}

// Adds all threads' sums to the one in memory.
__device__ __forceinline__ void Flush(uint64_t sum, DigestSum* total) {
  __shared__ uint64_t of_warp[kThreads / kWarpThreads];
  sum = DigestFold(sum);
#pragma unroll
  for (uint32_t distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    sum = DigestFold(sum + __shfl_down_sync(0xffffffffu, sum, distance));
  }
  if (threadIdx.x % kWarpThreads == 0)
    of_warp[threadIdx.x / kWarpThreads] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (uint32_t i = 1; i < kThreads / kWarpThreads; ++i) {
      sum = DigestFold(sum + of_warp[i]);
    }
    auto* const low = reinterpret_cast<unsigned long long*>(&total->low);
    auto* const high = reinterpret_cast<unsigned long long*>(&total->high);
    const uint64_t before = atomicAdd(low, sum);
    if (before + sum < before) atomicAdd(high, 1);
  }
  __syncthreads();
}

// Neighboring tiles, which are mostly of one copy: the block flushes its sum
// where the copy ends.
__device__ __forceinline__ void AddTiles(const DigestBatch& digests,
                                         uint32_t begin, uint32_t end,
                                         KernelCopy& copy) {
  const KernelBatch& batch = digests.batch;
  uint64_t sum = 0;
  KernelDigest digest = {};
  for (uint32_t t = begin; t < end; ++t) {
    const KernelTile tile = batch.tiles[t];
    if (t == begin || tile.copy != batch.tiles[t - 1].copy) {
      digest = digests.digests[tile.copy];
      LoadToShared(batch.copies[tile.copy], copy);
      __syncthreads();
    }
    const uint64_t key = digest.param_key;
    if (copy.kind == KernelKind::kCast) {
      AddCasts(copy, batch.table, tile.tile, key, sum);
    } else {
      switch (copy.unit_bytes) {
        case 16:
          AddBlocks(copy, batch.table, tile.tile, key, sum);
          break;
        case 8:
          AddWordPairs(copy, batch.table, tile.tile, key, sum);
          break;
        case 4:
          AddUnits<uint32_t>(copy, batch.table, tile.tile, key, sum);
          break;
        case 2:
          AddUnits<uint16_t>(copy, batch.table, tile.tile, key, sum);
          break;
        default:
          AddUnits<uint8_t>(copy, batch.table, tile.tile, key, sum);
      }
    }
    if (t + 1 == end || batch.tiles[t + 1].copy != tile.copy) {
      Flush(sum, reinterpret_cast<DigestSum*>(batch.table[digest.sum_entry] +
                                              digest.sum_offset));
      sum = 0;
    }
  }
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    DigestKernel(const DigestBatch digests, const uint32_t steps_begin,
                 const uint32_t steps_end, const uint32_t* unless) {
  __shared__ KernelCopy copy;
  __shared__ uint32_t taken;
  if (IsStopped(unless)) return;
  for (uint32_t s = steps_begin; s < steps_end; ++s) {
    const KernelDigestStep step = digests.steps[s];
    while (true) {
      if (threadIdx.x == 0) taken = atomicAdd(&digests.begun[s], 1);
      __syncthreads();
      const uint64_t begin = step.begin + uint64_t{taken} * step.chunk;
      // Before one thread takes the next.
      __syncthreads();
      if (begin >= step.end) break;
      const uint64_t end = begin + step.chunk;
      AddTiles(digests, static_cast<uint32_t>(begin),
               end < step.end ? static_cast<uint32_t>(end) : step.end, copy);
    }
  }
}

}  // namespace

cudaError_t LoadDigestKernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, DigestKernel);
}

cudaError_t LaunchDigests(const DigestBatch& digests, uint32_t steps_begin,
                          uint32_t steps_end, uint32_t blocks_max,
                          const uint32_t* unless, cudaStream_t stream) {
  DigestKernel<<<blocks_max, kThreads, 0, stream>>>(digests, steps_begin,
                                                    steps_end, unless);
  return cudaGetLastError();
}

}  // namespace refit::cuda
