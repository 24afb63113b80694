// The vision tower that Qwen's families since Qwen3-VL share.
#ifndef REFIT_COMPILER_MODEL_FAMILIES_QWEN3_TOWER_H_
#define REFIT_COMPILER_MODEL_FAMILIES_QWEN3_TOWER_H_

#include <cstdint>

#include "compiler/model/config.h"
#include "compiler/model/family.h"
#include "compiler/model/model.h"

namespace refit {

// What engines name the tower and the language model beside it.
inline constexpr Rename kQwen3VisionVllmNames[] = {
    {"model.visual.", "visual."},
    {"model.language_model.", "language_model.model."},
    {"lm_head.", "language_model.lm_head."}};
inline constexpr Rename kQwen3VisionSglangNames[] = {
    {"model.language_model.", "model."},
    {"model.visual.", "visual."},
    {"attn.qkv.", "attn.qkv_proj."}};

// Whether some of the tower's layers have a merger of their own.
enum class Deepstack : uint8_t { kNone, kByConfig };

// Adds the tower, under "model.visual.", if the job wants it; else the
// checkpoint's tensors are stored beside the model's. `text` is the reader of
// the language model.
void AddQwen3Tower(ConfigReader& config, ConfigReader& text, Model& model,
                   Deepstack deepstack);

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_FAMILIES_QWEN3_TOWER_H_
