// Model families: the parameters of a network, from its config.json.
//
// A family is one small file of names, shapes and roles, and one line of the
// table in families.cc; nothing else knows it.
#ifndef REFIT_COMPILER_MODEL_FAMILIES_H_
#define REFIT_COMPILER_MODEL_FAMILIES_H_

#include <string_view>
#include <vector>

#include "compiler/model/config.h"
#include "compiler/model/model.h"

namespace refit {

// `model.mtp` is set. Fills the rest of `model`: `model.architecture` and
// `model.params`: embedding, stacks of the layers in the order of computation,
// final norm, head. A tied head is a skip. Wrong keys are reported by `config`;
// the model is not used then.
using FamilyFunction = void (*)(ConfigReader& config, Model& model);

// nullptr for a model_type that no family has.
FamilyFunction FindFamily(std::string_view model_type);

// The known model_types, in alphabetical order.
std::vector<std::string_view> FamilyNames();

// One per kind of network; several model_types may name it.
void BuildDeepseekV3(ConfigReader& config, Model& model);
void BuildGlm4Moe(ConfigReader& config, Model& model);
void BuildGptOss(ConfigReader& config, Model& model);
void BuildLlama(ConfigReader& config, Model& model);
void BuildMixtral(ConfigReader& config, Model& model);
void BuildNemotronH(ConfigReader& config, Model& model);
void BuildQwen2(ConfigReader& config, Model& model);
void BuildQwen3(ConfigReader& config, Model& model);
void BuildQwen3Moe(ConfigReader& config, Model& model);
void BuildQwen3Next(ConfigReader& config, Model& model);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_FAMILIES_H_
