#include "plan/schedule/copy_batches.h"

#include <algorithm>
#include <cstddef>

namespace refit {
namespace {

// Walks the loops of one box from the innermost outwards, in portions.
class LoopWalk {
 public:
  explicit LoopWalk(const TensorBox& box) : box_(box), next_(box.loops.size()) {
    Advance();
  }

  // What is left of the present loop; 1 after the last.
  uint64_t extent() const { return extent_; }
  const CopyStride& stride() const { return stride_; }
  // Moves on by `part` iterations, which divide extent().
  void Take(uint64_t part) {
    extent_ /= part;
    stride_.entries *= part;
    stride_.bytes *= part;
    if (extent_ == 1) Advance();
  }

 private:
  void Advance() {
    if (next_ == 0) return;
    extent_ = box_.loops[--next_].extent;
    stride_ = box_.loops[next_].stride;
  }

  const TensorBox& box_;
  size_t next_;
  uint64_t extent_ = 1;
  CopyStride stride_;
};

bool Continues(const CopyStride& outer, const CopyStride& inner,
               uint64_t extent) {
  return outer.entries == inner.entries * extent &&
         outer.bytes == inner.bytes * extent;
}

}  // namespace

bool AppendCopy(const TensorBox& from, const TensorBox& to, uint32_t link,
                CopyBatch& batch) {
  CopyLoops loops;  // innermost first
  LoopWalk source(from), target(to);
  while (source.extent() > 1 || target.extent() > 1) {
    const uint64_t part = std::min(source.extent(), target.extent());
    if (part == 1 || source.extent() % part != 0 ||
        target.extent() % part != 0) {
      return false;
    }
    loops.push_back(
        {.extent = part, .from = source.stride(), .to = target.stride()});
    source.Take(part);
    target.Take(part);
  }
  batch.copies.push_back(
      {.from = from.first,
       .to = to.first,
       .loops_begin = static_cast<uint32_t>(batch.loops.size()),
       .loops_count = static_cast<uint32_t>(loops.size()),
       .link = link});
  batch.loops.insert(batch.loops.end(), loops.rbegin(), loops.rend());
  return true;
}

void AppendZero(const TensorBox& box, CopyBatch& batch) {
  batch.copies.push_back(
      {.from = {},
       .to = box.first,
       .loops_begin = static_cast<uint32_t>(batch.loops.size()),
       .loops_count = static_cast<uint32_t>(box.loops.size())});
  for (const BoxLoop& loop : box.loops) {
    batch.loops.push_back(
        {.extent = loop.extent, .from = {}, .to = loop.stride});
  }
}

void AppendQuantize(const fb::Body& body, const TensorTable& tensors,
                    const fb::Quantize& op, CopyBatch& batch) {
  const auto row_bytes = [&](uint32_t slot, uint64_t stride) {
    return stride * DTypeBytes(tensors.buffer(slot).dtype());
  };
  const fb::Quantization& quantization =
      *body.quantizations()->Get(op.quantization());
  batch.quantizes.push_back(
      {.input = tensors.AddressOf(op.input_slot(), op.input_offset()),
       .output = tensors.AddressOf(op.output_slot(), op.output_offset()),
       .scales = tensors.AddressOf(op.scale_slot(), op.scale_offset()),
       .rows = op.rows(),
       .columns = op.columns(),
       .input_row_bytes = row_bytes(op.input_slot(), op.input_row_stride()),
       .output_row_bytes = row_bytes(op.output_slot(), op.output_row_stride()),
       .scale_row_bytes = row_bytes(op.scale_slot(), op.scale_row_stride()),
       .block_rows = quantization.block_rows(),
       .block_columns = quantization.block_columns(),
       .format = quantization.scale_format(),
       .loops_begin = static_cast<uint32_t>(batch.quantize_loops.size()),
       .loops_count = op.loops_count()});
  for (const fb::QuantizeLoop& loop : LoopsOf(body, op)) {
    batch.quantize_loops.push_back(
        {.extent = loop.extent(),
         .input = tensors.StrideOf(op.input_slot(), loop.input_stride()),
         .output = tensors.StrideOf(op.output_slot(), loop.output_stride()),
         .scales = tensors.StrideOf(op.scale_slot(), loop.scale_stride())});
  }
}

void MoveBatch(CopyBatch& more, CopyBatch& batch) {
  for (StridedCopy copy : more.copies) {
    copy.loops_begin += static_cast<uint32_t>(batch.loops.size());
    batch.copies.push_back(copy);
  }
  for (BlockQuantize op : more.quantizes) {
    op.loops_begin += static_cast<uint32_t>(batch.quantize_loops.size());
    op.runs_begin += static_cast<uint32_t>(batch.row_runs.size());
    batch.quantizes.push_back(op);
  }
  const auto append = [](auto& to, const auto& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  append(batch.loops, more.loops);
  append(batch.quantize_loops, more.quantize_loops);
  append(batch.row_runs, more.row_runs);
  more = CopyBatch{};
}

uint64_t ElementsOf(const BlockQuantize& op, const CopyBatch& batch) {
  uint64_t elements = op.rows * op.columns;
  for (uint32_t l = 0; l < op.loops_count; ++l) {
    elements *= batch.quantize_loops[op.loops_begin + l].extent;
  }
  return elements;
}

std::vector<CopyStride> RowRunsOf(const CopyBatch& batch,
                                  const BlockQuantize& op) {
  if (op.run_rows == 0) return {};
  const auto first = batch.row_runs.begin() + op.runs_begin;
  const uint64_t count = (op.rows + op.run_rows - 1) / op.run_rows;
  return {first, first + static_cast<std::ptrdiff_t>(count)};
}

CopyLoops MergedLoops(absl::Span<const CopyLoop> loops) {
  CopyLoops merged;
  for (const CopyLoop& loop : loops) {
    if (loop.extent == 1) continue;
    if (!merged.empty() &&
        Continues(merged.back().from, loop.from, loop.extent) &&
        Continues(merged.back().to, loop.to, loop.extent)) {
      merged.back() = {.extent = merged.back().extent * loop.extent,
                       .from = loop.from,
                       .to = loop.to};
    } else {
      merged.push_back(loop);
    }
  }
  return merged;
}

}  // namespace refit
