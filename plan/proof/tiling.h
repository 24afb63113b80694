// Whether boxes tile a space: near O(n log n) where planes separate them, never
// per element.
#ifndef REFIT_PLAN_PROOF_TILING_H_
#define REFIT_PLAN_PROOF_TILING_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "plan/proof/affine.h"
#include "plan/proof/steps.h"

namespace refit::proof {

int64_t VolumeOf(const Box& box);

// The first coordinate that two boxes share. Requires that they do.
absl::InlinedVector<int64_t, 6> FirstShared(const Box& a, const Box& b);

bool Intersects(const Box& a, const Box& b);

// Makes `box` hold all of `other` as well.
void Extend(Box& box, const Box& other);

std::vector<const Box*> PointersTo(absl::Span<const Box> boxes);

// Finds two boxes that share a coordinate and for which `is_overlap` holds
// (boxes may be hulls of what is really meant); nullopt when there are none, or
// when `steps` are used up. All boxes have the same number of dimensions.
std::optional<std::pair<size_t, size_t>> FindOverlap(
    absl::Span<const Box* const> boxes,
    absl::FunctionRef<bool(size_t, size_t)> is_overlap, Steps& steps);

// The first coordinate, in lexicographic order, of `space` that no box holds.
// Requires that the boxes are disjoint and inside `space`.
std::optional<absl::InlinedVector<int64_t, 6>> FirstUncovered(
    const Box& space, absl::Span<const Box* const> boxes);

}  // namespace refit::proof

#endif  // REFIT_PLAN_PROOF_TILING_H_
