// What a serving engine's MoE backend does to its weights after loading them.
#ifndef REFIT_COMPILER_LAYOUT_MOE_BACKEND_H_
#define REFIT_COMPILER_LAYOUT_MOE_BACKEND_H_

#include <cstdint>
#include <map>
#include <string>

#include "compiler/job/job.h"
#include "compiler/layout/sizes.h"

namespace refit {

// The rows of "w13_weight" of one expert.
enum class GateUpOrder : uint8_t { kGateFirst, kUpFirst };

// What a serving engine of `side` must be set to, since tensors of other
// experts, or with rows in another order, have the same shapes. Requires a
// model with experts. `expert_ranks`: ranks that share the experts of a layer,
// 1 without expert parallelism.
std::map<std::string, std::string> ExpertRequirements(const SideSpec& side,
                                                      int64_t expert_ranks);

// The order that `side.moe_backend` keeps; of no backend, the checkpoint's.
// Reports backends that keep no order which a refit could write, and names that
// are none.
GateUpOrder CheckMoeBackend(const SideSpec& side, SizeChecks& checks);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_MOE_BACKEND_H_
