#include "compiler/model/role_shape.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/strings/str_format.h"

namespace refit {
namespace {

// Whether the role is of a part that the architecture lacks, so that nothing is
// known of its shape.
bool IsOfMissingPart(ParamRole role, const Architecture& a) {
  const std::string_view word = FormOf(role).word;
  if (word.starts_with("mamba_")) return !a.mamba.has_value();
  if (word.starts_with("delta_")) return !a.delta.has_value();
  return IsLatent(role) && !a.latent.has_value();
}

// The rows that the architecture gives a role's tensor; nullopt: any.
std::optional<int64_t> RowsWanted(ParamRole role, const Architecture& a) {
  const LatentAttention latent = a.latent.value_or(LatentAttention{});
  const MambaSizes mamba = a.mamba.value_or(MambaSizes{});
  const DeltaNetSizes delta = a.delta.value_or(DeltaNetSizes{});
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
      return a.heads * (latent.nope_dim + latent.rope_dim);
    case ParamRole::kKeyValueUp:
      return a.heads * (latent.nope_dim + latent.value_dim);
    case ParamRole::kQueryDown:
    case ParamRole::kQueryDownNorm:
      return latent.query_rank;
    case ParamRole::kKeyValueDown:
      return latent.key_value_rank + latent.rope_dim;
    case ParamRole::kKeyValueDownNorm:
      return latent.key_value_rank;
    case ParamRole::kMambaIn:
    case ParamRole::kMambaInBias:
      return 2 * (mamba.inner() + mamba.shared()) + mamba.heads;
    case ParamRole::kMambaConv:
    case ParamRole::kMambaConvBias:
      return mamba.inner() + 2 * mamba.shared();
    case ParamRole::kMambaALog:
    case ParamRole::kMambaD:
    case ParamRole::kMambaDtBias:
      return mamba.heads;
    case ParamRole::kMambaGatedNorm:
      return mamba.inner();
    case ParamRole::kDeltaQkv:
    case ParamRole::kDeltaConv:
      return 2 * delta.keys() + delta.values();
    case ParamRole::kDeltaZ:
      return delta.values();
    case ParamRole::kDeltaB:
    case ParamRole::kDeltaA:
    case ParamRole::kDeltaALog:
    case ParamRole::kDeltaDtBias:
      return delta.value_heads;
    case ParamRole::kDeltaGatedNorm:
      return delta.value_dim;
    case ParamRole::kDeltaQkvz:
      return 2 * (delta.keys() + delta.values());
    case ParamRole::kDeltaBa:
      return 2 * delta.value_heads;
    case ParamRole::kAttentionSinks:
    case ParamRole::kAttentionSinksFp32:
      return a.heads;
    case ParamRole::kQueryHeadsNorm:
      return a.heads * a.head_dim;
    case ParamRole::kKeyHeadsNorm:
      return a.kv_heads * a.head_dim;
    case ParamRole::kEmbedding:
    case ParamRole::kOutputHead:
      return a.vocab;
    case ParamRole::kRouter:
    case ParamRole::kRouterCorrection:
    case ParamRole::kStackedExpertGateUp:
    case ParamRole::kStackedExpertDown:
    case ParamRole::kFusedExpertGateUp:
    case ParamRole::kFusedExpertGateUpBias:
    case ParamRole::kFusedExpertGateThenUp:
    case ParamRole::kFusedExpertDown:
    case ParamRole::kFusedExpertDownBias:
      return a.experts;
    default:
      return std::nullopt;
  }
}

// And the columns.
std::optional<int64_t> ColumnsWanted(ParamRole role, const Architecture& a) {
  const LatentAttention latent = a.latent.value_or(LatentAttention{});
  const MambaSizes mamba = a.mamba.value_or(MambaSizes{});
  const DeltaNetSizes delta = a.delta.value_or(DeltaNetSizes{});
  switch (role) {
    case ParamRole::kAttentionOutput:
      return a.heads * (a.latent.has_value() ? latent.value_dim : a.head_dim);
    case ParamRole::kQueryUp:
      return latent.query_rank;
    case ParamRole::kKeyValueUp:
      return latent.key_value_rank;
    case ParamRole::kDeltaOut:
      return delta.values();
    case ParamRole::kMambaOut:
      return mamba.inner();
    default:
      return std::nullopt;
  }
}

}  // namespace

bool IsLatent(ParamRole role) {
  switch (role) {
    case ParamRole::kLatentQuery:
    case ParamRole::kQueryDown:
    case ParamRole::kQueryDownNorm:
    case ParamRole::kQueryUp:
    case ParamRole::kKeyValueDown:
    case ParamRole::kKeyValueDownNorm:
    case ParamRole::kKeyValueUp:
      return true;
    default:
      return false;
  }
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
  const bool is_known = !IsOfMissingPart(param.role, architecture);
  const std::optional<int64_t> rows = RowsWanted(param.role, architecture);
  if (is_known && rows.has_value() && shape[0] != *rows) {
    return absl::StrFormat("has %d rows; wanted %d", shape[0], *rows);
  }
  const std::optional<int64_t> columns =
      ColumnsWanted(param.role, architecture);
  if (is_known && columns.has_value() && shape[1] != *columns) {
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
