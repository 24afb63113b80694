// What every Device must do to quantize blocks, beside a plain reference.
// Instantiated as device_conformance.h is.
#ifndef REFIT_TESTS_EXECUTOR_QUANTIZE_CONFORMANCE_H_
#define REFIT_TESTS_EXECUTOR_QUANTIZE_CONFORMANCE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "executor/device/cast.h"
#include "tests/executor/device_conformance.h"
#include "tests/sanitizers.h"

namespace refit {

struct QuantizeCase {
  uint64_t rows = 1;
  uint64_t columns = 1;
  uint32_t block_rows = 128;
  uint32_t block_columns = 128;
  fb::ScaleFormat format = fb::ScaleFormat::kFp32;
  DType dtype = DType::kBf16;
  uint64_t input_offset_bytes = 0;  // where the first matrix begins
  uint64_t extra_columns = 0;       // of a row of the input's tensor
  bool has_links = false;           // a tensor each takes another link
  uint64_t run_rows = 0;  // so many rows lie in one tensor, as many in another
};

// e4m3 by its definition: sign, exponent of bias 7, three bits of mantissa.
inline double E4m3Magnitude(int code) {
  const int exponent = code >> 3;
  const int mantissa = code & 7;
  return exponent == 0 ? std::ldexp(mantissa, -9)
                       : std::ldexp(8 + mantissa, exponent - 10);
}

// The nearest code, of two the even one, 0x7e at most.
inline uint8_t NearestE4m3(float value) {
  if (std::isnan(value)) return 0x7f;
  const double magnitude = std::fabs(static_cast<double>(value));
  int best = 0;
  for (int code = 1; code <= 0x7e; ++code) {
    const double distance = std::fabs(E4m3Magnitude(code) - magnitude);
    const double best_distance = std::fabs(E4m3Magnitude(best) - magnitude);
    if (distance < best_distance ||
        (distance == best_distance && code % 2 == 0)) {
      best = code;
    }
  }
  if (std::isinf(value)) best = 0x7e;
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

// The least power of two that is not below `value`, as an exponent.
inline int ExponentAbove(double value) {
  int exponent = -127;
  while (std::ldexp(1.0, exponent) < value) ++exponent;
  return exponent;
}

struct ReferenceScale {
  std::vector<uint8_t> stored;
  float inverse = 0;
};

// A GPU multiplies by the rounded 1/448, as PyTorch does there.
inline ReferenceScale ReferenceScaleOf(float amax, fb::ScaleFormat format,
                                       bool on_host) {
  const auto bytes_of = [](float scale) {
    std::vector<uint8_t> bytes(4);
    std::memcpy(bytes.data(), &scale, 4);
    return bytes;
  };
  if (format == fb::ScaleFormat::kE8m0) {
    if (std::isnan(amax)) return {{255}, amax};
    const int exponent = std::isinf(amax) ? 127 : ExponentAbove(amax / 448.0f);
    return {{static_cast<uint8_t>(exponent + 127)},
            static_cast<float>(std::ldexp(1.0, -exponent))};
  }
  // The NaN of all devices.
  if (std::isnan(amax)) return {{0, 0, 0xc0, 0x7f}, amax};
  const float least = std::max(amax, 1e-4f);
  float scale = on_host ? least / 448.0f : least * (1.0f / 448.0f);
  if (format == fb::ScaleFormat::kUe8m0 && std::isfinite(scale)) {
    scale = static_cast<float>(std::ldexp(1.0, ExponentAbove(scale)));
  }
  return {bytes_of(scale), 1.0f / scale};
}

class QuantizeConformance : public DeviceConformance {
 protected:
  // Finite values of many sizes, with a zero block, a tiny one, and one each
  // with an infinity and a NaN.
  static std::vector<float> Values(const QuantizeCase& c, uint64_t matrix) {
    std::mt19937_64 random(matrix + c.rows * 7 + c.columns);
    std::normal_distribution<float> normal;
    std::vector<float> values(c.rows * c.columns);
    for (uint64_t r = 0; r < c.rows; ++r) {
      for (uint64_t i = 0; i < c.columns; ++i) {
        const uint64_t block =
            r / c.block_rows * 5 + i / c.block_columns + matrix;
        const float size = block % 7 == 3   ? 0.0f
                           : block % 7 == 5 ? 1e-9f
                                            : std::ldexp(1.0f, int(block % 9));
        values[r * c.columns + i] =
            std::ldexp(normal(random), -int(random() % 12)) * size;
      }
    }
    if (matrix == 1) values[0] = std::numeric_limits<float>::infinity();
    if (matrix == 2) values.back() = std::nanf("");
    return values;
  }

  static uint64_t BitsOf(float value, DType dtype) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return dtype == DType::kBf16   ? Bf16FromFp32(bits)
           : dtype == DType::kFp16 ? Fp16FromFp32(bits)
                                   : bits;
  }
  static float ValueOf(uint64_t bits, DType dtype) {
    return std::bit_cast<float>(
        dtype == DType::kBf16   ? Fp32FromBf16(static_cast<uint16_t>(bits))
        : dtype == DType::kFp16 ? Fp32FromFp16(static_cast<uint16_t>(bits))
                                : static_cast<uint32_t>(bits));
  }

  // Two tensors of two matrices each.
  void CheckCase(const QuantizeCase& c) {
    const uint64_t element = DTypeBytes(c.dtype);
    const uint64_t scale_bytes = c.format == fb::ScaleFormat::kE8m0 ? 1 : 4;
    const uint64_t down = (c.rows + c.block_rows - 1) / c.block_rows;
    const uint64_t across = (c.columns + c.block_columns - 1) / c.block_columns;
    const uint64_t input_row = (c.columns + c.extra_columns) * element;
    const uint64_t input_matrix = c.rows * input_row;
    const uint64_t output_matrix = c.rows * c.columns;
    const uint64_t scale_matrix = down * across * scale_bytes;

    const Bytes untouched(2 * output_matrix, std::byte{0xa5});
    const Bytes scales_untouched(2 * scale_matrix, std::byte{0xa5});
    std::vector<std::unique_ptr<DeviceMemory>> memory;
    std::vector<Bytes> expected_values, expected_scales;
    for (uint64_t tensor = 0; tensor < 2; ++tensor) {
      Bytes input = RandomBytes(c.input_offset_bytes + 2 * input_matrix);
      Bytes other = input;
      Bytes values(2 * output_matrix), scales(2 * scale_matrix);
      for (uint64_t m = 0; m < 2; ++m) {
        std::vector<float> matrix = Values(c, 2 * tensor + m);
        for (uint64_t r = 0; r < c.rows; ++r) {
          for (uint64_t i = 0; i < c.columns; ++i) {
            float& value = matrix[r * c.columns + i];
            const uint64_t bits = BitsOf(value, c.dtype);
            value = ValueOf(bits, c.dtype);
            const uint64_t run = c.run_rows == 0 ? 0 : r / c.run_rows;
            const uint64_t row = r - (run + 1) / 2 * c.run_rows;
            std::memcpy((run % 2 == 0 ? input : other).data() +
                            c.input_offset_bytes + m * input_matrix +
                            row * input_row + i * element,
                        &bits, element);
          }
        }
        for (uint64_t b = 0; b < down * across; ++b) {
          const uint64_t row = b / across * c.block_rows;
          const uint64_t column = b % across * c.block_columns;
          const auto for_each = [&](const auto& visit) {
            for (uint64_t r = row; r < std::min(c.rows, row + c.block_rows);
                 ++r) {
              for (uint64_t i = column;
                   i < std::min(c.columns, column + c.block_columns); ++i) {
                visit(r * c.columns + i);
              }
            }
          };
          float amax = 0;
          for_each([&](uint64_t at) {
            if (std::isnan(matrix[at]) || std::fabs(matrix[at]) > amax) {
              amax = std::isnan(amax) ? amax : std::fabs(matrix[at]);
            }
          });
          const ReferenceScale scale =
              ReferenceScaleOf(amax, c.format, device_->IsHost());
          std::memcpy(scales.data() + m * scale_matrix + b * scale_bytes,
                      scale.stored.data(), scale_bytes);
          for_each([&](uint64_t at) {
            values[m * output_matrix + at] =
                std::byte{NearestE4m3(matrix[at] * scale.inverse)};
          });
        }
      }
      memory.push_back(Upload(input));
      memory.push_back(Upload(untouched));
      memory.push_back(Upload(scales_untouched));
      memory.push_back(Upload(other));
      expected_values.push_back(std::move(values));
      expected_scales.push_back(std::move(scales));
    }

    CopyBatch batch;
    batch.kind = CopyKind::kQuantize;
    batch.quantizes = {{.input = {0, c.input_offset_bytes, c.dtype},
                        .output = {1, 0, DType::kFp8E4m3},
                        .scales = {2, 0, DType::kFp32},
                        .rows = c.rows,
                        .columns = c.columns,
                        .input_row_bytes = input_row,
                        .output_row_bytes = c.columns,
                        .scale_row_bytes = across * scale_bytes,
                        .block_rows = c.block_rows,
                        .block_columns = c.block_columns,
                        .format = c.format,
                        .loops_begin = 0,
                        .loops_count = 2}};
    if (c.format == fb::ScaleFormat::kE8m0) {
      batch.quantizes[0].scales.dtype = DType::kUint8;
    }
    if (c.run_rows > 0) {
      batch.row_runs.push_back({.entries = 99, .bytes = 99});  // of nobody
      batch.quantizes[0].run_rows = c.run_rows;
      batch.quantizes[0].runs_begin = 1;
      for (uint64_t run = 0; run * c.run_rows < c.rows; ++run) {
        batch.row_runs.push_back({.entries = run % 2 * 3,
                                  .bytes = run / 2 * c.run_rows * input_row});
      }
    }
    batch.quantize_loops = {{.extent = 2,
                             .input = {.entries = 4},
                             .output = {.entries = 4},
                             .scales = {.entries = 4}},
                            {.extent = 2,
                             .input = {.bytes = input_matrix},
                             .output = {.bytes = output_matrix},
                             .scales = {.bytes = scale_matrix}}};
    if (c.has_links) {
      batch.quantizes[0].loops_begin = 1;
      batch.quantizes[0].loops_count = 1;
      batch.quantizes[0].link = 3;
      BlockQuantize other = batch.quantizes[0];
      for (CopyAddress* at : {&other.input, &other.output, &other.scales}) {
        at->entry += 4;
      }
      other.link = 1;
      batch.quantizes.push_back(other);
    }
    std::vector<std::byte*> table;
    for (const auto& entry : memory) table.push_back(entry->data());
    auto prepared = device_->Prepare(table, {&batch, 1});
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    ASSERT_TRUE((*prepared)->Enqueue(0, kStream).ok());
    for (uint64_t tensor = 0; tensor < 2; ++tensor) {
      const Bytes values = Download(*memory[4 * tensor + 1]);
      const Bytes scales = Download(*memory[4 * tensor + 2]);
      EXPECT_TRUE(scales == expected_scales[tensor]) << "tensor " << tensor;
      for (uint64_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(values[i], expected_values[tensor][i])
            << "tensor " << tensor << ", element " << i;
      }
    }
  }
};

TEST_P(QuantizeConformance, WholeBlocksAreTheReferences) {
  CheckCase({.rows = 256, .columns = 384});
}

TEST_P(QuantizeConformance, RaggedEdgesAreTheReferences) {
  CheckCase({.rows = 130, .columns = 200});
  CheckCase({.rows = 1, .columns = 1});
  CheckCase({.rows = 127, .columns = 129, .extra_columns = 3});
}

TEST_P(QuantizeConformance, RowsNeedNoAlignment) {
  CheckCase({.rows = 128,
             .columns = 128,
             .input_offset_bytes = 2,
             .extra_columns = 1});
}

TEST_P(QuantizeConformance, ScalesArePowersOfTwo) {
  CheckCase({.rows = 200, .columns = 256, .format = fb::ScaleFormat::kUe8m0});
}

TEST_P(QuantizeConformance, MicroscaledRowsAreTheReferences) {
  CheckCase({.rows = 70,
             .columns = 96,
             .block_rows = 1,
             .block_columns = 32,
             .format = fb::ScaleFormat::kE8m0});
  CheckCase({.rows = 5,
             .columns = 45,
             .block_rows = 1,
             .block_columns = 32,
             .format = fb::ScaleFormat::kE8m0});
}

// Scales of one byte, in rows that a device may and may not store at once.
TEST_P(QuantizeConformance, MicroscaledRowsNeedNoAlignment) {
  for (const uint64_t columns : {512, 32 * 17, 32 * 5, 4096 + 32}) {
    CheckCase({.rows = 21,
               .columns = columns,
               .block_rows = 1,
               .block_columns = 32,
               .format = fb::ScaleFormat::kE8m0,
               .has_links = true});
    CheckCase({.rows = 21,
               .columns = columns,
               .block_rows = 1,
               .block_columns = 32,
               .format = fb::ScaleFormat::kE8m0});
    CheckCase({.rows = 21,
               .columns = columns,
               .block_rows = 1,
               .block_columns = 32,
               .format = fb::ScaleFormat::kE8m0,
               .dtype = DType::kFp16,
               .input_offset_bytes = 6,
               .extra_columns = 1});
  }
}

TEST_P(QuantizeConformance, LinksTakeTurns) {
  CheckCase({.rows = 256, .columns = 384, .has_links = true});
  CheckCase({.rows = 300,
             .columns = 96,
             .block_rows = 1,
             .block_columns = 32,
             .format = fb::ScaleFormat::kE8m0,
             .has_links = true});
}

TEST_P(QuantizeConformance, RowsMayLieApart) {
  const std::vector<uint64_t> runs =
      kSanitized ? std::vector<uint64_t>{40, 1}
                 : std::vector<uint64_t>{64, 40, 128, 1, 999};
  for (const uint64_t run_rows : runs) {
    for (const bool has_links : {false, true}) {
      CheckCase({.rows = 300,
                 .columns = 256,
                 .extra_columns = 8,
                 .has_links = has_links,
                 .run_rows = run_rows});
    }
    CheckCase({.rows = 200,
               .columns = 130,
               .dtype = DType::kFp32,
               .run_rows = run_rows});
    CheckCase({.rows = 150,
               .columns = 128,
               .dtype = DType::kFp16,
               .input_offset_bytes = 2,
               .run_rows = run_rows});
    CheckCase({.rows = 70,
               .columns = 96,
               .block_rows = 1,
               .block_columns = 32,
               .format = fb::ScaleFormat::kE8m0,
               .has_links = true,
               .run_rows = run_rows});
    CheckCase({.rows = 300,
               .columns = 96,
               .block_rows = 3,
               .block_columns = 32,
               .run_rows = run_rows});
  }
}

TEST_P(QuantizeConformance, OtherInputsAreTheReferences) {
  CheckCase({.rows = 140, .columns = 256, .dtype = DType::kFp32});
  CheckCase({.rows = 140, .columns = 256, .dtype = DType::kFp16});
}

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_QUANTIZE_CONFORMANCE_H_
