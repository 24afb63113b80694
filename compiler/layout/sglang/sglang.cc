// SGLang: the layout of its linear, vocabulary and fused-MoE layers as loaded.
// README.md beside it holds the formulas and where they come from;
// serving/rows.inc has its tensors.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/job/object_reader.h"
#include "compiler/job/version.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/common/stages.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/serving/engine.h"

namespace refit {
namespace {

using enum ParamRole;

bool HasRedundantExperts(const ExpertPlacement& experts, int64_t count) {
  const auto is_longer = [&](const std::vector<int64_t>& physical) {
    return static_cast<int64_t>(physical.size()) > count;
  };
  return experts.redundant_experts > 0 ||
         std::any_of(experts.physical_to_logical.begin(),
                     experts.physical_to_logical.end(), is_longer);
}

// Whether a layer's shared experts are as large as one expert.
bool HasOneSharedExpert(const RoleTable& table) {
  const int64_t rows = table.param(table.Params(kExpertUp)[0]).shape[0];
  const auto is_one = [&](ParamId id) {
    return table.param(id).shape[0] == rows;
  };
  const absl::Span<const ParamId> shared = table.Params(kSharedExpertUp);
  return std::all_of(shared.begin(), shared.end(), is_one);
}

// What the side says, else what SGLang does with those of the model.
SharedExperts SharedExpertsOf(const LayoutContext& context,
                              const RoleTable& table) {
  using enum SglangTraits::SharedFusion;
  const SideSpec& side = context.side;
  const Architecture& architecture = context.model.architecture;
  const SglangTraits& traits = architecture.family->sglang;
  if (side.shared_experts.given) return side.shared_experts.value;
  const bool has_both = !table.Params(kExpertUp).empty() &&
                        !table.Params(kSharedExpertUp).empty();
  // The others are fused under expert parallelism on AMD GPUs alone.
  const bool may_fuse =
      side.expert_parallel.value == 1 || traits.shared_fusion_expert_parallel;
  const bool has_so_many = traits.shared_fusion_experts == 0 ||
                           traits.shared_fusion_experts == architecture.experts;
  const bool fuses =
      has_both && may_fuse && has_so_many &&
      (traits.shared_fusion == kAlways ||
       (traits.shared_fusion == kOneExpert && HasOneSharedExpert(table)));
  return fuses ? SharedExperts::kFused : SharedExperts::kTensor;
}

// Reports shared experts that the side cannot hold.
void CheckShared(const LayoutContext& context, const RoleTable& table,
                 SizeChecks& checks) {
  const Located<SharedExperts>& shared = context.side.shared_experts;
  if (shared.given && table.Params(kSharedExpertUp).empty()) {
    checks.Report(
        shared.place,
        "%s.shared_experts needs a model with shared experts; this %s has none",
        context.side.key, context.model.architecture.family->model_type);
    return;
  }
  if (SharedExpertsOf(context, table) != SharedExperts::kFused) return;
  if (table.Params(kSharedExpertGate).empty() ||
      table.Params(kExpertUp).empty()) {
    checks.Report(shared.place,
                  "%s.shared_experts \"fused\" is not what SGLang does with "
                  "those of %s; wanted \"tensor\" or \"replicated\"",
                  context.side.key,
                  context.model.architecture.family->model_type);
    return;
  }
  for (int64_t layer = 0; layer < context.model.architecture.layers; ++layer) {
    if (table.At(kExpertUp, layer).empty() ==
        table.At(kSharedExpertUp, layer).empty()) {
      continue;
    }
    checks.Report(context.side.layout.place,
                  "%s.shared_experts \"fused\" needs experts and shared "
                  "experts in the same layers, and layer %d has not both",
                  context.side.key, layer);
    return;
  }
  const int64_t expert = table.param(table.Params(kExpertUp)[0]).shape[0];
  for (const ParamId id : table.Params(kSharedExpertUp)) {
    const int64_t rows = table.param(id).shape[0];
    if (rows == expert) continue;
    checks.Report(
        shared.given ? shared.place : context.side.layout.place,
        "%s.shared_experts \"fused\"%s needs shared experts of the size of "
        "one; they have %d intermediate features, an expert has %d",
        context.side.key, shared.given ? "" : ", SGLang's default here,", rows,
        expert);
  }
}

// Reports models and meshes that its classes cannot hold.
void CheckModel(const LayoutContext& context, const RoleTable& table,
                SizeChecks& checks) {
  const SideSpec& side = context.side;
  const Architecture& architecture = context.model.architecture;
  const std::string_view name = architecture.family->model_type;
  const SglangTraits& traits = architecture.family->sglang;
  const auto wants_one = [&](bool is_wrong, std::string_view key,
                             const Located<int64_t>& size,
                             std::string_view why) {
    if (is_wrong) checks.WantsOne(key, size, "SGLang", why);
  };
  wants_one(traits.head == SglangTraits::Head::kEveryStage && architecture.tied,
            "pipeline_parallel", side.pipeline_parallel,
            "takes a tied head from the embedding, which the last of several "
            "stages does not have; wanted 1");
  wants_one(!traits.dp_attention, "dp_attention", side.dp_attention,
            "cuts its attention by all of tensor_parallel; wanted 1, with "
            "\"replicas\" for more engines");
  wants_one(context.model.vision && traits.plain_tower, "dp_attention",
            side.dp_attention,
            "cuts parts of its vision tower by it and others by "
            "tensor_parallel; wanted 1, or \"vision\": false");
  if (!traits.redundant_experts &&
      HasRedundantExperts(side.experts.value, architecture.experts)) {
    checks.Report(side.experts.place,
                  "%s.experts: SGLang's %s has %d physical experts, one for "
                  "each expert; wanted no redundant ones",
                  side.key, name, architecture.experts);
  }
  const bool is_whole =
      traits.embedding == SglangTraits::Embedding::kWhole ||
      (traits.embedding == SglangTraits::Embedding::kWholeBesideDpAttention &&
       side.dp_attention.value > 1);
  if (is_whole && side.embedding.given) {
    checks.Report(side.embedding.place,
                  "%s.embedding: SGLang's %s has the embedding whole on every "
                  "rank%s; wanted no such key",
                  side.key, name,
                  side.dp_attention.value > 1 ? " of dp_attention" : "");
  }
  if (side.quantized.given && !table.Params(kIndexKey).empty() &&
      !architecture.index_rope_interleaved) {
    checks.Report(side.quantized.place,
                  "%s.dtype: SGLang quantizes the indexer's wk of this %s, and "
                  "a refit does not yet; wanted bf16",
                  side.key, name);
  }
  for (const ParamRole role : {kColumn, kRow}) {
    if (side.dp_attention.value == 1 || table.Params(role).empty()) continue;
    checks.Report(
        side.dp_attention.place,
        "%s.dp_attention %d: whether \"%s\" of this %s is cut with the "
        "attention is not known of roles column and row; wanted 1",
        side.key, side.dp_attention.value,
        table.param(table.Params(role)[0]).name, name);
    break;
  }
  if (!traits.dense_layers && !table.Params(kMlpUp).empty()) {
    checks.Report(
        side.layout.place,
        "%s: SGLang's %s has experts in every layer, and the model has a dense "
        "MLP \"%s\"; wanted another layout (generic places any tensors)",
        side.key, name, table.param(table.Params(kMlpUp)[0]).FirstName());
  }
}

void Check(const LayoutContext& context, const RoleTable& table,
           const Engine& engine, SizeChecks& checks) {
  const SideSpec& side = context.side;
  const Architecture& architecture = context.model.architecture;
  CheckEngine(context, table, engine, checks);
  CheckShared(context, table, checks);
  CheckModel(context, table, checks);
  if (!side.experts.given) {
    checks.Divides(checks.Named("expert_parallel", side.expert_parallel),
                   architecture.experts, "experts");
  }
  if (architecture.mtp_layers == 0) return;
  checks.Report(
      side.mtp.given ? side.mtp.place : side.layout.place,
      "%s cannot hold the model's %d multi-token-prediction layers: SGLang's "
      "draft model is a worker of its own; wanted \"mtp\": false",
      side.key, architecture.mtp_layers);
}

// "1, 2 or 4"
std::string DivisorsText(int64_t number) {
  std::vector<std::string> divisors;
  for (int64_t i = 1; i <= number; ++i) {
    if (number % i == 0) divisors.push_back(absl::StrCat(i));
  }
  return Alternatives({divisors.begin(), divisors.end()});
}

bool CheckAxes(const LayoutContext& context) {
  const SideSpec& side = context.side;
  const int64_t tensor = side.tensor_parallel.value;
  bool fits = true;
  if (side.data_parallel.value > 1 && side.dp_attention.value > 1) {
    fits = context.diagnostics.Error(
        side.data_parallel.place,
        "%s.data_parallel %d beside dp_attention %d: SGLang's dp_size is one "
        "or the other; wanted \"replicas\": %d for as many engines",
        side.key, side.data_parallel.value, side.dp_attention.value,
        side.data_parallel.value);
  }
  for (const auto& [key, size] :
       {std::pair("dp_attention", &side.dp_attention),
        std::pair("expert_parallel", &side.expert_parallel)}) {
    if (tensor % size->value == 0) continue;
    fits = context.diagnostics.Error(
        size->place,
        "%s.%s %d does not divide %s.tensor_parallel %d; wanted %s", side.key,
        key, size->value, side.key, tensor, DivisorsText(tensor));
  }
  const auto needs_parts = [&](const Place& place, std::string_view setting) {
    fits = context.diagnostics.Error(
        place, "%s.%s needs dp_attention of 2 or more; %s.dp_attention is 1%s",
        side.key, setting, side.key,
        side.dp_attention.given ? "" : " (the default)");
  };
  if (side.dp_attention.value == 1) {
    if (side.dp_lm_head.value) needs_parts(side.dp_lm_head.place, "dp_lm_head");
    if (side.embedding.value == EmbeddingCut::kAttention) {
      needs_parts(side.embedding.place, "embedding \"attention\"");
    }
  }
  return fits;
}

// Sets the axes of the engine: all lie within tensor parallelism.
void CutByTensor(const LayoutContext& context, const SizeChecks& checks,
                 SharedExperts shared, Engine& engine) {
  const SideSpec& side = context.side;
  const SizeChecks::Divisor tensor =
      checks.Named("tensor_parallel", side.tensor_parallel);
  SizeChecks::Divisor attention = tensor;
  if (side.dp_attention.value > 1) {
    attention.text = absl::StrFormat("%s / dp_attention %d", tensor.text,
                                     side.dp_attention.value);
    attention.value /= side.dp_attention.value;
  }
  SizeChecks::Divisor expert = tensor;
  if (engine.experts > 1) {
    expert.text =
        absl::StrFormat("%s / expert_parallel %d", tensor.text, engine.experts);
    expert.value /= engine.experts;
  }
  engine.On(Axis::kTensor) = tensor;
  engine.On(Axis::kAttention) = attention;
  engine.On(Axis::kExpert) = expert;
  if (shared == SharedExperts::kTensor) engine.On(Axis::kShared) = tensor;
  if (!HasWholeTower(side)) engine.On(Axis::kTower) = attention;
  engine.On(Axis::kHead) = side.dp_lm_head.value ? attention : tensor;
  const bool is_whole = context.model.architecture.family->sglang.embedding ==
                            SglangTraits::Embedding::kWholeBesideDpAttention &&
                        side.dp_attention.value > 1;
  if (is_whole || side.embedding.value == EmbeddingCut::kReplicated) return;
  engine.On(Axis::kEmbedding) =
      side.embedding.value == EmbeddingCut::kTensor ? tensor : attention;
}

Engine EngineOf(const LayoutContext& context, const RoleTable& table,
                SizeChecks& checks) {
  const SideSpec& side = context.side;
  const Architecture& architecture = context.model.architecture;
  const SglangTraits& traits = architecture.family->sglang;
  Engine engine;
  engine.name = "SGLang";
  engine.column = &ServingRow::sglang;
  engine.tensor = side.tensor_parallel.value;
  engine.pipeline = side.pipeline_parallel.value;
  // Without attention of its own a data-parallel rank is a whole engine.
  engine.replicas = side.data_parallel.value * side.replicas.value;
  engine.experts = side.expert_parallel.value;
  engine.spreads_experts = engine.experts > 1;
  engine.expert_parallel = side.expert_parallel.place;
  engine.has_one_stage = !traits.pipeline_parallel;
  const SharedExperts shared = SharedExpertsOf(context, table);
  CutByTensor(context, checks, shared, engine);
  engine.renames = traits.renames;
  engine.fused = traits.fused;
  engine.joins_indexers = architecture.index_rope_interleaved;
  engine.fuses_shared_experts = shared == SharedExperts::kFused;
  if (!traits.fp32_router_since.empty()) {
    // An older release computes with an fp32 copy.
    engine.fp32_router =
        IsSince(side, VersionNumbers(traits.fp32_router_since));
    engine.caches_router = !engine.fp32_router;
  }
  // Triton's kernels for unquantized experts want them so.
  engine.transposes_experts =
      side.moe_backend.value == "triton_kernel" && !side.quantized.given;
  if (!engine.transposes_experts) {
    engine.order = CheckMoeBackend(side, checks);
  }
  if (traits.embedding == SglangTraits::Embedding::kEveryStage) {
    engine.embedding = Unread::kDeclaredSkip;
  }
  if (traits.head != SglangTraits::Head::kLastStage) {
    engine.head = Unread::kDeclaredSkip;
  }
  engine.pads_embedding = traits.embedding != SglangTraits::Embedding::kWhole;
  // On one stage the head is the embedding's own tensor; else it is a copy.
  engine.shares_embedding = architecture.tied && engine.pipeline == 1 &&
                            traits.head != SglangTraits::Head::kOwnTensor;
  engine.cuts_tower_positions = true;
  engine.always_cuts_tower = traits.plain_tower;
  engine.whole_in_tower = traits.whole_in_tower;
  return engine;
}

}  // namespace

SideLayout LayOutSglang(const LayoutContext& context) {
  if (!CheckAxes(context)) return {};
  const RoleTable table(context.model);
  if (!CheckRoles(context)) return {};
  SizeChecks checks(context, table);
  const Engine engine = EngineOf(context, table, checks);
  Check(context, table, engine, checks);
  return LayOutEngine(
      context, table, engine,
      SplitServingLayers(context.side, context.model.architecture.layers,
                         /*remainder_ends_before=*/0, context.diagnostics),
      checks);
}

}  // namespace refit
