#include "compiler/layout/serving/tower.h"

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "compiler/layout/common/tensor_stack.h"

namespace refit {
namespace {

using enum ParamRole;

// Appends the rank's part of a param's rows to the spec's tensor.
void AppendRows(const Param& param, EvenPart part, TensorSpec& spec) {
  const int64_t blocks = param.role == kTowerHeads ? 3 : 1;
  const int64_t rows = param.shape[0] / blocks;
  for (int64_t block = 0; block < blocks; ++block) {
    const Range own = EvenShard(rows, part.count, part.index);
    const int64_t before = block * rows;
    spec.parts.push_back(
        RowsPart(param, {before + own.begin, before + own.end}, spec.shape[0]));
    spec.shape[0] += own.size();
  }
}

bool IsWhole(const Param& param, std::string_view whole_in_tower) {
  if (param.role == kTowerWhole || param.role == kTowerPositions) return true;
  return !whole_in_tower.empty() &&
         param.name.find(whole_in_tower) != std::string::npos;
}

EvenPart PartOf(const Param& param, const TowerParts& parts) {
  if (IsWhole(param, parts.whole_in_tower)) return {};
  return param.role == kTowerConnector ? parts.connector : parts.tower;
}

// Of params of one role whose rows stand one after the other in a tensor.
TensorSpec TensorFor(absl::Span<const Param* const> params, std::string name,
                     const TowerParts& parts) {
  const Param& first = *params[0];
  const EvenPart part = PartOf(first, parts);
  if (first.role == kTowerRow) {
    TensorSpec spec = ColumnsOf(first, part);
    spec.name = std::move(name);
    return spec;
  }
  TensorSpec spec = {
      .name = std::move(name), .shape = first.shape, .parts = {}};
  spec.shape[0] = 0;
  for (const Param* param : params) AppendRows(*param, part, spec);
  return spec;
}

}  // namespace

bool HasWholeTower(const LayoutContext& context) {
  return context.side.mm_encoder_tp_mode.value == EncoderCut::kData;
}

void CheckTower(const LayoutContext& context, const RoleTable& table,
                const TowerDivisors& divisors, SizeChecks& checks) {
  const SideSpec& side = context.side;
  const Family& family = *context.model.architecture.family;
  if (side.mm_encoder_tp_mode.given && !context.model.vision) {
    checks.Report(side.mm_encoder_tp_mode.place,
                  absl::StrFormat("%s.mm_encoder_tp_mode is of a vision tower, "
                                  "and this job moves none; wanted \"vision\": "
                                  "true beside it",
                                  side.key));
    return;
  }
  if (HasWholeTower(context) && !family.whole_tower) {
    checks.Report(side.mm_encoder_tp_mode.place,
                  absl::StrFormat("%s.mm_encoder_tp_mode \"data\": engines cut "
                                  "the vision tower of %s all the same; wanted "
                                  "\"weights\"",
                                  side.key, family.model_type));
    return;
  }
  checks.Rows(divisors.connector, kTowerConnector,
              "rows of what joins the vision tower to the language model");
  if (HasWholeTower(context)) return;
  const auto divides = [&](int64_t count, std::string_view what) {
    checks.Divides(
        divisors.tower, count,
        absl::StrFormat("%s of the vision tower; wanted a divisor%s", what,
                        family.whole_tower && divisors.may_be_whole
                            ? ", or \"mm_encoder_tp_mode\": \"data\""
                            : ""));
  };
  divides(context.model.architecture.tower_heads, "attention heads");
  for (const ParamRole role : {kTowerColumn, kTowerHeads, kTowerRow}) {
    const size_t dim = role == kTowerRow ? 1 : 0;
    const int64_t blocks = role == kTowerHeads ? 3 : 1;
    for (const ParamId id : table.Params(role)) {
      if (IsWhole(table.param(id), divisors.whole_in_tower)) continue;
      divides(table.param(id).shape[dim] / blocks, "features");
    }
  }
}

void AddTower(const LayoutContext& context, const RoleTable& table,
              Renames renames, const TowerParts& parts,
              std::vector<BufferId>& out) {
  constexpr std::string_view kQuery = "q_proj";
  const std::vector<Param>& params = context.model.params;
  std::set<std::string_view> done;  // an exclude may have split a stack
  for (size_t i = 0; i < params.size(); ++i) {
    const Param& param = params[i];
    if (!IsTower(param.role) || !done.insert(param.name).second) continue;
    if (param.role == kTowerPositions && parts.add_positions) {
      parts.add_positions(static_cast<ParamId>(i));
      continue;
    }
    const std::string name = Renamed(param.name, renames);
    if (param.index.empty()) {
      const Param* const alone[] = {&param};
      out.push_back(context.buffers.Intern(TensorOf(
          context, TensorFor(alone, name, parts), static_cast<ParamId>(i))));
      continue;
    }
    std::vector<std::string> names = {param.name};
    const std::string_view module = ModuleOf(param.name);
    // One tensor holds all three, and is added at the first.
    if (module == "k_proj" || module == "v_proj") continue;
    const bool fused = module == kQuery;
    if (fused) {
      names.push_back(WithModule(param.name, "k_proj"));
      names.push_back(WithModule(param.name, "v_proj"));
    }
    const std::string into = fused ? WithModule(name, "qkv_proj") : name;
    for (const LayerGroup& group :
         table.GroupNamed(param.role, names, table.Numbers(param.role))) {
      out.push_back(context.buffers.Intern(
          LayerStack(table, TensorFor(group.params, into, parts), group.layers,
                     {.dtype = BufferDType(context.side, *group.params[0]),
                      .experts = std::nullopt})));
    }
  }
}

}  // namespace refit
