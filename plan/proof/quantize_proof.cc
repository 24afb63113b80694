// What quantization makes of params, symbolically: values and scales are right
// when their blocks are whole and of the right param, at the right positions.
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/proof/data_proof.h"
#include "plan/quantize_check.h"
#include "plan/scratch_windows.h"

namespace refit::proof {
namespace {

// The matrices of a param that an operation covers, in the param's own terms.
struct Matrices {
  int64_t first = 0;  // number of the first matrix of the stack
  Digits loops;       // in matrices
  int64_t row = 0;
  int64_t column = 0;
};

// The elements of a param of `rows` x `columns` matrices at `matrices`, from
// row `row` and column `column` on.
Sequence ElementsOf(const Matrices& matrices, int64_t rows, int64_t columns,
                    int64_t row, int64_t column, int64_t row_count,
                    int64_t column_count) {
  Sequence elements;
  elements.base = (matrices.first * rows + row) * columns + column;
  for (const Digit& loop : matrices.loops) {
    elements.digits.push_back({loop.extent, loop.stride * rows * columns});
  }
  elements.digits.push_back({row_count, columns});
  elements.digits.push_back({column_count, 1});
  Canonicalize(elements);
  return elements;
}

int64_t Rows(const fb::Param& param) {
  return static_cast<int64_t>(param.shape()->Get(0));
}
int64_t Columns(const fb::Param& param) {
  return static_cast<int64_t>(param.shape()->Get(1));
}

// Reads `elements` as rows x columns of consecutive rows of some matrices;
// nullopt when they are none.
std::optional<Matrices> MatricesAt(const Sequence& elements,
                                   const fb::Param& param,
                                   const Digits& extents, int64_t rows,
                                   int64_t columns) {
  const int64_t matrix = Rows(param) * Columns(param);
  Matrices matrices;
  matrices.first = elements.base / matrix;
  matrices.row = elements.base % matrix / Columns(param);
  matrices.column = elements.base % Columns(param);
  if (matrices.row + rows > Rows(param) ||
      matrices.column + columns > Columns(param)) {
    return std::nullopt;
  }
  // How far a loop goes shows where its second iteration begins.
  int64_t inner = rows * columns;
  matrices.loops.resize(extents.size());
  for (size_t i = extents.size(); i-- > 0;) {
    const int64_t stride = ValueAt(elements, inner) - elements.base;
    if (stride % matrix != 0) return std::nullopt;
    matrices.loops[i] = {extents[i].extent, stride / matrix};
    inner *= extents[i].extent;
  }
  const Sequence wanted =
      ElementsOf(matrices, Rows(param), Columns(param), matrices.row,
                 matrices.column, rows, columns);
  if (!(wanted == elements)) return std::nullopt;
  return matrices;
}

// Whether [begin, begin + count) of `size` are whole blocks.
bool AreWholeBlocks(int64_t begin, int64_t count, int64_t size, int64_t block) {
  return begin % block == 0 && (count % block == 0 || begin + count == size);
}

}  // namespace

void DataProof::FollowQuantization(uint32_t rank) {
  const fb::RankProgram& program = *body_.programs()->Get(rank);
  const bool quantizes =
      program.quantizes() != nullptr && program.quantizes()->size() > 0;
  if (!quantizes && program.scratch_buffers() == 0) return;
  writes_.clear();
  landings_of_rank_.clear();
  Quantize(rank);
  CheckWrites(rank);
}

void DataProof::Quantize(uint32_t rank) {
  const fb::RankProgram& program = *body_.programs()->Get(rank);
  if (program.quantizes() == nullptr) return;
  for (const fb::Quantize* op : *program.quantizes()) QuantizeOne(rank, *op);
}

void DataProof::ReportQuantize(uint32_t rank, uint32_t slot, uint64_t offset,
                               absl::FunctionRef<std::string()> text) {
  violations_.Report({.rank = rank,
                      .round = rank < body_.source_ranks() ? Site::kBeforeRounds
                                                           : Site::kAfterRounds,
                      .buffer_slot = slot,
                      .offset = static_cast<int64_t>(offset)},
                     Invariant::kRightElement, text);
}

std::optional<Sequence> DataProof::Operand(const char* what, uint32_t rank,
                                           uint32_t slot, uint64_t offset,
                                           const Digits& digits, uint32_t param,
                                           bool is_written) {
  const BufferFacts& facts = FactsAt(rank, slot);
  if (facts.flaw().has_value()) return std::nullopt;  // reported for its rank
  const auto report = [&](absl::FunctionRef<std::string()> text) {
    ReportQuantize(rank, slot, offset, text);
    return std::nullopt;
  };
  // A source's tensors are its own: only scratch may be written. What a
  // destination quantizes is for its worker.
  const bool is_source = rank < body_.source_ranks();
  const bool is_scratch = IsScratch(*body_.programs()->Get(rank), slot);
  if (is_source ? is_written != is_scratch : is_written && is_scratch) {
    return report([&] {
      return absl::StrFormat("the %s of a quantization begins here, in %s",
                             what,
                             is_scratch ? "scratch" : "a tensor of the source");
    });
  }
  const int32_t index =
      facts.Find(static_cast<int64_t>(offset), digits, placement_);
  const Part* const part = facts.part(index);
  if (part == nullptr || part->fragment == nullptr ||
      part->fragment->param() != param ||
      IsSkipped(*body_.params()->Get(param)) || !placement_.FillsHull()) {
    return report([&] {
      return absl::StrFormat(
          "the %s of a quantization begins here, which is no box of a fragment "
          "of %s",
          what, TensorName(*body_.params()->Get(param), 0));
    });
  }
  if (is_written) {
    AddWrite(LandingIn(slot, index), Site::kAfterRounds);
  }
  return facts.ParamSequence(*part, placement_);
}

void DataProof::CheckOneWindow(uint32_t rank, const fb::Quantize& op) {
  const fb::RankProgram& program = *body_.programs()->Get(rank);
  const fb::ScratchWindow* first = nullptr;
  for (const uint32_t slot :
       {op.input_slot(), op.output_slot(), op.scale_slot()}) {
    const fb::ScratchWindow* window = WindowOf(program, slot);
    if (first == nullptr) first = window;
    if (window == nullptr ||
        (window->begin() == first->begin() && window->end() == first->end())) {
      continue;
    }
    violations_.Report(
        {.rank = rank, .round = window->begin(), .buffer_slot = slot},
        Invariant::kInBounds,
        "a quantization works in scratch of rounds %d to %d and of "
        "rounds %d to %d",
        first->begin(), first->end() - 1, window->begin(), window->end() - 1);
  }
}

void DataProof::QuantizeOne(uint32_t rank, const fb::Quantize& op) {
  CheckOneWindow(rank, op);
  const fb::Quantization& quantization =
      *body_.quantizations()->Get(op.quantization());
  const auto rows = static_cast<int64_t>(op.rows());
  const auto columns = static_cast<int64_t>(op.columns());
  const int64_t block_rows = quantization.block_rows();
  const int64_t block_columns = quantization.block_columns();
  const auto scale_rows =
      static_cast<int64_t>(BlockCount(op.rows(), quantization.block_rows()));
  const auto scale_columns = static_cast<int64_t>(
      BlockCount(op.columns(), quantization.block_columns()));
  Digits in, out, scale;
  for (const fb::QuantizeLoop& loop : LoopsOf(body_, op)) {
    const auto extent = static_cast<int64_t>(loop.extent());
    in.push_back({extent, static_cast<int64_t>(loop.input_stride())});
    out.push_back({extent, static_cast<int64_t>(loop.output_stride())});
    scale.push_back({extent, static_cast<int64_t>(loop.scale_stride())});
  }
  const Digits loops = in;
  const auto add = [](Digits& digits, int64_t extent, uint64_t stride) {
    if (extent > 1) digits.push_back({extent, static_cast<int64_t>(stride)});
  };
  add(in, rows, op.input_row_stride());
  add(in, columns, 1);
  add(out, rows, op.output_row_stride());
  add(out, columns, 1);
  add(scale, scale_rows, op.scale_row_stride());
  add(scale, scale_columns, 1);
  const auto input = Operand("input", rank, op.input_slot(), op.input_offset(),
                             in, quantization.of(), /*is_written=*/false);
  const auto output =
      Operand("output", rank, op.output_slot(), op.output_offset(), out,
              quantization.data(), /*is_written=*/true);
  const auto scales =
      Operand("scales", rank, op.scale_slot(), op.scale_offset(), scale,
              quantization.scales(), /*is_written=*/true);
  if (!input.has_value() || !output.has_value() || !scales.has_value()) return;
  const fb::Param& of = *body_.params()->Get(quantization.of());
  const fb::Param& grid = *body_.params()->Get(quantization.scales());
  const std::optional<Matrices> matrices =
      MatricesAt(*input, of, loops, rows, columns);
  if (!matrices.has_value() ||
      !AreWholeBlocks(matrices->row, rows, Rows(of), block_rows) ||
      !AreWholeBlocks(matrices->column, columns, Columns(of), block_columns)) {
    ReportQuantize(rank, op.input_slot(), op.input_offset(), [&] {
      return absl::StrFormat(
          "what is quantized from %s on is not whole blocks of %d x %d",
          ElementText(of, input->base), block_rows, block_columns);
    });
    return;
  }
  if (!(*output == *input)) {
    ReportQuantize(rank, op.output_slot(), op.output_offset(), [&] {
      return absl::StrFormat(
          "holds values from %s on, quantized, when they should be from %s on",
          ElementText(of, input->base),
          ElementText(*body_.params()->Get(quantization.data()), output->base));
    });
  }
  const Sequence wanted = ElementsOf(
      *matrices, Rows(grid), Columns(grid), matrices->row / block_rows,
      matrices->column / block_columns, scale_rows, scale_columns);
  if (!(*scales == wanted)) {
    ReportQuantize(rank, op.scale_slot(), op.scale_offset(), [&] {
      return absl::StrFormat(
          "holds scales from %s on when they should be from %s on",
          ElementText(grid, wanted.base), ElementText(grid, scales->base));
    });
  }
}

}  // namespace refit::proof
