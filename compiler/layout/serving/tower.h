// Vision towers in serving engines: the checkpoint's modules, linear layers cut
// by tensor parallelism, separate queries, keys and values in one tensor.
#ifndef REFIT_COMPILER_LAYOUT_SERVING_TOWER_H_
#define REFIT_COMPILER_LAYOUT_SERVING_TOWER_H_

#include <string_view>
#include <vector>

#include "compiler/ir/module.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/layout.h"
#include "compiler/model/family.h"

namespace refit {

// Whether each rank holds the tower whole.
bool HasWholeTower(const LayoutContext& context);

// Reports what `divisor`, the ranks that share the tower, does not divide, and
// a key of the tower in a job without it, or of one that is always cut.
// `whole_in_tower`: see SglangTraits.
void CheckTower(const LayoutContext& context, const RoleTable& table,
                const SizeChecks::Divisor& divisor, SizeChecks& checks,
                std::string_view whole_in_tower = "");

// What a rank holds: of the tower, and of what joins it to the language model
// and is cut by tensor parallelism all the same.
struct TowerParts {
  EvenPart tower;
  EvenPart connector;
  bool positions = true;  // false: the caller adds learned positions
  std::string_view whole_in_tower = "";  // see SglangTraits
};

// Adds what a rank holds, in the order of the model's params.
void AddTower(const LayoutContext& context, const RoleTable& table,
              Renames renames, const TowerParts& parts,
              std::vector<BufferId>& out);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_SERVING_TOWER_H_
