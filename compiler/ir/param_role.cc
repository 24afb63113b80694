#include "compiler/ir/param_role.h"

#include <cstddef>
#include <iterator>

namespace refit {
namespace {

enum class Trait : uint8_t {
  kNothing,
  kBlocks,
  kFp32,
  kPlain,
  kPlainFp32,
  kPrediction
};

constexpr RoleForm FormWith(std::string_view word, RoleScope scope, int dims,
                            Trait trait) {
  return {.word = word,
          .scope = scope,
          .dims = dims,
          .block_quantized = trait == Trait::kBlocks,
          .always_fp32 = trait == Trait::kFp32 || trait == Trait::kPlainFp32,
          .plain_module = trait == Trait::kPlain || trait == Trait::kPlainFp32,
          .of_prediction = trait == Trait::kPrediction};
}

constexpr RoleForm kForms[] = {
#define REFIT_ROLE(name, word, scope, dims, trait) \
  FormWith(word, RoleScope::scope, dims, Trait::trait),
#include "compiler/ir/param_roles.inc"
#undef REFIT_ROLE
};

}  // namespace

const RoleForm& FormOf(ParamRole role) {
  return kForms[static_cast<size_t>(role)];
}

std::vector<std::string_view> RoleWords() {
  std::vector<std::string_view> words;
  for (const RoleForm& form : kForms) {
    if (!form.word.empty()) words.push_back(form.word);
  }
  return words;
}

std::optional<ParamRole> RoleOf(std::string_view word) {
  for (size_t i = 0; i < std::size(kForms); ++i) {
    if (!word.empty() && kForms[i].word == word) {
      return static_cast<ParamRole>(i);
    }
  }
  return std::nullopt;
}

}  // namespace refit
