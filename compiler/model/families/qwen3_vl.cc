#include <cstdint>

#include "compiler/model/decoder.h"
#include "compiler/model/families/qwen3_tower.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

// That of the class, whatever the hidden size is.
constexpr int64_t kHeadDim = 128;

// The model with a vision tower.
void BuildWithVision(ConfigReader& config, Model& model) {
  ConfigReader text = config.Text();
  text.Default("head_dim", kHeadDim);
  AddQwen3Tower(config, text, model, Deepstack::kByConfig);
  DecoderBuilder decoder(text, model);
  model.architecture.tied = config.FlagOr("tie_word_embeddings", false);
  decoder.NameModel("model.language_model.");
  decoder.Begin();
  const bool bias = text.FlagOr("attention_bias", false);
  decoder.AddAttention({.biases = bias, .query_key_norm = true});
  decoder.AddMlp(decoder.AllLayers(), text.Size("intermediate_size"));
  decoder.End();
}

}  // namespace

extern const Family kQwen3Vl = {
    .model_type = "qwen3_vl",
    .transformers_class = "Qwen3VLForConditionalGeneration",
    .build = BuildWithVision,
    .vllm = {.renames = kQwen3VisionVllmNames, .output_bias = false},
    .sglang = {.renames = kQwen3VisionSglangNames},
    .megatron = {.known = false},
    .tower = true,
};

}  // namespace refit
