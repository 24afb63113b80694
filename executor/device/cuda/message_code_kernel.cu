#include <algorithm>

#include "executor/device/cast.h"
#include "executor/device/cuda/kernel_tiles.h"
#include "executor/device/cuda/message_code_kernel.h"
#include "executor/device/cuda/tiles.h"
#include "plan/schedule/coded_message.h"

namespace refit::cuda {
namespace {

constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kWarps = kThreads / kWarpThreads;
constexpr uint32_t kScanThreads = 1024;
constexpr uint32_t kWordBits = 32;
constexpr auto kGroup = static_cast<uint32_t>(kCodeGroupElements);
constexpr uint32_t kTileGroups = kCodeTileElements / kGroup;
// Groups of a tile that each lane takes: group 32 s + lane in step s.
constexpr uint32_t kSteps = kTileGroups / kWarpThreads;
// Elements that a warp lists at a time, and the groups that surely fit.
constexpr uint32_t kListed = 2048;
constexpr uint32_t kListedGroups = kListed / kGroup;
// Elements that a lane reads before it stores one: scattered reads take long.
constexpr uint32_t kAhead = 4;
// Blocks of a multiprocessor. With more the lists' kernels have too few
// registers, and spill.
constexpr uint32_t kResidentBlocks = 3;
constexpr uint32_t kComparingBlocks = 4;
constexpr uint32_t kMarkingBlocks = 4;
constexpr uint16_t kNoElement = 0xffff;
static_assert(kCodeTileElements <= kNoElement);
static_assert(kWarpThreads % kListedGroups == 0);
// The bits of a group are one uint4.
static_assert(kGroup == 4 * kWordBits);

__device__ __forceinline__ uint64_t Groups(const KernelMessage& message) {
  const uint32_t shift = message.element_shift;
  return (message.size_bytes + (uint64_t{kGroup} << shift) - 1) / kGroup >>
         shift;
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
  const uint32_t fp32 = dtype == element::kFp32   ? bits
                        : dtype == element::kBf16 ? Fp32FromBf16(half)
                                                  : Fp32FromFp16(half);
  return to == element::kFp32   ? fp32
         : to == element::kBf16 ? Bf16FromFp32(fp32)
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
  uint64_t in_row;  // likewise, from the begin of the row
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
  return {offsets.from_entry, offsets.from_offset + in_row, in_row};
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
                                             const KernelRoom& room) {
  std::byte* const values = room.code + kCodeHeaderBytes;
  std::byte* const groups = values + room.elements * message.element_bytes;
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
          codes.table[at.from_entry + codes.change_entries] + at.from_offset};
}

// The highest bit of each half of a word that differs.
__device__ __forceinline__ uint32_t DifferentHalves(uint32_t a, uint32_t b) {
  const uint32_t different = a ^ b;
  return (((different & 0x7fff7fffu) + 0x7fff7fffu) | different) & 0x80008000u;
}

// Most messages: elements of two bytes in units of 16, so that the bits of a
// unit are a byte, which no other thread writes. Returns those of the thread's
// units. `first_unit`: of the tile, in the message.
__device__ __forceinline__ uint64_t MarkHalves(const KernelCodes& codes,
                                               const KernelCopy& copy,
                                               uint32_t tile, uint8_t* bits,
                                               uint64_t first_unit) {
  // First all loads: none must wait for a store.
  uint64_t found = 0;
  uint32_t units = 0;
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
        units = k + 1;
      });
  for (uint32_t k = 0; k < units; ++k) {
    bits[first_unit + k * kThreads + threadIdx.x] =
        static_cast<uint8_t>(found >> 8 * k);
  }
  return found;
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
// counts those that differ, and into `bases` those that each tile codes.
__global__ void __launch_bounds__(kThreads)
    CompareTiles(const KernelCodes codes) {
  // Of the tiles of a message that a block may meet at a time.
  constexpr uint32_t kTilesMet = kTileUnits * 16 / kCodeTileElements + 1;
  __shared__ KernelCopy copy;
  // What the block found: all blocks add to the same few numbers.
  __shared__ uint32_t changed;
  __shared__ uint32_t coded[kTilesMet];
  uint64_t coded_tile = 0;
  uint32_t counted_message = 0;
  const auto add = [&](uint32_t& sum, uint32_t count) {
    count = __reduce_add_sync(kAllLanes, count);
    if (count != 0 && threadIdx.x % kWarpThreads == 0) atomicAdd(&sum, count);
  };
  const auto flush = [&] {
    if (threadIdx.x < kTilesMet) {
      const uint32_t count = coded[threadIdx.x];
      coded[threadIdx.x] = 0;
      if (count != 0) atomicAdd(&codes.bases[coded_tile + threadIdx.x], count);
    }
    if (threadIdx.x != 0 || changed == 0) return;
    atomicAdd(&codes.changed[counted_message].count, changed);
    changed = 0;
  };
  if (threadIdx.x == 0) changed = 0;
  if (threadIdx.x < kTilesMet) coded[threadIdx.x] = 0;
  for (uint64_t t = blockIdx.x; t < codes.compared_count; t += gridDim.x) {
    const KernelTile tile = codes.compared[t];
    __syncthreads();
    flush();
    LoadToShared(codes.copies[tile.copy], copy);
    __syncthreads();
    const KernelBox box = codes.boxes[tile.copy];
    counted_message = box.message;
    const KernelMessage& message = codes.messages[box.message];
    const uint32_t width_shift = message.element_shift;
    uint32_t* const words = codes.bits + message.first_word;
    const uint32_t unit_bytes = UnitInMessage(copy);
    const uint64_t first_byte =
        box.begin_byte + uint64_t{tile.tile} * kTileUnits * unit_bytes;
    const uint64_t first_tile = (first_byte >> width_shift) / kCodeTileElements;
    coded_tile = message.first_tile + first_tile;
    if (box.is_bytes != 0) {
      constexpr uint32_t kUnitsOfTile = kCodeTileElements / 8;
      static_assert(kUnitsOfTile == kTileUnits);
      const uint64_t first_unit = first_byte / 16;
      const uint64_t found =
          MarkHalves(codes, copy, tile.tile, reinterpret_cast<uint8_t*>(words),
                     first_unit);
      // The thread's units before the message's next tile.
      const auto left =
          static_cast<uint32_t>(kUnitsOfTile - first_unit % kUnitsOfTile);
      const uint32_t units =
          threadIdx.x < left ? (left - threadIdx.x + kThreads - 1) / kThreads
                             : 0;
      const auto of_first = static_cast<uint32_t>(__popcll(
          units < kUnroll ? found & ((1ull << 8 * units) - 1) : found));
      const auto all = static_cast<uint32_t>(__popcll(found));
      if (__ballot_sync(kAllLanes, all != 0) == 0) continue;
      add(changed, all);
      add(coded[0], of_first);
      add(coded[1], all - of_first);
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
    const uint32_t element_bytes =
        Casts(copy) ? unit_bytes : ElementBytes(copy.from_dtype);
    uint32_t count = 0;
    for (uint32_t k = 0; k < kUnroll; ++k) {
      uint32_t bytes = found.Of(k);
      if (bytes == 0) continue;
      const uint64_t byte =
          first_byte + uint64_t{k * kThreads + threadIdx.x} * unit_bytes;
      if (byte >= box.end_byte) continue;
      // An element of another size in the tensor differs as a whole.
      if (Casts(copy)) bytes = 1;
      bytes = FirstBytes(bytes & ((1u << unit_bytes) - 1), element_bytes);
      count += __popc(bytes);
      const uint32_t bits =
          Gathered(bytes * ((1u << element_bytes) - 1), 1u << width_shift);
      const uint64_t element = byte >> width_shift;
      atomicOr(&words[element / kWordBits], bits << element % kWordBits);
      atomicAdd(&coded[element / kCodeTileElements - first_tile],
                static_cast<uint32_t>(__popc(bits)));
    }
    if (box.always == 0) add(changed, count);
  }
  __syncthreads();
  flush();
}

// Where the elements of a unit have their marks.
struct MarkedRow {
  const uint32_t* marks = nullptr;  // of the tensor
  uint64_t first = 0;               // of the row's first element
};

__device__ __forceinline__ MarkedRow MarkedRowAt(const KernelCodes& codes,
                                                 const KernelCopy& copy,
                                                 uint32_t row) {
  const RowOffsets at = OffsetsOfRow(copy, row);
  return {reinterpret_cast<const uint32_t*>(
              codes.table[at.from_entry + codes.change_entries]),
          at.from_offset / ElementBytes(copy.from_dtype)};
}

// `count` marks from number `first` on, 32 at most. It reads no word that has
// none of them.
__device__ __forceinline__ uint32_t MarksAt(const uint32_t* marks,
                                            uint64_t first, uint32_t count) {
  const auto shift = static_cast<uint32_t>(first % kWordBits);
  const uint32_t low = __ldcs(&marks[first / kWordBits]);
  const uint32_t high =
      shift + count > kWordBits ? __ldcs(&marks[first / kWordBits + 1]) : 0;
  return __funnelshift_r(low, high, shift) &
         (count == kWordBits ? kAllLanes : (1u << count) - 1);
}

// What a lane has found in a tile of a copy.
struct FoundMarks {
  uint32_t changed = 0;
  uint32_t coded[3] = {};  // by tile of the message that it meets
};
static_assert(kTileUnits * 16 / kCodeTileElements + 1 == 3);

// A tile of a box that `is_bytes` whose rows hold whole words of marks, which
// in the message are words, too: nearly all. `bits`: of the tile. `left`: words
// before the message's next tile.
__device__ __forceinline__ void TakeWords(const KernelCodes& codes,
                                          const KernelCopy& copy,
                                          uint64_t first, uint32_t words,
                                          uint32_t* bits, uint32_t left,
                                          FoundMarks& found) {
  constexpr uint32_t kWordsMax = kTileUnits / 4 / kWarpThreads;
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const auto first_row = static_cast<uint32_t>(first / copy.row_units);
  const auto column =
      static_cast<uint32_t>(first - uint64_t{first_row} * copy.row_units);
  const bool is_row = column + kTileUnits <= copy.row_units;
  const MarkedRow one = MarkedRowAt(codes, copy, first_row);
  // First all loads: none must wait for a store.
  uint32_t taken[kWordsMax];
#pragma unroll
  for (uint32_t i = 0; i < kWordsMax; ++i) {
    const uint32_t word = i * kWarpThreads + lane;
    taken[i] = 0;
    if (word >= words) continue;
    const uint32_t unit = column + word * 4;
    const uint32_t down =
        is_row ? 0 : Divide(unit, copy.row_magic, copy.row_shift);
    const MarkedRow row =
        down == 0 ? one : MarkedRowAt(codes, copy, first_row + down);
    taken[i] = MarksAt(row.marks,
                       row.first + uint64_t{unit - down * copy.row_units} * 8,
                       kWordBits);
  }
#pragma unroll
  for (uint32_t i = 0; i < kWordsMax; ++i) {
    const uint32_t word = i * kWarpThreads + lane;
    if (word < words) bits[word] = taken[i];
    found.changed += __popc(taken[i]);
    if (word < left) found.coded[0] += __popc(taken[i]);
  }
  found.coded[1] = found.changed - found.coded[0];
}

// A tile of any box, unit by unit.
__device__ __forceinline__ void TakeUnits(const KernelCodes& codes,
                                          const KernelCopy& copy,
                                          const KernelBox& box,
                                          const KernelMessage& message,
                                          uint64_t first, uint32_t units,
                                          FoundMarks& found) {
  const uint32_t unit_bytes = UnitInMessage(copy);
  const uint32_t elements =
      Casts(copy) ? 1 : unit_bytes / ElementBytes(copy.from_dtype);
  // Of an element of the tensor in the message.
  const uint32_t parts = unit_bytes / elements >> message.element_shift;
  const uint32_t whole = (1u << parts) - 1;
  const auto first_row = static_cast<uint32_t>(first / copy.row_units);
  const auto column =
      static_cast<uint32_t>(first - uint64_t{first_row} * copy.row_units);
  const uint64_t first_byte = box.begin_byte + first * unit_bytes;
  const uint64_t first_tile =
      (first_byte >> message.element_shift) / kCodeTileElements;
  uint32_t* const words = codes.bits + message.first_word;
  for (uint32_t u = threadIdx.x % kWarpThreads; u < units; u += kWarpThreads) {
    const uint32_t unit = column + u;
    const uint32_t down = Divide(unit, copy.row_magic, copy.row_shift);
    uint32_t marks = (1u << elements) - 1;
    if (box.always == 0) {
      const MarkedRow row = MarkedRowAt(codes, copy, first_row + down);
      const uint32_t in_row = unit - down * copy.row_units;
      marks =
          MarksAt(row.marks, row.first + uint64_t{in_row} * elements, elements);
      found.changed += __popc(marks);
    }
    const uint64_t byte = first_byte + uint64_t{u} * unit_bytes;
    const uint64_t element = byte >> message.element_shift;
    uint32_t bits = marks;
    if (parts > 1) {
      bits = 0;
      for (uint32_t rest = marks; rest != 0; rest &= rest - 1) {
        bits |= whole << (__ffs(static_cast<int>(rest)) - 1) * parts;
      }
    }
    if (box.is_bytes != 0) {
      reinterpret_cast<uint8_t*>(words)[byte / 16] = static_cast<uint8_t>(bits);
    } else if (bits != 0) {
      atomicOr(&words[element / kWordBits], bits << element % kWordBits);
    }
    const auto tile =
        static_cast<uint32_t>(element / kCodeTileElements - first_tile);
#pragma unroll
    for (uint32_t t = 0; t < 3; ++t) {
      if (tile == t) found.coded[t] += __popc(bits);
    }
  }
}

// As CompareTiles, but marks tell what changed. A warp takes a tile: there is
// little to read of one, and a block would mostly wait.
__global__ void __launch_bounds__(kThreads, kMarkingBlocks)
    TakeMarks(const __grid_constant__ KernelCodes codes) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint64_t step = uint64_t{gridDim.x} * kWarps;
  uint64_t t = uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpThreads;
  KernelTile next = {};
  if (t < codes.compared_count) next = codes.compared[t];
  for (; t < codes.compared_count; t += step) {
    const KernelTile tile = next;
    // Early: all that follows waits for it.
    if (t + step < codes.compared_count) next = codes.compared[t + step];
    const KernelCopy& copy = codes.copies[tile.copy];
    const KernelBox& box = codes.boxes[tile.copy];
    const KernelMessage& message = codes.messages[box.message];
    const uint64_t first = uint64_t{tile.tile} * kTileUnits;
    const auto units = static_cast<uint32_t>(min(
        uint64_t{kTileUnits}, uint64_t{copy.rows} * copy.row_units - first));
    const uint64_t first_element =
        (box.begin_byte + first * UnitInMessage(copy)) >> message.element_shift;
    FoundMarks found;
    if (box.is_bytes != 0 && copy.row_units % 4 == 0 &&
        first_element % kWordBits == 0) {
      const auto left = static_cast<uint32_t>(
          (kCodeTileElements - first_element % kCodeTileElements) / kWordBits);
      TakeWords(codes, copy, first, units / 4,
                codes.bits + message.first_word + first_element / kWordBits,
                left, found);
    } else {
      TakeUnits(codes, copy, box, message, first, units, found);
    }
    if (__ballot_sync(kAllLanes, (found.coded[0] | found.coded[1] |
                                  found.coded[2]) != 0) == 0) {
      continue;
    }
    unsigned long long* const bases =
        codes.bases + message.first_tile + first_element / kCodeTileElements;
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) {
      const uint32_t count = __reduce_add_sync(kAllLanes, found.coded[i]);
      if (lane == 0 && count != 0) atomicAdd(&bases[i], count);
    }
    // Of other messages ScanTiles knows it: all warps add to the same few
    // numbers.
    if (message.clears_bits == 0) continue;
    const uint32_t changed = __reduce_add_sync(kAllLanes, found.changed);
    if (lane == 0 && changed != 0) {
      atomicAdd(&codes.changed[box.message].count, changed);
    }
  }
}

// A warp's tile of a message.
struct WarpTile {
  uint64_t number;
  uint32_t message;
  uint32_t place;  // in the message
};

// Calls body(warp_tile, message) for each tile of the work that is of a send,
// or of a receive, warp by warp.
template <typename Body>
__device__ __forceinline__ void ForEachWarpTile(const KernelCodes& codes,
                                                const CodeWork& work,
                                                bool sends, const Body& body) {
  const uint32_t step = gridDim.x * kWarps;
  uint32_t t = blockIdx.x * kWarps + threadIdx.x / kWarpThreads;
  const auto message_of = [&](uint32_t tile) {
    return tile < work.tiles_count
               ? codes.tiles[work.tiles_begin + tile].message
               : 0;
  };
  uint32_t next = message_of(t);
  for (; t < work.tiles_count; t += step) {
    const uint32_t number = next;
    // Early: what else the tile needs waits for it.
    next = message_of(t + step);
    const KernelMessage& message = codes.messages[number];
    if ((message.is_send != 0) != sends) continue;
    const uint64_t tile = work.tiles_begin + t;
    body(WarpTile{tile, number,
                  static_cast<uint32_t>(tile - message.first_tile)},
         message);
  }
}

__device__ __forceinline__ uint32_t CountBits(const uint4& bits) {
  return __popc(bits.x) + __popc(bits.y) + __popc(bits.z) + __popc(bits.w);
}

// How many elements each group of a tile of a received code holds, step by
// step.
struct StepCounts {
  uint32_t of[kSteps];
};
__device__ __forceinline__ StepCounts CountsOf(const KernelMessage& message,
                                               const KernelRoom& room,
                                               uint32_t place) {
  const std::byte* const counts = PartsOf(message, room).groups;
  const uint64_t groups = Groups(message);
  StepCounts found;
#pragma unroll
  for (uint32_t s = 0; s < kSteps; ++s) {
    const uint64_t group = uint64_t{place} * kTileGroups + s * kWarpThreads +
                           threadIdx.x % kWarpThreads;
    found.of[s] = group < groups ? static_cast<uint32_t>(counts[group]) : 0;
  }
  return found;
}

// Into `bases` how many elements the groups of each tile of a received code
// hold.
__global__ void __launch_bounds__(kThreads)
    SumGroups(const KernelCodes codes, const CodeWork work, uint32_t rung) {
  ForEachWarpTile(codes, work, /*sends=*/false,
                  [&](const WarpTile& of, const KernelMessage& message) {
                    const KernelRoom& room =
                        codes.rooms[of.message * codes.rungs + rung];
                    if (room.elements == 0) return;
                    const StepCounts counts = CountsOf(message, room, of.place);
                    uint32_t sum = 0;
#pragma unroll
                    for (uint32_t s = 0; s < kSteps; ++s) sum += counts.of[s];
                    sum = __reduce_add_sync(kAllLanes, sum);
                    if (threadIdx.x % kWarpThreads == 0)
                      codes.bases[of.number] = sum;
                  });
}

// From the elements of each tile to those before it, and their total: a block
// takes a message.
__global__ void __launch_bounds__(kScanThreads)
    ScanTiles(const KernelCodes codes, uint32_t messages_begin, bool sends) {
  __shared__ uint64_t sums[kScanThreads / kWarpThreads];
  const uint32_t number = messages_begin + blockIdx.x;
  const KernelMessage& message = codes.messages[number];
  if ((message.is_send != 0) != sends) return;
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint32_t warp = threadIdx.x / kWarpThreads;
  unsigned long long* const bases = codes.bases + message.first_tile;
  uint64_t before = 0;
  for (uint32_t begin = 0; begin < message.tiles; begin += kScanThreads) {
    const uint32_t t = begin + threadIdx.x;
    // Of a tile 2^14 elements at most, or of damaged groups 2^15.
    const auto value = t < message.tiles ? static_cast<uint32_t>(bases[t]) : 0u;
    uint32_t of_warp;
    const uint32_t in_warp = LanesBefore(value, of_warp);
    __syncthreads();
    if (lane == 0) sums[warp] = of_warp;
    __syncthreads();
    uint64_t base = before;
    for (uint32_t w = 0; w < kScanThreads / kWarpThreads; ++w) {
      if (w < warp) base += sums[w];
      before += sums[w];
    }
    if (t < message.tiles) bases[t] = base + in_warp;
  }
  if (threadIdx.x != 0) return;
  codes.totals[number] = before;
  if (!sends) return;
  codes.changed[number].room = before;
  // All its elements are of one size, and none is always sent.
  if (message.clears_bits == 0) codes.changed[number].count = before;
}

// Lists the elements of a tile that are coded, as many at a time as surely find
// place. `counts`: of the groups of the warp's steps. For each part of the list
// it calls prepare(begin, count), then list(s, next) for each group in it,
// which writes the group's elements from list[next] on, then take(begin,
// count); ordinals count in the tile.
template <typename Prepare, typename List, typename Take>
__device__ __forceinline__ void ForEachListed(const StepCounts& counts,
                                              const Prepare& prepare,
                                              const List& list,
                                              const Take& take) {
  StepCounts before;
  uint32_t total = 0;
#pragma unroll
  for (uint32_t s = 0; s < kSteps; ++s) {
    uint32_t of_step;
    before.of[s] = total + LanesBefore(counts.of[s], of_step);
    total += of_step;
  }
  const uint32_t groups = total <= kListed ? kTileGroups : kListedGroups;
  uint32_t done = 0;
  for (uint32_t first = 0; done < total; first += groups) {
    const auto is_in = [&](uint32_t s) {
      return s * kWarpThreads + threadIdx.x % kWarpThreads - first < groups;
    };
    uint32_t listed = 0;
#pragma unroll
    for (uint32_t s = 0; s < kSteps; ++s) {
      if (is_in(s)) listed += counts.of[s];
    }
    listed = __reduce_add_sync(kAllLanes, listed);
    prepare(done, listed);
#pragma unroll
    for (uint32_t s = 0; s < kSteps; ++s) {
      if (is_in(s)) list(s, before.of[s] - done);
    }
    __syncwarp();
    take(done, listed);
    __syncwarp();
    done += listed;
  }
}

// Calls store(j, load(j)) for j below `count`, which is not 0.
template <typename T, typename Load, typename Store>
__device__ __forceinline__ void ReadAhead(uint32_t count, const Load& load,
                                          const Store& store) {
  for (uint32_t j = threadIdx.x % kWarpThreads; j < count;
       j += kAhead * kWarpThreads) {
    T loaded[kAhead];
#pragma unroll
    for (uint32_t k = 0; k < kAhead; ++k) {
      // The last one again rather than a branch.
      loaded[k] = load(min(j + k * kWarpThreads, count - 1));
    }
#pragma unroll
    for (uint32_t k = 0; k < kAhead; ++k) {
      if (j + k * kWarpThreads < count) store(j + k * kWarpThreads, loaded[k]);
    }
  }
}

// Where the elements of a tile lie that is of one copy, as most are. Those that
// are cast, or have 8 bytes, are not looked for.
class TilePlaces {
 public:
  __device__ __forceinline__ TilePlaces(const KernelCodes& codes,
                                        const KernelMessage& message,
                                        const WarpTile& of)
      : codes_(codes), shift_(message.element_shift) {
    const uint64_t first_byte = uint64_t{of.place} * kCodeTileElements
                                << shift_;
    const uint64_t end_byte =
        min(first_byte + (uint64_t{kCodeTileElements} << shift_),
            message.size_bytes);
    const KernelCodeTile tile = codes.tiles[of.number];
    if (tile.boxes_end - tile.boxes_begin != 1) return;
    const KernelBox& box = codes.boxes[tile.boxes_begin];
    const KernelCopy& copy = codes.copies[tile.boxes_begin];
    if (Casts(copy) || shift_ > 2) return;
    copy_ = &copy;
    at_ = first_byte - box.begin_byte;
    const uint64_t begin = max(first_byte, box.begin_byte);
    const uint64_t end = min(end_byte, box.end_byte);
    first_ = static_cast<uint32_t>((begin - first_byte) >> shift_);
    end_ = static_cast<uint32_t>((end - first_byte) >> shift_);
    const Place place = PlaceOf(copy, begin - box.begin_byte);
    entry_ = place.entry;
    offset_ = place.offset - (uint64_t{first_} << shift_);
    is_run_ = place.in_row + (end - begin) <=
              uint64_t{copy.row_units} * copy.unit_bytes;
  }

  __device__ __forceinline__ bool IsOneCopy() const { return copy_ != nullptr; }
  // Whether they are contiguous too.
  __device__ __forceinline__ bool IsRun() const { return is_run_; }
  __device__ __forceinline__ bool Holds(uint32_t element) const {
    return element - first_ < end_ - first_;
  }
  // `shadows`: KernelCodes::change_entries, or 0.
  template <typename T>
  __device__ __forceinline__ T* Run(uint64_t shadows) const {
    return reinterpret_cast<T*>(codes_.table[entry_ + shadows] + offset_);
  }
  template <typename T>
  __device__ __forceinline__ T* At(uint32_t element, uint64_t shadows) const {
    const Place place = PlaceOf(*copy_, at_ + (uint64_t{element} << shift_));
    return reinterpret_cast<T*>(codes_.table[place.entry + shadows] +
                                place.offset);
  }

 private:
  const KernelCodes& codes_;
  const uint32_t shift_;
  const KernelCopy* copy_ = nullptr;
  uint64_t at_ = 0;  // byte of the box where the tile begins; may be below 0
  uint32_t first_ = 0;
  uint32_t end_ = 0;
  uint64_t entry_ = 0;
  uint64_t offset_ = 0;
  bool is_run_ = false;
};

// Calls body(own, shadow), both of which tell the address of an element of
// places that are of one copy.
template <typename T, bool kShadows, typename Body>
__device__ __forceinline__ void WithPlaces(const KernelCodes& codes,
                                           const TilePlaces& places,
                                           const Body& body) {
  if (places.IsRun()) {
    T* const own = places.Run<T>(0);
    T* const shadow = kShadows ? places.Run<T>(codes.change_entries) : nullptr;
    body([=](uint32_t element) { return own + element; },
         [=](uint32_t element) { return shadow + element; });
    return;
  }
  body([&](uint32_t element) { return places.At<T>(element, 0); },
       [&](uint32_t element) {
         return places.At<T>(element, codes.change_entries);
       });
}

// Calls body(T()) for the unsigned T of `bytes`, which are below 8.
template <typename Body>
__device__ __forceinline__ void WithWidth(uint32_t bytes, const Body& body) {
  switch (bytes) {
    case 1:
      return body(uint8_t{});
    case 2:
      return body(uint16_t{});
    default:
      return body(uint32_t{});
  }
}

// A part of a tile's elements, `count` of which `list` tells, and where their
// codes begin.
struct Listed {
  const uint16_t* list;
  uint32_t count;
  uint64_t slot;
};

// One element at a time, of any copies.
template <bool kEncodes>
__device__ __forceinline__ void SendAny(const KernelCodes& codes,
                                        const WarpTile& of,
                                        const KernelMessage& message,
                                        const CodeParts& code,
                                        const Listed& listed) {
  const uint32_t width = message.element_bytes;
  const KernelCodeTile tile = codes.tiles[of.number];
  for (uint32_t j = threadIdx.x % kWarpThreads; j < listed.count;
       j += kWarpThreads) {
    const uint64_t element =
        uint64_t{of.place} * kCodeTileElements + listed.list[j];
    const uint64_t byte = element << message.element_shift;
    const uint32_t b = BoxAt(codes, tile, byte);
    if (b == tile.boxes_end) continue;
    const auto [copy, at, place] = LocatedIn(codes, b, byte);
    const uint32_t size = Casts(copy) ? ElementBytes(copy.from_dtype) : width;
    uint64_t value = LoadElement(codes.table[place.entry] + place.offset, size);
    if constexpr (!kEncodes) {
      StoreElement(
          codes.table[place.entry + codes.change_entries] + place.offset, value,
          size);
      continue;
    }
    if (Casts(copy)) {
      value = CastBits(static_cast<uint32_t>(value), copy.from_dtype,
                       copy.to_dtype) >>
              8 * (at & (ElementBytes(copy.to_dtype) - 1));
    }
    const uint64_t slot = listed.slot + j;
    StoreElement(code.values + slot * width, value, width);
    code.positions[slot] = static_cast<std::byte>(element % kGroup);
  }
}

// Stores what changed of sends: into their codes, or into the shadows.
template <bool kEncodes>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    SendTiles(const __grid_constant__ KernelCodes codes,
              const __grid_constant__ CodeWork work, uint32_t rung) {
  __shared__ uint16_t lists[kWarps][kListed];
  const uint32_t lane = threadIdx.x % kWarpThreads;
  uint16_t* const list = lists[threadIdx.x / kWarpThreads];
  ForEachWarpTile(
      codes, work, /*sends=*/true,
      [&](const WarpTile& of, const KernelMessage& message) {
        const KernelRoom& code_room =
            codes.rooms[of.message * codes.rungs + rung];
        const auto room =
            static_cast<uint32_t>(kEncodes ? code_room.elements : 0);
        if (kEncodes && room == 0) return;
        const auto base =
            static_cast<uint32_t>(kEncodes ? codes.bases[of.number] : 0);
        const auto* const of_groups =
            reinterpret_cast<const uint4*>(codes.bits + message.first_word);
        const uint64_t first_group = uint64_t{of.place} * kTileGroups + lane;
        const uint64_t groups = Groups(message);
        // Read again where they are listed: registers are scarce.
        const auto bits_of = [&](uint32_t s) {
          const uint64_t group = first_group + s * kWarpThreads;
          return group < groups ? of_groups[group] : make_uint4(0, 0, 0, 0);
        };
        StepCounts counts;
#pragma unroll
        for (uint32_t s = 0; s < kSteps; ++s)
          counts.of[s] = CountBits(bits_of(s));
        if constexpr (kEncodes) {
          std::byte* const counted = PartsOf(message, code_room).groups;
#pragma unroll
          for (uint32_t s = 0; s < kSteps; ++s) {
            const uint64_t group = first_group + s * kWarpThreads;
            if (group < groups) {
              counted[group] = static_cast<std::byte>(counts.of[s]);
            }
          }
        }
        if (kEncodes && lane == 0 && of.place + 1 == message.tiles) {
          *reinterpret_cast<uint2*>(code_room.code) =
              make_uint2(static_cast<uint32_t>(codes.totals[of.message]), 0);
        }
        ForEachListed(
            counts, [](uint32_t, uint32_t) {},
            [&](uint32_t s, uint32_t next) {
              const uint32_t first = (s * kWarpThreads + lane) * kGroup;
              const uint4 bits = bits_of(s);
              const uint64_t halves[] = {
                  bits.x | uint64_t{bits.y} << kWordBits,
                  bits.z | uint64_t{bits.w} << kWordBits};
#pragma unroll
              for (uint32_t h = 0; h < 2; ++h) {
                for (uint64_t word = halves[h]; word != 0; word &= word - 1) {
                  list[next++] = static_cast<uint16_t>(
                      first + h * 64 + __ffsll(static_cast<long long>(word)) -
                      1);
                }
              }
            },
            [&](uint32_t begin, uint32_t count) {
              const uint32_t slot = base + begin;
              if constexpr (kEncodes) {
                if (slot >= room) return;
                count = min(count, room - slot);
              }
              const CodeParts code = PartsOf(message, code_room);
              const TilePlaces places(codes, message, of);
              if (!places.IsOneCopy()) {
                SendAny<kEncodes>(codes, of, message, code,
                                  {list, count, slot});
                return;
              }
              WithWidth(message.element_bytes, [&](auto zero) {
                using T = decltype(zero);
                WithPlaces<T, !kEncodes>(
                    codes, places, [&](const auto& own, const auto& shadow) {
                      ReadAhead<T>(
                          count, [&](uint32_t j) { return *own(list[j]); },
                          [&](uint32_t j, T value) {
                            if constexpr (kEncodes) {
                              reinterpret_cast<T*>(code.values)[slot + j] =
                                  value;
                              code.positions[slot + j] =
                                  static_cast<std::byte>(list[j] % kGroup);
                            } else {
                              *shadow(list[j]) = value;
                            }
                          });
                    });
              });
            });
      });
}

// One element at a time, of any copies. False: no message is encoded like that.
__device__ __forceinline__ bool ApplyAny(const KernelCodes& codes,
                                         const WarpTile& of,
                                         const KernelMessage& message,
                                         const std::byte* values,
                                         const Listed& listed) {
  const uint32_t width = message.element_bytes;
  const KernelCodeTile tile = codes.tiles[of.number];
  bool fits = true;
  for (uint32_t j = threadIdx.x % kWarpThreads; j < listed.count;
       j += kWarpThreads) {
    // All parts of an element are of one group, so in the list.
    const auto is_at = [&](uint32_t other, uint32_t element) {
      return other < listed.count && listed.list[other] == element;
    };
    const uint32_t element = listed.list[j];
    const uint64_t byte = (uint64_t{of.place} * kCodeTileElements + element)
                          << message.element_shift;
    const uint32_t b =
        element == kNoElement ? tile.boxes_end : BoxAt(codes, tile, byte);
    if (b == tile.boxes_end) {
      fits = false;
      continue;
    }
    const auto [copy, at, place] = LocatedIn(codes, b, byte);
    std::byte* const to = codes.table[place.entry] + place.offset;
    const std::byte* const value = values + j * width;
    if (!Casts(copy)) {
      StoreElement(to, LoadElement(value, width), width);
      continue;
    }
    // It is cast from all its parts, by the thread of the first.
    const uint32_t parts = ElementBytes(copy.to_dtype) >> message.element_shift;
    const uint32_t part =
        static_cast<uint32_t>(at >> message.element_shift) & (parts - 1);
    if (part != 0) {
      fits &= is_at(j - 1, element - 1);
      continue;
    }
    uint64_t whole = 0;
    bool has_all = true;
    for (uint32_t p = 0; p < parts && has_all; ++p) {
      has_all = is_at(j + p, element + p);
      if (has_all)
        whole |= LoadElement(value + p * width, width) << 8 * width * p;
    }
    fits &= has_all;
    if (!has_all) continue;
    StoreElement(
        to,
        CastBits(static_cast<uint32_t>(whole), copy.to_dtype, copy.from_dtype),
        ElementBytes(copy.from_dtype));
  }
  return fits;
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    ApplyTiles(const __grid_constant__ KernelCodes codes,
               const __grid_constant__ CodeWork work, uint32_t rung) {
  __shared__ uint16_t lists[kWarps][kListed];
  const uint32_t lane = threadIdx.x % kWarpThreads;
  uint16_t* const list = lists[threadIdx.x / kWarpThreads];
  ForEachWarpTile(
      codes, work, /*sends=*/false,
      [&](const WarpTile& of, const KernelMessage& message) {
        const uint32_t number = of.message;
        const KernelRoom& code_room = codes.rooms[number * codes.rungs + rung];
        const uint64_t room = code_room.elements;
        if (room == 0) return;
        const uint64_t base = codes.bases[of.number];
        StepCounts counts = CountsOf(message, code_room, of.place);
        bool fits = true;
        if (of.place == 0) {
          const uint2 header = *reinterpret_cast<const uint2*>(code_room.code);
          fits = header.x == codes.totals[number] && header.y == 0 &&
                 header.x <= room;
        }
#pragma unroll
        for (uint32_t s = 0; s < kSteps; ++s) {
          fits &= counts.of[s] <= kGroup;
          if (counts.of[s] > kGroup) counts.of[s] = 0;
        }
        // What has no room is not there.
        const auto there = [&](uint32_t begin, uint32_t count) {
          const uint64_t slot = base + begin;
          return slot < room
                     ? static_cast<uint32_t>(min(uint64_t{count}, room - slot))
                     : 0;
        };
        ForEachListed(
            counts,
            [&](uint32_t begin, uint32_t count) {
              const uint32_t known = there(begin, count);
              const std::byte* const positions =
                  PartsOf(message, code_room).positions + base + begin;
              ReadAhead<std::byte>(
                  known, [&](uint32_t j) { return positions[j]; },
                  [&](uint32_t j, std::byte position) {
                    list[j] = static_cast<uint16_t>(position);
                  });
              for (uint32_t j = known + lane; j < count; j += kWarpThreads) {
                list[j] = kNoElement;
              }
              __syncwarp();
            },
            [&](uint32_t s, uint32_t next) {
              uint32_t first = 0;  // position of the next one at least
              for (uint32_t i = 0; i < counts.of[s]; ++i, ++next) {
                const uint32_t position = list[next];
                list[next] =
                    position < first || position >= kGroup
                        ? kNoElement
                        : static_cast<uint16_t>(
                              (s * kWarpThreads + lane) * kGroup + position);
                first = position + 1;
              }
            },
            [&](uint32_t begin, uint32_t count) {
              count = there(begin, count);
              if (count == 0) return;
              const uint64_t slot = base + begin;
              const std::byte* const coded = PartsOf(message, code_room).values;
              const TilePlaces places(codes, message, of);
              if (!places.IsOneCopy()) {
                fits &= ApplyAny(codes, of, message,
                                 coded + slot * message.element_bytes,
                                 {list, count, slot});
                return;
              }
              WithWidth(message.element_bytes, [&](auto zero) {
                using T = decltype(zero);
                WithPlaces<T, false>(
                    codes, places, [&](const auto& own, const auto&) {
                      ReadAhead<T>(
                          count,
                          [&](uint32_t j) {
                            return reinterpret_cast<const T*>(coded)[slot + j];
                          },
                          [&](uint32_t j, T value) {
                            const uint32_t element = list[j];
                            const bool is_held = places.Holds(element);
                            fits &= is_held;
                            if (is_held) *own(element) = value;
                          });
                    });
              });
            });
        if (!fits) Fail(codes, number);
      });
}

uint32_t WarpBlocksFor(uint64_t tiles, uint32_t multiprocessors) {
  const uint32_t blocks_max = multiprocessors * kResidentBlocks;
  const uint64_t blocks = (tiles + kWarps - 1) / kWarps;
  return blocks < blocks_max ? static_cast<uint32_t>(blocks) : blocks_max;
}

}  // namespace

cudaError_t LoadMessageCodeKernels() {
  cudaError_t error = LoadKernel(CompareTiles);
  if (error == cudaSuccess) error = LoadKernel(TakeMarks);
  if (error == cudaSuccess) error = LoadKernel(SumGroups);
  if (error == cudaSuccess) error = LoadKernel(ScanTiles);
  if (error == cudaSuccess) error = LoadKernel(SendTiles<true>);
  if (error == cudaSuccess) error = LoadKernel(ApplyTiles);
  if (error == cudaSuccess) error = LoadKernel(SendTiles<false>);
  return error;
}

cudaError_t LaunchCount(const KernelCodes& codes, uint32_t multiprocessors,
                        cudaStream_t stream) {
  if (codes.compared_count == 0) return cudaSuccess;
  const uint32_t blocks_max = multiprocessors * kComparingBlocks;
  const uint32_t blocks = codes.compared_count < blocks_max
                              ? static_cast<uint32_t>(codes.compared_count)
                              : blocks_max;
  CompareTiles<<<blocks, kThreads, 0, stream>>>(codes);
  ScanTiles<<<codes.messages_count, kScanThreads, 0, stream>>>(codes, 0, true);
  return cudaGetLastError();
}

cudaError_t LaunchCountMarks(const KernelCodes& codes, uint32_t multiprocessors,
                             cudaStream_t stream) {
  if (codes.compared_count == 0) return cudaSuccess;
  const uint64_t blocks_max = uint64_t{multiprocessors} * kMarkingBlocks;
  const uint64_t blocks = (codes.compared_count + kWarps - 1) / kWarps;
  TakeMarks<<<static_cast<uint32_t>(std::min(blocks, blocks_max)), kThreads, 0,
              stream>>>(codes);
  ScanTiles<<<codes.messages_count, kScanThreads, 0, stream>>>(codes, 0, true);
  return cudaGetLastError();
}

cudaError_t LaunchEncode(const KernelCodes& codes, const CodeWork& work,
                         uint32_t rung, uint32_t multiprocessors,
                         cudaStream_t stream) {
  if (work.tiles_count == 0) return cudaSuccess;
  SendTiles<true><<<WarpBlocksFor(work.tiles_count, multiprocessors), kThreads,
                    0, stream>>>(codes, work, rung);
  return cudaGetLastError();
}

cudaError_t LaunchApply(const KernelCodes& codes, const CodeWork& work,
                        uint32_t rung, uint32_t multiprocessors,
                        cudaStream_t stream) {
  if (work.tiles_count == 0) return cudaSuccess;
  const uint32_t blocks = WarpBlocksFor(work.tiles_count, multiprocessors);
  SumGroups<<<blocks, kThreads, 0, stream>>>(codes, work, rung);
  ScanTiles<<<work.messages_count, kScanThreads, 0, stream>>>(
      codes, work.messages_begin, false);
  ApplyTiles<<<blocks, kThreads, 0, stream>>>(codes, work, rung);
  return cudaGetLastError();
}

cudaError_t LaunchKeep(const KernelCodes& codes, uint32_t multiprocessors,
                       cudaStream_t stream) {
  if (codes.compared_count == 0) return cudaSuccess;
  const CodeWork work = {.tiles_count = codes.tiles_count};
  SendTiles<false><<<WarpBlocksFor(work.tiles_count, multiprocessors), kThreads,
                     0, stream>>>(codes, work, 0);
  return cudaGetLastError();
}

}  // namespace refit::cuda
