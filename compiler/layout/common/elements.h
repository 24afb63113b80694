// Boxes of params: of runs of elements, and of params whose shape has a
// dimension of the tensor as several.
#ifndef REFIT_COMPILER_LAYOUT_COMMON_ELEMENTS_H_
#define REFIT_COMPILER_LAYOUT_COMMON_ELEMENTS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "compiler/layout/common/shard.h"

namespace refit {

// The elements [range.begin, range.end) of a row-major tensor as boxes, in
// order: of a matrix the rest of a row, whole rows, the start of a row.
std::vector<Box> BoxesOfElements(absl::Span<const int64_t> shape, Range range);

// A fragment whose box has the dimensions [index…, tensor…], as fragments of
// the param's virtual tensor.
std::vector<Fragment> OfSplitParam(const Param& param,
                                   const Fragment& fragment);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_COMMON_ELEMENTS_H_
