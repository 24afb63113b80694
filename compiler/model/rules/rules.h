// A model family from a file of rules, which is the user's or one of
// compiler/model/families/*.json, which the build compiles in.
#ifndef REFIT_COMPILER_MODEL_RULES_RULES_H_
#define REFIT_COMPILER_MODEL_RULES_RULES_H_

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "compiler/model/config.h"
#include "compiler/model/family.h"
#include "compiler/model/model.h"

namespace refit {

// A family, and what its views name.
struct OwnFamily {
  Family family;
  std::string model_type;
  // Their elements stay where they are.
  std::deque<std::vector<std::string>> texts;
  std::deque<std::vector<Rename>> renames;
  std::deque<std::vector<Fusion>> fusions;
};

// A file that is compiled in.
struct BuiltInRules {
  std::string_view model_type;
  std::string_view transformers_class;  // "": there is none
  std::string_view text;
};
// In alphabetical order of model_type. CMake writes it from families/*.json.
absl::Span<const BuiltInRules> AllBuiltInRules();
// nullptr for a model_type that none has.
const BuiltInRules* FindBuiltInRules(std::string_view model_type);

// Fills `model` as the family of a file does: own_family, architecture, params,
// skips. `path` was named at `asked`, `config` is an object of its model_type.
// Every mistake is reported with its place in the file; the model is not used
// then.
void BuildByRules(const std::string& path, const Place& asked,
                  ConfigReader& config, Model& model);
// The same by a file that is compiled in. A mistake is the config's, and has
// its place there.
void BuildByRules(const BuiltInRules& rules, ConfigReader& config,
                  Model& model);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_RULES_RULES_H_
