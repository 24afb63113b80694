#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/model/decoder.h"
#include "compiler/model/family.h"
#include "compiler/model/tower.h"

namespace refit {
namespace {

// Every `interleave_moe_layer_step`-th layer has experts. transformers goes by
// `moe_layers` where config.json has it, engines never do.
IndexDim ReadMoeLayers(ConfigReader& config, int64_t layers) {
  const int64_t step = config.SizeOr("interleave_moe_layer_step", 1);
  IndexDim sparse;
  for (int64_t layer = step - 1; layer < layers; layer += step) {
    sparse.numbers.push_back(static_cast<int32_t>(layer));
  }
  const std::vector<int64_t> by_step(sparse.numbers.begin(),
                                     sparse.numbers.end());
  std::vector<int64_t> listed = config.IntegersOr("moe_layers", by_step);
  std::sort(listed.begin(), listed.end());
  if (listed != by_step) {
    config.Error("moe_layers",
                 absl::StrFormat("moe_layers names other layers than every "
                                 "interleave_moe_layer_step-th, and engines "
                                 "read the step %d alone; wanted both alike",
                                 step));
  }
  return sparse;
}

// The rows of queries and keys are in rotary pairs. The experts of a layer are
// one tensor, [expert, in, out], the gates' columns before the ups'.
void BuildUnder(std::string_view prefix, ConfigReader& config, Model& model,
                std::optional<bool> tied) {
  using enum ParamRole;
  config.Default("head_dim", 128);
  DecoderBuilder decoder(config, model);
  if (tied.has_value()) model.architecture.tied = *tied;
  decoder.NameModel(absl::StrFormat("%smodel.", prefix),
                    absl::StrFormat("%slm_head.weight", prefix));
  config.ExpectFalse("attention_bias");
  const Architecture& a = model.architecture;
  const IndexDim sparse = ReadMoeLayers(config, a.layers);
  IndexDim dense;
  for (const int32_t layer : decoder.AllLayers().numbers) {
    if (!std::binary_search(sparse.numbers.begin(), sparse.numbers.end(),
                            layer)) {
      dense.numbers.push_back(layer);
    }
  }
  decoder.Begin();
  decoder.AddAttention({.rotary_pairs = true});
  if (!dense.numbers.empty()) {
    decoder.AddMlp(dense, config.Size("intermediate_size_mlp"), "feed_forward");
  }
  if (!sparse.numbers.empty()) {
    const int64_t experts = config.Count("num_local_experts");
    const int64_t intermediate = config.Size("intermediate_size");
    model.architecture.experts = experts;
    decoder.Add("post_attention_layernorm.weight", kMoeNorm, {a.hidden},
                {sparse});
    decoder.Add("feed_forward.router.weight", kRouter, {experts, a.hidden},
                {sparse});
    decoder.Add("feed_forward.experts.gate_up_proj", kFusedExpertGateThenUp,
                {experts, a.hidden, 2 * intermediate}, {sparse});
    decoder.Add("feed_forward.experts.down_proj", kFusedExpertDown,
                {experts, intermediate, a.hidden}, {sparse});
    decoder.AddSharedExperts(sparse, "feed_forward.shared_expert",
                             intermediate);
  }
  decoder.End();
}

void BuildText(ConfigReader& config, Model& model) {
  BuildUnder("", config, model, std::nullopt);
}

void AddTower(ConfigReader& config, ConfigReader& text, Model& model) {
  using enum ParamRole;
  ConfigReader vision = config.Vision();
  // Of its class in transformers, which a file may leave out.
  vision.Defaults({{"hidden_size", 768},
                   {"num_hidden_layers", 34},
                   {"num_attention_heads", 16},
                   {"num_channels", 3},
                   {"intermediate_size", 5632},
                   {"vision_output_dim", 7680},
                   {"image_size", 448},
                   {"patch_size", 14},
                   {"projector_input_dim", 4096},
                   {"projector_output_dim", 4096}});
  const int64_t hidden = vision.Size("hidden_size");
  const int64_t intermediate = vision.Size("intermediate_size");
  const int64_t patch = vision.Size("patch_size");
  const int64_t patches = vision.Size("image_size") / patch;
  const int64_t adapter = vision.Size("projector_input_dim");
  const int64_t adapted = vision.Size("projector_output_dim");
  ReadTowerHeads("num_attention_heads", hidden, vision, model);
  CheckTowerDType(vision, text);
  if (adapter != adapted) {
    vision.Error("projector_output_dim",
                 absl::StrFormat("projector_output_dim %d is not "
                                 "projector_input_dim %d, and classes differ "
                                 "in what that means; wanted both alike",
                                 adapted, adapter));
  }
  vision.ExpectFalse("multi_modal_projector_bias");

  TowerBuilder tower(vision, text, model, "vision_model.");
  tower.Add("class_embedding", kTowerWhole, {hidden});
  tower.Add("positional_embedding_vlm", kTowerWhole,
            {patches * patches + 1, hidden});
  tower.AddLinear("patch_embedding.linear", kTowerColumn, hidden,
                  vision.Size("num_channels") * patch * patch, {},
                  /*bias=*/false);
  tower.AddNorm("layernorm_pre", hidden);
  tower.AddNorm("layernorm_post", hidden);
  const TowerBuilder::Index layers = {
      Consecutive(0, vision.Count("num_hidden_layers"))};
  const std::string layer = "model.layers.{0}.";
  for (const std::string_view name : {"q_proj", "k_proj", "v_proj"}) {
    tower.AddLinear(absl::StrFormat("%sself_attn.%s", layer, name),
                    kTowerColumn, hidden, hidden, layers);
  }
  tower.AddLinear(layer + "self_attn.o_proj", kTowerRow, hidden, hidden,
                  layers);
  tower.AddLinear(layer + "mlp.fc1", kTowerColumn, intermediate, hidden,
                  layers);
  tower.AddLinear(layer + "mlp.fc2", kTowerRow, hidden, intermediate, layers);
  tower.AddNorm(layer + "input_layernorm", hidden, layers);
  tower.AddNorm(layer + "post_attention_layernorm", hidden, layers);
  tower.AddLinear("vision_adapter.mlp.fc1", kTowerColumn, adapter, intermediate,
                  {}, /*bias=*/false);
  tower.AddLinear("vision_adapter.mlp.fc2", kTowerRow, adapted, adapter, {},
                  /*bias=*/false);
  TowerBuilder connector(vision, text, model, "multi_modal_projector.");
  connector.AddLinear("linear_1", kTowerConnector, text.Size("hidden_size"),
                      vision.Size("vision_output_dim"), {}, /*bias=*/false);
}

constexpr Rename kSglangNames[] = {
    {"vision_model.model.layers.{0}.self_attn.o_proj.",
     "vision_model.model.layers.{0}.self_attn.proj."}};

// The model with a vision tower.
void Build(ConfigReader& config, Model& model) {
  ConfigReader text = config.Text();
  if (model.vision) {
    AddTower(config, text, model);
  } else {
    for (const std::string_view other :
         {"vision_model.*", "multi_modal_projector.*"}) {
      model.stored_beside.emplace_back(other);
    }
  }
  BuildUnder("language_model.", text, model, ReadTied(config, text, false));
}

}  // namespace

extern const Family kLlama4 = {
    .model_type = "llama4",
    .transformers_class = "Llama4ForConditionalGeneration",
    .build = Build,
    .sglang = {.renames = kSglangNames,
               .pipeline_parallel = false,
               .plain_tower = true},
    .megatron = {.known = false},
    .tower = true,
};

// SGLang's class of the language model alone loads neither its experts nor its
// rotary pairs.
extern const Family kLlama4Text = {
    .model_type = "llama4_text",
    .transformers_class = "Llama4ForCausalLM",
    .build = BuildText,
    .sglang = {.known = false},
    .megatron = {.known = false},
};

}  // namespace refit
