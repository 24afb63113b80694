// Which layers of Qwen's decoders have experts.
#ifndef REFIT_COMPILER_MODEL_SPARSE_LAYERS_H_
#define REFIT_COMPILER_MODEL_SPARSE_LAYERS_H_

#include <string_view>

#include "compiler/ir/module.h"
#include "compiler/model/config.h"

namespace refit {

struct SparseLayers {
  IndexDim dense;
  IndexDim sparse;
  std::string_view key;  // of the config: what makes the dense ones so
};

// A layer is dense if `mlp_only_layers` names it, or if its number, counted
// from 1, is not a multiple of `decoder_sparse_step`.
SparseLayers ReadSparseLayers(ConfigReader& config, const IndexDim& layers);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_SPARSE_LAYERS_H_
