#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "compiler/passes/passes.h"
#include "compiler/passes/tree_choices.h"

namespace refit {
namespace {

// Bytes that must leave their holders over the network, by the sources that
// hold them.
using BytesByHolders = std::map<std::vector<Rank>, double>;

// What a rank takes to send or receive so much between hosts. A round starts
// before its bytes, and they have room in the rank's staging.
double RankSeconds(double bytes, double nic_bytes_per_second,
                   const Limits& limits) {
  constexpr double kRounding = 1e-9;
  const double rounds = bytes / static_cast<double>(limits.staging_bytes);
  return bytes / nic_bytes_per_second +
         std::ceil(rounds * (1 - kRounding)) * kStagedRoundSeconds;
}

// The longest of what sets of sources take to send, once, what they alone hold.
double LeavingSeconds(
    const BytesByHolders& bytes,
    const std::function<double(const std::vector<Rank>&, double)>& seconds_of) {
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
    most = std::max(most, seconds_of(holders, sum));
  }
  return most;
}

// Ranks that a cut divides from all others: those of an NVLink domain, or of a
// leaf switch.
struct Enclave {
  double in_bytes = 0;   // that they want and none of them holds, once each
  double out_bytes = 0;  // that they alone hold and others want, once each
  double in_bytes_per_second = 0;
  double out_bytes_per_second = 0;
  int64_t receivers = 0;  // of a domain

  double Seconds() const {
    const double seconds =
        std::max(in_bytes > 0 ? in_bytes / in_bytes_per_second : 0,
                 out_bytes > 0 ? out_bytes / out_bytes_per_second : 0);
    return seconds > 0 ? seconds + kStagedRoundSeconds : 0;
  }
};

// All enclaves of one kind. A rank is in one of them.
struct Enclaves {
  std::vector<int32_t> of;  // by rank
  std::map<int32_t, Enclave> by_number;

  std::vector<int32_t> Numbers(const std::vector<Rank>& ranks) const {
    std::vector<int32_t> numbers;
    for (const Rank rank : ranks) numbers.push_back(of[IndexOf(rank)]);
    std::sort(numbers.begin(), numbers.end());
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    return numbers;
  }

  // Adds what `sources` hold and `destinations` want. A folded job has
  // `copies` times as many sources that hold it. Returns whether one enclave
  // has ranks of both.
  bool Add(const std::vector<Rank>& sources,
           const std::vector<Rank>& destinations, double bytes, double copies) {
    const std::vector<int32_t> from = Numbers(sources);
    const std::vector<int32_t> to = Numbers(destinations);
    bool meet = false;
    for (const int32_t number : to) {
      if (std::binary_search(from.begin(), from.end(), number)) {
        meet = true;
      } else {
        by_number[number].in_bytes += bytes;
      }
    }
    if (from.size() == 1 && (to.size() > 1 || !meet)) {
      by_number[from.front()].out_bytes += bytes / copies;
    }
    return meet;
  }
};

struct HostRanks {
  std::set<size_t> nics;       // of any rank
  std::set<size_t> receiving;  // of destinations, which alone receive
  int64_t destinations = 0;
};

// The way of a leaf to the others; 0 if that is no narrower than its NICs, or
// if rails divide a host's NICs among leaves.
double UplinkOf(const Topology& topology,
                const std::map<int32_t, HostRanks>& hosts, double nic) {
  if (!topology.HasNarrowLeaves()) return 0;
  const Fabric& fabric = *topology.fabric;
  size_t nics = 0;  // of the host that has most
  for (const auto& [host, ranks] : hosts) {
    nics = std::max(nics, ranks.nics.size());
  }
  return nic * static_cast<double>(nics) * fabric.hosts_per_leaf /
         fabric.spine_oversubscription;
}

// NVLink domains, whose ranks reach all others over their NICs, and those of
// several leaves over the ways of these. Only destinations receive; whoever is
// there may send.
Enclaves DomainsOf(const Module& module,
                   const std::map<int32_t, HostRanks>& hosts, double nic) {
  const Topology& topology = module.topology;
  Enclaves domains;
  for (const int32_t host : topology.host) {
    domains.of.push_back(topology.DomainOf(host));
  }
  for (const auto& [host, ranks] : hosts) {
    Enclave& domain = domains.by_number[topology.DomainOf(host)];
    domain.in_bytes_per_second +=
        nic * static_cast<double>(ranks.receiving.size());
    domain.out_bytes_per_second += nic * static_cast<double>(ranks.nics.size());
    domain.receivers += ranks.destinations;
  }
  const double uplink = UplinkOf(topology, hosts, nic);
  if (uplink == 0 || topology.fabric->hosts_per_nvlink_domain %
                             topology.fabric->hosts_per_leaf !=
                         0) {
    return domains;
  }
  std::map<int32_t, std::set<int32_t>> leaves;  // by domain
  for (const auto& [host, ranks] : hosts) {
    leaves[topology.DomainOf(host)].insert(host /
                                           topology.fabric->hosts_per_leaf);
  }
  for (auto& [number, domain] : domains.by_number) {
    const double most = uplink * static_cast<double>(leaves.at(number).size());
    domain.in_bytes_per_second = std::min(domain.in_bytes_per_second, most);
    domain.out_bytes_per_second = std::min(domain.out_bytes_per_second, most);
  }
  return domains;
}

// Leaves whose way to the others is narrower than their NICs. None where a
// domain has hosts of several, or where parts of a folded job share one.
Enclaves LeavesOf(const Module& module,
                  const std::map<int32_t, HostRanks>& hosts, double nic) {
  const Topology& topology = module.topology;
  Enclaves leaves;
  const double uplink = UplinkOf(topology, hosts, nic);
  if (uplink == 0) return leaves;
  const Fabric& fabric = *topology.fabric;
  if (fabric.hosts_per_leaf % fabric.hosts_per_nvlink_domain != 0) {
    return leaves;
  }
  std::map<int32_t, int32_t> part_of;  // by leaf
  for (size_t rank = 0; rank < topology.host.size(); ++rank) {
    const int32_t leaf = topology.host[rank] / fabric.hosts_per_leaf;
    const int32_t part = module.PartOf(Rank{static_cast<int32_t>(rank)});
    if (part_of.emplace(leaf, part).first->second != part) return {};
    leaves.of.push_back(leaf);
    leaves.by_number[leaf] = {.in_bytes_per_second = uplink,
                              .out_bytes_per_second = uplink};
  }
  return leaves;
}

// What pieces move, but for what stays on a GPU.
struct PieceBytes {
  std::vector<double> received;  // by rank
  std::vector<double> held;      // by rank, and by no other
  BytesByHolders leaving;        // their domains
  BytesByHolders leaving_leaves;
};

PieceBytes CountBytes(const Module& module, Enclaves& domains,
                      Enclaves& leaves) {
  PieceBytes of;
  of.received.resize(module.topology.host.size(), 0);
  of.held.resize(module.topology.host.size(), 0);
  std::vector<Rank> sources;
  std::vector<Rank> destinations;
  for (const Piece& piece : module.pieces) {
    const double bytes = static_cast<double>(module.WireBytes(piece));
    sources = piece.sources;
    sources.insert(sources.end(), piece.sources_of_other_waves.begin(),
                   piece.sources_of_other_waves.end());
    std::sort(sources.begin(), sources.end());
    destinations.clear();
    for (const Rank destination : piece.destinations) {
      const bool is_here =
          module.topology.colocated &&
          std::any_of(sources.begin(), sources.end(), [&](Rank source) {
            return module.RouteBetween(source, destination) == Route::kLocal;
          });
      if (is_here) continue;
      destinations.push_back(destination);
      of.received[IndexOf(destination)] += bytes;
    }
    if (destinations.empty()) continue;
    // Each source of a part stands for this many of the job.
    const double copies =
        static_cast<double>(module.source_ranks()) /
        static_cast<double>(module.AlikePartsOf(sources.front()).sources);
    if (sources.size() == 1) {
      of.held[IndexOf(sources.front())] += bytes / copies;
    }
    const bool meet = domains.Add(sources, destinations, bytes, copies);
    const bool leave =
        !leaves.of.empty() && !leaves.Add(sources, destinations, bytes, copies);
    // Receivers beside a source might pass it on over NICs of their own, or
    // inside the leaf.
    if (!meet) of.leaving[sources] += bytes / copies;
    if (leave) of.leaving_leaves[sources] += bytes / module.parts();
  }
  return of;
}

// The time that no plan can beat, by cuts of the network. Whatever a plan
// relays, these cross a cut at least once:
// - all that a rank receives, and what it alone holds, over all its links;
// - what an NVLink domain or a leaf wants and does not hold, or holds alone and
//   others want, over its NICs or its way to the other leaves;
// - what some sources hold and other domains alone want, over the NICs of these
//   sources, and what other leaves alone want, over the ways of theirs, because
//   no source receives.
// What goes between hosts starts, and a rank starts as often as its staging is
// full. Boxes that overlap without being equal count as different. What sources
// of one part of a folded job hold, those of the others hold too.
void SetLowerBound(Module& module) {
  const Topology& topology = module.topology;
  const NetworkLinks network(module);
  std::map<int32_t, HostRanks> hosts;
  for (int32_t rank = 0; rank < module.world_size(); ++rank) {
    HostRanks& host = hosts[topology.host[static_cast<size_t>(rank)]];
    const size_t nic = network.EgressOf(Rank{rank});
    host.nics.insert(nic);
    if (!module.IsRelay(Rank{rank})) continue;
    host.receiving.insert(nic);
    ++host.destinations;
  }
  // A rank alone may have a whole NIC.
  const double nic = topology.network_bytes_per_second * topology.gpus_per_nic;
  const double links =
      topology.peer_bytes_per_second + (hosts.size() > 1 ? nic : 0);
  Enclaves domains = DomainsOf(module, hosts, nic);
  Enclaves leaves = LeavesOf(module, hosts, nic);
  const PieceBytes pieces = CountBytes(module, domains, leaves);
  double on_links = 0;
  for (const std::vector<double>* bytes : {&pieces.received, &pieces.held}) {
    on_links = std::max(
        on_links, *std::max_element(bytes->begin(), bytes->end()) / links);
  }
  const auto of_nics = [&](const std::vector<Rank>& holders, double sum) {
    std::set<size_t> nics;
    for (const Rank rank : holders) nics.insert(network.EgressOf(rank));
    const auto count = static_cast<double>(nics.size());
    // Where ranks share a NIC, one sends while a round of another starts.
    return nics.size() < holders.size()
               ? sum / (nic * count) + kStagedRoundSeconds
               : RankSeconds(sum / count, nic, module.limits);
  };
  const auto of_ways = [&](const std::vector<Rank>& holders, double sum) {
    double ways = 0;
    for (const int32_t leaf : leaves.Numbers(holders)) {
      ways += leaves.by_number.at(leaf).out_bytes_per_second;
    }
    return sum / ways + kStagedRoundSeconds;
  };
  double on_network = std::max(LeavingSeconds(pieces.leaving, of_nics),
                               LeavingSeconds(pieces.leaving_leaves, of_ways));
  for (const Enclaves* enclaves : {&domains, &leaves}) {
    for (const auto& [number, enclave] : enclaves->by_number) {
      on_network = std::max(on_network, enclave.Seconds());
      if (enclave.receivers == 0) continue;
      const double of_each =
          enclave.in_bytes / static_cast<double>(enclave.receivers);
      on_network =
          std::max(on_network, RankSeconds(of_each, nic, module.limits));
    }
  }
  module.stats.lower_bound_seconds = std::max(on_links, on_network);
}

}  // namespace

absl::Status BoundTime(const PassOptions&, Module& module) {
  SetLowerBound(module);
  return absl::OkStatus();
}

}  // namespace refit
