#include <algorithm>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/model/rules/reader.h"

namespace refit {
namespace {

constexpr std::string_view kOrNone = " or []";

bool HasWord(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

}  // namespace

void RulesReader::ReadLayerSets() {
  const auto add = [&](const std::string& name, std::vector<int32_t> layers) {
    scope_.sizes.emplace_back(name, static_cast<int64_t>(layers.size()));
    layer_sets_[name] = std::move(layers);
  };
  const absl::Span<const JsonMember> sizes = Members("sizes");
  if (std::any_of(sizes.begin(), sizes.end(), [](const JsonMember& size) {
        return size.key == "mtp_layers";
      })) {
    add("mtp", Consecutive(static_cast<int32_t>(architecture().layers),
                           architecture().mtp_layers)
                   .numbers);
  }
  ReadKnownWords();
  for (const JsonMember& member : Members("layers")) {
    const std::string path = reader_.PathOf("layers." + member.key);
    if (!values_.IsObject(member.value, path)) continue;
    add(member.key, LayerSet(member.value, path));
  }
}

void RulesReader::ReadKnownWords() {
  for (const JsonMember& set : Members("layers")) {
    if (set.value.AsObject() == nullptr) continue;
    for (const JsonMember& key : *set.value.AsObject()) {
      if (key.key != "where" && key.key != "alike") continue;
      if (key.value.AsObject() == nullptr) continue;
      for (const JsonMember& list : *key.value.AsObject()) {
        for (std::string& word : WordsOfSet(list.value, list.key)) {
          std::vector<std::string>& known = known_words_[list.key];
          if (!HasWord(known, word)) known.push_back(std::move(word));
        }
      }
    }
  }
}

std::vector<std::string> RulesReader::WordsOfSet(const JsonValue& value,
                                                 const std::string& path) {
  if (value.AsBool() != nullptr) return {};  // the list has layers' numbers
  if (value.AsInteger() != nullptr) return {absl::StrCat(*value.AsInteger())};
  if (value.AsArray() == nullptr) {
    const std::string* word = values_.String(
        value, path, "a word of the list, an integer, or several words");
    if (word == nullptr) return {};
    return {*word};
  }
  return values_.Strings(value, path).value_or(std::vector<std::string>());
}

LayerWords RulesReader::WordsOfLayers(std::string_view key, bool of_prediction,
                                      Report report) {
  std::vector<std::string> words;
  const JsonValue& value = *scope_.Find(key);
  const JsonValue::Array* array = value.AsArray();
  if (const std::string* letters = value.AsString()) {
    for (const char letter : *letters) words.emplace_back(1, letter);
  } else if (array != nullptr && !array->empty() &&
             array->front().AsInteger() != nullptr) {
    for (const int64_t number : config_.IntegersOr(key, {})) {
      words.push_back(absl::StrCat(number));
    }
  } else {
    words = config_.StringsOr(key, {});
  }
  const int64_t layers = this->layers();
  const int64_t wanted = of_prediction ? architecture().mtp_block : layers;
  const auto found = static_cast<int64_t>(words.size());
  // Layers of multi-token prediction may stand behind the model's.
  if (found != wanted && (of_prediction || found != layers + mtp_layers_)) {
    report(absl::StrFormat("has %d words; wanted %d, one per layer", found,
                           wanted));
    return {};
  }
  words.resize(static_cast<size_t>(wanted));
  if (!of_prediction) return {.first = 0, .words = std::move(words)};
  LayerWords all = {.first = layers, .words = {}};
  for (int64_t i = 0; i < architecture().mtp_layers; ++i) {
    all.words.push_back(words[static_cast<size_t>(i % wanted)]);
  }
  return all;
}

std::optional<std::set<int64_t>> RulesReader::ReadWhere(const JsonValue& value,
                                                        const std::string& path,
                                                        bool of_prediction,
                                                        bool may_lack) {
  if (!values_.IsObject(value, path)) return std::set<int64_t>();
  const JsonValue::Object& lists = *value.AsObject();
  if (lists.empty()) {
    values_.Wrong(value, path, "keys of config.json and words of their lists");
    return std::set<int64_t>();
  }
  const auto by = std::find_if(
      lists.begin(), lists.end(),
      [&](const JsonMember& list) { return scope_.Find(list.key) != nullptr; });
  if (by == lists.end()) {
    if (may_lack) return std::nullopt;
    if (!is_compiled_in_) {
      values_.Error(value, "%s: %s", path, scope_.NoKey(lists[0].key));
      return std::set<int64_t>();
    }
    std::vector<std::string> keys;
    bool is_reported = false;
    for (const JsonMember& list : lists) {
      keys.push_back(Quoted(list.key));
      is_reported |= !reported_.insert(list.key).second;
    }
    if (!is_reported) {
      config_.Error(lists[0].key, "missing key%s %s; wanted %s",
                    keys.size() == 1 ? "" : "s", absl::StrJoin(keys, " and "),
                    keys.size() == 1 ? "it" : "one of them");
    }
    return std::set<int64_t>();
  }
  std::set<int64_t> layers;
  if (!Evaluate("layers", scope_).ok()) return layers;
  const std::vector<std::string> words =
      WordsOfSet(by->value, absl::StrCat(path, ".", by->key));
  const auto report = [&](const std::string& mistake) {
    if (!is_compiled_in_) {
      values_.Error(value, "%s: config.json's %s %s", path, Quoted(by->key),
                    mistake);
    } else if (reported_.insert(by->key).second) {
      config_.Error(by->key, absl::StrCat(by->key, " ", mistake));
    }
  };
  if (scope_.Find(by->key)->AsString() != nullptr) {
    for (const std::string& word : words) {
      if (word.size() == 1) continue;
      report(absl::StrFormat("is a string, and %s is no letter; wanted one",
                             Quoted(word)));
      return layers;
    }
  }
  const LayerWords of_layers = WordsOfLayers(by->key, of_prediction, report);
  for (size_t i = 0; i < of_layers.words.size(); ++i) {
    if (!HasWord(words, of_layers.words[i])) continue;
    layers.insert(of_layers.first + static_cast<int64_t>(i));
  }
  for (auto other = by + 1; other != lists.end(); ++other) {
    CheckLayersAlike(*other, path, of_prediction, layers, by->key);
  }
  return layers;
}

std::set<int64_t> RulesReader::ReadExcept(const JsonValue& value,
                                          const std::string& path) {
  const std::string* key = values_.String(value, path, "a key of config.json");
  if (key == nullptr) return {};
  std::string_view name = *key;
  const bool may_lack = name.ends_with(kOrNone);
  if (may_lack) name.remove_suffix(kOrNone.size());
  if (scope_.Find(name) == nullptr && !may_lack) {
    values_.Error(
        value,
        "%s is %s: config.json has no such key; wanted one, or \"%s or []\"",
        path, Quoted(*key), name);
  }
  const std::vector<int64_t> numbers = config_.IntegersOr(name, {});
  return {numbers.begin(), numbers.end()};
}

std::set<int64_t> RulesReader::ReadBesides(const JsonValue& value,
                                           const std::string& path) {
  std::vector<std::string> names;
  if (value.AsArray() != nullptr) {
    names = values_.Strings(value, path).value_or(names);
  } else if (const std::string* name =
                 values_.String(value, path, "a set of layers, or several")) {
    names = {*name};
  }
  std::set<int64_t> layers;
  for (const std::string& name : names) {
    const auto found = layer_sets_.find(name);
    if (found != layer_sets_.end()) {
      layers.insert(found->second.begin(), found->second.end());
      continue;
    }
    std::vector<std::string_view> known;
    for (const auto& [set, numbers] : layer_sets_) known.push_back(set);
    values_.Error(value, "%s is %s, which is no set of layers before it%s",
                  path, Quoted(name), known.empty() ? "" : Hint(name, known));
  }
  return layers;
}

std::vector<int32_t> RulesReader::LayerSet(const JsonValue& value,
                                           const std::string& path) {
  ObjectReader reader(values_, value, path);
  // The key of the config that says which layers these are.
  std::string by = "the count of its words";
  const auto bound = [&](std::string_view key, int64_t otherwise) {
    const JsonValue* bound = reader.Find(key);
    if (bound == nullptr) return otherwise;
    if (key != "from" && bound->AsString() != nullptr) {
      const std::string& text = *bound->AsString();
      const std::string first = text.substr(0, text.find(" or "));
      if (Evaluate(first, scope_).ok()) by = first;
    }
    return Number(*bound, reader.PathOf(key), {.min = 0, .max = kCountMax})
        .value_or(otherwise);
  };
  const int64_t from = bound("from", 0);
  int64_t end = bound("to", all_layers());
  int64_t every = bound("every", 1);
  const JsonValue* of_every = reader.Find("every");
  // Parts of a tower are counted by a number of their own.
  if (!is_tower_) end = std::min(end, all_layers());
  if (every == 0 && from < end) {
    values_.Wrong(*of_every, reader.PathOf("every"), "1 or more");
  }
  every = std::max<int64_t>(every, 1);
  const int64_t at = bound("at", every - 1);
  const bool of_prediction = !is_tower_ && from >= layers();
  std::set<int64_t> left_out;
  if (const JsonValue* except = reader.Find("except")) {
    left_out = ReadExcept(*except, reader.PathOf("except"));
  }
  if (const JsonValue* besides = reader.Find("besides")) {
    left_out.merge(ReadBesides(*besides, reader.PathOf("besides")));
  }
  std::optional<std::set<int64_t>> chosen;
  if (const JsonValue* where = reader.Find("where");
      where != nullptr && from < end) {
    chosen = ReadWhere(*where, reader.PathOf("where"), of_prediction,
                       of_every != nullptr);
  }
  const JsonValue* alike = reader.Find("alike");
  reader.RejectOtherKeys();
  std::set<int64_t> layers;
  for (int64_t layer = from; layer < end; ++layer) {
    if (left_out.contains(layer)) continue;
    if (chosen.has_value() ? chosen->contains(layer)
                           : (layer - from) % every == at) {
      layers.insert(layer);
    }
  }
  const std::string alike_path = reader.PathOf("alike");
  if (alike != nullptr && values_.IsObject(*alike, alike_path) && from < end) {
    for (const JsonMember& list : *alike->AsObject()) {
      CheckLayersAlike(list, alike_path, of_prediction, layers, by);
    }
  }
  return {layers.begin(), layers.end()};
}

void RulesReader::CheckLayersAlike(const JsonMember& list,
                                   const std::string& path, bool of_prediction,
                                   const std::set<int64_t>& layers,
                                   const std::string& by) {
  if (scope_.Find(list.key) == nullptr) return;
  if (list.value.AsBool() != nullptr) {
    return CheckNumbersAlike(list, layers, by);
  }
  const std::vector<std::string> words =
      WordsOfSet(list.value, absl::StrCat(path, ".", list.key));
  if (words.empty() || !Evaluate("layers", scope_).ok()) return;
  const auto report = [&](const std::string& mistake) {
    // Sets that leave each other out make one mistake twice.
    if (!reported_.insert(list.key).second) return;
    config_.Error(list.key, absl::StrCat(list.key, " ", mistake));
  };
  const LayerWords found = WordsOfLayers(list.key, of_prediction, report);
  const std::vector<std::string>& known = known_words_[list.key];
  for (size_t i = 0; i < found.words.size(); ++i) {
    const std::string& word = found.words[i];
    const int64_t layer = found.first + static_cast<int64_t>(i);
    const bool has = layers.contains(layer);
    if (has == HasWord(words, word)) continue;
    if (!HasWord(known, word)) {
      return report(
          absl::StrFormat("has a layer %s; wanted %s", Quoted(word),
                          Alternatives({known.begin(), known.end()})));
    }
    return report(absl::StrFormat(
        "of layer %d is %s, and by %s it is %s%s: frameworks differ in which "
        "they read; wanted both alike",
        layer, Quoted(word), by, has ? "" : "not ", Quoted(words[0])));
  }
}

void RulesReader::CheckNumbersAlike(const JsonMember& list,
                                    const std::set<int64_t>& layers,
                                    const std::string& by) {
  const std::vector<int64_t> numbers = config_.IntegersOr(list.key, {});
  if (std::set<int64_t>(numbers.begin(), numbers.end()) == layers) return;
  config_.Error(list.key,
                "%s names other layers than %s does: frameworks differ in "
                "which they read; wanted both alike",
                list.key, by);
}

}  // namespace refit
