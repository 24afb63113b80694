// Checks that the axes of an SGLang side and its model's class fit, and what
// the engine decides by itself.
#ifndef REFIT_COMPILER_LAYOUT_SGLANG_CHECKS_H_
#define REFIT_COMPILER_LAYOUT_SGLANG_CHECKS_H_

#include "compiler/job/job.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/serving/engine.h"

namespace refit::sglang {

// Whether the axes within tensor parallelism divide it; reports what does not.
bool CheckAxes(const LayoutContext& context);

// Reports what SGLang does not do, and sizes that do not fit.
void CheckEngine(const LayoutContext& context, const RoleTable& table,
                 const Engine& engine, SizeChecks& checks);

// How a side holds shared experts: as the job says, else as the engine decides
// on NVIDIA GPUs.
SharedExperts SharedExpertsOf(const LayoutContext& context,
                              const RoleTable& table);

}  // namespace refit::sglang

#endif  // REFIT_COMPILER_LAYOUT_SGLANG_CHECKS_H_
