#include "executor/device/cuda/cuda_copies.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "executor/device/cuda/bulk_copy_kernel.h"
#include "executor/device/cuda/cuda_status.h"
#include "executor/device/cuda/scoped_device.h"
#include "plan/schedule/copy_batches.h"

namespace refit {
namespace {

// Enough to hide latency, few enough that a block has many tiles.
constexpr uint32_t kBlocksPerMultiprocessor = 4;

// A batch of kHalf has one thread block on half of the multiprocessors, four on
// each otherwise: so a quantization and what it goes on beside have
// multiprocessors of their own. Half of them saturate NVLink. Plain copies of
// kLink and kTwoLinks have as many threads.
constexpr uint32_t kHalfDivisor = 8;

// Tiles of digests that a block takes at a time: so many that it seldom adds to
// sums in memory, and so few that all blocks end together.
constexpr uint32_t kDigestChunkMax = 32;
constexpr uint32_t kDigestChunksPerBlock = 8;

using cuda::KernelCopy;
using cuda::KernelKind;
using cuda::KernelLoop;
using cuda::KernelQuantize;
using cuda::KernelQuantizeLoop;
using cuda::KernelTile;

constexpr uint32_t kUnitBytesMax = 16;
// Rows and units of a row are divided as 31-bit numbers.
constexpr uint64_t kCountMax = (uint64_t{1} << 31) - 1 - cuda::kTileUnits;

uint64_t ElementBytes(const CopyAddress& address) {
  return static_cast<uint64_t>(DTypeBytes(address.dtype));
}

// Of the first `count` steps.
KernelStep SumOfSteps(absl::Span<const KernelStep> steps, size_t count) {
  KernelStep sum;
  for (const KernelStep& step : steps.subspan(0, count)) {
    sum.others += step.others;
    sum.bulk += step.bulk;
  }
  return sum;
}

KernelStep SumOfSteps(absl::Span<const KernelStep> steps) {
  return SumOfSteps(steps, steps.size());
}

// The steps of digests, for `blocks` thread blocks.
std::vector<cuda::KernelDigestStep> DigestSteps(
    absl::Span<const KernelStep> steps, uint32_t blocks) {
  std::vector<cuda::KernelDigestStep> lowered;
  uint32_t begin = 0;
  for (const KernelStep& step : steps) {
    lowered.push_back(
        {.begin = begin,
         .end = begin + step.others,
         .chunk = std::clamp(step.others / (blocks * kDigestChunksPerBlock), 1u,
                             kDigestChunkMax)});
    begin += step.others;
  }
  return lowered;
}

// Lowers the copies of one batch.
class Lowering {
 public:
  // `has_positions`: `to` is a position, not an address of the table.
  Lowering(const CopyBatch& batch, absl::Span<std::byte* const> table,
           bool has_positions)
      : batch_(batch), table_(table), has_positions_(has_positions) {}

  KernelProgram Lower() {
    for (const StridedCopy& copy : batch_.copies) {
      tiles_ = &tiles_of_step_[copy.step][copy.link];
      LowerOne(copy);
      // As many as the copy has become.
      if (batch_.kind == CopyKind::kDigest) {
        const DigestTarget& target =
            batch_.digests[static_cast<size_t>(&copy - batch_.copies.data())];
        program_.digests.resize(
            program_.copies.size(),
            {.param_key = target.param_key,
             .sum_offset = target.byte_offset,
             .sum_entry = static_cast<uint32_t>(target.entry),
             .reserved = 0});
      }
    }
    AddSteps();
    program_.begun = batch_.begun;
    if (batch_.kind == CopyKind::kCopy) PartBulkTiles();
    std::map<uint32_t, std::vector<uint32_t>> quantizes_of_link;
    for (const BlockQuantize& op : batch_.quantizes) {
      const uint64_t first = program_.quantize_tiles;
      EmitQuantize(op, absl::MakeConstSpan(batch_.quantize_loops)
                           .subspan(op.loops_begin, op.loops_count));
      std::vector<uint32_t>& tiles = quantizes_of_link[op.link];
      for (uint64_t tile = first; tile < program_.quantize_tiles; ++tile) {
        tiles.push_back(static_cast<uint32_t>(tile));
      }
    }
    for (const CopyStride& run : batch_.row_runs) {
      program_.row_runs.push_back(
          {.bytes = run.bytes,
           .entries = static_cast<uint32_t>(run.entries),
           .reserved = 0});
    }
    if (quantizes_of_link.size() > 1) {
      program_.quantize_order = Interleaved(quantizes_of_link);
    }
    for (const ElementApply& op : batch_.applies) EmitApply(op);
    return std::move(program_);
  }

 private:
  void LowerOne(const StridedCopy& strided) {
    StridedCopy copy = strided;
    CopyLoops loops(batch_.loops.begin() + copy.loops_begin,
                    batch_.loops.begin() + copy.loops_begin + copy.loops_count);
    if (batch_.kind == CopyKind::kZero) {
      // What is not read is taken to lie as what is written.
      copy.from = copy.to;
      for (CopyLoop& loop : loops) loop.from = loop.to;
    }
    loops = MergedLoops(loops);
    // The innermost loop is the row, if it is contiguous in both tensors.
    uint64_t row_elements = 1;
    if (!loops.empty() && loops.back().from.entries == 0 &&
        loops.back().to.entries == 0 &&
        loops.back().from.bytes == ElementBytes(copy.from) &&
        loops.back().to.bytes == ElementBytes(copy.to)) {
      row_elements = loops.back().extent;
      loops.pop_back();
    }
    Emit(copy, row_elements, loops);
  }

  // Iterations of the outermost loops become copies of their own until the rest
  // fits the kernel.
  void Emit(const StridedCopy& copy, uint64_t row_elements,
            const CopyLoops& loops) {
    uint64_t rows = 1;
    for (const CopyLoop& loop : loops) rows *= loop.extent;
    const bool fits = loops.size() <= cuda::kKernelLoopsMax &&
                      rows <= kCountMax && row_elements <= kCountMax;
    if (fits) {
      EmitOne(copy, row_elements, loops, static_cast<uint32_t>(rows));
      return;
    }
    if (loops.empty()) {
      // A row too long to count: halves.
      const uint64_t first = row_elements / 2 / 4096 * 4096;
      StridedCopy rest = copy;
      rest.from.byte_offset += first * ElementBytes(copy.from);
      rest.to.byte_offset += first * ElementBytes(copy.to);
      Emit(copy, first, loops);
      Emit(rest, row_elements - first, loops);
      return;
    }
    const CopyLoop& outer = loops.front();
    const CopyLoops inner(loops.begin() + 1, loops.end());
    StridedCopy part = copy;
    for (uint64_t i = 0; i < outer.extent; ++i) {
      Emit(part, row_elements, inner);
      part.from.entry += outer.from.entries;
      part.from.byte_offset += outer.from.bytes;
      part.to.entry += outer.to.entries;
      part.to.byte_offset += outer.to.bytes;
    }
  }

  void EmitOne(const StridedCopy& copy, uint64_t row_elements,
               const CopyLoops& loops, uint32_t rows) {
    const bool casts = copy.from.dtype != copy.to.dtype;
    KernelCopy kernel = {};
    kernel.kind = casts                            ? KernelKind::kCast
                  : batch_.kind == CopyKind::kZero ? KernelKind::kZero
                                                   : KernelKind::kCopy;
    kernel.from_dtype = copy.from.dtype;
    kernel.to_dtype = copy.to.dtype;
    kernel.from_entry = static_cast<uint32_t>(copy.from.entry);
    kernel.to_entry = static_cast<uint32_t>(copy.to.entry);
    kernel.from_offset = copy.from.byte_offset;
    kernel.to_offset = copy.to.byte_offset;
    kernel.rows = rows;
    kernel.loops_count = static_cast<uint32_t>(loops.size());
    for (size_t l = 0; l < loops.size(); ++l) {
      const CopyLoop& loop = loops[loops.size() - 1 - l];
      KernelLoop& to = kernel.loops[l];
      to.extent = static_cast<uint32_t>(loop.extent);
      cuda::DivisionBy(to.extent, to.magic, to.shift);
      to.from_entries = static_cast<uint32_t>(loop.from.entries);
      to.to_entries = static_cast<uint32_t>(loop.to.entries);
      to.from_bytes = loop.from.bytes;
      to.to_bytes = loop.to.bytes;
    }
    if (casts) {
      kernel.row_units = static_cast<uint32_t>(row_elements);
    } else {
      const uint64_t row_bytes = row_elements * ElementBytes(copy.to);
      kernel.unit_bytes = UnitBytes(copy, row_bytes, loops);
      kernel.row_units = static_cast<uint32_t>(row_bytes / kernel.unit_bytes);
    }
    cuda::DivisionBy(kernel.row_units, kernel.row_magic, kernel.row_shift);
    const auto index = static_cast<uint32_t>(program_.copies.size());
    program_.copies.push_back(kernel);
    const uint64_t units = uint64_t{rows} * kernel.row_units;
    const uint64_t tiles = (units + cuda::kTileUnits - 1) / cuda::kTileUnits;
    for (uint64_t tile = 0; tile < tiles; ++tile) {
      tiles_->push_back({.copy = index, .tile = static_cast<uint32_t>(tile)});
    }
  }

  // The widest unit that every row of the copy is aligned to, in both tensors.
  uint32_t UnitBytes(const StridedCopy& copy, uint64_t row_bytes,
                     const CopyLoops& loops) const {
    uint64_t bits = row_bytes | copy.from.byte_offset | copy.to.byte_offset;
    uint64_t from_last = copy.from.entry;
    uint64_t to_last = copy.to.entry;
    for (const CopyLoop& loop : loops) {
      bits |= loop.from.bytes | loop.to.bytes;
      from_last += (loop.extent - 1) * loop.from.entries;
      to_last += (loop.extent - 1) * loop.to.entries;
    }
    bits |= AddressBits(copy.from.entry, from_last);
    if (!has_positions_) bits |= AddressBits(copy.to.entry, to_last);
    return std::min<uint64_t>(kUnitBytesMax,
                              uint64_t{1} << std::countr_zero(bits));
  }

  uint64_t AddressBits(uint64_t first, uint64_t last) const {
    uint64_t bits = 0;
    for (uint64_t entry = first; entry <= last; ++entry) {
      bits |= reinterpret_cast<uintptr_t>(table_[entry]);
    }
    return bits;
  }

  // The kernel does not use the rest of a count that is no 31-bit number.
  static cuda::KernelQuantizeCount CountOf(uint64_t count) {
    cuda::KernelQuantizeCount divided = {};
    divided.count = count;
    if (count > 0 && count <= kCountMax) {
      cuda::DivisionBy(static_cast<uint32_t>(count), divided.magic,
                       divided.shift);
    }
    return divided;
  }

  // Iterations of the outermost loops become operations of their own until the
  // rest fits the kernel.
  void EmitQuantize(const BlockQuantize& op,
                    absl::Span<const QuantizeLoop> loops) {
    if (loops.size() > cuda::kQuantizeLoopsMax) {
      BlockQuantize part = op;
      for (uint64_t i = 0; i < loops[0].extent; ++i) {
        EmitQuantize(part, loops.subspan(1));
        Advance(part.input, loops[0].input);
        Advance(part.output, loops[0].output);
        Advance(part.scales, loops[0].scales);
      }
      return;
    }
    KernelQuantize kernel = {};
    kernel.first_tile = program_.quantize_tiles;
    kernel.rows = op.rows;
    kernel.columns = op.columns;
    kernel.blocks_down = CountOf((op.rows + op.block_rows - 1) / op.block_rows);
    kernel.blocks_across =
        CountOf((op.columns + op.block_columns - 1) / op.block_columns);
    kernel.blocks = kernel.blocks_down.count * kernel.blocks_across.count;
    const CopyAddress* const addresses[] = {&op.input, &op.output, &op.scales};
    const uint64_t row_bytes[] = {op.input_row_bytes, op.output_row_bytes,
                                  op.scale_row_bytes};
    for (uint32_t operand = 0; operand < cuda::kQuantizeOperands; ++operand) {
      kernel.offset[operand] = addresses[operand]->byte_offset;
      kernel.entry[operand] = static_cast<uint32_t>(addresses[operand]->entry);
      kernel.row_bytes[operand] = row_bytes[operand];
    }
    kernel.block_rows = op.block_rows;
    kernel.block_columns = op.block_columns;
    kernel.dtype = op.input.dtype;
    kernel.format = op.format;
    kernel.over_link = op.link != 0 ? 1 : 0;
    kernel.run_rows = CountOf(op.run_rows);
    kernel.runs_begin = op.runs_begin;
    kernel.loops_count = static_cast<uint32_t>(loops.size());
    for (size_t l = 0; l < loops.size(); ++l) {
      const QuantizeLoop& loop = loops[loops.size() - 1 - l];
      KernelQuantizeLoop& to = kernel.loops[l];
      to.extent = CountOf(loop.extent);
      kernel.blocks *= loop.extent;
      const CopyStride* const strides[] = {&loop.input, &loop.output,
                                           &loop.scales};
      for (uint32_t operand = 0; operand < cuda::kQuantizeOperands; ++operand) {
        to.bytes[operand] = strides[operand]->bytes;
        to.entries[operand] = static_cast<uint32_t>(strides[operand]->entries);
      }
    }
    program_.quantize_tiles +=
        cuda::IsSmallBlock(op.block_rows, op.block_columns)
            ? (kernel.blocks + cuda::kSmallBlocksPerTile - 1) /
                  cuda::kSmallBlocksPerTile
            : kernel.blocks;
    program_.quantizes.push_back(kernel);
  }

  void EmitApply(const ElementApply& op) {
    cuda::KernelApply kernel = {};
    kernel.first_tile = program_.apply_tiles;
    kernel.elements = op.elements;
    kernel.offset = op.tensor.byte_offset;
    kernel.entry = static_cast<uint32_t>(op.tensor.entry);
    kernel.functions_count = op.functions_count;
    std::copy_n(batch_.functions.begin() + op.functions_begin,
                op.functions_count, kernel.functions);
    kernel.dtype = op.tensor.dtype;
    program_.apply_tiles +=
        (op.elements + cuda::kApplyTileElements - 1) / cuda::kApplyTileElements;
    program_.applies.push_back(kernel);
  }

  static void Advance(CopyAddress& address, const CopyStride& stride) {
    address.entry += stride.entries;
    address.byte_offset += stride.bytes;
  }

  // Each next tile is of the link that is farthest behind, so that all links
  // end together.
  template <typename Tile>
  static std::vector<Tile> Interleaved(
      const std::map<uint32_t, std::vector<Tile>>& tiles_of_link) {
    struct Link {
      absl::Span<const Tile> tiles;
      size_t done = 0;
    };
    std::vector<Link> links;
    size_t total = 0;
    for (const auto& [link, tiles] : tiles_of_link) {
      if (!tiles.empty()) links.push_back({.tiles = tiles});
      total += tiles.size();
    }
    std::vector<Tile> all;
    all.reserve(total);
    while (all.size() < total) {
      Link* next = nullptr;
      for (Link& link : links) {
        if (link.done == link.tiles.size()) continue;
        if (next == nullptr ||
            link.done * next->tiles.size() < next->done * link.tiles.size()) {
          next = &link;
        }
      }
      all.push_back(next->tiles[next->done++]);
    }
    return all;
  }

  bool IsBulk(const KernelTile& tile) const {
    return batch_.kind == CopyKind::kCopy &&
           cuda::IsBulkCopy(program_.copies[tile.copy]);
  }

  void AddSteps() {
    for (const auto& [step, tiles_of_link] : tiles_of_step_) {
      const std::vector<KernelTile> tiles = Interleaved(tiles_of_link);
      const auto bulk = static_cast<uint32_t>(
          std::count_if(tiles.begin(), tiles.end(),
                        [&](const KernelTile& tile) { return IsBulk(tile); }));
      program_.steps.resize(step + 1);
      program_.steps.back() = {
          .others = static_cast<uint32_t>(tiles.size()) - bulk, .bulk = bulk};
      program_.tiles.insert(program_.tiles.end(), tiles.begin(), tiles.end());
    }
  }

  void PartBulkTiles() {
    const std::vector<KernelTile>& tiles = program_.tiles;
    const auto is_bulk = [&](const KernelTile& tile) { return IsBulk(tile); };
    const auto others = static_cast<std::ptrdiff_t>(
        tiles.size() - SumOfSteps(program_.steps).bulk);
    if (std::none_of(tiles.begin(), tiles.begin() + others, is_bulk)) return;
    std::vector<KernelTile>& parted = program_.parted_tiles;
    parted.reserve(tiles.size());
    std::remove_copy_if(tiles.begin(), tiles.end(), std::back_inserter(parted),
                        is_bulk);
    std::copy_if(tiles.begin(), tiles.end(), std::back_inserter(parted),
                 is_bulk);
  }

  const CopyBatch& batch_;
  const absl::Span<std::byte* const> table_;
  const bool has_positions_;
  // By step, then by link.
  std::map<uint32_t, std::map<uint32_t, std::vector<KernelTile>>>
      tiles_of_step_;
  std::vector<KernelTile>* tiles_ = nullptr;  // of the copy that is lowered
  KernelProgram program_;
};

// Everything the kernel reads, in one piece of device memory.
class CudaPreparedCopies : public PreparedCopies {
 public:
  CudaPreparedCopies(int device, const CudaKernelLimits& limits)
      : device_(device), limits_(limits) {}
  ~CudaPreparedCopies() override {
    const ScopedDevice current(device_);
    cudaFree(memory_);
  }

  absl::Status Upload(absl::Span<std::byte* const> table,
                      absl::Span<const KernelProgram> programs) {
    std::vector<std::byte> image;
    const auto add = [&](const auto& values) {
      image.resize((image.size() + 15) / 16 * 16);
      const size_t at = image.size();
      const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
      image.insert(image.end(), bytes,
                   bytes + values.size() * sizeof(*values.data()));
      return at;
    };
    struct Offsets {
      size_t copies;
      size_t tiles;
      size_t parted_tiles;
      size_t quantizes;
      size_t quantize_order;
      size_t row_runs;
      size_t applies;
      size_t digests;
      size_t digest_steps;
    };
    const uint32_t blocks_max =
        limits_.multiprocessors * kBlocksPerMultiprocessor;
    const size_t table_at = add(table);
    std::vector<Offsets> offsets;
    for (const KernelProgram& program : programs) {
      const size_t copies = add(program.copies);
      const size_t tiles = add(program.tiles);
      const size_t parted_tiles =
          program.parted_tiles.empty() ? tiles : add(program.parted_tiles);
      const size_t quantizes = add(program.quantizes);
      const size_t quantize_order = add(program.quantize_order);
      const size_t row_runs = add(program.row_runs);
      const size_t applies = add(program.applies);
      const size_t digests = add(program.digests);
      const size_t digest_steps =
          program.digests.empty() ? digests
                                  : add(DigestSteps(program.steps, blocks_max));
      offsets.push_back({copies, tiles, parted_tiles, quantizes, quantize_order,
                         row_runs, applies, digests, digest_steps});
    }
    if (image.empty()) image.resize(16);
    absl::Status status =
        CudaStatus(cudaMalloc(&memory_, image.size()), "cudaMalloc");
    if (!status.ok()) return status;
    status = CudaStatus(
        cudaMemcpy(memory_, image.data(), image.size(), cudaMemcpyHostToDevice),
        "cudaMemcpy");
    const std::byte* base = static_cast<const std::byte*>(memory_);
    for (size_t i = 0; i < programs.size(); ++i) {
      batches_.push_back(
          {.table = reinterpret_cast<std::byte* const*>(base + table_at),
           .copies =
               reinterpret_cast<const KernelCopy*>(base + offsets[i].copies),
           .tiles =
               reinterpret_cast<const KernelTile*>(base + offsets[i].tiles),
           .tiles_count = static_cast<uint32_t>(programs[i].tiles.size())});
      parted_tiles_.push_back(
          reinterpret_cast<const KernelTile*>(base + offsets[i].parted_tiles));
      steps_.push_back(programs[i].steps);
      cuda::QuantizeBatch& quantizes = quantizes_.emplace_back();
      quantizes.table = reinterpret_cast<std::byte* const*>(base + table_at);
      quantizes.operations =
          reinterpret_cast<const KernelQuantize*>(base + offsets[i].quantizes);
      quantizes.operations_count =
          static_cast<uint32_t>(programs[i].quantizes.size());
      quantizes.tiles_count = programs[i].quantize_tiles;
      if (!programs[i].quantize_order.empty()) {
        quantizes.order =
            reinterpret_cast<const uint32_t*>(base + offsets[i].quantize_order);
      }
      quantizes.runs = reinterpret_cast<const cuda::KernelRowRun*>(
          base + offsets[i].row_runs);
      applies_.push_back(
          {.table = reinterpret_cast<std::byte* const*>(base + table_at),
           .operations = reinterpret_cast<const cuda::KernelApply*>(
               base + offsets[i].applies),
           .operations_count =
               static_cast<uint32_t>(programs[i].applies.size()),
           .tiles_count = programs[i].apply_tiles});
      std::optional<cuda::DigestBatch>& digests = digests_.emplace_back();
      if (!programs[i].digests.empty()) {
        const CopyAddress& begun = programs[i].begun;
        digests = {.batch = batches_.back(),
                   .digests = reinterpret_cast<const cuda::KernelDigest*>(
                       base + offsets[i].digests),
                   .steps = reinterpret_cast<const cuda::KernelDigestStep*>(
                       base + offsets[i].digest_steps),
                   .begun = reinterpret_cast<uint32_t*>(table[begun.entry] +
                                                        begun.byte_offset)};
      }
      const DeviceShare share = programs[i].share;
      blocks_of_batch_.push_back(share == DeviceShare::kAll
                                     ? blocks_max
                                     : std::max(1u, blocks_max / kHalfDivisor));
      const uint32_t links = share == DeviceShare::kLink       ? 1
                             : share == DeviceShare::kTwoLinks ? 2
                                                               : 0;
      bulk_blocks_.push_back(links * limits_.link_multiprocessors);
    }
    return status;
  }

  absl::Status Enqueue(size_t batch, Stream stream, const uint32_t* unless,
                       const DeviceUse& use) override {
    return Enqueue(batch, 0, steps_[batch].size(), stream, unless, use);
  }

  absl::Status EnqueueStep(size_t batch, uint32_t step, Stream stream,
                           const uint32_t* unless,
                           const DeviceUse& use) override {
    // What is no copy is of step 0.
    if (step > 0 && step >= steps_[batch].size()) return absl::OkStatus();
    return Enqueue(batch, step, step + 1, stream, unless, use);
  }

 private:
  absl::Status Enqueue(size_t batch, size_t steps_begin, size_t steps_end,
                       Stream stream, const uint32_t* unless,
                       const DeviceUse& use) {
    const ScopedDevice current(device_);
    const absl::Span<const KernelStep> steps = steps_[batch];
    const KernelStep before =
        SumOfSteps(steps, std::min(steps_begin, steps.size()));
    steps_end = std::min(steps_end, steps.size());
    const KernelStep until = SumOfSteps(steps, steps_end);
    cuda::KernelBatch copies = batches_[batch];
    copies.tiles += before.others + before.bulk;
    copies.tiles_count =
        until.others + until.bulk - before.others - before.bulk;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const auto [blocks, bulk_blocks] = BlocksOf(batch, use);
    if (digests_[batch].has_value()) {
      if (copies.tiles_count == 0) return absl::OkStatus();
      return CudaStatus(
          cuda::LaunchDigests(
              *digests_[batch], static_cast<uint32_t>(steps_begin),
              static_cast<uint32_t>(steps_end),
              std::min(blocks, copies.tiles_count), unless, cuda_stream),
          "launch of the digest kernel");
    }
    absl::Status status;
    if (bulk_blocks > 0 && limits_.has_bulk_copies) {
      cuda::KernelBatch bulk = copies;
      bulk.tiles =
          parted_tiles_[batch] + SumOfSteps(steps).others + before.bulk;
      bulk.tiles_count = until.bulk - before.bulk;
      copies.tiles = parted_tiles_[batch] + before.others;
      copies.tiles_count = until.others - before.others;
      status = CudaStatus(
          cuda::LaunchBulkCopies(bulk, bulk_blocks, unless, cuda_stream),
          "launch of the bulk copy kernel");
    }
    status.Update(
        CudaStatus(cuda::LaunchCopies(copies, blocks, unless, cuda_stream),
                   "launch of the copy kernel"));
    if (steps_begin > 0) return status;
    status.Update(CudaStatus(
        cuda::LaunchQuantizes(quantizes_[batch], blocks, unless, cuda_stream),
        "launch of the quantization kernel"));
    status.Update(CudaStatus(
        cuda::LaunchApplies(applies_[batch], blocks, unless, cuda_stream),
        "launch of the post-hook kernel"));
    return status;
  }

  // Thread blocks of bulk copies, which have a multiprocessor each, and of what
  // the batch's other kernels do. Without bulk blocks these do all.
  struct Blocks {
    uint32_t blocks = 0;
    uint32_t bulk_blocks = 0;
  };
  Blocks BlocksOf(size_t batch, const DeviceUse& use) const {
    const uint32_t all = limits_.multiprocessors;
    const uint32_t blocks = blocks_of_batch_[batch];
    switch (use.way) {
      case DeviceUse::Way::kShare:
        return {blocks, bulk_blocks_[batch]};
      case DeviceUse::Way::kBulk: {
        if (use.at_most == 0) return {blocks, all};
        const uint32_t most = std::min(use.at_most, all);
        return {std::min(blocks, most), most};
      }
      case DeviceUse::Way::kBesideDigests:
        return {std::min(blocks, all), all};
      case DeviceUse::Way::kBesideRounds:
        return {std::max(1u, blocks / kHalfDivisor), bulk_blocks_[batch]};
      case DeviceUse::Way::kFew:
        return {std::min(blocks, Few() * kBlocksPerMultiprocessor), Few()};
      case DeviceUse::Way::kMost:
        return {std::min(blocks, (all - Few()) * kBlocksPerMultiprocessor),
                all - Few()};
    }
    return {};
  }

  // Multiprocessors of kFew.
  uint32_t Few() const { return 2 * limits_.link_multiprocessors; }

  const int device_;
  const CudaKernelLimits limits_;
  void* memory_ = nullptr;
  std::vector<cuda::KernelBatch> batches_;
  std::vector<const KernelTile*> parted_tiles_;
  std::vector<std::vector<KernelStep>> steps_;
  std::vector<cuda::QuantizeBatch> quantizes_;
  std::vector<cuda::ApplyBatch> applies_;
  std::vector<std::optional<cuda::DigestBatch>> digests_;
  std::vector<uint32_t> blocks_of_batch_;
  std::vector<uint32_t> bulk_blocks_;  // 0: no bulk copies, unless bounded
};

}  // namespace

KernelProgram LowerForKernel(const CopyBatch& batch,
                             absl::Span<std::byte* const> table) {
  return Lowering(batch, table, batch.kind == CopyKind::kDigest).Lower();
}

std::vector<KernelCopy> LowerPositions(const StridedCopy& copy,
                                       absl::Span<const CopyLoop> loops,
                                       absl::Span<std::byte* const> table) {
  CopyBatch batch;
  batch.copies.push_back(copy);
  batch.copies.back().loops_begin = 0;
  batch.loops.assign(loops.begin(), loops.end());
  return Lowering(batch, table, /*has_positions=*/true).Lower().copies;
}

absl::StatusOr<std::unique_ptr<PreparedCopies>> PrepareCudaCopies(
    int device, const CudaKernelLimits& limits,
    absl::Span<std::byte* const> table, absl::Span<const CopyBatch> batches) {
  std::vector<KernelProgram> programs;
  for (const CopyBatch& batch : batches) {
    programs.push_back(LowerForKernel(batch, table));
    programs.back().share = batch.share;
    if (programs.back().tiles.size() > cuda::kTilesMax) {
      return absl::ResourceExhaustedError(
          absl::StrCat("a batch of ", programs.back().tiles.size(),
                       " tiles is too large for one kernel"));
    }
  }
  auto prepared = std::make_unique<CudaPreparedCopies>(device, limits);
  if (absl::Status s = prepared->Upload(table, programs); !s.ok()) return s;
  return prepared;
}

}  // namespace refit
