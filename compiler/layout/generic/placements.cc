#include "compiler/layout/generic/placements.h"

#include <algorithm>

#include "absl/base/macros.h"

namespace refit {

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

}  // namespace refit
