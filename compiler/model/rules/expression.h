// Expressions of a rules file: sizes from the keys of a config.json.
#ifndef REFIT_COMPILER_MODEL_RULES_EXPRESSION_H_
#define REFIT_COMPILER_MODEL_RULES_EXPRESSION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/job/json.h"

namespace refit {

// What names in an expression stand for: sizes that the file defines, else
// keys of the config, of which null counts as missing. A size without a value
// is one whose mistake was reported. A default is for a key that the config
// lacks altogether.
struct ExpressionScope {
  const JsonValue::Object& config;
  std::vector<std::pair<std::string, std::optional<int64_t>>> sizes;
  std::vector<std::pair<std::string, int64_t>> defaults = {};
  // What holds `config`, and has the keys that this lacks; nullptr: nothing.
  const JsonValue::Object* beside = nullptr;

  // nullptr without the key.
  const JsonValue* Find(std::string_view key) const;
  // "config.json has no key …", with the nearest one.
  std::string NoKey(std::string_view key) const;
};

// The value of `text`: integers, true and false (1 and 0), names, + - * / and
// parentheses; "A or B" is B where the config lacks a key that A names; "not A"
// is 1 where A is 0; "KEY.WORD" is how many words of a list are WORD, of a
// string 1 or 0, and of an object its member; "KEY.count" is how many elements
// a list has, or letters a string, and "KEY.0" its first one. "/" must leave no
// remainder, and "//" drops it. The status says what is wrong, without the
// text: NotFound for a missing key, Unavailable for a size without a value,
// else InvalidArgument.
absl::StatusOr<int64_t> Evaluate(std::string_view text,
                                 const ExpressionScope& scope);
// The key of the config that such a status is about; "": it is about none.
std::string KeyOf(const absl::Status& status);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_RULES_EXPRESSION_H_
