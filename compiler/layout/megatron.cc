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
#include "compiler/layout/layout.h"
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

// The fused QKV rows of query group g are [its query heads; its key head; its
// value head]. Tensor parallelism cuts the rows evenly, if need be through a
// group.
TensorSpec FusedQkv(const LayerGroup& group, const Architecture& architecture,
                    Range rows) {
  const int64_t head = architecture.head_dim;
  const int64_t query_rows = architecture.heads / architecture.kv_heads * head;
  const int64_t group_rows = query_rows + 2 * head;

  TensorSpec spec;
  spec.shape = group.params[0]->shape;
  spec.shape[0] = rows.size();
  for (int64_t g = rows.begin / group_rows; g * group_rows < rows.end; ++g) {
    struct Block {
      const Param* param;
      int64_t size;
    };
    int64_t fused_row = g * group_rows;
    for (const Block& block :
         {Block{group.params[0], query_rows}, Block{group.params[1], head},
          Block{group.params[2], head}}) {
      const int64_t begin = std::max(rows.begin, fused_row);
      const int64_t end = std::min(rows.end, fused_row + block.size);
      if (begin < end) {
        const int64_t param_row = g * block.size + begin - fused_row;
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
  checks.Heads(tensor);
  if (!table_.Params(kQuery).empty() && checks.ok()) {
    checks.Divides(tensor,
                   (architecture.heads + 2 * architecture.kv_heads) *
                       architecture.head_dim,
                   "rows of the fused query, key and value");
  }
  for (const ParamRole role : {kMlpGate, kMlpUp}) {
    checks.Rows(tensor, role, "intermediate features of the MLP");
  }
  checks.Columns(tensor, kMlpDown, "intermediate features of the MLP");

  checks.HasExperts(sizes_.expert > 1, expert.place, "expert_parallel");
  checks.Divides(expert, architecture.experts, "experts");
  for (const ParamRole role : {kExpertGate, kExpertUp}) {
    checks.Rows(expert_tensor, role, "intermediate features of an expert");
  }
  checks.Columns(expert_tensor, kExpertDown,
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
  const Range qkv_rows = EvenShare(
      (architecture.heads + 2 * architecture.kv_heads) * architecture.head_dim,
      sizes_.tensor, tensor);
  const auto fused_qkv = [&](const LayerGroup& group) {
    return FusedQkv(group, architecture, qkv_rows);
  };

  add("self_attention.linear_proj.weight", {kAttentionOutput}, column_shard);
  add("self_attention.linear_proj.bias", {kAttentionOutputBias}, Replicated);
  add("self_attention.linear_qkv.layer_norm_weight", {kAttentionNorm},
      Replicated);
  add("self_attention.linear_qkv.weight", {kQuery, kKey, kValue}, fused_qkv);
  add("self_attention.linear_qkv.bias", {kQueryBias, kKeyBias, kValueBias},
      fused_qkv);
  add("self_attention.q_layernorm.weight", {kQueryNorm}, Replicated);
  add("self_attention.k_layernorm.weight", {kKeyNorm}, Replicated);
  add("mlp.linear_fc1.layer_norm_weight", {kMlpNorm}, Replicated);
  add("mlp.linear_fc1.weight", {kMlpGate, kMlpUp}, gate_and_up);
  add("mlp.linear_fc2.weight", {kMlpDown}, column_shard);
  add("pre_mlp_layernorm.weight", {kMoeNorm}, Replicated);
  add("mlp.router.weight", {kRouter}, Replicated);
  return out;
}

std::vector<BufferId> MegatronLayout::Experts(const Chunk& chunk,
                                              int64_t expert,
                                              int64_t expert_tensor) {
  std::vector<BufferId> out;
  const Range experts =
      EvenShare(context_.model.architecture.experts, sizes_.expert, expert);
  const ExpertSlice slice = {
      .slots = {Consecutive(static_cast<int32_t>(experts.begin), experts.size())
                    .numbers},
      .in_name = true};
  AddLayers(
      chunk, "mlp.experts.linear_fc1.weight{1}", {kExpertGate, kExpertUp},
      slice,
      [&](const LayerGroup& group) {
        return GateAndUp(group, sizes_.expert_tensor, expert_tensor);
      },
      out);
  AddLayers(
      chunk, "mlp.experts.linear_fc2.weight{1}", {kExpertDown}, slice,
      [&](const LayerGroup& group) {
        return ColumnShard(group, sizes_.expert_tensor, expert_tensor);
      },
      out);
  return out;
}

std::vector<BufferId> MegatronLayout::NormAndHead(const Chunk& chunk,
                                                  int64_t tensor) {
  std::vector<BufferId> out;
  if (!chunk.last) return out;
  for (const ParamId id : table_.Params(kFinalNorm)) {
    out.push_back(context_.buffers.Intern(WholeTensor(
        context_,
        absl::StrFormat("%sdecoder.final_layernorm.weight", chunk.prefix),
        id)));
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
