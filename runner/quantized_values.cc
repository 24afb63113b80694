#include "runner/quantized_values.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "executor/device/cast.h"
#include "executor/device/quantize.h"
#include "plan/quantize_check.h"

namespace refit {

QuantizedValues::QuantizedValues(const fb::Body& body,
                                 const fb::Quantization& quantization,
                                 DType dtype, Division division)
    : quantization_(quantization), dtype_(dtype), division_(division) {
  const fb::Param& of = *body.params()->Get(quantization.of());
  rows_ = of.shape()->Get(0);
  columns_ = of.shape()->Get(1);
  grid_columns_ = BlockCount(columns_, quantization.block_columns());
}

void QuantizedValues::GenerateFp32(uint64_t seed, const IndexRange& range,
                                   uint32_t* out) const {
  if (dtype_ == DType::kFp32) return GenerateValues(seed, dtype_, range, out);
  std::vector<uint16_t> bits(range.count);
  GenerateValues(seed, dtype_, range, bits.data());
  for (size_t i = 0; i < range.count; ++i) {
    out[i] =
        dtype_ == DType::kBf16 ? Fp32FromBf16(bits[i]) : Fp32FromFp16(bits[i]);
  }
}

const QuantizedValues::Scale& QuantizedValues::ScaleOfBlock(uint64_t seed,
                                                            uint64_t block) {
  if (seed != seed_) scales_.clear();
  seed_ = seed;
  const auto [it, is_new] = scales_.try_emplace(block);
  if (!is_new) return it->second;
  const uint64_t row = block / grid_columns_ * quantization_.block_rows();
  const uint64_t column = block % grid_columns_ * quantization_.block_columns();
  const uint64_t rows_end =
      std::min<uint64_t>(rows_, row + quantization_.block_rows());
  const uint64_t count =
      std::min<uint64_t>(columns_ - column, quantization_.block_columns());
  std::vector<uint32_t> values(count);
  uint32_t amax = 0;
  for (uint64_t r = row; r < rows_end; ++r) {
    GenerateFp32(seed, {.first = r * columns_ + column, .count = count},
                 values.data());
    for (const uint32_t value : values) {
      amax = std::max(amax, MagnitudeBits(value));
    }
  }
  const BlockScale scale =
      ScaleOf(amax, quantization_.scale_format(), division_);
  it->second = {.stored = scale.stored, .inverse = scale.inverse};
  return it->second;
}

void QuantizedValues::GenerateData(uint64_t seed, const IndexRange& range,
                                   std::byte* out) {
  std::vector<uint32_t> values(range.count);
  GenerateFp32(seed, range, values.data());
  // Run by run inside one block: its scale is looked up once.
  for (size_t i = 0; i < range.count;) {
    const uint64_t element = range.first + i * range.stride;
    const uint64_t row = element / columns_ / quantization_.block_rows();
    uint64_t column = element % columns_;
    const uint64_t block_column = column / quantization_.block_columns();
    const uint64_t end = std::min<uint64_t>(
        columns_, (block_column + 1) * quantization_.block_columns());
    const float inverse =
        ScaleOfBlock(seed, row * grid_columns_ + block_column).inverse;
    for (; i < range.count && column < end; ++i, column += range.stride) {
      out[i] = std::byte{QuantizedValue(values[i], inverse)};
    }
  }
}

void QuantizedValues::GenerateScales(uint64_t seed, const IndexRange& range,
                                     std::byte* out) {
  const auto bytes =
      static_cast<size_t>(DTypeBytes(ScaleDType(quantization_.scale_format())));
  for (size_t i = 0; i < range.count; ++i) {
    const uint32_t stored =
        ScaleOfBlock(seed, range.first + i * range.stride).stored;
    std::memcpy(out + i * bytes, &stored, bytes);
  }
}

}  // namespace refit
