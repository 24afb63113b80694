#include "compiler/passes/flows.h"

#include <algorithm>

namespace refit {
namespace {

// Those on the one host that has all sources, unless they are of the flow.
Members NearReceivers(const Module& module, const Piece& piece,
                      absl::Span<const Members> sites) {
  const std::vector<int32_t>& host = module.topology.host;
  const int32_t number = host[IndexOf(piece.sources.front())];
  Members near;
  if (module.topology.colocated ||
      std::any_of(piece.sources.begin(), piece.sources.end(), [&](Rank source) {
        return host[IndexOf(source)] != number;
      })) {
    return near;
  }
  for (const Rank receiver : piece.destinations) {
    if (host[IndexOf(receiver)] == number) near.push_back(receiver);
  }
  const bool are_members =
      !near.empty() &&
      std::any_of(sites.begin(), sites.end(), [&](const Members& members) {
        return std::binary_search(members.begin(), members.end(), near.front());
      });
  if (are_members) near.clear();
  return near;
}

// Ranks by a number that they have in common, ascending.
using RanksByNumber = std::vector<std::pair<int32_t, Members>>;

// Ranks ascend, and so do their numbers as a rule.
void AddTo(RanksByNumber& groups, int32_t number, Rank rank) {
  if (!groups.empty() && groups.back().first == number) {
    groups.back().second.push_back(rank);
    return;
  }
  auto at = std::lower_bound(
      groups.begin(), groups.end(), number,
      [](const auto& of, int32_t wanted) { return of.first < wanted; });
  if (at == groups.end() || at->first != number) {
    at = groups.insert(at, {number, {}});
  }
  at->second.push_back(rank);
}

// Whether ranks of several hosts, which NVLink joins, can pass on to each other
// what one of them receives: a round has room for as many messages, each worth
// its start on the link by which it comes.
bool MayPassOn(const Module& module, const Piece& piece,
               const Members& members) {
  const Limits& limits = module.limits;
  const auto ranks = static_cast<int64_t>(members.size());
  // A rank sends and receives a message, passes it on, and is passed as many.
  if (2 * ranks > limits.operations_per_round) return false;
  const Topology& topology = module.topology;
  const auto room = static_cast<double>(RoomOfHeldRound(limits));
  const bool has_source =
      std::any_of(piece.sources.begin(), piece.sources.end(), [&](Rank source) {
        return module.SiteOf(source) == module.SiteOf(members.front());
      });
  return has_source
             ? room >= topology.peer_bytes_per_second * kStagedRoundSeconds
             : room >= topology.network_bytes_per_second * kStagedRoundSeconds *
                           static_cast<double>(ranks);
}

std::vector<RankBytes> Level(const Holders& set, int64_t bytes,
                             std::vector<int64_t>& loads) {
  Holders order = set;
  std::stable_sort(order.begin(), order.end(), [&](Rank a, Rank b) {
    return loads[IndexOf(a)] < loads[IndexOf(b)];
  });
  int64_t sum = bytes;
  int64_t count = 0;
  for (const Rank rank : order) {
    if (count > 0 && loads[IndexOf(rank)] * count >= sum) break;
    sum += loads[IndexOf(rank)];
    ++count;
  }
  const int64_t level = (sum + count - 1) / count;
  std::vector<RankBytes> parts;
  for (const Rank rank : set) {
    const int64_t more = std::min(bytes, level - loads[IndexOf(rank)]);
    if (more <= 0) continue;
    parts.push_back({.rank = rank, .bytes = more});
    loads[IndexOf(rank)] += more;
    bytes -= more;
  }
  return parts;
}

}  // namespace

std::vector<Members> FarReceivers(const Module& module, const Piece& piece) {
  const std::vector<int32_t>& host = module.topology.host;
  std::vector<int32_t> near;
  for (const Rank source : piece.sources) near.push_back(host[IndexOf(source)]);
  std::sort(near.begin(), near.end());
  const auto is_near = [&](Rank receiver) {
    return std::binary_search(near.begin(), near.end(),
                              host[IndexOf(receiver)]);
  };
  RanksByNumber sites;
  for (const Rank receiver : piece.destinations) {
    AddTo(sites, module.SiteOf(receiver), receiver);
  }
  std::vector<Members> receivers;
  receivers.reserve(sites.size());
  for (std::pair<int32_t, Members>& of_site : sites) {
    Members& members = of_site.second;
    if (std::all_of(members.begin(), members.end(), is_near)) continue;
    const bool spans_hosts =
        std::any_of(members.begin(), members.end(), [&](Rank member) {
          return host[IndexOf(member)] != host[IndexOf(members.front())];
        });
    if (!spans_hosts || MayPassOn(module, piece, members)) {
      receivers.push_back(std::move(members));
      continue;
    }
    RanksByNumber hosts;
    for (const Rank member : members) {
      if (!is_near(member)) AddTo(hosts, host[IndexOf(member)], member);
    }
    for (auto& [number, ranks] : hosts) receivers.push_back(std::move(ranks));
  }
  return receivers;
}

Flows ListFlows(const Module& module) {
  Flows flows;
  // Pieces in a row are often of one flow.
  auto last = flows.end();
  for (size_t i = 0; i < module.pieces.size(); ++i) {
    const Piece& piece = module.pieces[i];
    if (piece.wire_dtype != piece.destination_dtype) continue;
    FlowKey key = {
        .wave = piece.wave, .hosts = FarReceivers(module, piece), .near = {}};
    if (key.hosts.empty()) continue;
    key.near = NearReceivers(module, piece, key.hosts);
    if (last == flows.end() || key < last->first || last->first < key) {
      last = flows.try_emplace(std::move(key)).first;
    }
    Share& share = last->second[piece.sources];
    share.pieces.push_back(PieceId{static_cast<int32_t>(i)});
    share.bytes += module.WireBytes(piece);
  }
  return flows;
}

Leveling::Leveling(const std::map<Holders, int64_t>& bytes_of,
                   std::vector<int64_t>& loads) {
  std::vector<const std::pair<const Holders, int64_t>*> order;
  order.reserve(bytes_of.size());
  for (const auto& of : bytes_of) order.push_back(&of);
  std::stable_sort(order.begin(), order.end(),
                   [](const auto* a, const auto* b) {
                     return a->first.size() < b->first.size();
                   });
  for (const auto* of : order) {
    sets_[of->first].parts = Level(of->first, of->second, loads);
  }
}

std::vector<RankBytes> Leveling::Take(const Holders& set, int64_t bytes) {
  OfSet& of = sets_.at(set);
  std::vector<RankBytes> taken;
  while (bytes > 0) {
    RankBytes& part = of.parts[of.next];
    const bool is_last = of.next + 1 == of.parts.size();
    const int64_t of_part = is_last ? bytes : std::min(bytes, part.bytes);
    if (of_part > 0) taken.push_back({.rank = part.rank, .bytes = of_part});
    part.bytes -= of_part;
    bytes -= of_part;
    if (part.bytes <= 0 && !is_last) ++of.next;
  }
  return taken;
}

}  // namespace refit
