// How what ranks of several hosts want goes from host to host.
#ifndef REFIT_COMPILER_PASSES_TREES_H_
#define REFIT_COMPILER_PASSES_TREES_H_

#include <cstddef>
#include <vector>

#include "compiler/ir/module.h"
#include "compiler/passes/flows.h"

namespace refit {

// The way of one range of a flow: who of each host receives it first, the
// root's first, and how it goes on from there.
struct Tree {
  Rank root{};
  std::vector<Relay> edges;  // each behind the one that feeds it
};

// A part of a flow, of as many bytes as the others. It goes by one tree, or two
// where receivers share the sources' host.
struct FlowRange {
  std::vector<Tree> trees;
};

// From `first` to the others of its host.
void AddOthers(const Members& members, Rank first, std::vector<Relay>& edges);

// Up to so many hosts stand in one chain, which has about as many steps as
// trees, and in which ranks have one message each way in each round.
inline constexpr size_t kHostsOfChain = 8;

// The ranges of a flow that `sources` ranks hold, `most` at most, in the order
// of its pieces: neighbouring ranges, which often have the same source, enter a
// host by the same rank. `in_chain`: however many hosts there are, each passes
// on to the next one.
std::vector<FlowRange> RangesOf(const FlowKey& key, size_t sources, size_t most,
                                bool in_chain);

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_TREES_H_
