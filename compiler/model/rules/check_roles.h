// What the params of a file of rules say of each other.
#ifndef REFIT_COMPILER_MODEL_RULES_CHECK_ROLES_H_
#define REFIT_COMPILER_MODEL_RULES_CHECK_ROLES_H_

#include <cstddef>

#include "absl/types/span.h"
#include "compiler/job/json.h"
#include "compiler/job/object_reader.h"
#include "compiler/model/model.h"

namespace refit {

// What the file says of a param.
struct Rule {
  size_t param;  // of model.params
  const JsonValue* value;
};

// Reports a name twice, roles twice in a layer, roles that lack what belongs to
// them, and shapes that do not fit together.
void CheckRoles(absl::Span<const Rule> rules, const Model& model,
                const ValueReader& values);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_RULES_CHECK_ROLES_H_
