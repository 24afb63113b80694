#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_format.h"
#include "compiler/passes/passes.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// A dealer may have this much more than its share of what its host is sent,
// before another is taken that is not on the source's rail.
constexpr double kOverShare = 1.02;

// What ranks pass on inside hosts goes beside the network only where that takes
// less than this part of the time of doing so after it.
constexpr double kBeside = 0.98;
// Messages are about as large as this, where their streams are.
constexpr double kDealtBytes = static_cast<double>(int64_t{64} << 20);

// What one source sends the ranks of one host.
struct HostTransfers {
  std::vector<size_t> transfers;  // of Module::transfers
  std::vector<PieceId> pieces;    // ascending, each once
  std::set<Rank> receivers;
  int64_t bytes = 0;
};
using ByHost = std::map<int32_t, std::map<Rank, HostTransfers>>;

// What a source feeds one rank, which passes it on inside its host.
struct RelayedStream {
  std::vector<size_t> transfers;  // of Module::transfers
  std::vector<PieceId> pieces;
};
// By source, dealer and all receivers.
using RelayedStreams =
    std::map<std::tuple<Rank, Rank, std::vector<Rank>>, RelayedStream>;

// What the ranks do in one wave. By direction, then rank.
struct WaveLoad {
  using BySide = std::array<std::vector<double>, 2>;
  BySide network_bytes;
  BySide inside_bytes;
  BySide messages;  // that deal out
};

class Dealer {
 public:
  explicit Dealer(Module& module) : module_(module) {
    const int32_t sources = module.source_ranks();
    std::map<int32_t, size_t> sources_of_host;
    rails_.resize(static_cast<size_t>(sources), 0);
    for (int32_t i = 0; i < module.world_size(); ++i) {
      if (module.PartOf(Rank{i}) != 0) continue;
      const int32_t host = module.topology.host[static_cast<size_t>(i)];
      if (i < sources) {
        rails_[static_cast<size_t>(i)] = sources_of_host[host]++;
      } else {
        members_[host].push_back(Rank{i});
      }
    }
  }

  void Deal();

 private:
  ByHost ListTransfers() const;
  bool CanDeal(const Transfer& transfer) const;
  RelayedStreams ListRelayed() const;
  bool IsFasterBeside(const RelayedStreams& streams) const;
  void DealRelays();
  void DealHost(int32_t host, const std::map<Rank, HostTransfers>& by_source);
  void DealOne(Rank source, Rank dealer, const HostTransfers& sent);
  void RemoveTransfers();
  int32_t HostOf(Rank rank) const {
    return module_.topology.host[IndexOf(rank)];
  }

  Module& module_;
  std::vector<size_t> rails_;  // by source, of those of the first part
  std::map<int32_t, std::vector<Rank>> members_;  // destinations, by host
  std::vector<bool> is_dealt_;                    // by transfer
};

// What other hosts' sources send, unless it is relayed between hosts, or the
// two hosts share an NVLink domain. The dealer sends to all others in one
// round.
bool Dealer::CanDeal(const Transfer& transfer) const {
  if (module_.IsRelay(transfer.source) ||
      module_.LinkBetween(transfer.source, transfer.destination) !=
          Route::kNetwork) {
    return false;
  }
  const std::vector<Relay>& relays = module_.piece(transfer.piece).relays;
  const int32_t host = HostOf(transfer.destination);
  return std::all_of(relays.begin(), relays.end(),
                     [&](const Relay& relay) {
                       return HostOf(relay.receiver) == host;
                     }) &&
         static_cast<int32_t>(members_.at(host).size()) - 1 <=
             module_.limits.operations_per_round;
}

ByHost Dealer::ListTransfers() const {
  ByHost by_host;
  for (size_t i = 0; i < module_.transfers.size(); ++i) {
    const Transfer& transfer = module_.transfers[i];
    if (!CanDeal(transfer)) continue;
    const int32_t host = HostOf(transfer.destination);
    HostTransfers& sent = by_host[host][transfer.source];
    sent.transfers.push_back(i);
    sent.pieces.push_back(transfer.piece);
    sent.receivers.insert(transfer.destination);
    for (const Relay& relay : module_.piece(transfer.piece).relays) {
      sent.receivers.insert(relay.receiver);
    }
  }
  for (auto& [host, by_source] : by_host) {
    for (auto& [source, sent] : by_source) {
      std::sort(sent.pieces.begin(), sent.pieces.end());
      sent.pieces.erase(std::unique(sent.pieces.begin(), sent.pieces.end()),
                        sent.pieces.end());
      for (const PieceId piece : sent.pieces) {
        sent.bytes += module_.WireBytes(module_.piece(piece));
      }
    }
  }
  return by_host;
}

void Dealer::DealHost(int32_t host,
                      const std::map<Rank, HostTransfers>& by_source) {
  const std::vector<Rank>& members = members_.at(host);
  int64_t total = 0;
  std::vector<int64_t> loads(members.size(), 0);
  for (const auto& [source, sent] : by_source) {
    total += sent.bytes;
    if (sent.receivers.size() > 1) continue;
    const auto only =
        std::find(members.begin(), members.end(), *sent.receivers.begin());
    loads[static_cast<size_t>(only - members.begin())] += sent.bytes;
  }
  const double share =
      static_cast<double>(total) / static_cast<double>(members.size());
  for (const auto& [source, sent] : by_source) {
    if (sent.receivers.size() == 1) continue;
    // Of equal ones the next after the rail.
    const size_t rail = rails_[IndexOf(source)];
    size_t dealer = rail % members.size();
    if (static_cast<double>(loads[dealer] + sent.bytes) > share * kOverShare) {
      for (size_t i = 1; i < members.size(); ++i) {
        const size_t other = (rail + i) % members.size();
        if (loads[other] < loads[dealer]) dealer = other;
      }
    }
    loads[dealer] += sent.bytes;
    DealOne(source, members[dealer], sent);
  }
}

void Dealer::DealOne(Rank source, Rank dealer, const HostTransfers& sent) {
  std::vector<std::vector<Rank>> receivers_of(sent.pieces.size());
  for (const size_t i : sent.transfers) {
    const Transfer& transfer = module_.transfers[i];
    std::vector<Rank>& receivers = receivers_of[static_cast<size_t>(
        std::lower_bound(sent.pieces.begin(), sent.pieces.end(),
                         transfer.piece) -
        sent.pieces.begin())];
    receivers.push_back(transfer.destination);
    for (const Relay& relay : module_.piece(transfer.piece).relays) {
      receivers.push_back(relay.receiver);
    }
  }
  std::map<std::vector<Rank>, std::vector<PieceId>> pieces_for;
  for (size_t i = 0; i < sent.pieces.size(); ++i) {
    std::vector<Rank>& receivers = receivers_of[i];
    std::sort(receivers.begin(), receivers.end());
    pieces_for[std::move(receivers)].push_back(sent.pieces[i]);
  }
  for (auto& [receivers, pieces] : pieces_for) {
    module_.deals.push_back({.source = source,
                             .dealer = dealer,
                             .receivers = receivers,
                             .pieces = std::move(pieces)});
  }
  for (const size_t i : sent.transfers) is_dealt_[i] = true;
}

RelayedStreams Dealer::ListRelayed() const {
  RelayedStreams streams;
  for (size_t i = 0; i < module_.transfers.size(); ++i) {
    const Transfer& transfer = module_.transfers[i];
    const std::vector<Relay>& relays = module_.piece(transfer.piece).relays;
    if (relays.empty() || !CanDeal(transfer)) continue;
    std::vector<Rank> receivers = {transfer.destination};
    for (const Relay& relay : relays) receivers.push_back(relay.receiver);
    std::sort(receivers.begin(), receivers.end());
    RelayedStream& stream =
        streams[{transfer.source, transfer.destination, std::move(receivers)}];
    stream.transfers.push_back(i);
    stream.pieces.push_back(transfer.piece);
  }
  return streams;
}

// Many small messages start one after the other: then it is faster to store
// what they would carry after the network's rounds.
bool Dealer::IsFasterBeside(const RelayedStreams& streams) const {
  const size_t world = static_cast<size_t>(module_.world_size());
  const std::vector<double> none(world, 0);
  std::vector<WaveLoad> waves(static_cast<size_t>(module_.waves),
                              {{none, none}, {none, none}, {none, none}});
  const auto add = [](WaveLoad::BySide& load, Rank from, Rank to, double more) {
    load[0][IndexOf(from)] += more;
    load[1][IndexOf(to)] += more;
  };
  for (const Transfer& transfer : module_.transfers) {
    const Piece& piece = module_.piece(transfer.piece);
    if (module_.LinkBetween(transfer.source, transfer.destination) !=
        Route::kNetwork) {
      continue;
    }
    add(waves[static_cast<size_t>(piece.wave)].network_bytes, transfer.source,
        transfer.destination, static_cast<double>(module_.WireBytes(piece)));
  }
  for (const auto& [key, stream] : streams) {
    const auto& [source, dealer, receivers] = key;
    std::map<int32_t, double> bytes;  // by wave
    for (const PieceId id : stream.pieces) {
      const Piece& piece = module_.piece(id);
      bytes[piece.wave] += static_cast<double>(module_.WireBytes(piece));
    }
    for (const auto& [wave, of_wave] : bytes) {
      WaveLoad& load = waves[static_cast<size_t>(wave)];
      for (const Rank receiver : receivers) {
        if (receiver == dealer) continue;
        add(load.inside_bytes, dealer, receiver, of_wave);
        add(load.messages, dealer, receiver, std::ceil(of_wave / kDealtBytes));
      }
    }
  }
  double beside = 0;
  double after = 0;
  double last = 0;  // what the last round of all deals out
  for (const WaveLoad& load : waves) {
    double network = 0;
    double stored = 0;
    double dealt = 0;
    for (const size_t side : {0, 1}) {
      for (size_t rank = 0; rank < world; ++rank) {
        network = std::max(network, load.network_bytes[side][rank]);
        const double seconds = load.inside_bytes[side][rank] /
                               module_.topology.peer_bytes_per_second;
        stored = std::max(stored, seconds);
        dealt = std::max(
            dealt, seconds + load.messages[side][rank] * kDealtMessageSeconds);
      }
    }
    network /= module_.topology.network_bytes_per_second;
    if (dealt == 0) continue;
    // The fuller both links are, the less evenly rounds fill them: as in the
    // simulator, for jobs of all kinds.
    beside += std::cbrt(network * network * network + dealt * dealt * dealt);
    after += network + stored + module_.RoundSeconds(Route::kPeer);
    last = std::sqrt(dealt * kStagedRoundSeconds);
  }
  return beside + last < after * kBeside;
}

// Whom a source feeds deals out what it would relay inside its host.
void Dealer::DealRelays() {
  RelayedStreams streams = ListRelayed();
  if (!IsFasterBeside(streams)) return;
  for (auto& [key, stream] : streams) {
    const auto& [source, dealer, receivers] = key;
    for (const size_t i : stream.transfers) is_dealt_[i] = true;
    module_.deals.push_back({.source = source,
                             .dealer = dealer,
                             .receivers = receivers,
                             .pieces = std::move(stream.pieces)});
  }
}

// Also those of relays whose piece is dealt.
void Dealer::RemoveTransfers() {
  std::vector<Transfer> rest;
  std::vector<bool> is_piece_dealt(module_.pieces.size(), false);
  for (size_t i = 0; i < module_.transfers.size(); ++i) {
    if (is_dealt_[i]) {
      is_piece_dealt[IndexOf(module_.transfers[i].piece)] = true;
    }
  }
  for (size_t i = 0; i < module_.transfers.size(); ++i) {
    const Transfer& transfer = module_.transfers[i];
    const bool relays = module_.IsRelay(transfer.source);
    if (relays ? !is_piece_dealt[IndexOf(transfer.piece)] : !is_dealt_[i]) {
      rest.push_back(transfer);
    }
  }
  module_.transfers = std::move(rest);
  for (size_t i = 0; i < module_.pieces.size(); ++i) {
    if (is_piece_dealt[i]) module_.pieces[i].relays.clear();
  }
}

void Dealer::Deal() {
  is_dealt_.assign(module_.transfers.size(), false);
  if (module_.limits.deals) {
    for (const auto& [host, by_source] : ListTransfers()) {
      DealHost(host, by_source);
    }
  } else {
    DealRelays();
  }
  RemoveTransfers();
  std::sort(module_.deals.begin(), module_.deals.end(),
            [](const refit::Deal& a, const refit::Deal& b) {
              return std::tie(a.source, a.dealer, a.receivers) <
                     std::tie(b.source, b.dealer, b.receivers);
            });
}

// What is dealt out stays for a round longer.
int64_t StagingToDeal(const Limits& limits) {
  return AlignStaging(limits.bucket_bytes) * (limits.slots + 1);
}

void CheckStaging(const PassOptions& options, const Limits& limits) {
  const int64_t wanted = StagingToDeal(limits);
  if (wanted <= limits.staging_bytes) return;
  const OptionsSpec& given = options.job.options;
  options.diagnostics.Error(
      given.staging_bytes.given ? given.staging_bytes.place
                                : given.bucket_bytes.place,
      absl::StrFormat("options.staging_bytes %d is too small; wanted at least "
                      "%d (slots %d + 1 to deal x bucket_bytes %d)",
                      limits.staging_bytes, wanted, limits.slots,
                      limits.bucket_bytes));
}

}  // namespace

absl::Status DealOut(const PassOptions& options, Module& module) {
  const Limits& limits = module.limits;
  const bool deals_relays =
      limits.deals_relays && StagingToDeal(limits) <= limits.staging_bytes;
  if (!limits.deals && !deals_relays) return absl::OkStatus();
  Dealer(module).Deal();
  if (!module.deals.empty()) CheckStaging(options, limits);
  return absl::OkStatus();
}

}  // namespace refit
