#include <cstdint>

#include "compiler/model/decoder.h"
#include "compiler/model/families/qwen3_tower.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

// The model with a vision tower. The experts of a layer are one tensor,
// [expert, in, out], the gates' columns before the ups'.
void BuildWithVision(ConfigReader& config, Model& model) {
  using enum ParamRole;
  ConfigReader text = config.Text();
  AddQwen3Tower(config, text, model, Deepstack::kByConfig);
  DecoderBuilder decoder(text, model);
  Architecture& a = model.architecture;
  // That of the text may be its class's default, which is another one.
  a.tied = config.FlagOr("tie_word_embeddings", false);
  decoder.NameModel("model.language_model.");
  const bool bias = text.FlagOr("attention_bias", false);
  const SparseLayers layers = ReadSparseLayers(text, decoder.AllLayers());
  decoder.Begin();
  decoder.AddAttention({.biases = bias, .query_key_norm = true});
  if (!layers.dense.numbers.empty()) {
    decoder.AddMlp(layers.dense, text.Size("intermediate_size"));
  }
  if (!layers.sparse.numbers.empty()) {
    a.experts = text.ExpertCount();
    const int64_t intermediate = text.Size("moe_intermediate_size");
    decoder.Add("post_attention_layernorm.weight", kMoeNorm, {a.hidden},
                {layers.sparse});
    decoder.Add("mlp.gate.weight", kRouter, {a.experts, a.hidden},
                {layers.sparse});
    decoder.Add("mlp.experts.gate_up_proj", kFusedExpertGateThenUp,
                {a.experts, a.hidden, 2 * intermediate}, {layers.sparse});
    decoder.Add("mlp.experts.down_proj", kFusedExpertDown,
                {a.experts, intermediate, a.hidden}, {layers.sparse});
  }
  decoder.End();
}

}  // namespace

extern const Family kQwen3VlMoe = {
    .model_type = "qwen3_vl_moe",
    .transformers_class = "Qwen3VLMoeForConditionalGeneration",
    .build = BuildWithVision,
    .vllm = {.renames = kQwen3VisionVllmNames,
             .output_bias = false,
             .every_stage = VllmTraits::EveryStage::kEnds},
    .sglang = {.renames = kQwen3VisionSglangNames, .dense_layers = false},
    .megatron = {.known = false},
    .transformers = {.transposes_experts_since_5 = true},
    .tower = true,
};

}  // namespace refit
