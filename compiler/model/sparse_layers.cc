#include "compiler/model/sparse_layers.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace refit {

SparseLayers ReadSparseLayers(ConfigReader& config, const IndexDim& layers) {
  std::vector<int64_t> mlp_only = config.IntegersOr("mlp_only_layers", {});
  std::sort(mlp_only.begin(), mlp_only.end());
  const int64_t sparse_step = config.SizeOr("decoder_sparse_step", 1);
  SparseLayers result;
  result.key = sparse_step > 1 ? "decoder_sparse_step" : "mlp_only_layers";
  for (const int32_t layer : layers.numbers) {
    const bool is_dense =
        std::binary_search(mlp_only.begin(), mlp_only.end(), layer) ||
        (layer + 1) % sparse_step != 0;
    (is_dense ? result.dense : result.sparse).numbers.push_back(layer);
  }
  return result;
}

}  // namespace refit
