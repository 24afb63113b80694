#include "compiler/layout/moe_backend.h"

#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

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

}  // namespace

std::map<std::string, std::string> ExpertRequirements(const SideSpec& side,
                                                      int64_t expert_ranks) {
  std::map<std::string, std::string> requirements;
  requirements["moe_backend"] =
      side.moe_backend.given ? side.moe_backend.value : "triton";
  if (expert_ranks > 1) {
    switch (side.experts.value.kind) {
      case ExpertPlacement::Kind::kLinear:
        requirements["expert_placement"] = "linear";
        break;
      case ExpertPlacement::Kind::kRoundRobin:
        requirements["expert_placement"] = "round_robin";
        break;
      case ExpertPlacement::Kind::kTable:
        requirements["expert_placement"] = "table";
        break;
    }
  }
  return requirements;
}

GateUpOrder CheckMoeBackend(const SideSpec& side, SizeChecks& checks) {
  constexpr GateUpOrder kCheckpoints = GateUpOrder::kGateFirst;
  if (!side.moe_backend.given) return kCheckpoints;
  const std::string& name = side.moe_backend.value;
  checks.HasExperts(true, side.moe_backend.place, "moe_backend");
  std::vector<std::string_view> names;
  for (const Backend& backend : kBackends) {
    names.push_back(backend.name);
    if (backend.name != name) continue;
    if (backend.order.has_value()) return *backend.order;
    checks.Report(
        side.moe_backend.place,
        absl::StrFormat(
            "%s.moe_backend \"%s\" %s, which a refit cannot write; run the "
            "engine with \"triton\" or \"flashinfer_cutlass\", or leave the "
            "key out, refit tensors in the checkpoint's order and let the "
            "engine process its weights again (process_weights_after_loading)",
            side.key, name, backend.effect));
    return kCheckpoints;
  }
  const std::string nearest = NearestWord(name, names);
  checks.Report(
      side.moe_backend.place,
      absl::StrFormat("%s.moe_backend \"%s\" is unknown; %s", side.key, name,
                      nearest.empty()
                          ? "wanted \"triton\" or \"flashinfer_cutlass\""
                          : absl::StrFormat("did you mean \"%s\"?", nearest)));
  return kCheckpoints;
}

}  // namespace refit
