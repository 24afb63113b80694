#include "compiler/model/decoder.h"
#include "compiler/model/families.h"

namespace refit {

// Query, key and value always have a bias, which no key of the config says.
void BuildQwen2(ConfigReader& config, Model& model) {
  DecoderBuilder decoder(config, model);
  decoder.Begin();
  decoder.AddAttention({.query_key_value_bias = true});
  decoder.AddMlp(decoder.AllLayers(), config.Size("intermediate_size"));
  decoder.End();
}

}  // namespace refit
