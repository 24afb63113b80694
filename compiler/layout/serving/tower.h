// Vision towers in serving engines: the checkpoint's modules, linear layers cut
// by tensor parallelism, separate queries, keys and values in one tensor.
#ifndef REFIT_COMPILER_LAYOUT_SERVING_TOWER_H_
#define REFIT_COMPILER_LAYOUT_SERVING_TOWER_H_

#include <functional>
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

// The ranks that share what a rank's TowerParts cut; 1 by default.
struct TowerDivisors {
  SizeChecks::Divisor tower;
  SizeChecks::Divisor connector;
  std::string_view whole_in_tower = "";  // see SglangTraits
  bool may_be_whole = true;  // "mm_encoder_tp_mode": "data" leaves it whole
};

// Reports what `divisors` do not divide, and a key of the tower in a job
// without it, or of one that is always cut.
void CheckTower(const LayoutContext& context, const RoleTable& table,
                const TowerDivisors& divisors, SizeChecks& checks);

// What a rank holds: of the tower, and of what joins it to the language model
// and is cut by tensor parallelism all the same.
struct TowerParts {
  EvenPart tower;
  EvenPart connector;
  // Adds learned positions that an engine cuts; nullptr: they are whole.
  std::function<void(ParamId)> add_positions = nullptr;
  std::string_view whole_in_tower = "";  // see SglangTraits
};

// Adds what a rank holds, in the order of the model's params.
void AddTower(const LayoutContext& context, const RoleTable& table,
              Renames renames, const TowerParts& parts,
              std::vector<BufferId>& out);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_SERVING_TOWER_H_
