#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "compiler/model/decoder.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

// Attention and MLP have a norm before and one after. Published files leave out
// what the classes of transformers have as defaults.
void BuildText(ConfigReader& config, Model& model, std::string_view prefix) {
  using enum ParamRole;
  for (const auto& [key, value] :
       std::initializer_list<std::pair<std::string_view, int64_t>>{
           {"num_attention_heads", 8},
           {"num_key_value_heads", 4},
           {"head_dim", 256},
           {"vocab_size", 262'208}}) {
    config.Default(key, value);
  }
  config.ExpectFalse("attention_bias");
  DecoderBuilder decoder(config, model);
  decoder.NameModel(absl::StrFormat("%smodel.", prefix));
  Architecture& a = model.architecture;
  a.tied = config.FlagOr("tie_word_embeddings", true);
  const IndexDim layers = decoder.AllLayers();
  decoder.Begin();
  decoder.AddAttention({.query_key_norm = true});
  decoder.AddMlp(layers, config.Size("intermediate_size"));
  const auto add = [&](std::string_view name, ParamRole role) {
    decoder.AddParam(absl::StrFormat("%smodel.layers.{0}.%s", prefix, name),
                     role, {a.hidden}, {layers});
  };
  add("pre_feedforward_layernorm.weight", kMlpInputNorm);
  add("post_feedforward_layernorm.weight", kMlpOutputNorm);
  decoder.End();
}

void Build(ConfigReader& config, Model& model) { BuildText(config, model, ""); }

}  // namespace

extern const Family kGemma3Text = {
    .model_type = "gemma3_text",
    .build = Build,
    .vllm = {.every_stage = VllmTraits::EveryStage::kEnds},
    .sglang = {.embedding = SglangTraits::Embedding::kWhole,
               .pipeline_parallel = false,
               .dp_attention = false},
};

}  // namespace refit
