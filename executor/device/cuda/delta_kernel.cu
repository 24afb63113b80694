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

template <DeltaKind kKind>
__device__ __forceinline__ Row RowAt(const KernelCopy& copy,
                                     const KernelDelta& delta,
                                     std::byte* const* table, uint32_t row) {
  const RowOffsets at = OffsetsOfRow(copy, row);
  Row found;
  found.from = table[at.from_entry] + at.from_offset;
  found.to = table[at.to_entry] + at.to_offset;
  found.offset = at.from_offset;
  if constexpr (kKind != DeltaKind::kMarked) {
    found.shadow = table[at.from_entry + delta.shadow_entries] + at.from_offset;
  }
  if (kKind == DeltaKind::kMarked || delta.marks != 0) {
    found.marks =
        reinterpret_cast<uint32_t*>(table[at.from_entry + delta.marks_entries]);
  }
  return found;
}

template <DeltaKind kKind, uint32_t kRowsUnroll, typename Body>
__device__ __forceinline__ void ForEachUnit(const KernelCopy& copy,
                                            const KernelDelta& delta,
                                            std::byte* const* table,
                                            uint32_t tile, const Body& body) {
  const auto row_at = [&](uint32_t row) {
    return RowAt<kKind>(copy, delta, table, row);
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

// Of a marked tile whose units of 16 bytes have eight marks each: of bf16 and
// fp16, nearly all that is moved.
constexpr uint32_t kMarksPerUnit = 8;
constexpr uint32_t kUnitsPerWord = 32 / kMarksPerUnit;

// Whether each row of a copy begins with a word of marks, and holds whole ones.
__device__ __forceinline__ bool HoldsWholeWords(const KernelCopy& copy) {
  constexpr uint32_t kWordOfUnits = kUnitsPerWord * sizeof(uint4);
  uint64_t starts = copy.from_offset;
  for (uint32_t l = 0; l < copy.loops_count; ++l) {
    starts |= copy.loops[l].from_bytes;
  }
  return starts % kWordOfUnits == 0 && copy.row_units % kUnitsPerWord == 0;
}

// A warp reads the marks of 128 units at once, a word a lane. `kOneRow`: the
// tile is full, and lies in one row. `row`: that of its unit number `first`.
template <bool kOneRow>
__device__ __forceinline__ void MoveMarkedWords(
    const KernelCopy& copy, const KernelDelta& delta, std::byte* const* table,
    uint64_t first, uint32_t first_row, const Row& row, Found& found) {
  constexpr uint32_t kRunUnits = kWarpThreads * kUnitsPerWord;
  constexpr uint32_t kRuns = kTileUnits / kRunUnits / (kThreads / kWarpThreads);
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint32_t first_run = threadIdx.x / kWarpThreads * kRuns;
  const auto column =
      static_cast<uint32_t>(first - uint64_t{first_row} * copy.row_units);
  // Of the units of this lane's words.
  uint32_t words[kRuns];
  const uint4* from[kRuns];
  uint4* to[kRuns];
  uint32_t any = 0;
#pragma unroll
  for (uint32_t r = 0; r < kRuns; ++r) {
    const uint32_t in_tile =
        ((first_run + r) * kWarpThreads + lane) * kUnitsPerWord;
    Row at = row;
    uint32_t unit = column + in_tile;
    words[r] = 0;
    from[r] = nullptr;
    to[r] = nullptr;
    if constexpr (!kOneRow) {
      if (first + in_tile >= uint64_t{copy.rows} * copy.row_units) continue;
      const uint32_t down = Divide(unit, copy.row_magic, copy.row_shift);
      unit -= down * copy.row_units;
      if (down != 0) {
        at = RowAt<DeltaKind::kMarked>(copy, delta, table, first_row + down);
      }
    }
    words[r] = at.marks[(at.offset / sizeof(uint4) + unit) / kUnitsPerWord];
    from[r] = reinterpret_cast<const uint4*>(at.from) + unit;
    to[r] = reinterpret_cast<uint4*>(at.to) + unit;
    any |= words[r];
  }
  if (__ballot_sync(kAllLanes, any != 0) == 0) return;
#pragma unroll
  for (uint32_t r = 0; r < kRuns; ++r) {
    found.elements += __popc(words[r]);
    // Neighboring lanes take neighboring units, so that their stores are one:
    // unit `lane % kUnitsPerWord` of the word of another lane.
    const auto place = [&](auto* const first_unit, uint32_t i) {
      using Unit = decltype(first_unit);
      if constexpr (kOneRow) {
        return first_unit - lane * kUnitsPerWord + i * kWarpThreads + lane;
      } else {
        const uint32_t of_word = (i * kWarpThreads + lane) / kUnitsPerWord;
        return reinterpret_cast<Unit>(__shfl_sync(
                   kAllLanes, reinterpret_cast<unsigned long long>(first_unit),
                   of_word)) +
               lane % kUnitsPerWord;
      }
    };
    uint4 units[kUnitsPerWord];
    uint32_t marked = 0;
#pragma unroll
    for (uint32_t i = 0; i < kUnitsPerWord; ++i) {
      const uint32_t of_word = (i * kWarpThreads + lane) / kUnitsPerWord;
      const uint32_t marks = __shfl_sync(kAllLanes, words[r], of_word) >>
                             lane % kUnitsPerWord * kMarksPerUnit;
      const uint4* const unit = place(from[r], i);
      if ((marks & ((1u << kMarksPerUnit) - 1)) == 0) continue;
      marked |= 1u << i;
      units[i] = __ldcs(unit);
    }
    found.bytes += __popc(marked) * sizeof(uint4);
#pragma unroll
    for (uint32_t i = 0; i < kUnitsPerWord; ++i) {
      uint4* const unit = place(to[r], i);
      if ((marked >> i & 1) != 0) *unit = units[i];
    }
  }
}

// Returns false where words of marks are not of whole units.
__device__ __forceinline__ bool MoveMarkedTile(const KernelCopy& copy,
                                               const KernelDelta& delta,
                                               std::byte* const* table,
                                               uint32_t tile, Found& found) {
  const uint64_t first = uint64_t{tile} * kTileUnits;
  const auto first_row = static_cast<uint32_t>(first / copy.row_units);
  const auto column =
      static_cast<uint32_t>(first - uint64_t{first_row} * copy.row_units);
  const bool is_row = column + kTileUnits <= copy.row_units;
  if (!is_row && !HoldsWholeWords(copy)) return false;
  const Row row = RowAt<DeltaKind::kMarked>(copy, delta, table, first_row);
  if (!is_row) {
    MoveMarkedWords<false>(copy, delta, table, first, first_row, row, found);
    return true;
  }
  if (row.offset % sizeof(uint4) != 0 ||
      (row.offset / sizeof(uint4) + column) % kUnitsPerWord != 0) {
    return false;
  }
  MoveMarkedWords<true>(copy, delta, table, first, first_row, row, found);
  return true;
}

// Stores the units of a tile that differ: of this thread those with a bit in
// `differs`. Where few do, a warp lists its own first: then its lanes load and
// store them at once.
template <typename Unit>
__device__ __forceinline__ void StoreDiffering(const KernelCopy& copy,
                                               const KernelDelta& delta,
                                               std::byte* const* table,
                                               uint32_t tile, uint32_t differs,
                                               Found& found) {
  constexpr uint32_t kSize = sizeof(Unit);
  constexpr uint32_t kWarpUnits = kUnroll * kWarpThreads;
  __shared__ uint8_t lists[kThreads / kWarpThreads][kWarpUnits];
  static_assert(kWarpUnits <= 256, "an entry of a list is a byte");
  const uint32_t lane = threadIdx.x % kWarpThreads;
  uint8_t* const list = lists[threadIdx.x / kWarpThreads];
  uint32_t count = 0;
#pragma unroll
  for (uint32_t k = 0; k < kUnroll; ++k) {
    const uint32_t lanes = __ballot_sync(kAllLanes, (differs >> k & 1) != 0);
    if ((differs >> k & 1) != 0) {
      list[count + __popc(lanes & ((1u << lane) - 1))] =
          static_cast<uint8_t>(k * kWarpThreads + lane);
    }
    count += __popc(lanes);
  }
  __syncwarp();
  const bool is_listed = count <= kWarpUnits / 2;
  const uint32_t turns =
      is_listed ? (count + kWarpThreads - 1) / kWarpThreads : kUnroll;
  const uint64_t first = uint64_t{tile} * kTileUnits;
  const auto first_row = static_cast<uint32_t>(first / copy.row_units);
  const auto column =
      static_cast<uint32_t>(first - uint64_t{first_row} * copy.row_units);
  const bool is_row = column + kTileUnits <= copy.row_units;
  const auto row_at = [&](uint32_t row) {
    return RowAt<DeltaKind::kChanged>(copy, delta, table, row);
  };
  Row row = row_at(first_row);
  // A unit is not smaller: tensors of GPUs are aligned to their elements.
  const uint32_t element_bytes = ElementBytes(copy.from_dtype);
  for (uint32_t turn = 0; turn < turns; ++turn) {
    uint32_t number = turn * kWarpThreads + lane;
    if (is_listed) {
      if (number >= count) break;
      number = list[number];
    } else if ((differs >> turn & 1) == 0) {
      continue;
    }
    uint32_t at = column + number / kWarpThreads * kThreads +
                  (threadIdx.x - lane) + number % kWarpThreads;
    if (!is_row) {
      const uint32_t down = Divide(at, copy.row_magic, copy.row_shift);
      at -= down * copy.row_units;
      row = row_at(first_row + down);
    }
    const Unit unit = reinterpret_cast<const Unit*>(row.from)[at];
    Unit* const shadow = reinterpret_cast<Unit*>(row.shadow) + at;
    found.elements += CountElements(unit, *shadow, element_bytes);
    found.bytes += kSize;
    reinterpret_cast<Unit*>(row.to)[at] = unit;
    if (delta.marks != 0) {
      Mark(delta, row.marks, row.offset + uint64_t{at} * kSize, kSize);
    } else {
      *shadow = unit;
    }
  }
  __syncwarp();
}

template <DeltaKind kKind, typename Unit>
__device__ void MoveTile(const KernelCopy& copy, const KernelDelta& delta,
                         std::byte* const* table, uint32_t tile, Found& found) {
  constexpr uint32_t kSize = sizeof(Unit);
  // Four times: compiled in half the time of eight. Small units are rare.
  constexpr uint32_t kRowsUnroll = kSize >= 8 ? 4 : 1;
  if constexpr (kKind == DeltaKind::kMarked) {
    if constexpr (kSize == sizeof(uint4)) {
      if (delta.mark_shift == 1 &&
          MoveMarkedTile(copy, delta, table, tile, found)) {
        return;
      }
    }
    ForEachUnit<kKind, kRowsUnroll>(
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
  if constexpr (kKind == DeltaKind::kKept) {
    ForEachUnit<kKind, kRowsUnroll>(
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
  ForEachUnit<kKind, kRowsUnroll>(
      copy, delta, table, tile, [&](uint32_t k, const Row& row, uint32_t at) {
        if (at == copy.row_units) return;
        const Unit unit = reinterpret_cast<const Unit*>(row.from)[at];
        const Unit shadow = *unit_at(row.shadow, at);
        if (Differ(unit, shadow)) differs |= 1u << k;
      });
  if (__ballot_sync(kAllLanes, differs != 0) == 0) return;
  StoreDiffering<Unit>(copy, delta, table, tile, differs, found);
}

// One element at a time.
template <DeltaKind kKind>
__device__ void CastTile(const KernelCopy& copy, const KernelDelta& delta,
                         std::byte* const* table, uint32_t tile, Found& found) {
  const uint32_t from_bytes = copy.from_dtype == DType::kFp32 ? 4 : 2;
  const uint32_t to_bytes = copy.to_dtype == DType::kFp32 ? 4 : 2;
  ForEachUnit<kKind, 1>(
      copy, delta, table, tile, [&](uint32_t, const Row& row, uint32_t at) {
        if (at == copy.row_units) return;
        const uint64_t place = uint64_t{at} * from_bytes;
        const auto load = [&](const std::byte* elements) {
          return from_bytes == 4
                     ? reinterpret_cast<const uint32_t*>(elements)[at]
                     : reinterpret_cast<const uint16_t*>(elements)[at];
        };
        const uint32_t bits = load(row.from);
        if (kKind == DeltaKind::kChanged && bits == load(row.shadow)) {
          return;
        }
        if (kKind == DeltaKind::kMarked &&
            CountMarks(delta, row.marks, row.offset + place, from_bytes) == 0) {
          return;
        }
        if (kKind != DeltaKind::kKept) found.elements += 1;
        found.bytes += to_bytes;
        const uint32_t fp32 = LoadFp32(row.from, copy.from_dtype, at);
        if (to_bytes == 4) {
          reinterpret_cast<uint32_t*>(row.to)[at] = fp32;
        } else {
          reinterpret_cast<uint16_t*>(row.to)[at] =
              copy.to_dtype == DType::kBf16 ? Bf16FromFp32(fp32)
                                            : Fp16FromFp32(fp32);
        }
        if constexpr (kKind == DeltaKind::kMarked) return;
        if (kKind == DeltaKind::kChanged && delta.marks != 0) {
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

template <DeltaKind kKind>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    DeltaKernel(const KernelBatch batch, const KernelDelta delta,
                const uint32_t* unless) {
  __shared__ KernelCopy copy;
  if (IsStopped(unless)) return;
  Found found;
  // Where marks tell what changed, most tiles are little work: so the next one
  // is read early, and a block takes some in a row, which mostly are of one
  // copy.
  constexpr bool kReadsAhead = kKind == DeltaKind::kMarked;
  constexpr uint32_t kInARow = 8;
  const bool in_a_row =
      kReadsAhead && batch.tiles_count / gridDim.x >= 4 * kInARow;
  const uint32_t each = in_a_row ? kInARow : 1;
  const auto behind = [&](uint32_t t) {
    return (t + 1) % each != 0 ? t + 1 : t + 1 + (gridDim.x - 1) * each;
  };
  KernelTile next = {};
  uint32_t t = blockIdx.x * each;
  if (kReadsAhead && t < batch.tiles_count) next = batch.tiles[t];
  uint32_t loaded = UINT32_MAX;
  for (; t < batch.tiles_count; t = behind(t)) {
    const KernelTile tile = kReadsAhead ? next : batch.tiles[t];
    if (kReadsAhead && behind(t) < batch.tiles_count) {
      next = batch.tiles[behind(t)];
    }
    if (!kReadsAhead || tile.copy != loaded) {
      __syncthreads();
      LoadToShared(batch.copies[tile.copy], copy);
      __syncthreads();
      loaded = tile.copy;
    }
    if (copy.kind == KernelKind::kCast) {
      CastTile<kKind>(copy, delta, batch.table, tile.tile, found);
      continue;
    }
    switch (copy.unit_bytes) {
      case 16:
        MoveTile<kKind, uint4>(copy, delta, batch.table, tile.tile, found);
        break;
      case 8:
        MoveTile<kKind, uint2>(copy, delta, batch.table, tile.tile, found);
        break;
      case 4:
        MoveTile<kKind, uint32_t>(copy, delta, batch.table, tile.tile, found);
        break;
      case 2:
        MoveTile<kKind, uint16_t>(copy, delta, batch.table, tile.tile, found);
        break;
      default:
        MoveTile<kKind, uint8_t>(copy, delta, batch.table, tile.tile, found);
    }
  }
  __syncthreads();
  Flush(found, reinterpret_cast<DeltaCounts*>(batch.table[delta.counts_entry]));
}

}  // namespace

cudaError_t LoadDeltaKernels() {
  for (const auto kernel :
       {DeltaKernel<DeltaKind::kChanged>, DeltaKernel<DeltaKind::kMarked>,
        DeltaKernel<DeltaKind::kKept>}) {
    if (cudaError_t error = LoadKernel(kernel); error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchDeltas(const KernelBatch& batch, const KernelDelta& delta,
                         uint32_t blocks_max, const uint32_t* unless,
                         cudaStream_t stream) {
  if (batch.tiles_count == 0) return cudaSuccess;
  const uint32_t blocks =
      batch.tiles_count < blocks_max ? batch.tiles_count : blocks_max;
  const auto launch = [&](auto* kernel) {
    kernel<<<blocks, kThreads, 0, stream>>>(batch, delta, unless);
  };
  switch (delta.kind) {
    case DeltaKind::kChanged:
      launch(DeltaKernel<DeltaKind::kChanged>);
      break;
    case DeltaKind::kMarked:
      launch(DeltaKernel<DeltaKind::kMarked>);
      break;
    case DeltaKind::kKept:
      launch(DeltaKernel<DeltaKind::kKept>);
      break;
  }
  return cudaGetLastError();
}

}  // namespace refit::cuda
