#include "compiler/model/decoder.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/job/json.h"
#include "compiler/model/stacks.h"

namespace refit {
namespace {

int64_t ReadHeadDim(ConfigReader& config, const Architecture& architecture) {
  if (config.HasOrDefault("head_dim")) return config.Size("head_dim");
  if (architecture.hidden % architecture.heads != 0) {
    config.Error("num_attention_heads",
                 absl::StrFormat("num_attention_heads %d does not divide "
                                 "hidden_size %d, and there is no head_dim",
                                 architecture.heads, architecture.hidden));
    return 1;  // sizes that others divide by are never 0
  }
  return architecture.hidden / architecture.heads;
}

// nemotron_h of transformers 5 lists its layers and need not count them.
int64_t ReadLayers(ConfigReader& config) {
  constexpr std::string_view kList = "layers_block_type";
  if (config.Has("num_hidden_layers") || !config.Has(kList)) {
    return config.Count("num_hidden_layers");
  }
  return static_cast<int64_t>(config.StringsOr(kList, {}).size());
}

}  // namespace

DecoderBuilder::DecoderBuilder(ConfigReader& config, Model& model)
    : config_(config), model_(model), dtype_(config.WeightDType()) {
  Architecture& architecture = model_.architecture;
  architecture.layers = ReadLayers(config);
  architecture.hidden = config.Size("hidden_size");
  architecture.heads = config.Size("num_attention_heads");
  architecture.vocab = config.Size("vocab_size");
  architecture.tied = config.FlagOr("tie_word_embeddings", false);
  ReadGroupedHeads();
}

void DecoderBuilder::ReadGroupedHeads() {
  Architecture& architecture = model_.architecture;
  architecture.kv_heads = config_.Size("num_key_value_heads");
  architecture.head_dim = ReadHeadDim(config_, architecture);
  if (architecture.heads % architecture.kv_heads != 0) {
    config_.Error("num_key_value_heads",
                  absl::StrFormat("num_key_value_heads %d does not divide "
                                  "num_attention_heads %d",
                                  architecture.kv_heads, architecture.heads));
  }
}

IndexDim DecoderBuilder::AllLayers() const {
  return Consecutive(0, model_.architecture.layers);
}

Param& DecoderBuilder::Add(std::string_view name, ParamRole role, Dims shape,
                           std::vector<IndexDim> index) {
  const bool of_layers = !index.empty();
  return AddParam(absl::StrFormat("%s%s", of_layers ? layer_prefix_ : "", name),
                  role, std::move(shape), std::move(index),
                  of_layers ? first_layer_ : 0);
}

void DecoderBuilder::NameLayers(std::string prefix, int32_t first_layer) {
  layer_prefix_ = std::move(prefix);
  first_layer_ = first_layer;
}

Param& DecoderBuilder::AddParam(std::string name, ParamRole role, Dims shape,
                                std::vector<IndexDim> index,
                                int32_t first_layer) {
  Param param = {.name = std::move(name),
                 .index = std::move(index),
                 .shape = std::move(shape),
                 .dtype = dtype_,
                 .role = role,
                 .first_layer = first_layer};
  CheckStackSize(param, config_.place(), config_.diagnostics());
  return model_.params.emplace_back(std::move(param));
}

void DecoderBuilder::Begin() {
  const Architecture& a = model_.architecture;
  Add(root_ + "embed_tokens.weight", ParamRole::kEmbedding, {a.vocab, a.hidden},
      {});
}

void DecoderBuilder::AddMlpNorm(ParamRole role, const IndexDim& layers) {
  Add("post_attention_layernorm.weight", role, {model_.architecture.hidden},
      {layers});
}

void DecoderBuilder::AddMlp(const IndexDim& layers, int64_t intermediate,
                            std::string_view module) {
  const int64_t hidden = model_.architecture.hidden;
  AddMlpNorm(ParamRole::kMlpNorm, layers);
  const auto add = [&](std::string_view name, ParamRole role, Dims shape) {
    Add(absl::StrFormat("%s.%s.weight", module, name), role, std::move(shape),
        {layers});
  };
  add("gate_proj", ParamRole::kMlpGate, {intermediate, hidden});
  add("up_proj", ParamRole::kMlpUp, {intermediate, hidden});
  add("down_proj", ParamRole::kMlpDown, {hidden, intermediate});
}

void DecoderBuilder::AddExperts(const IndexDim& layers, int64_t experts,
                                int64_t intermediate) {
  const int64_t hidden = model_.architecture.hidden;
  model_.architecture.experts = experts;
  AddMlpNorm(ParamRole::kMoeNorm, layers);
  Add("mlp.gate.weight", ParamRole::kRouter, {experts, hidden}, {layers});
  const auto add = [&](std::string_view name, ParamRole role, Dims shape) {
    Add(absl::StrFormat("mlp.experts.{1}.%s.weight", name), role,
        std::move(shape), {layers, Consecutive(0, experts)});
  };
  add("gate_proj", ParamRole::kExpertGate, {intermediate, hidden});
  add("up_proj", ParamRole::kExpertUp, {intermediate, hidden});
  add("down_proj", ParamRole::kExpertDown, {hidden, intermediate});
}

void DecoderBuilder::End() {
  const Architecture& a = model_.architecture;
  Add(root_ + "norm.weight", ParamRole::kFinalNorm, {a.hidden}, {});
  AddHead(root_ + "embed_tokens.weight");
}

void DecoderBuilder::AddHead(std::string_view embedding) {
  const Architecture& a = model_.architecture;
  if (a.tied) {
    model_.skips.push_back(
        {.name = head_,
         .reason = SkipReason::kTied,
         .detail = absl::StrFormat("tie_word_embeddings: the head is %s",
                                   embedding)});
  } else {
    Add(head_, ParamRole::kOutputHead, {a.vocab, a.hidden}, {});
  }
}

int64_t ReadExpertGroups(ConfigReader& config) {
  if (!config.Has("n_group")) return 0;
  return std::max<int64_t>(config.CountOr("n_group", 1), 1);
}

void CheckRouting(ConfigReader& config) {
  if (config.SizeOr("moe_layer_freq", 1) != 1) {
    config.Error("moe_layer_freq",
                 "moe_layer_freq other than 1 is not supported; wanted 1");
  }
  if (!config.Has("topk_method")) return;
  const std::string method = config.String("topk_method");
  if (method.empty() || method == "noaux_tc") return;
  config.Error("topk_method",
               absl::StrFormat("topk_method %s is not supported; wanted "
                               "\"noaux_tc\"",
                               Quoted(method)));
}

SparseLayers ReadSparseLayers(ConfigReader& config, const IndexDim& layers) {
  std::vector<int64_t> mlp_only = config.IntegersOr("mlp_only_layers", {});
  std::sort(mlp_only.begin(), mlp_only.end());
  const int64_t sparse_step = config.SizeOr("decoder_sparse_step", 1);
  SparseLayers result;
  result.key = sparse_step > 1 ? "decoder_sparse_step" : "mlp_only_layers";
  for (const int32_t layer : layers.numbers) {
    const bool is_dense =
        std::binary_search(mlp_only.begin(), mlp_only.end(), layer) ||
        (layer + 1) % sparse_step != 0;
    (is_dense ? result.dense : result.sparse).numbers.push_back(layer);
  }
  return result;
}

}  // namespace refit
