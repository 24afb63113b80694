#include "executor/device/cast.h"
#include "executor/device/cuda/kernel_tiles.h"
#include "executor/device/cuda/message_code_kernel.h"
#include "executor/device/cuda/tiles.h"
#include "executor/device/message_format.h"

namespace refit::cuda {
namespace {

constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kWarps = kThreads / kWarpThreads;
constexpr uint32_t kWordBits = 32;
constexpr auto kGroup = static_cast<uint32_t>(kCodeGroupElements);
// Groups of a tile, by the narrowest elements.
constexpr uint32_t kTileGroupsMax = kCodeTileBytes / kGroup;
// Elements whose places a warp lists at a time.
constexpr uint32_t kListed = 1024;
constexpr uint32_t kListedLanes = kListed / kGroup;
// The bits of a group are one uint4.
static_assert(kGroup == 4 * kWordBits);
static_assert(kTileGroupsMax == 4 * kWarpThreads);

__device__ __forceinline__ uint64_t Groups(const KernelMessage& message) {
  const uint32_t shift = message.element_shift;
  return (message.size_bytes + (uint64_t{kGroup} << shift) - 1) / kGroup >>
         shift;
}
__device__ __forceinline__ uint32_t TileGroups(const KernelMessage& message) {
  return kTileGroupsMax >> message.element_shift;
}

__device__ __forceinline__ uint64_t LoadElement(const std::byte* from,
                                                uint32_t bytes) {
  switch (bytes) {
    case 1:
      return *reinterpret_cast<const uint8_t*>(from);
    case 2:
      return *reinterpret_cast<const uint16_t*>(from);
    case 4:
      return *reinterpret_cast<const uint32_t*>(from);
    default:
      return *reinterpret_cast<const uint64_t*>(from);
  }
}

__device__ __forceinline__ void StoreElement(std::byte* to, uint64_t value,
                                             uint32_t bytes) {
  switch (bytes) {
    case 1:
      *reinterpret_cast<uint8_t*>(to) = static_cast<uint8_t>(value);
      return;
    case 2:
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(value);
      return;
    case 4:
      *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(value);
      return;
    default:
      *reinterpret_cast<uint64_t*>(to) = value;
  }
}

// The bits of a float of `dtype` as one of `to`.
__device__ __forceinline__ uint32_t CastBits(uint32_t bits, DType dtype,
                                             DType to) {
  const auto half = static_cast<uint16_t>(bits);
  const uint32_t fp32 = dtype == DType::kFp32   ? bits
                        : dtype == DType::kBf16 ? Fp32FromBf16(half)
                                                : Fp32FromFp16(half);
  return to == DType::kFp32   ? fp32
         : to == DType::kBf16 ? Bf16FromFp32(fp32)
                              : Fp16FromFp32(fp32);
}

__device__ __forceinline__ bool Casts(const KernelCopy& copy) {
  return copy.kind == KernelKind::kCast;
}
// What a unit of the copy takes of its message.
__device__ __forceinline__ uint32_t UnitInMessage(const KernelCopy& copy) {
  return Casts(copy) ? ElementBytes(copy.to_dtype) : copy.unit_bytes;
}

// Where an element of a message lies: the part of it that is asked for, or, of
// a copy that casts, all of it.
struct Place {
  uint64_t entry;
  uint64_t offset;
};

// `at`: a byte of the box.
__device__ __forceinline__ Place PlaceOf(const KernelCopy& copy, uint64_t at) {
  const uint32_t unit_bytes = UnitInMessage(copy);
  const uint32_t shift = __ffs(static_cast<int>(unit_bytes)) - 1;
  const uint64_t unit = at >> shift;
  const uint64_t row =
      unit < (uint64_t{1} << 31)
          ? Divide(static_cast<uint32_t>(unit), copy.row_magic, copy.row_shift)
          : unit / copy.row_units;
  const auto column = static_cast<uint32_t>(unit - row * copy.row_units);
  const RowOffsets offsets = OffsetsOfRow(copy, static_cast<uint32_t>(row));
  const uint64_t in_row =
      Casts(copy) ? uint64_t{column} * ElementBytes(copy.from_dtype)
                  : (uint64_t{column} << shift) + (at & (unit_bytes - 1));
  return {offsets.from_entry, offsets.from_offset + in_row};
}

// The box of a tile that holds `byte` of the message; boxes_end if none does.
__device__ __forceinline__ uint32_t BoxAt(const KernelCodes& codes,
                                          const KernelCodeTile& tile,
                                          uint64_t byte) {
  uint32_t begin = tile.boxes_begin;
  uint32_t end = tile.boxes_end;
  while (end - begin > 1) {
    const uint32_t middle = begin + (end - begin) / 2;
    (codes.boxes[middle].begin_byte <= byte ? begin : end) = middle;
  }
  if (begin == end) return tile.boxes_end;
  const KernelBox& box = codes.boxes[begin];
  return byte >= box.begin_byte && byte < box.end_byte ? begin : tile.boxes_end;
}

// What lies at a byte of a message.
struct Located {
  const KernelCopy& copy;
  uint64_t at;  // byte of the box
  Place place;
};

__device__ __forceinline__ Located LocatedIn(const KernelCodes& codes,
                                             uint32_t box, uint64_t byte) {
  const KernelCopy& copy = codes.copies[box];
  const uint64_t at = byte - codes.boxes[box].begin_byte;
  return {copy, at, PlaceOf(copy, at)};
}

// The parts of a code behind its header (executor/delta/message_code.h).
struct CodeParts {
  std::byte* values;
  std::byte* groups;
  std::byte* positions;
};

__device__ __forceinline__ CodeParts PartsOf(const KernelMessage& message,
                                             uint64_t room) {
  std::byte* const values = message.code + kCodeHeaderBytes;
  std::byte* const groups = values + room * message.element_bytes;
  return {values, groups, groups + Groups(message)};
}

__device__ __forceinline__ void Fail(const KernelCodes& codes,
                                     uint32_t message) {
  atomicCAS(codes.failure, 0ull, 1ull + message);
}

// The sum of the values of the lanes before this one; `total` of all.
__device__ __forceinline__ uint32_t LanesBefore(uint32_t value,
                                                uint32_t& total) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  uint32_t sum = value;
#pragma unroll
  for (uint32_t step = 1; step < kWarpThreads; step *= 2) {
    const uint32_t below = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += below;
  }
  total = __shfl_sync(kAllLanes, sum, kWarpThreads - 1);
  return sum - value;
}

// A bit for each byte of a word that differs.
__device__ __forceinline__ uint32_t DifferentBytes(uint32_t a, uint32_t b) {
  return ((__vcmpne4(a, b) & 0x01010101u) * 0x01020408u) >> 24 & 0xfu;
}

// From a bit for each of 16 bytes to one for each element, at its first byte.
__device__ __forceinline__ uint32_t FirstBytes(uint32_t bytes,
                                               uint32_t element_bytes) {
  if (element_bytes == 1) return bytes;
  bytes |= bytes >> 1;
  if (element_bytes == 2) return bytes & 0x5555u;
  bytes |= bytes >> 2;
  if (element_bytes == 4) return bytes & 0x1111u;
  bytes |= bytes >> 4;
  return bytes & 0x0101u;
}

// The bits at every `step`th of 16 places, one beside the other.
__device__ __forceinline__ uint32_t Gathered(uint32_t bits, uint32_t step) {
  if (step == 1) return bits;
  if (step == 8) return (bits & 1u) | (bits >> 7 & 2u);
  if (step == 4) {
    bits &= 0x1111u;
    bits = (bits | bits >> 3) & 0x0303u;
    return (bits | bits >> 6) & 0xfu;
  }
  bits &= 0x5555u;
  bits = (bits | bits >> 1) & 0x3333u;
  bits = (bits | bits >> 2) & 0x0f0fu;
  return (bits | bits >> 4) & 0xffu;
}

// A bit for each byte that differs, of this thread's units of a tile.
class UnitBits {
 public:
  __device__ __forceinline__ void Set(uint32_t unit, uint32_t bits) {
    (unit < 4 ? low_ : high_) |= uint64_t{bits} << 16 * (unit % 4);
  }
  __device__ __forceinline__ uint32_t Of(uint32_t unit) const {
    return static_cast<uint32_t>((unit < 4 ? low_ : high_) >> 16 * (unit % 4)) &
           0xffffu;
  }
  __device__ __forceinline__ bool Any() const { return (low_ | high_) != 0; }

 private:
  uint64_t low_ = 0;
  uint64_t high_ = 0;
};
static_assert(kUnroll == 8);

struct ComparedRow {
  const std::byte* now = nullptr;
  const std::byte* before = nullptr;
};

__device__ __forceinline__ ComparedRow ComparedRowAt(const KernelCodes& codes,
                                                     const KernelCopy& copy,
                                                     uint32_t row) {
  const RowOffsets at = OffsetsOfRow(copy, row);
  return {codes.table[at.from_entry] + at.from_offset,
          codes.table[at.from_entry + codes.shadow_entries] + at.from_offset};
}

// The highest bit of each half of a word that differs.
__device__ __forceinline__ uint32_t DifferentHalves(uint32_t a, uint32_t b) {
  const uint32_t different = a ^ b;
  return (((different & 0x7fff7fffu) + 0x7fff7fffu) | different) & 0x80008000u;
}

// Most messages: elements of two bytes in units of 16, so that the bits of a
// unit are a byte. Returns how many elements differ. `first_unit`: of the tile,
// in the message.
__device__ __forceinline__ uint32_t MarkHalves(const KernelCodes& codes,
                                               const KernelCopy& copy,
                                               uint32_t tile, uint32_t* words,
                                               uint64_t first_unit) {
  // First all loads: none must wait for a store.
  uint64_t found = 0;
  ForEachTileUnit(
      copy, tile, [&](uint32_t row) { return ComparedRowAt(codes, copy, row); },
      ComparedRow(),
      [&](uint32_t k, const ComparedRow& row, uint32_t at) {
        if (at == copy.row_units) return;
        const uint4 a = reinterpret_cast<const uint4*>(row.now)[at];
        const uint4 b = __ldcs(reinterpret_cast<const uint4*>(row.before) + at);
        // Elements 0, 2, 4 and 6, and 16 bits higher the others.
        const uint32_t pairs =
            DifferentHalves(a.x, b.x) >> 15 | DifferentHalves(a.y, b.y) >> 13 |
            DifferentHalves(a.z, b.z) >> 11 | DifferentHalves(a.w, b.w) >> 9;
        found |= uint64_t{(pairs | pairs >> 15) & 0xffu} << 8 * k;
      });
  if (found == 0) return 0;
#pragma unroll
  for (uint32_t k = 0; k < kUnroll; ++k) {
    const auto bits = static_cast<uint32_t>(found >> 8 * k) & 0xffu;
    const uint64_t unit = first_unit + k * kThreads + threadIdx.x;
    if (bits != 0) atomicOr(&words[unit / 4], bits << 8 * (unit % 4));
  }
  return static_cast<uint32_t>(__popcll(found));
}

// `kWide`: units of 16 bytes.
template <bool kWide>
__device__ __forceinline__ void CompareUnits(const KernelCodes& codes,
                                             const KernelCopy& copy,
                                             uint32_t tile, UnitBits& found) {
  const uint32_t size =
      Casts(copy) ? ElementBytes(copy.from_dtype) : copy.unit_bytes;
  ForEachTileUnit(
      copy, tile, [&](uint32_t row) { return ComparedRowAt(codes, copy, row); },
      ComparedRow(),
      [&](uint32_t k, const ComparedRow& row, uint32_t at) {
        if (at == copy.row_units) return;
        if constexpr (kWide) {
          const uint4 a = reinterpret_cast<const uint4*>(row.now)[at];
          const uint4 b =
              __ldcs(reinterpret_cast<const uint4*>(row.before) + at);
          found.Set(k, DifferentBytes(a.x, b.x) |
                           DifferentBytes(a.y, b.y) << 4 |
                           DifferentBytes(a.z, b.z) << 8 |
                           DifferentBytes(a.w, b.w) << 12);
        } else {
          const uint64_t place = uint64_t{at} * size;
          uint64_t a = LoadElement(row.now + place, size);
          uint64_t b = LoadElement(row.before + place, size);
          if (Casts(copy)) {
            // What is sent may be the same.
            a = CastBits(static_cast<uint32_t>(a), copy.from_dtype,
                         copy.to_dtype);
            b = CastBits(static_cast<uint32_t>(b), copy.from_dtype,
                         copy.to_dtype);
          }
          const uint64_t different = a ^ b;
          found.Set(
              k, DifferentBytes(static_cast<uint32_t>(different), 0) |
                     DifferentBytes(static_cast<uint32_t>(different >> 32), 0)
                         << 4);
        }
      });
}

// Sets the bits of elements that differ from their shadows, or are always sent,
// and counts those that differ.
__global__ void __launch_bounds__(kThreads)
    CompareTiles(const KernelCodes codes) {
  __shared__ KernelCopy copy;
  // What the block found in a tile: all blocks add to the same few numbers.
  __shared__ uint32_t tile_count;
  uint32_t counted_message = 0;
  const auto add_count = [&](uint32_t count) {
    count = __reduce_add_sync(kAllLanes, count);
    if (count != 0 && threadIdx.x % kWarpThreads == 0) {
      atomicAdd(&tile_count, count);
    }
  };
  const auto flush_count = [&] {
    if (threadIdx.x != 0 || tile_count == 0) return;
    atomicAdd(&codes.changed[counted_message].count, tile_count);
    tile_count = 0;
  };
  if (threadIdx.x == 0) tile_count = 0;
  for (uint64_t t = blockIdx.x; t < codes.compared_count; t += gridDim.x) {
    const KernelTile tile = codes.compared[t];
    __syncthreads();
    flush_count();
    LoadToShared(codes.copies[tile.copy], copy);
    __syncthreads();
    const KernelBox box = codes.boxes[tile.copy];
    counted_message = box.message;
    const KernelMessage& message = codes.messages[box.message];
    const uint32_t width_shift = message.element_shift;
    uint32_t* const words = codes.bits + message.first_word;
    if (copy.unit_bytes == 16 && width_shift == 1 && box.always == 0 &&
        ElementBytes(copy.from_dtype) == 2) {
      const uint64_t first_unit =
          box.begin_byte / 16 + uint64_t{tile.tile} * kTileUnits;
      add_count(MarkHalves(codes, copy, tile.tile, words, first_unit));
      continue;
    }
    UnitBits found;
    if (box.always != 0) {
      for (uint32_t k = 0; k < kUnroll; ++k) found.Set(k, 0xffffu);
    } else if (copy.unit_bytes == 16) {
      CompareUnits<true>(codes, copy, tile.tile, found);
    } else {
      CompareUnits<false>(codes, copy, tile.tile, found);
    }
    if (__ballot_sync(kAllLanes, found.Any()) == 0) continue;
    const uint32_t unit_bytes = UnitInMessage(copy);
    const uint32_t element_bytes =
        Casts(copy) ? unit_bytes : ElementBytes(copy.from_dtype);
    uint32_t count = 0;
    for (uint32_t k = 0; k < kUnroll; ++k) {
      uint32_t bytes = found.Of(k);
      if (bytes == 0) continue;
      const uint64_t unit =
          uint64_t{tile.tile} * kTileUnits + k * kThreads + threadIdx.x;
      const uint64_t byte = box.begin_byte + unit * unit_bytes;
      if (byte >= box.end_byte) continue;
      // An element of another size in the tensor differs as a whole.
      if (Casts(copy)) bytes = 1;
      bytes = FirstBytes(bytes & ((1u << unit_bytes) - 1), element_bytes);
      count += __popc(bytes);
      const uint32_t bits =
          Gathered(bytes * ((1u << element_bytes) - 1), 1u << width_shift);
      const uint64_t element = byte >> width_shift;
      atomicOr(&words[element / kWordBits], bits << element % kWordBits);
    }
    if (box.always == 0) add_count(count);
  }
  __syncthreads();
  flush_count();
}

// A warp's tile of a message.
struct WarpTile {
  uint64_t number;
  uint32_t place;  // in the message
  KernelCodeTile tile;
};

// Calls body(warp_tile, message) for each tile of the work that is of a send,
// or of a receive, warp by warp.
template <typename Body>
__device__ __forceinline__ void ForEachWarpTile(const KernelCodes& codes,
                                                uint64_t begin, uint64_t count,
                                                bool sends, const Body& body) {
  const uint64_t warp =
      uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpThreads;
  for (uint64_t t = warp; t < count; t += uint64_t{gridDim.x} * kWarps) {
    const uint64_t number = begin + t;
    const KernelCodeTile tile = codes.tiles[number];
    const KernelMessage& message = codes.messages[tile.message];
    if ((message.is_send != 0) != sends) continue;
    body(WarpTile{number, static_cast<uint32_t>(number - message.first_tile),
                  tile},
         message);
  }
}

// The bits of a group; 0 where there is none.
__device__ __forceinline__ uint4 BitsOfGroup(const KernelCodes& codes,
                                             const KernelMessage& message,
                                             uint64_t group, bool is_group) {
  if (!is_group) return make_uint4(0, 0, 0, 0);
  return reinterpret_cast<const uint4*>(codes.bits + message.first_word)[group];
}
__device__ __forceinline__ uint32_t CountBits(const uint4& bits) {
  return __popc(bits.x) + __popc(bits.y) + __popc(bits.z) + __popc(bits.w);
}

// Into `bases` how many elements each tile codes.
__global__ void __launch_bounds__(kThreads) SumBits(const KernelCodes codes) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  ForEachWarpTile(codes, 0, codes.tiles_count, /*sends=*/true,
                  [&](const WarpTile& of, const KernelMessage& message) {
                    const uint32_t per_tile = TileGroups(message);
                    const uint64_t first = uint64_t{of.place} * per_tile;
                    const uint64_t groups = Groups(message);
                    uint32_t sum = 0;
                    for (uint32_t g = lane; g < per_tile; g += kWarpThreads) {
                      sum += CountBits(BitsOfGroup(codes, message, first + g,
                                                   first + g < groups));
                    }
                    sum = __reduce_add_sync(kAllLanes, sum);
                    if (lane == 0) codes.bases[of.number] = sum;
                  });
}

// Into `bases` how many elements the groups of each tile of a received code
// hold.
__global__ void __launch_bounds__(kThreads)
    SumGroups(const KernelCodes codes, const CodeWork work, uint32_t rung) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  ForEachWarpTile(
      codes, work.tiles_begin, work.tiles_count, /*sends=*/false,
      [&](const WarpTile& of, const KernelMessage& message) {
        const uint64_t room = codes.rooms[of.tile.message * codes.rungs + rung];
        if (room == 0) return;
        const uint32_t per_tile = TileGroups(message);
        const uint64_t first = uint64_t{of.place} * per_tile;
        const uint64_t groups = Groups(message);
        const std::byte* const counts = PartsOf(message, room).groups + first;
        uint32_t sum = 0;
        for (uint32_t g = lane; g < per_tile && first + g < groups;
             g += kWarpThreads) {
          sum += static_cast<uint32_t>(counts[g]);
        }
        sum = __reduce_add_sync(kAllLanes, sum);
        if (lane == 0) codes.bases[of.number] = sum;
      });
}

// From the elements of each tile to those before it, and their total: a block
// takes a message.
__global__ void __launch_bounds__(kThreads)
    ScanTiles(const KernelCodes codes, uint32_t messages_begin, bool sends) {
  __shared__ uint64_t sums[kWarps];
  const uint32_t number = messages_begin + blockIdx.x;
  const KernelMessage& message = codes.messages[number];
  if ((message.is_send != 0) != sends) return;
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint32_t warp = threadIdx.x / kWarpThreads;
  uint64_t* const bases = codes.bases + message.first_tile;
  uint64_t before = 0;
  for (uint32_t begin = 0; begin < message.tiles; begin += kThreads) {
    const uint32_t t = begin + threadIdx.x;
    // Of a tile 2^14 elements at most, or of damaged groups 2^15.
    const auto value = t < message.tiles ? static_cast<uint32_t>(bases[t]) : 0u;
    uint32_t of_warp;
    const uint32_t in_warp = LanesBefore(value, of_warp);
    __syncthreads();
    if (lane == 0) sums[warp] = of_warp;
    __syncthreads();
    uint64_t base = before;
    for (uint32_t w = 0; w < kWarps; ++w) {
      if (w < warp) base += sums[w];
      before += sums[w];
    }
    if (t < message.tiles) bases[t] = base + in_warp;
  }
  if (threadIdx.x != 0) return;
  codes.totals[number] = before;
  if (sends) codes.changed[number].room = before;
}

// Calls body(element, ordinal) for each element of the tile whose bit is set,
// lane by lane; ordinals count in the message, from `base` on. Before that,
// on_group(number, bits_set) for each group of the message. `listed`: kListed
// numbers of the warp's own.
template <typename OnGroup, typename Body>
__device__ __forceinline__ void ForEachBit(const KernelCodes& codes,
                                           const KernelMessage& message,
                                           const WarpTile& of, uint64_t base,
                                           uint16_t* listed,
                                           const OnGroup& on_group,
                                           const Body& body) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint32_t per_tile = TileGroups(message);
  const uint64_t first = uint64_t{of.place} * per_tile;
  const uint64_t groups = Groups(message);
  for (uint32_t g = 0; g < per_tile && first + g < groups; g += kWarpThreads) {
    const uint64_t group = first + g + lane;
    const bool is_group = g + lane < per_tile && group < groups;
    const uint4 bits = BitsOfGroup(codes, message, group, is_group);
    const uint32_t count = CountBits(bits);
    if (is_group) on_group(group, count);
    uint32_t total;
    const uint32_t before = LanesBefore(count, total);
    // So many lanes at a time as surely find place.
    const uint32_t lanes = total <= kListed ? kWarpThreads : kListedLanes;
    for (uint32_t l = 0; total != 0 && l < kWarpThreads; l += lanes) {
      const uint32_t begin = __shfl_sync(kAllLanes, before, l);
      const uint32_t end =
          l + lanes < kWarpThreads
              ? __shfl_sync(kAllLanes, before, (l + lanes) % kWarpThreads)
              : total;
      if (lane >= l && lane < l + lanes) {
        uint32_t next = before - begin;
        const uint32_t of_group[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (uint32_t w = 0; w < 4; ++w) {
          for (uint32_t word = of_group[w]; word != 0; word &= word - 1) {
            listed[next++] =
                static_cast<uint16_t>(lane * kGroup + w * kWordBits +
                                      __ffs(static_cast<int>(word)) - 1);
          }
        }
      }
      __syncwarp();
      for (uint32_t j = lane; j < end - begin; j += kWarpThreads) {
        body((first + g) * kGroup + listed[j], base + begin + j);
      }
      __syncwarp();
    }
    base += total;
  }
}

__global__ void __launch_bounds__(kThreads)
    EncodeTiles(const KernelCodes codes, const CodeWork work, uint32_t rung) {
  __shared__ uint16_t listed[kWarps][kListed];
  const uint32_t lane = threadIdx.x % kWarpThreads;
  ForEachWarpTile(
      codes, work.tiles_begin, work.tiles_count, /*sends=*/true,
      [&](const WarpTile& of, const KernelMessage& message) {
        const uint64_t room = codes.rooms[of.tile.message * codes.rungs + rung];
        if (room == 0) return;
        const uint32_t width = message.element_bytes;
        const CodeParts code = PartsOf(message, room);
        ForEachBit(
            codes, message, of, codes.bases[of.number],
            listed[threadIdx.x / kWarpThreads],
            [&](uint64_t group, uint32_t count) {
              code.groups[group] = static_cast<std::byte>(count);
            },
            [&](uint64_t element, uint64_t slot) {
              if (slot >= room) return;
              const uint64_t byte = element << message.element_shift;
              const uint32_t b = BoxAt(codes, of.tile, byte);
              if (b == of.tile.boxes_end) return;
              const auto [copy, at, place] = LocatedIn(codes, b, byte);
              const std::byte* const from =
                  codes.table[place.entry] + place.offset;
              uint64_t value;
              if (Casts(copy)) {
                const auto bits = static_cast<uint32_t>(
                    LoadElement(from, ElementBytes(copy.from_dtype)));
                value = CastBits(bits, copy.from_dtype, copy.to_dtype) >>
                        8 * (at & (ElementBytes(copy.to_dtype) - 1));
              } else {
                value = LoadElement(from, width);
              }
              StoreElement(code.values + slot * width, value, width);
              code.positions[slot] = static_cast<std::byte>(element % kGroup);
            });
        if (lane == 0 && of.place + 1 == message.tiles) {
          *reinterpret_cast<uint2*>(message.code) = make_uint2(
              static_cast<uint32_t>(codes.totals[of.tile.message]), 0);
        }
      });
}

__global__ void __launch_bounds__(kThreads) KeepTiles(const KernelCodes codes) {
  __shared__ uint16_t listed[kWarps][kListed];
  ForEachWarpTile(
      codes, 0, codes.tiles_count, /*sends=*/true,
      [&](const WarpTile& of, const KernelMessage& message) {
        const uint32_t width = message.element_bytes;
        ForEachBit(
            codes, message, of, 0, listed[threadIdx.x / kWarpThreads],
            [](uint64_t, uint32_t) {},
            [&](uint64_t element, uint64_t) {
              const uint64_t byte = element << message.element_shift;
              const uint32_t b = BoxAt(codes, of.tile, byte);
              if (b == of.tile.boxes_end) return;
              const auto [copy, at, place] = LocatedIn(codes, b, byte);
              const uint32_t size =
                  Casts(copy) ? ElementBytes(copy.from_dtype) : width;
              StoreElement(
                  codes.table[place.entry + codes.shadow_entries] +
                      place.offset,
                  LoadElement(codes.table[place.entry] + place.offset, size),
                  size);
            });
      });
}

// An element of a code that is received.
struct ReceivedElement {
  uint32_t in_group;  // how many of its group come before it
  uint32_t behind;    // and behind it
  const std::byte* position;
  const std::byte* value;
};

// False: no message is encoded like that.
__device__ __forceinline__ bool ApplyElement(const KernelCodes& codes,
                                             const WarpTile& of,
                                             const KernelMessage& message,
                                             uint64_t group,
                                             const ReceivedElement& received) {
  const uint32_t width = message.element_bytes;
  const auto position_at = [&](int32_t other) {
    return static_cast<uint32_t>(received.position[other]);
  };
  const uint32_t position = position_at(0);
  const uint64_t byte = (group * kGroup + position) << message.element_shift;
  if (position >= kGroup || byte + width > message.size_bytes ||
      (received.in_group > 0 && position_at(-1) >= position)) {
    return false;
  }
  const uint32_t b = BoxAt(codes, of.tile, byte);
  if (b == of.tile.boxes_end) return false;
  const auto [copy, at, place] = LocatedIn(codes, b, byte);
  std::byte* const to = codes.table[place.entry] + place.offset;
  if (!Casts(copy)) {
    StoreElement(to, LoadElement(received.value, width), width);
    return true;
  }
  // It is cast from all its parts, by the thread of the first.
  const uint32_t parts = ElementBytes(copy.to_dtype) >> message.element_shift;
  const uint32_t part =
      static_cast<uint32_t>(at >> message.element_shift) & (parts - 1);
  if (part != 0) {
    return received.in_group > 0 && position_at(-1) + 1 == position;
  }
  if (received.behind + 1 < parts) return false;
  uint64_t value = 0;
  for (uint32_t p = 0; p < parts; ++p) {
    if (position_at(static_cast<int32_t>(p)) != position + p) return false;
    value |= LoadElement(received.value + p * width, width) << 8 * width * p;
  }
  StoreElement(
      to,
      CastBits(static_cast<uint32_t>(value), copy.to_dtype, copy.from_dtype),
      ElementBytes(copy.from_dtype));
  return true;
}

__global__ void __launch_bounds__(kThreads)
    ApplyTiles(const KernelCodes codes, const CodeWork work, uint32_t rung) {
  __shared__ uint32_t begins_of_warps[kWarps][kTileGroupsMax + 1];
  const uint32_t lane = threadIdx.x % kWarpThreads;
  uint32_t* const begins = begins_of_warps[threadIdx.x / kWarpThreads];
  ForEachWarpTile(
      codes, work.tiles_begin, work.tiles_count, /*sends=*/false,
      [&](const WarpTile& of, const KernelMessage& message) {
        const uint32_t number = of.tile.message;
        const uint64_t room = codes.rooms[number * codes.rungs + rung];
        if (room == 0) return;
        const uint32_t width = message.element_bytes;
        const uint32_t per_tile = TileGroups(message);
        const uint64_t first_group = uint64_t{of.place} * per_tile;
        const uint64_t groups_count = Groups(message);
        const CodeParts code = PartsOf(message, room);
        if (of.place == 0 && lane == 0) {
          const uint2 header = *reinterpret_cast<const uint2*>(message.code);
          if (header.x != codes.totals[number] || header.y != 0 ||
              header.x > room) {
            Fail(codes, number);
          }
        }
        const uint64_t base = codes.bases[of.number];
        // Where the elements of each group begin, in the tile.
        uint32_t total = 0;
        for (uint32_t g = lane; g - lane < per_tile; g += kWarpThreads) {
          const bool is_group = g < per_tile && first_group + g < groups_count;
          uint32_t of_lanes;
          const uint32_t before = LanesBefore(
              is_group ? static_cast<uint32_t>(code.groups[first_group + g])
                       : 0,
              of_lanes);
          if (g < per_tile) begins[g] = total + before;
          total += of_lanes;
        }
        if (lane == 0) begins[per_tile] = total;
        __syncwarp();
        for (uint32_t j = lane; j < total && base + j < room;
             j += kWarpThreads) {
          // The last group that begins at j or before.
          uint32_t low = 0;
          for (uint32_t step = per_tile / 2; step > 0; step /= 2) {
            if (begins[low + step] <= j) low += step;
          }
          const uint64_t slot = base + j;
          // What is behind it and has no room is not there.
          const uint64_t end =
              base + begins[low + 1] < room ? base + begins[low + 1] : room;
          const ReceivedElement received = {
              .in_group = j - begins[low],
              .behind = static_cast<uint32_t>(end - slot) - 1,
              .position = code.positions + slot,
              .value = code.values + slot * width};
          if (!ApplyElement(codes, of, message, first_group + low, received)) {
            Fail(codes, number);
          }
        }
        __syncwarp();
      });
}

uint32_t WarpBlocksFor(uint64_t tiles, uint32_t blocks_max) {
  const uint64_t blocks = (tiles + kWarps - 1) / kWarps;
  return blocks < blocks_max ? static_cast<uint32_t>(blocks) : blocks_max;
}

}  // namespace

cudaError_t LoadMessageCodeKernels() {
  cudaError_t error = LoadKernel(CompareTiles);
  if (error == cudaSuccess) error = LoadKernel(SumBits);
  if (error == cudaSuccess) error = LoadKernel(SumGroups);
  if (error == cudaSuccess) error = LoadKernel(ScanTiles);
  if (error == cudaSuccess) error = LoadKernel(EncodeTiles);
  if (error == cudaSuccess) error = LoadKernel(ApplyTiles);
  if (error == cudaSuccess) error = LoadKernel(KeepTiles);
  return error;
}

cudaError_t LaunchCount(const KernelCodes& codes, uint32_t blocks_max,
                        cudaStream_t stream) {
  if (codes.compared_count == 0) return cudaSuccess;
  const uint32_t blocks = codes.compared_count < blocks_max
                              ? static_cast<uint32_t>(codes.compared_count)
                              : blocks_max;
  CompareTiles<<<blocks, kThreads, 0, stream>>>(codes);
  SumBits<<<WarpBlocksFor(codes.tiles_count, blocks_max), kThreads, 0,
            stream>>>(codes);
  ScanTiles<<<codes.messages_count, kThreads, 0, stream>>>(codes, 0, true);
  return cudaGetLastError();
}

cudaError_t LaunchEncode(const KernelCodes& codes, const CodeWork& work,
                         uint32_t rung, uint32_t blocks_max,
                         cudaStream_t stream) {
  if (work.tiles_count == 0) return cudaSuccess;
  EncodeTiles<<<WarpBlocksFor(work.tiles_count, blocks_max), kThreads, 0,
                stream>>>(codes, work, rung);
  return cudaGetLastError();
}

cudaError_t LaunchApply(const KernelCodes& codes, const CodeWork& work,
                        uint32_t rung, uint32_t blocks_max,
                        cudaStream_t stream) {
  if (work.tiles_count == 0) return cudaSuccess;
  const uint32_t blocks = WarpBlocksFor(work.tiles_count, blocks_max);
  SumGroups<<<blocks, kThreads, 0, stream>>>(codes, work, rung);
  ScanTiles<<<work.messages_count, kThreads, 0, stream>>>(
      codes, work.messages_begin, false);
  ApplyTiles<<<blocks, kThreads, 0, stream>>>(codes, work, rung);
  return cudaGetLastError();
}

cudaError_t LaunchKeep(const KernelCodes& codes, uint32_t blocks_max,
                       cudaStream_t stream) {
  if (codes.compared_count == 0) return cudaSuccess;
  KeepTiles<<<WarpBlocksFor(codes.tiles_count, blocks_max), kThreads, 0,
              stream>>>(codes);
  return cudaGetLastError();
}

}  // namespace refit::cuda
