// SGLang: the layout of its linear, vocabulary and fused-MoE layers as loaded.
// README.md beside it holds the formulas and where they come from.
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "compiler/job/version.h"
#include "compiler/layout/common/mixers.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/common/stages.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/serving/experts.h"
#include "compiler/layout/serving/serving.h"
#include "compiler/layout/serving/tower.h"
#include "compiler/layout/sglang/checks.h"

namespace refit {
namespace {

using enum ParamRole;

class SglangLayout {
 public:
  explicit SglangLayout(const LayoutContext& context)
      : context_(context),
        sizes_(sglang::SizesOf(context.side)),
        traits_(context.model.architecture.family->sglang),
        table_(context.model),
        shared_(sglang::SharedExpertsOf(context, table_)) {}

  SideLayout LayOut();

 private:
  // One stack per group of the layers that have `roles`.
  void AddStacks(Range layers, absl::Span<const ParamRole> roles,
                 const std::optional<ExpertSlice>& experts,
                 absl::FunctionRef<TensorSpec(const LayerGroup&)> make,
                 std::vector<BufferId>& out);
  // The buffers of a stage in three runs: what comes before the experts, the
  // experts, what comes after.
  std::vector<BufferId> Before(int64_t stage, Range layers, int64_t tensor);
  std::vector<BufferId> After(int64_t stage, int64_t tensor);
  void AddLayers(Range layers, int64_t tensor, std::vector<BufferId>& out);
  void AddExperts(const ExpertSlice& experts, Range layers, int64_t tensor,
                  std::vector<BufferId>& out);
  void AddHead(int64_t stage, int64_t tensor, std::vector<BufferId>& out);

  EvenPart Embedding(int64_t tensor) const;
  EvenPart Head(int64_t tensor) const;
  // A vocabulary matrix; padded for ranks that do not divide its usual rows.
  Buffer Vocabulary(ParamId id, EvenPart part) const;
  EvenPart Attention(int64_t tensor) const {
    return {sizes_.attention, tensor % sizes_.attention};
  }

  const LayoutContext& context_;
  const sglang::Sizes sizes_;
  const SglangTraits& traits_;
  const RoleTable table_;
  const SharedExperts shared_;
  sglang::ExpertForm expert_form_;
};

void SglangLayout::AddStacks(
    Range layers, absl::Span<const ParamRole> roles,
    const std::optional<ExpertSlice>& experts,
    absl::FunctionRef<TensorSpec(const LayerGroup&)> make,
    std::vector<BufferId>& out) {
  AddLayerStacks(
      context_, table_, layers, roles, experts,
      [&](const LayerGroup& group) {
        TensorSpec spec = make(group);
        spec.name = Renamed(spec.name, traits_.renames);
        return spec;
      },
      out);
}

EvenPart SglangLayout::Embedding(int64_t tensor) const {
  const bool is_whole =
      traits_.embedding == SglangTraits::Embedding::kWholeBesideDpAttention &&
      context_.side.dp_attention.value > 1;
  if (is_whole) return {};
  switch (context_.side.embedding.value) {
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

Buffer SglangLayout::Vocabulary(ParamId id, EvenPart part) const {
  const int64_t rows = ServingVocabularyRows(table_.param(id));
  const bool divides = rows % part.count == 0;
  return ServingVocabulary(context_, id, part, divides ? 1 : part.count);
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
    return WithPostHook(
        context_, RowShard(group, attention),
        {.name = "derive-latent-projections",
         .detail =
             "make w_kc and w_vc of the layer's attention from it again"});
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
  add({kQueryDownNorm}, Replicated);
  add({kQueryUp}, latent_up);
  add({kKeyValueDownNorm}, Replicated);
  add({kKeyValueUp}, key_value_up);
  add({kAttentionOutput}, output);
  for (const ParamRole role : {kAttentionOutputBias, kQueryNorm, kKeyNorm}) {
    add({role}, Replicated);
  }
  add({kQueryHeadsNorm}, [&](const LayerGroup& group) {
    return QueryHeadsNorm(group, architecture, attention);
  });
  add({kKeyHeadsNorm}, [&](const LayerGroup& group) {
    return KeyHeadsNorm(group, architecture, attention);
  });
  const bool joins_indexers = architecture.index_rope_interleaved;
  AddIndexers(joins_indexers, DType::kBf16, add);
  add({kAttentionSinks}, [&](const LayerGroup& group) {
    return RowPart(*group.params[0], attention);
  });
  AddServingMixers(architecture, attention, add);
  AddMlp(table_, {kMlpGate, kMlpUp, kMlpDown}, mlp, add);
  for (const ParamRole role :
       {kAttentionNorm, kMlpNorm, kMlpInputNorm, kMlpOutputNorm, kMoeNorm}) {
    add({role}, Replicated);
  }
  const bool has_fp32_router = !traits_.fp32_router_since.empty();
  const bool is_since_fp32_router =
      IsSince(context_.side, VersionNumbers(traits_.fp32_router_since));
  add({kRouter}, [&](const LayerGroup& group) {
    TensorSpec spec =
        Router(context_, group, has_fp32_router && is_since_fp32_router);
    if (!has_fp32_router || is_since_fp32_router) return spec;
    // An older release computes with an fp32 copy.
    return WithPostHook(
        context_, std::move(spec),
        {.name = "drop-router-copy",
         .detail = "set the gate's cached fp32 copy, _weight_fp32, to None"});
  });
  for (const ParamRole role : {kRouterBias, kRouterCorrection, kLatentDown,
                               kLatentUp, kSharedExpertRouter}) {
    add({role}, Replicated);
  }
  if (shared_ != SharedExperts::kFused) {
    AddMlp(table_, {kSharedExpertGate, kSharedExpertUp, kSharedExpertDown},
           shared_ == SharedExperts::kTensor ? mlp : EvenPart{}, add);
  }
  AddPlainModules(context_, table_, traits_.fused, traits_.renames, mlp, layers,
                  out);
}

void SglangLayout::AddExperts(const ExpertSlice& experts, Range layers,
                              int64_t tensor, std::vector<BufferId>& out) {
  const EvenPart part = {sizes_.expert_tensor, tensor % sizes_.expert_tensor};
  // Fused shared experts are the last physical expert, and are cut as the
  // others.
  ExpertSlice slice = experts;
  const bool fused = shared_ == SharedExperts::kFused;
  slice.layer_experts = fused ? 1 : 0;
  const auto add = [&](std::vector<ParamRole> roles,
                       const std::vector<ParamRole>& shared, auto make_rows) {
    const auto make = [&](const LayerGroup& group) {
      TensorSpec spec = make_rows(group);
      return expert_form_.transposed ? Transposed(std::move(spec)) : spec;
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
            shared_part.offset +=
                static_cast<int64_t>(slice.experts[0].size()) *
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
          return ExpertGateAndUp(group, /*module=*/"", part,
                                 expert_form_.order);
        });
  }
  add({kExpertDown}, {kSharedExpertDown}, [&](const LayerGroup& group) {
    return ExpertDown(group, /*module=*/"", part);
  });
  const std::vector<int32_t>& held = slice.experts.front();
  if (held.empty()) return;
  const Range range = {held.front(), held.back() + 1};
  const auto add_of_layer =
      [&](std::initializer_list<ParamRole> roles,
          absl::FunctionRef<TensorSpec(const LayerGroup&)> make) {
        AddStacks(
            layers, roles, std::nullopt,
            [&](const LayerGroup& group) {
              TensorSpec spec = make(group);
              const bool is_weight = spec.shape.size() == 3;
              return expert_form_.transposed && is_weight
                         ? Transposed(std::move(spec))
                         : spec;
            },
            out);
      };
  AddStackedExperts(/*module=*/"", expert_form_.order, range, part,
                    add_of_layer);
  if (table_.Params(kFusedExpertDown).empty()) return;
  AddFusedExperts(context_,
                  {.module = "",
                   .gate_up_bias = "w13_weight_bias",
                   .down_bias = "w2_weight_bias",
                   .bias_dtype = DType::kFp32,
                   .order = expert_form_.order},
                  range, part, add_of_layer);
}

void SglangLayout::AddHead(int64_t stage, int64_t tensor,
                           std::vector<BufferId>& out) {
  const Architecture& architecture = context_.model.architecture;
  const bool last = stage == sizes_.pipeline - 1;
  const EndUse elsewhere = traits_.head == SglangTraits::Head::kLastStage
                               ? EndUse::kAbsent
                               : EndUse::kUnread;
  const EndUse use = last ? EndUse::kRead : elsewhere;
  if (!architecture.tied) {
    for (const ParamId id : table_.Params(kOutputHead)) {
      AddEnd(context_, use, Vocabulary(id, Head(tensor)), out);
    }
    return;
  }
  // On one stage the head is the embedding's own tensor and has no name; else
  // it is a copy, which of a source need not be read.
  const bool has_own_tensor = traits_.head == SglangTraits::Head::kOwnTensor;
  if (sizes_.pipeline == 1 && !has_own_tensor) return;
  for (const ParamId id : table_.Params(kEmbedding)) {
    Buffer head = Vocabulary(id, Head(tensor));
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

std::vector<BufferId> SglangLayout::Before(int64_t stage, Range layers,
                                           int64_t tensor) {
  std::vector<BufferId> out;
  const EvenPart tower =
      HasWholeTower(context_) ? EvenPart{} : Attention(tensor);
  AddTower(context_, table_, traits_.renames,
           {.tower = tower,
            .connector = {},
            .add_positions =
                [&](ParamId id) {
                  Buffer positions = Vocabulary(id, tower);
                  positions.name = Renamed(positions.name, traits_.renames);
                  AddEnd(context_, stage == 0 ? EndUse::kRead : EndUse::kAbsent,
                         std::move(positions), out);
                },
            .whole_in_tower = traits_.whole_in_tower},
           out);
  for (const ParamId id : table_.Params(kFirstStage)) {
    AddEnd(context_, stage == 0 ? EndUse::kRead : EndUse::kAbsent,
           WholeTensor(context_,
                       Renamed(table_.param(id).name, traits_.renames), id),
           out);
  }
  for (const ParamId id : table_.Params(kEmbedding)) {
    Buffer embedding = traits_.embedding == SglangTraits::Embedding::kWhole
                           ? WholeTensor(context_, table_.param(id).name, id)
                           : Vocabulary(id, Embedding(tensor));
    embedding.name = Renamed(embedding.name, traits_.renames);
    const bool everywhere =
        traits_.embedding == SglangTraits::Embedding::kEveryStage;
    const EndUse elsewhere = everywhere ? EndUse::kUnread : EndUse::kAbsent;
    AddEnd(context_, stage == 0 ? EndUse::kRead : elsewhere,
           std::move(embedding), out);
  }
  AddLayers(layers, tensor, out);
  return out;
}

std::vector<BufferId> SglangLayout::After(int64_t stage, int64_t tensor) {
  std::vector<BufferId> out;
  for (const ParamRole role : {kFinalNorm, kLastStage}) {
    for (const ParamId id : table_.Params(role)) {
      AddEnd(context_,
             stage == sizes_.pipeline - 1 ? EndUse::kRead : EndUse::kAbsent,
             WholeTensor(context_,
                         Renamed(table_.param(id).name, traits_.renames), id),
             out);
    }
  }
  AddHead(stage, tensor, out);
  return out;
}

SideLayout SglangLayout::LayOut() {
  if (!CheckRoles(context_, "sglang", table_)) return {};
  SizeChecks checks(context_, table_);
  expert_form_ = sglang::CheckSizes(context_, table_, sizes_, checks);
  const std::vector<ExpertSlice> experts = PlaceExperts(
      context_, table_, sizes_.expert > 1 ? sizes_.expert : 0, checks);
  const std::optional<PipelineSplit> split = SplitSglangLayers(
      context_.side, context_.model.architecture.layers, context_.diagnostics);
  if (!checks.ok() || !split.has_value()) return {};

  SideLayout layout;
  for (int64_t stage = 0; stage < sizes_.pipeline; ++stage) {
    const Range layers = (*split)[stage][0];
    std::vector<std::vector<BufferId>> before, after;
    for (int64_t tensor = 0; tensor < sizes_.tensor; ++tensor) {
      before.push_back(Before(stage, layers, tensor));
      after.push_back(After(stage, tensor));
    }
    for (int64_t tensor = 0; tensor < sizes_.tensor; ++tensor) {
      std::vector<BufferId>& rank =
          layout.ranks.emplace_back(std::move(before[tensor]));
      AddExperts(experts[tensor / sizes_.expert_tensor], layers, tensor, rank);
      rank.insert(rank.end(), after[tensor].begin(), after[tensor].end());
    }
  }
  // Without attention of its own a data-parallel rank is a whole engine.
  AppendReplicas(
      context_.side.data_parallel.value * context_.side.replicas.value, layout);
  if (context_.model.architecture.experts > 0) {
    layout.requirements = ExpertRequirements(context_.side, sizes_.expert);
  }
  return layout;
}

}  // namespace

SideLayout LayOutSglang(const LayoutContext& context) {
  if (!sglang::CheckAxes(context)) return {};
  return SglangLayout(context).LayOut();
}

}  // namespace refit
