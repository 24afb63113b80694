#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "compiler/job/keys.h"
#include "compiler/model/rules/reader.h"
#include "compiler/model/stacks.h"
#include "llvm/ADT/STLExtras.h"

namespace refit {
namespace {

using enum ParamRole;

constexpr std::string_view kLayer = "{layer}";
constexpr std::string_view kExpert = "{expert}";
// A layer of multi-token prediction, counted from 0.
constexpr std::string_view kPrediction = "{mtp}";

// What stands in place of a role of attention by heads where attention is
// latent; "": the role is none of these.
std::string_view InPlaceOf(ParamRole role) {
  if (role == kQuery) return "latent_query";
  if (role == kKey || role == kValue) {
    return "key_value_down and key_value_up";
  }
  constexpr ParamRole kNone[] = {kQueryBias, kKeyBias, kValueBias,
                                 kQueryHeadsNorm, kKeyHeadsNorm};
  return llvm::is_contained(kNone, role) ? "no such role" : "";
}

}  // namespace

void RulesReader::CheckKindOf(ParamRole role, const JsonValue& value,
                              const std::string& path) {
  const Architecture& a = architecture();
  const std::string_view word = FormOf(role).word;
  const bool is_grouped = a.output_groups > 0;
  const bool may_be_grouped =
      is_grouped && role != kLatentQuery && role != kKeyValueUp;
  const int64_t query_rank = a.latent.has_value() ? a.latent->query_rank : -1;
  const std::string_view instead = InPlaceOf(role);
  struct Mistake {
    bool is_made;
    std::string found;
    std::string wanted;
  };
  const Mistake mistakes[] = {
      {is_tower_ && !IsTower(role), "a tower has roles of its own",
       "a role that begins with \"tower_\""},
      {!is_tower_ && IsTower(role),
       "only the params of \"tower\" have such roles", "another role"},
      {word.starts_with("mamba_") && !a.mamba.has_value(),
       "the model has no Mamba mixers", "\"mamba_heads\" in sizes"},
      {word.starts_with("delta_") && !a.delta.has_value(),
       "the model has no delta nets", "\"delta_key_heads\" in sizes"},
      {(role == kAttentionOutputDown || role == kAttentionOutputUp) &&
           !is_grouped,
       "the model's heads have no groups", "\"output_groups\" in sizes"},
      {IsLatent(role) && !a.latent.has_value() && !may_be_grouped,
       "the model has no latent attention", "\"key_value_rank\" in sizes"},
      {!instead.empty() && a.latent.has_value(),
       "sizes.key_value_rank makes attention latent",
       absl::StrCat(std::string(instead), ", or no such size")},
      {role == kLatentQuery && query_rank > 0,
       absl::StrCat("sizes.query_rank is ", query_rank),
       "query_down and query_up, or no such size"},
      {(role == kQueryDown || role == kQueryUp) && query_rank == 0,
       "sizes.query_rank is 0", "latent_query, or the rank of queries"},
  };
  for (const auto& [is_made, found, wanted] : mistakes) {
    if (!is_made) continue;
    values_.Error(value, "%s is %s, and %s; wanted %s", path, word, found,
                  wanted);
    return;
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
    values_.Error(
        *value,
        "params give this config.json no parameter; wanted at least one");
  }
}

bool RulesReader::ReadEntry(ParamEntry& entry, Param& param) {
  ObjectReader& reader = entry.reader;
  const JsonValue* name = reader.Require("name", "a string");
  const JsonValue* shape = reader.Require("shape", "an array");
  const JsonValue* role = reader.Require("role", "a role");
  entry.layers = reader.Find("layers");
  entry.condition = reader.Find("if");
  Located<DType> dtype = {.value = dtype_};
  ReadMember(reader, {.name = "dtype"}, dtype);
  Located<bool> rotary_pairs;
  reader.Read("rotary_pairs", {}, rotary_pairs);
  reader.RejectOtherKeys();
  if (name == nullptr || shape == nullptr || role == nullptr) return false;
  entry.name = name;
  entry.shape = shape;
  entry.role = role;
  entry.rotary_pairs = rotary_pairs.value;
  const std::string* name_text = values_.String(*name, reader.PathOf("name"));
  const std::string* role_text = values_.String(*role, reader.PathOf("role"));
  entry.extents =
      values_.Array(*shape, reader.PathOf("shape"), "an array of sizes");
  if (name_text == nullptr || role_text == nullptr ||
      entry.extents == nullptr) {
    return false;
  }
  names_.push_back(*name_text);
  param.name = *name_text;
  const std::optional<ParamRole> known = RoleOf(*role_text);
  if (!known.has_value()) {
    values_.Error(*role, "%s is %s%s", reader.PathOf("role"),
                  Quoted(*role_text), Hint(*role_text, RoleWords()));
    return false;
  }
  param.role = *known;
  param.dtype =
      IsAlwaysFp32(param.role) && !dtype.given ? DType::kFp32 : dtype.value;
  return true;
}

// The marks in a name are numbers of the stack's index from here on.
bool RulesReader::ReadName(const ParamEntry& entry, Param& param,
                           NumbersOfName& numbers) {
  const std::string whole = param.name;
  const auto replace = [&](std::string_view mark, std::string_view number) {
    const size_t at = param.name.find(mark);
    if (at == std::string::npos) return false;
    param.name.replace(at, mark.size(), number);
    return true;
  };
  // Of each mark one; what is left has no braces.
  for (const std::string_view mark : {kLayer, kPrediction, kExpert}) {
    replace(mark, "");
  }
  if (param.name.find_first_of("{}") != std::string::npos) {
    values_.Error(
        *entry.name,
        "%s is %s; wanted no braces but one {layer} or {mtp} and one {expert}",
        entry.reader.PathOf("name"), Quoted(whole));
    return false;
  }
  param.name = whole;
  const RoleForm& form = FormOf(param.role);
  const bool counts_anew = replace(kPrediction, "{0}");
  numbers.of_layer = counts_anew || replace(kLayer, "{0}");
  numbers.of_expert = replace(kExpert, "{1}");
  // Where names say nothing of its number, there is one prediction at most.
  numbers.is_only_prediction = form.of_prediction && !numbers.of_layer;
  numbers.is_prediction = counts_anew || numbers.is_only_prediction;
  if (numbers.is_prediction) {
    names_predictions_ = true;
    if (!model_.mtp) {
      model_.stored_beside.push_back(
          absl::StrReplaceAll(param.name, {{"{0}", "*"}, {"{1}", "*"}}));
    }
  }
  // A tower has numbered parts and others, of the same roles.
  const bool layer_wanted =
      form.scope == RoleScope::kTower
          ? numbers.of_layer
          : form.scope != RoleScope::kModel && !numbers.is_only_prediction;
  const bool expert_wanted = form.scope == RoleScope::kExpert;
  if (numbers.of_layer == layer_wanted && numbers.of_expert == expert_wanted) {
    return true;
  }
  values_.Error(*entry.name, "%s is %s; the role %s wants a name with %s",
                entry.reader.PathOf("name"), Quoted(whole), form.word,
                expert_wanted  ? "{layer} and {expert}"
                : layer_wanted ? "{layer} and no {expert}"
                               : "neither {layer} nor {expert}");
  return false;
}

bool RulesReader::ReadLayers(const ParamEntry& entry,
                             const NumbersOfName& numbers, Param& param,
                             bool& present) {
  if (numbers.is_prediction) {
    param.first_layer = static_cast<int32_t>(architecture().layers);
    param.index.push_back(Consecutive(0, architecture().mtp_layers));
    present &= architecture().mtp_layers > 0;
  } else if (numbers.of_layer) {
    param.index.push_back(Consecutive(0, all_layers()));
  }
  if (entry.layers == nullptr) return true;
  const std::string path = entry.reader.PathOf("layers");
  const std::string* set =
      values_.String(*entry.layers, path, "a set of layers");
  if (set == nullptr) return false;
  const auto found = layer_sets_.find(*set);
  if (found == layer_sets_.end()) {
    std::vector<std::string_view> sets;
    for (const auto& [word, layers] : layer_sets_) sets.push_back(word);
    values_.Error(
        *entry.layers, "%s is %s, which is no set of \"layers\"%s", path,
        Quoted(*set),
        sets.empty() ? "; wanted one of them defined there" : Hint(*set, sets));
    return false;
  }
  if (param.index.empty()) {
    values_.Error(*entry.layers,
                  "%s is of a parameter without {layer}; wanted no such key",
                  path);
    return false;
  }
  param.index[0].numbers = found->second;
  present &= !found->second.empty();
  for (int32_t& layer : param.index[0].numbers) layer -= param.first_layer;
  if (!present || param.index[0].numbers[0] >= 0) return true;
  values_.Error(*entry.layers,
                "%s is %s, which has layers before those of multi-token "
                "prediction; wanted a set \"from\": \"layers\"",
                path, Quoted(*set));
  return false;
}

bool RulesReader::ReadShape(const ParamEntry& entry, Param& param) {
  const std::string path = entry.reader.PathOf("shape");
  bool has_shape = has_sizes_;
  for (size_t i = 0; i < entry.extents->size(); ++i) {
    const std::optional<int64_t> extent =
        Number((*entry.extents)[i], absl::StrFormat("%s[%d]", path, i),
               {.min = 1, .max = kExtentMax});
    param.shape.push_back(extent.value_or(1));
    has_shape &= extent.has_value();
  }
  return has_shape;
}

// Gives a param whose rows or columns stand in pairs a dimension for these.
bool RulesReader::SplitPairs(const ParamEntry& entry, Param& param) {
  if (param.role == kFusedExpertGateUp ||
      param.role == kFusedExpertGateUpBias) {
    if (param.shape.empty() || param.shape.back() % 2 != 0) {
      values_.Error(*entry.shape,
                    "%s: gate and up alternate; wanted an even last size",
                    entry.reader.PathOf("shape"));
      return false;
    }
    param.shape.back() /= 2;
    param.shape.push_back(2);
    param.split = Split::kLastInPairs;
  }
  if (!entry.rotary_pairs) return true;
  if (param.role != kQuery && param.role != kKey) {
    values_.Error(*entry.role,
                  "%s is %s, which has no rotary pairs; wanted query or key",
                  entry.reader.PathOf("role"), FormOf(param.role).word);
    return false;
  }
  const int64_t head_dim = architecture().head_dim;
  if (head_dim % 2 != 0) {
    if (!reported_.insert("head_dim").second) return false;
    config_.Error("head_dim",
                  "head_dim %d is odd; wanted an even one, of rotary pairs",
                  head_dim);
    return false;
  }
  param.shape[0] /= head_dim;
  param.shape.insert(param.shape.begin() + 1, {head_dim / 2, 2});
  param.split = Split::kRowsInHeadPairs;
  return true;
}

void RulesReader::ReadParam(const JsonValue& value, const std::string& path) {
  if (!values_.IsObject(value, path)) return;
  const int64_t errors_before = diagnostics().error_count();
  const auto ok = [&] { return diagnostics().error_count() == errors_before; };
  ParamEntry entry(values_, value, path);
  Param param;
  if (!ReadEntry(entry, param)) return;
  const std::string name = param.name;
  // A param that this config does not have needs no sizes.
  bool present = true;
  if (entry.condition != nullptr) {
    present = Number(*entry.condition, entry.reader.PathOf("if"),
                     {.min = 0, .max = kExtentMax})
                  .value_or(1) != 0;
  }
  NumbersOfName numbers;
  if (!ReadName(entry, param, numbers)) return;
  if (!ReadLayers(entry, numbers, param, present) || !present) return;
  if (numbers.is_only_prediction && param.index[0].numbers.size() > 1) {
    values_.Error(*entry.name,
                  "%s is %s, and the model has %d layers of multi-token "
                  "prediction; wanted {mtp} or {layer} in it",
                  entry.reader.PathOf("name"), Quoted(name),
                  param.index[0].numbers.size());
    return;
  }
  if (is_refused_ || !ReadShape(entry, param)) return;
  if (numbers.of_expert) {
    if (architecture().experts == 0) {
      values_.Error(*entry.name,
                    "%s has {expert}, and the model has no experts; wanted "
                    "\"experts\" in sizes",
                    entry.reader.PathOf("name"));
      return;
    }
    param.index.push_back(Consecutive(0, architecture().experts));
  }
  CheckKindOf(param.role, *entry.role, entry.reader.PathOf("role"));
  if (!ok()) return;
  CheckStackSize(param, values_.PlaceOf(value), diagnostics());
  if (!ok() || !SplitPairs(entry, param)) return;
  const std::string mistake = ShapeMistake(param, architecture());
  if (!mistake.empty()) {
    values_.Error(*entry.shape, "%s: parameter %s %s",
                  entry.reader.PathOf("shape"), Quoted(name), mistake);
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
