#include <algorithm>
#include <array>
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

struct LayerKind {
  char letter;
  std::string_view word;
};
// transformers 5 saves mamba and attention as linear_attention and
// full_attention.
constexpr std::array kLayerKinds = {LayerKind{'M', "mamba"},
                                    LayerKind{'E', "moe"},
                                    LayerKind{'*', "attention"},
                                    LayerKind{'-', "mlp"},
                                    LayerKind{'M', "linear_attention"},
                                    LayerKind{'*', "full_attention"}};

// One letter a layer, from a list of words.
std::string ReadWords(ConfigReader& config, std::string_view key) {
  std::string pattern;
  for (const std::string& word : config.StringsOr(key, {})) {
    const auto kind =
        std::find_if(kLayerKinds.begin(), kLayerKinds.end(),
                     [&](const LayerKind& k) { return k.word == word; });
    if (kind == kLayerKinds.end()) {
      config.Error(key, absl::StrFormat("%s has a layer %s; wanted mamba "
                                        "(linear_attention), moe, attention "
                                        "(full_attention) or mlp",
                                        key, Quoted(word)));
      return pattern;
    }
    pattern += kind->letter;
  }
  return pattern;
}

// One letter a layer, from a string of them or from a list of words. Where the
// file has both, they are alike.
std::string ReadPattern(ConfigReader& config, std::string_view letters_key,
                        std::string_view words_key) {
  if (!config.Has(letters_key) && config.Has(words_key)) {
    return ReadWords(config, words_key);
  }
  const std::string pattern = config.String(letters_key);
  if (config.Has(words_key)) {
    const std::string words = ReadWords(config, words_key);
    if (words != pattern) {
      config.Error(words_key,
                   absl::StrFormat("%s says %s, and %s %s: frameworks differ "
                                   "in which they read; wanted both alike",
                                   words_key, Quoted(words), letters_key,
                                   Quoted(pattern)));
    }
  }
  const size_t unknown = pattern.find_first_not_of("ME*-");
  if (unknown != std::string::npos) {
    config.Error(letters_key,
                 absl::StrFormat("%s has a layer '%c'; wanted M, E, * or -",
                                 letters_key, pattern[unknown]));
  }
  return pattern;
}

// The layers of one kind: those of `pattern` where its letter stands.
IndexDim LayersOf(std::string_view pattern, char letter) {
  IndexDim layers;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == letter) {
      layers.numbers.push_back(static_cast<int32_t>(i));
    }
  }
  return layers;
}

class NemotronBuilder {
 public:
  NemotronBuilder(ConfigReader& config, Model& model)
      : config_(config), model_(model), decoder_(config, model) {}

  void Build();

 private:
  // Layers named PREFIX.{0}, of which `pattern` gives the kinds.
  void AddLayers(std::string_view prefix, std::string_view pattern,
                 int32_t first_layer);
  // Blocks of several layers each, numbered through.
  void AddMtpLayers();
  void AddMamba(const IndexDim& layers);
  void AddAttention(const IndexDim& layers);
  void AddMlp(const IndexDim& layers);
  void AddExperts(const IndexDim& layers);

  void Add(std::string_view name, ParamRole role, Dims shape,
           std::vector<IndexDim> index) {
    decoder_.AddParam(absl::StrFormat("%s.{0}.%s", prefix_, name), role,
                      std::move(shape), std::move(index), first_layer_);
  }

  ConfigReader& config_;
  Model& model_;
  DecoderBuilder decoder_;
  std::string prefix_;
  int32_t first_layer_ = 0;
};

void NemotronBuilder::Build() {
  Architecture& a = model_.architecture;
  config_.ExpectFalse("mlp_bias");
  config_.ExpectFalse("attention_bias");  // which no framework's modules read
  const std::string pattern =
      ReadPattern(config_, "hybrid_override_pattern", "layers_block_type");
  if (static_cast<int64_t>(pattern.size()) != a.layers) {
    config_.Error("num_hidden_layers",
                  absl::StrFormat("num_hidden_layers is %d; the pattern of "
                                  "layers has %d",
                                  a.layers, pattern.size()));
    return;
  }
  decoder_.AddParam("backbone.embeddings.weight", kEmbedding,
                    {a.vocab, a.hidden}, {});
  AddLayers("backbone.layers", pattern, 0);
  decoder_.AddParam("backbone.norm_f.weight", kFinalNorm, {a.hidden}, {});
  decoder_.AddHead("backbone.embeddings.weight");
  if (model_.mtp) {
    AddMtpLayers();
  } else {
    model_.stored_beside.push_back("mtp.*");
  }
}

void NemotronBuilder::AddMtpLayers() {
  const int64_t blocks = config_.CountOr("num_nextn_predict_layers", 0);
  if (blocks == 0) return;
  Architecture& a = model_.architecture;
  const std::string pattern = ReadPattern(
      config_, "mtp_hybrid_override_pattern", "mtp_layers_block_type");
  const auto size = static_cast<int32_t>(pattern.size());
  if (size == 0) return;
  // Each layer is a number in memory.
  constexpr int64_t kLayersMax = 100'000;
  if (blocks > kLayersMax / size) {
    config_.Error("num_nextn_predict_layers",
                  absl::StrFormat("num_nextn_predict_layers %d, each of %d "
                                  "layers, makes %d; wanted at most %d",
                                  blocks, size, blocks * size, kLayersMax));
    return;
  }
  std::string all;
  IndexDim first;  // of each block
  IndexDim last;
  for (int32_t block = 0; block < blocks; ++block) {
    all += pattern;
    first.numbers.push_back(block * size);
    last.numbers.push_back((block + 1) * size - 1);
  }
  a.mtp_layers = static_cast<int64_t>(all.size());
  a.mtp_block = size;
  AddLayers("mtp.layers", all, static_cast<int32_t>(a.layers));
  Add("enorm.weight", kMtpEmbeddingNorm, {a.hidden}, {first});
  Add("hnorm.weight", kMtpHiddenNorm, {a.hidden}, {first});
  Add("eh_proj.weight", kMtpProjection, {a.hidden, 2 * a.hidden}, {first});
  Add("final_layernorm.weight", kMtpFinalNorm, {a.hidden}, {last});
}

void NemotronBuilder::AddLayers(std::string_view prefix,
                                std::string_view pattern, int32_t first_layer) {
  prefix_ = std::string(prefix);
  first_layer_ = first_layer;
  const auto add = [&](char letter, void (NemotronBuilder::*add_kind)(
                                        const IndexDim& layers)) {
    const IndexDim layers = LayersOf(pattern, letter);
    if (!layers.numbers.empty()) (this->*add_kind)(layers);
  };
  add('M', &NemotronBuilder::AddMamba);
  add('*', &NemotronBuilder::AddAttention);
  add('-', &NemotronBuilder::AddMlp);
  add('E', &NemotronBuilder::AddExperts);
}

void NemotronBuilder::AddMamba(const IndexDim& layers) {
  const int64_t hidden = model_.architecture.hidden;
  // SGLang's class reads another key, of which 8 is its default.
  constexpr std::string_view kSglangKey = "mamba_n_groups";
  const int64_t sglang_groups = config_.SizeOr(kSglangKey, 8);
  const int64_t groups = config_.Has(kSglangKey)
                             ? config_.SizeOr("n_groups", sglang_groups)
                             : config_.Size("n_groups");
  if (config_.Has(kSglangKey) && groups != sglang_groups) {
    config_.Error(kSglangKey,
                  absl::StrFormat("mamba_n_groups is %d and n_groups is %d; "
                                  "wanted both alike, since SGLang reads the "
                                  "first and all others the second",
                                  sglang_groups, groups));
  }
  model_.architecture.mamba =
      MambaSizes{.heads = config_.Size("mamba_num_heads"),
                 .head_dim = config_.Size("mamba_head_dim"),
                 .groups = groups,
                 .sglang_groups = sglang_groups,
                 .state = config_.Size("ssm_state_size")};
  const MambaSizes& mamba = *model_.architecture.mamba;
  const int64_t conv = mamba.inner() + 2 * mamba.shared();
  const int64_t in = mamba.inner() + conv + mamba.heads;
  const bool bias = config_.FlagOr("use_bias", false) ||
                    config_.FlagOr("mamba_proj_bias", false);
  Add("norm.weight", kMambaNorm, {hidden}, {layers});
  Add("mixer.in_proj.weight", kMambaIn, {in, hidden}, {layers});
  if (bias) Add("mixer.in_proj.bias", kMambaInBias, {in}, {layers});
  Add("mixer.conv1d.weight", kMambaConv, {conv, 1, config_.Size("conv_kernel")},
      {layers});
  if (config_.FlagOr("use_conv_bias", true)) {
    Add("mixer.conv1d.bias", kMambaConvBias, {conv}, {layers});
  }
  Add("mixer.A_log", kMambaALog, {mamba.heads}, {layers});
  Add("mixer.D", kMambaD, {mamba.heads}, {layers});
  Add("mixer.dt_bias", kMambaDtBias, {mamba.heads}, {layers});
  Add("mixer.norm.weight", kMambaGatedNorm, {mamba.inner()}, {layers});
  Add("mixer.out_proj.weight", kMambaOut, {hidden, mamba.inner()}, {layers});
  if (bias) Add("mixer.out_proj.bias", kMambaOutBias, {hidden}, {layers});
}

void NemotronBuilder::AddAttention(const IndexDim& layers) {
  const Architecture& a = model_.architecture;
  const int64_t query = a.heads * a.head_dim;
  const int64_t key_value = a.kv_heads * a.head_dim;
  Add("norm.weight", kAttentionNorm, {a.hidden}, {layers});
  Add("mixer.q_proj.weight", kQuery, {query, a.hidden}, {layers});
  Add("mixer.k_proj.weight", kKey, {key_value, a.hidden}, {layers});
  Add("mixer.v_proj.weight", kValue, {key_value, a.hidden}, {layers});
  Add("mixer.o_proj.weight", kAttentionOutput, {a.hidden, query}, {layers});
}

void NemotronBuilder::AddMlp(const IndexDim& layers) {
  const int64_t hidden = model_.architecture.hidden;
  const int64_t intermediate = config_.Size("intermediate_size");
  Add("norm.weight", kMlpNorm, {hidden}, {layers});
  Add("mixer.up_proj.weight", kMlpUp, {intermediate, hidden}, {layers});
  Add("mixer.down_proj.weight", kMlpDown, {hidden, intermediate}, {layers});
}

void NemotronBuilder::AddExperts(const IndexDim& layers) {
  const int64_t hidden = model_.architecture.hidden;
  const int64_t experts = config_.Count("n_routed_experts");
  model_.architecture.experts = experts;
  model_.architecture.expert_groups = ReadExpertGroups(config_);
  const int64_t intermediate = config_.Size("moe_intermediate_size");
  const int64_t shared = config_.Size("moe_shared_expert_intermediate_size");
  if (const int64_t count = config_.CountOr("n_shared_experts", 1);
      count != 1) {
    config_.Error("n_shared_experts",
                  absl::StrFormat("n_shared_experts is %d, which frameworks "
                                  "read differently; wanted 1",
                                  count));
  }
  // Experts may work in a narrower space than the model's.
  const int64_t width = config_.SizeOr("moe_latent_size", hidden);
  const std::vector<IndexDim> every = {layers, Consecutive(0, experts)};
  Add("norm.weight", kMoeNorm, {hidden}, {layers});
  Add("mixer.gate.weight", kRouter, {experts, hidden}, {layers});
  Add("mixer.gate.e_score_correction_bias", kRouterCorrection, {experts},
      {layers});
  model_.params.back().dtype = DType::kFp32;
  Add("mixer.experts.{1}.up_proj.weight", kExpertUp, {intermediate, width},
      every);
  Add("mixer.experts.{1}.down_proj.weight", kExpertDown, {width, intermediate},
      every);
  Add("mixer.shared_experts.up_proj.weight", kSharedExpertUp, {shared, hidden},
      {layers});
  Add("mixer.shared_experts.down_proj.weight", kSharedExpertDown,
      {hidden, shared}, {layers});
  if (!config_.Has("moe_latent_size")) return;
  Add("mixer.fc1_latent_proj.weight", kLatentDown, {width, hidden}, {layers});
  Add("mixer.fc2_latent_proj.weight", kLatentUp, {hidden, width}, {layers});
}

// A layer is one mixer behind one norm: Mamba-2, attention, an MLP without
// gate, or experts without gate beside a shared one.
void Build(ConfigReader& config, Model& model) {
  config.Default("head_dim", 128);
  NemotronBuilder(config, model).Build();
}

constexpr Rename kEngineNames[] = {{"backbone.", "model."},
                                   {".embeddings.", ".embed_tokens."},
                                   {".A_log", ".A"}};
constexpr Rename kTransformersNames[] = {{"backbone.", "model."}};

}  // namespace

extern const Family kNemotronH = {
    .model_type = "nemotron_h",
    .transformers_class = "NemotronHForCausalLM",
    .build = Build,
    .vllm = {.renames = kEngineNames,
             .every_stage = VllmTraits::EveryStage::kEnds,
             .draft_has_prefix = true},
    .sglang = {.renames = kEngineNames},
    .megatron = {.hybrid = true},
    .transformers = {.renames_since_5 = kTransformersNames},
};

}  // namespace refit
