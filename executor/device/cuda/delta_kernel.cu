#include "executor/device/cast.h"
#include "executor/device/cuda/delta_kernel.h"
#include "executor/device/cuda/kernel_tiles.h"
#include "executor/device/cuda/tiles.h"

namespace refit::cuda {
namespace {

constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
// Thread blocks that a multiprocessor holds at a time: as many as the device
// layer launches for each.
constexpr uint32_t kResidentBlocks = 4;

// Where a row begins on all sides. Null pointers: there is none.
struct Row {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::byte* shadow = nullptr;
  uint32_t* marks = nullptr;  // of the tensor
  uint64_t offset = 0;        // of the row in the tensor
};

// What a thread has found.
struct Found {
  uint32_t elements = 0;
  uint32_t bytes = 0;
};

template <uint32_t kRowsUnroll, typename Body>
__device__ __forceinline__ void ForEachUnit(const KernelCopy& copy,
                                            const KernelDelta& delta,
                                            std::byte* const* table,
                                            uint32_t tile, const Body& body) {
  const auto row_at = [&](uint32_t row) {
    const RowOffsets at = OffsetsOfRow(copy, row);
    Row found;
    found.from = table[at.from_entry] + at.from_offset;
    found.to = table[at.to_entry] + at.to_offset;
    found.offset = at.from_offset;
    if (delta.kind != DeltaKind::kMarked) {
      found.shadow =
          table[at.from_entry + delta.shadow_entries] + at.from_offset;
    }
    if (delta.kind == DeltaKind::kMarked || delta.marks != 0) {
      found.marks = reinterpret_cast<uint32_t*>(
          table[at.from_entry + delta.marks_entries]);
    }
    return found;
  };
  ForEachTileUnit<kRowsUnroll>(copy, tile, row_at, Row(), body);
}

__device__ __forceinline__ bool Differ(uint4 a, uint4 b) {
  return ((a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w)) != 0;
}
__device__ __forceinline__ bool Differ(uint2 a, uint2 b) {
  return ((a.x ^ b.x) | (a.y ^ b.y)) != 0;
}
template <typename Unit>
__device__ __forceinline__ bool Differ(Unit a, Unit b) {
  return a != b;
}

// Elements of a word that differ, by their size.
__device__ __forceinline__ uint32_t CountWord(uint32_t difference,
                                              uint32_t element_bytes) {
  if (element_bytes >= 4) return difference != 0;
  if (element_bytes == 2) {
    return ((difference & 0xffffu) != 0) + ((difference >> 16) != 0);
  }
  return ((difference & 0xffu) != 0) + ((difference & 0xff00u) != 0) +
         ((difference & 0xff0000u) != 0) + ((difference >> 24) != 0);
}
__device__ __forceinline__ uint32_t CountElements(uint4 a, uint4 b,
                                                  uint32_t bytes) {
  if (bytes == 8) {
    return (((a.x ^ b.x) | (a.y ^ b.y)) != 0) +
           (((a.z ^ b.z) | (a.w ^ b.w)) != 0);
  }
  return CountWord(a.x ^ b.x, bytes) + CountWord(a.y ^ b.y, bytes) +
         CountWord(a.z ^ b.z, bytes) + CountWord(a.w ^ b.w, bytes);
}
__device__ __forceinline__ uint32_t CountElements(uint2 a, uint2 b,
                                                  uint32_t bytes) {
  if (bytes == 8) return Differ(a, b);
  return CountWord(a.x ^ b.x, bytes) + CountWord(a.y ^ b.y, bytes);
}
template <typename Unit>
__device__ __forceinline__ uint32_t CountElements(Unit a, Unit b,
                                                  uint32_t bytes) {
  return CountWord(static_cast<uint32_t>(a) ^ static_cast<uint32_t>(b), bytes);
}

// Sets the marks of bytes [offset, offset + size).
__device__ __forceinline__ void Mark(const KernelDelta& delta, uint32_t* marks,
                                     uint64_t offset, uint32_t size) {
  const uint64_t last = (offset + size - 1) >> delta.mark_shift;
  for (uint64_t bit = offset >> delta.mark_shift; bit <= last; ++bit) {
    atomicOr(&marks[bit / 32], 1u << (bit % 32));
  }
}

// The marks of bytes [offset, offset + size), of 64 bits at most.
__device__ __forceinline__ uint32_t CountMarks(const KernelDelta& delta,
                                               const uint32_t* marks,
                                               uint64_t offset, uint32_t size) {
  const uint64_t first = offset >> delta.mark_shift;
  const auto bits =
      static_cast<uint32_t>(((offset + size - 1) >> delta.mark_shift) - first) +
      1;
  const auto shift = static_cast<uint32_t>(first % 32);
  uint32_t word = marks[first / 32] >> shift;
  if (shift + bits > 32) word |= marks[first / 32 + 1] << (32 - shift);
  return __popc(word & (bits == 32 ? kAllLanes : (1u << bits) - 1));
}

template <typename Unit>
__device__ void MoveTile(const KernelCopy& copy, const KernelDelta& delta,
                         std::byte* const* table, uint32_t tile, Found& found) {
  constexpr uint32_t kSize = sizeof(Unit);
  // Four times: compiled in half the time of eight. Small units are rare.
  constexpr uint32_t kRowsUnroll = kSize >= 8 ? 4 : 1;
  // A unit is not smaller: tensors of GPUs are aligned to their elements.
  const uint32_t element_bytes = ElementBytes(copy.from_dtype);
  if (delta.kind == DeltaKind::kMarked) {
    ForEachUnit<kRowsUnroll>(
        copy, delta, table, tile, [&](uint32_t, const Row& row, uint32_t at) {
          if (at == copy.row_units) return;
          const uint64_t place = uint64_t{at} * kSize;
          const uint32_t marks =
              CountMarks(delta, row.marks, row.offset + place, kSize);
          if (marks == 0) return;
          reinterpret_cast<Unit*>(row.to)[at] =
              __ldcs(reinterpret_cast<const Unit*>(row.from) + at);
          found.elements += marks;
          found.bytes += kSize;
        });
    return;
  }
  const auto unit_at = [](std::byte* row, uint32_t at) {
    return reinterpret_cast<Unit*>(row) + at;
  };
  if (delta.kind == DeltaKind::kKept) {
    ForEachUnit<kRowsUnroll>(
        copy, delta, table, tile, [&](uint32_t, const Row& row, uint32_t at) {
          if (at == copy.row_units) return;
          const Unit unit =
              __ldcs(reinterpret_cast<const Unit*>(row.from) + at);
          *unit_at(row.to, at) = unit;
          *unit_at(row.shadow, at) = unit;
          found.bytes += kSize;
        });
    return;
  }
  // First a bit for each unit: so that loads do not wait for stores, and no
  // unit stays in registers. What differs is mostly in a cache still.
  uint32_t differs = 0;
  ForEachUnit<kRowsUnroll>(
      copy, delta, table, tile, [&](uint32_t k, const Row& row, uint32_t at) {
        if (at == copy.row_units) return;
        const Unit unit = reinterpret_cast<const Unit*>(row.from)[at];
        const Unit shadow = *unit_at(row.shadow, at);
        if (Differ(unit, shadow)) differs |= 1u << k;
      });
  if (__ballot_sync(kAllLanes, differs != 0) == 0) return;
  ForEachUnit<kRowsUnroll>(
      copy, delta, table, tile, [&](uint32_t k, const Row& row, uint32_t at) {
        if ((differs >> k & 1) == 0) return;
        const Unit unit = reinterpret_cast<const Unit*>(row.from)[at];
        *unit_at(row.to, at) = unit;
        found.elements +=
            CountElements(unit, *unit_at(row.shadow, at), element_bytes);
        found.bytes += kSize;
        if (delta.marks != 0) {
          Mark(delta, row.marks, row.offset + uint64_t{at} * kSize, kSize);
        } else {
          *unit_at(row.shadow, at) = unit;
        }
      });
}

// One element at a time.
__device__ void CastTile(const KernelCopy& copy, const KernelDelta& delta,
                         std::byte* const* table, uint32_t tile, Found& found) {
  const uint32_t from_bytes = copy.from_dtype == DType::kFp32 ? 4 : 2;
  const uint32_t to_bytes = copy.to_dtype == DType::kFp32 ? 4 : 2;
  ForEachUnit<1>(
      copy, delta, table, tile, [&](uint32_t, const Row& row, uint32_t at) {
        if (at == copy.row_units) return;
        const uint64_t place = uint64_t{at} * from_bytes;
        const auto load = [&](const std::byte* elements) {
          return from_bytes == 4
                     ? reinterpret_cast<const uint32_t*>(elements)[at]
                     : reinterpret_cast<const uint16_t*>(elements)[at];
        };
        const uint32_t bits = load(row.from);
        if (delta.kind == DeltaKind::kChanged && bits == load(row.shadow)) {
          return;
        }
        if (delta.kind == DeltaKind::kMarked &&
            CountMarks(delta, row.marks, row.offset + place, from_bytes) == 0) {
          return;
        }
        if (delta.kind != DeltaKind::kKept) found.elements += 1;
        found.bytes += to_bytes;
        const uint32_t fp32 = LoadFp32(row.from, copy.from_dtype, at);
        if (to_bytes == 4) {
          reinterpret_cast<uint32_t*>(row.to)[at] = fp32;
        } else {
          reinterpret_cast<uint16_t*>(row.to)[at] =
              copy.to_dtype == DType::kBf16 ? Bf16FromFp32(fp32)
                                            : Fp16FromFp32(fp32);
        }
        if (delta.kind == DeltaKind::kMarked) return;
        if (delta.kind == DeltaKind::kChanged && delta.marks != 0) {
          Mark(delta, row.marks, row.offset + place, from_bytes);
        } else if (from_bytes == 4) {
          reinterpret_cast<uint32_t*>(row.shadow)[at] = bits;
        } else {
          reinterpret_cast<uint16_t*>(row.shadow)[at] =
              static_cast<uint16_t>(bits);
        }
      });
}

// Adds what all threads found. A thread's numbers fit: a block has fewer than
// 2^31 bytes of units for each of its threads.
__device__ void Flush(const Found& found, DeltaCounts* counts) {
  __shared__ unsigned long long elements, bytes;
  if (threadIdx.x == 0) elements = bytes = 0;
  __syncthreads();
  uint32_t mine[2] = {found.elements, found.bytes};
  for (uint32_t i = 0; i < 2; ++i) {
    unsigned long long sum = mine[i];
    for (uint32_t step = kWarpThreads / 2; step > 0; step /= 2) {
      sum += __shfl_down_sync(kAllLanes, sum, step);
    }
    if (threadIdx.x % kWarpThreads == 0) {
      atomicAdd(i == 0 ? &elements : &bytes, sum);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0 || bytes == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(&counts->elements), elements);
  atomicAdd(reinterpret_cast<unsigned long long*>(&counts->bytes), bytes);
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    DeltaKernel(const KernelBatch batch, const KernelDelta delta,
                const uint32_t* unless) {
  __shared__ KernelCopy copy;
  if (IsStopped(unless)) return;
  Found found;
  for (uint32_t t = blockIdx.x; t < batch.tiles_count; t += gridDim.x) {
    const KernelTile tile = batch.tiles[t];
    __syncthreads();
    LoadToShared(batch.copies[tile.copy], copy);
    __syncthreads();
    if (copy.kind == KernelKind::kCast) {
      CastTile(copy, delta, batch.table, tile.tile, found);
      continue;
    }
    switch (copy.unit_bytes) {
      case 16:
        MoveTile<uint4>(copy, delta, batch.table, tile.tile, found);
        break;
      case 8:
        MoveTile<uint2>(copy, delta, batch.table, tile.tile, found);
        break;
      case 4:
        MoveTile<uint32_t>(copy, delta, batch.table, tile.tile, found);
        break;
      case 2:
        MoveTile<uint16_t>(copy, delta, batch.table, tile.tile, found);
        break;
      default:
        MoveTile<uint8_t>(copy, delta, batch.table, tile.tile, found);
    }
  }
  __syncthreads();
  Flush(found, reinterpret_cast<DeltaCounts*>(batch.table[delta.counts_entry]));
}

}  // namespace

cudaError_t LoadDeltaKernel() { return LoadKernel(DeltaKernel); }

cudaError_t LaunchDeltas(const KernelBatch& batch, const KernelDelta& delta,
                         uint32_t blocks_max, const uint32_t* unless,
                         cudaStream_t stream) {
  if (batch.tiles_count == 0) return cudaSuccess;
  const uint32_t blocks =
      batch.tiles_count < blocks_max ? batch.tiles_count : blocks_max;
  DeltaKernel<<<blocks, kThreads, 0, stream>>>(batch, delta, unless);
  return cudaGetLastError();
}

}  // namespace refit::cuda
