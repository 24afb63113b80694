#include "compiler/model/rules/expression.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <optional>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

constexpr int kDepthMax = 64;
constexpr char kKeyOfStatus[] = "key of config.json";

bool IsWordCharacter(char c) { return absl::ascii_isalnum(c) || c == '_'; }

// Recursive descent; stops at the first mistake.
class Evaluator {
 public:
  Evaluator(std::string_view text, const ExpressionScope& scope)
      : text_(text), scope_(scope) {}

  absl::StatusOr<int64_t> Whole() {
    const absl::StatusOr<int64_t> value = Choice();
    if (!value.ok()) return value;
    if (!Next().empty()) {
      return Wrong(absl::StrFormat("%s stands after its end", Quoted(Next())));
    }
    return value;
  }

 private:
  static absl::Status OfKey(std::string_view key, absl::Status status) {
    status.SetPayload(kKeyOfStatus, absl::Cord(std::string(key)));
    return status;
  }
  static absl::Status Wrong(const std::string& message) {
    return absl::InvalidArgumentError(message);
  }

  // The next word, number or sign; "" at the end.
  std::string_view Next() {
    while (at_ < text_.size() && absl::ascii_isspace(text_[at_])) ++at_;
    size_t end = at_;
    while (end < text_.size() && IsWordCharacter(text_[end])) ++end;
    if (end == at_ && end < text_.size()) ++end;
    if (text_.substr(at_, 2) == "//") ++end;
    return text_.substr(at_, end - at_);
  }
  bool Take(std::string_view token) {
    if (Next() != token) return false;
    at_ += token.size();
    return true;
  }

  absl::StatusOr<int64_t> Choice() {
    if (++depth_ > kDepthMax) return Wrong("it is nested too deep");
    absl::StatusOr<int64_t> value = Negation();
    while (Take("or")) {
      const absl::StatusOr<int64_t> other = Negation();
      // A mistake that is no missing key is one whatever the config has.
      if (!other.ok() && !absl::IsNotFound(other.status())) return other;
      if (absl::IsNotFound(value.status())) value = other;
      if (!value.ok() && !absl::IsNotFound(value.status())) return value;
    }
    --depth_;
    return value;
  }

  absl::StatusOr<int64_t> Negation() {
    if (!Take("not")) return Sum();
    const absl::StatusOr<int64_t> value = Sum();
    if (!value.ok()) return value;
    return *value == 0 ? 1 : 0;
  }

  using Part = absl::StatusOr<int64_t> (Evaluator::*)();
  // Parts with signs between them, from the left.
  absl::StatusOr<int64_t> Chain(Part part, std::string_view sign,
                                std::string_view other) {
    absl::StatusOr<int64_t> value = (this->*part)();
    while (Next().starts_with(sign) || Next().starts_with(other)) {
      const std::string_view found = Next();
      at_ += found.size();
      value = Joined(value, found, (this->*part)());
    }
    return value;
  }
  absl::StatusOr<int64_t> Sum() { return Chain(&Evaluator::Product, "+", "-"); }
  absl::StatusOr<int64_t> Product() {
    return Chain(&Evaluator::Operand, "*", "/");
  }

  // A mistake in the form of either side comes before a missing key, so that
  // "or" hides none.
  static absl::StatusOr<int64_t> Joined(const absl::StatusOr<int64_t>& a,
                                        std::string_view sign,
                                        const absl::StatusOr<int64_t>& b) {
    if (!a.ok() && !absl::IsNotFound(a.status())) return a;
    if (!b.ok()) return b;
    if (!a.ok()) return a;
    int64_t result = 0;
    bool overflows = false;
    switch (sign[0]) {
      case '+':
        overflows = __builtin_add_overflow(*a, *b, &result);
        break;
      case '-':
        overflows = __builtin_sub_overflow(*a, *b, &result);
        break;
      case '*':
        overflows = __builtin_mul_overflow(*a, *b, &result);
        break;
      default:
        if (*b == 0) return Wrong(absl::StrFormat("%d / 0 is no number", *a));
        if (*b == -1) {
          overflows = __builtin_sub_overflow(int64_t{0}, *a, &result);
          break;
        }
        result = *a / *b;
        if (*a % *b == 0) break;
        if (sign == "/") {
          return Wrong(absl::StrFormat("%d / %d is no whole number", *a, *b));
        }
        if ((*a < 0) != (*b < 0)) --result;
    }
    if (overflows) {
      return Wrong(absl::StrFormat("%d %s %d is too large", *a, sign, *b));
    }
    return result;
  }

  absl::StatusOr<int64_t> Operand() {
    const std::string_view token = Next();
    if (token.empty()) return Wrong("a number or a name is missing at its end");
    if (Take("(")) {
      absl::StatusOr<int64_t> value = Choice();
      if (!value.ok() && !absl::IsNotFound(value.status())) return value;
      if (!Take(")")) {
        return Wrong(absl::StrFormat(
            "%s; wanted \")\"", Next().empty()
                                    ? "it ends"
                                    : absl::StrCat("it has ", Quoted(Next()))));
      }
      return value;
    }
    if (!IsWordCharacter(token[0]) || token == "or" || token == "not") {
      return Wrong(absl::StrFormat(
          "%s stands where a number or a name is wanted", Quoted(token)));
    }
    at_ += token.size();
    if (absl::ascii_isdigit(token[0])) {
      int64_t number = 0;
      const auto [end, error] =
          std::from_chars(token.data(), token.data() + token.size(), number);
      if (error == std::errc() && end == token.data() + token.size()) {
        return number;
      }
      return Wrong(absl::StrFormat("%s is no number", Quoted(token)));
    }
    if (token == "true") return 1;
    if (token == "false") return 0;
    return text_.substr(at_, 1) == "." ? Words(token) : Named(token);
  }

  // "layer_types.dense": how many words of the config's list are "dense". Of a
  // string 1 or 0; of an object the member. "sizes.count": how many elements it
  // has, or letters; "sizes.0": the first.
  absl::StatusOr<int64_t> Words(std::string_view key) {
    ++at_;
    const std::string_view word = Next();
    if (word.empty() || !IsWordCharacter(word[0])) {
      return Wrong(absl::StrFormat("a word is missing behind \"%s.\"", key));
    }
    at_ += word.size();
    const JsonValue* value = scope_.Find(key);
    if (value == nullptr) {
      return OfKey(key, absl::NotFoundError(scope_.NoKey(key)));
    }
    const JsonValue::Array* words = value->AsArray();
    const bool is_element = absl::ascii_isdigit(word[0]);
    if (is_element || word == "count") {
      const auto wrong = [&](std::string_view wanted) {
        return Wrong(absl::StrFormat("config.json has %s as %s, which is no %s",
                                     Quoted(key), value->Text(), wanted));
      };
      if (const std::string* letters = value->AsString();
          letters != nullptr && !is_element) {
        return static_cast<int64_t>(letters->size());
      }
      if (words == nullptr) return wrong("list");
      if (!is_element) return static_cast<int64_t>(words->size());
      size_t at = 0;
      const auto [end, error] =
          std::from_chars(word.data(), word.data() + word.size(), at);
      if (error != std::errc() || end != word.data() + word.size() ||
          at >= words->size() || (*words)[at].AsInteger() == nullptr) {
        return wrong(absl::StrFormat("list with an integer at %s", word));
      }
      return *(*words)[at].AsInteger();
    }
    if (const JsonValue::Object* members = value->AsObject()) {
      for (const JsonMember& member : *members) {
        if (member.key != word || member.value.AsInteger() == nullptr) continue;
        return *member.value.AsInteger();
      }
      return OfKey(key, absl::NotFoundError(absl::StrFormat(
                            "config.json's %s has no integer %s", Quoted(key),
                            Quoted(word))));
    }
    const auto is_word = [&](const JsonValue& found) {
      return found.AsString() != nullptr && *found.AsString() == word;
    };
    if (words != nullptr) {
      return std::count_if(words->begin(), words->end(), is_word);
    }
    return is_word(*value) ? 1 : 0;
  }

  absl::StatusOr<int64_t> Named(std::string_view name) {
    for (const auto& [size, value] : scope_.sizes) {
      if (size != name) continue;
      if (value.has_value()) return *value;
      return absl::UnavailableError("its mistake was reported");
    }
    const JsonValue* value = scope_.Find(name);
    if (value == nullptr) {
      for (const auto& [key, otherwise] : scope_.defaults) {
        if (key == name) return otherwise;
      }
      return OfKey(name, absl::NotFoundError(scope_.NoKey(name)));
    }
    if (const bool* flag = value->AsBool()) return *flag ? 1 : 0;
    if (const int64_t* number = value->AsInteger()) return *number;
    return OfKey(name, Wrong(absl::StrFormat(
                           "config.json has %s as %s, which is no integer",
                           Quoted(name), value->Text())));
  }

  const std::string_view text_;
  const ExpressionScope& scope_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace

const JsonValue* ExpressionScope::Find(std::string_view key) const {
  for (const JsonValue::Object* keys : {&config, beside}) {
    if (keys == nullptr) continue;
    for (const JsonMember& member : *keys) {
      if (member.key == key && !member.value.IsNull()) return &member.value;
    }
  }
  return nullptr;
}

std::string ExpressionScope::NoKey(std::string_view key) const {
  std::vector<std::string_view> known;
  for (const auto& [name, value] : sizes) known.push_back(name);
  for (const JsonMember& member : config) {
    if (!member.value.IsNull()) known.push_back(member.key);
  }
  const std::string nearest = NearestWord(key, known);
  return absl::StrFormat(
      "config.json has no key %s%s", Quoted(key),
      nearest.empty() ? "; wanted one of its keys, or a size of the rules"
                      : absl::StrFormat("; did you mean \"%s\"?", nearest));
}

absl::StatusOr<int64_t> Evaluate(std::string_view text,
                                 const ExpressionScope& scope) {
  return Evaluator(text, scope).Whole();
}

std::string KeyOf(const absl::Status& status) {
  return std::string(status.GetPayload(kKeyOfStatus).value_or(absl::Cord()));
}

}  // namespace refit
