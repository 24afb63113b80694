// The tensors of Mamba-2 mixers and gated delta nets, as training and serving
// frameworks cut them: per rank, a part of each of several runs of rows.
#ifndef REFIT_COMPILER_LAYOUT_COMMON_MIXERS_H_
#define REFIT_COMPILER_LAYOUT_COMMON_MIXERS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/model/model.h"

namespace refit {

// A run of a param's rows, of which a rank holds one part.
struct Section {
  int64_t rows = 0;
  EvenPart part;
};

// The parts of a param's sections, which follow each other from row 0 on, one
// after the other; under the param's own name.
TensorSpec SectionRows(const Param& param, absl::Span<const Section> sections);

// One part of a param's rows, under its own name.
TensorSpec RowPart(const Param& param, EvenPart part);

// [z; x; B; C; dt] of the input projection, [x; B; C] of the convolution.
// Ranks that do not divide the groups each hold all of B and C.
TensorSpec MambaInRows(const Param& param, const MambaSizes& sizes,
                       EvenPart part);
TensorSpec MambaConvRows(const Param& param, const MambaSizes& sizes,
                         EvenPart part);

// [queries; keys; values] of a delta net's convolution.
TensorSpec DeltaConvRows(const Param& param, const DeltaNetSizes& sizes,
                         EvenPart part);

// [queries; keys; values; z; b; a] of a rank's heads, from a group's
// in_proj_qkvz and in_proj_ba, which list these per key head.
TensorSpec DeltaInRows(const LayerGroup& group, const DeltaNetSizes& sizes,
                       EvenPart part);

// [queries; keys; values; z] and [b; a] of a rank's heads, from a group's
// tensors that have these by head.
TensorSpec DeltaQkvzRows(const LayerGroup& group, const DeltaNetSizes& sizes,
                         EvenPart part);
TensorSpec DeltaBaRows(const LayerGroup& group, EvenPart part);

// Tensor parallelism cuts the heads of the model's mixers; whether it cuts
// their groups too, or may leave a single one whole.
enum class MambaGroups : uint8_t { kCut, kCutOrWhole };
void CheckMixerSizes(SizeChecks& checks, const Architecture& architecture,
                     const SizeChecks::Divisor& tensor, MambaGroups groups);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_COMMON_MIXERS_H_
