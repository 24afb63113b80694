// The experts of a serving engine: which of them each rank holds.
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/serving/engine.h"

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
    using enum ExpertPlacement::Kind;
    const ExpertPlacement::Kind kind = side.experts.value.kind;
    requirements["expert_placement"] = kind == kLinear       ? "linear"
                                       : kind == kRoundRobin ? "round_robin"
                                                             : "table";
  }
  return requirements;
}

}  // namespace refit
