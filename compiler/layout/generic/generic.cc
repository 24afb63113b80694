// The framework-free layout: meshes and DTensor placements written out in the
// job. Buffers are named as the checkpoint names the params, or as a rule
// renames them.
#include "compiler/layout/generic/generic.h"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/macros.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "compiler/layout/common/cut.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/common/tensor_stack.h"
#include "compiler/model/stacks.h"
#include "plan/glob.h"
#include "plan/nearest_word.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// Runs of consecutive positions of a stack, which the buffer's stack holds
// without gaps.
Runs PositionRuns(const std::vector<int32_t>& positions) {
  Runs runs;
  for (const int32_t position : positions) {
    if (!runs.empty() && runs.back().end == position) {
      ++runs.back().end;
    } else {
      runs.push_back({position, position + 1});
    }
  }
  return runs;
}

// One fragment per choice of a run in every dimension of the param's virtual
// tensor. The runs of a dimension stand one after the other in the buffer's.
std::vector<Fragment> FragmentsOf(ParamId param, const std::vector<Runs>& dims,
                                  const Dims& buffer_strides) {
  std::vector<Fragment> fragments = {
      {.param = param, .box = {}, .offset = 0, .stride = buffer_strides}};
  for (size_t dim = 0; dim < dims.size(); ++dim) {
    std::vector<Fragment> longer;
    for (const Fragment& prefix : fragments) {
      int64_t local = 0;
      for (const Range& run : dims[dim]) {
        Fragment& fragment = longer.emplace_back(prefix);
        fragment.box.lo.push_back(run.begin);
        fragment.box.hi.push_back(run.end);
        fragment.offset += local * buffer_strides[dim];
        local += run.size();
      }
    }
    fragments = std::move(longer);
  }
  return fragments;
}

// The name of the buffers of a param: "{0}" … stay for the index numbers.
std::string BufferName(const TensorRule& rule, const Param& param) {
  if (!rule.rename.has_value()) return param.name;
  return absl::StrReplaceAll(*rule.rename, {{"{name}", param.name}});
}

// The lowest rank that both meshes hold.
std::optional<int64_t> SharedRank(const MeshSpec& a, const MeshSpec& b) {
  std::vector<int64_t> ranks = a.ranks;
  std::sort(ranks.begin(), ranks.end());
  std::optional<int64_t> lowest;
  for (const int64_t rank : b.ranks) {
    if (lowest.has_value() && *lowest <= rank) continue;
    if (std::binary_search(ranks.begin(), ranks.end(), rank)) lowest = rank;
  }
  return lowest;
}

class GenericLayout {
 public:
  explicit GenericLayout(const LayoutContext& context)
      : context_(context), spec_(context.side.generic) {}

  SideLayout LayOut();

 private:
  // The members of a param that one rule places: a stack of buffers on every
  // rank of the rule's mesh.
  struct Placed {
    ParamId param{};
    const TensorRule* rule = nullptr;
    const MeshSpec* mesh = nullptr;
    std::vector<std::vector<int32_t>> positions;  // per index dim
  };

  // Whether placements fit the param's shape; notes those that do not.
  bool CheckPlacements(const Placed& placed);
  void ReportMisfits();
  // Reports a tensor name that a rank would have twice.
  bool CheckNames(const Placed& placed);

  const Param& ParamOf(const Placed& placed) const {
    return context_.model.params[IndexOf(placed.param)];
  }
  // Reports flat buffers that are named as other tensors of a rank.
  void CheckFlatNames();
  // Reports rules that place nothing: a mistyped one would leave its params to
  // a later rule without a word.
  void CheckUse(const std::vector<bool>& used);

  void Place(const Placed& placed, SideLayout& layout);
  Buffer Shard(const Placed& placed,
               const std::vector<int64_t>& coordinates) const;

  const LayoutContext& context_;
  const GenericSpec& spec_;
  // Params that lack the dimension of a placement.
  struct Misfit {
    const Placement* placement;
    const Param* first;
    int64_t others;
  };
  std::vector<Misfit> misfits_;
  struct Owner {
    const MeshSpec* mesh;
    std::string param;
  };
  // What has the name on a rank of the mesh, and that rank; nullptr: nothing.
  std::pair<const Owner*, int64_t> OwnerBeside(const std::string& name,
                                               const MeshSpec& mesh) {
    for (const Owner& owner : owners_[name]) {
      const std::optional<int64_t> rank = SharedRank(*owner.mesh, mesh);
      if (rank.has_value()) return {&owner, *rank};
    }
    return {nullptr, 0};
  }
  // By tensor name, on disjoint meshes. Only kept when a rule renames or flat
  // buffers have names: the names of params differ.
  absl::flat_hash_map<std::string, std::vector<Owner>> owners_;
  bool names_matter_ = false;
};

bool GenericLayout::CheckPlacements(const Placed& placed) {
  const Param& param = ParamOf(placed);
  const size_t dims = param.StoredShape().size();
  for (const Placement& placement : placed.rule->placements) {
    if (placement.kind == Placement::Kind::kReplicate ||
        placement.dim < static_cast<int64_t>(dims)) {
      continue;
    }
    const auto known = std::find_if(
        misfits_.begin(), misfits_.end(),
        [&](const Misfit& m) { return m.placement == &placement; });
    if (known == misfits_.end()) {
      misfits_.push_back({&placement, &param, 0});
    } else {
      ++known->others;
    }
    return false;
  }
  return true;
}

// A rule for many params is one mistake.
void GenericLayout::ReportMisfits() {
  for (const Misfit& misfit : misfits_) {
    const std::string others =
        misfit.others == 0
            ? ""
            : absl::StrFormat(" (%d other name%s of the rule: too few as well)",
                              misfit.others, misfit.others == 1 ? "" : "s");
    context_.diagnostics.Error(misfit.placement->place,
                               "shard dim is %d but \"%s\" has %d dims%s",
                               misfit.placement->dim, misfit.first->name,
                               misfit.first->StoredShape().size(), others);
  }
}

void GenericLayout::CheckUse(const std::vector<bool>& used) {
  const Model& model = context_.model;
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i]) continue;
    const TensorRule& rule = spec_.tensors[i];
    // A tied head has no param of its own, but is no mistake.
    if (std::any_of(model.skips.begin(), model.skips.end(),
                    [&](const Skip& skip) {
                      return GlobMatches(rule.match, skip.name);
                    })) {
      continue;
    }
    const bool matches = std::any_of(
        model.params.begin(), model.params.end(), [&](const Param& param) {
          const std::string_view glob = rule.match;
          const std::vector<RulePart> parts = PartitionByRule(param, {glob});
          return std::any_of(
              parts.begin(), parts.end(),
              [](const RulePart& part) { return part.rule == 0; });
        });
    if (matches) {
      context_.diagnostics.Error(
          rule.place,
          "%s place every parameter that \"%s\" matches; rules count in order",
          spec_.flat_buffers.empty() ? "earlier rules"
                                     : "flat buffers and earlier rules",
          rule.match);
      continue;
    }
    // Of each stack the first member.
    std::vector<std::string> names;
    for (const Param& param : model.params) names.push_back(param.FirstName());
    const std::string nearest =
        NearestMatch(rule.match, {names.begin(), names.end()});
    context_.diagnostics.Error(
        rule.place,

        "\"%s\" matches no parameter%s", rule.match,
        nearest.empty() ? ""
                        : absl::StrFormat("; the nearest is \"%s\"", nearest));
  }
}

bool GenericLayout::CheckNames(const Placed& placed) {
  if (!names_matter_) return true;
  Param members = ParamOf(placed);
  members.index = NumbersOf(ParamOf(placed), placed.positions);
  std::vector<std::string> params = MemberNames(members);
  members.name = BufferName(*placed.rule, members);
  size_t number = 0;
  for (const std::string& name : MemberNames(members)) {
    std::string& param = params[number++];
    const auto [owner, rank] = OwnerBeside(name, *placed.mesh);
    if (owner != nullptr) {
      return context_.diagnostics.Error(
          placed.rule->place,
          "parameters \"%s\" and \"%s\" would both be tensor \"%s\" of rank %d",
          owner->param, param, name, rank);
    }
    owners_[name].push_back({placed.mesh, std::move(param)});
  }
  return true;
}

void GenericLayout::CheckFlatNames() {
  for (const FlatBufferSpec& flat : spec_.flat_buffers) {
    const MeshSpec& mesh = MeshNamed(spec_, flat.mesh);
    for (const std::string& name : FlatBufferNames(flat)) {
      const auto [owner, rank] = OwnerBeside(name, mesh);
      if (owner != nullptr) {
        context_.diagnostics.Error(
            flat.place,
            "flat buffer \"%s\" is also the tensor of \"%s\" on rank %d", name,
            owner->param, rank);
        return;
      }
      owners_[name].push_back({&mesh, name});
    }
  }
}

Buffer GenericLayout::Shard(const Placed& placed,
                            const std::vector<int64_t>& coordinates) const {
  const TensorRule& rule = *placed.rule;
  const MeshSpec& mesh = *placed.mesh;
  const Param& param = ParamOf(placed);

  Buffer buffer;
  buffer.name = BufferName(rule, param);
  buffer.dtype =
      rule.dtype.has_value() ? *rule.dtype : BufferDType(context_.side, param);
  std::vector<Runs> dims;
  buffer.index = NumbersOf(ParamOf(placed), placed.positions);
  for (const std::vector<int32_t>& positions : placed.positions) {
    dims.push_back(PositionRuns(positions));
  }

  std::vector<Runs> local =
      LocalRuns(param.StoredShape(), mesh, rule.placements, coordinates);
  for (Runs& runs : local) {
    buffer.shape.push_back(RunsSize(runs));
    dims.push_back(std::move(runs));
  }
  const Dims strides = RowMajorStrides(buffer.VirtualShape());
  for (const Fragment& fragment : FragmentsOf(placed.param, dims, strides)) {
    for (Fragment& part : OfSplitParam(param, fragment)) {
      buffer.fragments.push_back(std::move(part));
    }
  }
  return buffer;
}

void GenericLayout::Place(const Placed& placed, SideLayout& layout) {
  const MeshSpec& mesh = *placed.mesh;
  // Ranks that differ only along replicated axes hold the same buffer.
  absl::flat_hash_map<int64_t, BufferId> built;
  for (size_t i = 0; i < mesh.ranks.size(); ++i) {
    const std::vector<int64_t> coordinates =
        Coordinates(mesh, static_cast<int64_t>(i));
    int64_t key = 0;
    for (size_t axis = 0; axis < mesh.shape.size(); ++axis) {
      if (placed.rule->placements[axis].kind == Placement::Kind::kReplicate) {
        continue;
      }
      key = key * mesh.shape[axis] + coordinates[axis];
    }
    const auto [entry, fresh] = built.try_emplace(key);
    if (fresh) {
      entry->second = context_.buffers.Intern(Shard(placed, coordinates));
    }
    layout.ranks[mesh.ranks[i]].push_back(entry->second);
  }
}

SideLayout GenericLayout::LayOut() {
  SideLayout layout;
  for (const MeshSpec& mesh : spec_.meshes) {
    for (const int64_t rank : mesh.ranks) {
      layout.ranks.resize(std::max<size_t>(layout.ranks.size(), rank + 1));
    }
  }
  std::vector<std::string_view> globs;
  for (const TensorRule& rule : spec_.tensors) {
    globs.push_back(rule.match);
    names_matter_ |= rule.rename.has_value();
  }
  names_matter_ |= !spec_.flat_buffers.empty();

  const int64_t errors_before = context_.diagnostics.error_count();
  const std::vector<HeldMembers> held = PlaceFlatBuffers(context_, layout);
  // What follows would only miss the params of a flat buffer in error.
  if (context_.diagnostics.error_count() != errors_before) return layout;
  std::vector<bool> used(globs.size());
  for (size_t i = 0; i < context_.model.params.size(); ++i) {
    const Param& param = context_.model.params[i];
    for (RulePart& part : PartitionByRule(param, globs, held[i])) {
      if (part.rule >= 0) {
        used[part.rule] = true;
        const TensorRule& rule = spec_.tensors[part.rule];
        const Placed placed = {.param = static_cast<ParamId>(i),
                               .rule = &rule,
                               .mesh = &MeshNamed(spec_, rule.mesh),
                               .positions = std::move(part.positions)};
        if (CheckPlacements(placed) && CheckNames(placed)) {
          Place(placed, layout);
        }
        continue;
      }
      if (param.skip != SkipReason::kUnspecified) continue;
      std::vector<int32_t> first;
      for (size_t dim = 0; dim < param.index.size(); ++dim) {
        first.push_back(param.index[dim].numbers[part.positions[dim][0]]);
      }
      context_.diagnostics.Error(
          context_.side.place, "no rule of %s.tensors matches parameter \"%s\"",
          context_.side.key, ExpandName(param.name, first));
    }
  }
  ReportMisfits();
  CheckUse(used);
  CheckFlatNames();
  return layout;
}

}  // namespace

const MeshSpec& MeshNamed(const GenericSpec& spec, std::string_view name) {
  const auto mesh = std::find_if(
      spec.meshes.begin(), spec.meshes.end(),
      [&](const MeshSpec& candidate) { return candidate.name == name; });
  ABSL_HARDENING_ASSERT(mesh != spec.meshes.end());
  return *mesh;
}

std::vector<int64_t> Coordinates(const MeshSpec& mesh, int64_t index) {
  std::vector<int64_t> coordinates(mesh.shape.size());
  for (size_t axis = mesh.shape.size(); axis-- > 0;) {
    coordinates[axis] = index % mesh.shape[axis];
    index /= mesh.shape[axis];
  }
  return coordinates;
}

std::vector<Runs> LocalRuns(absl::Span<const int64_t> shape,
                            const MeshSpec& mesh,
                            absl::Span<const Placement> placements,
                            absl::Span<const int64_t> coordinates) {
  std::vector<Runs> local;
  for (const int64_t size : shape) {
    local.push_back(size > 0 ? Runs{{0, size}} : Runs{});
  }
  for (size_t axis = 0; axis < mesh.shape.size(); ++axis) {
    const Placement& placement = placements[axis];
    if (placement.kind == Placement::Kind::kReplicate) continue;
    // Of kShard the split factor is 1.
    local[placement.dim] =
        StridedShardRuns(local[placement.dim], placement.split_factor,
                         mesh.shape[axis], coordinates[axis]);
  }
  return local;
}

SideLayout LayOutGeneric(const LayoutContext& context) {
  return GenericLayout(context).LayOut();
}

}  // namespace refit
