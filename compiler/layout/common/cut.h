// How a rank's tensor is cut from params: what training and serving frameworks
// do alike.
#ifndef REFIT_COMPILER_LAYOUT_COMMON_CUT_H_
#define REFIT_COMPILER_LAYOUT_COMMON_CUT_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/model/model.h"

namespace refit {

// kRows: of each run of rows that a param consists of (SectionsOf), the rank's
// part. kColumns: of one param alone.
enum class Cut : uint8_t { kWhole, kRows, kColumns };

// A run of a param's rows, of which a rank holds one part.
struct Section {
  int64_t rows = 0;
  EvenPart part;
};

// The runs of rows of which `part` has a part each. Keys and values: with more
// ranks than heads, consecutive ranks hold the same one. Mamba-2 mixers:
// [z; x; B; C; dt] and [x; B; C]; ranks that do not divide the groups each hold
// all of B and C. Delta nets: [queries; keys; values]. Other roles: one run.
std::vector<Section> SectionsOf(const Param& param,
                                const Architecture& architecture,
                                EvenPart part);

// Appends rows to the tensor. Of rows in rotary pairs, frameworks have the
// first of all pairs of a head before the second.
void AppendRows(const Param& param, Range rows, TensorSpec& spec);

// What a rank holds of params that stand one after the other in a tensor, which
// has no name yet.
TensorSpec CutOf(absl::Span<const Param* const> params, Cut cut,
                 const Architecture& architecture, EvenPart part);

// How the rows of gate and up stand in the tensor of an expert.
enum class GateUpOrder : uint8_t { kGateFirst, kUpFirst, kAlternating };

// Experts that a checkpoint holds in one tensor a layer, as [expert, output,
// input] or, of biases, [expert, output]. `part` cuts the outputs of gate and
// up, and the inputs of down. kAlternating is possible where they alternate in
// the checkpoint; other orders of such are kGateFirst.
TensorSpec StackedExperts(const Param& param, Range experts, EvenPart part,
                          GateUpOrder order);

bool IsStacked(ParamRole role);
// Of these, biases alone.
bool IsStackedBias(ParamRole role);

// The elements [range.begin, range.end) of a row-major tensor as boxes, in
// order: of a matrix the rest of a row, whole rows, the start of a row.
std::vector<Box> BoxesOfElements(absl::Span<const int64_t> shape, Range range);

// A fragment whose box has the dimensions [index…, tensor…], as fragments of
// the param's virtual tensor.
std::vector<Fragment> OfSplitParam(const Param& param,
                                   const Fragment& fragment);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_COMMON_CUT_H_
