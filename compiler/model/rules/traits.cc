#include <algorithm>

#include "absl/strings/str_replace.h"
#include "compiler/model/rules/reader.h"

namespace refit {
template <typename T>
struct TraitWord {
  std::string_view word;
  T value;
};
namespace {

constexpr std::pair<std::string_view, bool VllmTraits::*> kVllmFlags[] = {
    {"output_bias", &VllmTraits::output_bias},
    {"fp32_router", &VllmTraits::fp32_router},
    {"cuts_shared_experts_of_token_parts",
     &VllmTraits::cuts_shared_experts_of_token_parts},
    {"token_parts_on_one_stage", &VllmTraits::token_parts_on_one_stage},
    {"block_scales", &VllmTraits::block_scales},
    {"pipeline_parallel", &VllmTraits::pipeline_parallel}};
constexpr std::pair<std::string_view, bool SglangTraits::*> kSglangFlags[] = {
    {"shared_fusion_expert_parallel",
     &SglangTraits::shared_fusion_expert_parallel},
    {"pipeline_parallel", &SglangTraits::pipeline_parallel},
    {"dp_attention", &SglangTraits::dp_attention},
    {"redundant_experts", &SglangTraits::redundant_experts},
    {"dense_layers", &SglangTraits::dense_layers},
    {"plain_tower", &SglangTraits::plain_tower},
    {"loads_expert_parallel", &SglangTraits::loads_expert_parallel}};
constexpr std::pair<std::string_view, bool TransformersTraits::*>
    kTransformersFlags[] = {
        {"transposes_experts", &TransformersTraits::transposes_experts_since_5},
        {"fp32_norms", &TransformersTraits::fp32_norms_since_5},
        {"knows_tower", &TransformersTraits::knows_tower_since_5}};
constexpr TraitWord<VllmTraits::EveryStage> kEveryStageWords[] = {
    {"nothing", VllmTraits::EveryStage::kNothing},
    {"embedding", VllmTraits::EveryStage::kEmbedding},
    {"vocabulary", VllmTraits::EveryStage::kVocabulary},
    {"ends", VllmTraits::EveryStage::kEnds}};
constexpr TraitWord<SglangTraits::Head> kHeadWords[] = {
    {"last_stage", SglangTraits::Head::kLastStage},
    {"every_stage", SglangTraits::Head::kEveryStage},
    {"own_tensor", SglangTraits::Head::kOwnTensor}};
constexpr TraitWord<SglangTraits::SharedFusion> kSharedFusionWords[] = {
    {"never", SglangTraits::SharedFusion::kNever},
    {"one_expert", SglangTraits::SharedFusion::kOneExpert},
    {"always", SglangTraits::SharedFusion::kAlways}};
constexpr TraitWord<SglangTraits::Embedding> kEmbeddingWords[] = {
    {"first_stage", SglangTraits::Embedding::kFirstStage},
    {"every_stage", SglangTraits::Embedding::kEveryStage},
    {"whole", SglangTraits::Embedding::kWhole},
    {"whole_beside_dp_attention",
     SglangTraits::Embedding::kWholeBesideDpAttention}};

}  // namespace

Renames RulesReader::ReadNames(ObjectReader& traits) {
  const JsonValue* value = traits.Find("names");
  if (value == nullptr || !values_.IsObject(*value, traits.PathOf("names"))) {
    return {};
  }
  std::vector<Rename>& renames = own_->renames.emplace_back();
  std::vector<std::string> names = names_;  // with the renames so far
  for (const JsonMember& member : *value->AsObject()) {
    const std::string path =
        absl::StrFormat("%s.%s", traits.PathOf("names"), member.key);
    const std::string* to = member.value.AsString();
    if (to == nullptr) {
      values_.Wrong(member.value, path, "a string");
      continue;
    }
    const Rename rename = {member.key, *to};
    bool occurs = false;
    for (std::string& name : names) {
      std::string renamed = Renamed(name, {&rename, 1});
      occurs |= renamed != name;
      name = std::move(renamed);
    }
    const std::string from = absl::StrReplaceAll(member.key, {{"{layer}", ""}});
    const std::string into = absl::StrReplaceAll(*to, {{"{layer}", ""}});
    if ((from + into).find_first_of("{}") != std::string::npos) {
      values_.Error(member.value,
                    "%s is %s; wanted no braces but those of {layer}", path,
                    member.value.Text());
      continue;
    }
    if (member.key.empty() || !occurs) {
      diagnostics().Error(
          values_.document().PlaceAt(member.key_offset),
          "%s renames %s, which is in no name of params; wanted a part of one",
          traits.PathOf("names"), Quoted(member.key));
      continue;
    }
    renames.emplace_back(
        Keep(absl::StrReplaceAll(member.key, {{"{layer}", "{0}"}})),
        Keep(absl::StrReplaceAll(*to, {{"{layer}", "{0}"}})));
  }
  return renames;
}

absl::Span<const Fusion> RulesReader::ReadFused(ObjectReader& traits) {
  const JsonValue* value = traits.Find("fused");
  const std::string path = traits.PathOf("fused");
  if (value == nullptr || !values_.IsObject(*value, path)) return {};
  std::vector<Fusion>& fusions = own_->fusions.emplace_back();
  for (const JsonMember& member : *value->AsObject()) {
    const std::string of_path = absl::StrFormat("%s.%s", path, member.key);
    const std::optional<std::vector<std::string>> modules =
        values_.Strings(member.value, of_path);
    if (!modules.has_value()) continue;
    if (member.key.empty() ||
        member.key.find_first_of("{}.") != std::string::npos) {
      diagnostics().Error(
          values_.document().PlaceAt(member.key_offset),
          "%s has a module %s; wanted a name without braces and dots", path,
          Quoted(member.key));
      continue;
    }
    if (modules->size() < 2) {
      values_.Error(member.value,
                    "%s has fewer than two modules; wanted two or more",
                    of_path);
      continue;
    }
    std::vector<std::string>& kept = own_->texts.emplace_back(*modules);
    const Fusion fusion = {.into = Keep(member.key), .modules = kept};
    CheckFusion(fusion, member.value, of_path);
    fusions.push_back(fusion);
  }
  return fusions;
}

// Each module of the fusion stands beside the others, and is cut alike.
void RulesReader::CheckFusion(const Fusion& fusion, const JsonValue& value,
                              const std::string& path) {
  bool found = false;
  for (const Param& first : model_.params) {
    if (!IsPlainModule(first.role) || first.index.empty()) continue;
    if (ModuleOf(first.name) != fusion.modules[0]) continue;
    found = true;
    for (const std::string& module : fusion.modules) {
      const std::string name = WithModule(first.name, module);
      // Layers of several kinds may have modules of one name.
      const auto find = [&](const auto& fits) {
        return std::find_if(
            model_.params.begin(), model_.params.end(),
            [&](const Param& p) { return p.name == name && fits(p); });
      };
      auto other = find([&](const Param& p) { return p.index == first.index; });
      if (other == model_.params.end()) {
        other = find([](const Param&) { return true; });
      }
      const auto report = [&](std::string_view what) {
        values_.Error(value, "%s: parameter %s %s; wanted it beside %s", path,
                      Quoted(name), what, Quoted(first.name));
      };
      if (other == model_.params.end()) return report("is not in params");
      if (other->role != first.role || first.role == ParamRole::kRow) {
        return report(first.role == ParamRole::kRow
                          ? "is of role row, which cannot be "
                            "fused"
                          : "has another role");
      }
      if (other->index != first.index) return report("is of other layers");
      if (!std::equal(other->shape.begin() + 1, other->shape.end(),
                      first.shape.begin() + 1, first.shape.end())) {
        return report("has other columns");
      }
    }
  }
  // The config may lack all layers that have them.
  found |=
      std::any_of(names_.begin(), names_.end(), [&](const std::string& name) {
        return ModuleOf(name) == fusion.modules[0];
      });
  if (found) return;
  std::vector<std::string_view> modules;
  for (const Param& param : model_.params) {
    if (IsPlainModule(param.role) && !param.index.empty()) {
      modules.push_back(ModuleOf(param.name));
    }
  }
  values_.Error(value,
                "%s: %s is no module of a parameter of role column or "
                "replicated%s (other roles are joined as their framework does)",
                path, Quoted(fusion.modules[0]),
                modules.empty() ? "" : Hint(fusion.modules[0], modules));
}

template <typename T, size_t N>
void RulesReader::ReadWord(ObjectReader& traits, std::string_view key,
                           const TraitWord<T> (&words)[N], T& target) {
  std::vector<std::string_view> names;
  for (const TraitWord<T>& word : words) names.push_back(word.word);
  Place place;
  const size_t found = traits.Word(key, names, Alternatives(names), place);
  if (found < N) target = words[found].value;
}

void RulesReader::ReadFlag(ObjectReader& traits, std::string_view key,
                           bool& target) {
  Located<bool> flag = {.value = target};
  traits.Read(key, {}, flag);
  target = flag.value;
}

void RulesReader::ReadVllm(const JsonValue& value) {
  if (!values_.IsObject(value, "vllm")) return;
  ObjectReader reader(values_, value, "vllm");
  VllmTraits& traits = own_->family.vllm;
  traits.known = true;
  traits.renames = ReadNames(reader);
  traits.fused = ReadFused(reader);
  ReadWord(reader, "every_stage", kEveryStageWords, traits.every_stage);
  for (const auto& [key, flag] : kVllmFlags)
    ReadFlag(reader, key, traits.*flag);
  traits.draft_has_prefix = names_predictions_;
  Located<std::string> joined;
  reader.Read("query_key_value_down", {}, joined);
  if (joined.given) traits.query_key_value_down = Keep(joined.value);
  reader.RejectOtherKeys();
}

void RulesReader::ReadSglang(const JsonValue& value) {
  if (!values_.IsObject(value, "sglang")) return;
  ObjectReader reader(values_, value, "sglang");
  SglangTraits& traits = own_->family.sglang;
  traits.known = true;
  traits.renames = ReadNames(reader);
  traits.fused = ReadFused(reader);
  const JsonValue* router = reader.Find("fp32_router");
  if (router != nullptr && router->AsString() != nullptr) {
    traits.fp32_router_since = Keep(*router->AsString());
  } else {
    bool fp32_router = false;
    ReadFlag(reader, "fp32_router", fp32_router);
    if (fp32_router) traits.fp32_router_since = "0";
  }
  ReadWord(reader, "head", kHeadWords, traits.head);
  ReadWord(reader, "embedding", kEmbeddingWords, traits.embedding);
  ReadWord(reader, "shared_fusion", kSharedFusionWords, traits.shared_fusion);
  if (const JsonValue* experts = reader.Find("shared_fusion_experts")) {
    traits.shared_fusion_experts =
        Number(*experts, reader.PathOf("shared_fusion_experts"),
               {.min = 0, .max = kCountMax})
            .value_or(0);
  }
  if (const JsonValue* groups = reader.Find("mamba_groups");
      groups != nullptr && architecture().mamba.has_value()) {
    architecture().mamba->sglang_groups =
        Number(*groups, reader.PathOf("mamba_groups"),
               {.min = 0, .max = kExtentMax})
            .value_or(0);
  }
  for (const auto& [key, flag] : kSglangFlags) {
    ReadFlag(reader, key, traits.*flag);
  }
  Located<std::string> whole_in_tower;
  reader.Read("whole_in_tower", {}, whole_in_tower);
  traits.whole_in_tower = Keep(std::move(whole_in_tower.value));
  reader.RejectOtherKeys();
}

// A framework that the file does not name is refused: nobody has looked at its
// class.
void RulesReader::ReadTraits() {
  own_->family.vllm.known = false;
  own_->family.sglang.known = false;
  own_->family.megatron.known = false;
  if (const JsonValue* vllm = reader_.Find("vllm")) ReadVllm(*vllm);
  if (const JsonValue* sglang = reader_.Find("sglang")) ReadSglang(*sglang);
  if (const JsonValue* megatron = reader_.Find("megatron")) {
    if (!values_.IsObject(*megatron, "megatron")) return;
    if (!megatron->AsObject()->empty()) {
      values_.Error(*megatron, "megatron has keys; wanted {}");
    }
    own_->family.megatron.known = true;
  }
  if (const JsonValue* transformers = reader_.Find("transformers")) {
    if (!values_.IsObject(*transformers, "transformers")) return;
    ObjectReader reader(values_, *transformers, "transformers");
    Located<std::string> name;
    reader.Read("class", {}, name);
    if (reader.Find("names") != nullptr) {
      own_->family.transformers.renames_since_5 = ReadNames(reader);
    }
    for (const auto& [key, flag] : kTransformersFlags) {
      ReadFlag(reader, key, own_->family.transformers.*flag);
    }
    reader.RejectOtherKeys();
  }
}

}  // namespace refit
