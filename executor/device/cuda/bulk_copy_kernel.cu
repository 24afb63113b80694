#include "executor/device/cuda/bulk_copy_kernel.h"
#include "executor/device/cuda/kernel_tiles.h"
#include "executor/device/cuda/tiles.h"

namespace refit::cuda {
namespace {

// What addresses and sizes of a bulk copy are multiples of.
constexpr uint32_t kUnitBytes = 16;
constexpr uint32_t kWarpThreads = 32;

// Each warp is a pipeline of its own, so that one resolves addresses while the
// bulk copies of others go on. It loads slices of tiles into its stages, and
// stores them from there.
constexpr uint32_t kWarps = 16;
constexpr uint32_t kStages = 3;
constexpr uint32_t kSliceUnits = 256;
constexpr uint32_t kSliceBytes = kSliceUnits * kUnitBytes;
constexpr uint32_t kTileSlices = kTileUnits / kSliceUnits;
static_assert(kTileUnits % kSliceUnits == 0);

// A lane moves one row of a slice at most.
constexpr uint32_t kRowUnitsMin = 16;
static_assert(kSliceUnits / kRowUnitsMin + 1 <= kWarpThreads);

// What a lane moves of a slice.
struct Segment {
  const std::byte* from;
  std::byte* to;
  uint32_t offset;  // in the slice
  uint32_t bytes;   // 0: nothing
};

struct WarpMemory {
  KernelCopy copy;
  uint64_t loaded[kStages];  // barriers
  std::byte* to[kStages][kWarpThreads];
  uint32_t offset[kStages][kWarpThreads];
  uint32_t bytes[kStages][kWarpThreads];
};

struct BlockMemory {
  alignas(128) std::byte slices[kWarps][kStages][kSliceBytes];
  WarpMemory warps[kWarps];
};

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void InitBarrier(uint64_t* barrier) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(barrier)));
}

__device__ __forceinline__ void ExpectBytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void AwaitBarrier(uint64_t* barrier,
                                             uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void BulkLoad(std::byte* to, const std::byte* from,
                                         uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(SharedAddress(to)),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

__device__ __forceinline__ void BulkStore(std::byte* to, const std::byte* from,
                                          uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
      "r"(SharedAddress(from)), "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void CommitStores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until all but the last commit's stores have read their stages.
__device__ __forceinline__ void AwaitStoresButLast() {
  asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}

// Until what this thread stored is in place.
__device__ __forceinline__ void AwaitStores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// The lane's part of slice `slice` of a tile. `total` becomes the slice's
// bytes.
__device__ __forceinline__ Segment SegmentOf(const KernelCopy& copy,
                                             std::byte* const* table,
                                             uint32_t tile, uint32_t slice,
                                             uint32_t lane, uint32_t& total) {
  Segment segment = {nullptr, nullptr, 0, 0};
  const uint64_t units = uint64_t{copy.rows} * copy.row_units;
  const uint64_t begin = uint64_t{tile} * kTileUnits + slice * kSliceUnits;
  total = 0;
  if (begin >= units) return segment;
  const uint64_t left = units - begin;
  const uint32_t length =
      left < kSliceUnits ? static_cast<uint32_t>(left) : kSliceUnits;
  total = length * kUnitBytes;
  const auto first_row = static_cast<uint32_t>(begin / copy.row_units);
  const auto first_column =
      static_cast<uint32_t>(begin - uint64_t{first_row} * copy.row_units);
  // In units from the slice's begin, so that nothing overflows.
  const uint64_t row_end = uint64_t{lane + 1} * copy.row_units - first_column;
  const uint32_t segment_begin =
      lane == 0 ? 0 : static_cast<uint32_t>(row_end - copy.row_units);
  if (lane > 0 && row_end - copy.row_units >= length) return segment;
  const uint32_t segment_end =
      row_end < length ? static_cast<uint32_t>(row_end) : length;
  const uint32_t column = lane == 0 ? first_column : 0;
  const RowOffsets at = OffsetsOfRow(copy, first_row + lane);
  segment.from =
      table[at.from_entry] + at.from_offset + uint64_t{column} * kUnitBytes;
  segment.to =
      table[at.to_entry] + at.to_offset + uint64_t{column} * kUnitBytes;
  segment.offset = segment_begin * kUnitBytes;
  segment.bytes = (segment_end - segment_begin) * kUnitBytes;
  return segment;
}

// Whether the segments of all lanes are one run of memory on a side, of which
// `at` is the lane's part.
__device__ __forceinline__ bool IsOneRun(const std::byte* at, uint32_t offset,
                                         uint32_t bytes) {
  const auto begin = reinterpret_cast<uint64_t>(at) - offset;
  const uint64_t first = __shfl_sync(0xffffffffu, begin, 0);
  return __all_sync(0xffffffffu, bytes == 0 || begin == first) != 0;
}

__device__ __forceinline__ void ReadCopy(KernelCopy& to, const KernelCopy& from,
                                         uint32_t lane) {
  constexpr uint32_t kWords = sizeof(KernelCopy) / sizeof(uint32_t);
  __syncwarp();
  for (uint32_t i = lane; i < kWords; i += kWarpThreads) {
    reinterpret_cast<uint32_t*>(&to)[i] =
        reinterpret_cast<const uint32_t*>(&from)[i];
  }
  __syncwarp();
}

#endif

__global__ void __launch_bounds__(kWarps* kWarpThreads, 1)
    BulkCopyKernel(const KernelBatch batch, const uint32_t* unless) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte memory[];
  if (IsStopped(unless)) return;
  auto& block = *reinterpret_cast<BlockMemory*>(memory);
  const uint32_t warp = threadIdx.x / kWarpThreads;
  const uint32_t lane = threadIdx.x % kWarpThreads;
  WarpMemory& mine = block.warps[warp];
  if (lane == 0) {
    for (uint32_t s = 0; s < kStages; ++s) InitBarrier(&mine.loaded[s]);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  // Neighboring tiles for a block: few blocks store faster so. Its warps take
  // their slices in turns.
  const auto bound = [&](uint32_t number) {
    return static_cast<uint32_t>(uint64_t{batch.tiles_count} * number /
                                 gridDim.x);
  };
  const uint32_t first_tile = bound(blockIdx.x);
  const uint32_t slices = (bound(blockIdx.x + 1) - first_tile) * kTileSlices;
  const uint32_t count =
      slices > warp ? (slices - warp + kWarps - 1) / kWarps : 0;
  uint32_t copy = ~0u;  // in mine.copy
  const auto load = [&](uint32_t i) {
    const uint32_t slice = warp + i * kWarps;
    const KernelTile tile = batch.tiles[first_tile + slice / kTileSlices];
    if (tile.copy != copy) ReadCopy(mine.copy, batch.copies[tile.copy], lane);
    copy = tile.copy;
    uint32_t total = 0;
    const Segment segment = SegmentOf(mine.copy, batch.table, tile.tile,
                                      slice % kTileSlices, lane, total);
    const uint32_t s = i % kStages;
    // Also if the slice is empty: the barrier's phases count slices.
    if (lane == 0) ExpectBytes(&mine.loaded[s], total);
    __syncwarp();
    std::byte* const stage = block.slices[warp][s];
    const bool loads_run =
        IsOneRun(segment.from, segment.offset, segment.bytes);
    const uint32_t load_bytes =
        loads_run ? (lane == 0 ? total : 0) : segment.bytes;
    if (load_bytes > 0) {
      BulkLoad(stage + segment.offset, segment.from, load_bytes,
               &mine.loaded[s]);
    }
    const bool stores_run = IsOneRun(segment.to, segment.offset, segment.bytes);
    mine.to[s][lane] = segment.to;
    mine.offset[s][lane] = segment.offset;
    mine.bytes[s][lane] = stores_run ? (lane == 0 ? total : 0) : segment.bytes;
  };
  for (uint32_t i = 0; i + 1 < kStages && i < count; ++i) load(i);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t s = i % kStages;
    AwaitBarrier(&mine.loaded[s], i / kStages % 2);
    if (const uint32_t bytes = mine.bytes[s][lane]; bytes > 0) {
      const uint32_t offset = mine.offset[s][lane];
      BulkStore(mine.to[s][lane], block.slices[warp][s] + offset, bytes);
    }
    CommitStores();
    if (i + kStages - 1 < count) {
      AwaitStoresButLast();
      __syncwarp();
      load(i + kStages - 1);
    }
  }
  AwaitStores();
#endif
}

}  // namespace

bool IsBulkCopy(const KernelCopy& copy) {
  return copy.kind == KernelKind::kCopy && copy.unit_bytes == kUnitBytes &&
         copy.row_units >= kRowUnitsMin;
}

cudaError_t LoadBulkCopyKernel(int device, bool& has_bulk_copies) {
  int major = 0;
  int memory = 0;
  has_bulk_copies = false;
  cudaError_t error =
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(
        &memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error != cudaSuccess || major < 9 ||
      memory < static_cast<int>(sizeof(BlockMemory))) {
    return error;
  }
  error = LoadKernel(BulkCopyKernel);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(BulkCopyKernel,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 sizeof(BlockMemory));
  }
  has_bulk_copies = error == cudaSuccess;
  return error;
}

cudaError_t LaunchBulkCopies(const KernelBatch& batch, uint32_t blocks_max,
                             const uint32_t* unless, cudaStream_t stream) {
  if (batch.tiles_count == 0) return cudaSuccess;
  const uint32_t blocks =
      batch.tiles_count < blocks_max ? batch.tiles_count : blocks_max;
  BulkCopyKernel<<<blocks, kWarps * kWarpThreads, sizeof(BlockMemory),
                   stream>>>(batch, unless);
  return cudaGetLastError();
}

}  // namespace refit::cuda
