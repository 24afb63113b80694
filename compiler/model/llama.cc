#include "compiler/model/decoder.h"
#include "compiler/model/families.h"

namespace refit {

void BuildLlama(ConfigReader& config, Model& model) {
  DecoderBuilder decoder(config, model);
  const bool bias = config.FlagOr("attention_bias", false);
  if (config.FlagOr("mlp_bias", false)) {
    config.Error("mlp_bias", "mlp_bias true is not supported; wanted false");
  }
  decoder.Begin();
  decoder.AddAttention({.query_key_value_bias = bias, .output_bias = bias});
  decoder.AddMlp(decoder.AllLayers(), config.Size("intermediate_size"));
  decoder.End();
}

}  // namespace refit
