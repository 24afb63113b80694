#include "compiler/layout/sglang_models.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_format.h"
#include "compiler/job/version.h"

namespace refit::sglang {
namespace {

using enum ParamRole;

// Attention is cut by all of tensor parallelism in these classes.
bool LacksAttentionRanks(std::string_view family) {
  return family == "llama" || family == "qwen2" || family == "mixtral";
}

// The experts' tensors have one slot for each expert and no more.
bool LacksRedundantSlots(std::string_view family) {
  return family == "glm4_moe" || family == "mixtral";
}

bool HasRedundantSlots(const ExpertPlacement& experts, int64_t count) {
  const auto is_longer = [&](const std::vector<int64_t>& slots) {
    return static_cast<int64_t>(slots.size()) > count;
  };
  return experts.redundant_experts > 0 ||
         std::any_of(experts.physical_to_logical.begin(),
                     experts.physical_to_logical.end(), is_longer);
}

// Whether a layer's shared experts are as large as one expert.
bool HasOneSharedExpert(const RoleTable& table) {
  const int64_t rows = table.param(table.Params(kExpertUp)[0]).shape[0];
  const auto is_one = [&](ParamId id) {
    return table.param(id).shape[0] == rows;
  };
  const absl::Span<const ParamId> shared = table.Params(kSharedExpertUp);
  return std::all_of(shared.begin(), shared.end(), is_one);
}

void CheckDenseLayers(const LayoutContext& context, const RoleTable& table,
                      SizeChecks& checks) {
  const std::string_view family = context.model.architecture.family;
  if (family != "qwen3_moe" && family != "qwen3_next") return;
  if (table.Params(kMlpUp).empty()) return;
  checks.Report(
      context.side.layout.place,
      absl::StrFormat("%s: SGLang's %s has experts in every layer, and the "
                      "model has a dense MLP \"%s\"; wanted another layout "
                      "(generic places any tensors)",
                      context.side.key, family,
                      table.param(table.Params(kMlpUp)[0]).FirstName()));
}

}  // namespace

bool HasHeadOfItsOwn(std::string_view family) {
  return family == "qwen3_moe" || family == "mixtral" ||
         family == "qwen3_next" || family == "gpt_oss" ||
         family == "glm4_moe" || family == "glm4_moe_lite";
}

bool BuildsHeadOnEveryStage(std::string_view family) {
  return family == "llama" || HasHeadOfItsOwn(family);
}

RouterForm RouterFormOf(const LayoutContext& context) {
  const std::string_view family = context.model.architecture.family;
  if (family != "glm4_moe" && family != "glm4_moe_lite") {
    return RouterForm::kPlain;
  }
  return IsSince(context.side, {0, 5, 19}) ? RouterForm::kFp32
                                           : RouterForm::kCopied;
}

SharedExperts SharedExpertsOf(const LayoutContext& context,
                              const RoleTable& table) {
  const SideSpec& side = context.side;
  const Architecture& architecture = context.model.architecture;
  const std::string_view family = architecture.family;
  if (side.shared_experts.given) return side.shared_experts.value;
  if (table.Params(kExpertUp).empty() ||
      table.Params(kSharedExpertUp).empty()) {
    return SharedExperts::kTensor;
  }
  if (family == "qwen3_next" && HasOneSharedExpert(table)) {
    return SharedExperts::kFused;
  }
  // The others are fused under expert parallelism on AMD GPUs alone.
  if (side.expert_parallel.value > 1) return SharedExperts::kTensor;
  // The numbers of experts for which its authors checked it.
  const bool is_deepseek = family == "deepseek_v3" || family == "kimi_k2";
  const bool fuses =
      family == "glm4_moe" || (HasOneSharedExpert(table) &&
                               (family == "glm4_moe_lite" ||
                                (is_deepseek && architecture.experts == 256)));
  return fuses ? SharedExperts::kFused : SharedExperts::kTensor;
}

void CheckModel(const LayoutContext& context, const RoleTable& table,
                SizeChecks& checks) {
  const SideSpec& side = context.side;
  const Architecture& architecture = context.model.architecture;
  const std::string_view family = architecture.family;
  if (family == "llama" && architecture.tied &&
      side.pipeline_parallel.value > 1) {
    checks.Report(
        side.pipeline_parallel.place,
        absl::StrFormat("%s.pipeline_parallel %d: SGLang's llama takes a tied "
                        "head from the embedding, which the last of several "
                        "stages does not have; wanted 1",
                        side.key, side.pipeline_parallel.value));
  }
  if (LacksAttentionRanks(family) && side.dp_attention.value > 1) {
    checks.Report(
        side.dp_attention.place,
        absl::StrFormat("%s.dp_attention %d: SGLang's %s cuts its attention by "
                        "all of tensor_parallel; wanted 1, with \"replicas\" "
                        "for more engines",
                        side.key, side.dp_attention.value, family));
  }
  if (LacksRedundantSlots(family) &&
      HasRedundantSlots(side.experts.value, architecture.experts)) {
    checks.Report(side.experts.place,
                  absl::StrFormat("%s.experts: SGLang's %s has %d slots, one "
                                  "for each expert; wanted no redundant ones",
                                  side.key, family, architecture.experts));
  }
  if (family == "qwen3_next" && side.pipeline_parallel.value > 1) {
    checks.Report(
        side.pipeline_parallel.place,
        absl::StrFormat("%s.pipeline_parallel %d: SGLang's qwen3_next has one "
                        "stage; wanted 1",
                        side.key, side.pipeline_parallel.value));
  }
  CheckDenseLayers(context, table, checks);
}

}  // namespace refit::sglang
