// Roles that a file of rules leaves out of a layer that has others of the same
// part.
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/model/family.h"
#include "compiler/model/model.h"
#include "compiler/model/rules/rules.h"

namespace refit {
namespace {

// Roles that make a part of a layer together, and what such a layer has too:
// one of them alone is a mistake in a file of rules. What a part may lack is
// not here.
struct LayerPart {
  std::vector<ParamRole> roles;
  std::optional<ParamRole> too;
};
const std::vector<LayerPart>& LayerParts() {
  using enum ParamRole;
  static const auto& parts = *new std::vector<LayerPart>{
      {{kQuery, kKey, kValue}, kAttentionOutput},
      {{kQueryDown, kQueryUp}, {}},
      {{kKeyValueUp}, kKeyValueDown},
      {{kKeyValueUp}, kAttentionOutput},
      {{kAttentionOutputDown, kAttentionOutputUp}, kKeyValueDown},
      {{kMlpUp, kMlpDown}, {}},
      {{kExpertUp, kExpertDown}, kRouter},
      {{kStackedExpertGateUp, kStackedExpertDown}, kRouter},
      {{kFusedExpertGateUp, kFusedExpertDown}, kRouter},
      {{kSharedExpertUp, kSharedExpertDown}, {}},
      {{kMtpEmbeddingNorm, kMtpHiddenNorm, kMtpProjection, kMtpFinalNorm}, {}},
      {{kIndexKey, kIndexWeights}, kIndexQuery},
      {{kLatentDown, kLatentUp}, {}},
      {{kDeltaQkv, kDeltaB}, kDeltaConv},
      {{kDeltaQkvz, kDeltaBa}, kDeltaConv},
      {{kDeltaConv, kDeltaALog, kDeltaDtBias, kDeltaGatedNorm, kDeltaOut}, {}},
      {{kMambaIn, kMambaConv, kMambaALog, kMambaD, kMambaDtBias, kMambaOut},
       {}},
  };
  return parts;
}

// "layer 3", "layers 0..2", "layer 0 and 3 more layers".
std::string LayersText(const std::set<int32_t>& layers) {
  const int32_t first = *layers.begin(), last = *layers.rbegin();
  const int32_t count = static_cast<int32_t>(layers.size());
  if (count == 1) return absl::StrCat("layer ", first);
  if (last - first + 1 == count)
    return absl::StrCat("layers ", first, "..", last);
  return absl::StrCat("layer ", first, " and ", count - 1, " more layers");
}

}  // namespace

void WarnOfMissingRoles(const Model& model, Diagnostics& diagnostics) {
  if (!model.architecture.family->of_file) return;
  struct Has {
    std::set<int32_t> layers;
    std::string first;  // a param's name
  };
  std::map<ParamRole, Has> has;
  for (const Param& param : model.params) {
    Has& of_role = has[param.role];
    if (of_role.first.empty()) of_role.first = param.FirstName();
    if (param.index.empty()) continue;
    for (const int32_t number : param.index[0].numbers) {
      of_role.layers.insert(param.first_layer + number);
    }
  }
  // No param of the model has it, and each model has one.
  for (const ParamRole role : {ParamRole::kEmbedding, ParamRole::kFinalNorm}) {
    if (has.contains(role)) continue;
    diagnostics.Warning(model.place,
                        "the rules give no param the role \"%s\", so that no "
                        "refit writes such a tensor; wanted one",
                        FormOf(role).word);
  }
  const auto warn = [&](const LayerPart& part, ParamRole role) {
    std::set<int32_t> without;
    ParamRole other = role;
    for (const ParamRole present : part.roles) {
      for (const int32_t layer : has[present].layers) {
        if (has[role].layers.contains(layer)) continue;
        without.insert(layer);
        other = present;
      }
    }
    if (without.empty()) return;
    diagnostics.Warning(
        model.place,

        "the rules give no param of %s the role \"%s\", beside \"%s\" "
        "(\"%s\"): no refit writes such a tensor there; wanted one, or "
        "modules of \"column\", \"row\" and \"replicated\" instead",
        LayersText(without), FormOf(role).word, FormOf(other).word,
        has[other].first);
  };
  for (const LayerPart& part : LayerParts()) {
    for (const ParamRole role : part.roles) warn(part, role);
    if (part.too.has_value()) warn(part, *part.too);
  }
}

}  // namespace refit
