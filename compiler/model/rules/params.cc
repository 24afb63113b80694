#include <algorithm>

#include "absl/strings/str_replace.h"
#include "compiler/job/keys.h"
#include "compiler/model/role_shape.h"
#include "compiler/model/rules/reader.h"
#include "compiler/model/stacks.h"

namespace refit {
namespace {

using enum ParamRole;

constexpr std::string_view kLayer = "{layer}";
constexpr std::string_view kExpert = "{expert}";
// A layer of multi-token prediction, counted from 0.
constexpr std::string_view kPrediction = "{mtp}";

constexpr ParamRole kLatentRoles[] = {
    kLatentQuery,  kQueryDown,        kQueryDownNorm, kQueryUp,
    kKeyValueDown, kKeyValueDownNorm, kKeyValueUp};

// What stands in place of a role of attention by heads where attention is
// latent; "": the role is none of these.
std::string_view InPlaceOf(ParamRole role) {
  switch (role) {
    case kQuery:
      return "latent_query";
    case kKey:
    case kValue:
      return "key_value_down and key_value_up";
    case kQueryBias:
    case kKeyBias:
    case kValueBias:
    case kQueryHeadsNorm:
    case kKeyHeadsNorm:
      return "no such role";
    default:
      return "";
  }
}

}  // namespace

void RulesReader::CheckKindOf(ParamRole role, const JsonValue& value,
                              const std::string& path) {
  const auto report = [&](std::string_view found, std::string_view wanted) {
    values_.Error(value, "%s is %s, and %s; wanted %s", path, FormOf(role).word,
                  found, wanted);
  };
  const std::optional<LatentAttention>& latent = architecture().latent;
  if (IsTower(role) != is_tower_) {
    return report(
        is_tower_ ? "a tower has roles of its own"
                  : "only the params of \"tower\" have such roles",
        is_tower_ ? "a role that begins with \"tower_\"" : "another role");
  }
  if (FormOf(role).word.starts_with("mamba_") &&
      !architecture().mamba.has_value()) {
    return report("the model has no Mamba mixers", "\"mamba_heads\" in sizes");
  }
  if (FormOf(role).word.starts_with("delta_") &&
      !architecture().delta.has_value()) {
    return report("the model has no delta nets",
                  "\"delta_key_heads\" in sizes");
  }
  const bool is_latent =
      std::find(std::begin(kLatentRoles), std::end(kLatentRoles), role) !=
      std::end(kLatentRoles);
  const bool is_grouped = architecture().output_groups > 0;
  if ((role == kAttentionOutputDown || role == kAttentionOutputUp) &&
      !is_grouped) {
    return report("the model's heads have no groups",
                  "\"output_groups\" in sizes");
  }
  if (is_latent && !latent.has_value()) {
    if (is_grouped && role != kLatentQuery && role != kKeyValueUp) return;
    return report("the model has no latent attention",
                  "\"key_value_rank\" in sizes");
  }
  const std::string_view instead = InPlaceOf(role);
  if (!instead.empty() && latent.has_value()) {
    return report("sizes.key_value_rank makes attention latent",
                  absl::StrFormat("%s, or no such size", instead));
  }
  if (role == kLatentQuery && latent->query_rank > 0) {
    return report(absl::StrFormat("sizes.query_rank is %d", latent->query_rank),
                  "query_down and query_up, or no such size");
  }
  if ((role == kQueryDown || role == kQueryUp) && latent->query_rank == 0) {
    return report("sizes.query_rank is 0",
                  "latent_query, or the rank of queries");
  }
}

void RulesReader::ReadParams() {
  const JsonValue* value = reader_.Require("params", "an array of parameters");
  if (value == nullptr) return;
  const JsonValue::Array* array =
      values_.Array(*value, "params", "an array of parameters");
  if (array == nullptr) return;
  if (!is_compiled_in_) model_.place = values_.PlaceOf(*value);
  for (size_t i = 0; i < array->size(); ++i) {
    ReadParam((*array)[i], reader_.PathOf(absl::StrFormat("params[%d]", i)));
  }
  if (architecture().tied && !head_.empty()) {
    const auto embedding = std::find_if(
        model_.params.begin(), model_.params.end(),
        [](const Param& param) { return param.role == kEmbedding; });
    if (embedding == model_.params.end()) {
      values_.Error(*value,
                    "params have no embedding, which the tied head is; wanted "
                    "one of role embedding");
      return;
    }
    model_.skips.push_back(
        {.name = head_,
         .reason = SkipReason::kTied,
         .detail = absl::StrFormat("tie_word_embeddings: the head is %s",
                                   embedding->name)});
  }
  if (diagnostics().error_count() == 0 && model_.params.empty()) {
    values_.Error(*value,
                  "params give this config.json no parameter; wanted at least "
                  "one");
  }
}

void RulesReader::ReadParam(const JsonValue& value, const std::string& path) {
  if (!values_.IsObject(value, path)) return;
  const int64_t errors_before = diagnostics().error_count();
  ObjectReader reader(values_, value, path);
  const JsonValue* name = reader.Require("name", "a string");
  const JsonValue* shape = reader.Require("shape", "an array");
  const JsonValue* role = reader.Require("role", "a role");
  const JsonValue* layers = reader.Find("layers");
  const JsonValue* condition = reader.Find("if");
  Located<DType> dtype = {.value = dtype_};
  ReadMember(reader, {.name = "dtype"}, dtype);
  Located<bool> rotary_pairs;
  reader.Read("rotary_pairs", {}, rotary_pairs);
  reader.RejectOtherKeys();
  if (name == nullptr || shape == nullptr || role == nullptr) return;

  Param param;
  param.dtype = dtype.value;
  const std::string* name_text = values_.String(*name, reader.PathOf("name"));
  const std::string* role_text = values_.String(*role, reader.PathOf("role"));
  const JsonValue::Array* extents =
      values_.Array(*shape, reader.PathOf("shape"), "an array of sizes");
  if (name_text == nullptr || role_text == nullptr || extents == nullptr)
    return;
  names_.push_back(*name_text);

  const std::optional<ParamRole> known = RoleOf(*role_text);
  if (!known.has_value()) {
    values_.Error(*role, "%s is %s%s", reader.PathOf("role"),
                  Quoted(*role_text), Hint(*role_text, RoleWords()));
    return;
  }
  param.role = *known;
  if (IsAlwaysFp32(param.role) && !dtype.given) {
    param.dtype = DType::kFp32;
  }

  // A param that this config does not have needs no sizes.
  bool present = true;
  if (condition != nullptr) {
    present =
        Number(*condition, reader.PathOf("if"), {.min = 0, .max = kExtentMax})
            .value_or(1) != 0;
  }

  param.name = *name_text;
  const auto replace = [&](std::string_view mark, std::string_view number) {
    const size_t at = param.name.find(mark);
    if (at == std::string::npos) return false;
    param.name.replace(at, mark.size(), number);
    return true;
  };
  const std::string without = [&] {
    std::string rest = *name_text;
    for (const std::string_view mark : {kLayer, kPrediction, kExpert}) {
      const size_t at = rest.find(mark);
      if (at != std::string::npos) rest.erase(at, mark.size());
    }
    return rest;
  }();
  if (without.find_first_of("{}") != std::string::npos) {
    values_.Error(*name,
                  "%s is %s; wanted no braces but one {layer} "
                  "or {mtp} and one {expert}",
                  reader.PathOf("name"), Quoted(*name_text));
    return;
  }
  const RoleForm& form = FormOf(param.role);
  const bool counts_anew = replace(kPrediction, "{0}");
  const bool of_layer = counts_anew || replace(kLayer, "{0}");
  const bool of_expert = replace(kExpert, "{1}");
  // Where names say nothing of its number, there is one prediction at most.
  const bool is_only_prediction = form.of_prediction && !of_layer;
  const bool is_named_prediction = counts_anew || is_only_prediction;
  if (is_named_prediction) {
    names_predictions_ = true;
    if (!model_.mtp) {
      model_.stored_beside.push_back(
          absl::StrReplaceAll(param.name, {{"{0}", "*"}, {"{1}", "*"}}));
    }
  }
  // A tower has numbered parts and others, of the same roles.
  const bool layer_wanted =
      form.scope == RoleScope::kTower
          ? of_layer
          : form.scope != RoleScope::kModel && !is_only_prediction;
  const bool expert_wanted = form.scope == RoleScope::kExpert;
  if (of_layer != layer_wanted || of_expert != expert_wanted) {
    values_.Error(*name, "%s is %s; the role %s wants a name with %s",
                  reader.PathOf("name"), Quoted(*name_text), *role_text,
                  expert_wanted  ? "{layer} and {expert}"
                  : layer_wanted ? "{layer} and no {expert}"
                                 : "neither {layer} nor {expert}");
    return;
  }
  if (is_named_prediction) {
    param.first_layer = static_cast<int32_t>(architecture().layers);
    param.index.push_back(Consecutive(0, architecture().mtp_layers));
    present &= architecture().mtp_layers > 0;
  } else if (of_layer) {
    param.index.push_back(Consecutive(0, all_layers()));
  }
  if (layers != nullptr) {
    const std::string* set =
        values_.String(*layers, reader.PathOf("layers"), "a set of layers");
    if (set == nullptr) return;
    const auto found = layer_sets_.find(*set);
    if (found == layer_sets_.end()) {
      std::vector<std::string_view> sets;
      for (const auto& [word, numbers] : layer_sets_) sets.push_back(word);
      values_.Error(*layers, "%s is %s, which is no set of \"layers\"%s",
                    reader.PathOf("layers"), Quoted(*set),
                    sets.empty() ? "; wanted one of them defined there"
                                 : Hint(*set, sets));
      return;
    }
    if (param.index.empty()) {
      values_.Error(*layers,
                    "%s is of a parameter without "
                    "{layer}; wanted no such key",
                    reader.PathOf("layers"));
      return;
    }
    param.index[0].numbers = found->second;
    present &= !found->second.empty();
    for (int32_t& layer : param.index[0].numbers) layer -= param.first_layer;
    if (present && param.index[0].numbers[0] < 0) {
      values_.Error(*layers,
                    "%s is %s, which has layers before those "
                    "of multi-token prediction; wanted a set "
                    "\"from\": \"layers\"",
                    reader.PathOf("layers"), Quoted(*set));
      return;
    }
  }
  if (!present) return;
  if (is_only_prediction && param.index[0].numbers.size() > 1) {
    values_.Error(*name,
                  "%s is %s, and the model has %d layers of "
                  "multi-token prediction; wanted {mtp} or "
                  "{layer} in it",
                  reader.PathOf("name"), Quoted(*name_text),
                  param.index[0].numbers.size());
    return;
  }
  if (is_refused_) return;
  bool has_shape = has_sizes_;
  for (size_t i = 0; i < extents->size(); ++i) {
    const std::optional<int64_t> extent = Number(
        (*extents)[i], absl::StrFormat("%s[%d]", reader.PathOf("shape"), i),
        {.min = 1, .max = kExtentMax});
    param.shape.push_back(extent.value_or(1));
    has_shape &= extent.has_value();
  }
  if (!has_shape) return;
  if (of_expert) {
    if (architecture().experts == 0) {
      values_.Error(*name,
                    "%s has {expert}, and the model has "
                    "no experts; wanted \"experts\" in "
                    "sizes",
                    reader.PathOf("name"));
      return;
    }
    param.index.push_back(Consecutive(0, architecture().experts));
  }
  CheckKindOf(param.role, *role, reader.PathOf("role"));
  if (diagnostics().error_count() != errors_before) return;
  CheckStackSize(param, values_.PlaceOf(value), diagnostics());
  if (diagnostics().error_count() != errors_before) return;
  if (param.role == kFusedExpertGateUp ||
      param.role == kFusedExpertGateUpBias) {
    if (param.shape.empty() || param.shape.back() % 2 != 0) {
      values_.Error(*shape,
                    "%s: gate and up alternate; wanted "
                    "an even last size",
                    reader.PathOf("shape"));
      return;
    }
    param.shape.back() /= 2;
    param.shape.push_back(2);
    param.split = Split::kLastInPairs;
  }
  if (rotary_pairs.value) {
    if (param.role != kQuery && param.role != kKey) {
      values_.Error(*role,
                    "%s is %s, which has no rotary "
                    "pairs; wanted query or key",
                    reader.PathOf("role"), *role_text);
      return;
    }
    const int64_t head_dim = architecture().head_dim;
    if (head_dim % 2 != 0) {
      if (!reported_.insert("head_dim").second) return;
      config_.Error("head_dim",
                    "head_dim %d is odd; wanted an even one, "
                    "of rotary pairs",
                    head_dim);
      return;
    }
    param.shape[0] /= head_dim;
    param.shape.insert(param.shape.begin() + 1, {head_dim / 2, 2});
    param.split = Split::kRowsInHeadPairs;
  }
  const std::string mistake = ShapeMistake(param, architecture());
  if (!mistake.empty()) {
    values_.Error(*shape, "%s: parameter %s %s", reader.PathOf("shape"),
                  Quoted(*name_text), mistake);
    return;
  }
  if (param.role == kOutputHead && architecture().tied) {
    head_ = param.name;
    return;
  }
  rules_.push_back({.param = model_.params.size(), .value = &value});
  model_.params.push_back(std::move(param));
}

void RulesReader::ReadMtpLayers() {
  const int64_t layers = mtp_layers_;
  const auto has_role = [](const Param& param) {
    return param.role == kMtpProjection;
  };
  if (layers == 0) return;
  if (model_.mtp) {
    own_->family.knows_mtp =
        std::any_of(model_.params.begin(), model_.params.end(), has_role);
    if (!own_->family.knows_mtp) architecture().mtp_layers = 0;
    return;
  }
  if (names_predictions_) return;
  const auto of_layer = std::find_if(
      model_.params.begin(), model_.params.end(), [](const Param& param) {
        return !param.index.empty() && !IsTower(param.role);
      });
  if (of_layer == model_.params.end()) return;
  const std::string prefix =
      of_layer->name.substr(0, of_layer->name.find("{0}"));
  for (int64_t i = 0; i < layers; ++i) {
    model_.stored_beside.push_back(
        absl::StrFormat("%s%d.*", prefix, architecture().layers + i));
  }
}

}  // namespace refit
