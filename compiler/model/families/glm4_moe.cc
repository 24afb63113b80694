#include "compiler/model/decoder.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

void Build(ConfigReader& config, Model& model) {
  config.Defaults({{"first_k_dense_replace", 1}, {"n_shared_experts", 1}});
  DecoderBuilder decoder(config, model);
  decoder.ReadMtpLayers();
  decoder.Begin();
  decoder.AddAttention(
      {.query_key_value_bias = config.FlagOr("attention_bias", false),
       .query_key_norm = config.FlagOr("use_qk_norm", false)});
  AddSharedExpertLayers(config, decoder, model, RouterCorrection::kAlways);
  decoder.End();
}

}  // namespace

extern const Family kGlm4Moe = {
    .model_type = "glm4_moe",
    .transformers_class = "Glm4MoeForCausalLM",
    .build = Build,
    .vllm = {.fp32_router = true, .cuts_shared_experts_of_token_parts = true},
    .sglang = {.fp32_router_since = "0.5.19",
               .head = SglangTraits::Head::kOwnTensor,
               .shared_fusion = SglangTraits::SharedFusion::kAlways,
               .redundant_experts = false},
};

}  // namespace refit
