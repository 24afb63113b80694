#include <algorithm>

#include "compiler/model/decoder.h"
#include "compiler/model/families.h"

namespace refit {

// A layer is dense if `mlp_only_layers` names it, or if its number, counted
// from 1, is not a multiple of `decoder_sparse_step`.
void BuildQwen3Moe(ConfigReader& config, Model& model) {
  DecoderBuilder decoder(config, model);
  const bool bias = config.FlagOr("attention_bias", false);
  std::vector<int64_t> mlp_only = config.IntegersOr("mlp_only_layers", {});
  std::sort(mlp_only.begin(), mlp_only.end());
  const int64_t sparse_step = config.SizeOr("decoder_sparse_step", 1);
  IndexDim dense;
  IndexDim sparse;
  for (const int32_t layer : decoder.AllLayers().numbers) {
    const bool is_dense =
        std::binary_search(mlp_only.begin(), mlp_only.end(), layer) ||
        (layer + 1) % sparse_step != 0;
    (is_dense ? dense : sparse).numbers.push_back(layer);
  }

  decoder.Begin();
  decoder.AddAttention({.query_key_value_bias = bias,
                        .output_bias = bias,
                        .query_key_norm = true});
  if (!dense.numbers.empty()) {
    decoder.AddMlp(dense, config.Size("intermediate_size"));
  }
  if (!sparse.numbers.empty()) {
    decoder.AddExperts(sparse, "mlp", {}, config.ExpertCount(),
                       config.Size("moe_intermediate_size"));
  }
  decoder.End();
}

}  // namespace refit
