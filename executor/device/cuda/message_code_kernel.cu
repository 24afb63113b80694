#include "executor/device/cuda/message_code_kernel.h"
#include "executor/device/cuda/tiles.h"
#include "executor/device/message_format.h"

namespace refit::cuda {
namespace {

constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kCodeThreads = 256;
constexpr uint32_t kCodeWarps = kCodeThreads / kWarpThreads;
constexpr uint32_t kUnitBytes = 16;
// Units of a tile that one thread takes: k * kCodeThreads + threadIdx.x.
constexpr uint32_t kUnits = kCodeTileBytes / kUnitBytes / kCodeThreads;
constexpr auto kGroup = static_cast<uint32_t>(kCodeGroupElements);
constexpr uint32_t kGroupsMax = kCodeTileBytes / kGroup;
// Scans add up numbers of 16 bits, one for each of a thread's units.
static_assert(kUnits == 4 && kCodeThreads * kUnitBytes < (1 << 16));

__device__ __forceinline__ std::byte* ValuesOf(const KernelMessage& message) {
  return message.code + kCodeHeaderBytes;
}
__device__ __forceinline__ std::byte* GroupsOf(const KernelMessage& message,
                                               uint64_t room) {
  return ValuesOf(message) + room * message.element_bytes;
}
__device__ __forceinline__ uint64_t GroupCount(const KernelMessage& message) {
  const uint64_t group_bytes = uint64_t{kGroup} * message.element_bytes;
  return (message.size_bytes + group_bytes - 1) / group_bytes;
}

__device__ __forceinline__ void CopyElement(std::byte* to,
                                            const std::byte* from,
                                            uint32_t bytes) {
  switch (bytes) {
    case 1:
      *to = *from;
      return;
    case 2:
      *reinterpret_cast<uint16_t*>(to) =
          *reinterpret_cast<const uint16_t*>(from);
      return;
    case 4:
      *reinterpret_cast<uint32_t*>(to) =
          *reinterpret_cast<const uint32_t*>(from);
      return;
    default:
      *reinterpret_cast<uint64_t*>(to) =
          *reinterpret_cast<const uint64_t*>(from);
  }
}

// A bit for each byte of a word that differs.
__device__ __forceinline__ uint32_t DifferentBytes(uint32_t a, uint32_t b) {
  return ((__vcmpne4(a, b) & 0x01010101u) * 0x01020408u) >> 24 & 0xfu;
}

// From a bit for each byte to one for each element, at its first byte.
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

// A bit for each byte of a unit that differs; none beyond the message.
__device__ __forceinline__ uint32_t
DifferentInUnit(const KernelMessage& message, uint64_t begin) {
  if (begin >= message.size_bytes) return 0;
  const std::byte* const now = message.elements + begin;
  const std::byte* const before = message.before + begin;
  if (message.is_aligned != 0 && begin + kUnitBytes <= message.size_bytes) {
    const uint4 a = *reinterpret_cast<const uint4*>(now);
    const uint4 b = __ldcs(reinterpret_cast<const uint4*>(before));
    return DifferentBytes(a.x, b.x) | DifferentBytes(a.y, b.y) << 4 |
           DifferentBytes(a.z, b.z) << 8 | DifferentBytes(a.w, b.w) << 12;
  }
  uint32_t different = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < kUnitBytes && begin + i < message.size_bytes; ++i) {
    different |= static_cast<uint32_t>(now[i] != before[i]) << i;
  }
  return different;
}

// What of a thread's units is coded: a bit for each element, at its first byte.
struct Coded {
  uint32_t bits[kUnits];
  // As KernelChanged.
  uint32_t count;
  uint32_t room;
};

__device__ __forceinline__ Coded CodedInTile(const KernelCodes& codes,
                                             const KernelMessage& message,
                                             uint64_t tile_begin,
                                             uint32_t first_range) {
  uint32_t different[kUnits];
#pragma unroll
  for (uint32_t k = 0; k < kUnits; ++k) {
    different[k] = DifferentInUnit(
        message, tile_begin + (k * kCodeThreads + threadIdx.x) * kUnitBytes);
  }
  Coded coded = {};
  if (first_range == message.ranges_end) return coded;
  // Mostly a tile lies in one range.
  const KernelRange first = codes.ranges[first_range];
  if (first.always == 0 && first.begin_byte <= tile_begin &&
      first.end_byte >= tile_begin + kCodeTileBytes) {
#pragma unroll
    for (uint32_t k = 0; k < kUnits; ++k) {
      coded.bits[k] = FirstBytes(different[k], message.element_bytes);
      coded.count += __popc(FirstBytes(different[k], first.element_bytes));
    }
    coded.room = coded.count * (first.element_bytes / message.element_bytes);
    return coded;
  }
#pragma unroll
  for (uint32_t k = 0; k < kUnits; ++k) {
    const uint64_t begin =
        tile_begin + (k * kCodeThreads + threadIdx.x) * kUnitBytes;
#pragma unroll 1
    for (uint32_t r = first_range; r < message.ranges_end; ++r) {
      const KernelRange& range = codes.ranges[r];
      if (range.begin_byte >= begin + kUnitBytes) break;
      if (range.end_byte <= begin) continue;
      uint32_t inside = 0xffffu;
      if (range.begin_byte > begin) inside <<= range.begin_byte - begin;
      if (range.end_byte < begin + kUnitBytes) {
        inside &= (1u << (range.end_byte - begin)) - 1;
      }
      inside &= 0xffffu;
      if (range.always != 0) {
        coded.bits[k] |= FirstBytes(inside, message.element_bytes);
        continue;
      }
      inside &= different[k];
      coded.bits[k] |= FirstBytes(inside, message.element_bytes);
      const auto count = static_cast<uint32_t>(
          __popc(FirstBytes(inside, range.element_bytes)));
      coded.count += count;
      coded.room += count * (range.element_bytes / message.element_bytes);
    }
  }
  return coded;
}

// The sum of the block's values; valid on thread 0. `sums`: kCodeWarps numbers
// that nobody uses until the next __syncthreads.
__device__ __forceinline__ uint32_t BlockSum(uint32_t value, uint32_t* sums) {
  value = __reduce_add_sync(kAllLanes, value);
  if (threadIdx.x % kWarpThreads == 0) sums[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  uint32_t sum = 0;
  if (threadIdx.x == 0) {
    for (uint32_t w = 0; w < kCodeWarps; ++w) sum += sums[w];
  }
  return sum;
}

// The sum of the values of the threads before this one; `total` of all.
__device__ __forceinline__ uint64_t SumBefore(uint64_t value, uint64_t* sums,
                                              uint64_t& total) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint32_t warp = threadIdx.x / kWarpThreads;
  uint64_t sum = value;
#pragma unroll
  for (uint32_t step = 1; step < kWarpThreads; step *= 2) {
    const uint64_t below = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += below;
  }
  __syncthreads();
  if (lane == kWarpThreads - 1) sums[warp] = sum;
  __syncthreads();
  uint64_t before = 0;
  total = 0;
#pragma unroll
  for (uint32_t w = 0; w < kCodeWarps; ++w) {
    if (w == warp) before = total;
    total += sums[w];
  }
  return before + sum - value;
}

__device__ __forceinline__ void Fail(const KernelCodes& codes,
                                     uint32_t message) {
  atomicCAS(codes.failure, 0ull, 1ull + message);
}

// Into `bases` how many elements each tile codes, and into `changed` what
// changed.
__global__ void __launch_bounds__(kCodeThreads)
    CountTiles(const KernelCodes codes, const CodeWork work) {
  __shared__ uint32_t sums[3][kCodeWarps];
  for (uint64_t t = blockIdx.x; t < work.tiles_count; t += gridDim.x) {
    const KernelCodeTile tile = codes.tiles[work.tiles_begin + t];
    const KernelMessage message = codes.messages[tile.message];
    if (message.before == nullptr) continue;
    const uint64_t place = work.tiles_begin + t - message.first_tile;
    const Coded coded =
        CodedInTile(codes, message, place * kCodeTileBytes, tile.first_range);
    uint32_t elements = 0;
#pragma unroll
    for (const uint32_t bits : coded.bits) elements += __popc(bits);
    __syncthreads();
    elements = BlockSum(elements, sums[0]);
    const uint32_t count = BlockSum(coded.count, sums[1]);
    const uint32_t room = BlockSum(coded.room, sums[2]);
    if (threadIdx.x != 0) continue;
    codes.bases[work.tiles_begin + t] = elements;
    if (count == 0) continue;
    atomicAdd(&codes.changed[tile.message].count, count);
    atomicAdd(&codes.changed[tile.message].room, room);
  }
}

// Into `bases` how many elements the groups of each tile of a received code
// hold: a warp takes a tile.
__global__ void __launch_bounds__(kCodeThreads)
    SumGroups(const KernelCodes codes, const CodeWork work, uint32_t rung) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint64_t warps = uint64_t{gridDim.x} * kCodeWarps;
  for (uint64_t t =
           uint64_t{blockIdx.x} * kCodeWarps + threadIdx.x / kWarpThreads;
       t < work.tiles_count; t += warps) {
    const KernelCodeTile tile = codes.tiles[work.tiles_begin + t];
    const KernelMessage& message = codes.messages[tile.message];
    const uint64_t room = codes.rooms[tile.message * codes.rungs + rung];
    if (message.before != nullptr || room == 0) continue;
    const uint32_t per_tile = kGroupsMax / message.element_bytes;
    const uint64_t first =
        (work.tiles_begin + t - message.first_tile) * per_tile;
    const uint64_t groups = GroupCount(message);
    const std::byte* const counts = GroupsOf(message, room) + first;
    uint32_t sum = 0;
    for (uint32_t g = lane; g < per_tile && first + g < groups;
         g += kWarpThreads) {
      sum += static_cast<uint32_t>(counts[g]);
    }
    sum = __reduce_add_sync(kAllLanes, sum);
    if (lane == 0) codes.bases[work.tiles_begin + t] = sum;
  }
}

// From the elements of each tile to those before it, and their total: a block
// takes a message.
__global__ void __launch_bounds__(kCodeThreads)
    ScanTiles(const KernelCodes codes, const CodeWork work, bool sends) {
  __shared__ uint64_t sums[kCodeWarps];
  const uint32_t number = work.messages_begin + blockIdx.x;
  const KernelMessage message = codes.messages[number];
  if ((message.before != nullptr) != sends) return;
  uint64_t* const bases = codes.bases + message.first_tile;
  uint64_t before = 0;
  for (uint32_t begin = 0; begin < message.tiles; begin += kCodeThreads) {
    const uint32_t t = begin + threadIdx.x;
    uint64_t total;
    const uint64_t base =
        SumBefore(t < message.tiles ? bases[t] : 0, sums, total);
    if (t < message.tiles) bases[t] = before + base;
    before += total;
  }
  if (threadIdx.x == 0) codes.totals[number] = before;
}

__global__ void __launch_bounds__(kCodeThreads)
    EncodeTiles(const KernelCodes codes, const CodeWork work, uint32_t rung) {
  __shared__ uint64_t sums[kCodeWarps];
  __shared__ uint32_t in_group[kGroupsMax];
  for (uint64_t t = blockIdx.x; t < work.tiles_count; t += gridDim.x) {
    const uint64_t number = work.tiles_begin + t;
    const KernelCodeTile tile = codes.tiles[number];
    const KernelMessage message = codes.messages[tile.message];
    const uint64_t room = codes.rooms[tile.message * codes.rungs + rung];
    if (message.before == nullptr || room == 0) continue;
    const auto place = static_cast<uint32_t>(number - message.first_tile);
    const uint64_t tile_begin = uint64_t{place} * kCodeTileBytes;
    const uint32_t width = message.element_bytes;
    const Coded coded =
        CodedInTile(codes, message, tile_begin, tile.first_range);
    for (uint32_t g = threadIdx.x; g < kGroupsMax; g += kCodeThreads) {
      in_group[g] = 0;
    }
    uint64_t packed = 0;
#pragma unroll
    for (uint32_t k = 0; k < kUnits; ++k) {
      packed |= static_cast<uint64_t>(__popc(coded.bits[k])) << 16 * k;
    }
    uint64_t packed_total;
    const uint64_t packed_before = SumBefore(packed, sums, packed_total);
    const uint64_t base = codes.bases[number];
    uint64_t next_base = base;  // behind the units before k
    std::byte* const values = ValuesOf(message);
    std::byte* const groups = GroupsOf(message, room);
    const uint64_t groups_count = GroupCount(message);
    std::byte* const positions = groups + groups_count;
#pragma unroll
    for (uint32_t k = 0; k < kUnits; ++k) {
      uint32_t bits = coded.bits[k];
      const uint32_t in_tile = (k * kCodeThreads + threadIdx.x) * kUnitBytes;
      uint64_t slot = next_base + (packed_before >> 16 * k & 0xffffu);
      next_base += packed_total >> 16 * k & 0xffffu;
      if (bits == 0) continue;
      atomicAdd(&in_group[in_tile / width / kGroup], __popc(bits));
      for (; bits != 0 && slot < room; bits &= bits - 1, ++slot) {
        const uint32_t byte = in_tile + __ffs(static_cast<int>(bits)) - 1;
        CopyElement(values + slot * width, message.elements + tile_begin + byte,
                    width);
        positions[slot] = static_cast<std::byte>(byte / width % kGroup);
      }
    }
    __syncthreads();
    const uint32_t per_tile = kGroupsMax / width;
    const uint64_t first_group = uint64_t{place} * per_tile;
    for (uint32_t g = threadIdx.x;
         g < per_tile && first_group + g < groups_count; g += kCodeThreads) {
      groups[first_group + g] = static_cast<std::byte>(in_group[g]);
    }
    if (threadIdx.x == 0) {
      const bool is_last = place + 1 == message.tiles;
      const uint64_t total = codes.totals[tile.message];
      if (next_base != (is_last ? total : codes.bases[number + 1]) ||
          total > room) {
        Fail(codes, tile.message);
      }
      if (is_last) {
        *reinterpret_cast<uint2*>(message.code) =
            make_uint2(static_cast<uint32_t>(total < room ? total : room), 0);
      }
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kCodeThreads)
    ApplyTiles(const KernelCodes codes, const CodeWork work, uint32_t rung) {
  __shared__ uint64_t sums[kCodeWarps];
  __shared__ uint32_t begins[kGroupsMax + 1];  // of groups, in the tile
  for (uint64_t t = blockIdx.x; t < work.tiles_count; t += gridDim.x) {
    const uint64_t number = work.tiles_begin + t;
    const KernelCodeTile tile = codes.tiles[number];
    const KernelMessage message = codes.messages[tile.message];
    const uint64_t room = codes.rooms[tile.message * codes.rungs + rung];
    if (message.before != nullptr || room == 0) continue;
    const auto place = static_cast<uint32_t>(number - message.first_tile);
    const uint32_t width = message.element_bytes;
    const uint32_t per_tile = kGroupsMax / width;
    const uint64_t first_group = uint64_t{place} * per_tile;
    const uint64_t groups_count = GroupCount(message);
    const std::byte* const values = ValuesOf(message);
    const std::byte* const groups = GroupsOf(message, room);
    const std::byte* const positions = groups + groups_count;
    const uint32_t g = threadIdx.x;
    const bool is_group = g < per_tile && first_group + g < groups_count;
    uint64_t total;
    const uint64_t begin =
        SumBefore(is_group ? static_cast<uint32_t>(groups[first_group + g]) : 0,
                  sums, total);
    if (g < per_tile) begins[g] = static_cast<uint32_t>(begin);
    if (g == 0) {
      begins[per_tile] = static_cast<uint32_t>(total);
      const uint2 header = *reinterpret_cast<const uint2*>(message.code);
      if (place == 0 && (header.x != codes.totals[tile.message] ||
                         header.y != 0 || header.x > room)) {
        Fail(codes, tile.message);
      }
    }
    __syncthreads();
    const uint64_t base = codes.bases[number];
    const auto count = static_cast<uint32_t>(total);
    for (uint32_t j = threadIdx.x; j < count; j += kCodeThreads) {
      if (base + j >= room) break;
      // The last group that begins at j or before.
      uint32_t low = 0;
      for (uint32_t step = kGroupsMax / 2; step > 0; step /= 2) {
        if (low + step < per_tile && begins[low + step] <= j) low += step;
      }
      const uint64_t slot = base + j;
      const auto position = static_cast<uint32_t>(positions[slot]);
      const uint64_t byte = ((first_group + low) * kGroup + position) * width;
      if (position >= kGroup || byte + width > message.size_bytes ||
          (j > begins[low] &&
           static_cast<uint32_t>(positions[slot - 1]) >= position)) {
        Fail(codes, tile.message);
        continue;
      }
      CopyElement(message.elements + byte, values + slot * width, width);
    }
    __syncthreads();
  }
}

uint32_t BlocksFor(uint64_t tiles, uint32_t blocks_max) {
  return tiles < blocks_max ? static_cast<uint32_t>(tiles) : blocks_max;
}

}  // namespace

cudaError_t LoadMessageCodeKernels() {
  cudaError_t error = LoadKernel(CountTiles);
  if (error == cudaSuccess) error = LoadKernel(SumGroups);
  if (error == cudaSuccess) error = LoadKernel(ScanTiles);
  if (error == cudaSuccess) error = LoadKernel(EncodeTiles);
  if (error == cudaSuccess) error = LoadKernel(ApplyTiles);
  return error;
}

cudaError_t LaunchCount(const KernelCodes& codes, const CodeWork& work,
                        uint32_t blocks_max, cudaStream_t stream) {
  if (work.tiles_count == 0) return cudaSuccess;
  CountTiles<<<BlocksFor(work.tiles_count, blocks_max), kCodeThreads, 0,
               stream>>>(codes, work);
  ScanTiles<<<work.messages_count, kCodeThreads, 0, stream>>>(codes, work,
                                                              true);
  return cudaGetLastError();
}

cudaError_t LaunchEncode(const KernelCodes& codes, const CodeWork& work,
                         uint32_t rung, uint32_t blocks_max,
                         cudaStream_t stream) {
  if (work.tiles_count == 0) return cudaSuccess;
  EncodeTiles<<<BlocksFor(work.tiles_count, blocks_max), kCodeThreads, 0,
                stream>>>(codes, work, rung);
  return cudaGetLastError();
}

cudaError_t LaunchApply(const KernelCodes& codes, const CodeWork& work,
                        uint32_t rung, uint32_t blocks_max,
                        cudaStream_t stream) {
  if (work.tiles_count == 0) return cudaSuccess;
  const uint32_t blocks = BlocksFor(work.tiles_count, blocks_max);
  SumGroups<<<blocks, kCodeThreads, 0, stream>>>(codes, work, rung);
  ScanTiles<<<work.messages_count, kCodeThreads, 0, stream>>>(codes, work,
                                                              false);
  ApplyTiles<<<blocks, kCodeThreads, 0, stream>>>(codes, work, rung);
  return cudaGetLastError();
}

}  // namespace refit::cuda
