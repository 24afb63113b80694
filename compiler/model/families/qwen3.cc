#include "compiler/model/decoder.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

void Build(ConfigReader& config, Model& model) {
  DecoderBuilder decoder(config, model);
  decoder.Begin();
  const bool bias = config.FlagOr("attention_bias", false);
  decoder.AddAttention({.query_key_value_bias = bias,
                        .output_bias = bias,
                        .query_key_norm = true});
  decoder.AddMlp(decoder.AllLayers(), config.Size("intermediate_size"));
  decoder.End();
}

}  // namespace

extern const Family kQwen3 = {
    .model_type = "qwen3",
    .build = Build,
    .vllm = {.output_bias = false},
};

}  // namespace refit
