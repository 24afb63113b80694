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

void ForgetPlaces(JsonValue& value) {
  value.offset = -1;
  if (auto* array = std::get_if<JsonValue::Array>(&value.data)) {
    for (JsonValue& element : *array) ForgetPlaces(element);
  }
  if (auto* object = std::get_if<JsonValue::Object>(&value.data)) {
    for (JsonMember& member : *object) {
      member.key_offset = -1;
      ForgetPlaces(member.value);
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

// A param of a known name changes that one. Others stand behind the one that
// is before them in `changes`.
void ChangeParams(const JsonValue::Array& changes, JsonValue::Array& params) {
  const auto name_of = [](const JsonValue& param) {
    const JsonValue* name = FindMember(param, "name");
    return name == nullptr ? nullptr : name->AsString();
  };
  auto next = params.begin();
  for (const JsonValue& change : changes) {
    const std::string* name = name_of(change);
    const auto found =
        std::find_if(params.begin(), params.end(), [&](const JsonValue& old) {
          const std::string* known = name_of(old);
          return name != nullptr && known != nullptr && *known == *name;
        });
    if (found == params.end()) {
      next = params.insert(next, change);
    } else {
      ChangeObject(*change.AsObject(),
                   std::get<JsonValue::Object>(found->data));
      found->offset = change.offset;
      next = found;
    }
    ++next;
  }
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
  ForgetPlaces(rules);
  rules.offset = root.offset;
  auto& members = std::get<JsonValue::Object>(rules.data);
  // Nobody has read whether the frameworks' classes of both are alike.
  members.erase(std::remove_if(members.begin(), members.end(),
                               [](const JsonMember& member) {
                                 return member.key == "vllm" ||
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
