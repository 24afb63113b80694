#include <cstdint>

#include "absl/strings/str_format.h"
#include "compiler/model/decoder.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

// Queries and keys have a norm over all their heads. Its multi-token-prediction
// layers are not moved.
void Build(ConfigReader& config, Model& model) {
  using enum ParamRole;
  config.Default("head_dim", 128);
  DecoderBuilder decoder(config, model);
  const Architecture& a = model.architecture;
  const IndexDim layers = decoder.AllLayers();
  model.stored_beside.push_back("*.weight_scale_inv");
  const int64_t prediction = config.CountOr("num_mtp_modules", 0);
  for (int64_t layer = a.layers; layer < a.layers + prediction; ++layer) {
    model.stored_beside.push_back(absl::StrFormat("model.layers.%d.*", layer));
  }
  decoder.Begin();
  decoder.AddAttention(
      {.query_key_value_bias = config.FlagOr("attention_bias", false)});
  if (config.FlagOr("use_qk_norm", true)) {
    decoder.Add("self_attn.q_norm.weight", kQueryHeadsNorm,
                {a.heads * a.head_dim}, {layers});
    decoder.Add("self_attn.k_norm.weight", kKeyHeadsNorm,
                {a.kv_heads * a.head_dim}, {layers});
  }
  decoder.AddExperts(
      layers, "block_sparse_moe", {.gate = "w1", .up = "w3", .down = "w2"},
      config.Count("num_local_experts"), config.Size("intermediate_size"));
  // transformers has the bias whatever the file says.
  if (!config.FlagOr("use_routing_bias", false)) {
    config.Error(
        "use_routing_bias",
        absl::StrFormat("use_routing_bias is %s, and vLLM then holds no "
                        "e_score_correction_bias, which the checkpoint "
                        "has; wanted true",
                        config.Has("use_routing_bias") ? "false" : "missing"));
  } else {
    decoder
        .Add("block_sparse_moe.e_score_correction_bias", kRouterCorrection,
             {a.experts}, {layers})
        .dtype = DType::kFp32;
  }
  decoder.End();
}

}  // namespace

extern const Family kMinimaxM2 = {
    .model_type = "minimax_m2",
    .transformers_class = "MiniMaxM2ForCausalLM",
    .build = Build,
    .vllm = {.fp32_router = true},
    .sglang = {.fp32_router_since = "0",
               .embedding = SglangTraits::Embedding::kEveryStage},
    .megatron = {.known = false},
    .knows_mtp = false,
};

}  // namespace refit
