#include <algorithm>
#include <cmath>
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
  int64_t sharers = 1;       // most of its ranks that want the same box
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

// A rank's round of the network takes this long before its bytes. One in which
// it only deals out, or is dealt to, takes a message at least.
constexpr double kStartSeconds = kStagedRoundSeconds;
static_assert(kDealtMessageSeconds <= kStartSeconds);

// What a rank's bytes take at least, in seconds a byte.
struct Costs {
  double network = 0;  // on its NIC
  double nvlink = 0;
  // A round starts once, and its bytes lie in staging: of one of the network,
  // and of one that only deals out.
  double start = 0;
  double dealt_round = 0;
  // What is dealt out starts message by message.
  double dealt_start = 0;
};

// What ranks take that send or receive so much between hosts: what comes in one
// round has room in a rank's staging.
double NetworkSeconds(double bytes, const Costs& costs) {
  constexpr double kRounding = 1e-9;
  const double rounds = bytes * costs.start / kStartSeconds;
  return bytes * costs.network +
         std::ceil(rounds * (1 - kRounding)) * kStartSeconds;
}

// What all ranks of a domain take together, if they deal nothing out: a rank
// does one round after the other, and a round has one route, so that time on
// the network and time on NVLink add up. Bytes that need not come over the
// network may do so where that is faster. Hosts of one domain exchange over
// NVLink in rounds of the network: then the two do not add up.
double SecondsApart(const DomainNeeds& domain, const Costs& costs) {
  const double on_network = NetworkSeconds(domain.network_bytes, costs);
  if (domain.hosts > 1) return on_network;
  return on_network + (domain.bytes - domain.network_bytes) *
                          std::min(costs.network, costs.nvlink);
}

// And if they deal out. Of the bytes K that need not cross the network, let z
// cross it all the same, let ranks store e in rounds of NVLink, and let them
// deal out the other d beside the network. What is dealt out lies in the
// staging of its receivers and, once for all of them, in that of the rank that
// deals it. So of the rounds of all ranks, r with messages of the network and
// more without,
//   r + more >= (network_bytes + z + d + d / others) / staging_bytes
//   r >= (network_bytes + z) / staging_bytes
// and the ranks together take
//   t >= (network_bytes + z) / network + e / nvlink
//        + r x start + more x start of a message
//   t >= (d + e) / nvlink + d / bucket_bytes x start of a message
//        + ranks x start
// The first adds rounds up. The second has the messages of NVLink alone, which
// all wait for the first round of the network, unless a rank of the domain
// holds their bytes. So for any part p, t is at least p times the first and
// 1 - p times the second. Of each byte of K that is at least the least of the
// factors of z, e and d. That is largest where two of these are equal.
double SecondsBeside(const DomainNeeds& domain, const Costs& costs) {
  const double rest = domain.bytes - domain.network_bytes;
  const auto others =
      static_cast<double>(std::max<int64_t>(domain.sharers - 1, 1));
  const double again = costs.network + costs.start;
  const double stored = costs.nvlink;
  const double staged = (1 + 1 / others) * costs.dealt_round;
  const double dealt = costs.nvlink + costs.dealt_start;
  const double first = domain.near_bytes == 0
                           ? kStartSeconds * static_cast<double>(domain.ranks)
                           : 0;
  double most = 0;
  for (const double part :
       {1.0, stored / again, (dealt - stored) / (dealt - staged),
        dealt / (dealt + again - staged)}) {
    if (!(part >= 0 && part <= 1)) continue;
    most = std::max(most,
                    part * domain.network_bytes * again + (1 - part) * first +
                        rest * std::min({part * again, stored,
                                         part * staged + (1 - part) * dealt}));
  }
  return most;
}

// What the ranks of a host take that pass on what the network brings. A rank
// passes on in a round what came in earlier ones, so that both go in steps.
// What follows is of a rank, in the mean. W bytes come over the network, and K
// are received from others. X of W are passed on, each to as many as want any.
// Round i of the network brings m of X, and the rank deals out h in it. What it
// stores in other rounds is e. Then
//   (1) t >= W / network + rounds x start + e / nvlink
//   (2) t >= X / 2 network + K / 2 nvlink + sum over rounds of
//            (m^2 / 2 network + i x m x start) / X + h^2 / 2 nvlink K
// (2) compares when what is passed on has come, in the mean, with when it has
// to be passed on. A round's bytes have come when it ends. All that a rank
// deals out in a round had come before it. Both have sums of squares, X^2 and
// K^2. The mean of the ranks' squares is no less than the square of their mean.
// For any part q, t is at least 1 - q times (1) and q times (2). All m are X,
// and all h are K - e. With prices for these, each round is on its own: no m or
// h makes the sum less than here. What comes over the network again, instead of
// being passed on, must cost more than all prices save: else the prices are not
// taken.
class Steps {
 public:
  // Requires one host. `at_least`: what its ranks take in any case.
  Steps(const DomainNeeds& domain, const Costs& costs, double at_least)
      : network_(costs.network),
        nvlink_(costs.nvlink),
        dealt_(costs.dealt_start),
        at_least_(at_least),
        times_(static_cast<double>(domain.sharers - 1)),
        come_(domain.network_bytes / static_cast<double>(domain.ranks)),
        passed_((domain.bytes - domain.network_bytes) /
                static_cast<double>(domain.ranks)),
        fed_(passed_ / times_) {}

  // By the best of some prices.
  double Seconds() const {
    const double rounds =
        std::sqrt((fed_ * network_ + passed_ * nvlink_) / kStartSeconds);
    double most = 0;
    for (double part = 0.3; part < 0.95; part += 0.05) {
      const double highest = std::sqrt(2 * part * (1 - part) * kStartSeconds /
                                       (passed_ / nvlink_));
      for (const double share : {0.0, 0.5, 0.8, 0.9, 0.95}) {
        for (double last = 0.5; last < 2; last += 0.1) {
          most = std::max(most, With(part, last * rounds, share * highest));
        }
      }
    }
    return most;
  }

 private:
  // By these prices. A byte of X costs as much as if it came in round `last`.
  // One of K costs `dealt_price` seconds. 0 if it would be cheaper to send
  // bytes over the network again, or to store them.
  double With(double part, double last, double dealt_price) const {
    const double fed_price = part * last * kStartSeconds / fed_;
    const double of_starts = part * dealt_;
    const double again =
        (1 - part) * network_ -
        part * (fed_ * network_ + passed_ * nvlink_ - at_least_) / passed_ -
        fed_price / times_ - dealt_price - of_starts;
    const double stored = (1 - part) * nvlink_ - dealt_price - of_starts;
    if (again < 0 || stored < 0) return 0;
    double seconds =
        (1 - part) * come_ * network_ +
        part * (fed_ * network_ + passed_ * (nvlink_ + dealt_)) / 2 +
        fed_price * fed_ + dealt_price * passed_;
    const double of_dealt =
        dealt_price * dealt_price * passed_ / (2 * part * nvlink_);
    for (double round = 1;; ++round) {
      const double late = std::max(0.0, last - round) * kStartSeconds;
      const double saved = part * late * late / (2 * fed_ * network_) +
                           of_dealt - (1 - part) * kStartSeconds;
      if (saved <= 0) return seconds;
      seconds -= saved;
    }
  }

  const double network_, nvlink_;  // seconds a byte
  const double dealt_;             // what starts of dealt messages add to it
  const double at_least_;
  const double times_;                // most that a byte is passed on
  const double come_, passed_, fed_;  // bytes of a rank, in the mean: W, K, X
};

// The time that no plan can beat:
// - a receiver's bytes over all its links at once;
// - what one rank alone holds leaves it at least once; what some sources alone
//   hold leaves them over the network at least once, where other domains alone
//   want it;
// - what a host's ranks want and none of them holds crosses the network to it
//   at least once; so it does to an NVLink domain of several hosts;
// - a rank does one round after the other (SecondsApart), unless ranks of its
//   host deal out (SecondsBeside, Steps);
// - a round of the network starts before its bytes, and no more of them than
//   fit into staging.
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
  std::vector<int32_t> domain_of;  // by rank
  for (int32_t host : topology.host) {
    domain_of.push_back(topology.DomainOf(host));
  }
  std::vector<int32_t> domains_without;
  std::vector<Rank> sources;
  // Pieces in a row often have the same.
  auto last_leaving = leaving.end();
  auto last_domain = domains.end();
  for (const Piece& piece : module.pieces) {
    const double bytes = static_cast<double>(module.WireBytes(piece));
    domains_without.clear();
    sources = piece.sources;
    sources.insert(sources.end(), piece.sources_of_other_waves.begin(),
                   piece.sources_of_other_waves.end());
    bool leaves = false;
    bool has_near = false;  // a receiver that need not use the network
    for (Rank destination : piece.destinations) {
      const int32_t number = domain_of[IndexOf(destination)];
      const bool near = std::any_of(
          sources.begin(), sources.end(),
          [&](Rank source) { return domain_of[IndexOf(source)] == number; });
      has_near |= near;
      if (near && topology.colocated &&
          std::any_of(sources.begin(), sources.end(), [&](Rank source) {
            return module.RouteBetween(source, destination) == Route::kLocal;
          })) {
        continue;
      }
      leaves = true;
      ranks[IndexOf(destination)].received_bytes += bytes;
      if (last_domain == domains.end() || last_domain->first != number) {
        last_domain = domains.find(number);
      }
      DomainNeeds& domain = last_domain->second;
      domain.bytes += bytes;
      if (near) {
        domain.near_bytes += bytes;
      } else {
        domains_without.push_back(number);
      }
    }
    std::sort(domains_without.begin(), domains_without.end());
    for (auto begin = domains_without.begin();
         begin != domains_without.end();) {
      const auto end = std::upper_bound(begin, domains_without.end(), *begin);
      DomainNeeds& domain = domains[*begin];
      domain.network_bytes += bytes;
      domain.sharers = std::max<int64_t>(domain.sharers, end - begin);
      begin = end;
    }
    // Near receivers might pass it on over NICs of their own.
    if (!domains_without.empty() && !has_near) {
      std::sort(sources.begin(), sources.end());
      if (last_leaving == leaving.end() || last_leaving->first != sources) {
        last_leaving = leaving.try_emplace(sources, 0).first;
      }
      last_leaving->second += bytes / module.parts();
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
  const Costs costs = {
      .network = 1 / nic_bytes_per_second,
      .nvlink = 1 / topology.peer_bytes_per_second,
      .start = kStartSeconds / static_cast<double>(module.limits.staging_bytes),
      .dealt_round = kDealtMessageSeconds /
                     static_cast<double>(module.limits.staging_bytes),
      .dealt_start = kDealtMessageSeconds /
                     static_cast<double>(module.limits.bucket_bytes)};
  double seconds = NetworkSeconds(MostPerHolder(leaving), costs);
  for (const MustMove& rank : ranks) {
    seconds = std::max(seconds,
                       std::max(rank.received_bytes, rank.sent_bytes) / links);
  }
  for (const auto& [number, domain] : domains) {
    const auto of_ranks = static_cast<double>(domain.ranks);
    double rounds = SecondsApart(domain, costs) / of_ranks;
    if (module.limits.relays) {
      rounds = std::min(rounds, SecondsBeside(domain, costs) / of_ranks);
      if (domain.hosts == 1 && domain.near_bytes == 0 && domain.sharers > 1) {
        rounds = std::max(rounds, Steps(domain, costs, rounds).Seconds());
      }
    }
    const double of_nics =
        domain.network_bytes * costs.network / static_cast<double>(domain.nics);
    seconds =
        std::max({seconds, rounds, of_nics > 0 ? of_nics + kStartSeconds : 0,
                  NetworkSeconds(domain.network_bytes / of_ranks, costs)});
  }
  module.stats.lower_bound_seconds = seconds;
}

}  // namespace

absl::Status BoundTime(const PassOptions&, Module& module) {
  SetLowerBound(module);
  return absl::OkStatus();
}

}  // namespace refit
