// Megatron Core: GPTModel with Transformer Engine's layer spec and grouped
// experts. README.md beside it holds the formulas and where they come from.
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "compiler/job/version.h"
#include "compiler/layout/common/cut.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/common/stages.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/megatron/rows.h"

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
  // Reports sizes that do not fit; true when all do.
  bool CheckSizes();
  void CheckNorms(SizeChecks& checks);

  // The buffers of a chunk in three runs, in module order: what comes before
  // the experts, the experts, what comes after.
  std::vector<BufferId> EmbeddingAndLayers(const Chunk& chunk, int64_t tensor);
  std::vector<BufferId> Experts(const Chunk& chunk, int64_t expert,
                                int64_t expert_tensor);
  // Whether the model is of the class with mixers of several kinds.
  bool IsHybrid() const;
  std::vector<BufferId> NormAndHead(const Chunk& chunk, int64_t tensor);

  // The stacks of a row in the layers of `block`, of experts those that
  // `experts` names. `rank`: among those that cut the row's tensors.
  void AddRow(const megatron::Row& row, const Chunk& chunk,
              const LayerBlock& block, int64_t rank, const ExpertSlice& experts,
              std::vector<BufferId>& out);
  TensorSpec SpecOf(const megatron::Row& row,
                    absl::Span<const Param* const> params, int64_t rank,
                    const ExpertSlice& experts) const;
  // The roles of a row that the model has; none: it has no such row.
  std::vector<ParamRole> RolesOf(const megatron::Row& row) const;

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

void MegatronLayout::CheckNorms(SizeChecks& checks) {
  const SideSpec& side = context_.side;
  const Architecture& architecture = context_.model.architecture;
  for (int64_t layer = 0; layer < architecture.all_layers(); ++layer) {
    if (table_.At(kQuery, layer).empty()) continue;
    if (!table_.At(kAttentionNorm, layer).empty()) continue;
    checks.Report(
        side.layout.place,
        "%s: Megatron's attention has a norm before it, and layer %d of this "
        "%s has none; wanted a parameter of role attention_norm",
        side.key, layer, architecture.family->model_type);
    break;
  }
}

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
    checks.Report(context_.model.place,

                  "num_key_value_heads %d does not divide %d attention heads",
                  architecture.kv_heads, architecture.heads);
  }
  for (const megatron::Row& row : megatron::Rows()) {
    if (row.cut == Cut::kWhole) continue;
    for (const ParamRole role : row.roles) {
      if (FormOf(role).of_prediction) continue;
      checks.Parts(megatron::IsOfExperts(row) ? expert_tensor : tensor, role);
    }
  }
  if (!table_.Params(kQuery).empty() && checks.ok()) {
    checks.Divides(tensor, megatron::FusedQkvRows(architecture),
                   "rows of the fused query, key and value");
  }
  checks.Parts(tensor, kMtpProjection);
  if (architecture.mamba.has_value()) {
    checks.Divides(tensor, architecture.mamba->groups, "Mamba groups");
  }
  CheckNorms(checks);

  checks.HasExperts(sizes_.expert > 1, expert.place, "expert_parallel");
  checks.Divides(expert, architecture.experts, "experts");
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
      checks.Report(place,
                    "%s.%s is not known of %s's experts; wanted no such key",
                    side.key, key, architecture.family->model_type);
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

std::vector<ParamRole> MegatronLayout::RolesOf(const megatron::Row& row) const {
  const auto has = [&](ParamRole role) {
    return role != kOther && !table_.Params(role).empty();
  };
  const bool is_of_release =
      IsSince(context_.side, {0, row.since}) &&
      (row.before == 0 || !IsSince(context_.side, {0, row.before}));
  if (!is_of_release || has(row.without)) return {};
  std::vector<ParamRole> roles;
  for (const ParamRole role : row.roles) {
    if (has(role)) roles.push_back(role);
  }
  if (row.beside != kOther && !roles.empty()) roles.push_back(row.beside);
  return roles;
}

TensorSpec MegatronLayout::SpecOf(const megatron::Row& row,
                                  absl::Span<const Param* const> params,
                                  int64_t rank,
                                  const ExpertSlice& experts) const {
  const Architecture& architecture = context_.model.architecture;
  const bool of_experts = megatron::IsOfExperts(row);
  const int64_t count = of_experts ? sizes_.expert_tensor : sizes_.tensor;
  const EvenPart part = {.count = count, .index = rank % count};
  if (row.beside != kOther) params = params.first(1);
  if (row.make != nullptr) return row.make(params, architecture, part);
  if (IsStacked(params[0]->role)) {
    const std::vector<int32_t>& held = experts.experts.front();
    TensorSpec spec =
        StackedExperts(*params[0], {held.front(), held.back() + 1}, part,
                       GateUpOrder::kGateFirst);
    spec.shape.erase(spec.shape.begin());
    return spec;
  }
  const Located<int64_t>& interleave =
      context_.side.moe_mlp_glu_interleave_size;
  if (of_experts && interleave.given && params.size() == 2) {
    return megatron::InterleavedGateAndUp(params, part, interleave.value);
  }
  return CutOf(params, row.cut, architecture, part);
}

void MegatronLayout::AddRow(const megatron::Row& row, const Chunk& chunk,
                            const LayerBlock& block, int64_t rank,
                            const ExpertSlice& experts,
                            std::vector<BufferId>& out) {
  const std::vector<ParamRole> roles = RolesOf(row);
  if (roles.empty()) return;
  const RoleForm& form = FormOf(roles[0]);
  const bool by_expert = form.scope == RoleScope::kExpert;
  const bool is_stacked = IsStacked(roles[0]);
  const bool in_name = is_stacked || (by_expert && experts.in_name);
  for (const LayerGroup& group : table_.Group(roles, block.layers)) {
    TensorSpec spec = SpecOf(row, group.params, rank, experts);
    spec.name =
        absl::StrFormat("%s%s%s%s", chunk.prefix,
                        form.of_prediction ? block.prediction : block.layer,
                        row.name, in_name ? "{1}" : "");
    spec.form = row.form;
    if (row.declared_fp32 && context_.side.mamba_fp32.value) {
      spec.own_dtype = DType::kFp32;
    }
    LayerStackOptions options = {
        .dtype = BufferDType(context_.side, *group.params[0]),
        .first_layer = block.layers.begin,
        .experts = by_expert ? std::optional(experts) : std::nullopt};
    if (is_stacked) options.fused_experts = std::ssize(experts.experts[0]);
    out.push_back(context_.buffers.Intern(
        LayerStack(table_, std::move(spec), group.layers, options)));
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
    for (const megatron::Row& row : megatron::Rows()) {
      if (megatron::IsOfExperts(row)) continue;
      AddRow(row, chunk, block, tensor, {}, out);
    }
  }
  return out;
}

std::vector<BufferId> MegatronLayout::Experts(const Chunk& chunk,
                                              int64_t expert,
                                              int64_t expert_tensor) {
  std::vector<BufferId> out;
  const ExpertSlice slice = ConsecutiveExperts(
      EvenShard(context_.model.architecture.experts, sizes_.expert, expert),
      !context_.side.moe_single_grouped_weight.value);
  for (const LayerBlock& block : chunk.blocks) {
    for (const megatron::Row& row : megatron::Rows()) {
      if (!megatron::IsOfExperts(row)) continue;
      AddRow(row, chunk, block, expert_tensor, slice, out);
    }
  }
  return out;
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
  if (!CheckRoles(context_)) return {};
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
