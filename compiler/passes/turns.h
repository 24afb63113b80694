// Turns: which edges of a graph go together, so that no rank has two of them.
#ifndef REFIT_COMPILER_PASSES_TURNS_H_
#define REFIT_COMPILER_PASSES_TURNS_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "compiler/ir/module.h"

namespace refit {

// By edge, from the rank that sends along it to the one that receives: its
// turn, from 0 on. In one turn no rank sends along two edges, or receives along
// two. There are as many turns as the busiest rank has edges in one direction
// (D. König, 1916). Takes edges times the longest alternating path.
std::vector<int32_t> TurnsOf(absl::Span<const std::pair<Rank, Rank>> edges);

// Finds the turns of edges between hosts along which trees go, sources and
// their roots included, where an edge may stand several times. Trees that cross
// would have a rank receive from two others in one round, and nothing in the
// next. Roots share the turns of sources, so that as many are fed in one as in
// another.
std::vector<int32_t> TurnsOfTrees(
    const Module& module, absl::Span<const std::pair<Rank, Rank>> edges);

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_TURNS_H_
