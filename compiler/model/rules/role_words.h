// The words for roles that a file of rules may use.
#ifndef REFIT_COMPILER_MODEL_RULES_ROLE_WORDS_H_
#define REFIT_COMPILER_MODEL_RULES_ROLE_WORDS_H_

#include <optional>
#include <string_view>
#include <vector>

#include "compiler/ir/param_role.h"

namespace refit {

// In the order of the docs.
std::vector<std::string_view> RoleWords();
// The word for a role; "" if no file may use it.
std::string_view RoleWord(ParamRole role);
// The role of a word; nullopt: there is none.
std::optional<ParamRole> RoleOf(std::string_view word);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_RULES_ROLE_WORDS_H_
