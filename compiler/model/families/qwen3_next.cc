#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/job/json.h"
#include "compiler/model/decoder.h"
#include "compiler/model/family.h"

namespace refit {
namespace {

using enum ParamRole;

// That of the classes.
ConfigReader& WithDefaults(ConfigReader& config) {
  config.Default("head_dim", 256);
  return config;
}

class Qwen3NextBuilder {
 public:
  Qwen3NextBuilder(ConfigReader& config, Model& model)
      : config_(config), model_(model), decoder_(WithDefaults(config), model) {}

  void Build();

 private:
  void ReadDeltaNet();
  // Whether each layer has attention.
  std::vector<bool> ReadAttentionLayers();
  void AddAttention(const IndexDim& layers);
  void AddDeltaNet(const IndexDim& layers);
  void AddExperts(const IndexDim& layers);
  // One more layer of attention and experts; no key of the config announces it.
  void AddMtpLayer();

  void Add(std::string_view name, ParamRole role, Dims shape,
           std::vector<IndexDim> index) {
    decoder_.AddParam(absl::StrFormat("%s.layers.{0}.%s", prefix_, name), role,
                      std::move(shape), std::move(index), first_layer_);
  }

  ConfigReader& config_;
  Model& model_;
  DecoderBuilder decoder_;
  std::string_view prefix_ = "model";
  int32_t first_layer_ = 0;
};

void Qwen3NextBuilder::Build() {
  model_.architecture.output_gate = true;
  config_.ExpectFalse("attention_bias");
  // A checkpoint in block-scaled FP8.
  model_.stored_beside.push_back("*.weight_scale_inv");
  ReadDeltaNet();
  const std::vector<bool> has_attention = ReadAttentionLayers();
  IndexDim attention;
  IndexDim delta;
  for (const int32_t layer : decoder_.AllLayers().numbers) {
    (has_attention[layer] ? attention : delta).numbers.push_back(layer);
  }
  const SparseLayers layers = ReadSparseLayers(config_, decoder_.AllLayers());
  decoder_.Begin();
  if (!delta.numbers.empty()) AddDeltaNet(delta);
  if (!attention.numbers.empty()) AddAttention(attention);
  if (!layers.dense.numbers.empty()) {
    decoder_.AddMlp(layers.dense, config_.Size("intermediate_size"));
  }
  if (!layers.sparse.numbers.empty()) AddExperts(layers.sparse);
  decoder_.End();
  if (!model_.mtp) {
    model_.stored_beside.push_back("mtp.*");
  } else if (!layers.dense.numbers.empty()) {
    // vLLM and Megatron differ in what the extra layer is then.
    config_.Error(layers.key,
                  absl::StrFormat("%s makes some layers dense, and the "
                                  "multi-token-prediction layer of such a "
                                  "model is not known; wanted \"mtp\": false",
                                  layers.key));
  } else {
    AddMtpLayer();
  }
}

std::vector<bool> Qwen3NextBuilder::ReadAttentionLayers() {
  const int64_t count = model_.architecture.layers;
  std::vector<bool> has_attention(count);
  if (!config_.Has("layer_types")) {
    const int64_t interval = config_.SizeOr("full_attention_interval", 4);
    for (int64_t layer = 0; layer < count; ++layer) {
      has_attention[layer] = (layer + 1) % interval == 0;
    }
    return has_attention;
  }
  const std::vector<std::string> types = config_.StringsOr("layer_types", {});
  if (static_cast<int64_t>(types.size()) != count) {
    config_.Error("layer_types",
                  absl::StrFormat("layer_types has %d entries; wanted one for "
                                  "each of %d layers",
                                  types.size(), count));
    return has_attention;
  }
  for (int64_t layer = 0; layer < count; ++layer) {
    has_attention[layer] = types[layer] == "full_attention";
    if (has_attention[layer] || types[layer] == "linear_attention") continue;
    config_.Error("layer_types",
                  absl::StrFormat("layer_types has a layer %s; wanted "
                                  "full_attention or linear_attention",
                                  Quoted(types[layer])));
    break;
  }
  return has_attention;
}

void Qwen3NextBuilder::AddMtpLayer() {
  const Architecture& a = model_.architecture;
  prefix_ = "mtp";
  first_layer_ = static_cast<int32_t>(a.layers);
  decoder_.NameLayers("mtp.layers.{0}.", first_layer_);
  model_.architecture.mtp_layers = 1;
  const IndexDim layer = Consecutive(0, 1);
  AddAttention(layer);
  AddExperts(layer);
  const auto add = [&](std::string_view name, ParamRole role, Dims shape) {
    decoder_.AddParam(absl::StrFormat("mtp.%s.weight", name), role,
                      std::move(shape), {layer}, first_layer_);
  };
  add("fc", kMtpProjection, {a.hidden, 2 * a.hidden});
  add("pre_fc_norm_embedding", kMtpEmbeddingNorm, {a.hidden});
  add("pre_fc_norm_hidden", kMtpHiddenNorm, {a.hidden});
  add("norm", kMtpFinalNorm, {a.hidden});
}

void Qwen3NextBuilder::ReadDeltaNet() {
  const DeltaNetSizes delta = {
      .key_heads = config_.Size("linear_num_key_heads"),
      .value_heads = config_.Size("linear_num_value_heads"),
      .key_dim = config_.Size("linear_key_head_dim"),
      .value_dim = config_.Size("linear_value_head_dim")};
  if (delta.value_heads % delta.key_heads != 0) {
    config_.Error("linear_num_key_heads",
                  absl::StrFormat("linear_num_key_heads %d does not divide "
                                  "linear_num_value_heads %d",
                                  delta.key_heads, delta.value_heads));
  }
  model_.architecture.delta = delta;
}

void Qwen3NextBuilder::AddDeltaNet(const IndexDim& layers) {
  const int64_t hidden = model_.architecture.hidden;
  const DeltaNetSizes& delta = *model_.architecture.delta;
  Add("input_layernorm.weight", kAttentionNorm, {hidden}, {layers});
  Add("linear_attn.in_proj_qkvz.weight", kDeltaQkvz,
      {2 * delta.keys() + 2 * delta.values(), hidden}, {layers});
  Add("linear_attn.in_proj_ba.weight", kDeltaBa,
      {2 * delta.value_heads, hidden}, {layers});
  Add("linear_attn.conv1d.weight", kDeltaConv,
      {2 * delta.keys() + delta.values(), 1,
       config_.Size("linear_conv_kernel_dim")},
      {layers});
  Add("linear_attn.A_log", kDeltaALog, {delta.value_heads}, {layers});
  Add("linear_attn.dt_bias", kDeltaDtBias, {delta.value_heads}, {layers});
  Add("linear_attn.norm.weight", kDeltaGatedNorm, {delta.value_dim}, {layers});
  Add("linear_attn.out_proj.weight", kDeltaOut, {hidden, delta.values()},
      {layers});
}

void Qwen3NextBuilder::AddAttention(const IndexDim& layers) {
  const Architecture& a = model_.architecture;
  const int64_t key_value = a.kv_heads * a.head_dim;
  Add("input_layernorm.weight", kAttentionNorm, {a.hidden}, {layers});
  Add("self_attn.q_proj.weight", kQuery,
      {a.heads * a.query_head_rows(), a.hidden}, {layers});
  Add("self_attn.k_proj.weight", kKey, {key_value, a.hidden}, {layers});
  Add("self_attn.v_proj.weight", kValue, {key_value, a.hidden}, {layers});
  Add("self_attn.o_proj.weight", kAttentionOutput,
      {a.hidden, a.heads * a.head_dim}, {layers});
  Add("self_attn.q_norm.weight", kQueryNorm, {a.head_dim}, {layers});
  Add("self_attn.k_norm.weight", kKeyNorm, {a.head_dim}, {layers});
}

void Qwen3NextBuilder::AddExperts(const IndexDim& layers) {
  const int64_t hidden = model_.architecture.hidden;
  const int64_t experts = config_.ExpertCount();
  const int64_t intermediate = config_.Size("moe_intermediate_size");
  decoder_.AddExperts(layers, experts, intermediate);
  const int64_t shared = config_.Size("shared_expert_intermediate_size");
  Add("mlp.shared_expert.gate_proj.weight", kSharedExpertGate, {shared, hidden},
      {layers});
  Add("mlp.shared_expert.up_proj.weight", kSharedExpertUp, {shared, hidden},
      {layers});
  Add("mlp.shared_expert.down_proj.weight", kSharedExpertDown, {hidden, shared},
      {layers});
  Add("mlp.shared_expert_gate.weight", kSharedExpertRouter, {1, hidden},
      {layers});
}

// `layer_types` says which layers have attention, with an output gate; without
// it every `full_attention_interval`-th. The others are gated delta nets. All
// have experts and a shared one, but those that are dense as in qwen3_moe.
void Build(ConfigReader& config, Model& model) {
  Qwen3NextBuilder(config, model).Build();
}

constexpr Rename kSglangNames[] = {{".self_attn.", "."}};

}  // namespace

extern const Family kQwen3Next = {
    .model_type = "qwen3_next",
    .transformers_class = "Qwen3NextForCausalLM",
    .build = Build,
    .vllm = {.every_stage = VllmTraits::EveryStage::kVocabulary,
             .draft_has_prefix = true},
    .sglang = {.renames = kSglangNames,
               .head = SglangTraits::Head::kOwnTensor,
               .shared_fusion = SglangTraits::SharedFusion::kOneExpert,
               .shared_fusion_expert_parallel = true,
               .pipeline_parallel = false,
               .dense_layers = false},
};

}  // namespace refit
