// Megatron Core: GPTModel with Transformer Engine's layer spec and grouped
// experts. docs/layouts.md holds the formulas and where they come from.
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "compiler/layout/fused_experts.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/mixers.h"
#include "compiler/layout/role_table.h"
#include "compiler/layout/shard.h"
#include "compiler/layout/sizes.h"
#include "compiler/layout/stages.h"
#include "compiler/layout/tensor_stack.h"

namespace refit {
namespace {

using enum ParamRole;

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

// What one rank holds of one chunk: the same for all ranks with its tensor
// (experts: expert and expert tensor) coordinate.
struct Chunk {
  Range layers;
  std::string prefix;  // of every name
  bool first = false;  // of the model
  bool last = false;
};

// Rows of a param that stand together in a query group.
struct QkvBlock {
  const Param* param;
  int64_t row;
  int64_t size;
};

// Query group g: [its query heads; their output gates, if there are any; its
// key head; its value head].
std::vector<QkvBlock> QueryGroup(const LayerGroup& group,
                                 const Architecture& architecture, int64_t g) {
  const int64_t head = architecture.head_dim;
  const int64_t heads = architecture.heads / architecture.kv_heads;
  const Param* const query = group.params[0];
  std::vector<QkvBlock> blocks;
  if (architecture.output_gate) {
    for (const int64_t half : {0, 1}) {
      for (int64_t i = g * heads; i < (g + 1) * heads; ++i) {
        blocks.push_back({query, (2 * i + half) * head, head});
      }
    }
  } else {
    blocks.push_back({query, g * heads * head, heads * head});
  }
  blocks.push_back({group.params[1], g * head, head});
  blocks.push_back({group.params[2], g * head, head});
  return blocks;
}

int64_t FusedQkvRows(const Architecture& architecture) {
  return architecture.heads * architecture.query_head_rows() +
         2 * architecture.kv_heads * architecture.head_dim;
}

// One query group after the other. Tensor parallelism cuts the rows evenly, if
// need be through a group.
TensorSpec FusedQkv(const LayerGroup& group, const Architecture& architecture,
                    Range rows) {
  const int64_t group_rows = FusedQkvRows(architecture) / architecture.kv_heads;
  TensorSpec spec;
  spec.shape = group.params[0]->shape;
  spec.shape[0] = rows.size();
  for (int64_t g = rows.begin / group_rows; g * group_rows < rows.end; ++g) {
    int64_t fused_row = g * group_rows;
    for (const QkvBlock& block : QueryGroup(group, architecture, g)) {
      const int64_t begin = std::max(rows.begin, fused_row);
      const int64_t end = std::min(rows.end, fused_row + block.size);
      if (begin < end) {
        const int64_t param_row = block.row + begin - fused_row;
        spec.parts.push_back(RowsPart(*block.param,
                                      {param_row, param_row + end - begin},
                                      begin - rows.begin));
      }
      fused_row += block.size;
    }
  }
  return spec;
}

// Each rank's gate rows, then its up rows.
TensorSpec GateAndUp(const LayerGroup& group, int64_t count, int64_t index) {
  const Range gate = EvenShare(group.params[0]->shape[0], count, index);
  const Range up = EvenShare(group.params[1]->shape[0], count, index);
  TensorSpec spec;
  spec.shape = {gate.size() + up.size(), group.params[0]->shape[1]};
  spec.parts = {RowsPart(*group.params[0], gate, 0),
                RowsPart(*group.params[1], up, gate.size())};
  return spec;
}

TensorSpec ColumnShard(const LayerGroup& group, int64_t count, int64_t index) {
  const Param& param = *group.params[0];
  const Range columns = EvenShare(param.shape[1], count, index);
  return {.name = {},
          .shape = {param.shape[0], columns.size()},
          .parts = {ColumnsPart(param, columns)}};
}

TensorSpec Replicated(const LayerGroup& group) {
  return {.name = {},
          .shape = group.params[0]->shape,
          .parts = {WholePart(*group.params[0])}};
}

TensorSpec ReplicatedSecond(const LayerGroup& group) {
  return {.name = {},
          .shape = group.params[1]->shape,
          .parts = {WholePart(*group.params[1])}};
}

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
  void AddMixers(const Chunk& chunk, EvenPart part, std::vector<BufferId>& out);
  std::vector<BufferId> Experts(const Chunk& chunk, int64_t expert,
                                int64_t expert_tensor);
  void AddFusedExperts(const Chunk& chunk, Range experts, EvenPart part,
                       std::vector<BufferId>& out);
  std::vector<BufferId> NormAndHead(const Chunk& chunk, int64_t tensor);

  // One stack per group of layers that have `roles`.
  void AddLayers(const Chunk& chunk, std::string_view name,
                 std::initializer_list<ParamRole> roles,
                 const std::optional<ExpertSlice>& experts, MakeSpec make,
                 std::vector<BufferId>& out);

  Buffer Vocabulary(const Chunk& chunk, std::string_view name, ParamId id,
                    int64_t tensor) const;

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
  checks.Heads();
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
  return checks.ok();
}

void MegatronLayout::AddLayers(const Chunk& chunk, std::string_view name,
                               std::initializer_list<ParamRole> roles,
                               const std::optional<ExpertSlice>& experts,
                               MakeSpec make, std::vector<BufferId>& out) {
  for (const LayerGroup& group : table_.Group(roles, chunk.layers)) {
    TensorSpec spec = make(group);
    spec.name = absl::StrFormat("%sdecoder.layers.{0}.%s", chunk.prefix, name);
    // Modules number their layers from 0 in each chunk.
    out.push_back(context_.buffers.Intern(
        LayerStack(table_, std::move(spec), group.layers,
                   {.dtype = BufferDType(context_.side, *group.params[0]),
                    .first_layer = chunk.layers.begin,
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

std::vector<BufferId> MegatronLayout::EmbeddingAndLayers(const Chunk& chunk,
                                                         int64_t tensor) {
  std::vector<BufferId> out;
  if (chunk.first) {
    for (const ParamId id : table_.Params(kEmbedding)) {
      out.push_back(context_.buffers.Intern(
          Vocabulary(chunk, "embedding.word_embeddings.weight", id, tensor)));
    }
  }
  const auto add = [&](std::string_view name,
                       std::initializer_list<ParamRole> roles, MakeSpec make) {
    AddLayers(chunk, name, roles, std::nullopt, make, out);
  };
  const auto column_shard = [&](const LayerGroup& group) {
    return ColumnShard(group, sizes_.tensor, tensor);
  };
  const auto gate_and_up = [&](const LayerGroup& group) {
    return GateAndUp(group, sizes_.tensor, tensor);
  };
  const Architecture& architecture = context_.model.architecture;
  const Range qkv_rows =
      EvenShare(FusedQkvRows(architecture), sizes_.tensor, tensor);
  const auto fused_qkv = [&](const LayerGroup& group) {
    return FusedQkv(group, architecture, qkv_rows);
  };
  const EvenPart part = {sizes_.tensor, tensor};
  const auto row_part = [&](const LayerGroup& group) {
    return RowPart(*group.params[0], part);
  };
  // Without gates, fc1 is up alone.
  const auto add_fc1 = [&](std::string_view name, ParamRole gate,
                           ParamRole up) {
    if (table_.Params(gate).empty()) {
      add(name, {up}, row_part);
    } else {
      add(name, {gate, up}, gate_and_up);
    }
  };

  add("self_attention.linear_proj.weight", {kAttentionOutput}, column_shard);
  add("self_attention.linear_proj.bias", {kAttentionOutputBias}, Replicated);
  // In front of a gated delta net, the norm is part of its projection.
  add("self_attention.linear_qkv.layer_norm_weight", {kQuery, kAttentionNorm},
      ReplicatedSecond);
  add("self_attention.linear_qkv.weight", {kQuery, kKey, kValue}, fused_qkv);
  add("self_attention.linear_qkv.bias", {kQueryBias, kKeyBias, kValueBias},
      fused_qkv);
  add("self_attention.q_layernorm.weight", {kQueryNorm}, Replicated);
  add("self_attention.k_layernorm.weight", {kKeyNorm}, Replicated);
  add("self_attention.core_attention.softmax_offset", {kAttentionSinks},
      row_part);
  add("mlp.linear_fc1.layer_norm_weight", {kMlpNorm}, Replicated);
  add_fc1("mlp.linear_fc1.weight", kMlpGate, kMlpUp);
  add("mlp.linear_fc2.weight", {kMlpDown}, column_shard);
  add("pre_mlp_layernorm.weight", {kMoeNorm}, Replicated);
  add("mlp.router.weight", {kRouter}, Replicated);
  add("mlp.router.bias", {kRouterBias}, Replicated);
  add("mlp.router.expert_bias", {kRouterCorrection}, Replicated);
  add("mlp.fc1_latent_proj.weight", {kLatentDown}, Replicated);
  add("mlp.fc2_latent_proj.weight", {kLatentUp}, Replicated);
  add_fc1("mlp.shared_experts.linear_fc1.weight", kSharedExpertGate,
          kSharedExpertUp);
  add("mlp.shared_experts.linear_fc2.weight", {kSharedExpertDown},
      column_shard);
  add("mlp.shared_experts.gate_weight", {kSharedExpertRouter}, Replicated);
  AddMixers(chunk, part, out);
  return out;
}

// What stands in attention's place: Mamba-2 mixers and gated delta nets.
void MegatronLayout::AddMixers(const Chunk& chunk, EvenPart part,
                               std::vector<BufferId>& out) {
  const Architecture& architecture = context_.model.architecture;
  const auto add = [&](std::string_view name,
                       std::initializer_list<ParamRole> roles, MakeSpec make) {
    AddLayers(chunk, name, roles, std::nullopt, make, out);
  };
  const auto row_part = [&](const LayerGroup& group) {
    return RowPart(*group.params[0], part);
  };
  const auto row_part_in_fp32 = [&](const LayerGroup& group) {
    TensorSpec spec = row_part(group);
    spec.own_dtype = DType::kFp32;
    return spec;
  };
  const auto column_shard = [&](const LayerGroup& group) {
    return ColumnShard(group, part.count, part.index);
  };
  if (architecture.mamba.has_value()) {
    const auto in_rows = [&](const LayerGroup& group) {
      return MambaInRows(*group.params[0], *architecture.mamba, part);
    };
    const auto conv_rows = [&](const LayerGroup& group) {
      return MambaConvRows(*group.params[0], *architecture.mamba, part);
    };
    add("mixer.dt_bias", {kMambaDtBias}, row_part);
    add("mixer.A_log", {kMambaALog}, row_part_in_fp32);
    add("mixer.D", {kMambaD}, row_part_in_fp32);
    add("mixer.in_proj.layer_norm_weight", {kMambaNorm}, Replicated);
    add("mixer.in_proj.weight", {kMambaIn}, in_rows);
    add("mixer.in_proj.bias", {kMambaInBias}, in_rows);
    add("mixer.conv1d_weight", {kMambaConv}, conv_rows);
    add("mixer.conv1d_bias", {kMambaConvBias}, conv_rows);
    add("mixer.norm.weight", {kMambaGatedNorm}, row_part);
    add("mixer.out_proj.weight", {kMambaOut}, column_shard);
    add("mixer.out_proj.bias", {kMambaOutBias}, Replicated);
  }
  if (architecture.delta.has_value()) {
    add("self_attention.in_proj.layer_norm_weight",
        {kDeltaQkvz, kAttentionNorm}, ReplicatedSecond);
    add("self_attention.in_proj.weight", {kDeltaQkvz, kDeltaBa},
        [&](const LayerGroup& group) {
          return DeltaInRows(group, *architecture.delta, part);
        });
    add("self_attention.conv1d.weight", {kDeltaConv},
        [&](const LayerGroup& group) {
          return DeltaConvRows(*group.params[0], *architecture.delta, part);
        });
    add("self_attention.dt_bias", {kDeltaDtBias}, row_part);
    add("self_attention.A_log", {kDeltaALog}, row_part);
    // All norms add 1 to their weights; the checkpoint's adds it to all but
    // this one's.
    add("self_attention.out_norm.weight", {kDeltaGatedNorm},
        [](const LayerGroup& group) {
          TensorSpec spec = Replicated(group);
          spec.form = ValueForm::kMinusOne;
          return spec;
        });
    add("self_attention.out_proj.weight", {kDeltaOut}, column_shard);
  }
}

std::vector<BufferId> MegatronLayout::Experts(const Chunk& chunk,
                                              int64_t expert,
                                              int64_t expert_tensor) {
  std::vector<BufferId> out;
  const ExpertSlice slice = {
      .experts =
          EvenShare(context_.model.architecture.experts, sizes_.expert, expert),
      .in_name = true};
  const EvenPart part = {sizes_.expert_tensor, expert_tensor};
  if (table_.Params(kExpertGate).empty()) {
    AddLayers(
        chunk, "mlp.experts.linear_fc1.weight{1}", {kExpertUp}, slice,
        [&](const LayerGroup& group) {
          return RowPart(*group.params[0], part);
        },
        out);
  } else {
    AddLayers(
        chunk, "mlp.experts.linear_fc1.weight{1}", {kExpertGate, kExpertUp},
        slice,
        [&](const LayerGroup& group) {
          return GateAndUp(group, sizes_.expert_tensor, expert_tensor);
        },
        out);
  }
  AddLayers(
      chunk, "mlp.experts.linear_fc2.weight{1}", {kExpertDown}, slice,
      [&](const LayerGroup& group) {
        return ColumnShard(group, sizes_.expert_tensor, expert_tensor);
      },
      out);
  AddFusedExperts(chunk, slice.experts, part, out);
  return out;
}

void MegatronLayout::AddFusedExperts(const Chunk& chunk, Range experts,
                                     EvenPart part,
                                     std::vector<BufferId>& out) {
  const auto add = [&](std::string_view name, ParamRole role,
                       absl::FunctionRef<TensorSpec(const Param&)> make) {
    for (const LayerGroup& group : table_.Group({&role, 1}, chunk.layers)) {
      const Param& param = *group.params[0];
      TensorSpec spec = make(param);
      spec.name = absl::StrFormat("%sdecoder.layers.{0}.mlp.experts.%s{1}",
                                  chunk.prefix, name);
      out.push_back(context_.buffers.Intern(
          LayerStack(table_, std::move(spec), group.layers,
                     {.dtype = BufferDType(context_.side, param),
                      .first_layer = chunk.layers.begin,
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

std::vector<BufferId> MegatronLayout::NormAndHead(const Chunk& chunk,
                                                  int64_t tensor) {
  std::vector<BufferId> out;
  if (!chunk.last) return out;
  // The block of a model with Mamba mixers is another class.
  const std::string_view final_norm =
      context_.model.architecture.mamba.has_value() ? "final_norm"
                                                    : "final_layernorm";
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
    // The output layer is a copy of the embedding: of a source, one that need
    // not be read; of a destination, one more place to write it to.
    for (const ParamId id : table_.Params(kEmbedding)) {
      Buffer copy = Vocabulary(chunk, head, id, tensor);
      if (context_.which == fb::Side::kSource) {
        copy = SkippedCopy(
            std::move(copy), SkipReason::kTied,
            absl::StrFormat(
                "a copy of the tied %s, which the first stage sends",
                table_.param(id).name));
      }
      out.push_back(context_.buffers.Intern(std::move(copy)));
    }
  }
  return out;
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
      const bool last_chunk = number == sizes_.chunks - 1;
      const Chunk chunk = {
          .layers = (*split)[stage][number],
          .prefix =
              sizes_.chunks > 1 ? absl::StrFormat("vp_stage.%d.", number) : "",
          .first = stage == 0 && number == 0,
          .last = stage == sizes_.pipeline - 1 && last_chunk};
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
  return layout;
}

}  // namespace

SideLayout LayOutMegatron(const LayoutContext& context) {
  return MegatronLayout(context).LayOut();
}

}  // namespace refit
