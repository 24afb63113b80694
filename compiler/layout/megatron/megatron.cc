// Megatron Core: GPTModel with Transformer Engine's layer spec and grouped
// experts. README.md beside it holds the formulas and where they come from.
#include <algorithm>
#include <array>
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

namespace refit {
namespace {

using enum ParamRole;

// What a rank holds of the params of a row that no Cut describes.
using MakeTensor = TensorSpec (*)(absl::Span<const Param* const> params,
                                  const Architecture& architecture,
                                  EvenPart part);

struct Row {
  // What few rows say.
  struct More {
    ParamRole beside = ParamRole::kOther;   // in layers that have it alone
    ParamRole without = ParamRole::kOther;  // in models that do not have it
    ValueForm form = ValueForm::kPlain;
    bool declared_fp32 = false;  // fp32 with "mamba_fp32"
    int64_t since = 0;           // minor releases of 0
    int64_t before = 0;          // 0: any
    MakeTensor make = nullptr;
  };

  std::string_view name;
  std::array<ParamRole, 3> roles;  // kOther: none
  Cut cut;
  More more = {};

  // Whether expert tensor parallelism cuts it.
  bool of_experts() const { return name.starts_with("mlp.experts."); }
};

// Rows of the fused query, key and value of all heads.
int64_t FusedQkvRows(const Architecture& architecture) {
  return architecture.heads * architecture.query_head_rows() +
         2 * architecture.kv_heads * architecture.head_dim;
}

// Rows of a param that stand together in a query group.
struct QkvBlock {
  const Param* param;
  int64_t row;
  int64_t size;
};

// Query group g: [its query heads; their output gates, if there are any; its
// key head; its value head].
std::vector<QkvBlock> QueryGroup(absl::Span<const Param* const> params,
                                 const Architecture& architecture, int64_t g) {
  const int64_t head = architecture.head_dim;
  const int64_t heads = architecture.heads / architecture.kv_heads;
  const Param* const query = params[0];
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
  blocks.push_back({params[1], g * head, head});
  blocks.push_back({params[2], g * head, head});
  return blocks;
}

// Tensor parallelism cuts the rows of all query groups evenly, if need be
// through a group.
TensorSpec FusedQkv(absl::Span<const Param* const> params,
                    const Architecture& architecture, EvenPart part) {
  const int64_t all_rows = FusedQkvRows(architecture);
  const int64_t group_rows = all_rows / architecture.kv_heads;
  const Range rows = EvenShard(all_rows, part.count, part.index);
  TensorSpec spec;
  spec.shape = params[0]->shape;
  spec.shape[0] = rows.size();
  for (int64_t g = rows.begin / group_rows; g * group_rows < rows.end; ++g) {
    int64_t fused_row = g * group_rows;
    for (const QkvBlock& block : QueryGroup(params, architecture, g)) {
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

// [queries; keys; values; z; b; a] of a rank's heads, from in_proj_qkvz and
// in_proj_ba, which list these by key head.
TensorSpec DeltaIn(absl::Span<const Param* const> params,
                   const Architecture& architecture, EvenPart part) {
  const DeltaNetSizes& sizes = *architecture.delta;
  const int64_t value_heads = sizes.value_heads / sizes.key_heads;
  const int64_t key = sizes.key_dim;
  const int64_t value = value_heads * sizes.value_dim;
  const Range heads = EvenShard(sizes.key_heads, part.count, part.index);
  TensorSpec spec = {
      .name = {}, .shape = {0, params[0]->shape[1]}, .parts = {}};
  // Appends a run of rows that each key head has from `begin` on.
  const auto append = [&](const Param& param, int64_t head_rows, int64_t begin,
                          int64_t rows) {
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      const int64_t first = head * head_rows + begin;
      AppendRows(param, {first, first + rows}, spec);
    }
  };
  const int64_t qkvz_rows = 2 * key + 2 * value;
  append(*params[0], qkvz_rows, 0, key);
  append(*params[0], qkvz_rows, key, key);
  append(*params[0], qkvz_rows, 2 * key, value);
  append(*params[0], qkvz_rows, 2 * key + value, value);
  append(*params[1], 2 * value_heads, 0, value_heads);
  append(*params[1], 2 * value_heads, value_heads, value_heads);
  return spec;
}

// In the order of the modules, those of experts last.
absl::Span<const Row> Rows() {
  using enum Cut;
  static constexpr Row kRowsOfLayer[] = {
#include "compiler/layout/megatron/rows.inc"
  };
  return kRowsOfLayer;
}

// A rank's part of the rows of gate and up, in blocks of `interleave` rows that
// alternate: gate, up, gate, up …
TensorSpec InterleavedGateAndUp(absl::Span<const Param* const> params,
                                EvenPart part, int64_t interleave) {
  const Range own = EvenShard(params[0]->shape[0], part.count, part.index);
  TensorSpec spec = {
      .name = {}, .shape = {0, params[0]->shape[1]}, .parts = {}};
  for (int64_t row = own.begin; row < own.end; row += interleave) {
    for (const Param* param : params) {
      AppendRows(*param, {row, row + interleave}, spec);
    }
  }
  return spec;
}

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
  explicit MegatronLayout(const LayoutContext& context) : context_(context) {}

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
  bool IsHybrid() const {
    return context_.model.architecture.mamba.has_value();
  }
  std::vector<BufferId> NormAndHead(const Chunk& chunk, int64_t tensor);

  // The stacks of a row in the layers of `block`, of experts those that
  // `experts` names. `rank`: among those that cut the row's tensors.
  void AddRow(const Row& row, const Chunk& chunk, const LayerBlock& block,
              int64_t rank, const ExpertSlice& experts,
              std::vector<BufferId>& out);
  TensorSpec SpecOf(const Row& row, absl::Span<const Param* const> params,
                    int64_t rank, const ExpertSlice& experts) const;
  // The roles of a row that the model has; none: it has no such row.
  std::vector<ParamRole> RolesOf(const Row& row) const;

  Chunk ChunkOf(int64_t stage, int64_t number, Range layers) const;
  Buffer Vocabulary(const Chunk& chunk, std::string_view name, ParamId id,
                    int64_t tensor) const;
  // `buffer` is one more copy of the embedding, on the last stage: of a
  // source, one that need not be read; of a destination, one more place to
  // write to.
  Buffer EmbeddingCopy(Buffer buffer, ParamId id, SkipReason reason,
                       std::string_view what) const;

  const LayoutContext& context_;
  const MegatronSizes sizes_ = SizesOf(context_.side);
  const RoleTable table_{context_.model};
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
  for (const Row& row : Rows()) {
    if (row.cut == Cut::kWhole) continue;
    for (const ParamRole role : row.roles) {
      if (FormOf(role).of_prediction) continue;
      checks.Parts(row.of_experts() ? expert_tensor : tensor, role);
    }
  }
  if (!table_.Params(kQuery).empty() && checks.ok()) {
    checks.Divides(tensor, FusedQkvRows(architecture),
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

std::vector<ParamRole> MegatronLayout::RolesOf(const Row& row) const {
  const auto has = [&](ParamRole role) {
    return role != kOther && !table_.Params(role).empty();
  };
  const bool is_of_release =
      IsSince(context_.side, {0, row.more.since}) &&
      (row.more.before == 0 || !IsSince(context_.side, {0, row.more.before}));
  if (!is_of_release || has(row.more.without)) return {};
  std::vector<ParamRole> roles;
  for (const ParamRole role : row.roles) {
    if (has(role)) roles.push_back(role);
  }
  if (row.more.beside != kOther && !roles.empty())
    roles.push_back(row.more.beside);
  return roles;
}

TensorSpec MegatronLayout::SpecOf(const Row& row,
                                  absl::Span<const Param* const> params,
                                  int64_t rank,
                                  const ExpertSlice& experts) const {
  const Architecture& architecture = context_.model.architecture;
  const bool of_experts = row.of_experts();
  const int64_t count = of_experts ? sizes_.expert_tensor : sizes_.tensor;
  const EvenPart part = {.count = count, .index = rank % count};
  if (row.more.beside != kOther) params = params.first(1);
  if (row.more.make != nullptr)
    return row.more.make(params, architecture, part);
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
    return InterleavedGateAndUp(params, part, interleave.value);
  }
  return CutOf(params, row.cut, architecture, part);
}

void MegatronLayout::AddRow(const Row& row, const Chunk& chunk,
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
    spec.form = row.more.form;
    if (row.more.declared_fp32 && context_.side.mamba_fp32.value) {
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
    for (const Row& row : Rows()) {
      if (row.of_experts()) continue;
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
    for (const Row& row : Rows()) {
      if (!row.of_experts()) continue;
      AddRow(row, chunk, block, expert_tensor, slice, out);
    }
  }
  return out;
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
