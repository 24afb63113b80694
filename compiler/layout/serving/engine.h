// A serving engine of a side: what its classes, its mesh and its settings make
// of the rows of serving/rows.h, and of the tensors outside the layers.
#ifndef REFIT_COMPILER_LAYOUT_SERVING_ENGINE_H_
#define REFIT_COMPILER_LAYOUT_SERVING_ENGINE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/types/span.h"
#include "compiler/layout/common/cut.h"
#include "compiler/layout/common/role_table.h"
#include "compiler/layout/common/sizes.h"
#include "compiler/layout/common/stages.h"
#include "compiler/layout/layout.h"
#include "compiler/layout/serving/rows.h"
#include "compiler/model/family.h"

namespace refit {

// How a pipeline stage that never reads a tensor outside the layers has it.
enum class Unread : uint8_t { kAbsent, kDeclaredSkip };

struct Engine {
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

// Report what the axes do not divide: of layers, and of their experts.
void CheckLayers(const Engine& engine, SizeChecks& checks);
void CheckExperts(const Engine& engine, SizeChecks& checks);

// Reports a vocabulary that the axis does not divide.
void CheckVocabulary(const SizeChecks::Divisor& divisor, const RoleTable& table,
                     SizeChecks& checks);

// Lists the ranks of the engine and its replicas, whose layers `split` deals to
// stages. Reports experts that cannot be placed, and lists nothing after a
// report of `checks` or without a split.
SideLayout LayOutEngine(const LayoutContext& context, const RoleTable& table,
                        const Engine& engine,
                        const std::optional<PipelineSplit>& split,
                        SizeChecks& checks);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_SERVING_ENGINE_H_
