// Files of rules that say only in what they differ from another one.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/model/family.h"
#include "compiler/model/rules/reader.h"
#include "compiler/model/rules/rules.h"
#include "llvm/ADT/STLExtras.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

constexpr std::string_view kLike = "like";
constexpr std::string_view kNames = "names";

// nullptr: the object has no such key.
template <typename Members>
auto* FindIn(Members& members, std::string_view key) {
  const auto found =
      std::find_if(members.begin(), members.end(),
                   [&](const JsonMember& member) { return member.key == key; });
  return found == members.end() ? nullptr : &*found;
}

template <typename Members>
auto* FindMember(Members& members, std::string_view key) {
  auto* found = FindIn(members, key);
  return found == nullptr ? nullptr : &found->value;
}

const JsonValue* FindMember(const JsonValue& object, std::string_view key) {
  return object.AsObject() == nullptr ? nullptr
                                      : FindMember(*object.AsObject(), key);
}

template <typename Offset>
void MoveTo(Offset offset, JsonValue& value) {
  value.offset = offset;
  if (auto* array = std::get_if<JsonValue::Array>(&value.data)) {
    for (JsonValue& element : *array) MoveTo(offset, element);
  }
  if (auto* object = std::get_if<JsonValue::Object>(&value.data)) {
    for (JsonMember& member : *object) {
      member.key_offset = offset;
      MoveTo(offset, member.value);
    }
  }
}

// null takes a key away.
void ChangeObject(const JsonValue::Object& changes, JsonValue::Object& object) {
  for (const JsonMember& change : changes) {
    JsonMember* const found = FindIn(object, change.key);
    if (found == nullptr) {
      object.push_back(change);
    } else if (change.value.IsNull()) {
      object.erase(object.begin() + (found - object.data()));
    } else {
      *found = change;
    }
  }
}

std::string TextOf(const JsonValue& object, std::string_view key) {
  const JsonValue* value = FindMember(object, key);
  return value == nullptr ? "" : value->Text();
}

// A param of a name that the other family has changes all of that name; where
// it says its layers, those of these layers alone, else those of all layers.
// Others, as a second one of a name, stand behind the one that is before them
// in `changes`.
void ChangeParams(const JsonValue::Array& changes, std::string_view family,
                  const ValueReader& values, JsonValue::Array& params) {
  struct Entry {
    JsonValue param;
    bool is_inherited = true;  // and not changed yet
  };
  std::vector<Entry> entries;
  for (JsonValue& param : params) entries.push_back({std::move(param)});
  size_t next = 0;
  for (size_t number = 0; number < changes.size(); ++number) {
    const JsonValue& change = changes[number];
    const std::string name = TextOf(change, "name");
    const std::string layers = TextOf(change, "layers");
    std::vector<size_t> of_name;
    std::vector<size_t> of_layers;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (name.empty() || !entries[i].is_inherited ||
          TextOf(entries[i].param, "name") != name) {
        continue;
      }
      const std::string inherited = TextOf(entries[i].param, "layers");
      if (inherited == layers) of_layers.push_back(i);
      // A param of other layers is another one.
      if (!layers.empty() && !inherited.empty()) continue;
      of_name.push_back(i);
    }
    if (!layers.empty() && !of_layers.empty()) of_name = of_layers;
    if (of_name.empty() && !name.empty() &&
        FindMember(change, "role") == nullptr &&
        FindMember(change, "shape") == nullptr) {
      std::vector<std::string> left;
      for (const Entry& entry : entries) {
        if (entry.is_inherited) left.push_back(TextOf(entry.param, "name"));
      }
      const std::string nearest = NearestWord(name, {left.begin(), left.end()});
      values.Error(*FindMember(change, "name"),
                   "params[%d].name is %s, which no parameter of %s has that "
                   "is left to change; %s",
                   number, name, family,
                   nearest.empty() || nearest == name
                       ? "wanted \"role\" and \"shape\" of a new one"
                       : absl::StrCat("did you mean ", nearest, "?"));
      continue;
    }
    if (of_name.empty()) {
      entries.insert(entries.begin() + static_cast<ptrdiff_t>(next),
                     {change, /*is_inherited=*/false});
      ++next;
      continue;
    }
    for (const size_t i : of_name) {
      JsonValue& param = entries[i].param;
      entries[i].is_inherited = false;
      ChangeObject(*change.AsObject(), std::get<JsonValue::Object>(param.data));
      param.offset = change.offset;
      // What is missed then.
      for (const JsonMember& member : *change.AsObject()) {
        if (member.value.IsNull()) param.offset = member.key_offset;
      }
    }
    next = of_name.back() + 1;
  }
  params.clear();
  for (Entry& entry : entries) params.push_back(std::move(entry.param));
}

// What a file says anew of those of `family`; a tower is an object of the same
// kind.
void ChangeRules(const JsonValue::Object& changes, std::string_view family,
                 const ValueReader& values, JsonValue::Object& rules) {
  for (const JsonMember& change : changes) {
    if (change.key == kLike || change.key == kNames) continue;
    JsonMember* const found = FindIn(rules, change.key);
    if (found == nullptr) {
      rules.push_back(change);
      continue;
    }
    found->key_offset = change.key_offset;
    found->value.offset = change.value.offset;
    auto* object = std::get_if<JsonValue::Object>(&found->value.data);
    auto* params = std::get_if<JsonValue::Array>(&found->value.data);
    const JsonValue::Object* of_change = change.value.AsObject();
    if (change.value.IsNull()) {
      rules.erase(rules.begin() + (found - rules.data()));
    } else if (object != nullptr && of_change != nullptr) {
      if (change.key == kTower) {
        ChangeRules(*of_change, family, values, *object);
      } else {
        ChangeObject(*of_change, *object);
      }
    } else if (params != nullptr && change.key == "params" &&
               change.value.AsArray() != nullptr) {
      ChangeParams(*change.value.AsArray(), family, values, *params);
    } else {
      *found = change;
    }
  }
}

// Calls the other family's parameters, and what is stored beside them, as this
// one does.
void CallAnew(const JsonValue& names, const ValueReader& values,
              JsonValue::Object& rules) {
  if (!values.IsObject(names, kNames)) return;
  for (const JsonMember& member : *names.AsObject()) {
    values.String(member.value, absl::StrFormat("%s.%s", kNames, member.key));
  }
  // Mistakes in a name then stand where it was renamed.
  const auto rename = [&](JsonValue* value) {
    if (value == nullptr) return;
    auto* name = std::get_if<std::string>(&value->data);
    if (name == nullptr) return;
    for (const JsonMember& member : *names.AsObject()) {
      if (member.value.AsString() == nullptr) continue;
      std::string renamed =
          Renamed(*name, {{member.key, *member.value.AsString()}});
      if (renamed == *name) continue;
      *name = std::move(renamed);
      value->offset = member.value.offset;
    }
  };
  if (JsonValue* params = FindMember(rules, "params")) {
    for (JsonValue& param : std::get<JsonValue::Array>(params->data)) {
      rename(FindMember(std::get<JsonValue::Object>(param.data), "name"));
    }
  }
  if (JsonValue* globs = FindMember(rules, "stored_beside")) {
    for (JsonValue& glob : std::get<JsonValue::Array>(globs->data)) {
      rename(&glob);
    }
  }
}

// The rules of another family that a file names, with that file's places.
std::optional<JsonValue> RulesOf(const JsonValue& like,
                                 const ValueReader& values) {
  const std::string* name =
      values.String(like, kLike, "a family that is a file of rules");
  if (name == nullptr) return std::nullopt;
  const BuiltInRules* other = FindBuiltInRules(*name);
  if (other == nullptr) {
    std::vector<std::string_view> known;
    for (const BuiltInRules& rules : AllBuiltInRules()) {
      known.push_back(rules.model_type);
    }
    const std::string nearest = NearestWord(*name, known);
    values.Error(
        like, "like is %s, which is no family of rules; %s", Quoted(*name),
        nearest.empty() ? absl::StrCat("wanted ", Alternatives(known))
                        : absl::StrFormat("did you mean %s?", Quoted(nearest)));
    return std::nullopt;
  }
  auto source = std::make_shared<const SourceFile>(
      SourceFile{.path = *name, .text = std::string(other->text)});
  JsonValue rules = *CompleteRules(
      ParseJson(source, source->text, values.diagnostics())->root, values);
  // Mistakes in what the other family says stand where it is named.
  MoveTo(like.offset, rules);
  return rules;
}

// The tower of another family, changed by what this one says of its own.
std::optional<JsonValue> CompleteTower(const JsonValue& tower,
                                       const ValueReader& values) {
  const JsonValue* like = FindMember(tower, kLike);
  if (like == nullptr) return tower;
  const std::optional<JsonValue> other = RulesOf(*like, values);
  if (!other.has_value()) return std::nullopt;
  const JsonValue* of_other = FindMember(*other, kTower);
  if (of_other == nullptr) {
    values.Error(
        *like, "tower.like is %s, which has no tower; wanted a family with one",
        like->Text());
    return std::nullopt;
  }
  JsonValue completed = *of_other;
  completed.offset = tower.offset;
  auto& members = std::get<JsonValue::Object>(completed.data);
  if (const JsonValue* names = FindMember(tower, kNames)) {
    CallAnew(*names, values, members);
  }
  ChangeRules(*tower.AsObject(), like->Text(), values, members);
  return completed;
}

}  // namespace

std::optional<JsonValue> CompleteRules(const JsonValue& root,
                                       const ValueReader& values) {
  if (root.AsObject() == nullptr) return root;
  JsonValue changes = root;
  auto& changed = std::get<JsonValue::Object>(changes.data);
  if (JsonValue* tower = FindMember(changed, kTower)) {
    const std::optional<JsonValue> completed = CompleteTower(*tower, values);
    if (!completed.has_value()) return std::nullopt;
    *tower = *completed;
  }
  const JsonValue* like = FindMember(root, kLike);
  if (like == nullptr) return changes;
  std::optional<JsonValue> rules = RulesOf(*like, values);
  if (!rules.has_value()) return std::nullopt;
  rules->offset = root.offset;
  auto& members = std::get<JsonValue::Object>(rules->data);
  // Nobody has read whether the frameworks' classes of both are alike, and the
  // other's name is not this one's.
  std::erase_if(members, [](const JsonMember& member) {
    constexpr std::string_view kOwn[] = {"model_type", "vllm", "sglang",
                                         "megatron", "transformers"};
    return llvm::is_contained(kOwn, member.key);
  });
  if (const JsonValue* names = FindMember(root, kNames)) {
    CallAnew(*names, values, members);
  }
  ChangeRules(changed, like->Text(), values, members);
  return rules;
}

}  // namespace refit
