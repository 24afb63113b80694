// The params of a model by what they are to the network.
#ifndef REFIT_COMPILER_LAYOUT_COMMON_ROLE_TABLE_H_
#define REFIT_COMPILER_LAYOUT_COMMON_ROLE_TABLE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/layout.h"
#include "compiler/model/model.h"

namespace refit {

// One layer of a stack: param.first_layer + param.index[0].numbers[position].
struct LayerEntry {
  ParamId param{};
  int32_t position = 0;
};

// Layers whose params of some roles have the same shapes, dtypes and names:
// one stack of buffers holds them.
struct LayerGroup {
  std::vector<int32_t> layers;       // global numbers, ascending
  std::vector<const Param*> params;  // of the first layer, one per role asked
};

class RoleTable {
 public:
  explicit RoleTable(const Model& model);

  // The stacks that hold the layer's param of this role: at most one, except
  // for experts, which an exclude may have split, and for modules of which a
  // layer has many. Empty: it has none. A vision tower counts its own layers.
  absl::Span<const LayerEntry> At(ParamRole role, int64_t layer) const;

  // From 0 to beyond the last layer that has the role.
  Range Numbers(ParamRole role) const {
    return {0, static_cast<int64_t>(layers_[IndexOf(role)].size())};
  }

  // All params of this role.
  absl::Span<const ParamId> Params(ParamRole role) const;

  // The layers of `layers` that have params of all `roles`, in groups; groups
  // in order of their first layer.
  std::vector<LayerGroup> Group(absl::Span<const ParamRole> roles,
                                Range layers) const;

  // The same of the params of these names, all of one role of plain modules, or
  // of a vision tower.
  std::vector<LayerGroup> GroupNamed(ParamRole role,
                                     absl::Span<const std::string> names,
                                     Range layers) const;

  const Param& param(ParamId id) const { return model_.params[IndexOf(id)]; }

 private:
  // param_of(i, layer): the layer's i-th param of a group.
  std::vector<LayerGroup> GroupBy(
      size_t count, Range layers,
      absl::FunctionRef<const Param*(size_t, int64_t)> param_of) const;

  const Model& model_;
  std::array<std::vector<ParamId>, kRoleCount> params_;
  std::array<std::vector<std::vector<LayerEntry>>, kRoleCount> layers_;
};

// Reports what a layout that places by role cannot work with: params without a
// role, layers that lack some of what frameworks join, and params whose roles,
// layers or shapes contradict the architecture. True when nothing was reported.
bool CheckRoles(const LayoutContext& context);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_COMMON_ROLE_TABLE_H_
