#include "compiler/passes/quantize_waves.h"

#include <algorithm>

namespace refit {
namespace {

class Cutter {
 public:
  Cutter(int64_t total_bytes, int32_t waves, int64_t uneven_part)
      : total_bytes_(total_bytes),
        waves_(waves),
        slack_bytes_(total_bytes / waves / uneven_part) {}

  void Add(size_t of, const QuantizedBox& whole, const Box& box);
  std::vector<WavePart> Take() { return std::move(parts_); }

 private:
  // Until the end of the present wave. Ends follow from the total, so that what
  // one wave leaves over does not add up.
  int64_t Room() const {
    return static_cast<int64_t>(static_cast<__int128>(total_bytes_) *
                                (wave_ + 1) / waves_) -
           placed_bytes_;
  }
  bool IsLastWave() const { return wave_ + 1 == waves_; }
  void Place(size_t of, const Box& box, int64_t bytes) {
    parts_.push_back({.of = of, .box = box, .wave = wave_});
    placed_bytes_ += bytes;
  }

  const int64_t total_bytes_;
  const int32_t waves_;
  const int64_t slack_bytes_;
  int64_t placed_bytes_ = 0;
  int32_t wave_ = 0;
  std::vector<WavePart> parts_;
};

void Cutter::Add(size_t of, const QuantizedBox& whole, const Box& box) {
  const size_t row = box.lo.size() - 2;
  Box rest = box;
  while (!rest.Empty()) {
    const int64_t bytes = rest.Volume() * whole.element_bytes;
    while (!IsLastWave() && Room() <= slack_bytes_) ++wave_;
    if (IsLastWave() || bytes <= Room() + slack_bytes_) {
      Place(of, rest, bytes);
      return;
    }
    // The outermost dimension of more than one unit, which is a row of blocks
    // where rows are cut.
    size_t dim = 0;
    while (dim < row && rest.extent(dim) == 1) ++dim;
    const int64_t unit = dim == row ? whole.scheme.block_rows : 1;
    const int64_t unit_bytes = bytes / rest.extent(dim) * unit;
    if (dim == row && rest.extent(row) <= unit) {
      // A row of blocks goes where most of it fits.
      if (Room() < bytes / 2) ++wave_;
      Place(of, rest, bytes);
      return;
    }
    const int64_t units = Room() / unit_bytes;
    Box first = rest;
    first.hi[dim] = std::min(rest.hi[dim],
                             rest.lo[dim] + std::max<int64_t>(units, 1) * unit);
    rest.lo[dim] = first.hi[dim];
    if (units == 0) {
      Add(of, whole, first);  // cuts inside one layer, expert or row of blocks
    } else {
      Place(of, first, first.Volume() * whole.element_bytes);
    }
  }
}

}  // namespace

std::vector<WavePart> CutIntoWaves(absl::Span<const QuantizedBox> boxes,
                                   int32_t waves, int64_t uneven_part) {
  int64_t total_bytes = 0;
  for (const QuantizedBox& box : boxes) total_bytes += box.bytes();
  Cutter cutter(total_bytes, waves, uneven_part);
  for (size_t i = 0; i < boxes.size(); ++i) {
    cutter.Add(i, boxes[i], boxes[i].box);
  }
  return cutter.Take();
}

}  // namespace refit
