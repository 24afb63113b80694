// vLLM: the canonical (checkpoint-ordered) layout of its linear, vocabulary
// and fused-MoE layers. README.md beside it holds the formulas and where they
// come from.
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
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

namespace refit {
namespace {

using enum ParamRole;

// Of a group's kv_b_proj: a tensor of this shape that the worker makes of it.
TensorSpec LatentProjection(const LayerGroup& group, std::string_view name,
                            Dims shape) {
  const std::string_view source = group.params[0]->name;
  const std::string_view module = ModuleOf(source);
  const std::string_view attention =
      source.substr(0, module.data() - source.data());
  return {.name = absl::StrCat(std::string(attention), "mla_attn.mla_attn.",
                               std::string(name)),
          .shape = std::move(shape),
          .parts = {},
          .skip = DeclaredSkip{.reason = SkipReason::kDerived,
                               .detail = "made of kv_b_proj after each refit "
                                         "(derive-latent-projections)"}};
}

struct VllmSizes {
  int64_t tensor;
  int64_t pipeline;
  int64_t data;
  bool expert_parallel;  // experts whole, spread over data x tensor; else cut
                         // by it

  // Ranks that share the experts of a layer.
  int64_t expert_ranks() const { return data * tensor; }
  // Each rank runs a part of the tokens through the experts.
  bool sequence_parallel_experts() const {
    return expert_parallel && tensor > 1 && data > 1;
  }
};

class VllmLayout {
 public:
  explicit VllmLayout(const LayoutContext& context)
      : context_(context),
        sizes_({.tensor = context.side.tensor_parallel.value,
                .pipeline = context.side.pipeline_parallel.value,
                .data = context.side.data_parallel.value,
                .expert_parallel = context.side.expert_parallel_enabled.value}),
        traits_(context.model.architecture.family->vllm),
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
  // Whether the head is the embedding's tensor.
  bool HasTiedHead() const;
  // What the head is called that a tied model has none of.
  std::string TiedHeadName() const;
  std::vector<BufferId> NormAndHead(int64_t stage, int64_t tensor);

  // One stack per group of the layers that have `roles`: of the stage's own
  // layers, and on the last stage of the draft model's.
  void AddLayers(int64_t stage, Range layers,
                 std::initializer_list<ParamRole> roles,
                 const std::optional<ExpertSlice>& experts, MakeSpec make,
                 std::vector<BufferId>& out);

  // Reports experts that vLLM would not place in turn.
  void CheckRoundRobin(SizeChecks& checks);

  // Reports a draft model that vLLM does not have.
  void CheckDraft(SizeChecks& checks, const SizeChecks::Divisor& tensor);

  // Whether each rank holds all of the shared experts.
  bool HasWholeSharedExperts() const {
    return sizes_.sequence_parallel_experts() &&
           !traits_.cuts_shared_experts_of_token_parts &&
           (sizes_.pipeline == 1 || !traits_.token_parts_on_one_stage);
  }

  // What a rank holds of the layer's attention sinks, which kernels have for
  // some numbers of heads alone.
  TensorSpec PaddedSinks(const LayerGroup& group, EvenPart part) const;
  void CheckAttentionBackend(SizeChecks& checks,
                             const SizeChecks::Divisor& tensor);

  // Adds the tables of the layers that choose experts by token.
  void AddHashTables(Range layers, std::vector<BufferId>& out);

  // Adds a tensor outside the layers: whole where a stage reads it, a declared
  // skip where it is built and never read, else nothing.
  void AddEnd(bool is_read, bool is_built, Buffer buffer,
              std::vector<BufferId>& out);

  const LayoutContext& context_;
  const VllmSizes sizes_;
  const VllmTraits& traits_;
  const RoleTable table_;
  bool routed_experts_ = true;
  GateUpOrder gate_up_order_ = GateUpOrder::kGateFirst;
};

void VllmLayout::CheckRoundRobin(SizeChecks& checks) {
  const SideSpec& side = context_.side;
  const Architecture& architecture = context_.model.architecture;
  if (!sizes_.expert_parallel ||
      side.experts.value.kind != ExpertPlacement::Kind::kRoundRobin ||
      architecture.experts == 0 || architecture.expert_groups != 1 ||
      architecture.family->of_file) {
    return;
  }
  checks.Report(
      side.experts.place,
      absl::StrFormat(
          "%s.experts.placement is \"round_robin\": vLLM places the experts of "
          "%s linearly all the same, because its router chooses among all "
          "experts (n_group is not 2 or more); wanted \"linear\"",
          side.key, architecture.family->model_type));
}

void VllmLayout::CheckSizes(SizeChecks& checks) {
  const SideSpec& side = context_.side;
  const SizeChecks::Divisor tensor =
      checks.Named("tensor_parallel", side.tensor_parallel);
  checks.Heads(tensor);
  CheckMlp(checks, tensor);
  CheckPlainModules(checks, tensor);
  if (!HasWholeSharedExperts()) CheckSharedExperts(checks, tensor);
  CheckMixerSizes(checks, context_.model.architecture, tensor,
                  MambaGroups::kCutOrWhole);
  for (const ParamRole role : {kEmbedding, kOutputHead}) {
    CheckVocabulary(checks, table_, role, tensor);
  }

  checks.HasExperts(sizes_.expert_parallel, side.expert_parallel_enabled.place,
                    "expert_parallel");
  CheckRoundRobin(checks);
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
  CheckFusedExperts(context_, table_, gate_up_order_, checks);
  CheckDraft(checks, tensor);
  const Located<bool>& ties = side.tie_word_embeddings;
  if (ties.given && ties.value && !context_.model.architecture.tied) {
    checks.Report(
        ties.place,
        absl::StrFormat("%s.tie_word_embeddings is true, and this %s "
                        "is not tied; wanted no such key",
                        side.key,
                        context_.model.architecture.family->model_type));
  }
  CheckAttentionBackend(checks, tensor);
  if (!traits_.pipeline_parallel && sizes_.pipeline > 1) {
    checks.Report(
        side.pipeline_parallel.place,
        absl::StrFormat("%s.pipeline_parallel %d: vLLM's %s has one stage; "
                        "wanted 1",
                        side.key, sizes_.pipeline,
                        context_.model.architecture.family->model_type));
  }
  if (side.quantized.given && !traits_.block_scales) {
    checks.Report(
        side.quantized.place,
        absl::StrFormat(
            "%s.dtype %s: vLLM reorders the scales of %s after loading (wo_a, "
            "by DeepGEMM) or has its experts in MXFP4; wanted bf16",
            side.key, side.quantized.value.name,
            context_.model.architecture.family->model_type));
  }
  CheckTower(context_, table_, {.tower = tensor, .connector = tensor}, checks);

  checks.HasExperts(side.router_dtype.given, side.router_dtype.place,
                    "router_dtype");
  routed_experts_ = IsSince(side, {0, 24});
  if (side.version.given && VersionNumbers(side.version.value).size() < 2) {
    checks.Report(side.version.place,
                  absl::StrFormat("%s.version \"%s\" is not a version; wanted "
                                  "one like 0.25",
                                  side.key, side.version.value));
  }
}

// The heads to which the kernels of a backend pad; 0: there are too many.
int64_t PaddedHeads(AttentionBackend backend, int64_t heads) {
  int64_t padded = backend == AttentionBackend::kFlashMla ? 64 : 8;
  while (padded < heads) padded *= 2;
  return padded > 128 ? 0 : padded;
}

void VllmLayout::CheckAttentionBackend(SizeChecks& checks,
                                       const SizeChecks::Divisor& tensor) {
  const Architecture& architecture = context_.model.architecture;
  const Located<AttentionBackend>& backend = context_.side.attention_backend;
  if (table_.Params(kAttentionSinksFp32).empty()) {
    if (!backend.given) return;
    checks.Report(
        backend.place,
        absl::StrFormat("%s.attention_backend: the tensors of %s do "
                        "not depend on it; wanted no such key",
                        context_.side.key, architecture.family->model_type));
    return;
  }
  checks.Divides(tensor, architecture.heads, "attention heads");
  checks.Divides(tensor, architecture.output_groups,
                 "groups of the output projection");
  const int64_t heads = architecture.heads / tensor.value;
  if (!checks.ok() || PaddedHeads(backend.value, heads) > 0) return;
  checks.Report(tensor.place,
                absl::StrFormat("%s leaves %d attention heads to a rank; "
                                "vLLM's kernels have at most 128",
                                tensor.text, heads));
}

TensorSpec VllmLayout::PaddedSinks(const LayerGroup& group,
                                   EvenPart part) const {
  TensorSpec spec = RowPart(*group.params[0], part);
  const int64_t heads = spec.shape[0];
  spec.shape[0] = PaddedHeads(context_.side.attention_backend.value, heads);
  if (spec.shape[0] > heads) {
    spec.tail = {heads,
                 {.reason = SkipReason::kFrozen,
                  .detail = "heads that pad those of the rank; vLLM keeps "
                            "-inf there"}};
  }
  return spec;
}

void VllmLayout::AddHashTables(Range layers, std::vector<BufferId>& out) {
  const Architecture& architecture = context_.model.architecture;
  layers.end = std::min(layers.end, architecture.hash_layers);
  if (layers.begin >= layers.end) return;
  AddLayerStacks(
      context_, table_, layers, {kRouter}, std::nullopt,
      [&](const LayerGroup& group) {
        const std::string& gate = group.params[0]->name;
        return TensorSpec{
            .name = Renamed(
                absl::StrCat(gate.substr(0, gate.rfind('.')), ".tid2eid"),
                traits_.renames),
            .shape = {architecture.vocab, architecture.experts_per_token},
            .parts = {},
            .own_dtype = DType::kInt32,
            .skip = DeclaredSkip{.reason = SkipReason::kFrozen,
                                 .detail = "a table of experts by token, which "
                                           "training never changes"}};
      },
      out);
}

void VllmLayout::CheckDraft(SizeChecks& checks,
                            const SizeChecks::Divisor& tensor) {
  const Architecture& architecture = context_.model.architecture;
  if (!traits_.draft_has_prefix) return;
  checks.Rows(tensor, kMtpProjection, "rows that join the draft's inputs");
  const SideSpec& side = context_.side;
  const auto refuse = [&](std::string_view found) {
    checks.Report(
        side.mtp.given ? side.mtp.place : side.layout.place,
        absl::StrFormat("%s: vLLM's draft model of %s has one block "
                        "of attention and experts; the model's has "
                        "%s; wanted \"mtp\": false",
                        side.key, architecture.family->model_type, found));
  };
  if (architecture.mtp_layers > architecture.mtp_block) {
    refuse(absl::StrFormat("%d blocks",
                           architecture.mtp_layers / architecture.mtp_block));
  }
  for (int64_t layer = architecture.layers; layer < architecture.all_layers();
       ++layer) {
    if (!table_.At(kMambaIn, layer).empty()) refuse("a Mamba mixer");
    if (!table_.At(kMlpUp, layer).empty()) refuse("a dense MLP");
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
        spec.name = Renamed(spec.name, traits_.renames);
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

void VllmLayout::AddEnd(bool is_read, bool is_built, Buffer buffer,
                        std::vector<BufferId>& out) {
  buffer.name = Renamed(buffer.name, traits_.renames);
  const EndUse unread = is_built ? EndUse::kUnread : EndUse::kAbsent;
  refit::AddEnd(context_, is_read ? EndUse::kRead : unread, std::move(buffer),
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
  const bool reads_embedding = stage == 0 ||
                               (drafts && !traits_.draft_has_prefix) ||
                               (last && HasTiedHead());
  // vLLM builds the tower on each stage.
  const EvenPart tensor_part = {sizes_.tensor, tensor};
  AddTower(context_, table_, traits_.renames,
           {.tower = HasWholeTower(context_) ? EvenPart{} : tensor_part,
            .connector = tensor_part},
           out);
  for (const ParamId id : table_.Params(kFirstStage)) {
    AddEnd(stage == 0, traits_.every_stage != VllmTraits::EveryStage::kNothing,
           WholeTensor(context_, table_.param(id).name, id), out);
  }
  for (const ParamId id : table_.Params(kEmbedding)) {
    Buffer embedding = ServingVocabulary(context_, id, {sizes_.tensor, tensor});
    if (drafts && traits_.draft_has_prefix && stage > 0) {
      Buffer copy = embedding;
      copy.name = "mtp.embed_tokens.weight";
      AddEnd(/*is_read=*/true, /*is_built=*/true, std::move(copy), out);
    }
    AddEnd(reads_embedding,
           traits_.every_stage != VllmTraits::EveryStage::kNothing,
           std::move(embedding), out);
  }

  const EvenPart part = {sizes_.tensor, tensor};
  const auto& replicated = Replicated;
  const auto column_shard = [&](const LayerGroup& group) {
    return ColumnShard(group, group.params[0]->name, part);
  };
  const auto qkv = [&](const LayerGroup& group) {
    return FusedHeads(group, architecture, part);
  };
  const auto row_shard = [&](const LayerGroup& group) {
    return RowShard(group, part);
  };
  const auto fused_down = [&](const LayerGroup& group) {
    return ConcatRows(group, RenameModule(group.params[0]->name,
                                          traits_.query_key_value_down));
  };
  const EvenPart shared_part = HasWholeSharedExperts() ? EvenPart{} : part;
  const auto add = [&](std::initializer_list<ParamRole> roles, auto make) {
    AddLayers(stage, layers, roles, std::nullopt, make, out);
  };

  if (drafts) {
    // Beside the block that is built like a decoder layer.
    const auto add_draft = [&](ParamRole role, auto make) {
      AddLayerStacks(context_, table_,
                     {architecture.layers, architecture.all_layers()}, {role},
                     std::nullopt, make, out);
    };
    add_draft(kMtpEmbeddingNorm, replicated);
    add_draft(kMtpHiddenNorm, replicated);
    add_draft(kMtpProjection, [&](const LayerGroup& group) {
      return traits_.draft_has_prefix ? RowShard(group, part)
                                      : Replicated(group);
    });
    add_draft(kMtpFinalNorm, replicated);
  }
  add({kQuery, kKey, kValue}, qkv);
  add({kQueryBias, kKeyBias, kValueBias}, qkv);
  if (!table_.Params(kQueryDown).empty()) {
    add({kQueryDown, kKeyValueDown}, fused_down);
  } else {
    add({kKeyValueDown}, replicated);
    add({kLatentQuery}, row_shard);
  }
  add({kQueryDownNorm}, replicated);
  add({kQueryUp}, row_shard);
  add({kKeyValueDownNorm}, replicated);
  add({kKeyValueUp}, [&](const LayerGroup& group) {
    return WithPostHook(
        context_, RowShard(group, part),
        {.name = "derive-latent-projections",
         .detail =
             "make W_UV and W_UK_T of the layer's attention from it again"});
  });
  if (architecture.latent.has_value()) {
    const LatentAttention& latent = *architecture.latent;
    const int64_t heads = architecture.heads / part.count;
    add({kKeyValueUp}, [&](const LayerGroup& group) {
      return LatentProjection(group, "W_UV",
                              {heads, latent.key_value_rank, latent.value_dim});
    });
    add({kKeyValueUp}, [&](const LayerGroup& group) {
      return LatentProjection(group, "W_UK_T",
                              {heads, latent.nope_dim, latent.key_value_rank});
    });
  }
  add({kAttentionOutput}, column_shard);
  if (traits_.output_bias) add({kAttentionOutputBias}, replicated);
  add({kAttentionOutputDown}, row_shard);
  add({kAttentionOutputUp}, column_shard);
  add({kQueryNorm}, replicated);
  add({kKeyNorm}, replicated);
  add({kQueryHeadsNorm}, [&](const LayerGroup& group) {
    return QueryHeadsNorm(group, architecture, part);
  });
  add({kKeyHeadsNorm}, [&](const LayerGroup& group) {
    return KeyHeadsNorm(group, architecture, part);
  });
  AddIndexers(/*joined=*/true, std::nullopt, add);
  add({kAttentionSinks}, [&](const LayerGroup& group) {
    return WithPostHook(
        context_, RowPart(*group.params[0], part),
        {.name = "derive-attention-sinks",
         .detail =
             "with the attention backend FLASHINFER make the layer's fp32 copy "
             "of "
             "them again (process_weights_after_loading); others read them"});
  });
  add({kAttentionSinksFp32},
      [&](const LayerGroup& group) { return PaddedSinks(group, part); });
  // The model's first layer computes with a sum that vLLM makes of its own.
  const Range derives = {
      layers.begin, std::min(layers.begin + (stage == 0 ? 1 : 0), layers.end)};
  AddLayers(
      stage, derives, {kHyperAttentionMix}, std::nullopt,
      [&](const LayerGroup& group) {
        return WithPostHook(
            context_, Replicated(group),
            {.name = "derive-hyper-broadcast",
             .detail = "make hc_attn_fn_broadcast of the layer from it again "
                       "(finalize_mhc_broadcast_weights of the model)"});
      },
      out);
  AddLayers(stage, {derives.end, layers.end}, {kHyperAttentionMix},
            std::nullopt, Replicated, out);
  AddServingMixers(architecture, part, add);
  AddMlp(table_, {kMlpGate, kMlpUp, kMlpDown}, part, add);
  for (const ParamRole role :
       {kAttentionNorm, kMlpNorm, kMlpInputNorm, kMlpOutputNorm, kMoeNorm}) {
    add({role}, replicated);
  }
  add({kRouter}, [&](const LayerGroup& group) {
    return Router(context_, group, traits_.fp32_router);
  });
  AddHashTables(layers, out);
  for (const ParamRole role : {kRouterBias, kRouterCorrection, kLatentDown,
                               kLatentUp, kSharedExpertRouter}) {
    add({role}, replicated);
  }
  AddMlp(table_, {kSharedExpertGate, kSharedExpertUp, kSharedExpertDown},
         shared_part, add);
  AddPlainModules(context_, table_, traits_.fused, traits_.renames, part,
                  layers, out);
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
  const std::vector<int32_t>& experts = slice.experts.front();
  const Range held =
      experts.empty() ? Range{} : Range{experts.front(), experts.back() + 1};
  const auto add_stacked = [&](std::initializer_list<ParamRole> roles,
                               MakeSpec make) {
    AddLayers(stage, layers, roles, std::nullopt, make, out);
  };
  AddStackedExperts(module, gate_up_order_, held, part, add_stacked);
  if (!table_.Params(kFusedExpertDown).empty()) {
    AddFusedExperts(context_,
                    {.module = module,
                     .gate_up_bias = "w13_bias",
                     .down_bias = "w2_bias",
                     .order = gate_up_order_},
                    held, part, add_stacked);
  }
  return out;
}

std::vector<BufferId> VllmLayout::NormAndHead(int64_t stage, int64_t tensor) {
  std::vector<BufferId> out;
  const bool last = stage == sizes_.pipeline - 1;
  for (const ParamRole role : {kFinalNorm, kLastStage}) {
    for (const ParamId id : table_.Params(role)) {
      AddEnd(last, traits_.every_stage == VllmTraits::EveryStage::kEnds,
             WholeTensor(context_, table_.param(id).name, id), out);
    }
  }
  // Every stage has these.
  for (const ParamId id : table_.Params(kHyperHead)) {
    AddEnd(last, /*is_built=*/true,
           WholeTensor(context_, table_.param(id).name, id), out);
  }
  const bool has_head =
      traits_.every_stage == VllmTraits::EveryStage::kVocabulary ||
      traits_.every_stage == VllmTraits::EveryStage::kEnds;
  for (const ParamId id : table_.Params(kOutputHead)) {
    AddEnd(last, has_head,
           ServingVocabulary(context_, id, {sizes_.tensor, tensor}), out);
  }
  // The head is the embedding's own tensor and has no name.
  if (!context_.model.architecture.tied || HasTiedHead()) return out;
  for (const ParamId id : table_.Params(kEmbedding)) {
    Buffer head = ServingVocabulary(context_, id, {sizes_.tensor, tensor});
    head.name = TiedHeadName();
    if (last && context_.which == fb::Side::kSource) {
      head = SkippedCopy(
          std::move(head), SkipReason::kTied,
          absl::StrFormat("a copy of the tied %s, which the first stage sends",
                          table_.param(id).name));
    }
    AddEnd(last, has_head, std::move(head), out);
  }
  return out;
}

bool VllmLayout::HasTiedHead() const {
  return context_.model.architecture.tied &&
         context_.side.tie_word_embeddings.value;
}

std::string VllmLayout::TiedHeadName() const {
  for (const Skip& skip : context_.model.skips) {
    if (skip.reason == SkipReason::kTied) return skip.name;
  }
  return "lm_head.weight";
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
  if (context_.model.architecture.experts > 0) {
    layout.requirements = ExpertRequirements(
        context_.side, sizes_.expert_parallel ? sizes_.expert_ranks() : 1);
  }
  return layout;
}

}  // namespace

SideLayout LayOutVllm(const LayoutContext& context) {
  return VllmLayout(context).LayOut();
}

}  // namespace refit
