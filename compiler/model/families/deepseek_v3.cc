#include "compiler/model/decoder.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

void Build(ConfigReader& config, Model& model) {
  DecoderBuilder decoder(config, model, HeadForm::kLatent);
  if (config.FlagOr("attention_bias", false)) {
    config.Error("attention_bias",
                 "attention_bias true is not supported; wanted false");
  }
  decoder.ReadMtpLayers();
  decoder.Begin();
  decoder.AddLatentAttention();
  AddSharedExpertLayers(config, decoder, model);
  decoder.End();
}

// SGLang's authors checked fused shared experts with 256 experts.
constexpr SglangTraits kSglang = {
    .shared_fusion = SglangTraits::SharedFusion::kOneExpert,
    .shared_fusion_experts = 256};

}  // namespace

extern const Family kDeepseekV3 = {
    .model_type = "deepseek_v3", .build = Build, .sglang = kSglang};

extern const Family kKimiK2 = {
    .model_type = "kimi_k2", .build = Build, .sglang = kSglang};

extern const Family kGlm4MoeLite = {
    .model_type = "glm4_moe_lite",
    .build = Build,
    .vllm = {.fp32_router = true, .cuts_shared_experts_of_token_parts = true},
    .sglang = {.fp32_router_since = "0.5.19",
               .head = SglangTraits::Head::kOwnTensor,
               .shared_fusion = SglangTraits::SharedFusion::kOneExpert},
};

}  // namespace refit
