#include "tests/property/family_model.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace refit {
namespace {

using Shape = std::vector<int64_t>;

// The sizes that all families have.
struct Sizes {
  explicit Sizes(Draw& draw)
      : layers(draw.Between(1, 4)),
        hidden(draw.Pick<int64_t>({5, 8, 12})),
        kv_heads(draw.Pick<int64_t>({1, 2, 3})),
        heads(kv_heads * draw.Pick<int64_t>({1, 2})),
        head_dim(draw.Pick<int64_t>({2, 3})),
        vocab(draw.Pick<int64_t>({7, 64, 65})),
        experts(draw.Pick<int64_t>({2, 3, 5})),
        expert_width(draw.Pick<int64_t>({3, 4, 7})),
        width(draw.Pick<int64_t>({6, 9})) {}

  int64_t layers, hidden, kv_heads, heads, head_dim, vocab, experts;
  int64_t expert_width;  // intermediate features of an expert
  int64_t width;         // of a dense MLP

  std::string Config(std::string_view family, std::string_view more) const {
    return absl::StrFormat(
        "{\"model_type\": \"%s\", \"num_hidden_layers\": %d, \"hidden_size\": "
        "%d, \"num_attention_heads\": %d, \"num_key_value_heads\": %d, "
        "\"head_dim\": %d, \"vocab_size\": %d, \"intermediate_size\": %d, "
        "\"moe_intermediate_size\": %d, %s}",
        family, layers, hidden, heads, kv_heads, head_dim, vocab, width,
        expert_width, more);
  }
};

class Lister {
 public:
  explicit Lister(FamilyModel& model) : model_(model) {}

  void Add(const std::string& name, Shape shape) {
    const bool is_fp32 = name.ends_with("e_score_correction_bias");
    model_.tensors.push_back(
        {name, std::move(shape), is_fp32 ? "fp32" : "bf16"});
  }
  void Weight(const std::string& name, Shape shape) {
    Add(absl::StrCat(name, ".weight"), std::move(shape));
  }
  void Gated(const std::string& module, int64_t hidden, int64_t width) {
    Weight(module + ".gate_proj", {width, hidden});
    Weight(module + ".up_proj", {width, hidden});
    Weight(module + ".down_proj", {hidden, width});
  }
  // `query_rows` of a head.
  void Attention(const std::string& in, const Sizes& s, int64_t query_rows) {
    Weight(in + "q_proj", {s.heads * query_rows, s.hidden});
    Weight(in + "k_proj", {s.kv_heads * s.head_dim, s.hidden});
    Weight(in + "v_proj", {s.kv_heads * s.head_dim, s.hidden});
    Weight(in + "o_proj", {s.hidden, s.heads * s.head_dim});
  }
  void Biases(const std::string& in, const Sizes& s) {
    Add(in + "q_proj.bias", {s.heads * s.head_dim});
    Add(in + "k_proj.bias", {s.kv_heads * s.head_dim});
    Add(in + "v_proj.bias", {s.kv_heads * s.head_dim});
  }
  void GatedExperts(const std::string& mlp, const Sizes& s) {
    Weight(mlp + "gate", {s.experts, s.hidden});
    for (int64_t expert = 0; expert < s.experts; ++expert) {
      Gated(absl::StrCat(mlp, "experts.", expert), s.hidden, s.expert_width);
    }
  }

 private:
  FamilyModel& model_;
};

// deepseek_v3, and glm4_moe, whose heads are grouped.
FamilyModel SharedExpertModel(Draw& draw, bool latent) {
  const Sizes s(draw);
  const int64_t dense = draw.Between(0, s.layers - 1);
  const int64_t shared = draw.Between(0, 2);
  const int64_t predictions = draw.Between(0, 2);
  const int64_t query_rank = draw.Pick<int64_t>({0, 5});
  const bool bias = draw.Chance(50);
  const bool norms = draw.Chance(50);
  FamilyModel model;
  model.mtp = predictions > 0 && draw.Chance(50);
  std::string more = absl::StrFormat(
      "\"n_routed_experts\": %d, \"n_shared_experts\": %d, "
      "\"first_k_dense_replace\": %d, \"num_nextn_predict_layers\": %d",
      s.experts, shared, dense, predictions);
  if (latent) {
    absl::StrAppend(&more,
                    ", \"kv_lora_rank\": 3, \"qk_nope_head_dim\": 4, "
                    "\"qk_rope_head_dim\": 2, \"v_head_dim\": 3");
    if (query_rank > 0) absl::StrAppend(&more, ", \"q_lora_rank\": 5");
  } else {
    absl::StrAppendFormat(&more,
                          ", \"attention_bias\": %s, \"use_qk_norm\": %s",
                          bias ? "true" : "false", norms ? "true" : "false");
  }
  model.config = s.Config(latent ? "deepseek_v3" : "glm4_moe", more);
  Lister list(model);
  list.Weight("model.embed_tokens", {s.vocab, s.hidden});
  const int64_t all = s.layers + (model.mtp ? predictions : 0);
  for (int64_t layer = 0; layer < all; ++layer) {
    const std::string in = absl::StrCat("model.layers.", layer, ".");
    const std::string attention = in + "self_attn.";
    list.Weight(in + "input_layernorm", {s.hidden});
    if (latent) {
      if (query_rank > 0) {
        list.Weight(attention + "q_a_proj", {5, s.hidden});
        list.Weight(attention + "q_a_layernorm", {5});
        list.Weight(attention + "q_b_proj", {s.heads * 6, 5});
      } else {
        list.Weight(attention + "q_proj", {s.heads * 6, s.hidden});
      }
      list.Weight(attention + "kv_a_proj_with_mqa", {5, s.hidden});
      list.Weight(attention + "kv_a_layernorm", {3});
      list.Weight(attention + "kv_b_proj", {s.heads * 7, 3});
      list.Weight(attention + "o_proj", {s.hidden, s.heads * 3});
    } else {
      list.Attention(attention, s, s.head_dim);
      if (bias) list.Biases(attention, s);
      if (norms) {
        list.Weight(attention + "q_norm", {s.head_dim});
        list.Weight(attention + "k_norm", {s.head_dim});
      }
    }
    list.Weight(in + "post_attention_layernorm", {s.hidden});
    if (layer < dense) {
      list.Gated(in + "mlp", s.hidden, s.width);
    } else {
      list.GatedExperts(in + "mlp.", s);
      list.Add(in + "mlp.gate.e_score_correction_bias", {s.experts});
      if (shared > 0) {
        list.Gated(in + "mlp.shared_experts", s.hidden,
                   shared * s.expert_width);
      }
    }
    if (layer < s.layers) continue;
    for (const char* norm : {"enorm", "hnorm", "shared_head.norm"}) {
      list.Weight(in + norm, {s.hidden});
    }
    list.Weight(in + "eh_proj", {s.hidden, 2 * s.hidden});
  }
  list.Weight("model.norm", {s.hidden});
  list.Weight("lm_head", {s.vocab, s.hidden});
  return model;
}

// One layer, or one of a prediction's.
void ListNemotronLayer(Lister& list, const Sizes& s, const std::string& in,
                       char kind) {
  list.Weight(in + "norm", {s.hidden});
  const std::string mixer = in + "mixer.";
  switch (kind) {
    case 'M':  // 4 heads of 3, 2 groups of state 5
      list.Weight(mixer + "in_proj", {12 + 12 + 10 + 10 + 4, s.hidden});
      list.Weight(mixer + "conv1d", {12 + 10 + 10, 1, 4});
      list.Add(mixer + "conv1d.bias", {32});
      for (const char* vector : {"A_log", "D", "dt_bias"}) {
        list.Add(mixer + vector, {4});
      }
      list.Weight(mixer + "norm", {12});
      list.Weight(mixer + "out_proj", {s.hidden, 12});
      return;
    case '*':
      list.Attention(mixer, s, s.head_dim);
      return;
    case '-':
      list.Weight(mixer + "up_proj", {s.width, s.hidden});
      list.Weight(mixer + "down_proj", {s.hidden, s.width});
      return;
    default:
      list.Weight(mixer + "gate", {s.experts, s.hidden});
      list.Add(mixer + "gate.e_score_correction_bias", {s.experts});
      for (int64_t expert = 0; expert < s.experts; ++expert) {
        const std::string one = absl::StrCat(mixer, "experts.", expert, ".");
        list.Weight(one + "up_proj", {s.expert_width, s.hidden});
        list.Weight(one + "down_proj", {s.hidden, s.expert_width});
      }
      list.Weight(mixer + "shared_experts.up_proj", {11, s.hidden});
      list.Weight(mixer + "shared_experts.down_proj", {s.hidden, 11});
  }
}

FamilyModel NemotronModel(Draw& draw) {
  const Sizes s(draw);
  const auto letters = [&](int64_t count) {
    std::string pattern;
    for (int64_t i = 0; i < count; ++i) pattern += "ME*-"[draw.Between(0, 3)];
    return pattern;
  };
  const std::string pattern = letters(s.layers);
  const std::string block = letters(draw.Between(1, 3));
  const int64_t predictions = draw.Between(0, 2);
  FamilyModel model;
  model.mtp = predictions > 0 && draw.Chance(50);
  model.config = s.Config(
      "nemotron_h",
      absl::StrFormat(
          "\"hybrid_override_pattern\": \"%s\", "
          "\"mtp_hybrid_override_pattern\": \"%s\", "
          "\"num_nextn_predict_layers\": %d, \"mamba_num_heads\": 4, "
          "\"mamba_head_dim\": 3, \"n_groups\": 2, \"ssm_state_size\": 5, "
          "\"conv_kernel\": 4, \"n_routed_experts\": %d, "
          "\"moe_shared_expert_intermediate_size\": 11",
          pattern, block, predictions, s.experts));
  Lister list(model);
  list.Weight("backbone.embeddings", {s.vocab, s.hidden});
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    ListNemotronLayer(list, s, absl::StrCat("backbone.layers.", layer, "."),
                      pattern[layer]);
  }
  const auto size = static_cast<int64_t>(block.size());
  for (int64_t layer = 0; model.mtp && layer < predictions * size; ++layer) {
    const std::string in = absl::StrCat("mtp.layers.", layer, ".");
    if (layer % size == 0) {
      list.Weight(in + "enorm", {s.hidden});
      list.Weight(in + "hnorm", {s.hidden});
      list.Weight(in + "eh_proj", {s.hidden, 2 * s.hidden});
    }
    ListNemotronLayer(list, s, in, block[layer % size]);
    if (layer % size == size - 1) {
      list.Weight(in + "final_layernorm", {s.hidden});
    }
  }
  list.Weight("backbone.norm_f", {s.hidden});
  list.Weight("lm_head", {s.vocab, s.hidden});
  return model;
}

FamilyModel Qwen3NextModel(Draw& draw) {
  const Sizes s(draw);
  std::vector<bool> has_attention;
  std::string types;
  std::string mlp_only;
  std::vector<bool> is_dense;
  bool any_dense = false;
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    has_attention.push_back(draw.Chance(40));
    absl::StrAppend(
        &types, layer > 0 ? ", " : "",
        has_attention[layer] ? "\"full_attention\"" : "\"linear_attention\"");
    is_dense.push_back(draw.Chance(20));
    if (!is_dense[layer]) continue;
    absl::StrAppend(&mlp_only, any_dense ? ", " : "", layer);
    any_dense = true;
  }
  FamilyModel model;
  model.mtp = !any_dense && draw.Chance(50);
  model.config = s.Config(
      "qwen3_next",
      absl::StrFormat(
          "\"layer_types\": [%s], \"mlp_only_layers\": [%s], "
          "\"linear_num_key_heads\": 2, \"linear_num_value_heads\": 4, "
          "\"linear_key_head_dim\": 3, \"linear_value_head_dim\": 2, "
          "\"linear_conv_kernel_dim\": 4, \"num_experts\": %d, "
          "\"shared_expert_intermediate_size\": 10",
          types, mlp_only, s.experts));
  Lister list(model);
  const auto add_layer = [&](const std::string& in, bool attention,
                             bool dense) {
    list.Weight(in + "input_layernorm", {s.hidden});
    if (attention) {
      const std::string module = in + "self_attn.";
      list.Attention(module, s, 2 * s.head_dim);  // and the output gates
      list.Weight(module + "q_norm", {s.head_dim});
      list.Weight(module + "k_norm", {s.head_dim});
    } else {
      const std::string module = in + "linear_attn.";
      list.Weight(module + "in_proj_qkvz", {6 + 6 + 8 + 8, s.hidden});
      list.Weight(module + "in_proj_ba", {4 + 4, s.hidden});
      list.Weight(module + "conv1d", {6 + 6 + 8, 1, 4});
      list.Add(module + "A_log", {4});
      list.Add(module + "dt_bias", {4});
      list.Weight(module + "norm", {2});
      list.Weight(module + "out_proj", {s.hidden, 8});
    }
    list.Weight(in + "post_attention_layernorm", {s.hidden});
    if (dense) {
      list.Gated(in + "mlp", s.hidden, s.width);
      return;
    }
    list.GatedExperts(in + "mlp.", s);
    list.Gated(in + "mlp.shared_expert", s.hidden, 10);
    list.Weight(in + "mlp.shared_expert_gate", {1, s.hidden});
  };
  list.Weight("model.embed_tokens", {s.vocab, s.hidden});
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    add_layer(absl::StrCat("model.layers.", layer, "."), has_attention[layer],
              is_dense[layer]);
  }
  if (model.mtp) {
    add_layer("mtp.layers.0.", true, false);
    list.Weight("mtp.fc", {s.hidden, 2 * s.hidden});
    for (const char* norm :
         {"pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"}) {
      list.Weight(absl::StrCat("mtp.", norm), {s.hidden});
    }
  }
  list.Weight("model.norm", {s.hidden});
  list.Weight("lm_head", {s.vocab, s.hidden});
  return model;
}

FamilyModel GptOssModel(Draw& draw) {
  const Sizes s(draw);
  FamilyModel model;
  model.config = s.Config(
      "gpt_oss", absl::StrFormat("\"num_local_experts\": %d", s.experts));
  Lister list(model);
  list.Weight("model.embed_tokens", {s.vocab, s.hidden});
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    const std::string in = absl::StrCat("model.layers.", layer, ".");
    list.Weight(in + "input_layernorm", {s.hidden});
    list.Attention(in + "self_attn.", s, s.head_dim);
    list.Biases(in + "self_attn.", s);
    list.Add(in + "self_attn.o_proj.bias", {s.hidden});
    list.Add(in + "self_attn.sinks", {s.heads});
    list.Weight(in + "post_attention_layernorm", {s.hidden});
    list.Weight(in + "mlp.router", {s.experts, s.hidden});
    list.Add(in + "mlp.router.bias", {s.experts});
    const std::string experts = in + "mlp.experts.";
    list.Add(experts + "gate_up_proj", {s.experts, s.hidden, 2 * s.width});
    list.Add(experts + "gate_up_proj_bias", {s.experts, 2 * s.width});
    list.Add(experts + "down_proj", {s.experts, s.width, s.hidden});
    list.Add(experts + "down_proj_bias", {s.experts, s.hidden});
  }
  list.Weight("model.norm", {s.hidden});
  list.Weight("lm_head", {s.vocab, s.hidden});
  return model;
}

}  // namespace

FamilyModel DrawFamilyModel(Draw& draw) {
  switch (draw.Between(0, 4)) {
    case 0:
      return SharedExpertModel(draw, /*latent=*/true);
    case 1:
      return SharedExpertModel(draw, /*latent=*/false);
    case 2:
      return NemotronModel(draw);
    case 3:
      return Qwen3NextModel(draw);
    default:
      return GptOssModel(draw);
  }
}

}  // namespace refit
