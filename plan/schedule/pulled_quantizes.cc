#include "plan/schedule/pulled_quantizes.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/types/span.h"
#include "plan/schedule/operation_box.h"

namespace refit {
namespace {

// More of them are a table that is slow to read.
constexpr uint64_t kRowRunsMax = 1 << 14;

// Rows of a matrix that follow each other.
struct RowRun {
  uint64_t row = 0;
  uint64_t rows = 1;
  CopyAddress from;
};

// Boxes of an operation with the same matrices, which they fill row by row.
struct FilledMatrices {
  const OperationBox* first = nullptr;
  std::vector<RowRun> runs;
  uint64_t row_bytes = 0;  // in a run of several rows; 0: there is none
};

uint64_t InputElementBytes(const BlockQuantize& op) {
  return static_cast<uint64_t>(DTypeBytes(op.input.dtype));
}

bool HasLoops(const std::vector<DimensionLoop>& a,
              const std::vector<DimensionLoop>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const DimensionLoop& x, const DimensionLoop& y) {
                      return x.step == y.step && x.extent == y.extent &&
                             x.to.entries == y.to.entries &&
                             x.to.bytes == y.to.bytes;
                    });
}

// Of the first `dims` dimensions, those of the matrices.
bool HasMatrices(const OperationBox& a, const OperationBox& b, size_t dims) {
  for (size_t d = 0; d < dims; ++d) {
    if (a.start[d] != b.start[d] || !HasLoops(a.loops[d], b.loops[d])) {
      return false;
    }
  }
  return true;
}

bool SharesMatrices(const OperationBox& a, const OperationBox& b, size_t dims) {
  for (size_t d = 0; d < dims; ++d) {
    if (a.LastOf(d) < b.start[d] || b.LastOf(d) < a.start[d]) return false;
  }
  return true;
}

bool HasWholeRows(const BlockQuantize& op, const OperationBox& box,
                  size_t column) {
  if (op.columns == 1) return true;
  const std::vector<DimensionLoop>& loops = box.loops[column];
  return box.start[column] == 0 && loops.size() == 1 && loops[0].step == 1 &&
         loops[0].extent == op.columns && loops[0].to.entries == 0 &&
         loops[0].to.bytes == InputElementBytes(op);
}

// False: its rows are not as far from each other as those of other boxes.
bool AddRuns(const OperationBox& box, size_t row, FilledMatrices& filled) {
  absl::Span<const DimensionLoop> around = box.loops[row];
  RowRun run = {.row = box.start[row], .from = box.to};
  if (!around.empty() && around.back().step == 1) {
    const DimensionLoop& inner = around.back();
    if (inner.to.entries != 0 || inner.to.bytes == 0 ||
        (filled.row_bytes != 0 && inner.to.bytes != filled.row_bytes)) {
      return false;
    }
    filled.row_bytes = inner.to.bytes;
    run.rows = inner.extent;
    around.remove_suffix(1);
  }
  std::vector<RowRun> runs = {run};
  for (const DimensionLoop& loop : around) {
    if (runs.size() * loop.extent > kRowRunsMax) return false;
    std::vector<RowRun> all;
    for (const RowRun& at : runs) {
      for (uint64_t i = 0; i < loop.extent; ++i) {
        all.push_back(at);
        all.back().row += i * loop.step;
        MoveBy(all.back().from, loop.to, i);
      }
    }
    runs = std::move(all);
  }
  filled.runs.insert(filled.runs.end(), runs.begin(), runs.end());
  return true;
}

// Joins runs that continue each other. False: they are not all rows, each once.
bool JoinRuns(uint64_t rows, FilledMatrices& filled) {
  std::sort(filled.runs.begin(), filled.runs.end(),
            [](const RowRun& a, const RowRun& b) { return a.row < b.row; });
  std::vector<RowRun> joined;
  uint64_t next = 0;
  for (const RowRun& run : filled.runs) {
    if (run.row != next) return false;
    next += run.rows;
    if (!joined.empty() && filled.row_bytes != 0) {
      RowRun& last = joined.back();
      if (last.from.entry == run.from.entry &&
          last.from.byte_offset + last.rows * filled.row_bytes ==
              run.from.byte_offset) {
        last.rows += run.rows;
        continue;
      }
    }
    joined.push_back(run);
  }
  filled.runs = std::move(joined);
  return next == rows;
}

// Adds the operation on some of its matrices. False: in too many runs.
bool AppendPulled(const BlockQuantize& op, absl::Span<const QuantizeLoop> loops,
                  const FilledMatrices& filled, CopyBatch& batch) {
  BlockQuantize part = op;
  const OperationBox& box = *filled.first;
  part.input = filled.runs.front().from;
  part.input_row_bytes = filled.row_bytes;
  part.link = box.link;
  part.loops_begin = static_cast<uint32_t>(batch.quantize_loops.size());
  if (filled.runs.size() > 1) {
    for (const RowRun& run : filled.runs) {
      part.run_rows = std::gcd(part.run_rows, run.rows);
    }
    if (op.rows / part.run_rows > kRowRunsMax) return false;
    part.runs_begin = static_cast<uint32_t>(batch.row_runs.size());
    for (const RowRun& run : filled.runs) {
      for (uint64_t row = 0; row < run.rows; row += part.run_rows) {
        batch.row_runs.push_back({.entries = run.from.entry - part.input.entry,
                                  .bytes = run.from.byte_offset +
                                           row * filled.row_bytes -
                                           part.input.byte_offset});
      }
    }
  }
  for (size_t d = 0; d < loops.size(); ++d) {
    MoveBy(part.output, loops[d].output, box.start[d]);
    MoveBy(part.scales, loops[d].scales, box.start[d]);
    for (const DimensionLoop& loop : box.loops[d]) {
      batch.quantize_loops.push_back(
          {.extent = loop.extent,
           .input = loop.to,
           .output = Times(loops[d].output, loop.step),
           .scales = Times(loops[d].scales, loop.step)});
    }
  }
  part.loops_count =
      static_cast<uint32_t>(batch.quantize_loops.size()) - part.loops_begin;
  batch.quantizes.push_back(part);
  return true;
}

// Adds an operation that reads where `boxes` come from. False: it cannot, and
// something may have been added.
bool Pull(const BlockQuantize& op, absl::Span<const QuantizeLoop> loops,
          absl::Span<const OperationBox> boxes, CopyBatch& batch) {
  const size_t row = loops.size();
  std::vector<FilledMatrices> all;
  for (const OperationBox& box : boxes) {
    if (!HasWholeRows(op, box, row + 1)) return false;
    auto filled =
        std::find_if(all.begin(), all.end(), [&](const FilledMatrices& other) {
          return HasMatrices(*other.first, box, row);
        });
    if (filled == all.end()) {
      for (const FilledMatrices& other : all) {
        if (SharesMatrices(*other.first, box, row)) return false;
      }
      all.emplace_back().first = &box;
      filled = all.end() - 1;
    }
    if (!AddRuns(box, row, *filled)) return false;
  }
  uint64_t matrices = 1;
  for (const QuantizeLoop& loop : loops) matrices *= loop.extent;
  for (FilledMatrices& filled : all) {
    uint64_t of_box = 1;
    for (size_t d = 0; d < row; ++d) {
      for (const DimensionLoop& loop : filled.first->loops[d]) {
        of_box *= loop.extent;
      }
    }
    if (of_box > matrices || !JoinRuns(op.rows, filled) ||
        !AppendPulled(op, loops, filled, batch)) {
      return false;
    }
    matrices -= of_box;
  }
  return matrices == 0;
}

}  // namespace

PulledQuantizes PullQuantizes(const CopyBatch& quantizes,
                              const CopyBatch& copies) {
  struct Operation {
    Dimensions dims;
    uint64_t span_bytes = 0;
    bool is_kept = false;
    std::vector<OperationBox> boxes;
  };
  const auto loops_of = [&](const BlockQuantize& op) {
    return absl::MakeConstSpan(quantizes.quantize_loops)
        .subspan(op.loops_begin, op.loops_count);
  };
  std::vector<Operation> operations;
  for (const BlockQuantize& op : quantizes.quantizes) {
    Operation& operation = operations.emplace_back();
    operation.dims =
        DimensionsOf(loops_of(op), op.rows, op.input_row_bytes, op.columns,
                     InputElementBytes(op),
                     [](const QuantizeLoop& loop) { return loop.input; });
    operation.span_bytes = SpanBytes(operation.dims, InputElementBytes(op));
    operation.is_kept = !IsNested(operation.dims, InputElementBytes(op)) ||
                        std::any_of(loops_of(op).begin(), loops_of(op).end(),
                                    [](const QuantizeLoop& loop) {
                                      return loop.input.entries != 0;
                                    });
  }
  for (const StridedCopy& copy : copies.copies) {
    StridedCopy flipped = copy;
    std::swap(flipped.from, flipped.to);
    std::vector<CopyLoop> loops(
        copies.loops.begin() + copy.loops_begin,
        copies.loops.begin() + copy.loops_begin + copy.loops_count);
    for (CopyLoop& loop : loops) std::swap(loop.from, loop.to);
    const CopyStride span = SpanOf(flipped.from, loops, &CopyLoop::from);
    std::vector<size_t> met;
    for (size_t i = 0; i < operations.size(); ++i) {
      if (Meets(flipped.from, span, quantizes.quantizes[i].input,
                operations[i].span_bytes)) {
        met.push_back(i);
      }
    }
    for (const size_t i : met) {
      const std::optional<OperationBox> box =
          met.size() > 1 ? std::nullopt
                         : BoxIn(operations[i].dims,
                                 quantizes.quantizes[i].input, flipped, loops);
      operations[i].is_kept |= !box.has_value();
      if (box.has_value()) operations[i].boxes.push_back(*box);
    }
  }
  PulledQuantizes pulled;
  pulled.batch.kind = CopyKind::kQuantize;
  for (size_t i = 0; i < operations.size(); ++i) {
    const BlockQuantize& op = quantizes.quantizes[i];
    CopyBatch& batch = pulled.batch;
    const size_t quantizes_before = batch.quantizes.size();
    const size_t loops_before = batch.quantize_loops.size();
    const size_t runs_before = batch.row_runs.size();
    pulled.is_pulled.push_back(
        !operations[i].is_kept &&
        Pull(op, loops_of(op), operations[i].boxes, batch));
    if (pulled.is_pulled.back()) continue;
    batch.quantizes.resize(quantizes_before);
    batch.quantize_loops.resize(loops_before);
    batch.row_runs.resize(runs_before);
  }
  return pulled;
}

}  // namespace refit
