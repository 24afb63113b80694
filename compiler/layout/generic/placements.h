// DTensor placements on a mesh of the job.
#ifndef REFIT_COMPILER_LAYOUT_GENERIC_PLACEMENTS_H_
#define REFIT_COMPILER_LAYOUT_GENERIC_PLACEMENTS_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "compiler/job/job.h"
#include "compiler/layout/common/shard.h"

namespace refit {

// The mesh of this name. ReadJob refuses rules with an unknown one.
const MeshSpec& MeshNamed(const GenericSpec& spec, std::string_view name);

// Of the rank at position `index` of `mesh`, axis 0 slowest.
std::vector<int64_t> Coordinates(const MeshSpec& mesh, int64_t index);

// What a rank holds of each dim of a tensor. The placements, one per axis of
// the mesh, name dims that `shape` has.
std::vector<Runs> LocalRuns(absl::Span<const int64_t> shape,
                            const MeshSpec& mesh,
                            absl::Span<const Placement> placements,
                            absl::Span<const int64_t> coordinates);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_GENERIC_PLACEMENTS_H_
