// What vLLM's model classes have, family by family, where they differ from each
// other: docs/layouts.md says where it comes from.
#ifndef REFIT_COMPILER_LAYOUT_VLLM_MODELS_H_
#define REFIT_COMPILER_LAYOUT_VLLM_MODELS_H_

#include <string>
#include <string_view>

#include "compiler/layout/role_table.h"
#include "compiler/layout/tensor_stack.h"

namespace refit::vllm {

// The tensor's name in vLLM's modules: the checkpoint's, but for families whose
// modules are named otherwise.
std::string ModuleName(std::string_view family, std::string name);

// The models whose checkpoint keeps the draft model under "mtp.": vLLM gives
// the draft's modules this prefix too, where others have the model's layer
// numbers. What joins the inputs of such a draft is cut by rows.
bool DraftHasPrefix(std::string_view family);

// The models whose router is kept in fp32.
bool HasFp32Router(std::string_view family);

// The models that have embedding, final norm and head on every pipeline stage,
// whether the stage reads them or not.
bool BuildsEndsOnEveryStage(std::string_view family);

// The same of embedding and head alone.
bool BuildsVocabularyOnEveryStage(std::string_view family);

// The models whose shared experts tensor parallelism cuts also where each rank
// runs only a part of the tokens through them.
bool CutsSharedExpertsOfTokenParts(std::string_view family);

// The models whose attention_bias gives the output projection no bias.
bool LacksOutputBias(std::string_view family);

// Of a group's kv_b_proj: a tensor of this shape that the worker makes of it.
TensorSpec LatentProjection(const LayerGroup& group, std::string_view name,
                            Dims shape);

}  // namespace refit::vllm

#endif  // REFIT_COMPILER_LAYOUT_VLLM_MODELS_H_
