// vLLM: the canonical (checkpoint-ordered) layout of its linear, vocabulary
// and fused-MoE layers. docs/layouts.md holds the formulas and where they come
// from.
#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "compiler/layout/expert_slots.h"
#include "compiler/layout/fused_experts.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/mixers.h"
#include "compiler/layout/moe_backend.h"
#include "compiler/layout/role_table.h"
#include "compiler/layout/serving.h"
#include "compiler/layout/shard.h"
#include "compiler/layout/sizes.h"
#include "compiler/layout/stages.h"
#include "compiler/layout/tensor_stack.h"
#include "compiler/layout/vllm_mixers.h"

namespace refit {
namespace {

using enum ParamRole;

struct VllmSizes {
  int64_t tensor;
  int64_t pipeline;
  int64_t data;
  bool expert_parallel;  // experts whole, spread over data x tensor; else cut
                         // by it

  // Ranks that share the experts of a layer.
  int64_t expert_ranks() const { return data * tensor; }
  // Each rank runs a part of the tokens through all of the shared experts.
  bool sequence_parallel_experts() const {
    return expert_parallel && tensor > 1 && data > 1;
  }
};

// The tensor's name in vLLM's modules: the checkpoint's, but for families whose
// modules are named otherwise.
std::string VllmName(std::string_view family, std::string name) {
  const auto replace = [&](std::string_view from, std::string_view to) {
    const size_t at = name.find(from);
    if (at != std::string::npos) name.replace(at, from.size(), to);
  };
  if (family == "nemotron_h") {
    replace("backbone.", "model.");
    replace(".embeddings.", ".embed_tokens.");
    replace(".A_log", ".A");
  } else if (family == "gpt_oss") {
    replace(".self_attn.", ".attn.");
    replace(".embed_tokens.", ".embedding.");
  }
  return name;
}

// The models of which vLLM builds embedding, final norm and head on every
// pipeline stage, whether the stage reads them or not.
bool BuildsEndsOnEveryStage(std::string_view family) {
  return family == "qwen3_moe" || family == "mixtral" ||
         family == "nemotron_h" || family == "gpt_oss";
}

// Whether experts are named "experts.routed_experts.", as from 0.25 on.
// nullopt: not a version.
std::optional<bool> HasRoutedExperts(std::string_view version) {
  const char* const end = version.data() + version.size();
  int32_t major = 0;
  int32_t minor = 0;
  const auto [dot, major_error] = std::from_chars(version.data(), end, major);
  if (major_error != std::errc() || dot == end || *dot != '.') {
    return std::nullopt;
  }
  const auto [rest, minor_error] = std::from_chars(dot + 1, end, minor);
  if (minor_error != std::errc() || major < 0 || minor < 0) {
    return std::nullopt;
  }
  // What follows is a patch level or a pre-release tag: "0.25.1", "0.25rc1".
  return std::pair(major, minor) >= std::pair(0, 25);
}

class VllmLayout {
 public:
  explicit VllmLayout(const LayoutContext& context)
      : context_(context),
        sizes_({.tensor = context.side.tensor_parallel.value,
                .pipeline = context.side.pipeline_parallel.value,
                .data = context.side.data_parallel.value,
                .expert_parallel = context.side.expert_parallel_enabled.value}),
        table_(context.model) {}

  SideLayout LayOut();

 private:
  using MakeSpec = absl::FunctionRef<TensorSpec(const LayerGroup&)>;

  // Reports sizes that do not fit.
  void CheckSizes(SizeChecks& checks);

  // The buffers of a stage in three runs, in module order: what comes before
  // the experts, the experts, what comes after.
  std::vector<BufferId> EmbeddingAndLayers(int64_t stage, Range layers,
                                           int64_t tensor);
  std::vector<BufferId> Experts(const ExpertSlice& slice, int64_t stage,
                                Range layers, int64_t expert_rank);
  std::vector<BufferId> NormAndHead(int64_t stage, int64_t tensor);

  // One stack per group of the layers that have `roles`: of the stage's own
  // layers, and on the last stage of the draft model's.
  void AddLayers(int64_t stage, Range layers,
                 std::initializer_list<ParamRole> roles,
                 const std::optional<ExpertSlice>& experts, MakeSpec make,
                 std::vector<BufferId>& out);

  // Of experts that a checkpoint holds in one tensor a layer.
  void AddFusedExperts(int64_t stage, Range layers, Range experts,
                       EvenPart part, std::vector<BufferId>& out);
  // Such experts stand in the checkpoint's order alone.
  void CheckFusedExperts(SizeChecks& checks);

  // The name of such experts' stacked tensor `weight`.
  std::string ExpertsName(const Param& param, std::string_view weight) const;

  // Adds a tensor outside the layers: whole where a stage reads it, a declared
  // skip where it holds a copy it never reads, else nothing.
  void AddEnd(bool read, Buffer buffer, std::vector<BufferId>& out);

  const LayoutContext& context_;
  const VllmSizes sizes_;
  const RoleTable table_;
  bool routed_experts_ = true;
  GateUpOrder gate_up_order_ = GateUpOrder::kGateFirst;
};

void VllmLayout::CheckSizes(SizeChecks& checks) {
  const SideSpec& side = context_.side;
  const SizeChecks::Divisor tensor =
      checks.Named("tensor_parallel", side.tensor_parallel);
  checks.Heads(tensor);
  CheckMlp(checks, tensor);
  if (!sizes_.sequence_parallel_experts()) CheckSharedExperts(checks, tensor);
  CheckMixerSizes(checks, context_.model.architecture, tensor,
                  MambaGroups::kCutOrWhole);
  for (const ParamRole role : {kEmbedding, kOutputHead}) {
    CheckVocabulary(checks, table_, role, tensor);
  }

  checks.HasExperts(sizes_.expert_parallel, side.expert_parallel_enabled.place,
                    "expert_parallel");
  if (!sizes_.expert_parallel) {
    SizeChecks::Divisor expert_tensor = tensor;
    if (sizes_.data > 1) {
      expert_tensor.text =
          absl::StrFormat("%s x data_parallel %d", tensor.text, sizes_.data);
      expert_tensor.value = sizes_.expert_ranks();
    }
    CheckExpertTensors(checks, expert_tensor);
  }
  gate_up_order_ = CheckMoeBackend(side, checks);
  CheckFusedExperts(checks);

  if (side.version.given) {
    const std::optional<bool> routed = HasRoutedExperts(side.version.value);
    if (!routed.has_value()) {
      checks.Report(
          side.version.place,
          absl::StrFormat(
              "%s.version \"%s\" is not a version; wanted one like 0.25",
              side.key, side.version.value));
    }
    routed_experts_ = routed.value_or(true);
  }
}

void VllmLayout::CheckFusedExperts(SizeChecks& checks) {
  if (table_.Params(kFusedExpertDown).empty()) return;
  const SideSpec& side = context_.side;
  const std::string_view family = context_.model.architecture.family;
  if (side.experts.given) {
    checks.Report(side.experts.place,
                  absl::StrFormat("%s.experts: the experts of %s are placed "
                                  "linearly; wanted no such key",
                                  side.key, family));
  }
  if (gate_up_order_ != GateUpOrder::kGateFirst) {
    checks.Report(
        side.moe_backend.place,
        absl::StrFormat("%s.moe_backend \"%s\" has no known order of %s's "
                        "alternating gate and up rows; wanted triton",
                        side.key, side.moe_backend.value, family));
  }
}

void VllmLayout::AddLayers(int64_t stage, Range layers,
                           std::initializer_list<ParamRole> roles,
                           const std::optional<ExpertSlice>& experts,
                           MakeSpec make, std::vector<BufferId>& out) {
  const Architecture& architecture = context_.model.architecture;
  AddLayerStacks(
      context_, table_, layers, roles, experts,
      [&](const LayerGroup& group) {
        TensorSpec spec = make(group);
        spec.name = VllmName(architecture.family, std::move(spec.name));
        return spec;
      },
      out);
  if (stage != sizes_.pipeline - 1) return;
  AddLayerStacks(
      context_, table_, {architecture.layers, architecture.all_layers()}, roles,
      experts,
      [&](const LayerGroup& group) {
        TensorSpec spec = make(group);
        spec.name = DraftLayerName(std::move(spec.name));
        return spec;
      },
      out);
}

void VllmLayout::AddEnd(bool read, Buffer buffer, std::vector<BufferId>& out) {
  const std::string_view family = context_.model.architecture.family;
  buffer.name = VllmName(family, std::move(buffer.name));
  const EndUse unread =
      BuildsEndsOnEveryStage(family) ? EndUse::kUnread : EndUse::kAbsent;
  refit::AddEnd(context_, read ? EndUse::kRead : unread, std::move(buffer),
                out);
}

std::vector<BufferId> VllmLayout::EmbeddingAndLayers(int64_t stage,
                                                     Range layers,
                                                     int64_t tensor) {
  std::vector<BufferId> out;
  const Architecture& architecture = context_.model.architecture;
  const bool last = stage == sizes_.pipeline - 1;
  // The draft model, on the last stage, has an embedding of its own unless it
  // shares that of the first. Its head is the model's.
  const bool drafts = last && architecture.mtp_layers > 0;
  const bool reads_embedding =
      stage == 0 || drafts || (architecture.tied && last);
  for (const ParamId id : table_.Params(kEmbedding)) {
    AddEnd(reads_embedding,
           ServingVocabulary(context_, id, {sizes_.tensor, tensor}), out);
  }

  const EvenPart part = {sizes_.tensor, tensor};
  const auto& replicated = Replicated;
  const auto column_shard = [&](const LayerGroup& group) {
    return ColumnShard(group, group.params[0]->name, part);
  };
  const auto qkv = [&](const LayerGroup& group) {
    return FusedHeads(group, architecture, part);
  };
  const auto gate_and_up = [&](const LayerGroup& group) {
    return GateAndUp(group, RenameModule(group.params[0]->name, "gate_up_proj"),
                     part);
  };
  const auto row_shard = [&](const LayerGroup& group) {
    return RowShard(group, part);
  };
  const auto fused_down = [&](const LayerGroup& group) {
    return ConcatRows(group,
                      RenameModule(group.params[0]->name, "fused_qkv_a_proj"));
  };
  const EvenPart shared_part =
      sizes_.sequence_parallel_experts() ? EvenPart{} : part;
  const auto shared_gate_and_up = [&](const LayerGroup& group) {
    return GateAndUp(group, RenameModule(group.params[0]->name, "gate_up_proj"),
                     shared_part);
  };
  const auto shared_down = [&](const LayerGroup& group) {
    return ColumnShard(group, group.params[0]->name, shared_part);
  };
  const auto add = [&](std::initializer_list<ParamRole> roles, auto make) {
    AddLayers(stage, layers, roles, std::nullopt, make, out);
  };

  if (drafts) {
    // Beside the block that is built like a decoder layer.
    for (const ParamRole role :
         {kMtpEmbeddingNorm, kMtpHiddenNorm, kMtpProjection, kMtpFinalNorm}) {
      AddLayerStacks(context_, table_,
                     {architecture.layers, architecture.all_layers()}, {role},
                     std::nullopt, Replicated, out);
    }
  }
  add({kQuery, kKey, kValue}, qkv);
  add({kQueryBias, kKeyBias, kValueBias}, qkv);
  if (architecture.latent.has_value() && architecture.latent->query_rank > 0) {
    add({kQueryDown, kKeyValueDown}, fused_down);
  } else {
    add({kKeyValueDown}, replicated);
    add({kLatentQuery}, row_shard);
  }
  add({kQueryDownNorm}, replicated);
  add({kQueryUp}, row_shard);
  add({kKeyValueDownNorm}, replicated);
  add({kKeyValueUp}, [&](const LayerGroup& group) {
    TensorSpec spec = RowShard(group, part);
    if (context_.which == fb::Side::kDestination) {
      spec.post_hooks.push_back(
          {.name = "derive-latent-projections",
           .detail =
               "make W_UV and W_UK_T of the layer's attention from it again"});
    }
    return spec;
  });
  add({kAttentionOutput}, column_shard);
  add({kAttentionOutputBias}, replicated);
  add({kQueryNorm}, replicated);
  add({kKeyNorm}, replicated);
  add({kAttentionSinks},
      [&](const LayerGroup& group) { return RowPart(*group.params[0], part); });
  vllm::AddMixers(architecture, part, add);
  if (table_.Params(kMlpGate).empty()) {
    add({kMlpUp}, row_shard);
  } else {
    add({kMlpGate, kMlpUp}, gate_and_up);
  }
  add({kMlpDown}, column_shard);
  add({kAttentionNorm}, replicated);
  add({kMlpNorm}, replicated);
  add({kMoeNorm}, replicated);
  add({kRouter}, replicated);
  add({kRouterBias}, replicated);
  add({kRouterCorrection}, replicated);
  add({kLatentDown}, replicated);
  add({kLatentUp}, replicated);
  add({kSharedExpertRouter}, replicated);
  if (table_.Params(kSharedExpertGate).empty()) {
    add({kSharedExpertUp},
        [&](const LayerGroup& group) { return RowShard(group, shared_part); });
  } else {
    add({kSharedExpertGate, kSharedExpertUp}, shared_gate_and_up);
  }
  add({kSharedExpertDown}, shared_down);
  return out;
}

std::vector<BufferId> VllmLayout::Experts(const ExpertSlice& slice,
                                          int64_t stage, Range layers,
                                          int64_t expert_rank) {
  const EvenPart part = sizes_.expert_parallel
                            ? EvenPart{}
                            : EvenPart{sizes_.expert_ranks(), expert_rank};
  const std::string_view module = routed_experts_ ? "routed_experts." : "";
  std::vector<BufferId> out;
  if (table_.Params(kExpertGate).empty()) {
    AddLayers(
        stage, layers, {kExpertUp}, slice,
        [&](const LayerGroup& group) { return ExpertUp(group, module, part); },
        out);
  } else {
    AddLayers(
        stage, layers, {kExpertGate, kExpertUp}, slice,
        [&](const LayerGroup& group) {
          return ExpertGateAndUp(group, module, part, gate_up_order_);
        },
        out);
  }
  AddLayers(
      stage, layers, {kExpertDown}, slice,
      [&](const LayerGroup& group) { return ExpertDown(group, module, part); },
      out);
  if (!table_.Params(kFusedExpertDown).empty()) {
    const std::vector<int32_t>& experts = slice.slots.front();
    const Range held =
        experts.empty() ? Range{} : Range{experts.front(), experts.back() + 1};
    AddFusedExperts(stage, layers, held, part, out);
  }
  return out;
}

std::string VllmLayout::ExpertsName(const Param& param,
                                    std::string_view weight) const {
  constexpr std::string_view kExperts = ".experts.";
  const std::string_view name = param.name;
  return absl::StrFormat("%s%s%s",
                         name.substr(0, name.find(kExperts) + kExperts.size()),
                         routed_experts_ ? "routed_experts." : "", weight);
}

void VllmLayout::AddFusedExperts(int64_t stage, Range layers, Range experts,
                                 EvenPart part, std::vector<BufferId>& out) {
  const auto add = [&](ParamRole role, std::string_view weight, auto make) {
    AddLayers(
        stage, layers, {role}, std::nullopt,
        [&](const LayerGroup& group) {
          const Param& param = *group.params[0];
          return make(param, ExpertsName(param, weight));
        },
        out);
  };
  add(kFusedExpertGateUp, "w13_weight",
      [&](const Param& param, std::string name) {
        return StackedGateUp(param, std::move(name), experts, part);
      });
  add(kFusedExpertGateUpBias, "w13_bias",
      [&](const Param& param, std::string name) {
        return StackedGateUpBias(param, std::move(name), experts, part);
      });
  add(kFusedExpertDown, "w2_weight", [&](const Param& param, std::string name) {
    return StackedDown(param, std::move(name), experts, part);
  });
  // Of ranks that share an expert, one adds the bias to its output.
  add(kFusedExpertDownBias, "w2_bias",
      [&](const Param& param, std::string name) {
        TensorSpec spec = StackedDownBias(param, std::move(name), experts);
        if (part.index > 0) {
          spec.parts.clear();
          spec.zeros = context_.which == fb::Side::kDestination;
        }
        return spec;
      });
}

std::vector<BufferId> VllmLayout::NormAndHead(int64_t stage, int64_t tensor) {
  std::vector<BufferId> out;
  const bool last = stage == sizes_.pipeline - 1;
  for (const ParamId id : table_.Params(kFinalNorm)) {
    AddEnd(last, WholeTensor(context_, table_.param(id).name, id), out);
  }
  // Tied: the head is the embedding's own tensor and has no name.
  if (context_.model.architecture.tied) return out;
  for (const ParamId id : table_.Params(kOutputHead)) {
    AddEnd(last, ServingVocabulary(context_, id, {sizes_.tensor, tensor}), out);
  }
  return out;
}

SideLayout VllmLayout::LayOut() {
  if (!CheckRoles(context_, "vllm", table_)) return {};
  SizeChecks checks(context_, table_);
  CheckSizes(checks);
  const std::vector<ExpertSlice> slices =
      PlaceExperts(context_, table_,
                   sizes_.expert_parallel ? sizes_.expert_ranks() : 0, checks);
  const std::optional<PipelineSplit> split = SplitVllmLayers(
      context_.side, context_.model.architecture.layers, context_.diagnostics);
  if (!checks.ok() || !split.has_value()) return {};

  const int64_t tensor = sizes_.tensor;
  const int64_t pipeline = sizes_.pipeline;
  const int64_t engine_ranks = sizes_.data * pipeline * tensor;
  SideLayout layout;
  layout.ranks.resize(engine_ranks);
  for (int64_t stage = 0; stage < pipeline; ++stage) {
    const Range layers = (*split)[stage][0];
    std::vector<std::vector<BufferId>> before, experts, after;
    for (int64_t t = 0; t < tensor; ++t) {
      before.push_back(EmbeddingAndLayers(stage, layers, t));
      after.push_back(NormAndHead(stage, t));
    }
    for (int64_t i = 0; i < sizes_.expert_ranks(); ++i) {
      experts.push_back(
          Experts(slices[sizes_.expert_parallel ? i : 0], stage, layers, i));
    }
    for (int64_t i = 0; i < sizes_.expert_ranks(); ++i) {
      const int64_t d = i / tensor;
      const int64_t t = i % tensor;
      std::vector<BufferId>& rank =
          layout.ranks[(d * pipeline + stage) * tensor + t];
      for (const std::vector<BufferId>* run :
           {&before[t], &experts[i], &after[t]}) {
        rank.insert(rank.end(), run->begin(), run->end());
      }
    }
  }

  AppendReplicas(context_.side.replicas.value, layout);
  return layout;
}

}  // namespace

SideLayout LayOutVllm(const LayoutContext& context) {
  return VllmLayout(context).LayOut();
}

}  // namespace refit
