#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/model/decoder.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

// Each layer's attention chooses keys by an indexer of its own.
void AddIndexers(ConfigReader& config, DecoderBuilder& decoder, Model& model) {
  using enum ParamRole;
  Architecture& a = model.architecture;
  a.index_rope_interleaved = config.FlagOr("indexer_rope_interleave", false);
  if (a.latent->query_rank == 0) {
    config.Error("q_lora_rank",
                 "q_lora_rank is missing, which the indexer reads; wanted the "
                 "rank of queries");
  }
  const std::vector<std::string> types = config.StringsOr("indexer_types", {});
  const bool all_full =
      std::all_of(types.begin(), types.end(),
                  [](const std::string& type) { return type == "full"; });
  if (config.SizeOr("index_topk_freq", 1) != 1 ||
      config.Has("index_topk_pattern") || !all_full) {
    config.Error("model_type",
                 "layers that share an indexer (index_topk_freq, "
                 "index_topk_pattern, indexer_types) are not supported; wanted "
                 "one in each layer");
  }
  const int64_t heads = config.Size("index_n_heads");
  const int64_t head_dim = config.Size("index_head_dim");
  const auto add = [&](std::string_view name, ParamRole role, Dims shape) {
    decoder.AddParam(
        absl::StrFormat("model.layers.{0}.self_attn.indexer.%s", name), role,
        std::move(shape), {decoder.AllLayers()});
  };
  add("wq_b.weight", kIndexQuery, {heads * head_dim, a.latent->query_rank});
  add("wk.weight", kIndexKey, {head_dim, a.hidden});
  add("k_norm.weight", kIndexKeyNorm, {head_dim});
  add("k_norm.bias", kIndexKeyNormBias, {head_dim});
  add("weights_proj.weight", kIndexWeights, {heads, a.hidden});
}

// In what families differ.
struct DeepseekForm {
  bool sparse_attention = false;
  RouterCorrection correction = RouterCorrection::kByTopkMethod;
  DenseLayers dense = DenseLayers::kCounted;
};

void BuildWith(ConfigReader& config, Model& model, const DeepseekForm& form) {
  DecoderBuilder decoder(config, model, HeadForm::kLatent);
  config.ExpectFalse("attention_bias");
  if (form.sparse_attention) config.ExpectFalse("mlp_bias");
  decoder.ReadMtpLayers();
  decoder.Begin();
  decoder.AddLatentAttention();
  if (form.sparse_attention) AddIndexers(config, decoder, model);
  AddSharedExpertLayers(config, decoder, model, form.correction, form.dense);
  decoder.End();
}

void Build(ConfigReader& config, Model& model) {
  config.Defaults({{"q_lora_rank", 1536},
                   {"first_k_dense_replace", 3},
                   {"n_shared_experts", 1}});
  BuildWith(config, model, {});
}

// transformers has no class of it, so nothing is known of keys that are
// missing.
void BuildKimiK2(ConfigReader& config, Model& model) {
  BuildWith(config, model, {});
}

void BuildGlm4MoeLite(ConfigReader& config, Model& model) {
  config.Defaults({{"q_lora_rank", 768}, {"n_shared_experts", 1}});
  BuildWith(
      config, model,
      {.correction = RouterCorrection::kAlways, .dense = DenseLayers::kListed});
}

void BuildSparse(ConfigReader& config, Model& model, int64_t query_rank) {
  config.Defaults({{"q_lora_rank", query_rank},
                   {"first_k_dense_replace", 3},
                   {"n_shared_experts", 1}});
  BuildWith(config, model,
            {.sparse_attention = true, .dense = DenseLayers::kListedOrCounted});
}

void BuildV32(ConfigReader& config, Model& model) {
  BuildSparse(config, model, 1536);
}

void BuildGlm(ConfigReader& config, Model& model) {
  BuildSparse(config, model, 2048);
}

// SGLang's authors checked fused shared experts with 256 experts.
constexpr SglangTraits kSglang = {
    .shared_fusion = SglangTraits::SharedFusion::kOneExpert,
    .shared_fusion_experts = 256};

}  // namespace

extern const Family kDeepseekV3 = {
    .model_type = "deepseek_v3",
    .transformers_class = "DeepseekV3ForCausalLM",
    .build = Build,
    .sglang = kSglang};

// SGLang fuses the shared experts of the classes DeepseekV3 and GlmMoeDsa
// alone.
extern const Family kDeepseekV32 = {
    .model_type = "deepseek_v32",
    .transformers_class = "DeepseekV32ForCausalLM",
    .build = BuildV32,
    .megatron = {.known = false}};

extern const Family kGlmMoeDsa = {.model_type = "glm_moe_dsa",
                                  .transformers_class = "GlmMoeDsaForCausalLM",
                                  .build = BuildGlm,
                                  .sglang = kSglang,
                                  .megatron = {.known = false}};

extern const Family kKimiK2 = {
    .model_type = "kimi_k2", .build = BuildKimiK2, .sglang = kSglang};

extern const Family kGlm4MoeLite = {
    .model_type = "glm4_moe_lite",
    .transformers_class = "Glm4MoeLiteForCausalLM",
    .build = BuildGlm4MoeLite,
    .vllm = {.fp32_router = true, .cuts_shared_experts_of_token_parts = true},
    .sglang = {.fp32_router_since = "0.5.19",
               .head = SglangTraits::Head::kOwnTensor,
               .shared_fusion = SglangTraits::SharedFusion::kOneExpert},
};

}  // namespace refit
