#include "compiler/ir/block_scheme.h"

#include <tuple>
#include <utility>

namespace refit {
namespace {

int64_t BlockCount(int64_t elements, int64_t block) {
  return (elements + block - 1) / block;
}

}  // namespace

Dims ScaleShape(const Dims& matrix, const BlockScheme& scheme) {
  return {BlockCount(matrix[0], scheme.block_rows),
          BlockCount(matrix[1], scheme.block_columns)};
}

bool HoldsWholeBlocks(const Box& box, const Dims& shape,
                      const BlockScheme& scheme) {
  const size_t row = box.lo.size() - 2;
  for (const auto& [dim, size, block] :
       {std::tuple(row, shape[0], scheme.block_rows),
        std::tuple(row + 1, shape[1], scheme.block_columns)}) {
    if (box.lo[dim] % block != 0) return false;
    if (box.hi[dim] % block != 0 && box.hi[dim] != size) return false;
  }
  return true;
}

Box ScaleBox(const Box& box, const BlockScheme& scheme) {
  Box scales = box;
  const size_t row = box.lo.size() - 2;
  for (const auto& [dim, block] : {std::pair(row, scheme.block_rows),
                                   std::pair(row + 1, scheme.block_columns)}) {
    scales.lo[dim] /= block;
    scales.hi[dim] = BlockCount(scales.hi[dim], block);
  }
  return scales;
}

}  // namespace refit
