#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_format.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/rails.h"
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
constexpr double kRounding = 1e-9;

// What one source sends the ranks of one host.
struct HostTransfers {
  std::vector<size_t> transfers;  // of Module::transfers
  std::vector<PieceId> pieces;    // ascending, each once
  std::set<Rank> receivers;
  int64_t bytes = 0;
};
using ByHost = std::map<int32_t, std::map<Rank, HostTransfers>>;

// What a source feeds one rank in a wave, which passes it on inside its host.
struct StreamKey {
  Rank source{};
  Rank dealer{};
  std::vector<Rank> others;  // whom it is passed on to
  int32_t wave = 0;

  friend auto operator<=>(const StreamKey&, const StreamKey&) = default;
};
struct RelayedStream {
  std::vector<PieceId> pieces;
  int64_t bytes = 0;
};
using RelayedStreams = std::map<StreamKey, RelayedStream>;

// What the ranks do in one wave, in seconds by direction, then rank.
struct WaveLoad {
  using BySide = std::array<std::vector<double>, 2>;
  BySide network;
  BySide dealt;   // with what messages take to start
  BySide stored;  // after the network's rounds
};

// What a wave takes.
struct WaveSeconds {
  double rounds = 0;      // of the network, and what is dealt out beside
  double dealt = 0;       // of these
  double dealt_last = 0;  // what one of them deals out
  double stored = 0;
};

// What takes so long on the network and on NVLink, side by side. The fuller
// both links are, the less evenly rounds fill them: as in the simulator, for
// jobs of all kinds. The mean is of the eighth power, by operations that IEEE
// 754 rounds exactly: std::pow may differ in its last bit between CPUs.
double Together(double network, double dealt) {
  const auto square = [](double x) { return x * x; };
  const auto power = [&](double x) { return square(square(square(x))); };
  return std::sqrt(std::sqrt(std::sqrt(power(network) + power(dealt))));
}

double MostOf(const WaveLoad::BySide& load) {
  return std::max(*std::max_element(load[0].begin(), load[0].end()),
                  *std::max_element(load[1].begin(), load[1].end()));
}

class Dealer {
 public:
  explicit Dealer(Module& module) : module_(module), rails_(module) {}

  void Deal();

 private:
  ByHost ListTransfers() const;
  bool CanDeal(const Transfer& transfer) const;
  RelayedStreams ListRelayed() const;
  std::vector<size_t> CountDealt(const RelayedStreams& streams,
                                 double part) const;
  std::vector<WaveSeconds> SecondsOf(const RelayedStreams& streams,
                                     const std::vector<size_t>& counts) const;
  double StoreSeconds(const WaveSeconds& wave) const;
  double TotalOf(const std::vector<WaveSeconds>& waves) const;
  void DealTo(const RelayedStreams& streams, const std::vector<size_t>& counts);
  void DealRelays();
  void DealHost(int32_t host, const std::map<Rank, HostTransfers>& by_source);
  void DealOne(Rank source, Rank dealer, const HostTransfers& sent);
  void RemoveTransfers();
  int32_t HostOf(Rank rank) const {
    return module_.topology.host[IndexOf(rank)];
  }

  Module& module_;
  const Rails rails_;
  std::vector<bool> is_dealt_;  // by transfer
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
         static_cast<int32_t>(rails_.Members(host).size()) - 1 <=
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
  const std::vector<Rank>& members = rails_.Members(host);
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
    const size_t rail = rails_.PlaceOf(source);
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
  for (const size_t i : sent.transfers) {
    is_dealt_[i] = true;
    module_.pieces[IndexOf(module_.transfers[i].piece)].relays.clear();
  }
}

RelayedStreams Dealer::ListRelayed() const {
  RelayedStreams streams;
  for (const Transfer& transfer : module_.transfers) {
    const Piece& piece = module_.piece(transfer.piece);
    if (piece.relays.empty() || !CanDeal(transfer)) continue;
    std::vector<Rank> others;
    for (const Relay& relay : piece.relays) others.push_back(relay.receiver);
    std::sort(others.begin(), others.end());
    // Each dealer begins with the rank after it, so that all receive alike.
    std::rotate(
        others.begin(),
        std::upper_bound(others.begin(), others.end(), transfer.destination),
        others.end());
    RelayedStream& stream = streams[{.source = transfer.source,
                                     .dealer = transfer.destination,
                                     .others = std::move(others),
                                     .wave = piece.wave}];
    stream.pieces.push_back(transfer.piece);
    stream.bytes += module_.WireBytes(piece);
  }
  return streams;
}

// To how many of its others each stream is dealt out, if it is to about `part`
// of them.
std::vector<size_t> Dealer::CountDealt(const RelayedStreams& streams,
                                       double part) const {
  std::vector<size_t> counts;
  std::map<std::pair<Rank, int32_t>, double> owed;  // by dealer and wave
  for (const auto& [key, stream] : streams) {
    double& rest = owed[{key.dealer, key.wave}];
    rest += part * static_cast<double>(key.others.size());
    const double count = std::floor(
        std::min(rest + kRounding, static_cast<double>(key.others.size())));
    rest -= count;
    counts.push_back(static_cast<size_t>(count));
  }
  return counts;
}

// What each wave takes if ranks deal out so much beside the network, and store
// the rest after it.
std::vector<WaveSeconds> Dealer::SecondsOf(
    const RelayedStreams& streams, const std::vector<size_t>& counts) const {
  const size_t world = static_cast<size_t>(module_.world_size());
  const std::vector<double> none(world, 0);
  const size_t waves = static_cast<size_t>(module_.waves);
  std::vector<WaveLoad> loads(waves,
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
    add(loads[static_cast<size_t>(piece.wave)].network, transfer.source,
        transfer.destination,
        static_cast<double>(module_.WireBytes(piece)) /
            module_.topology.network_bytes_per_second);
  }
  // Rounds and messages as form-buckets makes them.
  double received = 0;
  double dealt_out = 0;
  size_t next = 0;
  for (const auto& [key, stream] : streams) {
    const size_t others = counts[next++];
    if (others == 0) continue;
    received += static_cast<double>(stream.bytes);
    dealt_out +=
        static_cast<double>(stream.bytes) * static_cast<double>(others);
  }
  const Module::DealtRound round =
      module_.DealtRoundOf(received > 0 ? dealt_out / received : 0);
  const double message_bytes =
      std::min(round.messages > 1
                   ? std::min(round.bytes / static_cast<double>(round.messages),
                              kDealtBytes)
                   : round.bytes,
               static_cast<double>(module_.limits.bucket_bytes));
  size_t count = 0;
  for (const auto& [key, stream] : streams) {
    const auto bytes = static_cast<double>(stream.bytes);
    const double seconds = bytes / module_.topology.peer_bytes_per_second;
    const double starts =
        std::ceil(bytes / message_bytes) * kDealtMessageSeconds;
    WaveLoad& load = loads[static_cast<size_t>(key.wave)];
    for (size_t i = 0; i < key.others.size(); ++i) {
      if (i < counts[count]) {
        add(load.dealt, key.dealer, key.others[i], seconds + starts);
      } else {
        add(load.stored, key.dealer, key.others[i], seconds);
      }
    }
    ++count;
  }
  std::vector<WaveSeconds> of_waves;
  for (const WaveLoad& load : loads) {
    const double bytes =
        MostOf(load.network) * module_.topology.network_bytes_per_second;
    const double network = MostOf(load.network) +
                           std::ceil(bytes / round.bytes) * kStagedRoundSeconds;
    const double dealt = MostOf(load.dealt);
    const double rounds = std::max(1.0, bytes / message_bytes);
    of_waves.push_back({.rounds = Together(network, dealt),
                        .dealt = dealt,
                        .dealt_last = dealt / rounds,
                        .stored = MostOf(load.stored)});
  }
  return of_waves;
}

// What stores of a wave take that are not deferred, with the round before them,
// which deals out alone.
double Dealer::StoreSeconds(const WaveSeconds& wave) const {
  if (wave.stored == 0) return 0;
  if (module_.DefersStores()) return wave.stored;
  return wave.stored + wave.dealt_last + module_.RoundSeconds(Route::kPeer);
}

double Dealer::TotalOf(const std::vector<WaveSeconds>& waves) const {
  double seconds = 0;
  bool stores = false;
  for (const WaveSeconds& wave : waves) {
    seconds += wave.rounds + StoreSeconds(wave);
    stores |= wave.stored > 0;
  }
  const WaveSeconds& last = waves.back();
  if (stores && module_.DefersStores()) {
    return seconds + last.dealt_last + module_.RoundSeconds(Route::kPeer);
  }
  // Of two rounds at least, the last one deals out alone.
  return last.stored > 0
             ? seconds
             : seconds + std::sqrt(last.dealt * kStagedRoundSeconds);
}

// Whom a source feeds deals out what it would relay inside its host, to as many
// of the others as takes least: to as many in all waves, or in each as takes
// the wave least. Many small messages start one after the other: it is faster
// to store what they would carry after the network's rounds.
void Dealer::DealRelays() {
  const RelayedStreams streams = ListRelayed();
  if (streams.empty()) return;
  size_t steps = 1;
  for (const auto& [key, stream] : streams) {
    steps = std::max(steps, key.others.size());
  }
  // Staged rounds pass on whole messages.
  if (module_.MechanismOf(Route::kPeer) == Mechanism::kStaged) steps = 1;
  std::vector<size_t> best = CountDealt(streams, 0);
  std::vector<size_t> of_waves = best;
  std::vector<WaveSeconds> seconds_of_waves = SecondsOf(streams, best);
  double least = TotalOf(seconds_of_waves) * kBeside;
  const auto keep = [&](const std::vector<size_t>& counts, double total) {
    if (total >= least) return;
    least = total;
    best = counts;
  };
  for (size_t step = 1; step <= steps; ++step) {
    const std::vector<size_t> counts = CountDealt(
        streams, static_cast<double>(step) / static_cast<double>(steps));
    const std::vector<WaveSeconds> seconds = SecondsOf(streams, counts);
    keep(counts, TotalOf(seconds));
    std::vector<bool> is_better;
    for (size_t wave = 0; wave < seconds.size(); ++wave) {
      WaveSeconds& so_far = seconds_of_waves[wave];
      is_better.push_back(seconds[wave].rounds + StoreSeconds(seconds[wave]) <
                          so_far.rounds + StoreSeconds(so_far));
      if (is_better[wave]) so_far = seconds[wave];
    }
    size_t i = 0;
    for (const auto& [key, stream] : streams) {
      if (is_better[static_cast<size_t>(key.wave)]) of_waves[i] = counts[i];
      ++i;
    }
  }
  keep(of_waves, TotalOf(seconds_of_waves));
  DealTo(streams, best);
}

void Dealer::DealTo(const RelayedStreams& streams,
                    const std::vector<size_t>& counts) {
  // What else its pieces are relayed to tells deals apart, too.
  struct DealKey {
    Rank source{};
    Rank dealer{};
    std::vector<Rank> receivers;
    std::vector<Relay> relays;

    auto operator<=>(const DealKey&) const = default;
  };
  std::map<DealKey, std::vector<PieceId>> deals;
  std::set<PieceId> dealt;
  size_t i = 0;
  for (const auto& [key, stream] : streams) {
    const size_t count = counts[i++];
    if (count == 0) continue;
    std::vector<Rank> receivers(
        key.others.begin(), key.others.begin() + static_cast<ptrdiff_t>(count));
    receivers.push_back(key.dealer);
    std::sort(receivers.begin(), receivers.end());
    for (const PieceId id : stream.pieces) {
      dealt.insert(id);
      std::vector<Relay>& relays = module_.pieces[IndexOf(id)].relays;
      std::erase_if(relays, [&](const Relay& relay) {
        return std::binary_search(receivers.begin(), receivers.end(),
                                  relay.receiver);
      });
      deals[{key.source, key.dealer, receivers, relays}].push_back(id);
    }
  }
  for (size_t t = 0; t < module_.transfers.size(); ++t) {
    const Transfer& transfer = module_.transfers[t];
    is_dealt_[t] =
        !module_.IsRelay(transfer.source) && dealt.contains(transfer.piece);
  }
  for (auto& [key, pieces] : deals) {
    std::sort(pieces.begin(), pieces.end());
    module_.deals.push_back({.source = key.source,
                             .dealer = key.dealer,
                             .receivers = key.receivers,
                             .pieces = std::move(pieces)});
  }
}

// Also those of relays that are dealt instead.
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
    const auto is_left = [&] {
      const std::vector<Relay>& relays = module_.piece(transfer.piece).relays;
      return !is_piece_dealt[IndexOf(transfer.piece)] ||
             std::find(relays.begin(), relays.end(),
                       Relay{transfer.source, transfer.destination}) !=
                 relays.end();
    };
    if (module_.IsRelay(transfer.source) ? is_left() : !is_dealt_[i]) {
      rest.push_back(transfer);
    }
  }
  module_.transfers = std::move(rest);
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
  // Deals that differ in relays alone stay as DealTo sorted them.
  std::stable_sort(module_.deals.begin(), module_.deals.end(),
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
