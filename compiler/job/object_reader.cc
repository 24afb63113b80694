#include "compiler/job/object_reader.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "llvm/ADT/STLExtras.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

constexpr int64_t kUnknownKeysMax = 100;

std::string RangeText(IntegerRange range) {
  constexpr IntegerRange kAny;
  if (range.min == kAny.min && range.max == kAny.max) return "an integer";
  if (range.max == kAny.max) {
    return absl::StrCat("an integer of at least ", range.min);
  }
  return absl::StrCat("an integer from ", range.min, " to ", range.max);
}

// nullptr without one in the range.
const int64_t* IntegerIn(const JsonValue& value, IntegerRange range) {
  const int64_t* integer = value.AsInteger();
  if (integer == nullptr || *integer < range.min || *integer > range.max) {
    return nullptr;
  }
  return integer;
}

// nullptr without one that is not empty.
const std::string* StringIn(const JsonValue& value) {
  const std::string* string = value.AsString();
  return string == nullptr || string->empty() ? nullptr : string;
}

// The key that frameworks' flags shorten: "tp" and "tp_size" are
// tensor_parallel. "" if there is none.
std::string_view KeyOfInitials(std::string_view word,
                               const std::vector<std::string_view>& keys) {
  constexpr std::string_view kSize = "_size";
  if (word.ends_with(kSize)) word.remove_suffix(kSize.size());
  if (word.size() < 2) return "";
  for (const std::string_view key : keys) {
    std::string initials;
    for (size_t i = 0; i < key.size(); ++i) {
      if (i == 0 || key[i - 1] == '_') initials += key[i];
    }
    if (initials == word) return key;
  }
  return "";
}

template <typename T>
std::optional<T> ReadAs(const ValueReader& values, const JsonValue& value,
                        std::string_view what, IntegerRange range) {
  if constexpr (std::is_same_v<T, bool>) {
    return values.Bool(value, what);
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return values.Integer(value, what, range);
  } else if constexpr (std::is_same_v<T, double>) {
    return values.PositiveNumber(value, what);
  } else if constexpr (std::is_same_v<T, std::string>) {
    const std::string* text = values.String(value, what);
    return text == nullptr ? std::nullopt : std::optional(*text);
  } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
    return values.Integers(value, what, range);
  } else {
    return values.Strings(value, what);
  }
}

}  // namespace

void ValueReader::Error(const JsonValue& value, std::string message) const {
  diagnostics_.Error(PlaceOf(value), std::move(message));
}

void ValueReader::Wrong(const JsonValue& value, std::string_view what,
                        std::string_view wanted) const {
  Error(value,
        absl::StrFormat("%s is %s; wanted %s", what, value.Text(), wanted));
}

void ValueReader::WrongElements(const JsonValue::Array& array,
                                std::string_view what,
                                const std::vector<size_t>& wrong,
                                std::string_view wanted) const {
  if (wrong.empty()) return;
  const size_t first = wrong.front();
  Error(
      array[first],
      absl::StrFormat(
          "%s[%d] is %s; wanted %s%s", what, first, array[first].Text(), wanted,
          wrong.size() == 1
              ? ""
              : absl::StrFormat(" (%d more of this list)", wrong.size() - 1)));
}

std::optional<int64_t> ValueReader::Integer(const JsonValue& value,
                                            std::string_view what,
                                            IntegerRange range) const {
  const int64_t* integer = IntegerIn(value, range);
  if (integer == nullptr) {
    Wrong(value, what, RangeText(range));
    return std::nullopt;
  }
  return *integer;
}

std::optional<bool> ValueReader::Bool(const JsonValue& value,
                                      std::string_view what) const {
  if (const bool* boolean = value.AsBool()) return *boolean;
  Wrong(value, what, "true or false");
  return std::nullopt;
}

std::optional<double> ValueReader::PositiveNumber(const JsonValue& value,
                                                  std::string_view what) const {
  double number = 0;
  if (const int64_t* integer = value.AsInteger()) {
    number = static_cast<double>(*integer);
  } else if (const double* real = value.AsDouble()) {
    number = *real;
  }
  if (!(number > 0) || !std::isfinite(number)) {
    Wrong(value, what, "a number above 0");
    return std::nullopt;
  }
  return number;
}

const std::string* ValueReader::String(const JsonValue& value,
                                       std::string_view what,
                                       std::string_view wanted) const {
  const std::string* string = StringIn(value);
  if (string == nullptr) Wrong(value, what, wanted);
  return string;
}

const JsonValue::Array* ValueReader::Array(const JsonValue& value,
                                           std::string_view what,
                                           std::string_view wanted) const {
  const JsonValue::Array* array = value.AsArray();
  if (array == nullptr) Wrong(value, what, wanted);
  return array;
}

bool ValueReader::IsObject(const JsonValue& value,
                           std::string_view what) const {
  if (value.AsObject() != nullptr) return true;
  Wrong(value, what, "an object");
  return false;
}

std::optional<std::vector<int64_t>> ValueReader::Integers(
    const JsonValue& value, std::string_view what, IntegerRange range) const {
  const JsonValue::Array* array = Array(value, what, "an array of integers");
  if (array == nullptr) return std::nullopt;
  std::vector<int64_t> integers;
  integers.reserve(array->size());
  std::vector<size_t> wrong;
  for (size_t i = 0; i < array->size(); ++i) {
    const int64_t* integer = IntegerIn((*array)[i], range);
    if (integer == nullptr) {
      wrong.push_back(i);
    } else {
      integers.push_back(*integer);
    }
  }
  WrongElements(*array, what, wrong, RangeText(range));
  if (!wrong.empty()) return std::nullopt;
  return integers;
}

std::optional<std::vector<std::string>> ValueReader::Strings(
    const JsonValue& value, std::string_view what) const {
  const JsonValue::Array* array = Array(value, what, "an array of strings");
  if (array == nullptr) return std::nullopt;
  std::vector<std::string> strings;
  strings.reserve(array->size());
  std::vector<size_t> wrong;
  for (size_t i = 0; i < array->size(); ++i) {
    const std::string* string = StringIn((*array)[i]);
    if (string == nullptr) {
      wrong.push_back(i);
    } else {
      strings.push_back(*string);
    }
  }
  WrongElements(*array, what, wrong, "a string");
  if (!wrong.empty()) return std::nullopt;
  return strings;
}

ObjectReader::ObjectReader(const ValueReader& values, const JsonValue& value,
                           std::string path)
    : values_(values), value_(value), path_(std::move(path)) {}

const JsonValue* ObjectReader::Find(std::string_view key) {
  if (!llvm::is_contained(known_, key)) known_.emplace_back(key);
  return Peek(key);
}

const JsonValue* ObjectReader::Peek(std::string_view key) const {
  for (const JsonMember& member : members()) {
    if (member.key == key) return &member.value;
  }
  return nullptr;
}

const JsonValue* ObjectReader::Require(std::string_view key,
                                       std::string_view wanted) {
  const JsonValue* value = Find(key);
  if (value == nullptr) {
    values_.Error(value_, "missing key \"%s\"%s%s; wanted %s", key,
                  path_.empty() ? "" : " in ", path_, wanted);
  }
  return value;
}

template <typename T>
void ObjectReader::Read(std::string_view key, IntegerRange range,
                        Located<T>& target) {
  const JsonValue* value = Find(key);
  if (value == nullptr) {
    target.place = place();
    return;
  }
  std::optional<T> read = ReadAs<T>(values_, *value, PathOf(key), range);
  if (!read.has_value()) return;
  target = {.value = *std::move(read),
            .place = values_.PlaceOf(*value),
            .given = true};
}

template void ObjectReader::Read(std::string_view, IntegerRange,
                                 Located<bool>&);
template void ObjectReader::Read(std::string_view, IntegerRange,
                                 Located<int64_t>&);
template void ObjectReader::Read(std::string_view, IntegerRange,
                                 Located<double>&);
template void ObjectReader::Read(std::string_view, IntegerRange,
                                 Located<std::string>&);
template void ObjectReader::Read(std::string_view, IntegerRange,
                                 Located<std::vector<int64_t>>&);
template void ObjectReader::Read(std::string_view, IntegerRange,
                                 Located<std::vector<std::string>>&);

size_t ObjectReader::Word(std::string_view key,
                          const std::vector<std::string_view>& words,
                          std::string_view wanted, Place& place) {
  place = this->place();
  const JsonValue* value = Find(key);
  if (value == nullptr) return words.size();
  const std::string* word = values_.String(*value, PathOf(key), wanted);
  if (word == nullptr) return words.size();
  place = values_.PlaceOf(*value);
  const auto found = std::find(words.begin(), words.end(), *word);
  if (found == words.end()) values_.Wrong(*value, PathOf(key), wanted);
  return static_cast<size_t>(found - words.begin());
}

void ObjectReader::Refuse(std::string_view key, std::string message) {
  if (Peek(key) == nullptr) return;
  values_.diagnostics().Error(PlaceOfKey(key), std::move(message));
  refused_.emplace_back(key);
}

void ObjectReader::RejectOtherKeys() const {
  const std::vector<std::string_view> known(known_.begin(), known_.end());
  int64_t unknown = 0;
  for (const JsonMember& member : members()) {
    if (llvm::is_contained(known, member.key) ||
        llvm::is_contained(refused_, member.key))
      continue;
    // An object of nothing but unknown keys is no job: do not go on for long.
    if (++unknown > kUnknownKeysMax) return;
    std::string nearest(KeyOfInitials(member.key, known));
    if (nearest.empty()) nearest = NearestWord(member.key, known);
    const std::string hint =
        nearest.empty() ? absl::StrFormat("; wanted %s", Alternatives(known))
                        : absl::StrFormat("; did you mean \"%s\"?", nearest);
    values_.diagnostics().Error(values_.document().PlaceAt(member.key_offset),
                                "unknown key %s%s%s%s", Quoted(member.key),
                                path_.empty() ? "" : " in ", path_, hint);
  }
}

Place ObjectReader::PlaceOfKey(std::string_view key) const {
  for (const JsonMember& member : members()) {
    if (member.key == key) return values_.document().PlaceAt(member.key_offset);
  }
  return place();
}

std::string ObjectReader::PathOf(std::string_view key) const {
  return absl::StrFormat("%s%s%s", path_, path_.empty() ? "" : ".", key);
}

std::string Alternatives(const std::vector<std::string_view>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " or " : ", ";
    text += words[i];
  }
  return text;
}

}  // namespace refit
