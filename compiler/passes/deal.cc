#include <algorithm>
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

// What one source sends the ranks of one host.
struct HostTransfers {
  std::vector<size_t> transfers;  // of Module::transfers
  std::vector<PieceId> pieces;    // ascending, each once
  std::set<Rank> receivers;
  int64_t bytes = 0;
};
using ByHost = std::map<int32_t, std::map<Rank, HostTransfers>>;

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
  for (const auto& [host, by_source] : ListTransfers()) {
    DealHost(host, by_source);
  }
  RemoveTransfers();
  std::sort(module_.deals.begin(), module_.deals.end(),
            [](const refit::Deal& a, const refit::Deal& b) {
              return std::tie(a.source, a.dealer, a.receivers) <
                     std::tie(b.source, b.dealer, b.receivers);
            });
}

// What is dealt out stays for a round longer.
void CheckStaging(const PassOptions& options, const Limits& limits) {
  const int64_t wanted = AlignStaging(limits.bucket_bytes) * (limits.slots + 1);
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
  if (!module.limits.deals) return absl::OkStatus();
  Dealer(module).Deal();
  if (!module.deals.empty()) CheckStaging(options, module.limits);
  return absl::OkStatus();
}

}  // namespace refit
