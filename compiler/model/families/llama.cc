#include "compiler/model/decoder.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

void Build(ConfigReader& config, Model& model) {
  config.Default("num_key_value_heads",
                 config.SizeOr("num_attention_heads", 1));
  DecoderBuilder decoder(config, model);
  const bool bias = config.FlagOr("attention_bias", false);
  config.ExpectFalse("mlp_bias");
  decoder.Begin();
  decoder.AddAttention({.query_key_value_bias = bias, .output_bias = bias});
  decoder.AddMlp(decoder.AllLayers(), config.Size("intermediate_size"));
  decoder.End();
}

}  // namespace

extern const Family kLlama = {
    .model_type = "llama",
    .build = Build,
    .sglang = {.head = SglangTraits::Head::kEveryStage, .dp_attention = false},
};

}  // namespace refit
