// What the params of a file of rules say of each other.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/model/family.h"
#include "compiler/model/rules/reader.h"
#include "compiler/model/stacks.h"

namespace refit {
namespace {

using enum ParamRole;

// Rows of these stand in one tensor of a framework, so that their other
// dimensions are equal; of the first two of a gated MLP the rows too.
struct JoinedRoles {
  std::array<ParamRole, 3> roles;
  size_t from_dim;  // the first that is equal
};
constexpr JoinedRoles kJoined[] = {
    {{kQuery, kKey, kValue}, 1},
    {{kQueryDown, kKeyValueDown, kKeyValueDown}, 1},
    {{kMlpGate, kMlpUp, kMlpUp}, 0},
    {{kExpertGate, kExpertUp, kExpertUp}, 0},
    {{kSharedExpertGate, kSharedExpertUp, kSharedExpertUp}, 0},
    {{kIndexKey, kIndexWeights, kIndexWeights}, 1},
    {{kDeltaQkv, kDeltaZ, kDeltaZ}, 1},
    {{kDeltaB, kDeltaA, kDeltaA}, 0},
};

// As the model counts them.
std::vector<int32_t> LayersOf(const Param& param) {
  std::vector<int32_t> layers = param.index[0].numbers;
  for (int32_t& layer : layers) layer += param.first_layer;
  return layers;
}

bool IsOfNumber(char c) {
  return absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '{' ||
         c == '}';
}

// The pattern of a name, with one mark for each number and what digits stand
// beside it: equal names have the same.
std::string WithoutNumbers(std::string_view pattern) {
  std::string without;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (!IsOfNumber(pattern[i])) {
      without += pattern[i];
    } else if (i == 0 || !IsOfNumber(pattern[i - 1])) {
      without += '#';
    }
  }
  return without;
}

// Whether the numbers of layer and expert could be told apart in two ways.
bool HasNumbersSideBySide(std::string_view pattern) {
  const size_t first = pattern.find('{');
  const size_t second = pattern.rfind('{');
  return first != second &&
         std::all_of(pattern.begin() + static_cast<ptrdiff_t>(first),
                     pattern.begin() + static_cast<ptrdiff_t>(second),
                     IsOfNumber);
}

struct RoleChecker {
  void Check();
  void CheckNoNameTwice();
  void CheckRolesOfLayers();
  // Engines join the three projections of a tower's attention.
  void CheckTowerProjections();
  void CheckJoined();
  void CheckCompanions();
  void CheckStackedExperts();

  const absl::Span<const Rule> rules_;
  const Model& model_;
  const ValueReader& values_;
};

void RoleChecker::Check() {
  const int64_t errors_before = values_.diagnostics().error_count();
  const auto ok = [&] {
    return values_.diagnostics().error_count() == errors_before;
  };
  CheckNoNameTwice();
  if (ok()) CheckRolesOfLayers();
  if (!ok()) return;
  CheckTowerProjections();
  CheckJoined();
  CheckCompanions();
  CheckStackedExperts();
}

// Names are compared one by one only of stacks that could have equal ones: a
// model has millions of names.
void RoleChecker::CheckNoNameTwice() {
  std::map<std::string, int> alike;  // how many have the pattern
  for (const Rule& rule : rules_) {
    ++alike[WithoutNumbers(model_.params[rule.param].name)];
  }
  std::vector<NamedTensor> tensors;
  for (const Rule& rule : rules_) {
    const Param& param = model_.params[rule.param];
    const bool is_alone = alike.at(WithoutNumbers(param.name)) == 1 &&
                          !HasNumbersSideBySide(param.name);
    std::vector<std::string> names = {param.FirstName()};
    if (!is_alone) names = MemberNames(param);
    for (std::string& name : names) {
      tensors.push_back({.name = std::move(name),
                         .shape = {},
                         .dtype = DType::kUnspecified,
                         .place = values_.PlaceOf(*rule.value)});
    }
  }
  CheckNames(tensors, values_.diagnostics());
}

// Each layer has one param of a role; of plain modules any number.
void RoleChecker::CheckRolesOfLayers() {
  std::map<std::pair<ParamRole, int32_t>, const Rule*> seen;
  for (const Rule& rule : rules_) {
    const Param& param = model_.params[rule.param];
    if (IsPlainModule(param.role) || IsTower(param.role)) continue;
    std::vector<int32_t> layers = {-1};
    if (!param.index.empty()) layers = LayersOf(param);
    for (const int32_t layer : layers) {
      if (FormOf(param.role).of_prediction &&
          layer < model_.architecture.layers) {
        values_.Error(
            *rule.value,

            "params[%s] is the role %s of layer %d, which is no layer of "
            "multi-token prediction; wanted \"layers\": \"mtp\"",
            Quoted(param.name), FormOf(param.role).word, layer);
        break;
      }
      const auto [it, is_new] = seen.try_emplace({param.role, layer}, &rule);
      if (is_new) continue;
      values_.Error(*rule.value,

                    "params[%s] is the role %s%s a second time, after %s; "
                    "wanted each once (column, row, replicated, first_stage "
                    "and last_stage may stand often)",
                    Quoted(param.name), FormOf(param.role).word,
                    layer < 0 ? "" : absl::StrCat(" of layer ", layer),
                    Quoted(model_.params[it->second->param].name));
      break;
    }
  }
}

void RoleChecker::CheckTowerProjections() {
  constexpr std::string_view kProjections[] = {"q_proj", "k_proj", "v_proj"};
  for (const Rule& rule : rules_) {
    const Param& param = model_.params[rule.param];
    const std::string_view module = ModuleOf(param.name);
    if (!IsTower(param.role) || param.index.empty() ||
        std::find(std::begin(kProjections), std::end(kProjections), module) ==
            std::end(kProjections)) {
      continue;
    }
    for (const std::string_view beside : kProjections) {
      const std::string name = WithModule(param.name, beside);
      const bool fits =
          param.role == kTowerColumn &&
          std::any_of(model_.params.begin(), model_.params.end(),
                      [&](const Param& other) {
                        return other.name == name && other.role == param.role &&
                               other.index == param.index &&
                               other.shape.size() == param.shape.size() &&
                               std::equal(other.shape.begin() + 1,
                                          other.shape.end(),
                                          param.shape.begin() + 1);
                      });
      if (fits) continue;
      values_.Error(*rule.value,
                    "engines join parameter %s with %s; wanted both of role "
                    "tower_column, with equal columns and layers",
                    Quoted(param.name), Quoted(name));
      return;
    }
  }
}

void RoleChecker::CheckJoined() {
  for (const JoinedRoles& together : kJoined) {
    std::map<int32_t, const Rule*> first;
    for (const ParamRole role : together.roles) {
      for (const Rule& rule : rules_) {
        const Param& param = model_.params[rule.param];
        if (param.role != role) continue;
        for (const int32_t layer : LayersOf(param)) {
          const auto [it, is_new] = first.try_emplace(layer, &rule);
          const Param& other = model_.params[it->second->param];
          const auto begin = static_cast<ptrdiff_t>(together.from_dim);
          const Dims shape = param.StoredShape();
          const Dims of_other = other.StoredShape();
          if (std::equal(shape.begin() + begin, shape.end(),
                         of_other.begin() + begin, of_other.end())) {
            continue;
          }
          values_.Error(*rule.value,

                        "parameter %s has %d x %d elements, and %s, which "
                        "frameworks join with it, %d x %d; wanted equal %s",
                        Quoted(param.name), shape[0], shape[1],
                        Quoted(other.name), of_other[0], of_other[1],
                        together.from_dim == 0 ? "shapes" : "columns");
          return;
        }
      }
    }
  }
}

// Reports a layer that lacks what all with a role of it have.
void RoleChecker::CheckCompanions() {
  const bool is_latent = model_.architecture.latent.has_value();
  const LayerPart parts[] = {
      {{kQueryHeadsNorm}, kQuery},
      {{kKeyHeadsNorm}, kKey},
      {{kAttentionOutput}, is_latent ? kKeyValueUp : kQuery},
      {{kQueryBias}, kQuery},
      {{kMlpNorm}, {}, kMlpInputNorm},
      {{kStackedExpertGateUp, kStackedExpertDown}},
      {{kFusedExpertGateUp, kFusedExpertDown}},
      {{kKeyValueDown}, {}, kQueryDown},
      {{kIndexKey, kIndexWeights}},
      {{kDeltaQkv, kDeltaZ}},
      {{kDeltaB, kDeltaA}},
  };
  for (const MissingRole& missing : MissingRoles(model_, parts)) {
    const auto* const rule =
        std::find_if(rules_.begin(), rules_.end(), [&](const Rule& candidate) {
          return &model_.params[candidate.param] == missing.param;
        });
    values_.Error(*rule->value,
                  "layer %d has the role %s and no %s; wanted both",
                  *missing.layers.begin(), FormOf(missing.beside).word,
                  FormOf(missing.role).word);
  }
}

// Experts of one tensor. Of stacked ones, gate and up rows are as many as the
// columns of down; of fused ones, gate and up columns as many as the rows. What
// stands before ".experts." names the engines' own tensors.
void RoleChecker::CheckStackedExperts() {
  const auto down = std::find_if(model_.params.begin(), model_.params.end(),
                                 [](const Param& param) {
                                   return param.role == kStackedExpertDown ||
                                          param.role == kFusedExpertDown;
                                 });
  if (down == model_.params.end()) return;
  const bool fused = down->role == kFusedExpertDown;
  const int64_t experts = down->shape[0];
  const int64_t hidden = down->shape[fused ? 2 : 1];
  const int64_t gate_and_up = 2 * down->shape[fused ? 1 : 2];
  const std::map<ParamRole, Dims> wanted = {
      {kStackedExpertGateUp, {experts, gate_and_up, hidden}},
      {kFusedExpertGateUp, {experts, hidden, gate_and_up}},
      {kFusedExpertGateThenUp, {experts, hidden, gate_and_up}},
      {kFusedExpertGateUpBias, {experts, gate_and_up}},
      {kStackedExpertDown, down->shape},
      {kFusedExpertDown, down->shape},
      {kFusedExpertDownBias, {experts, hidden}},
  };
  for (const Rule& rule : rules_) {
    const Param& param = model_.params[rule.param];
    if (param.role == kExpertUp) {
      values_.Error(*rule.value,
                    "experts one by one beside stacked ones; wanted one form");
      return;
    }
    const auto of_role = wanted.find(param.role);
    if (of_role == wanted.end()) continue;
    if (param.name.find(".experts.") == std::string::npos) {
      values_.Error(*rule.value,
                    "parameter %s holds all experts of a layer; wanted "
                    "\".experts.\" in its name",
                    Quoted(param.name));
      return;
    }
    const Dims found = param.StoredShape();
    if (found == of_role->second) continue;
    values_.Error(
        *rule.value,
        "parameter %s has the shape [%s]; wanted [%s], as %s has [%s]",
        Quoted(param.name), absl::StrJoin(found, ", "),
        absl::StrJoin(of_role->second, ", "), Quoted(down->name),
        absl::StrJoin(down->shape, ", "));
    return;
  }
}

}  // namespace

void CheckRules(absl::Span<const Rule> rules, const Model& model,
                const ValueReader& values) {
  RoleChecker{rules, model, values}.Check();
}

}  // namespace refit
