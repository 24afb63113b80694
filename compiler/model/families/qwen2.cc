#include "compiler/model/decoder.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

// Query, key and value always have a bias, which no key of the config says.
void Build(ConfigReader& config, Model& model) {
  DecoderBuilder decoder(config, model);
  decoder.Begin();
  decoder.AddAttention({.query_key_value_bias = true});
  decoder.AddMlp(decoder.AllLayers(), config.Size("intermediate_size"));
  decoder.End();
}

}  // namespace

extern const Family kQwen2 = {
    .model_type = "qwen2",
    .build = Build,
    .sglang = {.dp_attention = false},
};

}  // namespace refit
