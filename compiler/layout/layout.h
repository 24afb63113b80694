// Layout frontends: each lists the buffers of every rank of a side and says
// which box of which param stands where in them. Nothing downstream knows a
// framework's name.
#ifndef REFIT_COMPILER_LAYOUT_LAYOUT_H_
#define REFIT_COMPILER_LAYOUT_LAYOUT_H_

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

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_LAYOUT_H_
