#include <algorithm>
#include <map>
#include <vector>

#include "absl/strings/str_format.h"
#include "compiler/passes/passes.h"

namespace refit {
namespace {

// What one rank must take in or give out, however a plan relays.
struct MustMove {
  double received_bytes = 0;  // by a rank, over all its links
  double sent_bytes = 0;      // of boxes that no other rank holds, once each
};

// What the ranks of an NVLink domain must take in.
struct DomainNeeds {
  int64_t ranks = 0;
  int64_t nics = 0;
  double bytes = 0;          // in all, each receiver's
  double network_bytes = 0;  // of boxes that none of its ranks holds, once each
};

// Bytes that must leave their holders over the network, by the sources that
// hold them.
using BytesByHolders = std::map<std::vector<Rank>, double>;

// The most bytes that a set of sources holds alone, for each of its ranks: they
// leave these at least once.
double MostPerHolder(const BytesByHolders& bytes) {
  std::map<Rank, std::vector<const BytesByHolders::value_type*>> by_first;
  for (const auto& entry : bytes) {
    by_first[entry.first.front()].push_back(&entry);
  }
  double most = 0;
  for (const auto& [holders, unused] : bytes) {
    double sum = 0;
    for (Rank first : holders) {
      const auto found = by_first.find(first);
      if (found == by_first.end()) continue;
      for (const auto* inside : found->second) {
        if (std::includes(holders.begin(), holders.end(), inside->first.begin(),
                          inside->first.end())) {
          sum += inside->second;
        }
      }
    }
    most = std::max(most, sum / static_cast<double>(holders.size()));
  }
  return most;
}

// The time that no plan can beat:
// - a receiver's bytes over all its links at once;
// - what one rank alone holds leaves it at least once; what some sources alone
//   hold leaves them over the network at least once, where other domains alone
//   want it;
// - what a host's ranks want and none of them holds crosses the network to it
//   at least once; so it does to an NVLink domain of several hosts;
// - a rank does one round after the other, and a round has one route: so of the
//   domain's ranks together, the time on the network and the time on NVLink add
//   up, unless they deal out beside what they receive.
// Boxes that overlap without being equal count as different. What sources of
// one part of a folded job hold, those of the others hold too.
double LowerBoundSeconds(const Module& module) {
  const Topology& topology = module.topology;
  std::vector<MustMove> ranks(static_cast<size_t>(module.world_size()));
  std::map<int32_t, DomainNeeds> domains;
  BytesByHolders leaving;
  std::map<int32_t, int64_t> host_ranks;
  for (int32_t host : topology.host) ++host_ranks[host];
  for (const auto& [host, count] : host_ranks) {
    DomainNeeds& domain = domains[topology.DomainOf(host)];
    domain.ranks += count;
    domain.nics +=
        (count + topology.RanksPerNic() - 1) / topology.RanksPerNic();
  }
  std::vector<int32_t> domains_without;
  for (const Piece& piece : module.pieces) {
    const double bytes = static_cast<double>(module.WireBytes(piece));
    domains_without.clear();
    std::vector<Rank> sources = piece.sources;
    sources.insert(sources.end(), piece.sources_of_other_waves.begin(),
                   piece.sources_of_other_waves.end());
    bool leaves = false;
    bool has_near = false;  // a receiver that need not use the network
    for (Rank destination : piece.destinations) {
      Route nearest = Route::kNetwork;
      for (Rank source : sources) {
        nearest = std::min(nearest, module.LinkBetween(source, destination));
      }
      has_near |= nearest != Route::kNetwork;
      if (nearest == Route::kLocal) continue;
      leaves = true;
      ranks[IndexOf(destination)].received_bytes += bytes;
      const int32_t domain =
          topology.DomainOf(topology.host[IndexOf(destination)]);
      domains[domain].bytes += bytes;
      if (nearest == Route::kNetwork) domains_without.push_back(domain);
    }
    std::sort(domains_without.begin(), domains_without.end());
    domains_without.erase(
        std::unique(domains_without.begin(), domains_without.end()),
        domains_without.end());
    for (int32_t domain : domains_without) {
      domains[domain].network_bytes += bytes;
    }
    // Near receivers might pass it on over NICs of their own.
    if (!domains_without.empty() && !has_near) {
      std::sort(sources.begin(), sources.end());
      leaving[sources] += bytes / module.parts();
    }
    if (leaves && sources.size() == 1) {
      ranks[IndexOf(sources.front())].sent_bytes += bytes / module.parts();
    }
  }
  // A rank alone may have a whole NIC.
  const double nic_bytes_per_second =
      topology.network_bytes_per_second * topology.RanksPerNic();
  const double links = topology.peer_bytes_per_second +
                       (host_ranks.size() > 1 ? nic_bytes_per_second : 0);
  const bool deals = module.limits.deals ||
                     (module.limits.deals_relays && module.limits.relays);
  double seconds = MostPerHolder(leaving) / nic_bytes_per_second;
  for (const MustMove& rank : ranks) {
    seconds = std::max(seconds,
                       std::max(rank.received_bytes, rank.sent_bytes) / links);
  }
  for (const auto& [number, domain] : domains) {
    const double on_network = domain.network_bytes / nic_bytes_per_second;
    const double on_nvlink =
        (domain.bytes - domain.network_bytes) / topology.peer_bytes_per_second;
    const double both =
        deals ? std::max(on_network, on_nvlink) : on_network + on_nvlink;
    seconds = std::max({seconds, on_network / static_cast<double>(domain.nics),
                        both / static_cast<double>(domain.ranks)});
  }
  return seconds;
}

}  // namespace

absl::Status BoundTime(const PassOptions&, Module& module) {
  module.stats.lower_bound_seconds = LowerBoundSeconds(module);
  return absl::OkStatus();
}

}  // namespace refit
