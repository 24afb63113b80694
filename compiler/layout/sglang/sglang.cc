// SGLang: the layout of its linear, vocabulary and fused-MoE layers as loaded.
// README.md beside it holds the formulas and where they come from;
// serving/rows.inc has its tensors.
#include <string_view>

#include "absl/strings/str_format.h"
#include "compiler/job/version.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/common/stages.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/serving/engine.h"
#include "compiler/layout/serving/experts.h"
#include "compiler/layout/serving/tower.h"
#include "compiler/layout/sglang/checks.h"

namespace refit {
namespace {

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
  if (!HasWholeTower(context)) engine.On(Axis::kTower) = attention;
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
  engine.column = &ServingRow::sglang;
  engine.tensor = side.tensor_parallel.value;
  engine.pipeline = side.pipeline_parallel.value;
  // Without attention of its own a data-parallel rank is a whole engine.
  engine.replicas = side.data_parallel.value * side.replicas.value;
  engine.experts = side.expert_parallel.value;
  engine.spreads_experts = engine.experts > 1;
  const SharedExperts shared = sglang::SharedExpertsOf(context, table);
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
  engine.whole_in_tower = traits.whole_in_tower;
  return engine;
}

}  // namespace

SideLayout LayOutSglang(const LayoutContext& context) {
  if (!sglang::CheckAxes(context)) return {};
  const RoleTable table(context.model);
  if (!CheckRoles(context)) return {};
  SizeChecks checks(context, table);
  const Engine engine = EngineOf(context, table, checks);
  sglang::CheckEngine(context, table, engine, checks);
  return LayOutEngine(
      context, table, engine,
      SplitSglangLayers(context.side, context.model.architecture.layers,
                        context.diagnostics),
      checks);
}

}  // namespace refit
