#include <cstdint>
#include <string>
#include <string_view>

#include "absl/strings/str_format.h"
#include "compiler/model/decoder.h"
#include "compiler/model/family.h"
#include "compiler/model/tower.h"

namespace refit {
namespace {

// Attention and MLP have a norm before and one after. Published files leave out
// what the classes of transformers have as defaults.
void BuildText(ConfigReader& config, Model& model, bool tied) {
  using enum ParamRole;
  config.Defaults({{"num_attention_heads", 8},
                   {"num_key_value_heads", 4},
                   {"head_dim", 256},
                   {"vocab_size", 262'208}});
  config.ExpectFalse("attention_bias");
  DecoderBuilder decoder(config, model);
  decoder.NameModel("language_model.model.", "language_model.lm_head.weight");
  Architecture& a = model.architecture;
  a.tied = tied;
  const IndexDim layers = decoder.AllLayers();
  decoder.Begin();
  decoder.AddAttention({.query_key_norm = true});
  decoder.AddMlp(layers, config.Size("intermediate_size"));
  decoder.Add("pre_feedforward_layernorm.weight", kMlpInputNorm, {a.hidden},
              {layers});
  decoder.Add("post_feedforward_layernorm.weight", kMlpOutputNorm, {a.hidden},
              {layers});
  decoder.End();
}

// Engines leave out the head that pools an image. transformers builds it unless
// the config denies it.
void CheckPoolingHead(ConfigReader& vision) {
  constexpr std::string_view kKey = "vision_use_head";
  if (!vision.FlagOr(kKey, true)) return;
  vision.Error(kKey, absl::StrFormat("%s is not false, and gives the tower a "
                                     "head that no engine holds; wanted false",
                                     kKey));
}

// A SigLIP tower, and the projection of its pooled patches.
void AddTower(ConfigReader& config, ConfigReader& text, Model& model) {
  using enum ParamRole;
  ConfigReader vision = config.Vision();
  // Of its class in transformers, which a file may leave out.
  vision.Defaults({{"hidden_size", 768},
                   {"intermediate_size", 3072},
                   {"num_hidden_layers", 12},
                   {"num_attention_heads", 12},
                   {"num_channels", 3},
                   {"image_size", 224},
                   {"patch_size", 16}});
  const int64_t hidden = vision.Size("hidden_size");
  const int64_t intermediate = vision.Size("intermediate_size");
  const int64_t patch = vision.Size("patch_size");
  const int64_t patches = vision.Size("image_size") / patch;
  ReadTowerHeads("num_attention_heads", hidden, vision, model);
  CheckTowerDType(vision, text);
  CheckPoolingHead(vision);

  TowerBuilder tower(vision, text, model, "vision_tower.vision_model.");
  tower.Add("embeddings.patch_embedding.weight", kTowerWhole,
            {hidden, vision.Size("num_channels"), patch, patch});
  tower.Add("embeddings.patch_embedding.bias", kTowerWhole, {hidden});
  tower.Add("embeddings.position_embedding.weight", kTowerPositions,
            {patches * patches, hidden});
  const TowerBuilder::Index layers = {
      Consecutive(0, vision.Count("num_hidden_layers"))};
  const std::string layer = "encoder.layers.{0}.";
  tower.AddNorm(layer + "layer_norm1", hidden, layers);
  for (const std::string_view name : {"q_proj", "k_proj", "v_proj"}) {
    tower.AddLinear(absl::StrFormat("%sself_attn.%s", layer, name),
                    kTowerColumn, hidden, hidden, layers);
  }
  tower.AddLinear(layer + "self_attn.out_proj", kTowerRow, hidden, hidden,
                  layers);
  tower.AddNorm(layer + "layer_norm2", hidden, layers);
  tower.AddLinear(layer + "mlp.fc1", kTowerColumn, intermediate, hidden,
                  layers);
  tower.AddLinear(layer + "mlp.fc2", kTowerRow, hidden, intermediate, layers);
  tower.AddNorm("post_layernorm", hidden);
  TowerBuilder connector(vision, text, model, "multi_modal_projector.");
  connector.Add("mm_input_projection_weight", kTowerWhole,
                {hidden, text.Size("hidden_size")});
  connector.Add("mm_soft_emb_norm.weight", kTowerWhole, {hidden});
}

// The model with a vision tower.
void BuildWithVision(ConfigReader& config, Model& model) {
  ConfigReader text = config.Text();
  if (model.vision) {
    AddTower(config, text, model);
  } else {
    for (const std::string_view other :
         {"vision_tower.*", "multi_modal_projector.*"}) {
      model.stored_beside.emplace_back(other);
    }
  }
  BuildText(text, model, ReadTied(config, text, true));
}

constexpr Rename kSglangNames[] = {
    {".self_attn.out_proj.", ".self_attn.proj."}};
constexpr Rename kTransformers5VisionNames[] = {
    {"language_model.model.", "model.language_model."},
    {"language_model.lm_head.", "lm_head."},
    {"vision_tower.vision_model.", "model.vision_tower."},
    {"multi_modal_projector.", "model.multi_modal_projector."}};

}  // namespace

// Its engines cut the tower by tensor parallelism whatever they are told.
extern const Family kGemma3 = {
    .model_type = "gemma3",
    .transformers_class = "Gemma3ForConditionalGeneration",
    .build = BuildWithVision,
    .vllm = {.every_stage = VllmTraits::EveryStage::kEnds},
    .sglang = {.renames = kSglangNames,
               .embedding = SglangTraits::Embedding::kWhole,
               .pipeline_parallel = false,
               .dp_attention = false},
    .megatron = {.known = false},
    .transformers = {.renames_since_5 = kTransformers5VisionNames},
    .tower = true,
    .whole_tower = false,
};

}  // namespace refit
