#include "compiler/model/rules/rules.h"

#include <algorithm>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "compiler/model/rules/reader.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

constexpr int64_t kRulesBytesMax = int64_t{4} << 20;
constexpr std::string_view kOfText = "text_config.";

}  // namespace

std::string Hint(std::string_view word,
                 const std::vector<std::string_view>& words) {
  const std::string nearest = NearestWord(word, words);
  return nearest.empty() ? absl::StrFormat("; wanted %s", Alternatives(words))
                         : absl::StrFormat("; did you mean \"%s\"?", nearest);
}

void RulesReader::Read() {
  const int64_t errors_before = diagnostics().error_count();
  const auto ok = [&] { return diagnostics().error_count() == errors_before; };
  if (!is_compiled_in_) model_.place = reader_.place();
  if (&config_ != &whole_) model_.quant_method = config_.QuantMethod();
  dtype_ = config_.WeightDType();
  model_.own_family = std::shared_ptr<const Family>(own_, &own_->family);
  model_.architecture.family = &own_->family;
  ReadModelType();
  ReadKeys();
  ReadSizes();
  ReadLayerSets();
  ReadTower();
  ReadRefusals();
  has_sizes_ = ok();
  ReadParams();
  Located<std::vector<std::string>> globs;
  reader_.Read("stored_beside", {}, globs);
  model_.stored_beside.insert(model_.stored_beside.end(), globs.value.begin(),
                              globs.value.end());
  ReadMtpLayers();
  if (ok()) {
    CheckRules(rules_, model_, values_);
    ReadTraits();
  }
  for (const std::string_view key :
       {"model_type", "like", "defaults", "needed", "only", "alike", "refuse",
        "sizes", "layers", "params", "stored_beside", "tower", "vllm", "sglang",
        "megatron", "transformers"}) {
    reader_.Find(key);
  }
  reader_.RejectOtherKeys();
}

void RulesReader::ReadModelType() {
  const JsonValue* value = reader_.Require("model_type", "a string");
  if (value == nullptr) return;
  const std::string* type = values_.String(*value, "model_type");
  if (type == nullptr) return;
  own_->model_type = *type;
  own_->family.model_type = own_->model_type;
  own_->family.of_file = !is_compiled_in_;
  const std::string found = whole_.String("model_type");
  if (found.empty() || found == *type) return;
  values_.Error(
      *value,
      "model_type %s, but config.json is of model_type %s; wanted the same",
      Quoted(*type), Quoted(found));
}

void RulesReader::ReadKeys() {
  for (const JsonMember& member : Members("defaults")) {
    if (config_.IsThere(member.key)) continue;
    const std::optional<int64_t> number =
        Number(member.value, reader_.PathOf("defaults." + member.key),
               {.min = 0, .max = kExtentMax});
    if (number.has_value()) scope_.defaults.emplace_back(member.key, *number);
  }
  Located<std::vector<std::string>> needed;
  reader_.Read("needed", {}, needed);
  for (const std::string& key : needed.value) {
    if (!config_.IsThere(key)) config_.RequireNumberOrNone(key);
  }
  for (const JsonMember& member : Members("only")) {
    if (!config_.IsThere(member.key)) continue;
    // null is no value; a class that takes one has no flag then.
    const JsonValue* found = scope_.Find(member.key);
    const std::string text = found == nullptr ? "null" : found->Text();
    const std::string only = member.value.Text();
    if (text == only || (found == nullptr && only == "false")) continue;
    config_.Error(member.key, "%s %s is not supported; wanted %s", member.key,
                  text, only);
  }
  for (const JsonMember& member : Members("alike")) {
    const std::string* other =
        values_.String(member.value, reader_.PathOf("alike." + member.key),
                       "a key of config.json");
    if (other == nullptr || other->starts_with(kOfText)) continue;
    config_.CheckAlike(member.key, *other);
  }
}

void RulesReader::ReadRefusals() {
  for (const JsonMember& member : Members("refuse")) {
    const std::string path = reader_.PathOf("refuse." + member.key);
    if (!values_.IsObject(member.value, path)) continue;
    ObjectReader reader(values_, member.value, path);
    const JsonValue* condition = reader.Require("if", "an expression");
    const JsonValue* because = reader.Require("because", "a string");
    reader.RejectOtherKeys();
    if (condition == nullptr || because == nullptr) continue;
    const std::string* text =
        values_.String(*because, reader.PathOf("because"));
    const bool refused =
        Number(*condition, reader.PathOf("if"), {}).value_or(0) != 0;
    if (!refused || text == nullptr) continue;
    is_refused_ = true;
    const JsonValue* found = scope_.Find(member.key);
    config_.Error(member.key, "%s is %s, %s", member.key,
                  found == nullptr ? "missing" : found->Text(), *text);
  }
}

namespace {

// A family with a tower has the language model's keys in a part of the config,
// unless older files have them beside the tower's part.
void ReadRules(const ValueReader& values, const JsonValue& root,
               bool is_compiled_in, ConfigReader& config, Model& model) {
  const JsonValue* tower = nullptr;
  if (root.AsObject() != nullptr) {
    tower = ObjectReader(values, root, "").Peek(kTower);
  }
  bool is_flat = tower == nullptr;
  if (!is_flat && tower->AsObject() != nullptr) {
    const JsonValue* flat = ObjectReader(values, *tower, "").Peek("flat");
    is_flat = flat != nullptr && flat->Text() == "true" &&
              !config.IsThere("text_config");
  }
  if (is_flat) {
    RulesReader(values, root, is_compiled_in, config, config, model).Read();
    return;
  }
  ConfigReader text = config.Text();
  RulesReader(values, root, is_compiled_in, text, config, model).Read();
}

}  // namespace

void BuildByRules(const std::string& path, const Place& asked,
                  ConfigReader& config, Model& model) {
  Diagnostics& diagnostics = config.diagnostics();
  const std::optional<JsonDocument> document =
      ReadJsonFile(path, asked, kRulesBytesMax, "rules", diagnostics);
  if (!document.has_value()) return;
  const ValueReader values(*document, diagnostics);
  const std::optional<JsonValue> root = CompleteRules(document->root, values);
  if (!root.has_value()) return;
  ReadRules(values, *root, /*is_compiled_in=*/false, config, model);
}

void BuildByRules(const BuiltInRules& rules, ConfigReader& config,
                  Model& model) {
  Diagnostics& diagnostics = config.diagnostics();
  auto source = std::make_shared<const SourceFile>(
      SourceFile{.path = absl::StrFormat("families/%s.json", rules.model_type),
                 .text = std::string(rules.text)});
  const JsonDocument document = *ParseJson(source, source->text, diagnostics);
  const ValueReader values(document, diagnostics);
  const JsonValue root = *CompleteRules(document.root, values);
  ReadRules(values, root, /*is_compiled_in=*/true, config, model);
  diagnostics.Redirect(*source, config.place());
}

const BuiltInRules* FindBuiltInRules(std::string_view model_type) {
  const absl::Span<const BuiltInRules> all = AllBuiltInRules();
  const auto* const found =
      std::find_if(all.begin(), all.end(), [&](const BuiltInRules& rules) {
        return rules.model_type == model_type;
      });
  return found == all.end() ? nullptr : found;
}

}  // namespace refit
