#include "compiler/layout/common/role_table.h"

#include <algorithm>
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

// The rows that the architecture gives a role's tensor; nullopt: any.
std::optional<int64_t> RowsWanted(ParamRole role, const Architecture& a) {
  switch (role) {
    case ParamRole::kQuery:
    case ParamRole::kQueryBias:
      return a.heads * a.query_head_rows();
    case ParamRole::kKey:
    case ParamRole::kValue:
    case ParamRole::kKeyBias:
    case ParamRole::kValueBias:
      return a.kv_heads * a.head_dim;
    case ParamRole::kLatentQuery:
    case ParamRole::kQueryUp:
      if (!a.latent.has_value()) return std::nullopt;
      return a.heads * (a.latent->nope_dim + a.latent->rope_dim);
    case ParamRole::kKeyValueUp:
      if (!a.latent.has_value()) return std::nullopt;
      return a.heads * (a.latent->nope_dim + a.latent->value_dim);
    case ParamRole::kEmbedding:
    case ParamRole::kOutputHead:
      return a.vocab;
    default:
      return std::nullopt;
  }
}

// Reports a param whose form is not its role's.
bool CheckForm(const Param& param, const Model& model,
               Diagnostics& diagnostics) {
  const RoleForm form = FormOf(param.role);
  const size_t index_dims = form.scope == RoleScope::kModel   ? 0
                            : form.scope == RoleScope::kLayer ? 1
                                                              : 2;
  const auto dims = static_cast<size_t>(form.dims);
  const auto error = [&](std::string found) {
    diagnostics.Error(
        model.place, absl::StrFormat("parameter \"%s\" %s", param.name, found));
    return false;
  };
  if (param.index.size() != index_dims) {
    return error(absl::StrFormat("has %d numbers in its name; wanted %d",
                                 param.index.size(), index_dims));
  }
  if (param.shape.size() != dims) {
    return error(
        absl::StrFormat("has %d dims; wanted %d", param.shape.size(), dims));
  }
  const std::optional<int64_t> rows =
      RowsWanted(param.role, model.architecture);
  if (rows.has_value() && param.shape[0] != *rows) {
    return error(
        absl::StrFormat("has %d rows; wanted %d", param.shape[0], *rows));
  }
  const Architecture& architecture = model.architecture;
  const int64_t output_columns =
      architecture.heads * (architecture.latent.has_value()
                                ? architecture.latent->value_dim
                                : architecture.head_dim);
  if (param.role == ParamRole::kAttentionOutput &&
      param.shape[1] != output_columns) {
    return error(absl::StrFormat("has %d columns; wanted %d", param.shape[1],
                                 output_columns));
  }
  if (index_dims > 0) {
    for (const int32_t number : param.index[0].numbers) {
      const int32_t layer = param.first_layer + number;
      if (layer < 0 || layer >= architecture.all_layers()) {
        return error(absl::StrFormat("has a layer %d; the model has %d layers",
                                     layer, architecture.all_layers()));
      }
    }
  }
  return true;
}

// Roles whose params stand in one buffer: a layer has all or none of them. A
// model may have no gates at all.
constexpr ParamRole kTogether[][3] = {
    {ParamRole::kQuery, ParamRole::kKey, ParamRole::kValue},
    {ParamRole::kQueryBias, ParamRole::kKeyBias, ParamRole::kValueBias},
    {ParamRole::kMlpGate, ParamRole::kMlpUp, ParamRole::kMlpDown},
    {ParamRole::kExpertGate, ParamRole::kExpertUp, ParamRole::kExpertDown},
};

bool IsGate(ParamRole role) {
  return role == ParamRole::kMlpGate || role == ParamRole::kExpertGate;
}

// Reports the first layer that lacks a part of what one buffer holds.
bool CheckCompleteness(const Model& model, const RoleTable& table,
                       Diagnostics& diagnostics) {
  bool complete = true;
  for (const auto& roles : kTogether) {
    for (int64_t layer = 0; layer < model.architecture.all_layers(); ++layer) {
      int64_t count[3] = {0, 0, 0};
      std::string_view present;
      for (int i = 0; i < 3; ++i) {
        for (const LayerEntry& entry : table.At(roles[i], layer)) {
          const Param& param = table.param(entry.param);
          count[i] += FormOf(roles[i]).scope == RoleScope::kExpert
                          ? param.index[1].extent()
                          : 1;
          present = param.name;
        }
      }
      const int64_t wanted = present.empty() ? 0
                             : FormOf(roles[0]).scope == RoleScope::kExpert
                                 ? model.architecture.experts
                                 : 1;
      if (IsGate(roles[0]) && table.Params(roles[0]).empty()) {
        count[0] = wanted;
      }
      if (count[0] == wanted && count[1] == wanted && count[2] == wanted) {
        continue;
      }
      diagnostics.Error(model.place,
                        absl::StrFormat("layer %d has %d, %d and %d parameters "
                                        "beside \"%s\"; wanted %d of each",
                                        layer, count[0], count[1], count[2],
                                        present, wanted));
      complete = false;
      break;
    }
  }
  return complete;
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
    std::vector<std::vector<LayerEntry>>& layers = layers_[IndexOf(param.role)];
    layers.resize(std::max<int64_t>(model.architecture.all_layers(), 0));
    const std::vector<int32_t>& numbers = param.index[0].numbers;
    for (size_t position = 0; position < numbers.size(); ++position) {
      const int32_t layer = param.first_layer + numbers[position];
      // Numbers outside are CheckRoles' to report.
      if (layer < 0 || layer >= model.architecture.all_layers()) continue;
      layers[layer].push_back({id, static_cast<int32_t>(position)});
    }
  }
}

absl::Span<const LayerEntry> RoleTable::At(ParamRole role,
                                           int64_t layer) const {
  const std::vector<std::vector<LayerEntry>>& layers = layers_[IndexOf(role)];
  if (layers.empty()) return {};
  return layers[layer];
}

absl::Span<const ParamId> RoleTable::Params(ParamRole role) const {
  return params_[IndexOf(role)];
}

std::vector<LayerGroup> RoleTable::Group(absl::Span<const ParamRole> roles,
                                         Range layers) const {
  std::vector<LayerGroup> groups;
  std::vector<const Param*> params(roles.size());
  for (int64_t layer = layers.begin; layer < layers.end; ++layer) {
    if (At(roles[0], layer).empty()) continue;
    for (size_t i = 0; i < roles.size(); ++i) {
      params[i] = &param(At(roles[i], layer)[0].param);
    }
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

bool CheckRoles(const LayoutContext& context, std::string_view layout,
                const RoleTable& table) {
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
        absl::StrFormat("%s cannot place parameter \"%s\"%s; wanted a model "
                        "family with roles (config.json)",
                        layout, unplaced->name,
                        unplaced_count > 1 ? absl::StrFormat(" and %d more",
                                                             unplaced_count - 1)
                                           : ""));
    return false;
  }
  return well_formed && CheckCompleteness(model, table, context.diagnostics);
}

}  // namespace refit
