#include <algorithm>
#include <array>
#include <utility>

#include "compiler/ir/counting_sort.h"
#include "compiler/module_sites.h"
#include "compiler/passes/passes.h"
#include "simulator/links.h"

namespace refit {
namespace {

constexpr std::array kRoutes = {Route::kLocal, Route::kPeer, Route::kNetwork};

// A rank's links carry both directions at once.
struct RankLoad {
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
  int64_t sent_messages = 0;  // of those that are dealt out
  int64_t received_messages = 0;

  int64_t Busiest() const { return std::max(sent_bytes, received_bytes); }
};

size_t RouteIndex(Route route) {
  return static_cast<size_t>(std::find(kRoutes.begin(), kRoutes.end(), route) -
                             kRoutes.begin());
}

// Of blocks, from bf16, as measured on an H200.
constexpr double kQuantizedElementsPerSecond = 1200e9;

// The message's bytes, as many as take its time at the speed that a rank has on
// its route: a NIC is as fast as all ranks that may share it, and between hosts
// of one NVLink domain a message goes over NVLink.
int64_t BytesOnRoute(const Module& module, const Message& message, Route link) {
  const Topology& topology = module.topology;
  const double of_link =
      link == Route::kNetwork
          ? topology.network_bytes_per_second * topology.gpus_per_nic
          : topology.BytesPerSecond(link);
  const double of_rank = topology.BytesPerSecond(message.route);
  if (of_link == of_rank) return message.size_bytes;
  return static_cast<int64_t>(static_cast<double>(message.size_bytes) *
                              of_rank / of_link);
}

// Messages inside a host start one after the other.
double DealtSeconds(const Module& module, const RankLoad& load) {
  return static_cast<double>(load.Busiest()) /
             module.topology.peer_bytes_per_second +
         static_cast<double>(
             std::max(load.sent_messages, load.received_messages)) *
             kDealtMessageSeconds;
}

// Whether each source moves what stays on its GPU beside its other rounds
// (DirectEnds::beside in plan/schedule/direct_ends.h).
bool MovesLocalBeside(const Module& module) {
  const Stats& stats = module.stats;
  if (module.MechanismOf(Route::kLocal) != Mechanism::kDirect ||
      stats.network_bytes > 0 || stats.relayed_bytes > 0 ||
      !module.quantizes.empty()) {
    return false;
  }
  // More bytes on its GPU than elsewhere, by source.
  std::vector<int64_t> more_here(module.source.ranks.size(), 0);
  for (const Message& message : module.messages) {
    more_here[IndexOf(message.source)] += message.route == Route::kLocal
                                              ? message.size_bytes
                                              : -message.size_bytes;
  }
  return std::all_of(more_here.begin(), more_here.end(),
                     [](int64_t bytes) { return bytes <= 0; });
}

// What the rounds of each wave take: a round as long as its busiest
// GPU or NIC. `beside`: MovesLocalBeside.
std::vector<double> TransferSeconds(const Module& module, bool beside) {
  const size_t world = static_cast<size_t>(module.world_size());
  const simulator::Links links(SitesOf(module), LinkOptionsOf(module));
  // NVLink is a rank's own. NICs, which ranks may share, come behind all ranks.
  const auto owner_of = [&](Rank rank, Route link) {
    return link == Route::kNetwork
               ? world + links.place(static_cast<int32_t>(rank)).nic
               : IndexOf(rank);
  };
  // What counts of messages, close together: they are many.
  struct OfRound {
    int32_t round = 0;
    size_t source = 0;  // whose link it is
    size_t destination = 0;
    int32_t wave = 0;
    bool is_held = false;
    bool is_sent_with_other = false;
    int64_t bytes = 0;
  };
  std::vector<OfRound> messages;
  messages.reserve(module.messages.size());
  for (const Message& message : module.messages) {
    const Route link = module.LinkBetween(message.source, message.destination);
    messages.push_back({.round = message.round,
                        .source = owner_of(message.source, link),
                        .destination = owner_of(message.destination, link),
                        .wave = message.wave,
                        .is_held = IsBesideNetwork(message),
                        .is_sent_with_other = message.is_sent_with_other(),
                        .bytes = BytesOnRoute(module, message, link)});
  }
  CountingSort(messages, module.rounds.size(), [](const OfRound& message) {
    return static_cast<size_t>(message.round);
  });
  // What is dealt has links of its own beside them.
  std::vector<RankLoad> loads(2 * world), dealt(2 * world);
  std::vector<double> seconds(static_cast<size_t>(module.waves), 0);
  for (size_t begin = 0; begin < messages.size();) {
    const int32_t round = messages[begin].round;
    size_t end = begin;
    int64_t busiest = 0;
    double dealt_seconds = 0;
    for (; end < messages.size() && messages[end].round == round; ++end) {
      const int64_t bytes = messages[end].bytes;
      const bool is_held = messages[end].is_held;
      std::vector<RankLoad>& of_links = is_held ? dealt : loads;
      RankLoad& source = of_links[messages[end].source];
      RankLoad& destination = of_links[messages[end].destination];
      if (!messages[end].is_sent_with_other) source.sent_bytes += bytes;
      destination.received_bytes += bytes;
      if (!is_held) {
        busiest = std::max({busiest, source.Busiest(), destination.Busiest()});
        continue;
      }
      ++source.sent_messages;
      ++destination.received_messages;
      for (const RankLoad* load : {&source, &destination}) {
        dealt_seconds = std::max(dealt_seconds, DealtSeconds(module, *load));
      }
    }
    for (size_t i = begin; i < end; ++i) {
      for (const size_t link : {messages[i].source, messages[i].destination}) {
        loads[link] = {};
        dealt[link] = {};
      }
    }
    const Route route = module.rounds[static_cast<size_t>(round)].route;
    const auto wave = static_cast<size_t>(messages[begin].wave);
    begin = end;
    if (beside && route == Route::kLocal) continue;
    seconds[wave] += module.RoundSeconds(route) +
                     std::max(static_cast<double>(busiest) /
                                  module.topology.BytesPerSecond(route),
                              dealt_seconds);
  }
  return seconds;
}

// What the slowest rank of a side takes to quantize each wave.
std::vector<double> QuantizeSeconds(const Module& module, QuantizedAt at) {
  std::vector<double> seconds(static_cast<size_t>(module.waves), 0);
  for (size_t rank = 0; rank < module.quantizes.size(); ++rank) {
    const bool is_source = rank < module.source.ranks.size();
    if (is_source != (at == QuantizedAt::kSource)) continue;
    const std::vector<BufferId>& buffers =
        module.buffers_of(Rank{static_cast<int32_t>(rank)});
    std::vector<int64_t> elements(seconds.size(), 0);
    for (const Quantize& op : module.quantizes[rank].quantizes) {
      const int32_t scratch = is_source ? op.output.slot : op.input.slot;
      const int32_t wave =
          module.buffers[buffers[static_cast<size_t>(scratch)]].wave;
      elements[static_cast<size_t>(std::max(wave, 0))] += op.box.Volume();
    }
    for (size_t wave = 0; wave < seconds.size(); ++wave) {
      seconds[wave] =
          std::max(seconds[wave], static_cast<double>(elements[wave]) /
                                      kQuantizedElementsPerSecond);
    }
  }
  return seconds;
}

// A wave is quantized at sources while the one before it travels, and at
// destinations while the one after it does, in memory that the one before the
// last has left.
double PredictedSeconds(const Module& module) {
  const std::vector<double> transfer =
      TransferSeconds(module, MovesLocalBeside(module));
  const std::vector<double> before =
      QuantizeSeconds(module, QuantizedAt::kSource);
  const std::vector<double> after =
      QuantizeSeconds(module, QuantizedAt::kDestination);
  struct Times {
    double quantized = 0;
    double moved = 0;
    double emptied = 0;
  };
  Times last, last_but_one;
  for (size_t wave = 0; wave < transfer.size(); ++wave) {
    Times times;
    times.quantized =
        std::max(last.quantized, last_but_one.moved) + before[wave];
    times.moved =
        std::max({last.moved, times.quantized, last_but_one.emptied}) +
        transfer[wave];
    times.emptied = std::max(last.emptied, times.moved) + after[wave];
    last_but_one = std::exchange(last, times);
  }
  return last.emptied;
}

}  // namespace

absl::Status EstimateCost(const PassOptions&, Module& module) {
  int64_t relayed_bytes = 0;
  std::array<int64_t, kRoutes.size()> by_route = {};
  std::vector<int64_t> bytes_of;  // by piece
  bytes_of.reserve(module.pieces.size());
  for (const Piece& piece : module.pieces) {
    bytes_of.push_back(module.WireBytes(piece));
  }
  const auto add = [&](PieceId piece, Rank source, Rank destination) {
    const int64_t of_all_parts =
        bytes_of[IndexOf(piece)] * module.AlikePartsOf(source).count;
    by_route[RouteIndex(module.RouteBetween(source, destination))] +=
        of_all_parts;
    if (module.IsRelay(source)) relayed_bytes += of_all_parts;
  };
  for (const Transfer& transfer : module.transfers) {
    add(transfer.piece, transfer.source, transfer.destination);
  }
  Stats& stats = module.stats;
  stats.local_bytes = by_route[RouteIndex(Route::kLocal)];
  stats.peer_bytes = by_route[RouteIndex(Route::kPeer)];
  stats.network_bytes = by_route[RouteIndex(Route::kNetwork)];
  stats.relayed_bytes = relayed_bytes;
  stats.moved_bytes =
      stats.local_bytes + stats.peer_bytes + stats.network_bytes;
  stats.predicted_seconds = PredictedSeconds(module);
  return absl::OkStatus();
}

}  // namespace refit
