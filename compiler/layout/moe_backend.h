// What a serving engine's MoE backend does to its weights after loading them.
#ifndef REFIT_COMPILER_LAYOUT_MOE_BACKEND_H_
#define REFIT_COMPILER_LAYOUT_MOE_BACKEND_H_

#include <cstdint>

#include "compiler/job/job.h"
#include "compiler/layout/sizes.h"

namespace refit {

// The rows of "w13_weight" of one expert.
enum class GateUpOrder : uint8_t { kGateFirst, kUpFirst };

// The order that `side.moe_backend` keeps; of no backend, the checkpoint's.
// Reports backends that keep no order which a refit could write, and names that
// are none.
GateUpOrder CheckMoeBackend(const SideSpec& side, SizeChecks& checks);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_MOE_BACKEND_H_
