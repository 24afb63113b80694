// The layers of the families that follow DeepSeek-V3.
#ifndef REFIT_COMPILER_MODEL_SHARED_EXPERT_LAYERS_H_
#define REFIT_COMPILER_MODEL_SHARED_EXPERT_LAYERS_H_

#include "compiler/model/config.h"
#include "compiler/model/decoder.h"

namespace refit {

// After the attention of all layers: the first layers are dense, all others
// have routed experts, whose router corrects its scores, and shared ones. So
// have the multi-token-prediction layers, whose own projections come last.
void AddSharedExpertLayers(ConfigReader& config, DecoderBuilder& decoder,
                           Model& model);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_SHARED_EXPERT_LAYERS_H_
