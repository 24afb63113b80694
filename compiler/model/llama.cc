#include "compiler/model/decoder.h"
#include "compiler/model/families.h"

namespace refit {

void BuildLlama(ConfigReader& config, Model& model) {
  DecoderBuilder decoder(config, model);
  const bool bias = config.FlagOr("attention_bias", false);
  config.ExpectFalse("mlp_bias");
  decoder.Begin();
  decoder.AddAttention({.query_key_value_bias = bias, .output_bias = bias});
  decoder.AddMlp(decoder.AllLayers(), config.Size("intermediate_size"));
  decoder.End();
}

}  // namespace refit
