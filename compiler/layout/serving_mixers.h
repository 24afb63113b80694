// The serving engines' modules in attention's place: Mamba-2 mixers and gated
// delta nets. vLLM and SGLang have the same.
#ifndef REFIT_COMPILER_LAYOUT_SERVING_MIXERS_H_
#define REFIT_COMPILER_LAYOUT_SERVING_MIXERS_H_

#include "compiler/layout/serving.h"
#include "compiler/layout/shard.h"
#include "compiler/model/model.h"

namespace refit {

// What the tensor-parallel rank of `part` holds of the model's mixers.
void AddServingMixers(const Architecture& architecture, EvenPart part,
                      AddStack add);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_SERVING_MIXERS_H_
