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
  int64_t hosts = 0;
  double bytes = 0;          // in all, each receiver's
  double network_bytes = 0;  // of boxes that none of its ranks holds, once each
  double near_bytes = 0;     // each receiver's, of boxes that one of them holds
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

bool MayDeal(const Limits& limits) {
  return limits.deals || (limits.may_deal_relays && limits.relays);
}

// Bytes a second of a rank's links, each way.
struct Speeds {
  double network = 0;
  double nvlink = 0;
};

// What all ranks of a domain take together, if they deal nothing out: a rank
// does one round after the other, and a round has one route, so that time on
// the network and time on NVLink add up. Bytes that need not come over the
// network may do so where that is faster. Hosts of one domain exchange over
// NVLink in rounds of the network: then the two do not add up.
double SecondsApart(const DomainNeeds& domain, const Speeds& speeds) {
  const double on_network = domain.network_bytes / speeds.network;
  if (domain.hosts > 1) return on_network;
  return on_network + (domain.bytes - domain.network_bytes) /
                          std::max(speeds.network, speeds.nvlink);
}

// And if they deal out. Of the bytes K that need not cross the network, let z
// cross it all the same, let ranks store e in rounds of NVLink, and let them
// deal out the other d beside the network. Then the ranks together take
//   t >= (network_bytes + z) / network + e / nvlink      rounds one by one
//   t >= (d + e) / nvlink + d / bucket_bytes x start     each message starts
// So for any part p, p times the first and 1 - p times the second is
//   t >= p network_bytes / network + z (p / network) + e / nvlink
//        + d (1 - p) (1 / nvlink + start / bucket_bytes)
// whose last three are at least K times the least of their three factors. That
// is largest where two of these are equal.
double SecondsBeside(const DomainNeeds& domain, const Speeds& speeds,
                     double bucket_bytes) {
  const double rest = domain.bytes - domain.network_bytes;
  const double dealt = 1 / speeds.nvlink + kDealtMessageSeconds / bucket_bytes;
  double most = 0;
  for (const double part :
       {1.0, speeds.network / speeds.nvlink, 1 - 1 / speeds.nvlink / dealt,
        dealt / (dealt + 1 / speeds.network)}) {
    if (part > 1) continue;
    most = std::max(
        most, part * domain.network_bytes / speeds.network +
                  rest * std::min({part / speeds.network, 1 / speeds.nvlink,
                                   (1 - part) * dealt}));
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
// - a rank does one round after the other (SecondsApart), unless ranks of its
//   host deal out, which takes a message at least (SecondsBeside).
// Boxes that overlap without being equal count as different. What sources of
// one part of a folded job hold, those of the others hold too.
void SetLowerBound(Module& module) {
  const Topology& topology = module.topology;
  std::vector<MustMove> ranks(static_cast<size_t>(module.world_size()));
  std::map<int32_t, DomainNeeds> domains;
  BytesByHolders leaving;
  std::map<int32_t, int64_t> host_ranks;
  for (int32_t host : topology.host) ++host_ranks[host];
  for (const auto& [host, count] : host_ranks) {
    DomainNeeds& domain = domains[topology.DomainOf(host)];
    ++domain.hosts;
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
      if (nearest != Route::kNetwork) domains[domain].near_bytes += bytes;
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
  const Speeds speeds = {.network = nic_bytes_per_second,
                         .nvlink = topology.peer_bytes_per_second};
  double seconds = MostPerHolder(leaving) / nic_bytes_per_second;
  double dealable_seconds = 0;
  for (const MustMove& rank : ranks) {
    seconds = std::max(seconds,
                       std::max(rank.received_bytes, rank.sent_bytes) / links);
  }
  for (const auto& [number, domain] : domains) {
    const auto of_ranks = static_cast<double>(domain.ranks);
    const double on_network = domain.network_bytes / nic_bytes_per_second;
    double rounds = SecondsApart(domain, speeds) / of_ranks;
    if (MayDeal(module.limits)) {
      const double beside =
          SecondsBeside(domain, speeds,
                        static_cast<double>(module.limits.bucket_bytes)) /
          of_ranks;
      rounds = std::min(rounds, std::max(beside, kDealtMessageSeconds));
    }
    seconds = std::max(
        {seconds, on_network / static_cast<double>(domain.nics), rounds});
    dealable_seconds =
        std::max(dealable_seconds,
                 (domain.bytes - domain.network_bytes - domain.near_bytes) /
                     topology.peer_bytes_per_second / of_ranks);
  }
  if (MayDeal(module.limits)) {
    module.stats.dealable_seconds = dealable_seconds;
  }
  module.stats.lower_bound_seconds = seconds;
}

}  // namespace

absl::Status BoundTime(const PassOptions&, Module& module) {
  SetLowerBound(module);
  return absl::OkStatus();
}

}  // namespace refit
