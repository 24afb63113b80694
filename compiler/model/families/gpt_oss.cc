#include <cstdint>
#include <vector>

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
  const std::vector<IndexDim> layers = {decoder.AllLayers()};
  decoder.Begin();
  decoder.AddAttention({.query_key_value_bias = true, .output_bias = true});
  decoder.Add("self_attn.sinks", kAttentionSinks, {a.heads}, layers);
  decoder.Add("post_attention_layernorm.weight", kMoeNorm, {a.hidden}, layers);
  decoder.Add("mlp.router.weight", kRouter, {a.experts, a.hidden}, layers);
  decoder.Add("mlp.router.bias", kRouterBias, {a.experts}, layers);
  decoder
      .Add("mlp.experts.gate_up_proj", kFusedExpertGateUp,
           {a.experts, a.hidden, intermediate, 2}, layers)
      .split = Split::kLastInPairs;
  decoder
      .Add("mlp.experts.gate_up_proj_bias", kFusedExpertGateUpBias,
           {a.experts, intermediate, 2}, layers)
      .split = Split::kLastInPairs;
  decoder.Add("mlp.experts.down_proj", kFusedExpertDown,
              {a.experts, intermediate, a.hidden}, layers);
  decoder.Add("mlp.experts.down_proj_bias", kFusedExpertDownBias,
              {a.experts, a.hidden}, layers);
  decoder.End();
}

constexpr Rename kVllmNames[] = {{".self_attn.", ".attn."},
                                 {".embed_tokens.", ".embedding."}};

}  // namespace

extern const Family kGptOss = {
    .model_type = "gpt_oss",
    .transformers_class = "GptOssForCausalLM",
    .build = Build,
    .vllm = {.renames = kVllmNames,
             .every_stage = VllmTraits::EveryStage::kEnds},
    .sglang = {.head = SglangTraits::Head::kOwnTensor,
               .loads_expert_parallel = false},
};

}  // namespace refit
