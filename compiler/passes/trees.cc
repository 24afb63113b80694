#include "compiler/passes/trees.h"

#include <algorithm>
#include <utility>

namespace refit {
namespace {

// The hosts of a flow stand in this many trees, each of which carries an equal
// part of its bytes, and in each tree a host passes what it gets on to this
// many others. Trees begin at different hosts, so that a host passes bytes on
// in one of them and is a leaf of the other: it sends as much as it receives,
// however many hosts there are. These are the double trees of P. Sanders,
// J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast,
// reduction and scan", Parallel Computing 35 (2009), which NCCL has for
// reductions. With one tree, a chain, bytes take a step for every host; with
// more, a rank has more peers.
constexpr size_t kTrees = 2;

// One of the flow's `trees`, by way of lane `lane` of `lanes`: each lane enters
// a host by another of its ranks, as far as there are enough.
Tree TreeOf(const std::vector<Members>& hosts, size_t tree_number, size_t trees,
            size_t lane, size_t lanes) {
  const size_t first = tree_number * hosts.size() / trees;
  const auto members = [&](size_t position) -> const Members& {
    return hosts[(first + position) % hosts.size()];
  };
  const auto entry = [&](size_t position) {
    const Members& of_host = members(position);
    return of_host[lane * of_host.size() / lanes];
  };
  Tree tree;
  tree.root = entry(0);
  for (size_t i = 1; i < hosts.size(); ++i) {
    tree.edges.push_back({entry((i - 1) / trees), entry(i)});
  }
  for (size_t i = 0; i < hosts.size(); ++i) {
    AddOthers(members(i), entry(i), tree.edges);
  }
  return tree;
}

}  // namespace

void AddOthers(const Members& members, Rank first, std::vector<Relay>& edges) {
  // Each begins with the rank after it, so that all receive alike.
  const auto next = std::upper_bound(members.begin(), members.end(), first);
  for (auto it = next; it != members.end(); ++it) edges.push_back({first, *it});
  for (auto it = members.begin(); it != next; ++it) {
    if (*it != first) edges.push_back({first, *it});
  }
}

std::vector<FlowRange> RangesOf(const FlowKey& key, size_t sources, size_t most,
                                bool in_chain) {
  size_t members = 0;
  for (const Members& of : key.hosts) members = std::max(members, of.size());
  const size_t of_flow =
      in_chain || key.hosts.size() <= kHostsOfChain ? 1 : kTrees;
  const size_t trees = std::min(of_flow, most);
  const size_t lanes = std::min(members, most / trees);
  // Whoever stands on the sources' host sends as much over the network. What a
  // source sends itself enters its own host by one receiver after the other, as
  // far as that is not too little for each.
  const size_t near = key.near.size();
  const size_t senders = sources + near;
  const size_t parts =
      std::clamp<size_t>(most / trees / lanes, 1, std::max<size_t>(near, 1));
  std::vector<FlowRange> ranges;
  for (size_t lane = 0; lane < lanes; ++lane) {
    const size_t sender = lane * senders / lanes;
    const size_t sources_before = sender * sources / senders;
    const bool by_source = (sender + 1) * sources / senders > sources_before;
    for (size_t number = 0; number < trees; ++number) {
      const Tree far = TreeOf(key.hosts, number, of_flow, lane, lanes);
      if (near == 0) {
        ranges.push_back({{far}});
        continue;
      }
      for (size_t part = 0; part < parts; ++part) {
        const size_t receiver =
            by_source ? lane + part : sender - sources_before;
        Tree inside = {.root = key.near[receiver % near], .edges = {}};
        AddOthers(key.near, inside.root, inside.edges);
        if (by_source) {
          ranges.push_back({{std::move(inside), far}});
          continue;
        }
        inside.edges.push_back({inside.root, far.root});
        inside.edges.insert(inside.edges.end(), far.edges.begin(),
                            far.edges.end());
        ranges.push_back({{std::move(inside)}});
      }
    }
  }
  return ranges;
}

}  // namespace refit
