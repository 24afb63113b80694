#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/passes/passes.h"

namespace refit {
namespace {

// What one rank or host must take in or give out, however a plan relays.
struct MustMove {
  double received_bytes = 0;  // by a rank, over all its links
  double sent_bytes = 0;      // of boxes that no other rank holds, once each
};

// The time that no plan can beat: a receiver's bytes over all its links at
// once; what one rank alone holds leaves it at least once; what a host's ranks
// want and none of them holds crosses the network to it at least once; so it
// does to an NVLink domain of several hosts. Boxes
// that overlap without being equal count as different.
double LowerBoundSeconds(const Module& module) {
  const Topology& topology = module.topology;
  std::vector<MustMove> ranks(static_cast<size_t>(module.world_size()));
  std::map<int32_t, double> domain_bytes;
  std::map<int32_t, int64_t> host_ranks;
  for (int32_t host : topology.host) ++host_ranks[host];
  std::map<int32_t, int64_t> domain_nics;
  for (const auto& [host, count] : host_ranks) {
    domain_nics[topology.DomainOf(host)] +=
        (count + topology.RanksPerNic() - 1) / topology.RanksPerNic();
  }
  for (const Piece& piece : module.pieces) {
    const double bytes = static_cast<double>(module.WireBytes(piece));
    std::set<int32_t> domains_without;
    std::vector<Rank> sources = piece.sources;
    sources.insert(sources.end(), piece.sources_of_other_waves.begin(),
                   piece.sources_of_other_waves.end());
    bool leaves = false;
    for (Rank destination : piece.destinations) {
      Route nearest = Route::kNetwork;
      for (Rank source : sources) {
        nearest = std::min(nearest, module.LinkBetween(source, destination));
      }
      if (nearest == Route::kLocal) continue;
      leaves = true;
      ranks[IndexOf(destination)].received_bytes += bytes;
      if (nearest == Route::kNetwork) {
        domains_without.insert(
            topology.DomainOf(topology.host[IndexOf(destination)]));
      }
    }
    for (int32_t domain : domains_without) domain_bytes[domain] += bytes;
    if (leaves && sources.size() == 1) {
      ranks[IndexOf(sources.front())].sent_bytes += bytes;
    }
  }
  // A rank alone may have a whole NIC.
  const double nic_bytes_per_second =
      topology.network_bytes_per_second * topology.RanksPerNic();
  const double links = topology.peer_bytes_per_second +
                       (host_ranks.size() > 1 ? nic_bytes_per_second : 0);
  double seconds = 0;
  for (const MustMove& rank : ranks) {
    seconds = std::max(seconds,
                       std::max(rank.received_bytes, rank.sent_bytes) / links);
  }
  for (const auto& [domain, bytes] : domain_bytes) {
    seconds =
        std::max(seconds, bytes / (nic_bytes_per_second *
                                   static_cast<double>(domain_nics[domain])));
  }
  return seconds;
}

}  // namespace

absl::Status BoundTime(const PassOptions&, Module& module) {
  module.stats.lower_bound_seconds = LowerBoundSeconds(module);
  return absl::OkStatus();
}

}  // namespace refit
