// Megatron Core: GPTModel with Transformer Engine's layer spec and grouped
// experts. README.md beside it holds the formulas and where they come from.
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/layout/common/fused_experts.h"
#include "compiler/layout/common/mixers.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/common/stages.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/megatron/mixers.h"
#include "compiler/layout/megatron/specs.h"

namespace refit {
namespace {

using enum ParamRole;
using megatron::ColumnShard;
using megatron::FusedQkv;
using megatron::FusedQkvRows;
using megatron::GateAndUp;
using megatron::InterleavedGateAndUp;
using megatron::Replicated;
using megatron::ReplicatedSecond;
using megatron::RowShard;

struct MegatronSizes {
  int64_t tensor;
  int64_t pipeline;
  int64_t chunks;  // virtual stages per pipeline stage
  int64_t expert;
  int64_t expert_tensor;
  int64_t stage_ranks;  // tensor x context x data
};

MegatronSizes SizesOf(const SideSpec& side) {
  return {.tensor = side.tensor_parallel.value,
          .pipeline = side.pipeline_parallel.value,
          .chunks = side.virtual_pipeline_parallel.value,
          .expert = side.expert_parallel.value,
          .expert_tensor = side.expert_tensor_parallel.value,
          .stage_ranks = side.tensor_parallel.value *
                         side.context_parallel.value *
                         side.data_parallel.value};
}

// Layers that one module lists, numbered from 0 there.
struct LayerBlock {
  Range layers;
  std::string layer;  // "decoder.layers.{0}."
  // Of multi-token prediction: what stands before the names of the tensors that
  // it has beside its layers.
  std::string prediction = {};
};

// What one rank holds of one chunk: the same for all ranks with its tensor
// (experts: expert and expert tensor) coordinate.
struct Chunk {
  std::vector<LayerBlock> blocks;
  std::string prefix;  // of every name
  bool first = false;  // of the model
  bool last = false;
  bool predicts = false;  // has the multi-token-prediction layers
};

class MegatronLayout {
 public:
  explicit MegatronLayout(const LayoutContext& context)
      : context_(context),
        sizes_(SizesOf(context.side)),
        table_(context.model) {}

  SideLayout LayOut();

 private:
  using MakeSpec = absl::FunctionRef<TensorSpec(const LayerGroup&)>;

  // Reports sizes that do not fit; true when all do.
  bool CheckSizes();

  // The buffers of a chunk in three runs, in module order: what comes before
  // the experts, the experts, what comes after.
  std::vector<BufferId> EmbeddingAndLayers(const Chunk& chunk, int64_t tensor);
  std::vector<BufferId> Experts(const Chunk& chunk, int64_t expert,
                                int64_t expert_tensor);
  // Of experts that a checkpoint holds in one tensor a layer.
  void AddFusedExperts(const Chunk& chunk, const LayerBlock& block,
                       Range experts, EvenPart part,
                       std::vector<BufferId>& out);
  // Whether the model is of the class with mixers of several kinds.
  bool IsHybrid() const;
  std::vector<BufferId> NormAndHead(const Chunk& chunk, int64_t tensor);

  // The buffers of a chunk's layers that are not experts'.
  void AddLayers(const Chunk& chunk, const LayerBlock& block, int64_t tensor,
                 std::vector<BufferId>& out);

  // One stack per group of layers of `block` that have `roles`. `name` is the
  // whole one, with "{0}" for the layer.
  void AddStacks(const LayerBlock& block, std::string_view name,
                 std::initializer_list<ParamRole> roles,
                 const std::optional<ExpertSlice>& experts, MakeSpec make,
                 std::vector<BufferId>& out);

  Chunk ChunkOf(int64_t stage, int64_t number, Range layers) const;
  Buffer Vocabulary(const Chunk& chunk, std::string_view name, ParamId id,
                    int64_t tensor) const;
  // `buffer` is one more copy of the embedding, on the last stage: of a
  // source, one that need not be read; of a destination, one more place to
  // write to.
  Buffer EmbeddingCopy(Buffer buffer, ParamId id, SkipReason reason,
                       std::string_view what) const;

  const LayoutContext& context_;
  const MegatronSizes sizes_;
  const RoleTable table_;
};

bool MegatronLayout::CheckSizes() {
  const SideSpec& side = context_.side;
  const Architecture& architecture = context_.model.architecture;
  SizeChecks checks(context_, table_);
  const SizeChecks::Divisor tensor =
      checks.Named("tensor_parallel", side.tensor_parallel);
  const SizeChecks::Divisor expert =
      checks.Named("expert_parallel", side.expert_parallel);
  const SizeChecks::Divisor expert_tensor =
      checks.Named("expert_tensor_parallel", side.expert_tensor_parallel);

  if (architecture.kv_heads > 0 &&
      architecture.heads % architecture.kv_heads != 0) {
    checks.Report(
        context_.model.place,
        absl::StrFormat(
            "num_key_value_heads %d does not divide %d attention heads",
            architecture.kv_heads, architecture.heads));
  }
  checks.Heads(tensor);
  if (!table_.Params(kQuery).empty() && checks.ok()) {
    checks.Divides(tensor, FusedQkvRows(architecture),
                   "rows of the fused query, key and value");
  }
  for (const ParamRole role : {kMlpGate, kMlpUp}) {
    checks.Rows(tensor, role, "intermediate features of the MLP");
  }
  checks.Columns(tensor, kMlpDown, "intermediate features of the MLP");
  for (const ParamRole role : {kSharedExpertGate, kSharedExpertUp}) {
    checks.Rows(tensor, role, "intermediate features of the shared experts");
  }
  checks.Columns(tensor, kSharedExpertDown,
                 "intermediate features of the shared experts");
  checks.Rows(tensor, kMtpProjection, "rows of eh_proj");
  for (int64_t layer = 0; layer < architecture.all_layers(); ++layer) {
    if (table_.At(kQuery, layer).empty()) continue;
    if (!table_.At(kAttentionNorm, layer).empty()) continue;
    checks.Report(
        side.layout.place,
        absl::StrFormat("%s: Megatron's attention has a norm before "
                        "it, and layer %d of this %s has none; wanted "
                        "a parameter of role attention_norm",
                        side.key, layer, architecture.family->model_type));
    break;
  }
  CheckMixerSizes(checks, architecture, tensor, MambaGroups::kCut);

  checks.HasExperts(sizes_.expert > 1, expert.place, "expert_parallel");
  checks.Divides(expert, architecture.experts, "experts");
  for (const ParamRole role : {kExpertGate, kExpertUp}) {
    checks.Rows(expert_tensor, role, "intermediate features of an expert");
  }
  checks.Columns(expert_tensor, kExpertDown,
                 "intermediate features of an expert");
  checks.Columns(expert_tensor, kFusedExpertDown,
                 "intermediate features of an expert");
  SizeChecks::Divisor expert_ranks = expert;
  if (sizes_.expert_tensor > 1) {
    expert_ranks.text = absl::StrFormat("%s x expert_tensor_parallel %d",
                                        expert.text, sizes_.expert_tensor);
    expert_ranks.value *= sizes_.expert_tensor;
    if (sizes_.expert == 1) expert_ranks = expert_tensor;
  }
  checks.Divides(expert_ranks, sizes_.stage_ranks,
                 "ranks of a pipeline stage (tensor x context x data)");
  if (side.moe_mlp_glu_interleave_size.given && checks.ok()) {
    const SizeChecks::Divisor interleave = checks.Named(
        "moe_mlp_glu_interleave_size", side.moe_mlp_glu_interleave_size);
    for (const ParamId id : table_.Params(kExpertGate)) {
      checks.Divides(interleave,
                     table_.param(id).shape[0] / sizes_.expert_tensor,
                     "intermediate features that a rank holds of an expert");
    }
  }
  if (!table_.Params(kFusedExpertDown).empty()) {
    // Such experts are written one by one, gate rows before up rows.
    const auto refuse = [&](std::string_view key, const Place& place) {
      checks.Report(place, absl::StrFormat(
                               "%s.%s is not known of %s's experts; "
                               "wanted no such key",
                               side.key, key, architecture.family->model_type));
    };
    if (side.moe_mlp_glu_interleave_size.given) {
      refuse("moe_mlp_glu_interleave_size",
             side.moe_mlp_glu_interleave_size.place);
    }
    if (side.moe_single_grouped_weight.value) {
      refuse("moe_single_grouped_weight", side.moe_single_grouped_weight.place);
    }
  }
  return checks.ok();
}

void MegatronLayout::AddStacks(const LayerBlock& block, std::string_view name,
                               std::initializer_list<ParamRole> roles,
                               const std::optional<ExpertSlice>& experts,
                               MakeSpec make, std::vector<BufferId>& out) {
  for (const LayerGroup& group : table_.Group(roles, block.layers)) {
    TensorSpec spec = make(group);
    spec.name = std::string(name);
    out.push_back(context_.buffers.Intern(
        LayerStack(table_, std::move(spec), group.layers,
                   {.dtype = BufferDType(context_.side, *group.params[0]),
                    .first_layer = block.layers.begin,
                    .experts = experts})));
  }
}

Buffer MegatronLayout::Vocabulary(const Chunk& chunk, std::string_view name,
                                  ParamId id, int64_t tensor) const {
  const int64_t multiple =
      context_.side.make_vocab_size_divisible_by.value * sizes_.tensor;
  const int64_t vocab = table_.param(id).shape[0];
  return VocabularyTensor(
      context_, absl::StrFormat("%s%s", chunk.prefix, name), id,
      {.padded_rows = (vocab + multiple - 1) / multiple * multiple,
       .count = sizes_.tensor,
       .index = tensor});
}

Buffer MegatronLayout::EmbeddingCopy(Buffer buffer, ParamId id,
                                     SkipReason reason,
                                     std::string_view what) const {
  if (context_.which == fb::Side::kDestination) return buffer;
  return SkippedCopy(std::move(buffer), reason,
                     absl::StrFormat("a copy of %s %s, which the first stage "
                                     "sends",
                                     what, table_.param(id).name));
}

std::vector<BufferId> MegatronLayout::EmbeddingAndLayers(const Chunk& chunk,
                                                         int64_t tensor) {
  std::vector<BufferId> out;
  if (chunk.first || chunk.predicts) {
    for (const ParamId id : table_.Params(kEmbedding)) {
      Buffer embedding =
          Vocabulary(chunk, "embedding.word_embeddings.weight", id, tensor);
      if (!chunk.first) {
        embedding = EmbeddingCopy(std::move(embedding), id, SkipReason::kUnread,
                                  "the embedding");
      }
      out.push_back(context_.buffers.Intern(std::move(embedding)));
    }
  }
  for (const LayerBlock& block : chunk.blocks) {
    AddLayers(chunk, block, tensor, out);
  }
  return out;
}

void MegatronLayout::AddLayers(const Chunk& chunk, const LayerBlock& block,
                               int64_t tensor, std::vector<BufferId>& out) {
  const auto add_in = [&](std::string_view module, std::string_view name,
                          std::initializer_list<ParamRole> roles,
                          MakeSpec make) {
    AddStacks(block, absl::StrFormat("%s%s%s", chunk.prefix, module, name),
              roles, std::nullopt, make, out);
  };
  const auto add = [&](std::string_view name,
                       std::initializer_list<ParamRole> roles, MakeSpec make) {
    add_in(block.layer, name, roles, make);
  };
  const auto add_prediction = [&](std::string_view name, ParamRole role,
                                  MakeSpec make) {
    add_in(block.prediction, name, {role}, make);
  };
  const auto row_shard = [&](const LayerGroup& group) {
    return RowShard(group, sizes_.tensor, tensor);
  };
  const auto column_shard = [&](const LayerGroup& group) {
    return ColumnShard(group, sizes_.tensor, tensor);
  };
  const auto gate_and_up = [&](const LayerGroup& group) {
    return GateAndUp(group, sizes_.tensor, tensor);
  };
  const Architecture& architecture = context_.model.architecture;
  const Range qkv_rows =
      EvenShard(FusedQkvRows(architecture), sizes_.tensor, tensor);
  const auto fused_qkv = [&](const LayerGroup& group) {
    return FusedQkv(group, architecture, qkv_rows);
  };

  // Without gates, fc1 is up alone.
  const auto add_fc1 = [&](std::string_view name, ParamRole gate,
                           ParamRole up) {
    if (table_.Params(gate).empty()) {
      add(name, {up}, row_shard);
    } else {
      add(name, {gate, up}, gate_and_up);
    }
  };
  const EvenPart part = {sizes_.tensor, tensor};

  add_prediction("enorm.weight", kMtpEmbeddingNorm, Replicated);
  add_prediction("hnorm.weight", kMtpHiddenNorm, Replicated);
  add_prediction("eh_proj.weight", kMtpProjection, row_shard);

  // Latent attention has its norm in front of it, else the fused projection.
  if (architecture.latent.has_value()) {
    add("input_layernorm.weight", {kAttentionNorm}, Replicated);
  } else {
    add("self_attention.linear_qkv.layer_norm_weight", {kQuery, kAttentionNorm},
        ReplicatedSecond);
  }
  add("self_attention.linear_proj.weight", {kAttentionOutput}, column_shard);
  add("self_attention.linear_proj.bias", {kAttentionOutputBias}, Replicated);
  add("self_attention.linear_qkv.weight", {kQuery, kKey, kValue}, fused_qkv);
  add("self_attention.linear_qkv.bias", {kQueryBias, kKeyBias, kValueBias},
      fused_qkv);
  add("self_attention.q_layernorm.weight", {kQueryNorm}, Replicated);
  add("self_attention.k_layernorm.weight", {kKeyNorm}, Replicated);
  add("self_attention.core_attention.softmax_offset", {kAttentionSinks},
      [&](const LayerGroup& group) { return RowPart(*group.params[0], part); });
  add("self_attention.linear_q_proj.weight", {kLatentQuery}, row_shard);
  add("self_attention.linear_q_down_proj.weight", {kQueryDown}, Replicated);
  add("self_attention.linear_q_up_proj.layer_norm_weight", {kQueryDownNorm},
      Replicated);
  add("self_attention.linear_q_up_proj.weight", {kQueryUp}, row_shard);
  add("self_attention.linear_kv_down_proj.weight", {kKeyValueDown}, Replicated);
  add("self_attention.linear_kv_up_proj.layer_norm_weight", {kKeyValueDownNorm},
      Replicated);
  add("self_attention.linear_kv_up_proj.weight", {kKeyValueUp}, row_shard);
  megatron::AddMixers(architecture, context_.side, part, add);
  // Where the MLP has a norm of its own before it and one after it, the other
  // is the attention's.
  if (table_.Params(kMlpInputNorm).empty()) {
    add("mlp.linear_fc1.layer_norm_weight", {kMlpNorm}, Replicated);
  } else {
    add("self_attention.linear_proj.post_layernorm.weight", {kMlpNorm},
        Replicated);
    add("mlp.linear_fc1.layer_norm_weight", {kMlpInputNorm}, Replicated);
    add("mlp.linear_fc2.post_layernorm.weight", {kMlpOutputNorm}, Replicated);
  }
  add_fc1("mlp.linear_fc1.weight", kMlpGate, kMlpUp);
  add("mlp.linear_fc2.weight", {kMlpDown}, column_shard);
  add("pre_mlp_layernorm.weight", {kMoeNorm}, Replicated);
  add("mlp.router.weight", {kRouter}, Replicated);
  add("mlp.router.bias", {kRouterBias}, Replicated);
  add("mlp.router.expert_bias", {kRouterCorrection}, Replicated);
  add("mlp.fc1_latent_proj.weight", {kLatentDown}, Replicated);
  add("mlp.fc2_latent_proj.weight", {kLatentUp}, Replicated);
  add("mlp.shared_experts.gate_weight", {kSharedExpertRouter}, Replicated);
  add_fc1("mlp.shared_experts.linear_fc1.weight", kSharedExpertGate,
          kSharedExpertUp);
  add("mlp.shared_experts.linear_fc2.weight", {kSharedExpertDown},
      column_shard);
  add_prediction("final_layernorm.weight", kMtpFinalNorm, Replicated);
}

std::vector<BufferId> MegatronLayout::Experts(const Chunk& chunk,
                                              int64_t expert,
                                              int64_t expert_tensor) {
  std::vector<BufferId> out;
  const Range experts =
      EvenShard(context_.model.architecture.experts, sizes_.expert, expert);
  const ExpertSlice slice = ConsecutiveExperts(
      experts, !context_.side.moe_single_grouped_weight.value);
  const Located<int64_t>& interleave =
      context_.side.moe_mlp_glu_interleave_size;
  for (const LayerBlock& block : chunk.blocks) {
    const auto name = [&](std::string_view linear) {
      return absl::StrFormat("%s%smlp.experts.%s.weight%s", chunk.prefix,
                             block.layer, linear, slice.in_name ? "{1}" : "");
    };
    if (table_.Params(kExpertGate).empty()) {
      AddStacks(
          block, name("linear_fc1"), {kExpertUp}, slice,
          [&](const LayerGroup& group) {
            return RowShard(group, sizes_.expert_tensor, expert_tensor);
          },
          out);
    } else {
      AddStacks(
          block, name("linear_fc1"), {kExpertGate, kExpertUp}, slice,
          [&](const LayerGroup& group) {
            return interleave.given
                       ? InterleavedGateAndUp(group, sizes_.expert_tensor,
                                              expert_tensor, interleave.value)
                       : GateAndUp(group, sizes_.expert_tensor, expert_tensor);
          },
          out);
    }
    AddStacks(
        block, name("linear_fc2"), {kExpertDown}, slice,
        [&](const LayerGroup& group) {
          return ColumnShard(group, sizes_.expert_tensor, expert_tensor);
        },
        out);
    AddFusedExperts(chunk, block, experts,
                    {sizes_.expert_tensor, expert_tensor}, out);
  }
  return out;
}

void MegatronLayout::AddFusedExperts(const Chunk& chunk,
                                     const LayerBlock& block, Range experts,
                                     EvenPart part,
                                     std::vector<BufferId>& out) {
  const auto add = [&](std::string_view name, ParamRole role,
                       absl::FunctionRef<TensorSpec(const Param&)> make) {
    for (const LayerGroup& group : table_.Group({&role, 1}, block.layers)) {
      const Param& param = *group.params[0];
      TensorSpec spec = make(param);
      spec.name = absl::StrFormat("%s%smlp.experts.%s{1}", chunk.prefix,
                                  block.layer, name);
      out.push_back(context_.buffers.Intern(
          LayerStack(table_, std::move(spec), group.layers,
                     {.dtype = BufferDType(context_.side, param),
                      .first_layer = block.layers.begin,
                      .experts = std::nullopt,
                      .fused_experts = experts.size()})));
    }
  };
  add("linear_fc1.weight", kFusedExpertGateUp, [&](const Param& param) {
    return GateUpOfExperts(param, experts, part);
  });
  add("linear_fc1.bias", kFusedExpertGateUpBias, [&](const Param& param) {
    return GateUpBiasOfExperts(param, experts, part);
  });
  add("linear_fc2.weight", kFusedExpertDown,
      [&](const Param& param) { return DownOfExperts(param, experts, part); });
  add("linear_fc2.bias", kFusedExpertDownBias,
      [&](const Param& param) { return DownBiasOfExperts(param, experts); });
}

bool MegatronLayout::IsHybrid() const {
  const Architecture& architecture = context_.model.architecture;
  return architecture.mamba.has_value();
}

std::vector<BufferId> MegatronLayout::NormAndHead(const Chunk& chunk,
                                                  int64_t tensor) {
  std::vector<BufferId> out;
  if (!chunk.last) return out;
  const std::string_view final_norm =
      IsHybrid() ? "final_norm" : "final_layernorm";
  for (const ParamId id : table_.Params(kFinalNorm)) {
    out.push_back(context_.buffers.Intern(WholeTensor(
        context_,
        absl::StrFormat("%sdecoder.%s.weight", chunk.prefix, final_norm), id)));
  }
  const std::string_view head = "output_layer.weight";
  if (!context_.model.architecture.tied) {
    for (const ParamId id : table_.Params(kOutputHead)) {
      out.push_back(
          context_.buffers.Intern(Vocabulary(chunk, head, id, tensor)));
    }
  } else if (!chunk.first) {
    for (const ParamId id : table_.Params(kEmbedding)) {
      out.push_back(context_.buffers.Intern(
          EmbeddingCopy(Vocabulary(chunk, head, id, tensor), id,
                        SkipReason::kTied, "the tied")));
    }
  }
  return out;
}

Chunk MegatronLayout::ChunkOf(int64_t stage, int64_t number,
                              Range layers) const {
  const Architecture& architecture = context_.model.architecture;
  const bool last = stage == sizes_.pipeline - 1 && number == sizes_.chunks - 1;
  Chunk chunk = {.blocks = {{.layers = layers, .layer = "decoder.layers.{0}."}},
                 .prefix = sizes_.chunks > 1
                               ? absl::StrFormat("vp_stage.%d.", number)
                               : "",
                 .first = stage == 0 && number == 0,
                 .last = last,
                 .predicts = last && architecture.mtp_layers > 0};
  if (!chunk.predicts) return chunk;
  const Range all = {architecture.layers, architecture.all_layers()};
  if (!IsHybrid()) {
    chunk.blocks.push_back({.layers = all,
                            .layer = "mtp.layers.{0}.mtp_model_layer.",
                            .prediction = "mtp.layers.{0}."});
    return chunk;
  }
  // A block of layers makes each prediction of a hybrid model.
  for (int64_t begin = all.begin; begin < all.end;
       begin += architecture.mtp_block) {
    const std::string prediction = absl::StrFormat(
        "mtp.layers.%d.", (begin - all.begin) / architecture.mtp_block);
    chunk.blocks.push_back(
        {.layers = {begin, begin + architecture.mtp_block},
         .layer = absl::StrCat(prediction, "mtp_model_layer.layers.{0}."),
         .prediction = prediction});
  }
  return chunk;
}

SideLayout MegatronLayout::LayOut() {
  if (!CheckRoles(context_, "megatron", table_)) return {};
  const bool sizes_fit = CheckSizes();
  const std::optional<PipelineSplit> split = SplitMegatronLayers(
      context_.side, context_.model.architecture.layers, context_.diagnostics);
  if (!sizes_fit || !split.has_value()) return {};

  // The buffers of one pipeline stage, rank by rank.
  SideLayout layout;
  for (int64_t stage = 0; stage < sizes_.pipeline; ++stage) {
    std::vector<std::vector<BufferId>> ranks(sizes_.stage_ranks);
    for (int64_t number = 0; number < sizes_.chunks; ++number) {
      const Chunk chunk = ChunkOf(stage, number, (*split)[stage][number]);
      std::vector<std::vector<BufferId>> before, experts, after;
      for (int64_t tensor = 0; tensor < sizes_.tensor; ++tensor) {
        before.push_back(EmbeddingAndLayers(chunk, tensor));
        after.push_back(NormAndHead(chunk, tensor));
      }
      for (int64_t i = 0; i < sizes_.expert * sizes_.expert_tensor; ++i) {
        experts.push_back(
            Experts(chunk, i / sizes_.expert_tensor, i % sizes_.expert_tensor));
      }
      for (int64_t i = 0; i < sizes_.stage_ranks; ++i) {
        for (const std::vector<BufferId>* run :
             {&before[i % sizes_.tensor],
              &experts[i % (sizes_.expert * sizes_.expert_tensor)],
              &after[i % sizes_.tensor]}) {
          ranks[i].insert(ranks[i].end(), run->begin(), run->end());
        }
      }
    }
    layout.ranks.insert(layout.ranks.end(), ranks.begin(), ranks.end());
  }

  AppendReplicas(context_.side.replicas.value, layout);
  if (!table_.Params(kExpertGate).empty()) {
    const Located<int64_t>& interleave =
        context_.side.moe_mlp_glu_interleave_size;
    layout.requirements["moe_mlp_glu_interleave_size"] =
        interleave.given ? absl::StrCat(interleave.value) : "none";
  }
  return layout;
}

}  // namespace

SideLayout LayOutMegatron(const LayoutContext& context) {
  return MegatronLayout(context).LayOut();
}

}  // namespace refit
