#include "tests/property/generic_side.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace refit {
namespace {

using Indices = std::vector<int64_t>;

// torch.chunk(values, count)[index]; what is beyond the last chunk is empty.
Indices Chunk(const Indices& values, int64_t count, int64_t index) {
  const auto size = static_cast<int64_t>(values.size());
  const int64_t share = (size + count - 1) / count;
  Indices chunk;
  for (int64_t i = index * share; i < std::min((index + 1) * share, size);
       ++i) {
    chunk.push_back(values[i]);
  }
  return chunk;
}

// What stays of a dimension on the mesh coordinate `index` of `count`.
Indices Keep(const Indices& values, const GenericPlacement& placement,
             int64_t count, int64_t index) {
  switch (placement.kind) {
    case GenericPlacement::Kind::kReplicate:
      return values;
    case GenericPlacement::Kind::kShard:
      return Chunk(values, count, index);
    case GenericPlacement::Kind::kStridedShard: {
      Indices kept;
      for (int64_t split = 0; split < placement.split_factor; ++split) {
        const Indices part =
            Chunk(Chunk(values, placement.split_factor, split), count, index);
        kept.insert(kept.end(), part.begin(), part.end());
      }
      return kept;
    }
  }
  return {};
}

std::string PlacementText(const GenericPlacement& placement) {
  switch (placement.kind) {
    case GenericPlacement::Kind::kReplicate:
      return "Replicate";
    case GenericPlacement::Kind::kShard:
      return absl::StrFormat("Shard(%d)", placement.dim);
    case GenericPlacement::Kind::kStridedShard:
      return absl::StrFormat("StridedShard(%d, split_factor=%d)", placement.dim,
                             placement.split_factor);
  }
  return "";
}

// The elements of `tensor` that the mesh coordinate holds, in their order.
PhysicalTensor Shard(const LogicalTensor& tensor, int32_t number,
                     const GenericRule& rule, const GenericMesh& mesh,
                     int64_t position) {
  std::vector<Indices> kept(tensor.shape.size());
  for (size_t dim = 0; dim < kept.size(); ++dim) {
    kept[dim].resize(tensor.shape[dim]);
    std::iota(kept[dim].begin(), kept[dim].end(), 0);
  }
  int64_t ranks_per_step = Product(mesh.sizes);
  for (size_t axis = 0; axis < mesh.sizes.size(); ++axis) {
    ranks_per_step /= mesh.sizes[axis];
    const GenericPlacement& placement = rule.placements[axis];
    if (placement.kind == GenericPlacement::Kind::kReplicate) continue;
    kept[placement.dim] = Keep(kept[placement.dim], placement, mesh.sizes[axis],
                               position / ranks_per_step % mesh.sizes[axis]);
  }

  PhysicalTensor shard = {
      .name = rule.rename.empty()
                  ? tensor.name
                  : absl::StrReplaceAll(rule.rename, {{"{name}", tensor.name}}),
      .dtype = tensor.dtype,
      .shape = {},
      .cells = {{.tensor = number, .element = 0}}};
  for (size_t dim = 0; dim < kept.size(); ++dim) {
    shard.shape.push_back(static_cast<int64_t>(kept[dim].size()));
    std::vector<Cell> cells;
    for (const Cell& outer : shard.cells) {
      for (const int64_t index : kept[dim]) {
        cells.push_back({.tensor = number,
                         .element = outer.element * tensor.shape[dim] + index});
      }
    }
    shard.cells = std::move(cells);
  }
  return shard;
}

// Sizes of up to three axes with the product `ranks`.
std::vector<int64_t> DrawAxes(Draw& draw, int64_t ranks) {
  std::vector<int64_t> sizes;
  const int64_t axes = draw.Between(1, 3);
  for (int64_t axis = 1; axis < axes; ++axis) {
    std::vector<int64_t> divisors;
    for (int64_t d = 1; d <= ranks; ++d) {
      if (ranks % d == 0) divisors.push_back(d);
    }
    sizes.push_back(draw.Pick(divisors));
    ranks /= sizes.back();
  }
  sizes.push_back(ranks);
  draw.Shuffle(sizes);
  return sizes;
}

// Meshes that hold all of `ranks` ranks: one of all, or stages, and perhaps one
// more over some of them.
std::vector<GenericMesh> DrawMeshes(Draw& draw, int64_t ranks) {
  std::vector<int64_t> order(ranks);
  std::iota(order.begin(), order.end(), 0);
  if (draw.Chance(60)) draw.Shuffle(order);
  std::vector<GenericMesh> meshes;
  const auto add = [&](int64_t begin, int64_t end) {
    meshes.push_back({.name = absl::StrCat("mesh", meshes.size()),
                      .sizes = DrawAxes(draw, end - begin),
                      .ranks = {order.begin() + begin, order.begin() + end}});
  };
  const int64_t stages =
      draw.Chance(50) ? 1 : draw.Between(1, std::min<int64_t>(ranks, 4));
  for (int64_t stage = 0; stage < stages; ++stage) {
    add(stage * ranks / stages, (stage + 1) * ranks / stages);
  }
  if (draw.Chance(40)) {
    draw.Shuffle(order);
    add(0, draw.Between(1, ranks));
  }
  return meshes;
}

std::vector<GenericPlacement> DrawPlacements(Draw& draw,
                                             const GenericMesh& mesh,
                                             size_t dims) {
  std::vector<GenericPlacement> placements(mesh.sizes.size());
  for (GenericPlacement& placement : placements) {
    if (dims == 0 || draw.Chance(30)) continue;
    placement.dim = draw.Between(0, static_cast<int64_t>(dims) - 1);
    placement.kind = GenericPlacement::Kind::kShard;
    if (draw.Chance(25)) {
      placement.kind = GenericPlacement::Kind::kStridedShard;
      placement.split_factor = draw.Between(1, 4);
    }
  }
  return placements;
}

}  // namespace

std::string StarPattern(const std::string& name) {
  std::vector<std::string> components = absl::StrSplit(name, '.');
  for (std::string& component : components) {
    if (!component.empty() &&
        component.find_first_not_of("0123456789") == std::string::npos) {
      component = "*";
    }
  }
  return absl::StrJoin(components, ".");
}

bool StarMatches(const std::string& pattern, const std::string& name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] != '*') {
    return !name.empty() && name[0] == pattern[0] &&
           StarMatches(pattern.substr(1), name.substr(1));
  }
  for (size_t skipped = 0; skipped <= name.size(); ++skipped) {
    if (StarMatches(pattern.substr(1), name.substr(skipped))) return true;
  }
  return false;
}

std::string SideText(const GenericSide& side) {
  std::vector<std::string> meshes;
  for (const GenericMesh& mesh : side.meshes) {
    std::vector<std::string> axes;
    for (size_t axis = 0; axis < mesh.sizes.size(); ++axis) {
      axes.push_back(absl::StrFormat("\"axis%d\": %d", axis, mesh.sizes[axis]));
    }
    meshes.push_back(absl::StrFormat(
        "\"%s\": {\"axes\": {%s}, \"ranks\": [%s]}", mesh.name,
        absl::StrJoin(axes, ", "), absl::StrJoin(mesh.ranks, ", ")));
  }
  std::vector<std::string> rules;
  for (const GenericRule& rule : side.rules) {
    std::vector<std::string> placements;
    for (const GenericPlacement& placement : rule.placements) {
      placements.push_back(absl::StrCat("\"", PlacementText(placement), "\""));
    }
    std::string text = absl::StrFormat(
        "{\"match\": \"%s\", \"mesh\": \"%s\", \"placements\": [%s]",
        rule.match, side.meshes[rule.mesh].name,
        absl::StrJoin(placements, ", "));
    if (!rule.rename.empty()) {
      absl::StrAppendFormat(&text, ", \"rename\": \"%s\"", rule.rename);
    }
    if (!rule.dtype.empty()) {
      absl::StrAppendFormat(&text, ", \"dtype\": \"%s\"", rule.dtype);
    }
    rules.push_back(text + "}");
  }
  std::string text = absl::StrFormat(
      "{\"layout\": \"generic\",\n  \"meshes\": {%s},\n  \"tensors\": [%s]",
      absl::StrJoin(meshes, ",\n    "), absl::StrJoin(rules, ",\n    "));
  if (!side.dtype.empty()) {
    absl::StrAppendFormat(&text, ",\n  \"dtype\": \"%s\"", side.dtype);
  }
  return text + "}";
}

PhysicalSide LayOutSide(const GenericSide& side,
                        const std::vector<LogicalTensor>& tensors) {
  PhysicalSide ranks;
  for (const GenericMesh& mesh : side.meshes) {
    for (const int64_t rank : mesh.ranks) {
      ranks.resize(std::max<size_t>(ranks.size(), rank + 1));
    }
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto rule =
        std::find_if(side.rules.begin(), side.rules.end(),
                     [&](const GenericRule& candidate) {
                       return StarMatches(candidate.match, tensors[i].name);
                     });
    if (rule == side.rules.end()) continue;
    const GenericMesh& mesh = side.meshes[rule->mesh];
    for (size_t position = 0; position < mesh.ranks.size(); ++position) {
      PhysicalTensor shard = Shard(tensors[i], static_cast<int32_t>(i), *rule,
                                   mesh, static_cast<int64_t>(position));
      if (!side.dtype.empty()) shard.dtype = side.dtype;
      if (!rule->dtype.empty()) shard.dtype = rule->dtype;
      ranks[mesh.ranks[position]].push_back(std::move(shard));
    }
  }
  return ranks;
}

GenericSide DrawGenericSide(Draw& draw,
                            const std::vector<LogicalTensor>& tensors,
                            int64_t ranks_max) {
  GenericSide side;
  side.meshes = DrawMeshes(draw, draw.Between(1, ranks_max));
  const auto add_rule = [&](std::string match, size_t dims) {
    const auto mesh = static_cast<size_t>(
        draw.Between(0, static_cast<int64_t>(side.meshes.size()) - 1));
    side.rules.push_back(
        {.match = std::move(match),
         .mesh = mesh,
         .placements = DrawPlacements(draw, side.meshes[mesh], dims),
         .rename = draw.Chance(20)
                       ? absl::StrCat("own", side.rules.size(), ".{name}")
                       : "",
         .dtype = ""});
  };
  // The first match counts: rules of single tensors, then of the tensors with
  // a number in common, then of whole families.
  std::vector<const LogicalTensor*> families;
  for (const LogicalTensor& tensor : tensors) {
    if (draw.Chance(5)) add_rule(tensor.name, tensor.shape.size());
    if (std::none_of(
            families.begin(), families.end(), [&](const LogicalTensor* family) {
              return StarPattern(family->name) == StarPattern(tensor.name);
            })) {
      families.push_back(&tensor);
    }
  }
  for (const LogicalTensor* family : families) {
    std::string pattern = StarPattern(family->name);
    const size_t star = pattern.find('*');
    if (star == std::string::npos || !draw.Chance(40)) continue;
    pattern.replace(star, 1, absl::StrCat(draw.Between(0, 5)));
    add_rule(pattern, family->shape.size());
  }
  for (const LogicalTensor* family : families) {
    add_rule(StarPattern(family->name), family->shape.size());
  }
  // A rule that places nothing is an error of the job.
  std::vector<bool> used(side.rules.size());
  for (const LogicalTensor& tensor : tensors) {
    const auto first = std::find_if(
        side.rules.begin(), side.rules.end(), [&](const GenericRule& rule) {
          return StarMatches(rule.match, tensor.name);
        });
    if (first != side.rules.end()) used[first - side.rules.begin()] = true;
  }
  size_t rule = 0;
  std::erase_if(side.rules, [&](const GenericRule&) { return !used[rule++]; });
  return side;
}

}  // namespace refit
