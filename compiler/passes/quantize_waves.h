// How what a rank quantizes is cut into waves of nearly equal size.
#ifndef REFIT_COMPILER_PASSES_QUANTIZE_WAVES_H_
#define REFIT_COMPILER_PASSES_QUANTIZE_WAVES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "compiler/ir/block_scheme.h"
#include "compiler/ir/box.h"

namespace refit {

// A box of whole blocks of a param, and what an element of it takes in scratch.
struct QuantizedBox {
  Box box;
  BlockScheme scheme;
  int64_t element_bytes = 1;

  int64_t bytes() const { return box.Volume() * element_bytes; }
};

// A part of a QuantizedBox, of whole blocks too.
struct WavePart {
  size_t of = 0;  // position in the list
  Box box;
  int32_t wave = 0;
};

// A wave may end this part of its bytes early or late, so that it ends between
// two layers or experts. Waves of ranks that differ by more would leave the
// network idle: with 64, Qwen3-4B's fp8 examples took up to 1.3 % longer.
inline constexpr int64_t kUnevenPart = 256;

// Cuts the boxes, taken one after the other, into `waves` parts of nearly equal
// bytes: along the outermost dimension that can be cut (layers, then experts,
// then rows of blocks), and finer only where that leaves the waves too uneven.
// The parts tile the boxes and are in order of their waves. Equal lists of
// extents are cut at equal positions, whatever their boxes' `lo`.
std::vector<WavePart> CutIntoWaves(absl::Span<const QuantizedBox> boxes,
                                   int32_t waves,
                                   int64_t uneven_part = kUnevenPart);

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_QUANTIZE_WAVES_H_
