// What serving engines of one kind (vLLM, SGLang) share: names from the
// checkpoint's with fused modules renamed, query, key and value in one tensor,
// gate and up in one, the experts of a layer stacked.
#ifndef REFIT_COMPILER_LAYOUT_SERVING_SERVING_H_
#define REFIT_COMPILER_LAYOUT_SERVING_SERVING_H_

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/serving/experts.h"
#include "compiler/model/model.h"

namespace refit {

// Adds the stacks of the layers that have `roles`.
using AddStack = absl::FunctionRef<void(
    std::initializer_list<ParamRole> roles,
    absl::FunctionRef<TensorSpec(const LayerGroup&)> make)>;

// "a.b.q_proj.weight" with the module's own name replaced.
std::string RenameModule(std::string_view name, std::string_view module);

// "a.experts.{1}.w1.weight": "a.experts.".
std::string_view ExpertsPrefix(std::string_view name);

// Vocabulary rows are padded to a multiple of 64, or of 64 times `multiple`.
int64_t ServingVocabularyRows(const Param& param, int64_t multiple = 1);

// A vocabulary matrix under the param's own name.
Buffer ServingVocabulary(const LayoutContext& context, ParamId id,
                         EvenPart part, int64_t multiple = 1);

// Of a group's query, key and value: [query heads; key heads; value heads].
// With more ranks than key-value heads, consecutive ranks hold the same one.
TensorSpec FusedHeads(const LayerGroup& group, const Architecture& architecture,
                      EvenPart part);

// Of a norm over all query heads, or all key-value heads: those of the rank.
TensorSpec QueryHeadsNorm(const LayerGroup& group,
                          const Architecture& architecture, EvenPart part);
TensorSpec KeyHeadsNorm(const LayerGroup& group,
                        const Architecture& architecture, EvenPart part);

// Of a group's gate and up: [gate rows; up rows], or the other way round.
TensorSpec GateAndUp(const LayerGroup& group, std::string name, EvenPart part,
                     GateUpOrder order = GateUpOrder::kGateFirst);

// Adds an MLP: gate and up, or of a model without gates up alone, and down.
struct MlpRoles {
  ParamRole gate;
  ParamRole up;
  ParamRole down;
};
void AddMlp(const RoleTable& table, const MlpRoles& roles, EvenPart part,
            AddStack add);

// Of a group's gate and up of the experts: "w13_weight", gate and up of each.
// `module` stands after "experts.": "" or "routed_experts.".
TensorSpec ExpertGateAndUp(const LayerGroup& group, std::string_view module,
                           EvenPart part, GateUpOrder order);

// Of a group's up of experts without a gate: "w13_weight".
TensorSpec ExpertUp(const LayerGroup& group, std::string_view module,
                    EvenPart part);

// Of a group's down of the experts: "w2_weight".
TensorSpec ExpertDown(const LayerGroup& group, std::string_view module,
                      EvenPart part);

// With the tensor's last two dimensions exchanged.
TensorSpec Transposed(TensorSpec spec);

// What a worker must do to the tensor after a refit; of a source nothing.
TensorSpec WithPostHook(const LayoutContext& context, TensorSpec spec,
                        PostHook hook);

// A router, whole; `fp32`: whatever the side's dtype, unless the side has one
// for routers.
TensorSpec Router(const LayoutContext& context, const LayerGroup& group,
                  bool fp32);

// Indexers of sparse attention, whole on each rank. `joined`: key and weights
// in one tensor. `weights_dtype`: the engine's own.
void AddIndexers(bool joined, std::optional<DType> weights_dtype, AddStack add);

// Modules in attention's place: what the tensor-parallel rank of `part` holds
// of the model's Mamba-2 mixers and gated delta nets.
void AddServingMixers(const Architecture& architecture, EvenPart part,
                      AddStack add);

// Adds what a rank holds of the layers' modules that a file of rules describes
// by how they are cut.
void AddPlainModules(const LayoutContext& context, const RoleTable& table,
                     absl::Span<const Fusion> fused, Renames renames,
                     EvenPart part, Range layers, std::vector<BufferId>& out);

// Experts that the checkpoint holds in one tensor a layer, in x out (gpt_oss,
// llama4).
struct FusedExpertTensors {
  std::string_view module;  // after "experts.": "" or "routed_experts."
  std::string_view gate_up_bias;
  std::string_view down_bias;
  std::optional<DType> bias_dtype = std::nullopt;  // the engine's own
  // Where gate and up do not alternate.
  GateUpOrder order = GateUpOrder::kGateFirst;
};
void AddFusedExperts(const LayoutContext& context,
                     const FusedExpertTensors& tensors, Range experts,
                     EvenPart part, AddStack add);

// Experts that the checkpoint holds in one tensor a layer, out x in (qwen3_5).
void AddStackedExperts(std::string_view module, GateUpOrder order,
                       Range experts, EvenPart part, AddStack add);

// Experts in one tensor a layer stand in the checkpoint's order alone, and
// alternating rows have no other order: reports other wishes.
void CheckFusedExperts(const LayoutContext& context, const RoleTable& table,
                       GateUpOrder order, SizeChecks& checks);

// A group's params, whole, their rows one after the other.
TensorSpec ConcatRows(const LayerGroup& group, std::string name);

// A part of the rows of a group's one param, under its own name.
TensorSpec RowShard(const LayerGroup& group, EvenPart part);

// A part of the columns of a group's one param.
TensorSpec ColumnShard(const LayerGroup& group, std::string name,
                       EvenPart part);

// A group's one param, whole and under its own name.
TensorSpec Replicated(const LayerGroup& group);

// "model.layers.{0}.x" as the draft model of multi-token prediction calls it,
// "model.layers.{0}.mtp_block.x"; other names as they are.
std::string DraftLayerName(std::string name);

// Appends one stack of buffers per group of layers that have `roles`.
void AddLayerStacks(const LayoutContext& context, const RoleTable& table,
                    Range layers, absl::Span<const ParamRole> roles,
                    const std::optional<ExpertSlice>& experts,
                    absl::FunctionRef<TensorSpec(const LayerGroup&)> make_spec,
                    std::vector<BufferId>& out);

// How a pipeline stage has a tensor outside the layers.
enum class EndUse : uint8_t {
  kAbsent,
  kUnread,  // a copy that the stage never reads: a declared skip
  kRead,
};
void AddEnd(const LayoutContext& context, EndUse use, Buffer buffer,
            std::vector<BufferId>& out);

// Reports what `divisor`, the ranks that share each expert, does not divide.
void CheckExpertTensors(SizeChecks& checks, const SizeChecks::Divisor& divisor);

// Reports what `divisor`, the ranks of tensor parallelism, does not divide of
// the dense MLP, and of the shared experts.
void CheckMlp(SizeChecks& checks, const SizeChecks::Divisor& divisor);
void CheckSharedExperts(SizeChecks& checks, const SizeChecks::Divisor& divisor);

// Reports a vocabulary that `divisor` does not divide.
void CheckVocabulary(SizeChecks& checks, const RoleTable& table, ParamRole role,
                     const SizeChecks::Divisor& divisor);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_SERVING_SERVING_H_
