// Serving engines: the tensors of a layer in vLLM and SGLang, a row for each
// and a column for each engine (rows.inc has the rows), what the classes, the
// mesh and the settings of one make of the rows, and of the tensors outside the
// layers.
#ifndef REFIT_COMPILER_LAYOUT_SERVING_ENGINE_H_
#define REFIT_COMPILER_LAYOUT_SERVING_ENGINE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "compiler/layout/common/cut.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/common/stages.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/layout/layout.h"
#include "compiler/model/family.h"
#include "plan/post_hooks.h"

namespace refit {

// The ranks that cut a tensor, or hold it whole together.
enum class Axis : uint8_t {
  kTensor,
  kAttention,  // those that share the heads
  kShared,     // the shared experts
  kDraft,      // what joins the inputs of the draft model
  kExpert,     // an expert
  kEmbedding,
  kHead,
  kTower,      // of vision
  kConnector,  // what joins it to the language model
};
inline constexpr size_t kAxisCount = 9;

struct Engine;

// A tensor of some layers on one rank, as functions of cells change it.
struct HeldTensor {
  const LayoutContext& context;
  const Engine& engine;
  const Param& param;  // the first in it
  EvenPart part;
  TensorSpec& spec;
};

// What a worker must do after a refit.
struct CellHook {
  PostHookName name;
  std::string_view detail;
};

// What one engine makes of a row.
struct Cell {
  enum class Layers : uint8_t { kAll, kFirst, kAllButFirst, kHash };

  bool is_held = true;
  // The tensor's module where it joins params; of experts all behind
  // "experts.". "": the param's own.
  std::string_view module = "";
  std::optional<DType> dtype = std::nullopt;  // whatever the side's is
  ValueForm form = ValueForm::kPlain;
  std::optional<CellHook> hook = std::nullopt;
  bool Engine::*condition = nullptr;  // where the engine has this `wanted`
  bool wanted = true;
  Layers layers = Layers::kAll;
  void (*change)(const HeldTensor& tensor) = nullptr;
};

// The params of `roles` stand one after the other in a tensor of one layer, or
// of one expert. Those that the model has nowhere are left out.
struct ServingRow {
  std::array<ParamRole, 3> roles;  // kOther: none
  Cut cut;
  Axis axis;
  Cell vllm;
  Cell sglang;
};

// In the order of the tensors of both engines; of experts, those of
// Axis::kExpert.
absl::Span<const ServingRow> ServingRows();

// The heads to which the kernels of a backend pad; 0: there are too many.
int64_t PaddedHeads(AttentionBackend backend, int64_t heads);

// How a pipeline stage that never reads a tensor outside the layers has it.
enum class Unread : uint8_t { kAbsent, kDeclaredSkip };

struct Engine {
  std::string_view name;  // as messages call it
  // Which cell of a row is the engine's.
  Cell ServingRow::*column = nullptr;
  // Ranks are data × pipeline × tensor, the last fastest. Those of a stage that
  // share a layer's experts are data × tensor: `experts` groups of neighbors.
  int64_t tensor = 1;
  int64_t pipeline = 1;
  int64_t data = 1;
  int64_t replicas = 1;
  int64_t experts = 1;
  bool spreads_experts = false;  // so that the job may say which rank has which
  Place expert_parallel = {};    // the key that spreads them
  bool has_one_stage = false;    // whatever the job says
  // By Axis: how many ranks cut, as a message names it.
  std::array<SizeChecks::Divisor, kAxisCount> axes = {};

  Renames renames = {};
  absl::Span<const Fusion> fused = {};
  std::string_view query_key_value_down = "";  // "": the row's
  std::string_view experts_module = "";        // behind "experts."
  bool has_output_bias = true;
  bool joins_indexers = true;
  bool fuses_shared_experts = false;  // into the tensors of the experts
  bool fp32_router = false;
  bool caches_router = false;  // in an fp32 copy
  GateUpOrder order = GateUpOrder::kGateFirst;
  bool transposes_experts = false;

  Unread first = Unread::kAbsent;  // what only the first stage reads
  Unread embedding = Unread::kAbsent;
  Unread final_norm = Unread::kAbsent;  // and what only the last stage reads
  Unread head = Unread::kAbsent;
  bool has_hyper_heads = false;
  bool shares_embedding = false;  // a tied head has no tensor of its own
  bool pads_embedding = true;
  bool draft_has_prefix = false;  // names of its own
  bool cuts_tower_positions = false;
  bool always_cuts_tower = false;        // whatever the mode
  std::string_view whole_in_tower = "";  // see SglangTraits

  SizeChecks::Divisor& On(Axis axis) { return axes[static_cast<size_t>(axis)]; }
  const SizeChecks::Divisor& On(Axis axis) const {
    return axes[static_cast<size_t>(axis)];
  }
  // Whether each rank has a module of the vision tower whole that others cut.
  bool HoldsWhole(const Param& param) const {
    return !whole_in_tower.empty() &&
           param.name.find(whole_in_tower) != std::string::npos;
  }
  // What a rank holds of a tensor that `axis` cuts.
  EvenPart PartOf(Axis axis, int64_t rank) const {
    const int64_t count = On(axis).value;
    return {.count = count, .index = rank % count};
  }
};

// Whether each rank holds the vision tower whole.
inline bool HasWholeTower(const SideSpec& side) {
  return side.mm_encoder_tp_mode.value == EncoderCut::kData;
}

// The order that `side.moe_backend` keeps; of no backend, the checkpoint's.
// Reports backends that keep no order which a refit could write, and names that
// are none.
GateUpOrder CheckMoeBackend(const SideSpec& side, SizeChecks& checks);

// Reports what the axes do not divide, and settings of parts that the model or
// the engine lacks.
void CheckEngine(const LayoutContext& context, const RoleTable& table,
                 const Engine& engine, SizeChecks& checks);

// The rows of a vocabulary, padded to a multiple of 64 or of some more.
inline int64_t PaddedVocabulary(const Param& param, int64_t times = 1) {
  const int64_t unit = 64 * times;
  return (param.shape[0] + unit - 1) / unit * unit;
}

// What each of the `ranks` ranks that share the experts of a layer holds of
// them, as `side.experts` places them, else linearly; without such ranks (0),
// one slice that holds all. Reports a placement that does not fit.
std::vector<ExpertSlice> PlaceExperts(const LayoutContext& context,
                                      const RoleTable& table, int64_t ranks,
                                      SizeChecks& checks);

// What an engine of `side` must be set to, since tensors of other experts, or
// with rows in another order, have the same shapes. Requires a model with
// experts. `expert_ranks`: ranks that share the experts of a layer, 1 without
// expert parallelism.
std::map<std::string, std::string> ExpertRequirements(const SideSpec& side,
                                                      int64_t expert_ranks);

// Lists the ranks of the engine and its replicas, whose layers `split` deals to
// stages. Reports experts that cannot be placed, and lists nothing after a
// report of `checks` or without a split.
SideLayout LayOutEngine(const LayoutContext& context, const RoleTable& table,
                        const Engine& engine,
                        const std::optional<PipelineSplit>& split,
                        SizeChecks& checks);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_SERVING_ENGINE_H_
