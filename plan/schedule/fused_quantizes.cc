#include "plan/schedule/fused_quantizes.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "plan/schedule/operation_box.h"

namespace refit {
namespace {

constexpr uint64_t kValueBytes = 1;

uint64_t BlocksOf(uint64_t elements, uint64_t block) {
  return (elements + block - 1) / block;
}

Dimensions ValueDimensions(const BlockQuantize& op,
                           absl::Span<const QuantizeLoop> loops) {
  return DimensionsOf(loops, op.rows, op.output_row_bytes, op.columns,
                      kValueBytes,
                      [](const QuantizeLoop& loop) { return loop.output; });
}

uint64_t ScaleBytes(const BlockQuantize& op) {
  return static_cast<uint64_t>(DTypeBytes(op.scales.dtype));
}

Dimensions ScaleDimensions(const BlockQuantize& op,
                           absl::Span<const QuantizeLoop> loops) {
  return DimensionsOf(loops, BlocksOf(op.rows, op.block_rows),
                      op.scale_row_bytes,
                      BlocksOf(op.columns, op.block_columns), ScaleBytes(op),
                      [](const QuantizeLoop& loop) { return loop.scales; });
}

// Coordinates without gaps, and the loops around them.
struct BlockRun {
  uint64_t extent = 1;
  CopyStride to;
  absl::Span<const DimensionLoop> around;
};

BlockRun BlockRunOf(const std::vector<DimensionLoop>& loops) {
  BlockRun run;
  run.around = loops;
  if (!loops.empty() && loops.back().step == 1) {
    run.extent = loops.back().extent;
    run.to = loops.back().to;
    run.around.remove_suffix(1);
  }
  return run;
}

// Whether coordinates from `start` on are whole blocks of a dimension.
bool IsWhole(uint64_t start, const BlockRun& run, uint64_t block,
             uint64_t extent) {
  if (start % block != 0) return false;
  for (const DimensionLoop& loop : run.around) {
    if (loop.step % block != 0) return false;
  }
  return run.extent % block == 0 ||
         (run.around.empty() && start + run.extent == extent);
}

// Where the scales of a box of values go: as the loops of a copy of scales say.
class ScaleTargets {
 public:
  explicit ScaleTargets(const OperationBox& box) : box_(box), to_(box.to) {}

  // Goes to coordinate `at` of a dimension. False: the copy does not read it.
  bool Start(size_t dim, uint64_t at) {
    digits_.clear();
    dim_ = dim;
    if (at < box_.start[dim]) return false;
    uint64_t rest = at - box_.start[dim];
    for (const DimensionLoop& loop : box_.loops[dim]) {
      digits_.push_back(rest / loop.step);
      rest %= loop.step;
      if (digits_.back() >= loop.extent) return false;
      MoveBy(to_, loop.to, digits_.back());
    }
    return rest == 0;
  }

  // How far `step` coordinates of the dimension move the target, `extent`
  // times. None: not always as far.
  std::optional<CopyStride> Stride(uint64_t step, uint64_t extent) {
    if (extent == 1) return CopyStride{};
    const std::vector<DimensionLoop>& loops = box_.loops[dim_];
    size_t l = 0;
    while (l < loops.size() && loops[l].step > step) ++l;
    if (l == loops.size() || step % loops[l].step != 0) return std::nullopt;
    const uint64_t times = step / loops[l].step;
    digits_[l] += (extent - 1) * times;
    if (digits_[l] >= loops[l].extent) return std::nullopt;
    return Times(loops[l].to, times);
  }

  const CopyAddress& to() const { return to_; }

 private:
  const OperationBox& box_;
  CopyAddress to_;
  size_t dim_ = 0;
  std::vector<uint64_t> digits_;  // by loop of the dimension
};

// An operation on a box of the matrices of another.
struct PartOfQuantize {
  BlockQuantize quantize;
  std::vector<QuantizeLoop> loops;
  uint64_t scales = 1;  // how many it writes
};

// Quantizes the box of `values`, to where `values` and `scales` copy it. None:
// that is not whole blocks, whose scales `scales` copies.
std::optional<PartOfQuantize> PartOf(const BlockQuantize& op,
                                     absl::Span<const QuantizeLoop> loops,
                                     const OperationBox& values,
                                     const OperationBox& scales) {
  const size_t row = loops.size();
  const size_t column = row + 1;
  const BlockRun rows = BlockRunOf(values.loops[row]);
  const BlockRun columns = BlockRunOf(values.loops[column]);
  if (!IsWhole(values.start[row], rows, op.block_rows, op.rows) ||
      !IsWhole(values.start[column], columns, op.block_columns, op.columns) ||
      rows.to.entries != 0 || columns.to.entries != 0 ||
      (columns.extent > 1 && columns.to.bytes != kValueBytes)) {
    return std::nullopt;
  }
  PartOfQuantize part;
  BlockQuantize& quantize = part.quantize;
  quantize = op;
  quantize.output = values.to;
  quantize.link = values.link;
  quantize.rows = rows.extent;
  quantize.columns = columns.extent;
  quantize.output_row_bytes =
      rows.extent > 1 ? rows.to.bytes : columns.extent * kValueBytes;
  ScaleTargets targets(scales);
  const auto add = [&](const DimensionLoop& loop, const CopyStride& input,
                       uint64_t block) {
    const std::optional<CopyStride> to =
        targets.Stride(loop.step / block, loop.extent);
    if (!to.has_value()) return false;
    part.loops.push_back({.extent = loop.extent,
                          .input = Times(input, loop.step),
                          .output = loop.to,
                          .scales = *to});
    part.scales *= loop.extent;
    return true;
  };
  for (size_t d = 0; d < row; ++d) {
    MoveBy(quantize.input, loops[d].input, values.start[d]);
    if (!targets.Start(d, values.start[d])) return std::nullopt;
    for (const DimensionLoop& loop : values.loops[d]) {
      if (!add(loop, loops[d].input, 1)) return std::nullopt;
    }
  }
  const auto add_run = [&](size_t d, const BlockRun& run, uint64_t block,
                           const CopyStride& input,
                           uint64_t blocks) -> std::optional<CopyStride> {
    MoveBy(quantize.input, input, values.start[d]);
    if (!targets.Start(d, values.start[d] / block)) return std::nullopt;
    for (const DimensionLoop& loop : run.around) {
      if (!add(loop, input, block)) return std::nullopt;
    }
    part.scales *= blocks;
    const std::optional<CopyStride> stride = targets.Stride(1, blocks);
    if (stride.has_value() && stride->entries != 0) return std::nullopt;
    return stride;
  };
  const uint64_t blocks_across = BlocksOf(columns.extent, op.block_columns);
  const std::optional<CopyStride> down =
      add_run(row, rows, op.block_rows, {.bytes = op.input_row_bytes},
              BlocksOf(rows.extent, op.block_rows));
  if (!down.has_value()) return std::nullopt;
  const std::optional<CopyStride> across =
      add_run(column, columns, op.block_columns,
              {.bytes = static_cast<uint64_t>(DTypeBytes(op.input.dtype))},
              blocks_across);
  if (!across.has_value() ||
      (blocks_across > 1 && across->bytes != ScaleBytes(op))) {
    return std::nullopt;
  }
  quantize.scales = targets.to();
  quantize.scale_row_bytes = down->bytes;
  return part;
}

// The box of a copy of scales, and what of it is written so far.
struct ScaleUse {
  size_t batch = 0;
  OperationBox box;
  std::vector<const OperationBox*> values;
  uint64_t written = 0;
};

}  // namespace

QuantizeFusion::QuantizeFusion(absl::Span<const CopyBatch> batches,
                               absl::Span<const size_t> quantize_batches)
    : batches_(batches) {
  for (const size_t batch : quantize_batches) {
    for (size_t i = 0; i < batches[batch].quantizes.size(); ++i) {
      Operation operation;
      operation.batch = batch;
      operation.position = i;
      const auto loops = LoopsOf(operation);
      const BlockQuantize& op = QuantizeOf(operation);
      const Dimensions values = ValueDimensions(op, loops);
      const Dimensions scales = ScaleDimensions(op, loops);
      operation.value_span_bytes = SpanBytes(values, kValueBytes);
      operation.scale_span_bytes = SpanBytes(scales, ScaleBytes(op));
      operation.is_kept =
          !IsNested(values, kValueBytes) || !IsNested(scales, ScaleBytes(op)) ||
          std::any_of(loops.begin(), loops.end(), [](const auto& loop) {
            return loop.output.entries != 0 || loop.scales.entries != 0;
          });
      operations_.push_back(std::move(operation));
    }
  }
}

const BlockQuantize& QuantizeFusion::QuantizeOf(
    const Operation& operation) const {
  return batches_[operation.batch].quantizes[operation.position];
}

absl::Span<const QuantizeLoop> QuantizeFusion::LoopsOf(
    const Operation& operation) const {
  const BlockQuantize& op = QuantizeOf(operation);
  return absl::MakeConstSpan(batches_[operation.batch].quantize_loops)
      .subspan(op.loops_begin, op.loops_count);
}

void QuantizeFusion::AddRead(const CopyAddress& first, const CopyStride& span) {
  for (Operation& operation : operations_) {
    const BlockQuantize& op = QuantizeOf(operation);
    operation.is_kept |=
        Meets(first, span, op.output, operation.value_span_bytes) ||
        Meets(first, span, op.scales, operation.scale_span_bytes);
  }
}

void QuantizeFusion::AddCopy(const QuantizedCopy& use) {
  const CopyBatch& batch = batches_[use.batch];
  const StridedCopy& copy = batch.copies[use.copy];
  const CopyStride span =
      SpanOf(copy.from,
             absl::MakeConstSpan(batch.loops)
                 .subspan(copy.loops_begin, copy.loops_count),
             &CopyLoop::from);
  std::vector<Operation*> met;
  for (Operation& operation : operations_) {
    const BlockQuantize& op = QuantizeOf(operation);
    if (Meets(copy.from, span, op.output, operation.value_span_bytes)) {
      operation.values.push_back(use);
      met.push_back(&operation);
    } else if (Meets(copy.from, span, op.scales, operation.scale_span_bytes)) {
      operation.scales.push_back(use);
      met.push_back(&operation);
    }
  }
  if (met.size() == 1) return;
  for (Operation* operation : met) operation->is_kept = true;
}

bool QuantizeFusion::Compose(const Operation& operation,
                             std::vector<CopyBatch>& batches) const {
  if (operation.is_kept || operation.values.empty()) return false;
  const BlockQuantize& op = QuantizeOf(operation);
  const auto loops = LoopsOf(operation);
  const auto box_of = [&](const QuantizedCopy& use, const Dimensions& dims,
                          const CopyAddress& first) {
    const CopyBatch& batch = batches_[use.batch];
    const StridedCopy& copy = batch.copies[use.copy];
    return BoxIn(dims, first, copy,
                 absl::MakeConstSpan(batch.loops)
                     .subspan(copy.loops_begin, copy.loops_count));
  };
  std::vector<ScaleUse> uses;
  for (const QuantizedCopy& copy : operation.scales) {
    std::optional<OperationBox> box =
        box_of(copy, ScaleDimensions(op, loops), op.scales);
    if (!box.has_value()) return false;
    ScaleUse& use = uses.emplace_back();
    use.batch = copy.batch;
    use.box = *std::move(box);
  }
  std::vector<OperationBox> boxes;
  for (const QuantizedCopy& copy : operation.values) {
    std::optional<OperationBox> box =
        box_of(copy, ValueDimensions(op, loops), op.output);
    if (!box.has_value()) return false;
    boxes.push_back(*std::move(box));
  }
  std::vector<std::pair<size_t, PartOfQuantize>> parts;  // by batch
  for (size_t i = 0; i < boxes.size(); ++i) {
    const size_t batch = operation.values[i].batch;
    std::optional<PartOfQuantize> part;
    for (ScaleUse& use : uses) {
      if (use.batch != batch || use.box.link != boxes[i].link ||
          !std::all_of(use.values.begin(), use.values.end(),
                       [&](const OperationBox* other) {
                         return AreDisjoint(*other, boxes[i]);
                       })) {
        continue;
      }
      part = PartOf(op, loops, boxes[i], use.box);
      if (!part.has_value()) continue;
      use.values.push_back(&boxes[i]);
      use.written += part->scales;
      break;
    }
    if (!part.has_value()) return false;
    parts.emplace_back(batch, *std::move(part));
  }
  for (const ScaleUse& use : uses) {
    if (use.written != use.box.Elements()) return false;
  }
  for (auto& [number, part] : parts) {
    CopyBatch& batch = batches[number];
    part.quantize.loops_begin =
        static_cast<uint32_t>(batch.quantize_loops.size());
    part.quantize.loops_count = static_cast<uint32_t>(part.loops.size());
    batch.quantizes.push_back(part.quantize);
    batch.quantize_loops.insert(batch.quantize_loops.end(), part.loops.begin(),
                                part.loops.end());
  }
  return true;
}

std::vector<CopyBatch> QuantizeFusion::Fuse() {
  std::vector<CopyBatch> fused(batches_.begin(), batches_.end());
  std::vector<std::vector<size_t>> left_out(batches_.size());  // copies
  is_fused_.clear();
  for (const Operation& operation : operations_) {
    fused[operation.batch].quantizes.clear();
    fused[operation.batch].quantize_loops.clear();
  }
  for (const Operation& operation : operations_) {
    is_fused_.push_back(Compose(operation, fused));
    if (is_fused_.back()) {
      for (const auto* copies : {&operation.values, &operation.scales}) {
        for (const QuantizedCopy& copy : *copies) {
          left_out[copy.batch].push_back(copy.copy);
        }
      }
      continue;
    }
    CopyBatch& batch = fused[operation.batch];
    const auto loops = LoopsOf(operation);
    BlockQuantize& kept = batch.quantizes.emplace_back(QuantizeOf(operation));
    kept.loops_begin = static_cast<uint32_t>(batch.quantize_loops.size());
    batch.quantize_loops.insert(batch.quantize_loops.end(), loops.begin(),
                                loops.end());
  }
  for (size_t b = 0; b < fused.size(); ++b) {
    std::sort(left_out[b].begin(), left_out[b].end());
    fused[b].copies.clear();
    for (size_t i = 0; i < batches_[b].copies.size(); ++i) {
      if (std::binary_search(left_out[b].begin(), left_out[b].end(), i)) {
        continue;
      }
      fused[b].copies.push_back(batches_[b].copies[i]);
    }
  }
  return fused;
}

}  // namespace refit
