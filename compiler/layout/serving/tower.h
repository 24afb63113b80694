// Vision towers in serving engines: the checkpoint's modules, linear layers cut
// by tensor parallelism, separate queries, keys and values in one tensor.
#ifndef REFIT_COMPILER_LAYOUT_SERVING_TOWER_H_
#define REFIT_COMPILER_LAYOUT_SERVING_TOWER_H_

#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/serving/engine.h"

namespace refit {

// Whether each rank holds the tower whole.
bool HasWholeTower(const LayoutContext& context);

// Reports what the ranks that cut the tower do not divide, and a key of the
// tower in a job without it, or of one that is always cut. `may_be_whole`:
// "mm_encoder_tp_mode": "data" leaves it whole.
void CheckTower(const LayoutContext& context, const RoleTable& table,
                const Engine& engine, bool may_be_whole, SizeChecks& checks);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_SERVING_TOWER_H_
