#include "compiler/layout/serving/experts.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "compiler/layout/common/shard.h"
#include "plan/nearest_word.h"

namespace refit {
namespace {

using Experts = std::vector<int32_t>;

// The physical experts of each rank: consecutive ones, one more to the first
// ranks if they do not divide.
std::vector<Experts> DealLinearly(const Experts& physical, int64_t ranks) {
  std::vector<Experts> dealt;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Range shard =
        LinearShard(static_cast<int64_t>(physical.size()), ranks, rank);
    dealt.emplace_back(physical.begin() + shard.begin,
                       physical.begin() + shard.end);
  }
  return dealt;
}

std::vector<Experts> DealInTurn(int64_t experts, int64_t ranks) {
  std::vector<Experts> dealt(ranks);
  for (int64_t expert = 0; expert < experts; ++expert) {
    dealt[expert % ranks].push_back(static_cast<int32_t>(expert));
  }
  return dealt;
}

// The physical experts that engines start with: each expert in order, then the
// redundant ones from the first expert on.
Experts InitialExperts(int64_t experts, int64_t redundant) {
  Experts physical;
  for (int64_t i = 0; i < experts + redundant; ++i) {
    physical.push_back(static_cast<int32_t>(i % experts));
  }
  return physical;
}

// What is wrong with a list of a table; nullopt: nothing.
std::optional<std::string> WrongList(const std::vector<int64_t>& list,
                                     int64_t experts, int64_t ranks) {
  const auto physical = static_cast<int64_t>(list.size());
  if (physical % ranks != 0) {
    return absl::StrFormat(
        "has %d physical experts; wanted a multiple of the %d ranks that share "
        "the experts of a layer",
        physical, ranks);
  }
  std::vector<bool> placed(experts, false);
  for (const int64_t expert : list) {
    if (expert >= experts) {
      return absl::StrFormat("names expert %d; the model has %d", expert,
                             experts);
    }
    placed[expert] = true;
  }
  const auto absent = std::find(placed.begin(), placed.end(), false);
  if (absent == placed.end()) return std::nullopt;
  return absl::StrFormat("does not name expert %d", absent - placed.begin());
}

// The layers with experts, ascending.
std::vector<int32_t> ExpertLayers(const LayoutContext& context,
                                  const RoleTable& table) {
  std::vector<int32_t> layers;
  for (int32_t layer = 0; layer < context.model.architecture.all_layers();
       ++layer) {
    if (!table.At(ParamRole::kExpertDown, layer).empty()) {
      layers.push_back(layer);
    }
  }
  return layers;
}

// The list of each layer, or the one list of all; empty after an error.
std::vector<Experts> ListsByLayer(const LayoutContext& context,
                                  const RoleTable& table, int64_t ranks,
                                  SizeChecks& checks) {
  const SideSpec& side = context.side;
  const std::vector<std::vector<int64_t>>& lists =
      side.experts.value.physical_to_logical;
  const std::string path =
      absl::StrFormat("%s.experts.physical_to_logical", side.key);
  const auto report = [&](std::string message) {
    checks.Report(side.experts.place, std::move(message));
    return std::vector<Experts>{};
  };
  std::vector<Experts> found;
  for (size_t i = 0; i < lists.size(); ++i) {
    const std::string name =
        lists.size() == 1 ? path : absl::StrFormat("%s[%d]", path, i);
    const std::optional<std::string> wrong =
        WrongList(lists[i], context.model.architecture.experts, ranks);
    if (wrong.has_value()) {
      return report(absl::StrFormat("%s %s", name, *wrong));
    }
    if (lists[i].size() != lists[0].size()) {
      return report(
          absl::StrFormat("%s has %d physical experts and %s[0] %d; wanted as "
                          "many in each layer",
                          name, lists[i].size(), path, lists[0].size()));
    }
    found.emplace_back(lists[i].begin(), lists[i].end());
  }

  const auto layers =
      static_cast<size_t>(context.model.architecture.all_layers());
  const Experts with_experts = ExpertLayers(context, table);
  if (found.size() <= 1 || found.size() == layers) return found;
  if (found.size() != with_experts.size()) {
    return report(absl::StrFormat(
        "%s has %d lists; wanted 1, or one for each of %d layers with experts, "
        "or of all %d",
        path, found.size(), with_experts.size(), layers));
  }
  // What stands at the other layers is never looked at.
  std::vector<Experts> by_layer(layers, found[0]);
  for (size_t i = 0; i < with_experts.size(); ++i) {
    by_layer[with_experts[i]] = found[i];
  }
  return by_layer;
}

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

std::vector<ExpertSlice> PlaceExperts(const LayoutContext& context,
                                      const RoleTable& table, int64_t ranks,
                                      SizeChecks& checks) {
  const SideSpec& side = context.side;
  const ExpertPlacement& placement = side.experts.value;
  const int64_t experts = context.model.architecture.experts;
  if (ranks == 0 && side.experts.given) {
    checks.Report(
        side.experts.place,
        "%s.experts places experts on ranks; wanted expert_parallel beside it",
        side.key);
  }

  // By layer (or for all of them), by rank.
  std::vector<std::vector<Experts>> dealt;
  if (ranks == 0 || experts == 0) {
    ranks = std::max<int64_t>(ranks, 1);
    dealt.emplace_back(ranks, InitialExperts(experts, 0));
  } else if (placement.kind == ExpertPlacement::Kind::kRoundRobin) {
    dealt.push_back(DealInTurn(experts, ranks));
  } else if (placement.kind == ExpertPlacement::Kind::kLinear) {
    const int64_t physical = experts + placement.redundant_experts;
    if (placement.redundant_experts > 0 && physical % ranks != 0) {
      checks.Report(
          side.experts.place,

          "%s.experts.num_redundant_experts %d makes %d physical experts; "
          "wanted a multiple of the %d ranks that share the experts of a layer",
          side.key, placement.redundant_experts, physical, ranks);
    }
    dealt.push_back(DealLinearly(
        InitialExperts(experts, placement.redundant_experts), ranks));
  } else {
    for (const Experts& list : ListsByLayer(context, table, ranks, checks)) {
      dealt.push_back(DealLinearly(list, ranks));
    }
  }

  std::vector<ExpertSlice> slices(ranks, {.experts = {}, .in_name = false});
  for (std::vector<Experts>& by_rank : dealt) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      slices[rank].experts.push_back(std::move(by_rank[rank]));
    }
  }
  return slices;
}

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

void CheckFusedExperts(const LayoutContext& context, const RoleTable& table,
                       GateUpOrder order, SizeChecks& checks) {
  if (table.Params(ParamRole::kFusedExpertDown).empty() &&
      table.Params(ParamRole::kStackedExpertDown).empty()) {
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
  if (order != GateUpOrder::kGateFirst &&
      !table.Params(ParamRole::kFusedExpertGateUp).empty()) {
    checks.Report(side.moe_backend.place,
                  "%s.moe_backend \"%s\" has no known order of %s's "
                  "alternating gate and up rows; wanted triton",
                  side.key, side.moe_backend.value, family);
  }
}

}  // namespace refit
