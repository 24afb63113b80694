#include "compiler/model/families.h"

#include <array>

namespace refit {
namespace {

struct Family {
  std::string_view model_type;
  FamilyFunction build;
};

constexpr std::array kFamilies = {
    Family{"deepseek_v3", BuildDeepseekV3},
    Family{"glm4_moe", BuildGlm4Moe},
    Family{"glm4_moe_lite", BuildDeepseekV3},
    Family{"gpt_oss", BuildGptOss},
    Family{"kimi_k2", BuildDeepseekV3},
    Family{"llama", BuildLlama},
    Family{"mixtral", BuildMixtral},
    Family{"nemotron_h", BuildNemotronH},
    Family{"qwen2", BuildQwen2},
    Family{"qwen3", BuildQwen3},
    Family{"qwen3_moe", BuildQwen3Moe},
    Family{"qwen3_next", BuildQwen3Next},
};

}  // namespace

FamilyFunction FindFamily(std::string_view model_type) {
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) return family.build;
  }
  return nullptr;
}

std::vector<std::string_view> FamilyNames() {
  std::vector<std::string_view> names;
  for (const Family& family : kFamilies) names.push_back(family.model_type);
  return names;
}

}  // namespace refit
