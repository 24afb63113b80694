// The experts of a serving engine: which of them each rank holds, and
// what its MoE backend does to their weights after loading them.
#ifndef REFIT_COMPILER_LAYOUT_SERVING_EXPERTS_H_
#define REFIT_COMPILER_LAYOUT_SERVING_EXPERTS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "compiler/job/job.h"
#include "compiler/layout/common/cut.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/layout/layout.h"

namespace refit {

// What each of the `ranks` ranks that share the experts of a layer holds of
// them, as `side.experts` places them, else linearly; without such ranks (0),
// one slice that holds all. Reports a placement that does not fit.
std::vector<ExpertSlice> PlaceExperts(const LayoutContext& context,
                                      const RoleTable& table, int64_t ranks,
                                      SizeChecks& checks);

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

// Experts in one tensor a layer stand in the checkpoint's order alone, and
// alternating rows have no other order: reports other wishes.
void CheckFusedExperts(const LayoutContext& context, const RoleTable& table,
                       GateUpOrder order, SizeChecks& checks);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_SERVING_EXPERTS_H_
