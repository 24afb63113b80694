// Roles that a file of rules leaves out of a layer that has others of the same
// part.
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "compiler/model/family.h"
#include "compiler/model/model.h"
#include "compiler/model/rules/reader.h"
#include "llvm/ADT/STLExtras.h"

namespace refit {
namespace {

// Roles that make a part of a layer together: one of them alone is a mistake in
// a file of rules. What a part may lack is not here.
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

// Roles whose params layouts by role put in one tensor, or cut alike.
const std::vector<LayerPart>& JoinedParts() {
  using enum ParamRole;
  static const auto& parts = *new std::vector<LayerPart>{
      {{kQuery, kKey, kValue}, {}},
      {{kQueryBias, kKeyBias, kValueBias}, {}},
      {{kMlpUp, kMlpDown}, {}, kMlpGate},
      {{kExpertUp, kExpertDown}, {}, kExpertGate},
      {{kSharedExpertUp, kSharedExpertDown}, {}, kSharedExpertGate},
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

// "param of layer 3 the role "value", beside "key" ("k_proj.weight")".
std::string TextOf(const MissingRole& missing) {
  return absl::StrFormat("param of %s the role \"%s\", beside \"%s\" (\"%s\")",
                         LayersText(missing.layers), FormOf(missing.role).word,
                         FormOf(missing.beside).word,
                         missing.param->FirstName());
}

}  // namespace

std::vector<MissingRole> MissingRoles(const Model& model,
                                      absl::Span<const LayerPart> parts) {
  std::map<ParamRole, std::map<int32_t, const Param*>> has;
  for (const Param& param : model.params) {
    // The two stand for each other.
    const ParamRole role = param.role == ParamRole::kFusedExpertGateThenUp
                               ? ParamRole::kFusedExpertGateUp
                               : param.role;
    if (param.index.empty()) continue;
    for (const int32_t number : param.index[0].numbers) {
      has[role].try_emplace(param.first_layer + number, &param);
    }
  }
  std::vector<MissingRole> missing;
  const auto look = [&](absl::Span<const ParamRole> present, ParamRole role) {
    MissingRole found = {.role = role};
    for (const ParamRole beside : present) {
      for (const auto& [layer, param] : has[beside]) {
        if (has[role].contains(layer)) continue;
        if (found.layers.empty() || found.beside != beside) found.param = param;
        found.layers.insert(layer);
        found.beside = beside;
      }
    }
    if (!found.layers.empty()) missing.push_back(std::move(found));
  };
  for (const LayerPart& part : parts) {
    for (const ParamRole role : part.roles) look(part.roles, role);
    if (part.too.has_value()) look(part.roles, *part.too);
    if (!part.maybe.has_value() || has[*part.maybe].empty()) continue;
    look(part.roles, *part.maybe);
    for (const ParamRole role : part.roles) look({*part.maybe}, role);
  }
  return missing;
}

void WarnOfMissingRoles(const Model& model, Diagnostics& diagnostics) {
  if (!model.architecture.family->of_file) return;
  // Each model has one.
  for (const ParamRole role : {ParamRole::kEmbedding, ParamRole::kFinalNorm}) {
    if (llvm::any_of(model.params,
                     [&](const Param& param) { return param.role == role; })) {
      continue;
    }
    diagnostics.Warning(model.place,
                        "the rules give no param the role \"%s\", so that no "
                        "refit writes such a tensor; wanted one",
                        FormOf(role).word);
  }
  for (const MissingRole& missing : MissingRoles(model, LayerParts())) {
    diagnostics.Warning(
        model.place,
        "the rules give no %s: no refit writes such a tensor there; wanted "
        "one, or modules of \"column\", \"row\" and \"replicated\" instead",
        TextOf(missing));
  }
}

bool CheckMissingRoles(const Model& model, Diagnostics& diagnostics) {
  const std::vector<MissingRole> missing = MissingRoles(model, JoinedParts());
  for (const MissingRole& of : missing) {
    diagnostics.Error(
        model.place,
        "the model gives no %s: frameworks expect them together; wanted one",
        TextOf(of));
  }
  return missing.empty();
}

}  // namespace refit
