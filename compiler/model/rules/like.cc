#include "compiler/model/rules/like.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/model/rules/rules.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

constexpr std::string_view kLike = "like";

const JsonValue* FindMember(const JsonValue& object, std::string_view key) {
  if (object.AsObject() == nullptr) return nullptr;
  for (const JsonMember& member : *object.AsObject()) {
    if (member.key == key) return &member.value;
  }
  return nullptr;
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
    const auto found = std::find_if(
        object.begin(), object.end(),
        [&](const JsonMember& old) { return old.key == change.key; });
    if (found == object.end()) {
      object.push_back(change);
    } else if (change.value.IsNull()) {
      object.erase(found);
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
// some of these are of the layers that it says, those alone. Others stand
// behind the one that is before them in `changes`.
void ChangeParams(const JsonValue::Array& changes, JsonValue::Array& params) {
  struct Entry {
    JsonValue param;
    bool is_inherited = true;
  };
  std::vector<Entry> entries;
  for (JsonValue& param : params) entries.push_back({std::move(param)});
  size_t next = 0;
  for (const JsonValue& change : changes) {
    const std::string name = TextOf(change, "name");
    const std::string layers = TextOf(change, "layers");
    std::vector<size_t> of_name;
    std::vector<size_t> of_layers;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (name.empty() || !entries[i].is_inherited ||
          TextOf(entries[i].param, "name") != name) {
        continue;
      }
      of_name.push_back(i);
      if (TextOf(entries[i].param, "layers") == layers) of_layers.push_back(i);
    }
    if (!layers.empty() && !of_layers.empty()) of_name = of_layers;
    if (of_name.empty()) {
      entries.insert(entries.begin() + static_cast<ptrdiff_t>(next),
                     {change, /*is_inherited=*/false});
      ++next;
      continue;
    }
    for (const size_t i : of_name) {
      JsonValue& param = entries[i].param;
      ChangeObject(*change.AsObject(), std::get<JsonValue::Object>(param.data));
      param.offset = change.offset;
    }
    next = of_name.back() + 1;
  }
  params.clear();
  for (Entry& entry : entries) params.push_back(std::move(entry.param));
}

}  // namespace

std::optional<JsonValue> CompleteRules(const JsonValue& root,
                                       const ValueReader& values) {
  const JsonValue* like = FindMember(root, kLike);
  if (like == nullptr) return root;
  const std::string* name =
      values.String(*like, kLike, "a family that is a file of rules");
  if (name == nullptr) return std::nullopt;
  const BuiltInRules* other = FindBuiltInRules(*name);
  if (other == nullptr) {
    std::vector<std::string_view> known;
    for (const BuiltInRules& rules : AllBuiltInRules()) {
      known.push_back(rules.model_type);
    }
    const std::string nearest = NearestWord(*name, known);
    values.Error(
        *like, absl::StrFormat(
                   "like is %s, which is no family of rules; %s", Quoted(*name),
                   nearest.empty()
                       ? absl::StrCat("wanted ", Alternatives(known))
                       : absl::StrFormat("did you mean %s?", Quoted(nearest))));
    return std::nullopt;
  }
  auto source = std::make_shared<const SourceFile>(
      SourceFile{.path = *name, .text = std::string(other->text)});
  JsonValue rules = *CompleteRules(
      ParseJson(source, source->text, values.diagnostics())->root, values);
  // Mistakes in what the other family says stand where it is named.
  MoveTo(like->offset, rules);
  rules.offset = root.offset;
  auto& members = std::get<JsonValue::Object>(rules.data);
  // Nobody has read whether the frameworks' classes of both are alike, and the
  // other's name is not this one's.
  members.erase(std::remove_if(members.begin(), members.end(),
                               [](const JsonMember& member) {
                                 return member.key == "model_type" ||
                                        member.key == "vllm" ||
                                        member.key == "sglang" ||
                                        member.key == "megatron" ||
                                        member.key == "transformers";
                               }),
                members.end());
  for (const JsonMember& change : *root.AsObject()) {
    if (change.key == kLike) continue;
    const auto found = std::find_if(
        members.begin(), members.end(),
        [&](const JsonMember& old) { return old.key == change.key; });
    if (found == members.end()) {
      members.push_back(change);
      continue;
    }
    found->key_offset = change.key_offset;
    found->value.offset = change.value.offset;
    auto* object = std::get_if<JsonValue::Object>(&found->value.data);
    auto* params = std::get_if<JsonValue::Array>(&found->value.data);
    if (object != nullptr && change.value.AsObject() != nullptr) {
      ChangeObject(*change.value.AsObject(), *object);
    } else if (params != nullptr && change.key == "params" &&
               change.value.AsArray() != nullptr) {
      ChangeParams(*change.value.AsArray(), *params);
    } else {
      *found = change;
    }
  }
  return rules;
}

}  // namespace refit
