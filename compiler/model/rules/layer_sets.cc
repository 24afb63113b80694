#include <algorithm>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "compiler/model/rules/reader.h"

namespace refit {
namespace {

constexpr std::string_view kOrNone = " or []";

}  // namespace

void RulesReader::ReadLayerSets() {
  const absl::Span<const JsonMember> sizes = Members("sizes");
  if (std::any_of(sizes.begin(), sizes.end(), [](const JsonMember& size) {
        return size.key == "mtp_layers";
      })) {
    layer_sets_["mtp"] =
        Consecutive(static_cast<int32_t>(architecture().layers),
                    architecture().mtp_layers)
            .numbers;
  }
  for (const JsonMember& member : Members("layers")) {
    const std::string path = reader_.PathOf("layers." + member.key);
    if (!values_.IsObject(member.value, path)) continue;
    const std::vector<int32_t>& layers = layer_sets_[member.key] =
        LayerSet(member.value, path);
    scope_.sizes.emplace_back(member.key, static_cast<int64_t>(layers.size()));
  }
}

std::vector<std::string> RulesReader::WordsOfLayers(std::string_view key) {
  const std::string* letters = scope_.Find(key)->AsString();
  if (letters == nullptr) return config_.StringsOr(key, {});
  std::vector<std::string> words;
  for (const char letter : *letters) words.emplace_back(1, letter);
  return words;
}

std::vector<int32_t> RulesReader::LayerSet(const JsonValue& value,
                                           const std::string& path) {
  ObjectReader reader(values_, value, path);
  const int64_t layers = this->layers();
  const int64_t all_layers = this->all_layers();
  const auto bound = [&](std::string_view key, int64_t otherwise) {
    const JsonValue* bound = reader.Find(key);
    if (bound == nullptr) return otherwise;
    return Number(*bound, reader.PathOf(key), {.min = 0, .max = kCountMax})
        .value_or(otherwise);
  };
  const int64_t from = bound("from", 0);
  const int64_t to = bound("to", all_layers);
  int64_t every = bound("every", 1);
  const bool has_every = reader.Find("every") != nullptr;
  if (every == 0) {
    values_.Wrong(*reader.Find("every"), reader.PathOf("every"), "1 or more");
  }
  std::set<int64_t> left_out;
  if (const JsonValue* except = reader.Find("except")) {
    const std::string* key = values_.String(*except, reader.PathOf("except"),
                                            "a key of config.json");
    if (key != nullptr) {
      std::string_view name = *key;
      const bool may_lack = name.ends_with(kOrNone);
      if (may_lack) name.remove_suffix(kOrNone.size());
      if (scope_.Find(name) == nullptr && !may_lack) {
        values_.Error(
            *except,
            absl::StrFormat("%s is %s: config.json has no such key; wanted "
                            "one, or \"%s or []\"",
                            reader.PathOf("except"), Quoted(*key), name));
      }
      const std::vector<int64_t> numbers = config_.IntegersOr(name, {});
      left_out = {numbers.begin(), numbers.end()};
    }
  }
  const std::vector<int32_t>* besides = nullptr;
  if (const JsonValue* other = reader.Find("besides")) {
    const std::string* name =
        values_.String(*other, reader.PathOf("besides"), "a set of layers");
    if (name != nullptr) {
      const auto found = layer_sets_.find(*name);
      if (found == layer_sets_.end()) {
        std::vector<std::string_view> known;
        for (const auto& [set, numbers] : layer_sets_) known.push_back(set);
        values_.Error(*other,
                      absl::StrFormat("%s is %s, which is no set of layers "
                                      "before it%s",
                                      reader.PathOf("besides"), Quoted(*name),
                                      known.empty() ? "" : Hint(*name, known)));
      } else {
        besides = &found->second;
      }
    }
  }
  std::vector<std::string> types;
  std::string type;
  if (const JsonValue* where = reader.Find("where")) {
    const std::string where_path = reader.PathOf("where");
    if (values_.IsObject(*where, where_path)) {
      const JsonValue::Object& pair = *where->AsObject();
      if (pair.size() != 1 || pair[0].value.AsString() == nullptr) {
        values_.Wrong(*where, where_path,
                      "one key of config.json and the word of its list");
      } else if (scope_.Find(pair[0].key) == nullptr && has_every) {
        // The list is made of it.
      } else if (scope_.Find(pair[0].key) == nullptr) {
        values_.Error(*where, absl::StrFormat("%s: %s", where_path,
                                              scope_.NoKey(pair[0].key)));
      } else {
        type = *pair[0].value.AsString();
        types = WordsOfLayers(pair[0].key);
        every = 1;
        if (scope_.Find(pair[0].key)->AsString() != nullptr &&
            type.size() != 1) {
          values_.Error(
              *where,
              absl::StrFormat("%s: config.json's %s is a string, and %s is "
                              "no letter; wanted one",
                              where_path, Quoted(pair[0].key), Quoted(type)));
          types.clear();
        } else if (Evaluate("layers", scope_).ok() &&
                   static_cast<int64_t>(types.size()) != layers) {
          values_.Error(*where,
                        absl::StrFormat("%s: config.json's %s has %d words; "
                                        "wanted %d, one per layer",
                                        where_path, Quoted(pair[0].key),
                                        types.size(), layers));
          types.clear();
        }
      }
    }
  }
  const JsonValue* alike = reader.Find("alike");
  // The key of the config that says which layers these are.
  std::string by = "the count of its words";
  for (const std::string_view key : {"to", "every"}) {
    const JsonValue* bound = reader.Find(key);
    if (bound == nullptr || bound->AsString() == nullptr) continue;
    const std::string& text = *bound->AsString();
    const std::string first = text.substr(0, text.find(" or "));
    if (Evaluate(first, scope_).ok()) by = first;
  }
  reader.RejectOtherKeys();
  std::vector<int32_t> numbers;
  // Parts of a tower are counted by a number of their own.
  const int64_t end = is_tower_ ? to : std::min(to, all_layers);
  for (int64_t layer = from; layer < end; ++layer) {
    if (every > 1 && (layer + 1) % every != 0) continue;
    if (left_out.contains(layer)) continue;
    if (!types.empty() && (layer >= layers || types[layer] != type)) continue;
    const auto number = static_cast<int32_t>(layer);
    if (besides != nullptr &&
        std::binary_search(besides->begin(), besides->end(), number)) {
      continue;
    }
    numbers.push_back(number);
  }
  const std::string alike_path = reader.PathOf("alike");
  if (alike != nullptr && values_.IsObject(*alike, alike_path)) {
    for (const JsonMember& list : *alike->AsObject()) {
      CheckLayersAlike(list, alike_path, numbers, by);
    }
  }
  return numbers;
}

void RulesReader::CheckLayersAlike(const JsonMember& list,
                                   const std::string& path,
                                   const std::vector<int32_t>& layers,
                                   const std::string& by) {
  if (list.value.AsBool() != nullptr)
    return CheckNumbersAlike(list, layers, by);
  const std::string* word =
      values_.String(list.value, absl::StrCat(path, ".", list.key));
  const int64_t count = this->layers();
  if (word == nullptr || scope_.Find(list.key) == nullptr) return;
  if (!Evaluate("layers", scope_).ok()) return;
  const std::vector<std::string> words = WordsOfLayers(list.key);
  const auto report = [&](const std::string& mistake) {
    // Sets that leave each other out make one mistake twice.
    if (reported_.insert(list.key).second) config_.Error(list.key, mistake);
  };
  if (static_cast<int64_t>(words.size()) != count) {
    return report(absl::StrFormat("%s has %d words; wanted %d, one per layer",
                                  list.key, words.size(), count));
  }
  for (int32_t layer = 0; layer < count; ++layer) {
    const bool has = std::binary_search(layers.begin(), layers.end(), layer);
    if (has == (words[layer] == *word)) continue;
    return report(absl::StrFormat(
        "%s of layer %d is %s, and by %s it is %s%s: frameworks differ in "
        "which they read; wanted both alike",
        list.key, layer, Quoted(words[layer]), by, has ? "" : "not ",
        Quoted(*word)));
  }
}

void RulesReader::CheckNumbersAlike(const JsonMember& list,
                                    const std::vector<int32_t>& layers,
                                    const std::string& by) {
  if (scope_.Find(list.key) == nullptr) return;
  std::vector<int64_t> listed = config_.IntegersOr(list.key, {});
  std::sort(listed.begin(), listed.end());
  if (std::equal(listed.begin(), listed.end(), layers.begin(), layers.end())) {
    return;
  }
  config_.Error(list.key,
                absl::StrFormat("%s names other layers than %s does: "
                                "frameworks differ in which they read; wanted "
                                "both alike",
                                list.key, by));
}

}  // namespace refit
