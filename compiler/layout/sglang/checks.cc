#include "compiler/layout/sglang/checks.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/job/object_reader.h"
#include "compiler/layout/serving/experts.h"
#include "compiler/layout/serving/tower.h"

namespace refit::sglang {
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

void CheckDenseLayers(const LayoutContext& context, const RoleTable& table,
                      SizeChecks& checks) {
  const Family& family = *context.model.architecture.family;
  if (family.sglang.dense_layers || table.Params(kMlpUp).empty()) return;
  checks.Report(
      context.side.layout.place,
      "%s: SGLang's %s has experts in every layer, and the model has a dense "
      "MLP \"%s\"; wanted another layout (generic places any tensors)",
      context.side.key, family.model_type,
      table.param(table.Params(kMlpUp)[0]).FirstName());
}

// Reports models and meshes that its classes cannot hold.
void CheckModel(const LayoutContext& context, const RoleTable& table,
                SizeChecks& checks) {
  const SideSpec& side = context.side;
  const Architecture& architecture = context.model.architecture;
  const std::string_view name = architecture.family->model_type;
  const SglangTraits& traits = architecture.family->sglang;
  if (traits.head == SglangTraits::Head::kEveryStage && architecture.tied &&
      side.pipeline_parallel.value > 1) {
    checks.Report(
        side.pipeline_parallel.place,
        "%s.pipeline_parallel %d: SGLang's %s takes a tied head from the "
        "embedding, which the last of several stages does not have; wanted 1",
        side.key, side.pipeline_parallel.value, name);
  }
  if (!traits.dp_attention && side.dp_attention.value > 1) {
    checks.Report(
        side.dp_attention.place,
        "%s.dp_attention %d: SGLang's %s cuts its attention by all of "
        "tensor_parallel; wanted 1, with \"replicas\" for more engines",
        side.key, side.dp_attention.value, name);
  }
  if (!traits.redundant_experts &&
      HasRedundantExperts(side.experts.value, architecture.experts)) {
    checks.Report(side.experts.place,
                  "%s.experts: SGLang's %s has %d physical experts, one for "
                  "each expert; wanted no redundant ones",
                  side.key, name, architecture.experts);
  }
  if (!traits.pipeline_parallel && side.pipeline_parallel.value > 1) {
    checks.Report(
        side.pipeline_parallel.place,
        "%s.pipeline_parallel %d: SGLang's %s has one stage; wanted 1",
        side.key, side.pipeline_parallel.value, name);
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
  CheckDenseLayers(context, table, checks);
}

// Reports what would cut a plain tower as no plan does.
void CheckPlainTower(const LayoutContext& context, SizeChecks& checks) {
  const SideSpec& side = context.side;
  const Family& family = *context.model.architecture.family;
  if (!context.model.vision || !family.sglang.plain_tower) return;
  if (HasWholeTower(context)) {
    checks.Report(side.mm_encoder_tp_mode.place,
                  "%s.mm_encoder_tp_mode \"data\": SGLang cuts the vision "
                  "tower of %s all the same; wanted \"weights\"",
                  side.key, family.model_type);
  }
  if (side.dp_attention.value > 1) {
    checks.Report(
        side.dp_attention.place,
        "%s.dp_attention %d: SGLang cuts parts of the vision tower of %s by it "
        "and others by tensor_parallel; wanted 1, or \"vision\": false",
        side.key, side.dp_attention.value, family.model_type);
  }
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

// "1, 2 or 4"
std::string DivisorsText(int64_t number) {
  std::vector<std::string> divisors;
  for (int64_t i = 1; i <= number; ++i) {
    if (number % i == 0) divisors.push_back(absl::StrCat(i));
  }
  return Alternatives({divisors.begin(), divisors.end()});
}

}  // namespace

SharedExperts SharedExpertsOf(const LayoutContext& context,
                              const RoleTable& table) {
  const SideSpec& side = context.side;
  const Architecture& architecture = context.model.architecture;
  const SglangTraits& traits = architecture.family->sglang;
  if (side.shared_experts.given) return side.shared_experts.value;
  if (table.Params(kExpertUp).empty() ||
      table.Params(kSharedExpertUp).empty()) {
    return SharedExperts::kTensor;
  }
  // The others are fused under expert parallelism on AMD GPUs alone.
  if (side.expert_parallel.value > 1 && !traits.shared_fusion_expert_parallel) {
    return SharedExperts::kTensor;
  }
  if (traits.shared_fusion_experts > 0 &&
      traits.shared_fusion_experts != architecture.experts) {
    return SharedExperts::kTensor;
  }
  switch (traits.shared_fusion) {
    case SglangTraits::SharedFusion::kNever:
      return SharedExperts::kTensor;
    case SglangTraits::SharedFusion::kOneExpert:
      return HasOneSharedExpert(table) ? SharedExperts::kFused
                                       : SharedExperts::kTensor;
    case SglangTraits::SharedFusion::kAlways:
      return SharedExperts::kFused;
  }
  return SharedExperts::kTensor;
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

void CheckEngine(const LayoutContext& context, const RoleTable& table,
                 const Engine& engine, SizeChecks& checks) {
  const SideSpec& side = context.side;
  const Architecture& architecture = context.model.architecture;
  CheckLayers(engine, checks);
  CheckPlainTower(context, checks);
  CheckTower(context, table, engine,
             /*may_be_whole=*/!architecture.family->sglang.plain_tower, checks);
  CheckShared(context, table, checks);
  CheckModel(context, table, checks);
  const SizeChecks::Divisor expert =
      checks.Named("expert_parallel", side.expert_parallel);
  checks.HasExperts(engine.experts > 1, expert.place, "expert_parallel");
  if (!side.experts.given) {
    checks.Divides(expert, architecture.experts, "experts");
  }
  CheckExperts(engine, checks);
  checks.HasExperts(side.router_dtype.given, side.router_dtype.place,
                    "router_dtype");
  if (engine.transposes_experts) {
    checks.HasExperts(true, side.moe_backend.place, "moe_backend");
  }
  CheckFusedExperts(context, table, engine.order, checks);
  if (architecture.mtp_layers == 0) return;
  checks.Report(
      side.mtp.given ? side.mtp.place : side.layout.place,
      "%s cannot hold the model's %d multi-token-prediction layers: SGLang's "
      "draft model is a worker of its own; wanted \"mtp\": false",
      side.key, architecture.mtp_layers);
}

}  // namespace refit::sglang
