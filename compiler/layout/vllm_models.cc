#include "compiler/layout/vllm_models.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "compiler/layout/serving.h"

namespace refit::vllm {

std::string ModuleName(std::string_view family, std::string name) {
  if (family == "nemotron_h") return NemotronName(std::move(name));
  if (family == "gpt_oss") {
    name = absl::StrReplaceAll(
        name, {{".self_attn.", ".attn."}, {".embed_tokens.", ".embedding."}});
  }
  return name;
}

bool DraftHasPrefix(std::string_view family) {
  return family == "qwen3_next" || family == "nemotron_h";
}

bool HasFp32Router(std::string_view family) {
  return family == "glm4_moe" || family == "glm4_moe_lite";
}

bool BuildsEndsOnEveryStage(std::string_view family) {
  return family == "qwen3_moe" || family == "mixtral" ||
         family == "nemotron_h" || family == "gpt_oss";
}

bool BuildsVocabularyOnEveryStage(std::string_view family) {
  return family == "qwen3_next" || BuildsEndsOnEveryStage(family);
}

bool CutsSharedExpertsOfTokenParts(std::string_view family) {
  return family == "glm4_moe" || family == "glm4_moe_lite";
}

bool LacksOutputBias(std::string_view family) {
  return family == "qwen3" || family == "qwen3_moe";
}

TensorSpec LatentProjection(const LayerGroup& group, std::string_view name,
                            Dims shape) {
  constexpr std::string_view kSource = "kv_b_proj.weight";
  const std::string_view source = group.params[0]->name;
  return {.name = absl::StrCat(
              std::string(source.substr(0, source.size() - kSource.size())),
              "mla_attn.mla_attn.", std::string(name)),
          .shape = std::move(shape),
          .parts = {},
          .skip = DeclaredSkip{.reason = SkipReason::kDerived,
                               .detail = "made of kv_b_proj after each refit "
                                         "(derive-latent-projections)"}};
}

}  // namespace refit::vllm
