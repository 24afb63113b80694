#include "compiler/model/rules/reader.h"

namespace refit {
namespace {

bool HasDType(ConfigReader& config) {
  return config.Has("dtype") || config.Has("torch_dtype");
}

// Reports a dtype that the tower alone has. Where the model has one, this is
// the tower's too: frameworks do not heed the tower's own.
void CheckTowerDType(ConfigReader& vision, ConfigReader& text) {
  if (HasDType(text) || !HasDType(vision)) return;
  if (vision.WeightDType() == text.WeightDType()) return;
  const std::string key = vision.Has("dtype") ? "dtype" : "torch_dtype";
  vision.Error(
      key,
      "%s %s is of the vision tower alone, and frameworks differ in what dtype "
      "the model then has; wanted \"%s\" beside vision_config",
      key, vision.String(key), key);
}

}  // namespace

void RulesReader::ReadTower() {
  const JsonValue* value = reader_.Find(kTower);
  if (value == nullptr || !values_.IsObject(*value, kTower)) return;
  ObjectReader reader(values_, *value, std::string(kTower));
  // Nothing is known of a tower without params but that checkpoints have it.
  const JsonValue* params = reader.Find("params");
  own_->family.tower = params != nullptr;
  bool always_cut = false;
  ReadFlag(reader, "always_cut", always_cut);
  own_->family.whole_tower = !always_cut;
  if (model_.vision && params != nullptr) {
    ConfigReader vision = whole_.Vision();
    CheckTowerDType(vision, config_);
    RulesReader tower(*value, vision, *this);
    tower.ReadAsTower();
    rules_ = std::move(tower.rules_);
    names_ = std::move(tower.names_);
    scope_.sizes.insert(scope_.sizes.end(),
                        {{"tower_layers", tower.tower_.layers},
                         {"tower_hidden", tower.tower_.hidden},
                         {"tower_heads", tower.tower_.heads}});
    return;
  }
  Located<std::vector<std::string>> globs;
  reader.Read("stored_beside", {}, globs);
  model_.stored_beside = std::move(globs.value);
  if (params == nullptr || params->AsArray() == nullptr) return;
  for (const JsonValue& param : *params->AsArray()) {
    if (param.AsObject() == nullptr) continue;
    const JsonValue* name = ObjectReader(values_, param, "").Peek("name");
    if (name != nullptr && name->AsString() != nullptr) {
      names_.push_back(*name->AsString());
    }
  }
}

void RulesReader::ReadAsTower() {
  const int64_t errors_before = diagnostics().error_count();
  ReadKeys();
  const absl::Span<const JsonMember> members = Members("sizes");
  ReadTowerSizes(members);
  architecture().tower_heads = tower_.heads;
  if (tower_.hidden % tower_.heads != 0) {
    const std::string key = KeyOfSize("heads", members);
    config_.Error(key, "%s %d does not divide hidden_size %d", key,
                  tower_.heads, tower_.hidden);
  }
  ReadOwnSizes(members);
  ReadLayerSets();
  ReadRefusals();
  has_sizes_ = diagnostics().error_count() == errors_before;
  ReadParams();
  for (const std::string_view key :
       {"always_cut", "flat", "defaults", "needed", "only", "alike", "refuse",
        "sizes", "layers", "params", "stored_beside"}) {
    reader_.Find(key);
  }
  reader_.RejectOtherKeys();
}

}  // namespace refit
