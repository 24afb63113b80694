#include <algorithm>
#include <array>
#include <cstdint>
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

// How many tokens of the past a layer's attention sees as one.
struct Compression {
  int64_t rate;
  std::string_view layer_type;  // transformers' word
};
constexpr Compression kNotCompressed = {0, "sliding_attention"};
// Its attention chooses by an indexer.
constexpr Compression kSparse = {4, "compressed_sparse_attention"};
constexpr Compression kHeavy = {128, "heavily_compressed_attention"};
constexpr std::array kCompressions = {kNotCompressed, kSparse, kHeavy};
// What says it of all layers.
constexpr std::string_view kTypes = "layer_types";
constexpr std::string_view kRates = "compress_ratios";

class DeepseekV4Builder {
 public:
  DeepseekV4Builder(ConfigReader& config, Model& model)
      : config_(config), model_(model), decoder_(config, model) {}

  void Build();

 private:
  // Reports what would give the model other parameters.
  void CheckConfig();
  void CheckRates();
  // By layer; empty after an error.
  std::vector<Compression> ReadCompressions();
  std::vector<Compression> ReadCompressions(std::string_view key);
  int64_t ReadHashLayers();

  void AddAttention();
  // What makes one vector of several tokens. Of the rows of sparse layers, half
  // overlap with the next vector's.
  void AddCompressor(std::string_view module, const IndexDim& layers,
                     const Compression& compression, int64_t head_dim);
  void AddExperts();
  void AddHyperConnections();

  Param& Add(std::string_view name, ParamRole role, Dims shape,
             std::vector<IndexDim> index) {
    Param& param = decoder_.AddParam(absl::StrFormat("layers.{0}.%s", name),
                                     role, std::move(shape), std::move(index));
    if (IsAlwaysFp32(role)) param.dtype = DType::kFp32;
    return param;
  }

  ConfigReader& config_;
  Model& model_;
  DecoderBuilder decoder_;
};

void DeepseekV4Builder::CheckConfig() {
  for (const std::string_view flag :
       {"attention_bias", "mlp_bias", "tie_word_embeddings"}) {
    config_.ExpectFalse(flag);
  }
  if (config_.CountOr("vision_n_layers", 0) > 0) {
    config_.Error("vision_n_layers",
                  "vision_n_layers above 0, a vision tower, is not supported; "
                  "wanted 0");
  }
  if (const int64_t count = config_.CountOr("n_shared_experts", 1);
      count != 1) {
    config_.Error("n_shared_experts",
                  absl::StrFormat("n_shared_experts is %d, which frameworks "
                                  "read differently; wanted 1",
                                  count));
  }
  CheckRates();
}

void DeepseekV4Builder::CheckRates() {
  for (const JsonMember& member : config_.members()) {
    if (member.key != "compress_rates" || !member.value.AsObject()) continue;
    for (const JsonMember& rate : *member.value.AsObject()) {
      const auto known =
          std::find_if(kCompressions.begin(), kCompressions.end(),
                       [&](const Compression& compression) {
                         return compression.layer_type == rate.key;
                       });
      if (known == kCompressions.end() || !rate.value.AsInteger() ||
          *rate.value.AsInteger() == known->rate) {
        continue;
      }
      config_.Error(
          "compress_rates",
          absl::StrFormat("compress_rates of %s is %d; wanted %d", rate.key,
                          *rate.value.AsInteger(), known->rate));
    }
  }
}

std::vector<Compression> DeepseekV4Builder::ReadCompressions() {
  const int64_t layers = model_.architecture.layers;
  const bool by_type = config_.Has(kTypes);
  if (!by_type && !config_.Has(kRates)) {
    config_.Error(kTypes, absl::StrFormat("missing keys \"%s\" and \"%s\"; "
                                          "wanted one of them",
                                          kTypes, kRates));
    return {};
  }
  std::vector<Compression> found = ReadCompressions(by_type ? kTypes : kRates);
  if (by_type && config_.Has(kRates) && !found.empty()) {
    const std::vector<Compression> rates = ReadCompressions(kRates);
    for (int64_t layer = 0; layer < layers && !rates.empty(); ++layer) {
      if (rates[layer].rate == found[layer].rate) continue;
      config_.Error(
          kTypes,
          absl::StrFormat("%s of layer %d is %s, and %s says %d: frameworks "
                          "differ in which they read; wanted both alike",
                          kTypes, layer, found[layer].layer_type, kRates,
                          rates[layer].rate));
      return {};
    }
  }
  return found;
}

std::vector<Compression> DeepseekV4Builder::ReadCompressions(
    std::string_view key) {
  const bool by_type = key == kTypes;
  std::vector<Compression> found;
  const auto add = [&](std::string_view word, const auto& is_it) {
    const auto known =
        std::find_if(kCompressions.begin(), kCompressions.end(), is_it);
    if (known != kCompressions.end()) return found.push_back(*known);
    config_.Error(key,
                  absl::StrFormat("%s has a layer %s; wanted %s", key, word,
                                  by_type ? "sliding_attention, "
                                            "compressed_sparse_attention "
                                            "or heavily_compressed_"
                                            "attention"
                                          : "0, 4 or 128"));
  };
  if (by_type) {
    for (const std::string& word : config_.StringsOr(kTypes, {})) {
      add(Quoted(word),
          [&](const Compression& known) { return known.layer_type == word; });
    }
  } else {
    for (const int64_t rate : config_.IntegersOr(kRates, {})) {
      add(absl::StrFormat("%d", rate),
          [&](const Compression& known) { return known.rate == rate; });
    }
  }
  // Layers of multi-token prediction may stand behind those of the model.
  const int64_t layers = model_.architecture.layers;
  if (static_cast<int64_t>(found.size()) < layers) {
    config_.Error(key, absl::StrFormat("%s has %d layers; wanted %d of "
                                       "num_hidden_layers",
                                       key, found.size(), layers));
    return {};
  }
  found.resize(layers);
  return found;
}

int64_t DeepseekV4Builder::ReadHashLayers() {
  constexpr std::string_view kMlpTypes = "mlp_layer_types";
  const int64_t layers = model_.architecture.layers;
  if (!config_.Has(kMlpTypes)) {
    return std::min(config_.CountOr("num_hash_layers", 3), layers);
  }
  const std::vector<std::string> types = config_.StringsOr(kMlpTypes, {});
  const int64_t hash = std::count(types.begin(), types.end(), "hash_moe");
  const int64_t moe = std::count(types.begin(), types.end(), "moe");
  if (hash + moe != layers || std::find(types.begin(), types.begin() + hash,
                                        "moe") != types.begin() + hash) {
    config_.Error(kMlpTypes, absl::StrFormat(
                                 "mlp_layer_types has %d layers, of which %d "
                                 "are hash_moe and %d moe; wanted %d, hash_moe "
                                 "first",
                                 types.size(), hash, moe, layers));
    return 0;
  }
  constexpr std::string_view kCount = "num_hash_layers";
  if (const int64_t count = std::min(config_.CountOr(kCount, hash), layers);
      count != hash) {
    config_.Error(kMlpTypes,
                  absl::StrFormat("%s has %d layers hash_moe, and %s is %d: "
                                  "frameworks differ in which they read; "
                                  "wanted both alike",
                                  kMlpTypes, hash, kCount, count));
  }
  return hash;
}

void DeepseekV4Builder::AddCompressor(std::string_view module,
                                      const IndexDim& layers,
                                      const Compression& compression,
                                      int64_t head_dim) {
  const int64_t rows = (compression.rate == kSparse.rate ? 2 : 1) * head_dim;
  const auto add = [&](std::string_view name, ParamRole role, Dims shape) {
    Add(absl::StrFormat("attn.%s.%s", module, name), role, std::move(shape),
        {layers});
  };
  add("ape", kReplicatedFp32, {compression.rate, rows});
  add("wkv.weight", kReplicated, {rows, model_.architecture.hidden});
  add("wgate.weight", kReplicated, {rows, model_.architecture.hidden});
  add("norm.weight", kReplicated, {head_dim});
}

void DeepseekV4Builder::AddAttention() {
  Architecture& a = model_.architecture;
  const std::vector<IndexDim> all = {decoder_.AllLayers()};
  const int64_t query_rank = config_.Size("q_lora_rank");
  const int64_t output_rank = config_.Size("o_lora_rank");
  const int64_t query = a.heads * a.head_dim;
  a.output_groups = config_.Size("o_groups");
  if (a.heads % a.output_groups != 0) {
    config_.Error("o_groups", absl::StrFormat("o_groups %d does not divide "
                                              "num_attention_heads %d",
                                              a.output_groups, a.heads));
    return;
  }
  Add("attn_norm.weight", kAttentionNorm, {a.hidden}, all);
  Add("attn.wq_a.weight", kQueryDown, {query_rank, a.hidden}, all);
  Add("attn.q_norm.weight", kQueryDownNorm, {query_rank}, all);
  Add("attn.wq_b.weight", kQueryUp, {query, query_rank}, all);
  Add("attn.wkv.weight", kKeyValueDown, {a.head_dim, a.hidden}, all);
  Add("attn.kv_norm.weight", kKeyValueDownNorm, {a.head_dim}, all);
  Add("attn.wo_a.weight", kAttentionOutputDown,
      {a.output_groups * output_rank, query / a.output_groups}, all);
  Add("attn.wo_b.weight", kAttentionOutputUp,
      {a.hidden, a.output_groups * output_rank}, all);
  Add("attn.attn_sink", kAttentionSinksFp32, {a.heads}, all);

  const std::vector<Compression> compressions = ReadCompressions();
  for (const Compression& compression : {kSparse, kHeavy}) {
    IndexDim layers;
    for (size_t i = 0; i < compressions.size(); ++i) {
      if (compressions[i].rate == compression.rate) {
        layers.numbers.push_back(static_cast<int32_t>(i));
      }
    }
    if (layers.numbers.empty()) continue;
    AddCompressor("compressor", layers, compression, a.head_dim);
    if (compression.rate != kSparse.rate) continue;
    const int64_t index_heads = config_.Size("index_n_heads");
    const int64_t index_dim = config_.Size("index_head_dim");
    Add("attn.indexer.wq_b.weight", kIndexQuery,
        {index_heads * index_dim, query_rank}, {layers});
    Add("attn.indexer.weights_proj.weight", kReplicated,
        {index_heads, a.hidden}, {layers});
    AddCompressor("indexer.compressor", layers, compression, index_dim);
  }
}

void DeepseekV4Builder::AddExperts() {
  Architecture& a = model_.architecture;
  a.experts = config_.Count("n_routed_experts");
  a.experts_per_token = config_.Count("num_experts_per_tok");
  a.hash_layers = ReadHashLayers();
  const int64_t intermediate = config_.Size("moe_intermediate_size");
  const IndexDim all = decoder_.AllLayers();
  Add("ffn_norm.weight", kMoeNorm, {a.hidden}, {all});
  Add("ffn.gate.weight", kRouter, {a.experts, a.hidden}, {all});
  if (a.hash_layers < a.layers) {
    Add("ffn.gate.bias", kRouterCorrection, {a.experts},
        {Consecutive(static_cast<int32_t>(a.hash_layers),
                     a.layers - a.hash_layers)});
  }
  const auto add = [&](std::string_view module, ParamRole gate, ParamRole up,
                       ParamRole down, const std::vector<IndexDim>& index) {
    const auto name = [&](std::string_view matrix) {
      return absl::StrFormat("ffn.%s.%s.weight", module, matrix);
    };
    Add(name("w1"), gate, {intermediate, a.hidden}, index);
    Add(name("w3"), up, {intermediate, a.hidden}, index);
    Add(name("w2"), down, {a.hidden, intermediate}, index);
  };
  add("experts.{1}", kExpertGate, kExpertUp, kExpertDown,
      {all, Consecutive(0, a.experts)});
  add("shared_experts", kSharedExpertGate, kSharedExpertUp, kSharedExpertDown,
      {all});
}

// Layers read and write several streams of the hidden state.
void DeepseekV4Builder::AddHyperConnections() {
  const Architecture& a = model_.architecture;
  const int64_t streams = config_.Size("hc_mult");
  const int64_t mixes = (2 + streams) * streams;
  const std::vector<IndexDim> all = {decoder_.AllLayers()};
  Add("hc_attn_fn", kHyperAttentionMix, {mixes, streams * a.hidden}, all);
  Add("hc_attn_base", kReplicatedFp32, {mixes}, all);
  Add("hc_attn_scale", kReplicatedFp32, {3}, all);
  Add("hc_ffn_fn", kReplicatedFp32, {mixes, streams * a.hidden}, all);
  Add("hc_ffn_base", kReplicatedFp32, {mixes}, all);
  Add("hc_ffn_scale", kReplicatedFp32, {3}, all);
  const auto add_head = [&](std::string_view name, Dims shape) {
    decoder_
        .AddParam(absl::StrFormat("hc_head_%s", name), kHyperHead,
                  std::move(shape), {})
        .dtype = DType::kFp32;
  };
  add_head("fn", {streams, streams * a.hidden});
  add_head("base", {streams});
  add_head("scale", {1});
}

void DeepseekV4Builder::Build() {
  const Architecture& a = model_.architecture;
  CheckConfig();
  CheckRouting(config_);
  // Scales, what no trainer holds, and the tables of hash layers, which
  // training never changes.
  model_.stored_beside = {"*.scale", "mtp.*", "*.ffn.gate.tid2eid"};
  decoder_.AddParam("embed.weight", kEmbedding, {a.vocab, a.hidden}, {});
  AddAttention();
  AddExperts();
  AddHyperConnections();
  decoder_.AddParam("norm.weight", kFinalNorm, {a.hidden}, {});
  decoder_.AddParam("head.weight", kOutputHead, {a.vocab, a.hidden}, {});
}

// Attention whose keys are values, compressed over tokens, with a grouped
// output projection; all layers have experts; hyper-connections.
void Build(ConfigReader& config, Model& model) {
  config.Default("head_dim", 512);
  DeepseekV4Builder(config, model).Build();
}

constexpr Rename kVllmNames[] = {
    {"^layers.", "model.layers."},
    {"^embed.", "model.embed_tokens."},
    {"^norm.", "model.norm."},
    {"^head.", "lm_head."},
    {"^hc_head_", "model.hc_head_"},
    {".gate.bias", ".gate.e_score_correction_bias"},
    {".shared_experts.w2.", ".shared_experts.down_proj."}};

// transformers knows the family since release 5.
constexpr Rename kTransformersNames[] = {
    {"^layers.", "model.layers."},
    {"^embed.", "model.embed_tokens."},
    {"^norm.", "model.norm."},
    {"^head.", "lm_head."},
    {"^hc_head_", "model.hc_head.hc_"},
    {".attn.", ".self_attn."},
    {".ffn.", ".mlp."},
    {".indexer.compressor.", ".compressor.indexer."},
    {".indexer.weights_proj.", ".compressor.indexer.scorer.weights_proj."},
    {".indexer.wq_b.", ".compressor.indexer.q_b_proj."},
    {".compressor.norm.", ".compressor.kv_norm."},
    {".indexer.norm.", ".indexer.kv_norm."},
    {".ape", ".position_bias"},
    {".attn_norm.", ".input_layernorm."},
    {".ffn_norm.", ".post_attention_layernorm."},
    {".hc_attn_", ".attn_hc."},
    {".hc_ffn_", ".ffn_hc."},
    {".attn_sink", ".sinks"},
    {".wq_a.", ".q_a_proj."},
    {".wq_b.", ".q_b_proj."},
    {".q_norm.", ".q_a_norm."},
    {".wkv.", ".kv_proj."},
    {".wgate.", ".gate_proj."},
    {".wo_a.", ".o_a_proj."},
    {".wo_b.", ".o_b_proj."},
    {".gate.bias", ".gate.e_score_correction_bias"},
    {".shared_experts.w1.", ".shared_experts.gate_proj."},
    {".shared_experts.w2.", ".shared_experts.down_proj."},
    {".shared_experts.w3.", ".shared_experts.up_proj."}};

const std::string kCompressorModules[] = {"wkv", "wgate"};
const Fusion kFusions[] = {{"fused_wkv_wgate", kCompressorModules}};

}  // namespace

extern const Family kDeepseekV4 = {
    .model_type = "deepseek_v4",
    .transformers_class = "DeepseekV4ForCausalLM",
    .build = Build,
    .vllm = {.renames = kVllmNames,
             .fused = kFusions,
             .query_key_value_down = "fused_wqa_wkv",
             .token_parts_on_one_stage = true,
             .block_scales = false},
    .sglang = {.known = false},
    .megatron = {.known = false},
    .transformers = {.renames_since_5 = kTransformersNames,
                     .fp32_norms_since_5 = true},
    .knows_mtp = false,
};

}  // namespace refit
