#include "compiler/model/decoder.h"
#include "compiler/model/families.h"
#include "compiler/model/sparse_layers.h"

namespace refit {

void BuildQwen3Moe(ConfigReader& config, Model& model) {
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

}  // namespace refit
