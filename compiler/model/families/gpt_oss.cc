#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/model/decoder.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

// The experts of a layer are one tensor, [expert, in, out]; gate and up
// columns alternate. A checkpoint in MXFP4 stores the same params packed.
void Build(ConfigReader& config, Model& model) {
  using enum ParamRole;
  config.Default("head_dim", 64);
  DecoderBuilder decoder(config, model);
  if (!config.FlagOr("attention_bias", true)) {
    config.Error("attention_bias",
                 "attention_bias false is not supported: engines have the "
                 "biases all the same; wanted true");
  }
  Architecture& a = model.architecture;
  a.experts = config.Count("num_local_experts");
  const int64_t intermediate = config.Size("intermediate_size");
  const auto add = [&](std::string_view name, ParamRole role,
                       Dims shape) -> Param& {
    return decoder.AddParam(absl::StrFormat("model.layers.{0}.%s", name), role,
                            std::move(shape), {decoder.AllLayers()});
  };
  decoder.Begin();
  decoder.AddAttention({.query_key_value_bias = true,
                        .output_bias = true,
                        .query_key_norm = false});
  add("self_attn.sinks", kAttentionSinks, {a.heads});
  add("post_attention_layernorm.weight", kMoeNorm, {a.hidden});
  add("mlp.router.weight", kRouter, {a.experts, a.hidden});
  add("mlp.router.bias", kRouterBias, {a.experts});
  add("mlp.experts.gate_up_proj", kFusedExpertGateUp,
      {a.experts, a.hidden, intermediate, 2})
      .split = Split::kLastInPairs;
  add("mlp.experts.gate_up_proj_bias", kFusedExpertGateUpBias,
      {a.experts, intermediate, 2})
      .split = Split::kLastInPairs;
  add("mlp.experts.down_proj", kFusedExpertDown,
      {a.experts, intermediate, a.hidden});
  add("mlp.experts.down_proj_bias", kFusedExpertDownBias,
      {a.experts, a.hidden});
  decoder.End();
}

constexpr Rename kVllmNames[] = {{".self_attn.", ".attn."},
                                 {".embed_tokens.", ".embedding."}};

}  // namespace

extern const Family kGptOss = {
    .model_type = "gpt_oss",
    .build = Build,
    .vllm = {.renames = kVllmNames,
             .every_stage = VllmTraits::EveryStage::kEnds},
    .sglang = {.head = SglangTraits::Head::kOwnTensor,
               .loads_expert_parallel = false},
};

}  // namespace refit
