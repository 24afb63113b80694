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

DecoderBuilder::DecoderBuilder(ConfigReader& config, Model& model,
                               HeadForm heads)
    : config_(config), model_(model), dtype_(config.WeightDType()) {
  Architecture& architecture = model_.architecture;
  architecture.layers = ReadLayers(config);
  architecture.hidden = config.Size("hidden_size");
  architecture.heads = config.Size("num_attention_heads");
  architecture.vocab = config.Size("vocab_size");
  architecture.tied = config.FlagOr("tie_word_embeddings", false);
  switch (heads) {
    case HeadForm::kGrouped:
      ReadGroupedHeads();
      break;
    case HeadForm::kLatent:
      ReadLatentHeads();
      break;
  }
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

void DecoderBuilder::ReadLatentHeads() {
  model_.architecture.latent =
      LatentAttention{.query_rank = config_.NumberOrNone("q_lora_rank"),
                      .key_value_rank = config_.Size("kv_lora_rank"),
                      .nope_dim = config_.Size("qk_nope_head_dim"),
                      .rope_dim = config_.Size("qk_rope_head_dim"),
                      .value_dim = config_.Size("v_head_dim")};
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

void DecoderBuilder::NameModel(std::string root, std::string head) {
  layer_prefix_ = root + "layers.{0}.";
  root_ = std::move(root);
  head_ = std::move(head);
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

void DecoderBuilder::AddAttention(const AttentionOptions& options) {
  const Architecture& a = model_.architecture;
  const int64_t query = a.heads * a.head_dim;
  const int64_t key_value = a.kv_heads * a.head_dim;
  const auto add = [&](std::string_view name, ParamRole role, Dims shape) {
    Add(name, role, std::move(shape), {AllLayers()});
  };
  add("input_layernorm.weight", ParamRole::kAttentionNorm, {a.hidden});
  const auto add_rotated = [&](std::string_view name, ParamRole role,
                               int64_t heads) {
    if (!options.rotary_pairs) {
      return add(name, role, {heads * a.head_dim, a.hidden});
    }
    add(name, role, {heads, a.head_dim / 2, 2, a.hidden});
    model_.params.back().split = Split::kRowsInHeadPairs;
  };
  if (options.rotary_pairs && a.head_dim % 2 != 0) {
    config_.Error("head_dim", absl::StrFormat("head_dim %d is odd; wanted an "
                                              "even one, of rotary pairs",
                                              a.head_dim));
  }
  add_rotated("self_attn.q_proj.weight", ParamRole::kQuery, a.heads);
  add_rotated("self_attn.k_proj.weight", ParamRole::kKey, a.kv_heads);
  add("self_attn.v_proj.weight", ParamRole::kValue, {key_value, a.hidden});
  if (options.biases) {
    add("self_attn.q_proj.bias", ParamRole::kQueryBias, {query});
    add("self_attn.k_proj.bias", ParamRole::kKeyBias, {key_value});
    add("self_attn.v_proj.bias", ParamRole::kValueBias, {key_value});
  }
  add("self_attn.o_proj.weight", ParamRole::kAttentionOutput,
      {a.hidden, query});
  if (options.biases) {
    add("self_attn.o_proj.bias", ParamRole::kAttentionOutputBias, {a.hidden});
  }
  if (options.query_key_norm) {
    add("self_attn.q_norm.weight", ParamRole::kQueryNorm, {a.head_dim});
    add("self_attn.k_norm.weight", ParamRole::kKeyNorm, {a.head_dim});
  }
}

void DecoderBuilder::AddLatentAttention() {
  const Architecture& a = model_.architecture;
  const LatentAttention& latent = *a.latent;
  const int64_t query = a.heads * (latent.nope_dim + latent.rope_dim);
  const auto add = [&](std::string_view name, ParamRole role, Dims shape) {
    Add(name, role, std::move(shape), {AllLayers()});
  };
  add("input_layernorm.weight", ParamRole::kAttentionNorm, {a.hidden});
  if (latent.query_rank > 0) {
    add("self_attn.q_a_proj.weight", ParamRole::kQueryDown,
        {latent.query_rank, a.hidden});
    add("self_attn.q_a_layernorm.weight", ParamRole::kQueryDownNorm,
        {latent.query_rank});
    add("self_attn.q_b_proj.weight", ParamRole::kQueryUp,
        {query, latent.query_rank});
  } else {
    add("self_attn.q_proj.weight", ParamRole::kLatentQuery, {query, a.hidden});
  }
  add("self_attn.kv_a_proj_with_mqa.weight", ParamRole::kKeyValueDown,
      {latent.key_value_rank + latent.rope_dim, a.hidden});
  add("self_attn.kv_a_layernorm.weight", ParamRole::kKeyValueDownNorm,
      {latent.key_value_rank});
  add("self_attn.kv_b_proj.weight", ParamRole::kKeyValueUp,
      {a.heads * (latent.nope_dim + latent.value_dim), latent.key_value_rank});
  add("self_attn.o_proj.weight", ParamRole::kAttentionOutput,
      {a.hidden, a.heads * latent.value_dim});
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

void DecoderBuilder::AddSharedExperts(const IndexDim& layers,
                                      std::string_view module,
                                      int64_t intermediate) {
  const int64_t hidden = model_.architecture.hidden;
  const auto add = [&](std::string_view name, ParamRole role, Dims shape) {
    Add(absl::StrFormat("%s.%s.weight", module, name), role, std::move(shape),
        {layers});
  };
  add("gate_proj", ParamRole::kSharedExpertGate, {intermediate, hidden});
  add("up_proj", ParamRole::kSharedExpertUp, {intermediate, hidden});
  add("down_proj", ParamRole::kSharedExpertDown, {hidden, intermediate});
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

bool ReadTied(ConfigReader& config, ConfigReader& text,
              std::optional<bool> otherwise) {
  constexpr std::string_view kKey = "tie_word_embeddings";
  const bool says_text =
      std::any_of(text.members().begin(), text.members().end(),
                  [&](const JsonMember& member) {
                    return member.key == kKey && !member.value.IsNull();
                  });
  if (!otherwise.has_value() && !config.Has(kKey)) {
    config.Error(kKey, absl::StrFormat("missing key \"%s\": classes of this "
                                       "model differ in what that means; "
                                       "wanted true or false",
                                       kKey));
    return false;
  }
  const bool tied = config.FlagOr(kKey, otherwise.value_or(false));
  if (says_text && text.FlagOr(kKey, tied) != tied) {
    text.Error(kKey, absl::StrFormat(
                         "%s of text_config is %s, and the one beside it "
                         "%s%s: frameworks differ in which they take; "
                         "wanted both alike",
                         kKey, tied ? "false" : "true", tied ? "true" : "false",
                         config.Has(kKey) ? "" : " by default"));
  }
  return tied;
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

namespace {

constexpr std::string_view kDenseCount = "first_k_dense_replace";
constexpr std::string_view kMlpTypes = "mlp_layer_types";

// How many dense layers a list begins with; nullopt after an error.
std::optional<int64_t> ReadMlpTypes(ConfigReader& config, int64_t layers) {
  const std::vector<std::string> types = config.StringsOr(kMlpTypes, {});
  const auto first_sparse = std::find(types.begin(), types.end(), "sparse");
  const auto other =
      std::find_if(first_sparse, types.end(),
                   [](const std::string& type) { return type != "sparse"; });
  const bool begins_dense =
      std::all_of(types.begin(), first_sparse,
                  [](const std::string& type) { return type == "dense"; });
  if (static_cast<int64_t>(types.size()) == layers && other == types.end() &&
      begins_dense) {
    return first_sparse - types.begin();
  }
  config.Error(kMlpTypes,
               absl::StrFormat("%s has %d layers, of which %d are dense and %d "
                               "sparse; wanted %d, dense ones first",
                               kMlpTypes, types.size(),
                               std::count(types.begin(), types.end(), "dense"),
                               std::count(types.begin(), types.end(), "sparse"),
                               layers));
  return std::nullopt;
}

// How many of the first layers are dense. Engines read the count, and classes
// of transformers since release 5 the list.
int64_t ReadDenseLayers(ConfigReader& config, int64_t layers) {
  const int64_t count = std::min(config.NumberOrNone(kDenseCount), layers);
  if (!config.Has(kMlpTypes)) return count;
  const std::optional<int64_t> listed = ReadMlpTypes(config, layers);
  if (!listed.has_value()) return 0;
  if (count != *listed) {
    config.Error(kMlpTypes,
                 absl::StrFormat("%s begins with %d dense layers, and %s is "
                                 "%d: frameworks differ in which they read; "
                                 "wanted both alike",
                                 kMlpTypes, *listed, kDenseCount, count));
  }
  return *listed;
}

}  // namespace

void AddSharedExpertLayers(ConfigReader& config, DecoderBuilder& decoder,
                           Model& model) {
  CheckRouting(config);
  // A checkpoint in block-scaled FP8.
  model.stored_beside.push_back("*.weight_scale_inv");

  IndexDim sparse = decoder.AllLayers();
  const int64_t dense_count =
      ReadDenseLayers(config, model.architecture.layers);
  if (dense_count > 0) {
    decoder.AddMlp(Consecutive(0, dense_count),
                   config.Size("intermediate_size"));
    sparse.numbers.erase(sparse.numbers.begin(),
                         sparse.numbers.begin() + dense_count);
  }
  if (sparse.numbers.empty()) return;
  if (!config.Has("topk_method")) {
    config.Error("topk_method",
                 "topk_method is missing, and engines then hold no "
                 "e_score_correction_bias, which the checkpoint has; wanted "
                 "\"noaux_tc\"");
  }
  const int64_t experts = config.Count("n_routed_experts");
  const int64_t intermediate = config.Size("moe_intermediate_size");
  model.architecture.expert_groups = ReadExpertGroups(config);
  decoder.AddExperts(sparse, experts, intermediate);
  decoder
      .Add("mlp.gate.e_score_correction_bias", ParamRole::kRouterCorrection,
           {experts}, {sparse})
      .dtype = DType::kFp32;
  config.CheckAlike("n_routed_experts", "num_local_experts");
  const int64_t shared = config.NumberOrNone("n_shared_experts");
  if (shared > 0) {
    decoder.AddSharedExperts(sparse, "mlp.shared_experts",
                             shared * intermediate);
  }
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
