#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/rails.h"

namespace refit {
namespace {

// Relays of what sources of the host send must save at least this part of the
// time, and a round, to be worth it.
constexpr double kGain = 1.1;
// Relays between hosts more: they multiply messages, and the end of their
// pipeline is not in the estimate.
constexpr double kGainBetweenHosts = 1.25;
// Those of a part of what the busiest sources send cost few messages, but
// rounds with them are less full.
constexpr double kGainOfLeveling = 1.08;
// Where hosts deal and rounds are fewer, too many of them wait for relays.
constexpr double kRoundsToLevel = 40;
// Of what the network brought, inside hosts: a few rounds after it.
constexpr double kGainInsideHosts = 1.02;
// A piece is cut into stripes when it is more than this part of what is handed
// out with it; smaller ones are handed out whole.
constexpr int64_t kWholePieces = 256;
// What comes from other hosts is not dealt out inside one when it is less than
// this part, and than these bytes: it goes into messages that there are anyway.
constexpr int64_t kFedPieces = 4096;
constexpr int64_t kFedBytes = 128 << 10;
// Nor is what some ranks of the host want together and others do not, when it
// is less than this part and would take many small messages.
constexpr int64_t kFedGroups = 16;
// What is wanted by the same receivers of several hosts is passed on between
// them when it is more than this part of all that could be: the messages of a
// smaller part would cost more than their bytes.
constexpr int64_t kSmallPart = 256;
// Stripes are cut along the outermost dimension with this many rows for each.
constexpr int64_t kRowsPerStripe = 16;
// Where single elements are cut: a multiple of the widest access of a GPU.
constexpr int64_t kElementsTogether = 64;

// Ranks of one host, ascending. Most hosts want a piece for one rank or few.
using Members = absl::InlinedVector<Rank, 4>;

// The receivers of one host that want a piece and are fed by one route.
struct Group {
  size_t piece = 0;
  int64_t bytes = 0;
  int32_t host = 0;
  Route route = Route::kUnspecified;
  absl::Span<const Rank> senders;  // that may feed it: the host's own, or all
  Members members;
  bool casts = false;   // on arrival: what arrived is not what was sent
  bool relays = false;  // decided: each is given a part and passes it on

  bool CanRelay() const {
    return !casts && members.size() > 1 &&
           (route == Route::kNetwork || senders.size() < members.size());
  }
  // How often its bytes are sent to it.
  double Copies() const {
    return relays ? 1 : static_cast<double>(members.size());
  }
};

// The groups that want one piece over the network and can pass it on to each
// other, one a host.
using Broadcast = std::vector<const Group*>;

using BytesByRank = std::vector<double>;

double Largest(const BytesByRank& bytes) {
  return *std::max_element(bytes.begin(), bytes.end());
}

// `copies` of a group's bytes, sent by those that may.
void AddSent(const Group& group, double copies, BytesByRank& sent) {
  const double part = static_cast<double>(group.bytes) /
                      static_cast<double>(group.senders.size());
  for (Rank sender : group.senders) sent[IndexOf(sender)] += part * copies;
}

bool HasLocalSource(const Module& module, const Piece& piece,
                    Rank destination) {
  if (!module.topology.colocated) return false;
  return std::any_of(
      piece.sources.begin(), piece.sources.end(), [&](Rank source) {
        return module.RouteBetween(source, destination) == Route::kLocal;
      });
}

// All groups, by piece, then host.
struct Groups {
  std::vector<Group> all;
  // What `senders` that are not those of a piece refer to.
  std::deque<std::vector<Rank>> senders;
};

// The sources of a piece, by host.
class SourcesByHost {
 public:
  // `sources` must outlive what OfHost returns, and so must `sorted`.
  void Set(const Topology& topology, absl::Span<const Rank> sources,
           std::deque<std::vector<Rank>>& sorted) {
    const auto host_of = [&](Rank rank) {
      return topology.host[IndexOf(rank)];
    };
    const auto by_host = [&](Rank a, Rank b) {
      return host_of(a) < host_of(b);
    };
    if (!std::is_sorted(sources.begin(), sources.end(), by_host)) {
      std::vector<Rank>& copy =
          sorted.emplace_back(sources.begin(), sources.end());
      std::stable_sort(copy.begin(), copy.end(), by_host);
      sources = copy;
    }
    hosts_.clear();
    for (size_t begin = 0; begin < sources.size();) {
      const int32_t host = host_of(sources[begin]);
      size_t end = begin;
      while (end < sources.size() && host_of(sources[end]) == host) ++end;
      hosts_.emplace_back(host, sources.subspan(begin, end - begin));
      begin = end;
    }
  }

  // Empty: the host has none.
  absl::Span<const Rank> OfHost(int32_t host) const {
    const auto found =
        std::lower_bound(hosts_.begin(), hosts_.end(), host,
                         [](const auto& of_host, int32_t number) {
                           return of_host.first < number;
                         });
    return found == hosts_.end() || found->first != host
               ? absl::Span<const Rank>()
               : found->second;
  }

 private:
  std::vector<std::pair<int32_t, absl::Span<const Rank>>> hosts_;
};

// The group of `host` among those of the last piece, which begin at `begin`.
Group& GroupOf(int32_t host, size_t begin, std::vector<Group>& groups) {
  // Ranks ascend, and so do their hosts as a rule.
  if (groups.size() > begin && groups.back().host == host) {
    return groups.back();
  }
  const auto at = std::lower_bound(
      groups.begin() + static_cast<ptrdiff_t>(begin), groups.end(), host,
      [](const Group& group, int32_t number) { return group.host < number; });
  if (at != groups.end() && at->host == host) return *at;
  return *groups.insert(at, {.host = host, .senders = {}, .members = {}});
}

Groups ListGroups(const Module& module) {
  Groups groups;
  SourcesByHost sources_by_host;
  for (size_t i = 0; i < module.pieces.size(); ++i) {
    const Piece& piece = module.pieces[i];
    if (piece.is_routed) continue;
    sources_by_host.Set(module.topology, piece.sources, groups.senders);
    const size_t begin = groups.all.size();
    for (Rank destination : piece.destinations) {
      if (HasLocalSource(module, piece, destination)) continue;
      GroupOf(module.topology.host[IndexOf(destination)], begin, groups.all)
          .members.push_back(destination);
    }
    for (Group& group : absl::MakeSpan(groups.all).subspan(begin)) {
      const absl::Span<const Rank> neighbours =
          sources_by_host.OfHost(group.host);
      const bool peer = !neighbours.empty();
      group.piece = i;
      group.bytes = module.WireBytes(piece);
      group.route = peer ? Route::kPeer : Route::kNetwork;
      group.senders = peer ? neighbours : absl::Span<const Rank>(piece.sources);
      group.casts = piece.wire_dtype != piece.destination_dtype;
    }
  }
  return groups;
}

// What relays inside a host take beside their bytes. In stages they take
// several rounds, and what feeds them comes in more messages.
double RelayStartSeconds(const Module& module) {
  return module.MechanismOf(Route::kPeer) == Mechanism::kStaged
             ? kStagedRoundSeconds
             : module.RoundSeconds(Route::kPeer);
}

// Whether the groups of a host that can relay should, to be fed by sources of
// the host. What counts is the busiest sender: a receiver must be given
// everything in any case.
bool IsFasterOnPeers(const Module& module, absl::Span<Group* const> groups) {
  const size_t world = static_cast<size_t>(module.world_size());
  BytesByRank sent(world), sent_once(world), received(world);
  bool can_relay = false;
  for (const Group* group : groups) {
    const double members = static_cast<double>(group->members.size());
    can_relay |= group->CanRelay();
    AddSent(*group, members, sent);
    AddSent(*group, group->CanRelay() ? 1 : members, sent_once);
    for (Rank member : group->members) {
      received[IndexOf(member)] += static_cast<double>(group->bytes);
    }
  }
  if (!can_relay) return false;
  // A relay that shares its GPU with a source shares its link as well.
  const double busiest = module.topology.colocated
                             ? Largest(sent_once) + Largest(received)
                             : std::max(Largest(sent_once), Largest(received));
  const double peer = module.topology.peer_bytes_per_second;
  return (busiest / peer + RelayStartSeconds(module)) * kGain <=
         Largest(sent) / peer;
}

void ChooseOnPeers(const Module& module, std::vector<Group>& groups) {
  std::map<int32_t, std::vector<Group*>> by_host;
  for (Group& group : groups) {
    if (group.route == Route::kPeer) by_host[group.host].push_back(&group);
  }
  for (const auto& [host, of_host] : by_host) {
    if (!IsFasterOnPeers(module, of_host)) continue;
    for (Group* group : of_host) group->relays = group->CanRelay();
  }
}

// By whom wants them. Without those that are too small.
using BroadcastsByReceivers =
    std::map<std::vector<Members>, std::vector<Broadcast>>;

BroadcastsByReceivers ListBroadcasts(absl::Span<const Group> groups) {
  BroadcastsByReceivers broadcasts;
  // Pieces in a row are often wanted by the same.
  auto last = broadcasts.end();
  int64_t total = 0;
  Broadcast broadcast;
  for (size_t begin = 0; begin < groups.size();) {
    broadcast.clear();
    const size_t piece = groups[begin].piece;
    for (; begin < groups.size() && groups[begin].piece == piece; ++begin) {
      const Group& group = groups[begin];
      if (group.route != Route::kNetwork || group.casts) continue;
      if (!group.relays && group.members.size() > 1) continue;
      broadcast.push_back(&group);
    }
    if (broadcast.size() < 2) continue;
    total += broadcast.front()->bytes;
    const auto wants = [](const Group* group, const Members& members) {
      return group->members == members;
    };
    if (last == broadcasts.end() ||
        !std::equal(broadcast.begin(), broadcast.end(), last->first.begin(),
                    last->first.end(), wants)) {
      std::vector<Members> receivers;
      receivers.reserve(broadcast.size());
      for (const Group* group : broadcast) receivers.push_back(group->members);
      last = broadcasts.try_emplace(std::move(receivers)).first;
    }
    last->second.push_back(broadcast);
  }
  std::erase_if(broadcasts, [&](const auto& of_receivers) {
    int64_t bytes = 0;
    for (const Broadcast& broadcast : of_receivers.second) {
      bytes += broadcast.front()->bytes;
    }
    return bytes < total / kSmallPart;
  });
  return broadcasts;
}

// What ranks do to feed what is fed over the network.
struct NetworkLoad {
  BytesByRank sent_by;  // by rank; those of receivers are not counted
  // By the busiest rank:
  double sent = 0;
  double received = 0;
  double relayed = 0;  // to a receiver inside its host
};

// If groups relay as they say, and `broadcasts` pass on to each other.
NetworkLoad LoadOf(const Module& module, absl::Span<const Group> groups,
                   const BroadcastsByReceivers& broadcasts) {
  absl::flat_hash_set<const Group*> is_broadcast;
  const size_t world = static_cast<size_t>(module.world_size());
  BytesByRank sent(world), received(world), relayed(world);
  for (const auto& [receivers, of_receivers] : broadcasts) {
    for (const Broadcast& broadcast : of_receivers) {
      AddSent(*broadcast.front(), 1, sent);
      is_broadcast.insert(broadcast.begin(), broadcast.end());
    }
  }
  // The groups of a piece, one after the other, have the same senders.
  const Group* of_piece = nullptr;
  double copies = 0;
  const auto add_sent = [&] {
    if (of_piece != nullptr) AddSent(*of_piece, copies, sent);
    copies = 0;
  };
  for (const Group& group : groups) {
    if (group.route != Route::kNetwork) continue;
    if (of_piece != nullptr && of_piece->piece != group.piece) add_sent();
    of_piece = &group;
    if (!is_broadcast.contains(&group)) copies += group.Copies();
    const double bytes = static_cast<double>(group.bytes);
    const double once =
        bytes * group.Copies() / static_cast<double>(group.members.size());
    for (Rank member : group.members) {
      received[IndexOf(member)] += once;
      relayed[IndexOf(member)] += bytes - once;
    }
  }
  add_sent();
  const double most_sent = Largest(sent);
  return {std::move(sent), most_sent, Largest(received), Largest(relayed)};
}

// The network's bytes, and what is relayed inside hosts: beside them where it
// is dealt out, else after them. Only the pass that deals knows whether it
// pays.
double SecondsFor(const Module& module, const NetworkLoad& load) {
  const double network = std::max(load.sent, load.received) /
                         module.topology.network_bytes_per_second;
  const double inside = load.relayed / module.topology.peer_bytes_per_second;
  if (module.limits.deals) return std::max(network, inside);
  if (load.relayed == 0) return network;
  if (module.limits.deals_relays) {
    return std::max(network, inside) + module.RoundSeconds(Route::kNetwork);
  }
  return network + inside + RelayStartSeconds(module);
}

// What the same sources hold and the same receivers want.
struct Share {
  const std::vector<Members>* receivers = nullptr;
  absl::Span<const Rank> senders;
  std::vector<Broadcast> broadcasts;
  double bytes = 0;
  // That each sender need not send if receivers pass it on.
  double SavedBytes() const {
    return bytes * static_cast<double>(receivers->size() - 1) /
           static_cast<double>(senders.size());
  }
};

std::vector<Share> ListShares(const BroadcastsByReceivers& broadcasts) {
  std::vector<Share> shares;
  for (const auto& [receivers, of_receivers] : broadcasts) {
    std::map<absl::Span<const Rank>, size_t> by_senders;
    for (const Broadcast& broadcast : of_receivers) {
      const absl::Span<const Rank> senders = broadcast.front()->senders;
      const auto [it, is_new] = by_senders.try_emplace(senders, shares.size());
      if (is_new) {
        shares.push_back(
            {.receivers = &receivers, .senders = senders, .broadcasts = {}});
      }
      Share& share = shares[it->second];
      share.broadcasts.push_back(broadcast);
      share.bytes += static_cast<double>(broadcast.front()->bytes);
    }
  }
  return shares;
}

// The shares that hosts pass on so that the busiest sources send no more than
// receivers receive, or than sources do in the mean. `load`: without them.
BroadcastsByReceivers LevelSources(const Module& module,
                                   const BroadcastsByReceivers& broadcasts,
                                   const NetworkLoad& load) {
  const std::vector<Share> shares = ListShares(broadcasts);
  std::vector<std::vector<const Share*>> shares_of(load.sent_by.size());
  for (const Share& share : shares) {
    for (const Rank sender : share.senders) {
      shares_of[IndexOf(sender)].push_back(&share);
    }
  }
  BytesByRank sent = load.sent_by;
  double mean = 0;
  for (const double bytes : sent) mean += bytes;
  mean /= std::max<double>(1, module.source_ranks() / module.parts());
  const double target = std::max(load.received, mean);

  BroadcastsByReceivers chosen;
  std::set<const Share*> is_chosen;
  std::map<const std::vector<Members>*, double> relayed;
  // Sources take turns, so that each leaves others receivers that relay little.
  for (bool any = true; any;) {
    any = false;
    for (size_t source = 0; source < sent.size(); ++source) {
      const Share* best = nullptr;
      for (const Share* share : shares_of[source]) {
        // No further below the target than it is above.
        if (is_chosen.contains(share) ||
            sent[source] - share->SavedBytes() / 2 < target) {
          continue;
        }
        if (best == nullptr ||
            relayed[share->receivers] < relayed[best->receivers]) {
          best = share;
        }
      }
      if (best == nullptr) continue;
      any = true;
      is_chosen.insert(best);
      relayed[best->receivers] += best->bytes;
      for (const Rank sender : best->senders) {
        sent[IndexOf(sender)] -= best->SavedBytes();
      }
      std::vector<Broadcast>& of_receivers = chosen[*best->receivers];
      of_receivers.insert(of_receivers.end(), best->broadcasts.begin(),
                          best->broadcasts.end());
    }
  }
  return chosen;
}

// Leaves what each source sends the ranks on its rail. Those receive it in any
// case where hosts deal, so that no rank has more sources.
void KeepOnRails(const Module& module, BroadcastsByReceivers& broadcasts) {
  const Rails rails(module);
  for (auto& [receivers, of_receivers] : broadcasts) {
    std::erase_if(of_receivers, [&](const Broadcast& broadcast) {
      const absl::Span<const Rank> senders = broadcast.front()->senders;
      return senders.size() > 1 ||
             !std::all_of(
                 broadcast.begin(), broadcast.end(), [&](const Group* group) {
                   return group->members.size() == 1 &&
                          group->members.front() ==
                              rails.Opposite(senders.front(), group->host);
                 });
    });
  }
  std::erase_if(broadcasts, [](const auto& of) { return of.second.empty(); });
}

// What a dealer is sent in one round, about: it is dealt as much.
double RoundBytesOfDealers(const Module& module) {
  return static_cast<double>(module.limits.staging_bytes) /
         module.limits.slots / 2;
}

// What hosts pass on to each other.
struct BetweenHosts {
  BroadcastsByReceivers broadcasts;
  // Each share by way of one receiver; else pieces are cut into stripes.
  bool whole = false;
};

// Whether groups that are fed over the network relay inside their hosts, and
// what hosts pass on to each other: the least that is worth it.
BetweenHosts ChooseBetweenHosts(Module& module, std::vector<Group>& groups) {
  const auto relay = [&](bool inside) {
    for (Group& group : groups) {
      if (group.route == Route::kNetwork) {
        group.relays = inside && group.CanRelay();
      }
    }
  };
  relay(false);
  const NetworkLoad none = LoadOf(module, groups, {});
  relay(true);
  const NetworkLoad inside = LoadOf(module, groups, {});
  bool relays = true;
  double seconds = SecondsFor(module, inside);
  if (seconds * kGainInsideHosts > SecondsFor(module, none)) {
    relays = false;
    seconds = SecondsFor(module, none);
  }
  // Relays inside hosts may pay only with those between them.
  const double gain = module.limits.relays_eagerly ? 1 : kGainBetweenHosts;
  std::optional<BetweenHosts> best;
  bool best_inside = false;
  for (const bool with_inside : {false, true}) {
    if (relays && !with_inside) continue;
    if (best.has_value() && !module.limits.relays_eagerly) break;
    const NetworkLoad& load = with_inside ? inside : none;
    module.stats.may_relay_between_hosts |= load.sent > load.received;
    if (load.sent < load.received * gain) continue;
    relay(with_inside);
    BroadcastsByReceivers broadcasts = ListBroadcasts(groups);
    const double between =
        SecondsFor(module, LoadOf(module, groups, broadcasts)) +
        module.RoundSeconds(Route::kNetwork);
    if (between * gain > seconds) continue;
    seconds = between;
    best_inside = with_inside;
    best = {.broadcasts = std::move(broadcasts), .whole = false};
  }
  if (best.has_value()) {
    relay(best_inside);
    return *std::move(best);
  }
  relay(relays);
  const NetworkLoad& load = relays ? inside : none;
  if (module.limits.deals &&
      load.received < RoundBytesOfDealers(module) * kRoundsToLevel) {
    return {};
  }
  BroadcastsByReceivers broadcasts = ListBroadcasts(groups);
  if (module.limits.deals) KeepOnRails(module, broadcasts);
  BroadcastsByReceivers leveled = LevelSources(module, broadcasts, load);
  if (SecondsFor(module, LoadOf(module, groups, leveled)) * kGainOfLeveling <=
      seconds) {
    return {.broadcasts = std::move(leveled), .whole = true};
  }
  return {};
}

// A way from a source to all receivers of a piece.
struct RelayPath {
  Rank receiver{};  // the one that a source feeds
  std::vector<Relay> relays;
};

// One path begins at each receiver of each host. It leads to one receiver of
// every other host, and from there to the others of that host.
std::vector<RelayPath> PathsOf(absl::Span<const Members> hosts) {
  std::vector<RelayPath> paths;
  for (size_t host = 0; host < hosts.size(); ++host) {
    for (size_t i = 0; i < hosts[host].size(); ++i) {
      RelayPath& path = paths.emplace_back();
      path.receiver = hosts[host][i];
      std::vector<Relay> inside;
      for (size_t next = 0; next < hosts.size(); ++next) {
        // Paths go round the hosts from different ones on.
        const Members& members = hosts[(host + next) % hosts.size()];
        const Rank first = members[i % members.size()];
        if (next > 0) path.relays.push_back({path.receiver, first});
        for (Rank member : members) {
          if (member != first) inside.push_back({first, member});
        }
      }
      path.relays.insert(path.relays.end(), inside.begin(), inside.end());
    }
  }
  return paths;
}

// Cuts `box` into at most `count` stripes of nearly equal size.
std::vector<Box> Stripes(const Box& box, int64_t count) {
  size_t dim = 0;
  for (size_t d = 0; d < box.lo.size(); ++d) {
    if (box.extent(d) > box.extent(dim)) dim = d;
    if (box.extent(d) >= kRowsPerStripe * count) {
      dim = d;
      break;
    }
  }
  if (box.lo.empty()) return {box};
  const bool elements = dim + 1 == box.lo.size();
  const int64_t unit =
      elements && box.extent(dim) >= kElementsTogether * kRowsPerStripe * count
          ? kElementsTogether
          : 1;
  const int64_t cuts = std::min(count, box.extent(dim));
  std::vector<Box> stripes;
  for (int64_t i = 0; i < cuts; ++i) {
    const auto cut = [&](int64_t k) {
      return k == cuts ? box.hi[dim]
                       : box.lo[dim] + box.extent(dim) * k / cuts / unit * unit;
    };
    stripes.push_back(box);
    stripes.back().lo[dim] = cut(i);
    stripes.back().hi[dim] = cut(i + 1);
  }
  return stripes;
}

// A piece to hand out, and its receivers, by host.
struct PieceReceivers {
  size_t piece = 0;
  int64_t bytes = 0;
  std::vector<Members> hosts;
};

int64_t BytesOf(absl::Span<const PieceReceivers> together) {
  int64_t bytes = 0;
  for (const PieceReceivers& wanted : together) bytes += wanted.bytes;
  return bytes;
}

// Hands pieces out to the paths of their receivers.
class Distributor {
 public:
  explicit Distributor(Module& module)
      : module_(module),
        pieces_of_(module.pieces.size()),
        load_of_wave_(static_cast<size_t>(module.waves)),
        load_(static_cast<size_t>(module.world_size()), 0) {
    for (BytesOfRanks& loads : load_of_wave_) loads.resize(load_.size(), 0);
    received_of_wave_ = load_of_wave_;
  }

  // The receivers leave the destinations of the pieces. They stay in those of
  // less than `fed_bytes`, which nobody passes on.
  void HandOut(absl::Span<const PieceReceivers> together,
               int64_t fed_bytes = 0);
  // All to one path. They have the same receivers.
  void HandOutWhole(absl::Span<const PieceReceivers> together);
  // Each path is fed by few sources. They have the same receivers.
  void HandOutBySource(absl::Span<const PieceReceivers> together);
  // Puts what was handed out into the module.
  void Finish();

 private:
  // The path whose first receiver has least to relay in the piece's wave: the
  // rounds of a wave end before those of the next.
  const RelayPath& LeastLoaded(size_t piece,
                               const std::vector<RelayPath>& paths);
  class BySource;
  void Give(size_t piece, const Box& box, const RelayPath& path);
  void RemoveReceivers(const PieceReceivers& wanted);

  Module& module_;
  std::vector<std::vector<Piece>> pieces_of_;  // by the piece that was cut
  // Bytes that a path's first receiver relays, by rank: in each wave, and in
  // all.
  using BytesOfRanks = std::vector<int64_t>;
  std::vector<BytesOfRanks> load_of_wave_;
  BytesOfRanks load_;
  std::vector<BytesOfRanks> received_of_wave_;  // by a path's first receiver
};

const RelayPath& Distributor::LeastLoaded(size_t piece,
                                          const std::vector<RelayPath>& paths) {
  const BytesOfRanks& of_wave =
      load_of_wave_[static_cast<size_t>(module_.pieces[piece].wave)];
  const auto load_of = [&](const RelayPath& path) {
    return std::pair(of_wave[IndexOf(path.receiver)],
                     load_[IndexOf(path.receiver)]);
  };
  return *std::min_element(paths.begin(), paths.end(),
                           [&](const RelayPath& a, const RelayPath& b) {
                             return load_of(a) < load_of(b);
                           });
}

void Distributor::Give(size_t piece, const Box& box, const RelayPath& path) {
  Piece& given = pieces_of_[piece].emplace_back(module_.pieces[piece]);
  given.box = box;
  given.destinations = {path.receiver};
  given.relays = path.relays;
  const auto relayed = std::count_if(path.relays.begin(), path.relays.end(),
                                     [&](const Relay& relay) {
                                       return relay.sender == path.receiver;
                                     }) *
                       module_.WireBytes(given);
  const auto wave = static_cast<size_t>(given.wave);
  load_of_wave_[wave][IndexOf(path.receiver)] += relayed;
  received_of_wave_[wave][IndexOf(path.receiver)] += module_.WireBytes(given);
  load_[IndexOf(path.receiver)] += relayed;
}

void Distributor::RemoveReceivers(const PieceReceivers& wanted) {
  std::vector<Rank>& destinations = module_.pieces[wanted.piece].destinations;
  for (const Members& members : wanted.hosts) {
    std::vector<Rank> rest;
    std::set_difference(destinations.begin(), destinations.end(),
                        members.begin(), members.end(),
                        std::back_inserter(rest));
    destinations = std::move(rest);
  }
}

void Distributor::HandOut(absl::Span<const PieceReceivers> together,
                          int64_t fed_bytes) {
  const int64_t total = BytesOf(together);
  // Those of the last receivers, which the next piece often has too.
  const std::vector<Members>* hosts = nullptr;
  std::vector<RelayPath> paths;
  // The small ones level what the large ones leave uneven.
  for (const bool whole : {false, true}) {
    for (const PieceReceivers& wanted : together) {
      if ((wanted.bytes < total / kWholePieces) != whole) continue;
      if (wanted.bytes < fed_bytes) continue;
      if (hosts == nullptr || *hosts != wanted.hosts) {
        hosts = &wanted.hosts;
        paths = PathsOf(*hosts);
      }
      const int64_t count = whole ? 1 : static_cast<int64_t>(paths.size());
      for (const Box& box : Stripes(module_.pieces[wanted.piece].box, count)) {
        Give(wanted.piece, box, LeastLoaded(wanted.piece, paths));
      }
      RemoveReceivers(wanted);
    }
  }
}

void Distributor::HandOutWhole(absl::Span<const PieceReceivers> together) {
  const PieceReceivers& first = together.front();
  const std::vector<RelayPath> paths = PathsOf(first.hosts);
  const RelayPath& path = LeastLoaded(first.piece, paths);
  for (const PieceReceivers& wanted : together) {
    Give(wanted.piece, module_.pieces[wanted.piece].box, path);
    RemoveReceivers(wanted);
  }
}

// Hands out pieces with the same receivers, those of one set of sources after
// the other. A set goes to the path that has least to relay, but for what is
// more than all paths have in the end.
class Distributor::BySource {
 public:
  BySource(Distributor& distributor, absl::Span<const PieceReceivers> together)
      : distributor_(distributor),
        paths_(PathsOf(together.front().hosts)),
        received_(distributor.received_of_wave_[static_cast<size_t>(
            distributor.module_.pieces[together.front().piece].wave)]) {
    const int64_t total = BytesOf(together);
    slack_ = total / static_cast<int64_t>(paths_.size()) / kWholePieces;
    level_ = total;
    for (const RelayPath& path : paths_) level_ += LoadOf(path);
    level_ /= static_cast<int64_t>(paths_.size());
  }

  void StartSources(absl::Span<const Rank> sources) {
    sources_ = sources;
    path_ = nullptr;
  }
  void Give(size_t piece, Box rest);

 private:
  int64_t LoadOf(const RelayPath& path) const {
    return received_[IndexOf(path.receiver)];
  }

  // Whether it has room for so many bytes, or for a part of them that is worth
  // a cut.
  bool HasRoom(const RelayPath& path, int64_t bytes) const {
    return LoadOf(path) + std::min(bytes, 2 * slack_) <= level_ + slack_;
  }
  // One that the sources feed already, if it has room; else the one that has
  // least.
  const RelayPath& NextPath(int64_t bytes);

  Distributor& distributor_;
  const std::vector<RelayPath> paths_;
  const BytesOfRanks& received_;
  int64_t level_ = 0;
  int64_t slack_ = 0;
  absl::Span<const Rank> sources_;
  const RelayPath* path_ = nullptr;
  std::set<std::pair<Rank, Rank>> fed_;  // by source and first receiver
};

const RelayPath& Distributor::BySource::NextPath(int64_t bytes) {
  const RelayPath* best = nullptr;
  bool best_fed = false;
  for (const RelayPath& path : paths_) {
    const bool fed =
        HasRoom(path, bytes) &&
        std::any_of(sources_.begin(), sources_.end(), [&](Rank source) {
          return fed_.contains({source, path.receiver});
        });
    if (best == nullptr || fed > best_fed ||
        (fed == best_fed && LoadOf(path) < LoadOf(*best))) {
      best = &path;
      best_fed = fed;
    }
  }
  for (const Rank source : sources_) fed_.insert({source, best->receiver});
  return *best;
}

void Distributor::BySource::Give(size_t piece, Box rest) {
  const int64_t element_bytes =
      DTypeBytes(distributor_.module_.pieces[piece].wire_dtype);
  while (!rest.Empty()) {
    const int64_t bytes = rest.Volume() * element_bytes;
    if (path_ == nullptr || !HasRoom(*path_, bytes)) path_ = &NextPath(bytes);
    const int64_t room = level_ + slack_ - LoadOf(*path_);
    size_t dim = 0;
    while (dim + 1 < rest.lo.size() && rest.extent(dim) == 1) ++dim;
    const bool is_row = dim + 1 >= rest.lo.size();
    // A row is cut only where it is much more than there is room for, as of a
    // flat buffer.
    if (bytes <= (is_row ? room + 2 * slack_ : room) || rest.lo.empty()) {
      distributor_.Give(piece, rest, *path_);
      return;
    }
    const int64_t unit = is_row ? kElementsTogether : 1;
    const int64_t units = room / (bytes / rest.extent(dim) * unit);
    Box first = rest;
    rest.lo[dim] = std::min(rest.lo[dim] + std::max<int64_t>(units, 1) * unit,
                            rest.hi[dim]);
    first.hi[dim] = rest.lo[dim];
    if (units <= 0 && !is_row) {
      Give(piece, first);  // cuts inside a unit
    } else {
      distributor_.Give(piece, first, *path_);
    }
  }
}

void Distributor::HandOutBySource(absl::Span<const PieceReceivers> together) {
  std::map<absl::Span<const Rank>, std::vector<PieceReceivers>> by_sources;
  for (const PieceReceivers& wanted : together) {
    by_sources[module_.pieces[wanted.piece].sources].push_back(wanted);
  }
  // Those that hold most come first: the others level the rest.
  std::vector<std::pair<int64_t, absl::Span<const Rank>>> order;
  for (const auto& [sources, pieces] : by_sources) {
    order.emplace_back(-BytesOf(pieces), sources);
  }
  std::sort(order.begin(), order.end());
  BySource paths(*this, together);
  for (const auto& [bytes, sources] : order) {
    paths.StartSources(sources);
    for (const PieceReceivers& wanted : by_sources[sources]) {
      paths.Give(wanted.piece, module_.pieces[wanted.piece].box);
    }
  }
  for (const PieceReceivers& wanted : together) RemoveReceivers(wanted);
}

void Distributor::Finish() {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < pieces_of_.size(); ++i) {
    if (!module_.pieces[i].destinations.empty()) {
      pieces.push_back(std::move(module_.pieces[i]));
    }
    for (Piece& piece : pieces_of_[i]) pieces.push_back(std::move(piece));
  }
  module_.pieces = std::move(pieces);
}

}  // namespace

absl::Status FanOut(const PassOptions&, Module& module) {
  if (!module.limits.relays) return absl::OkStatus();
  Groups listed = ListGroups(module);
  std::vector<Group>& groups = listed.all;
  ChooseOnPeers(module, groups);
  const BetweenHosts between = ChooseBetweenHosts(module, groups);
  module.stats.relays_between_hosts = !between.broadcasts.empty();

  Distributor distributor(module);
  absl::flat_hash_set<const Group*> is_broadcast;
  const auto wave_of = [&](const Group& group) {
    return module.pieces[group.piece].wave;
  };
  for (const auto& [receivers, of_receivers] : between.broadcasts) {
    // By wave, and whole shares by their senders.
    std::map<std::pair<int32_t, absl::Span<const Rank>>,
             std::vector<PieceReceivers>>
        handed_out;
    for (const Broadcast& broadcast : of_receivers) {
      is_broadcast.insert(broadcast.begin(), broadcast.end());
      const Group& first = *broadcast.front();
      handed_out[{wave_of(first),
                  between.whole ? first.senders : absl::Span<const Rank>()}]
          .push_back(
              {.piece = first.piece, .bytes = first.bytes, .hosts = receivers});
    }
    for (const auto& [key, together] : handed_out) {
      if (between.whole) {
        distributor.HandOutWhole(together);
      } else {
        distributor.HandOut(together);
      }
    }
  }
  std::map<std::tuple<int32_t, Route, int32_t>, std::vector<PieceReceivers>>
      inside;
  for (const Group& group : groups) {
    if (!group.relays || is_broadcast.contains(&group)) continue;
    inside[{group.host, group.route, wave_of(group)}].push_back(
        {.piece = group.piece, .bytes = group.bytes, .hosts = {group.members}});
  }
  for (const auto& [key, together] : inside) {
    if (!module.limits.deals_relays ||
        std::get<Route>(key) != Route::kNetwork) {
      distributor.HandOut(together);
      continue;
    }
    // What is dealt out starts message by message.
    const int64_t total = BytesOf(together);
    const int64_t fed_bytes = std::min(total / kFedPieces, kFedBytes);
    std::map<Members, std::vector<PieceReceivers>> by_receivers;
    for (const PieceReceivers& wanted : together) {
      by_receivers[wanted.hosts.front()].push_back(wanted);
    }
    std::vector<PieceReceivers> rest;
    for (const auto& [members, wanted] : by_receivers) {
      // Its messages would take operations of rounds, and more time than all
      // receivers take to be fed.
      const int64_t bytes = BytesOf(wanted);
      if (bytes < total / kFedGroups &&
          static_cast<double>(bytes) /
                  module.topology.network_bytes_per_second <=
              static_cast<double>(members.size() - 1) * kStagedRoundSeconds) {
        continue;
      }
      const auto& sources = module.pieces[wanted.front().piece].sources;
      const bool one_source = std::all_of(
          wanted.begin(), wanted.end(), [&](const PieceReceivers& of) {
            return module.pieces[of.piece].sources == sources;
          });
      if (module.limits.deals_stripes || one_source ||
          bytes < total / kWholePieces) {
        rest.insert(rest.end(), wanted.begin(), wanted.end());
      } else {
        distributor.HandOutBySource(wanted);
      }
    }
    distributor.HandOut(rest, fed_bytes);
  }
  distributor.Finish();
  return absl::OkStatus();
}

}  // namespace refit
