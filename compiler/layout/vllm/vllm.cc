// vLLM: the canonical (checkpoint-ordered) layout of its linear, vocabulary
// and fused-MoE layers. README.md beside it holds the formulas and where they
// come from; serving/rows.inc has its tensors.
#include <optional>
#include <string_view>

#include "absl/strings/str_format.h"
#include "compiler/job/version.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/common/stages.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/serving/engine.h"

namespace refit {
namespace {

using enum ParamRole;

class Vllm {
 public:
  explicit Vllm(const LayoutContext& context) : context_(context) {}

  SideLayout LayOut();

 private:
  // What the engine makes of its rows, and of the tensors beside them.
  Engine EngineOf();
  // Sets the axes of the engine.
  void Cut(Engine& engine);

  // Report what vLLM does not do, and settings that it does not heed.
  void Check(const Engine& engine);
  void CheckRoundRobin(const Engine& engine);
  void CheckDraft();
  void CheckAttentionBackend();
  void CheckSettings();

  std::string_view family() const { return architecture_.family->model_type; }

  const LayoutContext& context_;
  const SideSpec& side_ = context_.side;
  const Architecture& architecture_ = context_.model.architecture;
  const VllmTraits& traits_ = architecture_.family->vllm;
  const RoleTable table_{context_.model};
  SizeChecks checks_{context_, table_};
};

void Vllm::Cut(Engine& engine) {
  const SizeChecks::Divisor tensor =
      checks_.Named("tensor_parallel", side_.tensor_parallel);
  for (const Axis axis : {Axis::kTensor, Axis::kAttention, Axis::kEmbedding,
                          Axis::kHead, Axis::kConnector}) {
    engine.On(axis) = tensor;
  }
  if (!HasWholeTower(side_)) engine.On(Axis::kTower) = tensor;
  if (traits_.draft_has_prefix) engine.On(Axis::kDraft) = tensor;
  // Where each rank runs a part of the tokens through the experts, it has all
  // of the shared ones.
  const bool shares_tokens =
      engine.spreads_experts && engine.tensor > 1 && engine.data > 1;
  const bool has_whole_shared =
      shares_tokens && !traits_.cuts_shared_experts_of_token_parts &&
      (engine.pipeline == 1 || !traits_.token_parts_on_one_stage);
  if (!has_whole_shared) engine.On(Axis::kShared) = tensor;
  // Experts are whole and spread over data x tensor, or cut by it.
  if (engine.spreads_experts) return;
  SizeChecks::Divisor& expert = engine.On(Axis::kExpert);
  expert = tensor;
  if (engine.data == 1) return;
  expert.text =
      absl::StrFormat("%s x data_parallel %d", tensor.text, engine.data);
  expert.value *= engine.data;
}

Engine Vllm::EngineOf() {
  using EveryStage = VllmTraits::EveryStage;
  Engine engine;
  engine.name = "vLLM";
  engine.column = &ServingRow::vllm;
  engine.tensor = side_.tensor_parallel.value;
  engine.pipeline = side_.pipeline_parallel.value;
  engine.data = side_.data_parallel.value;
  engine.replicas = side_.replicas.value;
  engine.spreads_experts = side_.expert_parallel_enabled.value;
  engine.expert_parallel = side_.expert_parallel_enabled.place;
  engine.has_one_stage = !traits_.pipeline_parallel;
  if (engine.spreads_experts) engine.experts = engine.data * engine.tensor;
  Cut(engine);
  engine.renames = traits_.renames;
  engine.fused = traits_.fused;
  engine.query_key_value_down = traits_.query_key_value_down;
  if (IsSince(side_, {0, 24})) engine.experts_module = "routed_experts.";
  engine.has_output_bias = traits_.output_bias;
  engine.fp32_router = traits_.fp32_router;
  engine.order = CheckMoeBackend(side_, checks_);
  const auto unread = [&](bool is_built) {
    return is_built ? Unread::kDeclaredSkip : Unread::kAbsent;
  };
  const EveryStage every = traits_.every_stage;
  engine.first = engine.embedding = unread(every != EveryStage::kNothing);
  engine.final_norm = unread(every == EveryStage::kEnds);
  engine.head =
      unread(every == EveryStage::kVocabulary || every == EveryStage::kEnds);
  engine.has_hyper_heads = true;
  engine.shares_embedding =
      architecture_.tied && side_.tie_word_embeddings.value;
  engine.draft_has_prefix = traits_.draft_has_prefix;
  return engine;
}

void Vllm::CheckRoundRobin(const Engine& engine) {
  if (!engine.spreads_experts ||
      side_.experts.value.kind != ExpertPlacement::Kind::kRoundRobin ||
      architecture_.experts == 0 || architecture_.expert_groups != 1 ||
      architecture_.family->of_file) {
    return;
  }
  checks_.Report(
      side_.experts.place,
      "%s.experts.placement is \"round_robin\": vLLM places the experts of %s "
      "linearly all the same, because its router chooses among all experts "
      "(n_group is not 2 or more); wanted \"linear\"",
      side_.key, family());
}

void Vllm::CheckDraft() {
  if (!traits_.draft_has_prefix) return;
  const auto refuse = [&](std::string_view found) {
    checks_.Report(side_.mtp.given ? side_.mtp.place : side_.layout.place,
                   "%s: vLLM's draft model of %s has one block of attention "
                   "and experts; the model's has %s; wanted \"mtp\": false",
                   side_.key, family(), found);
  };
  if (architecture_.mtp_layers > architecture_.mtp_block) {
    refuse(absl::StrFormat("%d blocks",
                           architecture_.mtp_layers / architecture_.mtp_block));
  }
  for (int64_t layer = architecture_.layers; layer < architecture_.all_layers();
       ++layer) {
    if (!table_.At(kMambaIn, layer).empty()) refuse("a Mamba mixer");
    if (!table_.At(kMlpUp, layer).empty()) refuse("a dense MLP");
  }
}

void Vllm::CheckAttentionBackend() {
  const Located<AttentionBackend>& backend = side_.attention_backend;
  if (table_.Params(kAttentionSinksFp32).empty()) {
    if (!backend.given) return;
    checks_.Report(backend.place,
                   "%s.attention_backend: the tensors of %s do not depend on "
                   "it; wanted no such key",
                   side_.key, family());
    return;
  }
  const SizeChecks::Divisor tensor =
      checks_.Named("tensor_parallel", side_.tensor_parallel);
  const int64_t heads = architecture_.heads / tensor.value;
  if (!checks_.ok() || PaddedHeads(backend.value, heads) > 0) return;
  checks_.Report(
      tensor.place,
      "%s leaves %d attention heads to a rank; vLLM's kernels have at most 128",
      tensor.text, heads);
}

void Vllm::CheckSettings() {
  const Located<bool>& ties = side_.tie_word_embeddings;
  if (ties.given && ties.value && !architecture_.tied) {
    checks_.Report(ties.place,
                   "%s.tie_word_embeddings is true, and this %s is not tied; "
                   "wanted no such key",
                   side_.key, family());
  }
  CheckAttentionBackend();
  if (side_.quantized.given && !traits_.block_scales) {
    checks_.Report(
        side_.quantized.place,
        "%s.dtype %s: vLLM reorders the scales of %s after loading (wo_a, by "
        "DeepGEMM) or has its experts in MXFP4; wanted bf16",
        side_.key, side_.quantized.value.name, family());
  }
  if (side_.version.given && VersionNumbers(side_.version.value).size() < 2) {
    checks_.Report(side_.version.place,
                   "%s.version \"%s\" is not a version; wanted one like 0.25",
                   side_.key, side_.version.value);
  }
}

void Vllm::Check(const Engine& engine) {
  CheckEngine(context_, table_, engine, checks_);
  for (const ParamRole role : {kEmbedding, kOutputHead}) {
    for (const ParamId id : table_.Params(role)) {
      checks_.Divides(engine.On(Axis::kEmbedding),
                      PaddedVocabulary(table_.param(id)),
                      "vocabulary rows (padded to a multiple of 64)");
    }
  }
  CheckRoundRobin(engine);
  CheckDraft();
  CheckSettings();
}

SideLayout Vllm::LayOut() {
  if (!CheckRoles(context_)) return {};
  const Engine engine = EngineOf();
  Check(engine);
  return LayOutEngine(
      context_, table_, engine,
      SplitServingLayers(side_, architecture_.layers,
                         /*remainder_ends_before=*/1, context_.diagnostics),
      checks_);
}

}  // namespace

SideLayout LayOutVllm(const LayoutContext& context) {
  return Vllm(context).LayOut();
}

}  // namespace refit
