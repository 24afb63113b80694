// The parts of the generic layout: meshes and placements, which rule of a list
// of globs applies to which members of a stack, and flat buffers.
#ifndef REFIT_COMPILER_LAYOUT_GENERIC_GENERIC_H_
#define REFIT_COMPILER_LAYOUT_GENERIC_GENERIC_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "compiler/job/job.h"
#include "compiler/layout/common/shard.h"
#include "compiler/layout/layout.h"
#include "compiler/model/stacks.h"

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

// The dtypes of a param's members in flat buffers, row-major over the index
// dims: kUnspecified where none holds the member, and empty where none holds
// any.
using HeldMembers = std::vector<DType>;

// Disjoint parts that make up all of `param` but what is held, in order of
// their first member. Looks at single members only where a glob, or a flat
// buffer, tells them apart.
std::vector<RulePart> PartitionByRule(const Param& param,
                                      absl::Span<const std::string_view> globs,
                                      const HeldMembers& held = {});

// Adds the side's flat buffers, one-dimensional tensors that hold params one
// after the other and of which every rank holds ranges, to its ranks. Reports
// entries that do not fit. Returns what they hold of each param.
std::vector<HeldMembers> PlaceFlatBuffers(const LayoutContext& context,
                                          SideLayout& layout);

// The names of the tensors that `flat` is, one per layer.
std::vector<std::string> FlatBufferNames(const FlatBufferSpec& flat);

}  // namespace refit

#endif  // REFIT_COMPILER_LAYOUT_GENERIC_GENERIC_H_
