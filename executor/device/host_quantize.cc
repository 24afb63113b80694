#include "executor/device/host_quantize.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "executor/device/cast.h"
#include "executor/device/quantize.h"

namespace refit {
namespace {

// Elements of a row that are brought to fp32 at a time.
constexpr uint64_t kChunkElements = 512;

void LoadFp32(const std::byte* from, DType dtype, uint64_t count,
              uint32_t* to) {
  if (dtype == DType::kFp32) {
    std::memcpy(to, from, count * sizeof(uint32_t));
    return;
  }
  for (uint64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + i * sizeof(bits), sizeof(bits));
    to[i] = dtype == DType::kBf16 ? Fp32FromBf16(bits) : Fp32FromFp16(bits);
  }
}

// Visits the elements of a block as fp32, row by row in chunks:
// visit(row, column, values, count). `row_at(row)`: where its rows begin.
template <typename RowAt, typename Visit>
void ForEachChunk(const RowAt& row_at, DType dtype, uint64_t rows,
                  uint64_t columns, const Visit& visit) {
  const auto element_bytes = static_cast<uint64_t>(DTypeBytes(dtype));
  uint32_t values[kChunkElements];
  for (uint64_t row = 0; row < rows; ++row) {
    const std::byte* const from = row_at(row);
    for (uint64_t column = 0; column < columns; column += kChunkElements) {
      const uint64_t count = std::min(kChunkElements, columns - column);
      LoadFp32(from + column * element_bytes, dtype, count, values);
      visit(row, column, values, count);
    }
  }
}

// One matrix, block by block. `row_at(row)`: where a row of the input begins.
template <typename RowAt>
void QuantizeMatrix(const BlockQuantize& op, const RowAt& row_at,
                    std::byte* output, std::byte* scales) {
  const auto input_bytes = static_cast<uint64_t>(DTypeBytes(op.input.dtype));
  const auto scale_bytes = static_cast<uint64_t>(DTypeBytes(op.scales.dtype));
  for (uint64_t row = 0; row < op.rows; row += op.block_rows) {
    const uint64_t rows = std::min<uint64_t>(op.block_rows, op.rows - row);
    for (uint64_t column = 0; column < op.columns; column += op.block_columns) {
      const uint64_t columns =
          std::min<uint64_t>(op.block_columns, op.columns - column);
      const auto block_row_at = [&](uint64_t r) {
        return row_at(row + r) + column * input_bytes;
      };
      uint32_t amax = 0;
      ForEachChunk(
          block_row_at, op.input.dtype, rows, columns,
          [&](uint64_t, uint64_t, const uint32_t* values, uint64_t count) {
            for (uint64_t i = 0; i < count; ++i) {
              amax = std::max(amax, MagnitudeBits(values[i]));
            }
          });
      const BlockScale scale = ScaleOf(amax, op.format, Division::kExact);
      // Scales of one byte are the low one.
      std::memcpy(scales + row / op.block_rows * op.scale_row_bytes +
                      column / op.block_columns * scale_bytes,
                  &scale.stored, scale_bytes);
      ForEachChunk(
          block_row_at, op.input.dtype, rows, columns,
          [&](uint64_t r, uint64_t c, const uint32_t* values, uint64_t count) {
            std::byte* to =
                output + (row + r) * op.output_row_bytes + column + c;
            for (uint64_t i = 0; i < count; ++i) {
              to[i] = std::byte{QuantizedValue(values[i], scale.inverse)};
            }
          });
    }
  }
}

}  // namespace

void RunHostQuantize(const HostQuantize& host, std::byte* const* table) {
  const BlockQuantize& op = host.quantize;
  uint64_t matrices = 1;
  for (const QuantizeLoop& loop : host.loops) matrices *= loop.extent;
  for (uint64_t matrix = 0; matrix < matrices; ++matrix) {
    CopyAddress input = op.input;
    CopyAddress output = op.output;
    CopyAddress scales = op.scales;
    uint64_t rest = matrix;
    for (size_t l = host.loops.size(); l-- > 0;) {
      const QuantizeLoop& loop = host.loops[l];
      const uint64_t i = rest % loop.extent;
      rest /= loop.extent;
      for (const auto& [address, stride] :
           {std::pair(&input, &loop.input), std::pair(&output, &loop.output),
            std::pair(&scales, &loop.scales)}) {
        address->entry += i * stride->entries;
        address->byte_offset += i * stride->bytes;
      }
    }
    const auto row_at = [&](uint64_t row) -> const std::byte* {
      CopyStride run;
      if (op.run_rows > 0) {
        run = host.runs[row / op.run_rows];
        row %= op.run_rows;
      }
      // A run may lie before the input: the sum wraps to what is meant.
      return table[input.entry + run.entries] +
             (input.byte_offset + run.bytes + row * op.input_row_bytes);
    };
    QuantizeMatrix(op, row_at, table[output.entry] + output.byte_offset,
                   table[scales.entry] + scales.byte_offset);
  }
}

}  // namespace refit
