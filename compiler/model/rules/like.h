// Files of rules that say only in what they differ from another one.
#ifndef REFIT_COMPILER_MODEL_RULES_LIKE_H_
#define REFIT_COMPILER_MODEL_RULES_LIKE_H_

#include <optional>

#include "compiler/job/json.h"
#include "compiler/job/object_reader.h"

namespace refit {

// The rules of the file `root`, with those of the family that its "like" names
// where it says nothing else. Values of that family stand where it is named.
// nullopt after a report.
std::optional<JsonValue> CompleteRules(const JsonValue& root,
                                       const ValueReader& values);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_RULES_LIKE_H_
