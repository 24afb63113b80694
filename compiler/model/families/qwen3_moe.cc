#include "compiler/model/decoder.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

void Build(ConfigReader& config, Model& model) {
  DecoderBuilder decoder(config, model);
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
    decoder.AddExperts(layers.sparse, "mlp", {}, config.ExpertCount(),
                       config.Size("moe_intermediate_size"));
  }
  decoder.End();
}

}  // namespace

extern const Family kQwen3Moe = {
    .model_type = "qwen3_moe",
    .build = Build,
    .vllm = {.output_bias = false,
             .every_stage = VllmTraits::EveryStage::kEnds},
    .sglang = {.head = SglangTraits::Head::kOwnTensor, .dense_layers = false},
};

}  // namespace refit
