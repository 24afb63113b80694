// Expressions of a rules file: sizes from the keys of a config.json.
#ifndef REFIT_COMPILER_MODEL_RULES_EXPRESSION_H_
#define REFIT_COMPILER_MODEL_RULES_EXPRESSION_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/job/json.h"

namespace refit {

// What names in an expression stand for: sizes that the file defines, else
// keys of the config, of which null counts as missing.
struct ExpressionScope {
  const JsonValue::Object& config;
  std::vector<std::pair<std::string, int64_t>> sizes;

  // nullptr without the key.
  const JsonValue* Find(std::string_view key) const;
  // "config.json has no key …", with the nearest one.
  std::string NoKey(std::string_view key) const;
};

// The value of `text`: integers, true and false (1 and 0), names, + - * / and
// parentheses; "A or B" is B where the config lacks a key that A names; "not A"
// is 1 where A is 0. Division must leave no remainder. The status says what is
// wrong, without the text: NotFound for a missing key, else InvalidArgument.
absl::StatusOr<int64_t> Evaluate(std::string_view text,
                                 const ExpressionScope& scope);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_RULES_EXPRESSION_H_
