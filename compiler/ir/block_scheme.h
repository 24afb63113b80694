// Block quantization as a property of dtypes: which blocks share a scale, and
// how it is stored.
#ifndef REFIT_COMPILER_IR_BLOCK_SCHEME_H_
#define REFIT_COMPILER_IR_BLOCK_SCHEME_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "compiler/ir/box.h"
#include "plan_generated.h"

namespace refit {

using ScaleFormat = fb::ScaleFormat;

// fp8_e4m3 values, one scale for each block of a matrix.
struct BlockScheme {
  std::string_view name;  // of a side's dtype: "fp8_e4m3_block128"
  int64_t block_rows = 1;
  int64_t block_columns = 1;
  ScaleFormat scale_format = ScaleFormat::kUnspecified;
  // What the name of a matrix's scales has after the matrix's own.
  std::string_view suffix;

  friend bool operator==(const BlockScheme&, const BlockScheme&) = default;
};

// As the DeepSeek-style checkpoints have it: X.weight and X.weight_scale_inv.
inline constexpr BlockScheme kFp8Block128 = {.name = "fp8_e4m3_block128",
                                             .block_rows = 128,
                                             .block_columns = 128,
                                             .scale_format = ScaleFormat::kFp32,
                                             .suffix = "_scale_inv"};
// The OCP microscaling format: X.weight and X.weight_scale.
inline constexpr BlockScheme kMxFp8 = {.name = "mxfp8_e4m3",
                                       .block_rows = 1,
                                       .block_columns = 32,
                                       .scale_format = ScaleFormat::kE8m0,
                                       .suffix = "_scale"};

// The shape of the scales of a matrix.
Dims ScaleShape(const Dims& matrix, const BlockScheme& scheme);

// Whether the last two dimensions of `box`, of matrices of `shape`, are whole
// blocks: they begin at one, and end at one or at the matrix's edge.
bool HoldsWholeBlocks(const Box& box, const Dims& shape,
                      const BlockScheme& scheme);

// The scales of what `box` holds. Requires HoldsWholeBlocks.
Box ScaleBox(const Box& box, const BlockScheme& scheme);

}  // namespace refit

#endif  // REFIT_COMPILER_IR_BLOCK_SCHEME_H_
