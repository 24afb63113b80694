#include "compiler/passes/flows.h"

#include <algorithm>

namespace refit {
namespace {

// Those on the one host that has all sources.
Members NearReceivers(const Module& module, const Piece& piece) {
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
  return near;
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
  // Ranks ascend, and so do their hosts as a rule.
  std::vector<std::pair<int32_t, Members>> by_host;
  for (const Rank receiver : piece.destinations) {
    const int32_t number = host[IndexOf(receiver)];
    if (std::binary_search(near.begin(), near.end(), number)) continue;
    if (by_host.empty() || by_host.back().first != number) {
      auto at = std::lower_bound(
          by_host.begin(), by_host.end(), number,
          [](const auto& of, int32_t wanted) { return of.first < wanted; });
      if (at == by_host.end() || at->first != number) {
        at = by_host.insert(at, {number, {}});
      }
      at->second.push_back(receiver);
      continue;
    }
    by_host.back().second.push_back(receiver);
  }
  std::vector<Members> receivers;
  receivers.reserve(by_host.size());
  for (auto& [number, members] : by_host) {
    receivers.push_back(std::move(members));
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
    FlowKey key = {.wave = piece.wave,
                   .hosts = FarReceivers(module, piece),
                   .near = NearReceivers(module, piece)};
    if (key.hosts.empty()) continue;
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
