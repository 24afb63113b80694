// The axes of an SGLang side, the checks that they and its model's class fit,
// and what the engine decides by itself.
#ifndef REFIT_COMPILER_LAYOUT_SGLANG_CHECKS_H_
#define REFIT_COMPILER_LAYOUT_SGLANG_CHECKS_H_

#include <cstdint>

#include "compiler/job/job.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/serving/experts.h"

namespace refit::sglang {

// All axes but the pipeline lie within tensor parallelism.
struct Sizes {
  int64_t tensor;
  int64_t pipeline;
  int64_t attention;      // ranks that share the heads
  int64_t expert;         // groups of ranks that hold different experts
  int64_t expert_tensor;  // ranks that share each expert; neighbours
};

// Whether the axes within tensor parallelism divide it; reports what does not.
bool CheckAxes(const LayoutContext& context);

// Requires CheckAxes.
Sizes SizesOf(const SideSpec& side);

// What the MoE backend makes of each expert's matrices.
struct ExpertForm {
  GateUpOrder order = GateUpOrder::kGateFirst;
  bool transposed = false;  // rows are inputs
};

// Reports sizes that do not fit.
ExpertForm CheckSizes(const LayoutContext& context, const RoleTable& table,
                      const Sizes& sizes, SizeChecks& checks);

// How a side holds shared experts: as the job says, else as the engine decides
// on NVIDIA GPUs.
SharedExperts SharedExpertsOf(const LayoutContext& context,
                              const RoleTable& table);

}  // namespace refit::sglang

#endif  // REFIT_COMPILER_LAYOUT_SGLANG_CHECKS_H_
