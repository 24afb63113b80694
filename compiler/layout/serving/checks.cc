// What no serving engine can hold, and what its settings ask for in vain.
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/layout/serving/engine.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

using enum ParamRole;

struct Backend {
  std::string_view name;
  std::optional<GateUpOrder> order;  // of a backend that is supported
  std::string_view effect;           // of one that is not
};
constexpr std::array kBackends = {
    Backend{"triton", GateUpOrder::kGateFirst, ""},
    Backend{"flashinfer_cutlass", GateUpOrder::kUpFirst, ""},
    Backend{"auto", std::nullopt, "is the engine's choice"},
    Backend{"aiter", std::nullopt, "shuffles rows and columns"},
    Backend{"cutlass", std::nullopt, "runs on quantized weights only"},
    Backend{"deep_gemm", std::nullopt,
            "requantizes weights and reorders their scales"},
    Backend{"flashinfer_cutedsl", std::nullopt, "interleaves gate and up rows"},
    Backend{"flashinfer_mxfp4", std::nullopt, "shuffles rows and pads them"},
    Backend{"flashinfer_trtllm", std::nullopt,
            "permutes rows into tiles and pads them"},
    Backend{"marlin", std::nullopt, "transposes and repacks weights"},
    Backend{
        "triton_kernel", std::nullopt,
        "transposes weights (written for SGLang's unquantized experts alone)"},
};

void CheckRows(const Engine& engine, bool of_experts, SizeChecks& checks) {
  for (const ServingRow& row : ServingRows()) {
    if ((row.axis == Axis::kExpert) != of_experts || row.cut == Cut::kWhole ||
        !(row.*engine.column).is_held) {
      continue;
    }
    for (const ParamRole role : row.roles) {
      if (FormOf(role).of_prediction) continue;
      checks.Parts(engine.On(row.axis), role);
    }
  }
}

// Experts in one tensor a layer stand in the checkpoint's order alone, and
// alternating rows have no other order: reports other wishes.
void CheckFusedExperts(const LayoutContext& context, const RoleTable& table,
                       const Engine& engine, SizeChecks& checks) {
  if (table.Params(kFusedExpertDown).empty() &&
      table.Params(kStackedExpertDown).empty()) {
    return;
  }
  const SideSpec& side = context.side;
  const std::string_view family = context.model.architecture.family->model_type;
  if (side.experts.given) {
    checks.Report(
        side.experts.place,
        "%s.experts: the experts of %s are placed linearly; wanted no such key",
        side.key, family);
  }
  if (engine.order != GateUpOrder::kGateFirst &&
      !table.Params(kFusedExpertGateUp).empty()) {
    checks.Report(side.moe_backend.place,
                  "%s.moe_backend \"%s\" has no known order of %s's "
                  "alternating gate and up rows; wanted triton",
                  side.key, side.moe_backend.value, family);
  }
}

// Reports what the ranks that cut the tower do not divide, and a key of the
// tower in a job without it, or of one that is always cut.
void CheckTower(const LayoutContext& context, const RoleTable& table,
                const Engine& engine, SizeChecks& checks) {
  const SideSpec& side = context.side;
  const Family& family = *context.model.architecture.family;
  const bool may_be_whole = family.whole_tower && !engine.always_cuts_tower;
  if (side.mm_encoder_tp_mode.given && !context.model.vision) {
    checks.Report(side.mm_encoder_tp_mode.place,
                  "%s.mm_encoder_tp_mode is of a vision tower, and this job "
                  "moves none; wanted \"vision\": true beside it",
                  side.key);
    return;
  }
  if (HasWholeTower(side) && !may_be_whole) {
    checks.Report(side.mm_encoder_tp_mode.place,
                  "%s.mm_encoder_tp_mode \"data\": %s cuts the vision tower of "
                  "%s all the same; wanted \"weights\"",
                  side.key, engine.name, family.model_type);
    return;
  }
  checks.Parts(engine.On(Axis::kConnector), kTowerConnector);
  if (HasWholeTower(side)) return;
  const auto divides = [&](int64_t count, std::string_view what) {
    checks.Divides(
        engine.On(Axis::kTower), count,
        absl::StrFormat(
            "%s of the vision tower; wanted a divisor%s", what,
            may_be_whole ? ", or \"mm_encoder_tp_mode\": \"data\"" : ""));
  };
  divides(context.model.architecture.tower_heads, "attention heads");
  for (const ParamRole role : {kTowerColumn, kTowerHeads, kTowerRow}) {
    for (const ParamId id : table.Params(role)) {
      const Param& param = table.param(id);
      if (engine.HoldsWhole(param)) continue;
      divides(param.shape[role == kTowerRow ? 1 : 0] /
                  (role == kTowerHeads ? 3 : 1),
              "features");
    }
  }
}

}  // namespace

void CheckEngine(const LayoutContext& context, const RoleTable& table,
                 const Engine& engine, SizeChecks& checks) {
  const SideSpec& side = context.side;
  CheckRows(engine, /*of_experts=*/false, checks);
  for (const ParamRole role : {kColumn, kRow}) {
    checks.Parts(engine.On(Axis::kTensor), role);
  }
  checks.Parts(engine.On(Axis::kDraft), kMtpProjection);
  CheckTower(context, table, engine, checks);
  checks.HasExperts(engine.spreads_experts, engine.expert_parallel,
                    "expert_parallel");
  CheckRows(engine, /*of_experts=*/true, checks);
  checks.HasExperts(side.moe_backend.given, side.moe_backend.place,
                    "moe_backend");
  checks.HasExperts(side.router_dtype.given, side.router_dtype.place,
                    "router_dtype");
  CheckFusedExperts(context, table, engine, checks);
  if (engine.has_one_stage) {
    checks.WantsOne("pipeline_parallel", side.pipeline_parallel, engine.name,
                    "has one stage; wanted 1");
  }
}

GateUpOrder CheckMoeBackend(const SideSpec& side, SizeChecks& checks) {
  constexpr GateUpOrder kCheckpoints = GateUpOrder::kGateFirst;
  if (!side.moe_backend.given) return kCheckpoints;
  const std::string& name = side.moe_backend.value;
  std::vector<std::string_view> names;
  for (const Backend& backend : kBackends) {
    names.push_back(backend.name);
    if (backend.name != name) continue;
    if (backend.order.has_value()) return *backend.order;
    checks.Report(
        side.moe_backend.place,
        "%s.moe_backend \"%s\" %s, which a refit cannot write; run the engine "
        "with \"triton\" or \"flashinfer_cutlass\", or leave the key out, "
        "refit tensors in the checkpoint's order and let the engine process "
        "its weights again (process_weights_after_loading)",
        side.key, name, backend.effect);
    return kCheckpoints;
  }
  const std::string nearest = NearestWord(name, names);
  checks.Report(side.moe_backend.place, "%s.moe_backend \"%s\" is unknown; %s",
                side.key, name,
                nearest.empty()
                    ? "wanted \"triton\" or \"flashinfer_cutlass\""
                    : absl::StrFormat("did you mean \"%s\"?", nearest));
  return kCheckpoints;
}

}  // namespace refit
