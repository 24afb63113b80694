// SGLang: the layout of its linear, vocabulary and fused-MoE layers as loaded.
// docs/layouts.md holds the formulas and where they come from.
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "compiler/layout/expert_slots.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/mixers.h"
#include "compiler/layout/moe_backend.h"
#include "compiler/layout/role_table.h"
#include "compiler/layout/serving.h"
#include "compiler/layout/serving_mixers.h"
#include "compiler/layout/shard.h"
#include "compiler/layout/sizes.h"
#include "compiler/layout/stages.h"
#include "compiler/layout/tensor_stack.h"

namespace refit {
namespace {

using enum ParamRole;

// All axes but the pipeline lie within tensor parallelism.
struct SglangSizes {
  int64_t tensor;
  int64_t pipeline;
  int64_t attention;      // ranks that share the heads
  int64_t expert;         // groups of ranks that hold different experts
  int64_t expert_tensor;  // ranks that share each expert; neighbours
};

// Requires sizes that divide.
SglangSizes SizesOf(const SideSpec& side) {
  const int64_t tensor = side.tensor_parallel.value;
  return {.tensor = tensor,
          .pipeline = side.pipeline_parallel.value,
          .attention = tensor / side.dp_attention.value,
          .expert = side.expert_parallel.value,
          .expert_tensor = tensor / side.expert_parallel.value};
}

// The models of which SGLang makes the head a tensor of its own also when it is
// tied, and on every pipeline stage, whether the stage reads it or not.
bool HasHeadOfItsOwn(std::string_view family) {
  return family == "qwen3_moe" || family == "mixtral" ||
         family == "qwen3_next" || family == "gpt_oss";
}

// The models whose router computes with an fp32 copy that it makes once.
bool CachesRouter(std::string_view family) {
  return family == "glm4_moe" || family == "glm4_moe_lite";
}

// The tensor's name in SGLang's modules: the checkpoint's, but for families
// whose modules are named otherwise.
std::string SglangName(std::string_view family, std::string name) {
  if (family == "nemotron_h") return NemotronName(std::move(name));
  if (family == "qwen3_next") {
    name = absl::StrReplaceAll(name, {{".self_attn.", "."}});
  }
  return name;
}

class SglangLayout {
 public:
  explicit SglangLayout(const LayoutContext& context)
      : context_(context),
        sizes_(SizesOf(context.side)),
        table_(context.model) {}

  SideLayout LayOut();

 private:
  // Reports sizes that do not fit.
  void CheckSizes(SizeChecks& checks);

  void CheckShared(SizeChecks& checks, const SizeChecks::Divisor& tensor);
  // What SGLang's classes do not have of models that others know.
  void CheckFamily(SizeChecks& checks);

  // One stack per group of the layers that have `roles`.
  void AddStacks(Range layers, absl::Span<const ParamRole> roles,
                 const std::optional<ExpertSlice>& experts,
                 absl::FunctionRef<TensorSpec(const LayerGroup&)> make,
                 std::vector<BufferId>& out);
  std::vector<BufferId> Rank(const ExpertSlice& experts, int64_t stage,
                             Range layers, int64_t tensor);
  void AddLayers(Range layers, int64_t tensor, std::vector<BufferId>& out);
  void AddExperts(const ExpertSlice& experts, Range layers, int64_t tensor,
                  std::vector<BufferId>& out);
  void AddHead(int64_t stage, int64_t tensor, std::vector<BufferId>& out);

  EmbeddingCut CutOfEmbedding() const;
  EvenPart Embedding(int64_t tensor) const;
  EvenPart Head(int64_t tensor) const;
  EvenPart Attention(int64_t tensor) const {
    return {sizes_.attention, tensor % sizes_.attention};
  }

  const LayoutContext& context_;
  const SglangSizes sizes_;
  const RoleTable table_;
  GateUpOrder gate_up_order_ = GateUpOrder::kGateFirst;
  // Of each expert's matrices: rows are inputs.
  bool transposed_ = false;
};

// Whether the axes within tensor parallelism divide it; reports what does not.
bool CheckAxes(const LayoutContext& context) {
  const SideSpec& side = context.side;
  const int64_t tensor = side.tensor_parallel.value;
  const auto report = [&](const Place& place, std::string message) {
    context.diagnostics.Error(place, std::move(message));
    return false;
  };
  bool fits = true;
  if (side.data_parallel.value > 1) {
    fits = report(
        side.data_parallel.place,
        absl::StrFormat(
            "%s.data_parallel %d is not an axis of an SGLang engine; wanted "
            "\"replicas\": %d for as many engines, or \"dp_attention\": %d for "
            "data parallelism of the attention within tensor_parallel",
            side.key, side.data_parallel.value, side.data_parallel.value,
            side.data_parallel.value));
  }
  for (const auto& [key, size] :
       {std::pair("dp_attention", &side.dp_attention),
        std::pair("expert_parallel", &side.expert_parallel)}) {
    if (tensor % size->value == 0) continue;
    fits = report(size->place,
                  absl::StrFormat("%s.%s %d does not divide tensor_parallel %d",
                                  side.key, key, size->value, tensor));
  }
  if (side.dp_attention.value == 1) {
    if (side.dp_lm_head.value) {
      fits = report(side.dp_lm_head.place,
                    absl::StrFormat("%s.dp_lm_head needs dp_attention of 2 or "
                                    "more",
                                    side.key));
    }
    if (side.embedding.value == EmbeddingCut::kAttention) {
      fits = report(side.embedding.place,
                    absl::StrFormat("%s.embedding \"attention\" needs "
                                    "dp_attention of 2 or more",
                                    side.key));
    }
  }
  return fits;
}

void SglangLayout::CheckSizes(SizeChecks& checks) {
  const SideSpec& side = context_.side;
  const SizeChecks::Divisor tensor =
      checks.Named("tensor_parallel", side.tensor_parallel);
  SizeChecks::Divisor attention = tensor;
  if (side.dp_attention.value > 1) {
    attention.text = absl::StrFormat("%s / dp_attention %d", tensor.text,
                                     side.dp_attention.value);
    attention.value = sizes_.attention;
  }
  checks.Heads(attention);
  CheckMlp(checks, tensor);
  CheckShared(checks, tensor);
  CheckMixerSizes(checks, context_.model.architecture, attention,
                  MambaGroups::kCutOrWhole);
  CheckFamily(checks);
  if (CutOfEmbedding() != EmbeddingCut::kReplicated) {
    CheckVocabulary(
        checks, table_, kEmbedding,
        CutOfEmbedding() == EmbeddingCut::kTensor ? tensor : attention);
  }
  CheckVocabulary(checks, table_, kOutputHead,
                  side.dp_lm_head.value ? attention : tensor);

  const SizeChecks::Divisor expert =
      checks.Named("expert_parallel", side.expert_parallel);
  checks.HasExperts(sizes_.expert > 1, expert.place, "expert_parallel");
  if (!side.experts.given) {
    checks.Divides(expert, context_.model.architecture.experts, "experts");
  }
  SizeChecks::Divisor expert_tensor = tensor;
  if (sizes_.expert > 1) {
    expert_tensor.text =
        absl::StrFormat("%s / expert_parallel %d", tensor.text, sizes_.expert);
    expert_tensor.value = sizes_.expert_tensor;
  }
  CheckExpertTensors(checks, expert_tensor);
  // Triton's kernels for unquantised experts want them so.
  transposed_ =
      side.moe_backend.value == "triton_kernel" && !side.quantised.given;
  if (transposed_) {
    checks.HasExperts(true, side.moe_backend.place, "moe_backend");
  } else {
    gate_up_order_ = CheckMoeBackend(side, checks);
  }
  CheckFusedExperts(context_, table_, gate_up_order_, checks);
  if (context_.model.architecture.mtp_layers > 0) {
    checks.Report(
        side.mtp.given ? side.mtp.place : side.layout.place,
        absl::StrFormat("%s cannot hold the model's %d multi-token-"
                        "prediction layers: SGLang's draft model is a "
                        "worker of its own; wanted \"mtp\": false",
                        side.key, context_.model.architecture.mtp_layers));
  }
}

void SglangLayout::CheckShared(SizeChecks& checks,
                               const SizeChecks::Divisor& tensor) {
  const Located<SharedExperts>& shared = context_.side.shared_experts;
  if (shared.given && table_.Params(kSharedExpertUp).empty()) {
    checks.Report(shared.place,
                  absl::StrFormat("%s.shared_experts needs a model with shared "
                                  "experts",
                                  context_.side.key));
    return;
  }
  if (shared.value == SharedExperts::kTensor) {
    CheckSharedExperts(checks, tensor);
  }
  if (shared.value != SharedExperts::kFused) return;
  if (table_.Params(kSharedExpertGate).empty() ||
      !table_.Params(kSharedExpertRouter).empty()) {
    checks.Report(
        shared.place,
        absl::StrFormat("%s.shared_experts \"fused\" is not what SGLang does "
                        "with those of %s; wanted \"tensor\" or "
                        "\"replicated\"",
                        context_.side.key, context_.model.architecture.family));
    return;
  }
  const int64_t expert = table_.param(table_.Params(kExpertUp)[0]).shape[0];
  for (const ParamId id : table_.Params(kSharedExpertUp)) {
    const int64_t rows = table_.param(id).shape[0];
    if (rows == expert) continue;
    checks.Report(
        shared.place,
        absl::StrFormat("%s.shared_experts \"fused\" needs shared experts of "
                        "the size of one; they have %d intermediate features, "
                        "an expert has %d",
                        context_.side.key, rows, expert));
  }
}

void SglangLayout::CheckFamily(SizeChecks& checks) {
  if (context_.model.architecture.family != "qwen3_next") return;
  const SideSpec& side = context_.side;
  if (sizes_.pipeline > 1) {
    checks.Report(side.pipeline_parallel.place,
                  absl::StrFormat("%s.pipeline_parallel %d: SGLang's "
                                  "qwen3_next has one stage; wanted 1",
                                  side.key, sizes_.pipeline));
  }
  if (!table_.Params(kMlpUp).empty()) {
    checks.Report(
        side.layout.place,
        absl::StrFormat("%s: SGLang's qwen3_next has experts in every layer, "
                        "and the model has a dense MLP \"%s\"; wanted another "
                        "layout (generic places any tensors)",
                        side.key,
                        table_.param(table_.Params(kMlpUp)[0]).FirstName()));
  }
}

void SglangLayout::AddStacks(
    Range layers, absl::Span<const ParamRole> roles,
    const std::optional<ExpertSlice>& experts,
    absl::FunctionRef<TensorSpec(const LayerGroup&)> make,
    std::vector<BufferId>& out) {
  AddLayerStacks(
      context_, table_, layers, roles, experts,
      [&](const LayerGroup& group) {
        TensorSpec spec = make(group);
        spec.name = SglangName(context_.model.architecture.family,
                               std::move(spec.name));
        return spec;
      },
      out);
}

EmbeddingCut SglangLayout::CutOfEmbedding() const {
  // Under attention data parallelism gpt_oss does not cut it.
  const bool whole = context_.model.architecture.family == "gpt_oss" &&
                     context_.side.dp_attention.value > 1;
  return whole && !context_.side.embedding.given
             ? EmbeddingCut::kReplicated
             : context_.side.embedding.value;
}

EvenPart SglangLayout::Embedding(int64_t tensor) const {
  switch (CutOfEmbedding()) {
    case EmbeddingCut::kTensor:
      return {sizes_.tensor, tensor};
    case EmbeddingCut::kAttention:
      return Attention(tensor);
    case EmbeddingCut::kReplicated:
      break;
  }
  return {};
}

EvenPart SglangLayout::Head(int64_t tensor) const {
  return context_.side.dp_lm_head.value ? Attention(tensor)
                                        : EvenPart{sizes_.tensor, tensor};
}

void SglangLayout::AddLayers(Range layers, int64_t tensor,
                             std::vector<BufferId>& out) {
  const Architecture& architecture = context_.model.architecture;
  const EvenPart attention = Attention(tensor);
  const EvenPart mlp = {sizes_.tensor, tensor};
  const auto qkv = [&](const LayerGroup& group) {
    return FusedHeads(group, architecture, attention);
  };
  const auto latent_down = [&](const LayerGroup& group) {
    return ConcatRows(group, RenameModule(group.params[0]->name,
                                          "fused_qkv_a_proj_with_mqa"));
  };
  const auto latent_up = [&](const LayerGroup& group) {
    return RowShard(group, attention);
  };
  const auto key_value_up = [&](const LayerGroup& group) {
    TensorSpec spec = RowShard(group, attention);
    if (context_.which == fb::Side::kDestination) {
      spec.post_hooks.push_back(
          {.name = "derive-latent-projections",
           .detail =
               "make w_kc and w_vc of the layer's attention from it again"});
    }
    return spec;
  };
  const auto output = [&](const LayerGroup& group) {
    return ColumnShard(group, group.params[0]->name, attention);
  };
  const auto add = [&](std::initializer_list<ParamRole> roles, auto make) {
    AddStacks(layers, roles, std::nullopt, make, out);
  };

  add({kQuery, kKey, kValue}, qkv);
  add({kQueryBias, kKeyBias, kValueBias}, qkv);
  if (architecture.latent.has_value() && architecture.latent->query_rank > 0) {
    add({kQueryDown, kKeyValueDown}, latent_down);
  } else {
    add({kKeyValueDown}, Replicated);
    add({kLatentQuery}, latent_up);
  }
  add({kQueryUp}, latent_up);
  add({kKeyValueUp}, key_value_up);
  add({kAttentionOutput}, output);
  add({kAttentionSinks}, [&](const LayerGroup& group) {
    return RowPart(*group.params[0], attention);
  });
  AddServingMixers(architecture, attention, add);
  AddMlp(table_, {kMlpGate, kMlpUp, kMlpDown}, mlp, add);
  const SharedExperts shared = context_.side.shared_experts.value;
  if (shared != SharedExperts::kFused) {
    AddMlp(table_, {kSharedExpertGate, kSharedExpertUp, kSharedExpertDown},
           shared == SharedExperts::kTensor ? mlp : EvenPart{}, add);
  }
  add({kRouter}, [&](const LayerGroup& group) {
    TensorSpec spec = Replicated(group);
    if (CachesRouter(architecture.family) &&
        context_.which == fb::Side::kDestination) {
      spec.post_hooks.push_back(
          {.name = "drop-router-copy",
           .detail = "set the gate's cached fp32 copy, _weight_fp32, to None"});
    }
    return spec;
  });
  for (const ParamRole role :
       {kQueryDownNorm, kKeyValueDownNorm, kAttentionOutputBias, kQueryNorm,
        kKeyNorm, kAttentionNorm, kMlpNorm, kMoeNorm, kRouterBias,
        kRouterCorrection, kLatentDown, kLatentUp, kSharedExpertRouter}) {
    add({role}, Replicated);
  }
}

void SglangLayout::AddExperts(const ExpertSlice& experts, Range layers,
                              int64_t tensor, std::vector<BufferId>& out) {
  const EvenPart part = {sizes_.expert_tensor, tensor % sizes_.expert_tensor};
  // Fused shared experts stand in the last slot, and are cut as the others.
  ExpertSlice slice = experts;
  const bool fused =
      context_.side.shared_experts.value == SharedExperts::kFused;
  slice.layer_slots = fused ? 1 : 0;
  const auto add = [&](std::vector<ParamRole> roles,
                       const std::vector<ParamRole>& shared, auto make_rows) {
    const auto make = [&](const LayerGroup& group) {
      TensorSpec spec = make_rows(group);
      return transposed_ ? Transposed(std::move(spec)) : spec;
    };
    const size_t own = roles.size();
    if (fused) roles.insert(roles.end(), shared.begin(), shared.end());
    AddStacks(
        layers, roles, slice,
        [&](const LayerGroup& group) {
          const auto first = group.params.begin();
          TensorSpec spec =
              make({.layers = group.layers, .params = {first, first + own}});
          if (!fused) return spec;
          const TensorSpec last =
              make({.layers = group.layers,
                    .params = {first + own, group.params.end()}});
          for (Part shared_part : last.parts) {
            shared_part.offset += static_cast<int64_t>(slice.slots[0].size()) *
                                  Product(spec.shape);
            spec.parts.push_back(std::move(shared_part));
          }
          return spec;
        },
        out);
  };
  if (table_.Params(kExpertGate).empty()) {
    add({kExpertUp}, {kSharedExpertUp}, [&](const LayerGroup& group) {
      return ExpertUp(group, /*module=*/"", part);
    });
  } else {
    add({kExpertGate, kExpertUp}, {kSharedExpertGate, kSharedExpertUp},
        [&](const LayerGroup& group) {
          return ExpertGateAndUp(group, /*module=*/"", part, gate_up_order_);
        });
  }
  add({kExpertDown}, {kSharedExpertDown}, [&](const LayerGroup& group) {
    return ExpertDown(group, /*module=*/"", part);
  });
  if (table_.Params(kFusedExpertDown).empty()) return;
  const std::vector<int32_t>& held = slice.slots.front();
  AddFusedExperts(context_,
                  {.module = "",
                   .gate_up_bias = "w13_weight_bias",
                   .down_bias = "w2_weight_bias",
                   .bias_dtype = DType::kFp32},
                  {held.front(), held.back() + 1}, part,
                  [&](std::initializer_list<ParamRole> roles,
                      absl::FunctionRef<TensorSpec(const LayerGroup&)> make) {
                    AddStacks(
                        layers, roles, std::nullopt,
                        [&](const LayerGroup& group) {
                          TensorSpec spec = make(group);
                          const bool is_weight = spec.shape.size() == 3;
                          return transposed_ && is_weight
                                     ? Transposed(std::move(spec))
                                     : spec;
                        },
                        out);
                  });
}

void SglangLayout::AddHead(int64_t stage, int64_t tensor,
                           std::vector<BufferId>& out) {
  const Architecture& architecture = context_.model.architecture;
  const bool own_head = HasHeadOfItsOwn(architecture.family);
  const bool last = stage == sizes_.pipeline - 1;
  EndUse use =
      last ? EndUse::kRead : (own_head ? EndUse::kUnread : EndUse::kAbsent);
  if (!architecture.tied) {
    for (const ParamId id : table_.Params(kOutputHead)) {
      AddEnd(context_, use, ServingVocabulary(context_, id, Head(tensor)), out);
    }
    return;
  }
  // On one stage the head is the embedding's own tensor and has no name; else
  // it is a copy, which of a source need not be read.
  if (sizes_.pipeline == 1 && !own_head) return;
  for (const ParamId id : table_.Params(kEmbedding)) {
    Buffer head = ServingVocabulary(context_, id, Head(tensor));
    head.name = "lm_head.weight";
    if (use == EndUse::kRead && context_.which == fb::Side::kSource) {
      head = SkippedCopy(
          std::move(head), SkipReason::kTied,
          absl::StrFormat("a copy of the tied %s, which the first stage sends",
                          table_.param(id).name));
    }
    AddEnd(context_, use, std::move(head), out);
  }
}

std::vector<BufferId> SglangLayout::Rank(const ExpertSlice& experts,
                                         int64_t stage, Range layers,
                                         int64_t tensor) {
  const std::string_view family = context_.model.architecture.family;
  std::vector<BufferId> out;
  for (const ParamId id : table_.Params(kEmbedding)) {
    Buffer embedding = ServingVocabulary(context_, id, Embedding(tensor));
    embedding.name = SglangName(family, std::move(embedding.name));
    AddEnd(context_, stage == 0 ? EndUse::kRead : EndUse::kAbsent,
           std::move(embedding), out);
  }
  AddLayers(layers, tensor, out);
  AddExperts(experts, layers, tensor, out);
  for (const ParamId id : table_.Params(kFinalNorm)) {
    AddEnd(context_,
           stage == sizes_.pipeline - 1 ? EndUse::kRead : EndUse::kAbsent,
           WholeTensor(context_, SglangName(family, table_.param(id).name), id),
           out);
  }
  AddHead(stage, tensor, out);
  return out;
}

SideLayout SglangLayout::LayOut() {
  if (!CheckRoles(context_, "sglang", table_)) return {};
  SizeChecks checks(context_, table_);
  CheckSizes(checks);
  const std::vector<ExpertSlice> experts = PlaceExperts(
      context_, table_, sizes_.expert > 1 ? sizes_.expert : 0, checks);
  const std::optional<PipelineSplit> split = SplitSglangLayers(
      context_.side, context_.model.architecture.layers, context_.diagnostics);
  if (!checks.ok() || !split.has_value()) return {};

  SideLayout layout;
  for (int64_t stage = 0; stage < sizes_.pipeline; ++stage) {
    for (int64_t tensor = 0; tensor < sizes_.tensor; ++tensor) {
      const int64_t expert_rank = tensor / sizes_.expert_tensor;
      layout.ranks.push_back(
          Rank(experts[expert_rank], stage, (*split)[stage][0], tensor));
    }
  }
  AppendReplicas(context_.side.replicas.value, layout);
  return layout;
}

}  // namespace

SideLayout LayOutSglang(const LayoutContext& context) {
  if (!CheckAxes(context)) return {};
  return SglangLayout(context).LayOut();
}

}  // namespace refit
