#include "compiler/layout/common/role_table.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

#include "absl/strings/str_format.h"

namespace refit {
namespace {

// Whether two layers may share one stack of buffers.
bool SameTensors(const Param& a, const Param& b) {
  return a.shape == b.shape && a.dtype == b.dtype && a.name == b.name &&
         a.first_layer == b.first_layer;
}

// Reports a param whose form is not its role's.
bool CheckForm(const Param& param, const Model& model,
               Diagnostics& diagnostics) {
  const std::string mistake = ShapeMistake(param, model.architecture);
  if (mistake.empty()) return true;
  diagnostics.Error(model.place, "parameter \"%s\" %s", param.name, mistake);
  return false;
}

}  // namespace

RoleTable::RoleTable(const Model& model) : model_(model) {
  for (size_t i = 0; i < model.params.size(); ++i) {
    const Param& param = model.params[i];
    const auto id = static_cast<ParamId>(i);
    params_[IndexOf(param.role)].push_back(id);
    if (FormOf(param.role).scope == RoleScope::kModel || param.index.empty()) {
      continue;
    }
    const std::vector<int32_t>& numbers = param.index[0].numbers;
    const int64_t count = IsTower(param.role) ? numbers.back() + 1
                                              : model.architecture.all_layers();
    std::vector<std::vector<LayerEntry>>& layers = layers_[IndexOf(param.role)];
    layers.resize(std::max<size_t>(count, layers.size()));
    for (size_t position = 0; position < numbers.size(); ++position) {
      const int32_t layer = param.first_layer + numbers[position];
      // Numbers outside are CheckRoles' to report.
      if (layer < 0 || layer >= count) continue;
      layers[layer].push_back({id, static_cast<int32_t>(position)});
    }
  }
}

absl::Span<const LayerEntry> RoleTable::At(ParamRole role,
                                           int64_t layer) const {
  const std::vector<std::vector<LayerEntry>>& layers = layers_[IndexOf(role)];
  if (layer >= std::ssize(layers)) return {};
  return layers[layer];
}

absl::Span<const ParamId> RoleTable::Params(ParamRole role) const {
  return params_[IndexOf(role)];
}

std::vector<LayerGroup> RoleTable::Group(absl::Span<const ParamRole> roles,
                                         Range layers) const {
  return GroupBy(roles.size(), layers,
                 [&](size_t i, int64_t layer) -> const Param* {
                   const absl::Span<const LayerEntry> at = At(roles[i], layer);
                   return at.empty() ? nullptr : &param(at[0].param);
                 });
}

std::vector<LayerGroup> RoleTable::GroupNamed(
    ParamRole role, absl::Span<const std::string> names, Range layers) const {
  return GroupBy(names.size(), layers,
                 [&](size_t i, int64_t layer) -> const Param* {
                   for (const LayerEntry& entry : At(role, layer)) {
                     const Param& found = param(entry.param);
                     if (found.name == names[i]) return &found;
                   }
                   return nullptr;
                 });
}

std::vector<LayerGroup> RoleTable::GroupBy(
    size_t count, Range layers,
    absl::FunctionRef<const Param*(size_t, int64_t)> param_of) const {
  std::vector<LayerGroup> groups;
  std::vector<const Param*> params(count);
  for (int64_t layer = layers.begin; layer < layers.end; ++layer) {
    for (size_t i = 0; i < count; ++i) params[i] = param_of(i, layer);
    if (std::count(params.begin(), params.end(), nullptr) > 0) continue;
    const auto same = [&](const LayerGroup& group) {
      return std::equal(params.begin(), params.end(), group.params.begin(),
                        [](const Param* a, const Param* b) {
                          return a == b || SameTensors(*a, *b);
                        });
    };
    auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end()) {
      group = groups.insert(groups.end(), {.layers = {}, .params = params});
    }
    group->layers.push_back(static_cast<int32_t>(layer));
  }
  return groups;
}

bool CheckRoles(const LayoutContext& context) {
  const Model& model = context.model;
  const Param* unplaced = nullptr;
  int64_t unplaced_count = 0;
  bool well_formed = true;
  for (const Param& param : model.params) {
    if (param.role != ParamRole::kOther) {
      well_formed &= CheckForm(param, model, context.diagnostics);
    } else if (param.skip == SkipReason::kUnspecified) {
      if (unplaced == nullptr) unplaced = &param;
      ++unplaced_count;
    }
  }
  if (unplaced != nullptr) {
    context.diagnostics.Error(
        context.side.layout.place,
        "%s cannot place parameter \"%s\"%s; wanted a model family with roles "
        "(config.json)",
        LayoutName(context.side.layout.value), unplaced->name,
        unplaced_count > 1 ? absl::StrFormat(" and %d more", unplaced_count - 1)
                           : "");
    return false;
  }
  return well_formed && CheckMissingRoles(model, context.diagnostics);
}

}  // namespace refit
