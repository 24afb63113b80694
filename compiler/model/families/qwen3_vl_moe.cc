#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "compiler/model/decoder.h"
#include "compiler/model/families/qwen3_tower.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

// `add_experts` adds norm, router and experts of layers.
template <typename AddExperts>
void AddLayers(ConfigReader& config, DecoderBuilder& decoder,
               const AddExperts& add_experts) {
  const bool bias = config.FlagOr("attention_bias", false);
  const SparseLayers layers = ReadSparseLayers(config, decoder.AllLayers());

  decoder.Begin();
  decoder.AddAttention({.query_key_value_bias = bias,
                        .output_bias = bias,
                        .query_key_norm = true});
  if (!layers.dense.numbers.empty()) {
    decoder.AddMlp(layers.dense, config.Size("intermediate_size"));
  }
  if (!layers.sparse.numbers.empty()) {
    add_experts(layers.sparse, config.ExpertCount(),
                config.Size("moe_intermediate_size"));
  }
  decoder.End();
}

// The model with a vision tower. The experts of a layer are one tensor,
// [expert, in, out], the gates' columns before the ups'.
void BuildWithVision(ConfigReader& config, Model& model) {
  using enum ParamRole;
  ConfigReader text = config.Text();
  AddQwen3Tower(config, text, model, Deepstack::kByConfig);
  DecoderBuilder decoder(text, model);
  // That of the text may be its class's default, which is another one.
  model.architecture.tied = config.FlagOr("tie_word_embeddings", false);
  decoder.NameModel("model.language_model.");
  AddLayers(text, decoder,
            [&](const IndexDim& layers, int64_t experts, int64_t intermediate) {
              const int64_t hidden = model.architecture.hidden;
              const auto add = [&](std::string_view name, ParamRole role,
                                   Dims shape) {
                decoder.AddParam(
                    absl::StrFormat("model.language_model.layers.{0}.%s", name),
                    role, std::move(shape), {layers});
              };
              model.architecture.experts = experts;
              add("post_attention_layernorm.weight", kMoeNorm, {hidden});
              add("mlp.gate.weight", kRouter, {experts, hidden});
              add("mlp.experts.gate_up_proj", kFusedExpertGateThenUp,
                  {experts, hidden, 2 * intermediate});
              add("mlp.experts.down_proj", kFusedExpertDown,
                  {experts, intermediate, hidden});
            });
}

}  // namespace

extern const Family kQwen3VlMoe = {
    .model_type = "qwen3_vl_moe",
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
