// What ranks want over the network, by those who want it.
#ifndef REFIT_COMPILER_PASSES_FLOWS_H_
#define REFIT_COMPILER_PASSES_FLOWS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "compiler/ir/module.h"

namespace refit {

// Ranks of one site (Module::SiteOf), ascending. Where NVLink joins no hosts,
// that is a host, as flow passes call it.
using Members = absl::InlinedVector<Rank, 4>;

// Ranks that hold the same, ascending.
using Holders = std::vector<Rank>;

// How a share gets to the hosts that want it.
enum class FlowWay : uint8_t {
  kEachHost,   // holders send it to each of them
  kTree,       // hosts pass it on to hosts
  kBroadcast,  // holders, and receivers on their host, broadcast it
};

// The pieces of a flow that the same ranks hold.
struct Share {
  std::vector<PieceId> pieces;  // ascending
  int64_t bytes = 0;
  FlowWay way = FlowWay::kEachHost;
};

// Who wants what no source of their hosts holds, in one wave. Of a domain of
// several hosts all who want it, if any of them is on a host without a source.
struct FlowKey {
  int32_t wave = 0;
  std::vector<Members> hosts;
  // Receivers on the one host where all sources are; empty if there are none,
  // or several such hosts, or if they are of `hosts`.
  Members near;

  friend bool operator<(const FlowKey& a, const FlowKey& b) {
    return std::tie(a.wave, a.hosts, a.near) <
           std::tie(b.wave, b.hosts, b.near);
  }
};
using Flow = std::map<Holders, Share>;
using Flows = std::map<FlowKey, Flow>;

// The receivers of a piece for FlowKey::hosts.
std::vector<Members> FarReceivers(const Module& module, const Piece& piece);

// All pieces but those that are cast on arrival: what arrives of these is not
// what was sent, so that nobody passes it on.
Flows ListFlows(const Module& module);

// Bytes that go by way of a rank.
struct RankBytes {
  Rank rank{};
  int64_t bytes = 0;
};

// How sets of ranks divide bytes that any of a set may take, so that the
// busiest rank takes least: sets of few ranks first, and of each the least
// loaded ranks take as much as makes them alike. That is best where sets
// contain each other or have no rank in common.
class Leveling {
 public:
  // `loads`: what ranks take in any case, by rank; then what they take in all.
  Leveling(const std::map<Holders, int64_t>& bytes_of,
           std::vector<int64_t>& loads);

  // The next `bytes` of those of the set, by its ranks in ascending order:
  // consecutive ones often come from one rank.
  std::vector<RankBytes> Take(const Holders& set, int64_t bytes);

 private:
  struct OfSet {
    std::vector<RankBytes> parts;
    size_t next = 0;
  };
  std::map<Holders, OfSet> sets_;
};

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_FLOWS_H_
