// A warp takes a tile of a message. Where changes are found, a lane takes 32
// elements, whose bits are a word; elsewhere it takes a group of 128. Lanes
// share nothing but sums, so the codes are the same in any order of them. The
// codes go over wires between hosts, of 50 GB/s at most: only finding changes,
// which reads all that a rank sends, has loads as wide as memory likes them.
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
constexpr uint32_t kWordBits = 32;
constexpr auto kGroup = static_cast<uint32_t>(kCodeGroupElements);
constexpr uint32_t kTileWords = kCodeTileElements / kWordBits;
constexpr uint32_t kTileGroups = kCodeTileElements / kGroup;
// The bits of a group are one uint4.
static_assert(kGroup == 4 * kWordBits);
// Blocks of a multiprocessor that each launch is of.
constexpr uint32_t kResidentBlocks = 4;

__device__ __forceinline__ uint32_t Lane() {
  return threadIdx.x % kWarpThreads;
}

// Of a power of two.
__device__ __forceinline__ uint32_t Log2(uint32_t n) { return __ffs(n) - 1; }

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
__device__ __forceinline__ uint32_t CastBits(uint64_t bits, DType dtype,
                                             DType to) {
  const auto half = static_cast<uint16_t>(bits);
  const uint32_t fp32 = dtype == element::kFp32   ? static_cast<uint32_t>(bits)
                        : dtype == element::kBf16 ? Fp32FromBf16(half)
                                                  : Fp32FromFp16(half);
  return to == element::kFp32   ? fp32
         : to == element::kBf16 ? Bf16FromFp32(fp32)
                                : Fp16FromFp32(fp32);
}

__device__ __forceinline__ bool Casts(const KernelCopy& copy) {
  return copy.kind == KernelKind::kCast;
}

// Bytes of a message that are consecutive elements of a tensor: a row of a
// copy. Without a copy: bytes that no copy has.
struct Row {
  uint64_t begin = 0;
  uint64_t end = 0;
  const KernelCopy* copy = nullptr;
  bool always = false;
  uint64_t entry = 0;
  uint64_t offset = 0;  // of the first element in the tensor

  __device__ __forceinline__ uint32_t TensorBytes() const {
    return ElementBytes(copy->from_dtype);
  }
  __device__ __forceinline__ uint32_t MessageBytes() const {
    return ElementBytes(copy->to_dtype);
  }
  // Where the element lies that has this byte of the message.
  __device__ __forceinline__ uint64_t OffsetAt(uint64_t byte) const {
    return offset +
           ((byte - begin) >> Log2(MessageBytes())) * uint64_t{TensorBytes()};
  }
  // Which of its bytes in the message that is.
  __device__ __forceinline__ uint32_t ByteOfElement(uint64_t byte) const {
    return static_cast<uint32_t>(byte - begin) & (MessageBytes() - 1);
  }
  // An element as the message has it.
  __device__ __forceinline__ uint64_t SentBits(const std::byte* element) const {
    const uint64_t bits = LoadElement(element, TensorBytes());
    return Casts(*copy) ? CastBits(bits, copy->from_dtype, copy->to_dtype)
                        : bits;
  }
};

// The row that has byte `byte`, of the tile.
__device__ __forceinline__ Row RowAt(const KernelCodes& codes,
                                     const KernelCodeTile& tile,
                                     uint64_t byte) {
  uint32_t begin = tile.boxes_begin;
  uint32_t end = tile.boxes_end;
  while (begin < end) {
    const uint32_t middle = begin + (end - begin) / 2;
    if (codes.boxes[middle].end_byte <= byte) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  Row row;
  row.begin = byte;
  row.end = ~uint64_t{0};
  if (begin == tile.boxes_end) return row;
  const KernelBox& box = codes.boxes[begin];
  if (box.begin_byte > byte) {
    row.end = box.begin_byte;
    return row;
  }
  const KernelCopy& copy = codes.copies[begin];
  const uint32_t unit_bytes =
      Casts(copy) ? ElementBytes(copy.to_dtype) : copy.unit_bytes;
  const uint64_t unit = (byte - box.begin_byte) >> Log2(unit_bytes);
  const uint64_t number =
      unit < (uint64_t{1} << 31)
          ? Divide(static_cast<uint32_t>(unit), copy.row_magic, copy.row_shift)
          : unit / copy.row_units;
  const uint64_t row_bytes = uint64_t{copy.row_units} * unit_bytes;
  const RowOffsets at = OffsetsOfRow(copy, static_cast<uint32_t>(number));
  row.begin = box.begin_byte + number * row_bytes;
  row.end = row.begin + row_bytes;
  row.copy = &copy;
  row.always = box.always != 0;
  row.entry = at.from_entry;
  row.offset = at.from_offset;
  return row;
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

// The sum of the values of the lanes before this one; `total` of all.
__device__ __forceinline__ uint32_t LanesBefore(uint32_t value,
                                                uint32_t& total) {
  uint32_t sum = value;
#pragma unroll
  for (uint32_t step = 1; step < kWarpThreads; step *= 2) {
    const uint32_t below = __shfl_up_sync(kAllLanes, sum, step);
    if (Lane() >= step) sum += below;
  }
  total = __shfl_sync(kAllLanes, sum, kWarpThreads - 1);
  return sum - value;
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
  const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kWarpThreads;
  const uint64_t end = work.tiles_begin + work.tiles_count;
  for (uint64_t t = work.tiles_begin + warp; t < end; t += gridDim.x * kWarps) {
    const uint32_t number = codes.tiles[t].message;
    const KernelMessage& message = codes.messages[number];
    if ((message.is_send != 0) != sends) continue;
    body(WarpTile{t, number, static_cast<uint32_t>(t - message.first_tile)},
         message);
  }
}

__device__ __forceinline__ uint32_t LowBits(uint32_t count) {
  return count == kWordBits ? kAllLanes : (1u << count) - 1;
}

// `count` marks from number `first` on, 32 at most. It reads no word that has
// none of them.
__device__ __forceinline__ uint32_t MarksAt(const uint32_t* marks,
                                            uint64_t first, uint32_t count) {
  const auto shift = static_cast<uint32_t>(first % kWordBits);
  const uint32_t low = marks[first / kWordBits];
  const uint32_t high =
      shift + count > kWordBits ? marks[first / kWordBits + 1] : 0;
  return __funnelshift_r(low, high, shift) & LowBits(count);
}

// A bit for each of 32 elements that differs. Both are aligned to 16 bytes.
template <typename T>
__device__ __forceinline__ uint32_t DifferentOf(const std::byte* now,
                                                const std::byte* before) {
  constexpr uint32_t kPerLoad = sizeof(uint4) / sizeof(T);
  uint32_t found = 0;
#pragma unroll
  for (uint32_t k = 0; k < kWordBits / kPerLoad; ++k) {
    const uint4 a = reinterpret_cast<const uint4*>(now)[k];
    const uint4 b = reinterpret_cast<const uint4*>(before)[k];
#pragma unroll
    for (uint32_t i = 0; i < kPerLoad; ++i) {
      const bool differs = reinterpret_cast<const T*>(&a)[i] !=
                           reinterpret_cast<const T*>(&b)[i];
      found |= uint32_t{differs} << (k * kPerLoad + i);
    }
  }
  return found;
}

// A bit for each of `count` elements of a message, 32 at most, that changed:
// those of the row from `byte` on. Adds to `changed` how many of the tensor's
// these are.
template <bool kMarks>
__device__ __forceinline__ uint32_t ChangedOf(const KernelCodes& codes,
                                              const Row& row, uint32_t shift,
                                              uint64_t byte, uint32_t count,
                                              uint32_t& changed) {
  if (row.always) return LowBits(count);
  const std::byte* const now = codes.table[row.entry];
  const std::byte* const before = codes.table[row.entry + codes.change_entries];
  const auto* const marks = reinterpret_cast<const uint32_t*>(before);
  const uint64_t first = row.OffsetAt(byte);
  const uint32_t size = row.TensorBytes();
  uint32_t found = 0;
  if (kMarks && row.MessageBytes() >> shift == 1) {
    found = MarksAt(marks, first >> Log2(size), count);
    changed += __popc(found);
    return found;
  }
  const auto bits = reinterpret_cast<uintptr_t>(now + first) |
                    reinterpret_cast<uintptr_t>(before + first);
  if (!kMarks && count == kWordBits && bits % sizeof(uint4) == 0 &&
      !Casts(*row.copy) && size >> shift == 1) {
    found = size == 1   ? DifferentOf<uint8_t>(now + first, before + first)
            : size == 2 ? DifferentOf<uint16_t>(now + first, before + first)
            : size == 4 ? DifferentOf<uint32_t>(now + first, before + first)
                        : DifferentOf<uint64_t>(now + first, before + first);
    changed += __popc(found);
    return found;
  }
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t at = byte + (uint64_t{i} << shift);
    const uint64_t offset = row.OffsetAt(at);
    const bool differs =
        kMarks ? MarksAt(marks, offset >> Log2(size), 1) != 0
               : row.SentBits(now + offset) != row.SentBits(before + offset);
    if (!differs) continue;
    found |= 1u << i;
    changed += row.ByteOfElement(at) == 0 ? 1 : 0;
  }
  return found;
}

// Sets the bits of elements that changed, or are always sent, counts those that
// changed, and into `bases` those that each tile codes.
template <bool kMarks>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    FindTiles(const __grid_constant__ KernelCodes codes) {
  ForEachWarpTile(
      codes, {.tiles_count = codes.tiles_count}, /*sends=*/true,
      [&](const WarpTile& of, const KernelMessage& message) {
        const KernelCodeTile tile = codes.tiles[of.number];
        const uint32_t shift = message.element_shift;
        const uint64_t first = uint64_t{of.place} * kTileWords;
        const uint64_t end =
            min(first + kTileWords, Groups(message) * (kGroup / kWordBits));
        uint32_t coded = 0;
        uint32_t changed = 0;
        for (uint64_t word = first + Lane(); word < end; word += kWarpThreads) {
          uint32_t bits = 0;
          for (uint32_t i = 0; i < kWordBits;) {
            const uint64_t byte = (word * kWordBits + i) << shift;
            const Row row = RowAt(codes, tile, byte);
            const auto count = static_cast<uint32_t>(
                min(uint64_t{kWordBits - i}, (row.end - byte) >> shift));
            if (row.copy != nullptr) {
              bits |= ChangedOf<kMarks>(codes, row, shift, byte, count, changed)
                      << i;
            }
            i += count;
          }
          codes.bits[message.first_word + word] = bits;
          coded += __popc(bits);
        }
        coded = __reduce_add_sync(kAllLanes, coded);
        changed = __reduce_add_sync(kAllLanes, changed);
        if (Lane() != 0) return;
        codes.bases[of.number] = coded;
        if (changed != 0) atomicAdd(&codes.changed[of.message].count, changed);
      });
}

// Into `bases` how many elements the groups of each tile of a received code
// hold.
__global__ void __launch_bounds__(kThreads)
    SumGroups(const KernelCodes codes, const CodeWork work, uint32_t rung) {
  ForEachWarpTile(
      codes, work, /*sends=*/false,
      [&](const WarpTile& of, const KernelMessage& message) {
        const KernelRoom& room = codes.rooms[of.message * codes.rungs + rung];
        if (room.elements == 0) return;
        const std::byte* const counts = PartsOf(message, room).groups;
        const uint64_t first = uint64_t{of.place} * kTileGroups;
        const uint64_t end = min(first + kTileGroups, Groups(message));
        uint32_t sum = 0;
        for (uint64_t group = first + Lane(); group < end;
             group += kWarpThreads) {
          sum += static_cast<uint32_t>(counts[group]);
        }
        sum = __reduce_add_sync(kAllLanes, sum);
        if (Lane() == 0) codes.bases[of.number] = sum;
      });
}

// From the elements of each tile to those before it, and their total: a warp
// takes a message.
__global__ void __launch_bounds__(kWarpThreads)
    ScanTiles(const KernelCodes codes, uint32_t messages_begin, bool sends) {
  const uint32_t number = messages_begin + blockIdx.x;
  const KernelMessage& message = codes.messages[number];
  if ((message.is_send != 0) != sends) return;
  unsigned long long* const bases = codes.bases + message.first_tile;
  uint64_t before = 0;
  for (uint32_t begin = 0; begin < message.tiles; begin += kWarpThreads) {
    const uint32_t t = begin + Lane();
    // Of a tile 2^14 elements at most, or of damaged groups 2^15.
    const auto value = t < message.tiles ? static_cast<uint32_t>(bases[t]) : 0u;
    uint32_t total;
    const uint32_t in_warp = LanesBefore(value, total);
    if (t < message.tiles) bases[t] = before + in_warp;
    before += total;
  }
  if (Lane() != 0) return;
  codes.totals[number] = before;
  if (sends) codes.changed[number].room = before;
}

// Calls visit(i) for each bit of a group that is set, ascending.
template <typename Visit>
__device__ __forceinline__ void ForEachSet(const uint4& bits,
                                           const Visit& visit) {
  const uint64_t halves[] = {bits.x | uint64_t{bits.y} << kWordBits,
                             bits.z | uint64_t{bits.w} << kWordBits};
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    for (uint64_t word = halves[h]; word != 0; word &= word - 1) {
      visit(h * 2 * kWordBits + __ffsll(static_cast<long long>(word)) - 1);
    }
  }
}

// Stores what changed of sends: into their codes, or into the shadows.
template <bool kEncodes>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    SendTiles(const __grid_constant__ KernelCodes codes,
              const __grid_constant__ CodeWork work, uint32_t rung) {
  ForEachWarpTile(
      codes, work, /*sends=*/true,
      [&](const WarpTile& of, const KernelMessage& message) {
        const KernelRoom& room = codes.rooms[of.message * codes.rungs + rung];
        if (kEncodes && room.elements == 0) return;
        const CodeParts code = PartsOf(message, room);
        if (kEncodes && of.place == 0 && Lane() == 0) {
          *reinterpret_cast<uint2*>(room.code) =
              make_uint2(static_cast<uint32_t>(codes.totals[of.message]), 0);
        }
        const KernelCodeTile tile = codes.tiles[of.number];
        const auto* const of_groups =
            reinterpret_cast<const uint4*>(codes.bits + message.first_word);
        const uint64_t groups = Groups(message);
        uint64_t base = kEncodes ? codes.bases[of.number] : 0;
        for (uint32_t step = 0; step < kTileGroups; step += kWarpThreads) {
          const uint64_t group =
              uint64_t{of.place} * kTileGroups + step + Lane();
          const uint4 bits =
              group < groups ? of_groups[group] : make_uint4(0, 0, 0, 0);
          const uint32_t count =
              __popc(bits.x) + __popc(bits.y) + __popc(bits.z) + __popc(bits.w);
          uint64_t slot = 0;
          if constexpr (kEncodes) {
            uint32_t total;
            slot = base + LanesBefore(count, total);
            base += total;
            if (group < groups) {
              code.groups[group] = static_cast<std::byte>(count);
            }
          }
          Row row;
          ForEachSet(bits, [&](uint32_t i) {
            const uint64_t byte = (group * kGroup + i) << message.element_shift;
            if (byte >= row.end) row = RowAt(codes, tile, byte);
            const uint64_t offset = row.OffsetAt(byte);
            const std::byte* const now = codes.table[row.entry] + offset;
            if constexpr (kEncodes) {
              if (slot >= room.elements) return;
              StoreElement(code.values + slot * message.element_bytes,
                           row.SentBits(now) >> 8 * row.ByteOfElement(byte),
                           message.element_bytes);
              code.positions[slot++] = static_cast<std::byte>(i);
            } else {
              StoreElement(
                  codes.table[row.entry + codes.change_entries] + offset,
                  LoadElement(now, row.TensorBytes()), row.TensorBytes());
            }
          });
        }
      });
}

// Elements of a group that a code holds.
struct CodedGroup {
  uint64_t group;
  uint32_t count;
  const std::byte* values;
  const std::byte* positions;
};

// Stores them where they belong. False: no message is encoded like that.
__device__ __forceinline__ bool ApplyGroup(const KernelCodes& codes,
                                           const KernelCodeTile& tile,
                                           const KernelMessage& message,
                                           const CodedGroup& coded) {
  const uint32_t width = message.element_bytes;
  Row row;
  uint32_t least = 0;  // that the next position may be
  for (uint32_t i = 0; i < coded.count;) {
    const auto position = static_cast<uint32_t>(coded.positions[i]);
    if (position < least || position >= kGroup) return false;
    const uint64_t byte = (coded.group * kGroup + position)
                          << message.element_shift;
    if (byte >= row.end) row = RowAt(codes, tile, byte);
    if (row.copy == nullptr) return false;
    std::byte* const to = codes.table[row.entry] + row.OffsetAt(byte);
    const uint32_t of_element = row.ByteOfElement(byte);
    if (!Casts(*row.copy)) {
      StoreElement(to + of_element,
                   LoadElement(coded.values + i * width, width), width);
      least = position + 1;
      ++i;
      continue;
    }
    // It is cast from all its parts, which are of one group.
    const uint32_t parts = row.MessageBytes() >> message.element_shift;
    if (of_element != 0 || i + parts > coded.count) return false;
    uint64_t whole = 0;
    for (uint32_t p = 0; p < parts; ++p, ++i) {
      if (static_cast<uint32_t>(coded.positions[i]) != position + p)
        return false;
      whole |= LoadElement(coded.values + i * width, width) << 8 * width * p;
    }
    StoreElement(to, CastBits(whole, row.copy->to_dtype, row.copy->from_dtype),
                 row.TensorBytes());
    least = position + parts;
  }
  return true;
}

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    ApplyTiles(const __grid_constant__ KernelCodes codes,
               const __grid_constant__ CodeWork work, uint32_t rung) {
  ForEachWarpTile(
      codes, work, /*sends=*/false,
      [&](const WarpTile& of, const KernelMessage& message) {
        const KernelRoom& room = codes.rooms[of.message * codes.rungs + rung];
        if (room.elements == 0) return;
        bool fits = true;
        if (of.place == 0) {
          const uint2 header = *reinterpret_cast<const uint2*>(room.code);
          fits = header.x == codes.totals[of.message] && header.y == 0 &&
                 header.x <= room.elements;
        }
        const CodeParts code = PartsOf(message, room);
        const KernelCodeTile tile = codes.tiles[of.number];
        const uint64_t groups = Groups(message);
        uint64_t base = codes.bases[of.number];
        for (uint32_t step = 0; step < kTileGroups; step += kWarpThreads) {
          const uint64_t group =
              uint64_t{of.place} * kTileGroups + step + Lane();
          uint32_t count =
              group < groups ? static_cast<uint32_t>(code.groups[group]) : 0;
          if (count > kGroup) {
            fits = false;
            count = 0;
          }
          uint32_t total;
          const uint64_t slot = base + LanesBefore(count, total);
          base += total;
          // What has no room is not there.
          const uint64_t left = slot < room.elements ? room.elements - slot : 0;
          fits &= ApplyGroup(
              codes, tile, message,
              {group, static_cast<uint32_t>(min(uint64_t{count}, left)),
               code.values + slot * message.element_bytes,
               code.positions + slot});
        }
        if (!fits) atomicCAS(codes.failure, 0ull, 1ull + of.message);
      });
}

uint32_t BlocksFor(uint64_t tiles, uint32_t multiprocessors) {
  const uint32_t blocks_max = multiprocessors * kResidentBlocks;
  const uint64_t blocks = (tiles + kWarps - 1) / kWarps;
  return blocks < blocks_max ? static_cast<uint32_t>(blocks) : blocks_max;
}

}  // namespace

cudaError_t LoadMessageCodeKernels() {
  cudaError_t error = LoadKernel(FindTiles<false>);
  if (error == cudaSuccess) error = LoadKernel(FindTiles<true>);
  if (error == cudaSuccess) error = LoadKernel(SumGroups);
  if (error == cudaSuccess) error = LoadKernel(ScanTiles);
  if (error == cudaSuccess) error = LoadKernel(SendTiles<true>);
  if (error == cudaSuccess) error = LoadKernel(ApplyTiles);
  if (error == cudaSuccess) error = LoadKernel(SendTiles<false>);
  return error;
}

cudaError_t LaunchCount(const KernelCodes& codes, bool by_marks,
                        uint32_t multiprocessors, cudaStream_t stream) {
  if (codes.tiles_count == 0) return cudaSuccess;
  const uint32_t blocks = BlocksFor(codes.tiles_count, multiprocessors);
  if (by_marks) {
    FindTiles<true><<<blocks, kThreads, 0, stream>>>(codes);
  } else {
    FindTiles<false><<<blocks, kThreads, 0, stream>>>(codes);
  }
  ScanTiles<<<codes.messages_count, kWarpThreads, 0, stream>>>(codes, 0, true);
  return cudaGetLastError();
}

cudaError_t LaunchEncode(const KernelCodes& codes, const CodeWork& work,
                         uint32_t rung, uint32_t multiprocessors,
                         cudaStream_t stream) {
  if (work.tiles_count == 0) return cudaSuccess;
  const uint32_t blocks = BlocksFor(work.tiles_count, multiprocessors);
  SendTiles<true><<<blocks, kThreads, 0, stream>>>(codes, work, rung);
  return cudaGetLastError();
}

cudaError_t LaunchApply(const KernelCodes& codes, const CodeWork& work,
                        uint32_t rung, uint32_t multiprocessors,
                        cudaStream_t stream) {
  if (work.tiles_count == 0) return cudaSuccess;
  const uint32_t blocks = BlocksFor(work.tiles_count, multiprocessors);
  SumGroups<<<blocks, kThreads, 0, stream>>>(codes, work, rung);
  ScanTiles<<<work.messages_count, kWarpThreads, 0, stream>>>(
      codes, work.messages_begin, false);
  ApplyTiles<<<blocks, kThreads, 0, stream>>>(codes, work, rung);
  return cudaGetLastError();
}

cudaError_t LaunchKeep(const KernelCodes& codes, uint32_t multiprocessors,
                       cudaStream_t stream) {
  if (codes.tiles_count == 0) return cudaSuccess;
  const CodeWork work = {.tiles_count = codes.tiles_count};
  const uint32_t blocks = BlocksFor(work.tiles_count, multiprocessors);
  SendTiles<false><<<blocks, kThreads, 0, stream>>>(codes, work, 0);
  return cudaGetLastError();
}

}  // namespace refit::cuda
