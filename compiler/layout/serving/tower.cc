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

}  // namespace

bool HasWholeTower(const LayoutContext& context) {
  return context.side.mm_encoder_tp_mode.value == EncoderCut::kData;
}

void CheckTower(const LayoutContext& context, const RoleTable& table,
                const Engine& engine, bool may_be_whole, SizeChecks& checks) {
  const SideSpec& side = context.side;
  const Family& family = *context.model.architecture.family;
  if (side.mm_encoder_tp_mode.given && !context.model.vision) {
    checks.Report(side.mm_encoder_tp_mode.place,
                  "%s.mm_encoder_tp_mode is of a vision tower, and this job "
                  "moves none; wanted \"vision\": true beside it",
                  side.key);
    return;
  }
  if (HasWholeTower(context) && !family.whole_tower) {
    checks.Report(side.mm_encoder_tp_mode.place,
                  "%s.mm_encoder_tp_mode \"data\": engines cut the vision "
                  "tower of %s all the same; wanted \"weights\"",
                  side.key, family.model_type);
    return;
  }
  checks.Parts(engine.On(Axis::kConnector), kTowerConnector);
  if (HasWholeTower(context)) return;
  const auto divides = [&](int64_t count, std::string_view what) {
    checks.Divides(
        engine.On(Axis::kTower), count,
        absl::StrFormat("%s of the vision tower; wanted a divisor%s", what,
                        family.whole_tower && may_be_whole
                            ? ", or \"mm_encoder_tp_mode\": \"data\""
                            : ""));
  };
  divides(context.model.architecture.tower_heads, "attention heads");
  for (const ParamRole role : {kTowerColumn, kTowerHeads, kTowerRow}) {
    const size_t dim = role == kTowerRow ? 1 : 0;
    const int64_t blocks = role == kTowerHeads ? 3 : 1;
    for (const ParamId id : table.Params(role)) {
      if (engine.HoldsWhole(table.param(id))) continue;
      divides(table.param(id).shape[dim] / blocks, "features");
    }
  }
}

}  // namespace refit
