#include "executor/device/cuda/lower_copies.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <iterator>
#include <map>
#include <utility>

#include "executor/device/cuda/bulk_copy_kernel.h"
#include "plan/schedule/copy_batches.h"

namespace refit {
namespace {

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

}  // namespace refit
