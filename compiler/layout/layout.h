// Layout frontends: each lists the buffers of every rank of a side and says
// which box of which param stands where in them. Nothing downstream knows a
// framework's name.
#ifndef REFIT_COMPILER_LAYOUT_LAYOUT_H_
#define REFIT_COMPILER_LAYOUT_LAYOUT_H_

#include <cstdint>

#include "compiler/diagnostics.h"
#include "compiler/ir/module.h"
#include "compiler/job/job.h"
#include "compiler/model/model.h"

namespace refit {

struct LayoutContext {
  const Model& model;
  const SideSpec& side;
  fb::Side which = fb::Side::kSource;
  BufferTable& buffers;
  Diagnostics& diagnostics;
};

// Lists the side's buffers by its layout. Of a destination, the fragments and
// regions of each buffer tile it exactly. Reports every size that does not fit
// (place, found, wanted) and returns an unspecified layout after an error.
SideLayout LayOut(const LayoutContext& context);

// One per framework; LayOut dispatches.
SideLayout LayOutMegatron(const LayoutContext& context);
SideLayout LayOutFsdp(const LayoutContext& context);
SideLayout LayOutVllm(const LayoutContext& context);
SideLayout LayOutSglang(const LayoutContext& context);
SideLayout LayOutGeneric(const LayoutContext& context);

// Fills `quantizations` and adds their params. Reports sides that cannot be
// brought together: values that would have to be quantized again, or not be.
void DeclareQuantizations(const Job& job, Module& module,
                          Diagnostics& diagnostics);

// Turns the buffers of a quantized side into those of values and scales.
// Reports parts of buffers that are not whole blocks.
void AddBlockScales(const SideSpec& side, fb::Side which, Module& module,
                    SideLayout& layout, Diagnostics& diagnostics);

// GPUs of one host, as nearly all hosts with NVLink have them.
inline constexpr int64_t kUsualGpusPerHost = 8;

// Warns of releases newer than what is known, of what an engine of the
// destination would hold otherwise, and of what a release's own loader reads
// otherwise. Each warning names the key that settles the doubt.
void WarnOfFrameworks(const Job& job, const Model& model,
                      Diagnostics& diagnostics);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_LAYOUT_H_
