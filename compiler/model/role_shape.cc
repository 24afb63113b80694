// What a role says of the shape and the numbers of its params.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/model/model.h"
#include "llvm/ADT/STLExtras.h"

namespace refit {
namespace {

using enum ParamRole;

// What the architecture gives the tensors of some roles; of the others any
// number.
struct KnownExtent {
  std::vector<ParamRole> roles;
  int64_t extent;
};

std::optional<int64_t> Wanted(ParamRole role,
                              const std::vector<KnownExtent>& known) {
  for (const KnownExtent& of : known) {
    if (llvm::is_contained(of.roles, role)) return of.extent;
  }
  return std::nullopt;
}

// Of a part that the architecture lacks nothing is known.
std::vector<KnownExtent> KnownRows(const Architecture& a) {
  std::vector<KnownExtent> rows = {
      {{kQuery, kQueryBias}, a.heads * a.query_head_rows()},
      {{kKey, kValue, kKeyBias, kValueBias, kKeyHeadsNorm},
       a.kv_heads * a.head_dim},
      {{kQueryHeadsNorm}, a.heads * a.head_dim},
      {{kAttentionSinks, kAttentionSinksFp32}, a.heads},
      {{kEmbedding, kOutputHead}, a.vocab},
      {{kRouter, kRouterCorrection, kStackedExpertGateUp, kStackedExpertDown,
        kFusedExpertGateUp, kFusedExpertGateUpBias, kFusedExpertGateThenUp,
        kFusedExpertDown, kFusedExpertDownBias},
       a.experts}};
  if (const auto& latent = a.latent) {
    rows.insert(
        rows.end(),
        {{{kLatentQuery, kQueryUp},
          a.heads * (latent->nope_dim + latent->rope_dim)},
         {{kKeyValueUp}, a.heads * (latent->nope_dim + latent->value_dim)},
         {{kQueryDown, kQueryDownNorm}, latent->query_rank},
         {{kKeyValueDown}, latent->key_value_rank + latent->rope_dim},
         {{kKeyValueDownNorm}, latent->key_value_rank}});
  }
  if (const auto& mamba = a.mamba) {
    const int64_t conv = mamba->inner() + 2 * mamba->shared();
    rows.insert(
        rows.end(),
        {{{kMambaIn, kMambaInBias}, mamba->inner() + conv + mamba->heads},
         {{kMambaConv, kMambaConvBias}, conv},
         {{kMambaALog, kMambaD, kMambaDtBias}, mamba->heads},
         {{kMambaGatedNorm}, mamba->inner()}});
  }
  if (const auto& delta = a.delta) {
    rows.insert(
        rows.end(),
        {{{kDeltaQkv, kDeltaConv}, 2 * delta->keys() + delta->values()},
         {{kDeltaZ}, delta->values()},
         {{kDeltaB, kDeltaA, kDeltaALog, kDeltaDtBias}, delta->value_heads},
         {{kDeltaGatedNorm}, delta->value_dim},
         {{kDeltaQkvz}, 2 * (delta->keys() + delta->values())},
         {{kDeltaBa}, 2 * delta->value_heads}});
  }
  return rows;
}

std::vector<KnownExtent> KnownColumns(const Architecture& a) {
  std::vector<KnownExtent> columns = {
      {{kAttentionOutput},
       a.heads * (a.latent.has_value() ? a.latent->value_dim : a.head_dim)}};
  if (const auto& latent = a.latent) {
    columns.push_back({{kQueryUp}, latent->query_rank});
    columns.push_back({{kKeyValueUp}, latent->key_value_rank});
  }
  if (a.delta.has_value()) columns.push_back({{kDeltaOut}, a.delta->values()});
  if (a.mamba.has_value()) columns.push_back({{kMambaOut}, a.mamba->inner()});
  return columns;
}

}  // namespace

bool IsLatent(ParamRole role) {
  constexpr ParamRole kLatent[] = {
      kLatentQuery,  kQueryDown,        kQueryDownNorm, kQueryUp,
      kKeyValueDown, kKeyValueDownNorm, kKeyValueUp};
  return llvm::is_contained(kLatent, role);
}

std::string ShapeMistake(const Param& param, const Architecture& architecture) {
  const RoleForm form = FormOf(param.role);
  const bool is_tower = form.scope == RoleScope::kTower;
  const size_t index_dims = is_tower ? param.index.size()
                            : form.scope == RoleScope::kModel ? 0
                            : form.scope == RoleScope::kLayer ? 1
                                                              : 2;
  const auto dims = static_cast<size_t>(form.dims);
  const Dims shape = param.StoredShape();
  if (param.index.size() != index_dims) {
    return absl::StrFormat("has %d numbers in its name; wanted %d",
                           param.index.size(), index_dims);
  }
  const bool may_have_more =
      is_tower || (IsPlainModule(param.role) && param.role != ParamRole::kRow);
  if (may_have_more ? shape.size() < dims : shape.size() != dims) {
    return absl::StrFormat("has %d dims; wanted %d%s", shape.size(), dims,
                           may_have_more ? " or more" : "");
  }
  if (is_tower) {
    const bool is_thirds =
        param.role != ParamRole::kTowerHeads || shape[0] % 3 == 0;
    return is_thirds ? ""
                     : absl::StrFormat(
                           "has %d rows; wanted as many of "
                           "queries, keys and values",
                           shape[0]);
  }
  const std::optional<int64_t> rows =
      Wanted(param.role, KnownRows(architecture));
  if (rows.has_value() && shape[0] != *rows) {
    return absl::StrFormat("has %d rows; wanted %d", shape[0], *rows);
  }
  const std::optional<int64_t> columns =
      Wanted(param.role, KnownColumns(architecture));
  if (columns.has_value() && shape[1] != *columns) {
    return absl::StrFormat("has %d columns; wanted %d", shape[1], *columns);
  }
  if (index_dims == 0) return "";
  for (const int32_t number : param.index[0].numbers) {
    const int32_t layer = param.first_layer + number;
    if (layer >= 0 && layer < architecture.all_layers()) continue;
    return absl::StrFormat("has a layer %d; the model has %d layers", layer,
                           architecture.all_layers());
  }
  return "";
}

}  // namespace refit
