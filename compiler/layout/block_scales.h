// Block quantization of a side: what it adds to the params, and to the buffers
// that a framework's layout lists.
//
// A layout frontend lists the buffers of a side as if nothing were quantized.
// Values keep that place in fp8; their scales stand in one more buffer for
// each, in the same geometry, one element for each block. So no frontend knows
// of blocks.
#ifndef REFIT_COMPILER_LAYOUT_BLOCK_SCALES_H_
#define REFIT_COMPILER_LAYOUT_BLOCK_SCALES_H_

#include "compiler/diagnostics.h"
#include "compiler/ir/module.h"
#include "compiler/job/job.h"

namespace refit {

// Fills `quantizations` and adds their params. Reports sides that cannot be
// brought together: values that would have to be quantized again, or not be.
void DeclareQuantizations(const Job& job, Module& module,
                          Diagnostics& diagnostics);

// Turns the buffers of a quantized side into those of values and scales.
// Reports parts of buffers that are not whole blocks.
void AddBlockScales(const SideSpec& side, fb::Side which, Module& module,
                    SideLayout& layout, Diagnostics& diagnostics);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_BLOCK_SCALES_H_
