// Facts that are said once, as lines of text or as JSON.
#ifndef REFIT_PLAN_TEXT_FACT_WRITER_H_
#define REFIT_PLAN_TEXT_FACT_WRITER_H_

#include <flatbuffers/flatbuffers.h>

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "plan/text/json_writer.h"

namespace refit {

enum class FactForm : uint8_t { kText, kJson };

// JSON gets each fact where it is said, with its key. Text gets those that the
// next Line names.
class FactWriter {
 public:
  explicit FactWriter(FactForm form) : is_json_(form == FactForm::kJson) {}

  // A line with the facts said since the last one. "{key}" stands for a fact.
  // Bars divide the line: a part with a fact that was not said is left out.
  // "round {round}| by {rank}"
  void Line(std::string_view line);

  // An object of its own; "": the one that holds all others.
  template <typename Say>
  void Object(std::string_view key, Say say) {
    if (is_json_) key.empty() ? json_.OpenObject() : json_.OpenObject(key);
    say();
    if (is_json_) json_.CloseObject();
  }
  // A list of objects, one for each of `things`. Text shows it as lines.
  template <typename Things, typename Say>
  void List(std::string_view key, const Things& things, Say say) {
    if (is_json_) json_.OpenArray(key);
    for (const auto& thing : things) Row([&] { say(thing); });
    if (is_json_) json_.CloseArray();
  }
  template <typename Thing, typename Say>
  void List(std::string_view key, const flatbuffers::Vector<Thing>* things,
            Say say) {
    if (is_json_) json_.OpenArray(key);
    for (uint32_t i = 0; things != nullptr && i < things->size(); ++i) {
      Row([&] { say(*things->Get(i)); });
    }
    if (is_json_) json_.CloseArray();
  }

  void Number(std::string_view key, std::integral auto value) {
    is_json_ ? json_.Number(key, value) : Shown(key, absl::StrCat(value));
  }
  // Said only if it is not 0.
  void Positive(std::string_view key, std::unsigned_integral auto value) {
    if (value > 0) Number(key, value);
  }
  // With six digits in text.
  void Real(std::string_view key, double value) {
    is_json_ ? json_.Real(key, value) : Shown(key, absl::StrCat(value));
  }
  // Nothing in text, where a false one leaves its part of the line out.
  void Flag(std::string_view key, bool value) {
    if (is_json_) json_.Bool(key, value);
    if (value) Shown(key, "");
  }
  // A word of ours.
  void Word(std::string_view key, std::string_view word) {
    is_json_ ? json_.Text(key, word) : Shown(key, std::string(word));
  }
  // A name that another program chose: text quotes it. Null is not said.
  void Name(std::string_view key, std::string_view name);
  void Name(std::string_view key, const flatbuffers::String* name) {
    if (name != nullptr) Name(key, name->string_view());
  }
  // "[2, 3]"
  void Dims(std::string_view key, const flatbuffers::Vector<uint64_t>* dims);
  // "0..3, 8"
  void Ranks(std::string_view key, const std::vector<int32_t>& ranks);

  // What only text says, or says in other words.
  void Shown(std::string_view key, std::string text) {
    if (!is_json_) said_.emplace_back(key, std::move(text));
  }
  // What only JSON says.
  template <typename Things>
  void Values(std::string_view key, const Things& values) {
    if (is_json_) json_.Line(key, values);
  }
  // Null where the text is written.
  JsonWriter* json() { return is_json_ ? &json_ : nullptr; }

  std::string Take() { return is_json_ ? json_.Take() : std::move(text_); }

 private:
  void AddPart(std::string_view part);
  // Whatever no line of the row before named is forgotten.
  template <typename Say>
  void Row(Say say) {
    said_.clear();
    Object("", say);
  }

  const bool is_json_;
  JsonWriter json_;
  std::string text_;
  std::vector<std::pair<std::string_view, std::string>> said_;
};

}  // namespace refit

#endif  // REFIT_PLAN_TEXT_FACT_WRITER_H_
