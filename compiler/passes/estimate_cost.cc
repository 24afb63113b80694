#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "absl/strings/str_format.h"
#include "compiler/passes/passes.h"
#include "plan/enum_text.h"

namespace refit {
namespace {

// What one NCCL group costs before its bytes: NCCL's own model starts from
// 8.4 us for a SIMPLE operation; with launch and rendezvous about twice that.
constexpr double kRoundSeconds = 20e-6;

constexpr std::array kRoutes = {Route::kLocal, Route::kPeer, Route::kNetwork};

double BytesPerSecond(const Topology& topology, Route route) {
  switch (route) {
    case Route::kLocal:
      return topology.local_bytes_per_second;
    case Route::kPeer:
      return topology.peer_bytes_per_second;
    case Route::kNetwork:
    case Route::kUnspecified:
      return topology.network_bytes_per_second;
  }
  return topology.network_bytes_per_second;
}

// What one rank or host must take in or give out, however a plan relays.
struct MustMove {
  double received_bytes = 0;  // by a rank, over all its links
  double sent_bytes = 0;      // of boxes that no other rank holds, once each
};

// The time that no plan can beat: a receiver's bytes over all its links at
// once; what one rank alone holds leaves it at least once; what a host's ranks
// want and none of them holds crosses the network to it at least once. Boxes
// that overlap without being equal count as different.
double LowerBoundSeconds(const Module& module) {
  const Topology& topology = module.topology;
  std::vector<MustMove> ranks(static_cast<size_t>(module.world_size()));
  std::map<int32_t, double> host_bytes;
  std::map<int32_t, int64_t> host_ranks;
  for (int32_t host : topology.host) ++host_ranks[host];
  for (const Piece& piece : module.pieces) {
    const double bytes = static_cast<double>(module.WireBytes(piece));
    std::set<int32_t> hosts_without;
    bool leaves = false;
    for (Rank destination : piece.destinations) {
      Route nearest = Route::kNetwork;
      for (Rank source : piece.sources) {
        nearest = std::min(nearest, module.RouteBetween(source, destination));
      }
      if (nearest == Route::kLocal) continue;
      leaves = true;
      ranks[IndexOf(destination)].received_bytes += bytes;
      if (nearest == Route::kNetwork) {
        hosts_without.insert(topology.host[IndexOf(destination)]);
      }
    }
    for (int32_t host : hosts_without) host_bytes[host] += bytes;
    if (leaves && piece.sources.size() == 1) {
      ranks[IndexOf(piece.sources.front())].sent_bytes += bytes;
    }
  }
  const double links =
      topology.peer_bytes_per_second +
      (host_ranks.size() > 1 ? topology.network_bytes_per_second : 0);
  double seconds = 0;
  for (const MustMove& rank : ranks) {
    seconds = std::max(seconds,
                       std::max(rank.received_bytes, rank.sent_bytes) / links);
  }
  for (const auto& [host, bytes] : host_bytes) {
    seconds =
        std::max(seconds, bytes / (topology.network_bytes_per_second *
                                   static_cast<double>(host_ranks[host])));
  }
  return seconds;
}

// Bytes of every rank in its busiest direction, by route and rank.
using Load = std::array<std::vector<int64_t>, kRoutes.size()>;

size_t RouteIndex(Route route) {
  return static_cast<size_t>(std::find(kRoutes.begin(), kRoutes.end(), route) -
                             kRoutes.begin());
}

// A round takes as long as its slowest rank.
double PredictedSeconds(const Module& module) {
  const size_t world = static_cast<size_t>(module.world_size());
  std::vector<const Message*> messages;
  for (const Message& message : module.messages) messages.push_back(&message);
  std::stable_sort(
      messages.begin(), messages.end(),
      [](const Message* a, const Message* b) { return a->round < b->round; });
  std::vector<int64_t> bytes(world, 0);
  double seconds = 0;
  for (size_t begin = 0; begin < messages.size();) {
    const int32_t round = messages[begin]->round;
    size_t end = begin;
    int64_t busiest = 0;
    for (; end < messages.size() && messages[end]->round == round; ++end) {
      for (Rank rank : {messages[end]->source, messages[end]->destination}) {
        bytes[IndexOf(rank)] += messages[end]->size_bytes;
        busiest = std::max(busiest, bytes[IndexOf(rank)]);
      }
    }
    for (size_t i = begin; i < end; ++i) {
      bytes[IndexOf(messages[i]->source)] = 0;
      bytes[IndexOf(messages[i]->destination)] = 0;
    }
    seconds +=
        kRoundSeconds +
        static_cast<double>(busiest) /
            BytesPerSecond(module.topology,
                           module.rounds[static_cast<size_t>(round)].route);
    begin = end;
  }
  return seconds;
}

std::string BindingLink(const Module& module, const Load& load) {
  double longest = 0;
  std::string link = "none";
  for (Route route : kRoutes) {
    const std::vector<int64_t>& by_rank = load[RouteIndex(route)];
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      const double seconds = static_cast<double>(by_rank[rank]) /
                             BytesPerSecond(module.topology, route);
      if (seconds <= longest) continue;
      longest = seconds;
      const bool sends = rank < module.source.ranks.size();
      link = absl::StrFormat("%s %s of rank %d, %.3f s for %d bytes",
                             EnumText(route), sends ? "egress" : "ingress",
                             rank, seconds, by_rank[rank]);
    }
  }
  return link;
}

}  // namespace

absl::Status EstimateCost(const PassOptions&, Module& module) {
  Load load;
  for (std::vector<int64_t>& by_rank : load) {
    by_rank.resize(static_cast<size_t>(module.world_size()), 0);
  }
  std::array<int64_t, kRoutes.size()> by_route = {};
  for (const Transfer& transfer : module.transfers) {
    const int64_t bytes = module.WireBytes(module.piece(transfer.piece));
    const size_t route =
        RouteIndex(module.RouteBetween(transfer.source, transfer.destination));
    by_route[route] += bytes;
    load[route][IndexOf(transfer.source)] += bytes;
    load[route][IndexOf(transfer.destination)] += bytes;
  }
  Stats& stats = module.stats;
  stats.local_bytes = by_route[RouteIndex(Route::kLocal)];
  stats.peer_bytes = by_route[RouteIndex(Route::kPeer)];
  stats.network_bytes = by_route[RouteIndex(Route::kNetwork)];
  stats.moved_bytes =
      stats.local_bytes + stats.peer_bytes + stats.network_bytes;
  stats.lower_bound_seconds = LowerBoundSeconds(module);
  stats.predicted_seconds = PredictedSeconds(module);
  stats.binding_link = BindingLink(module, load);
  return absl::OkStatus();
}

}  // namespace refit
