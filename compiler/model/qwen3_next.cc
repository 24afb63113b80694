#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/model/decoder.h"
#include "compiler/model/families.h"

namespace refit {
namespace {

using enum ParamRole;

class Qwen3NextBuilder {
 public:
  Qwen3NextBuilder(ConfigReader& config, Model& model)
      : config_(config), model_(model), decoder_(config, model) {}

  void Build();

 private:
  void ReadDeltaNet();
  void AddAttention(const IndexDim& layers);
  void AddDeltaNet(const IndexDim& layers);
  void AddExperts(const IndexDim& layers);
  // One more layer of attention, like layer `like`; no key of the config
  // announces it. No framework's layout of it is described: its params have no
  // roles, and layouts that place by role refuse them.
  void AddMtpLayer(int64_t like);

  void Add(std::string_view name, ParamRole role, Dims shape,
           std::vector<IndexDim> index) {
    decoder_.AddParam(absl::StrFormat("model.layers.{0}.%s", name), role,
                      std::move(shape), std::move(index));
  }

  ConfigReader& config_;
  Model& model_;
  DecoderBuilder decoder_;
};

void Qwen3NextBuilder::Build() {
  model_.architecture.output_gate = true;
  ReadDeltaNet();
  const int64_t interval = config_.Size("full_attention_interval");
  IndexDim attention;
  IndexDim delta;
  for (const int32_t layer : decoder_.AllLayers().numbers) {
    ((layer + 1) % interval == 0 ? attention : delta).numbers.push_back(layer);
  }
  decoder_.Begin();
  if (!delta.numbers.empty()) AddDeltaNet(delta);
  if (!attention.numbers.empty()) AddAttention(attention);
  AddExperts(decoder_.AllLayers());
  decoder_.End();
  if (model_.mtp) {
    AddMtpLayer(interval - 1);
  } else {
    model_.stored_beside.push_back("mtp.*");
  }
}

void Qwen3NextBuilder::AddMtpLayer(int64_t like) {
  constexpr std::string_view kPrefix = "model.layers.{0}.";
  const size_t count = model_.params.size();
  for (size_t i = 0; i < count; ++i) {
    Param param = model_.params[i];
    if (param.index.empty()) continue;
    const std::vector<int32_t>& layers = param.index[0].numbers;
    if (std::find(layers.begin(), layers.end(), like) == layers.end()) continue;
    param.name =
        absl::StrFormat("mtp.layers.{0}.%s", param.name.substr(kPrefix.size()));
    param.index[0] = Consecutive(0, 1);
    param.role = kOther;
    model_.params.push_back(std::move(param));
  }
  const int64_t hidden = model_.architecture.hidden;
  decoder_.AddParam("mtp.fc.weight", kOther, {hidden, 2 * hidden}, {});
  decoder_.AddParam("mtp.pre_fc_norm_embedding.weight", kOther, {hidden}, {});
  decoder_.AddParam("mtp.pre_fc_norm_hidden.weight", kOther, {hidden}, {});
  decoder_.AddParam("mtp.norm.weight", kOther, {hidden}, {});
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
  decoder_.AddExperts(layers, "mlp", {}, config_.ExpertCount(),
                      config_.Size("moe_intermediate_size"));
  const int64_t hidden = model_.architecture.hidden;
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

}  // namespace

// Every `full_attention_interval`-th layer has attention, with an output gate;
// the others are gated delta nets. All have experts and a shared one.
void BuildQwen3Next(ConfigReader& config, Model& model) {
  Qwen3NextBuilder(config, model).Build();
}

}  // namespace refit
