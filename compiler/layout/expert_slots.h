// Which experts stand in which slots of a serving engine's ranks.
#ifndef REFIT_COMPILER_LAYOUT_EXPERT_SLOTS_H_
#define REFIT_COMPILER_LAYOUT_EXPERT_SLOTS_H_

#include <cstdint>
#include <vector>

#include "compiler/layout/layout.h"
#include "compiler/layout/role_table.h"
#include "compiler/layout/sizes.h"
#include "compiler/layout/tensor_stack.h"

namespace refit {

// What each of the `ranks` ranks that share the experts of a layer holds of
// them, as `side.experts` places them, else linearly; without such ranks (0),
// one slice that holds all. Reports a placement that does not fit.
std::vector<ExpertSlice> PlaceExperts(const LayoutContext& context,
                                      const RoleTable& table, int64_t ranks,
                                      SizeChecks& checks);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_EXPERT_SLOTS_H_
