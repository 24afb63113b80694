#include <algorithm>
#include <map>
#include <tuple>

#include "compiler/passes/passes.h"

namespace refit {
namespace {

// Relays must save at least this part of the time, and a round, to be worth it.
constexpr double kGain = 1.1;
// A piece is cut into stripes when it is more than this part of what a host's
// receivers are given; smaller ones are handed out whole.
constexpr int64_t kWholePieces = 256;
// Stripes are cut along the outermost dimension with this many rows for each.
constexpr int64_t kRowsPerStripe = 16;
// Where single elements are cut: a multiple of the widest access of a GPU.
constexpr int64_t kElementsTogether = 64;

// The receivers of one host that want a piece and are fed by one route.
struct Group {
  size_t piece = 0;
  int64_t bytes = 0;
  Route route = Route::kUnspecified;
  std::vector<Rank> senders;  // that may feed it: the host's own, or all
  std::vector<Rank> members;  // ascending
  bool casts = false;         // on arrival: what arrived is not what was sent

  bool CanRelay() const {
    return !casts && members.size() > 1 &&
           (route == Route::kNetwork || senders.size() < members.size());
  }
};

// What the ranks of one host send and receive by one route, if every receiver
// is fed by sources, and if groups relay.
struct HostLoad {
  std::map<Rank, double> sent;
  std::map<Rank, double> sent_once;
  std::map<Rank, double> received;
  std::map<Rank, double> received_once;  // without what is relayed
  bool can_relay = false;
};

double Largest(const std::map<Rank, double>& bytes) {
  double largest = 0;
  for (const auto& [rank, of_rank] : bytes) {
    largest = std::max(largest, of_rank);
  }
  return largest;
}

bool HasLocalSource(const Module& module, const Piece& piece,
                    Rank destination) {
  if (!module.topology.colocated) return false;
  return std::any_of(
      piece.sources.begin(), piece.sources.end(), [&](Rank source) {
        return module.RouteBetween(source, destination) == Route::kLocal;
      });
}

// Groups by (host, route).
using Groups = std::map<std::pair<int32_t, Route>, std::vector<Group>>;

Groups ListGroups(const Module& module) {
  Groups groups;
  // Pieces in a row are often held by the same sources.
  const std::vector<Rank>* sources = nullptr;
  std::map<int32_t, std::vector<Rank>> sources_by_host;
  for (size_t i = 0; i < module.pieces.size(); ++i) {
    const Piece& piece = module.pieces[i];
    if (sources == nullptr || *sources != piece.sources) {
      sources_by_host.clear();
      for (Rank source : piece.sources) {
        sources_by_host[module.topology.host[IndexOf(source)]].push_back(
            source);
      }
    }
    sources = &piece.sources;
    std::map<int32_t, Group> of_piece;  // by host
    for (Rank destination : piece.destinations) {
      if (HasLocalSource(module, piece, destination)) continue;
      of_piece[module.topology.host[IndexOf(destination)]].members.push_back(
          destination);
    }
    for (auto& [host, group] : of_piece) {
      const auto neighbours = sources_by_host.find(host);
      const bool peer = neighbours != sources_by_host.end();
      group.piece = i;
      group.bytes = module.WireBytes(piece);
      group.route = peer ? Route::kPeer : Route::kNetwork;
      group.senders = peer ? neighbours->second : piece.sources;
      group.casts = piece.wire_dtype != piece.destination_dtype;
      groups[{host, group.route}].push_back(std::move(group));
    }
  }
  return groups;
}

HostLoad LoadOf(const std::vector<Group>& groups) {
  HostLoad load;
  for (const Group& group : groups) {
    const double bytes = static_cast<double>(group.bytes);
    const double members = static_cast<double>(group.members.size());
    const bool relays = group.CanRelay();
    load.can_relay |= relays;
    for (Rank sender : group.senders) {
      const double share = bytes / static_cast<double>(group.senders.size());
      load.sent[sender] += share * members;
      load.sent_once[sender] += relays ? share : share * members;
    }
    for (Rank member : group.members) {
      load.received[member] += bytes;
      load.received_once[member] += relays ? bytes / members : bytes;
    }
  }
  return load;
}

// Whether the groups of a host that can relay should. Inside a host what counts
// is the busiest sender: a receiver must be given everything in any case. Over
// the network it is the receivers, whose relays follow on a link of their own.
bool IsFaster(const Topology& topology, Route route, const HostLoad& load) {
  if (!load.can_relay) return false;
  const double received = Largest(load.received);
  const double peer = topology.peer_bytes_per_second;
  if (route == Route::kNetwork) {
    const double once = Largest(load.received_once);
    const double network = topology.network_bytes_per_second;
    const double relayed = once / network + (received - once) / peer;
    return (relayed + kRoundSeconds) * kGain <= received / network;
  }
  const double sent_once = Largest(load.sent_once);
  // A relay that shares its GPU with a source shares its link as well.
  const double busiest =
      topology.colocated ? sent_once + received : std::max(sent_once, received);
  return (busiest / peer + kRoundSeconds) * kGain <= Largest(load.sent) / peer;
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

// Hands the pieces of a host's groups out to their members.
class Distributor {
 public:
  explicit Distributor(Module& module) : module_(module) {}

  // Appends to `pieces_of[group.piece]` what the members are given. The members
  // leave the piece's destinations.
  void Distribute(const std::vector<Group>& groups,
                  std::vector<std::vector<Piece>>& pieces_of);

 private:
  void Give(const Group& group, const Box& box, std::vector<Piece>& pieces);

  Module& module_;
  std::map<Rank, int64_t> load_;  // bytes that a member is to relay
};

// To the member that has least to relay.
void Distributor::Give(const Group& group, const Box& box,
                       std::vector<Piece>& pieces) {
  const Rank member =
      *std::min_element(group.members.begin(), group.members.end(),
                        [&](Rank a, Rank b) { return load_[a] < load_[b]; });
  Piece piece = module_.pieces[group.piece];
  piece.box = box;
  piece.destinations = {member};
  piece.relay_destinations.clear();
  for (Rank other : group.members) {
    if (other != member) piece.relay_destinations.push_back(other);
  }
  load_[member] += module_.WireBytes(piece) *
                   static_cast<int64_t>(piece.relay_destinations.size());
  pieces.push_back(std::move(piece));
}

void Distributor::Distribute(const std::vector<Group>& groups,
                             std::vector<std::vector<Piece>>& pieces_of) {
  int64_t total = 0;
  for (const Group& group : groups) {
    if (group.CanRelay()) total += group.bytes;
  }
  // The small ones level what the large ones leave uneven.
  for (const bool whole : {false, true}) {
    for (const Group& group : groups) {
      if (!group.CanRelay()) continue;
      if ((group.bytes < total / kWholePieces) != whole) continue;
      Piece& piece = module_.pieces[group.piece];
      const auto count = static_cast<int64_t>(group.members.size());
      for (const Box& box : Stripes(piece.box, whole ? 1 : count)) {
        Give(group, box, pieces_of[group.piece]);
      }
      std::vector<Rank> rest;
      std::set_difference(piece.destinations.begin(), piece.destinations.end(),
                          group.members.begin(), group.members.end(),
                          std::back_inserter(rest));
      piece.destinations = std::move(rest);
    }
  }
}

}  // namespace

absl::Status FanOut(const PassOptions&, Module& module) {
  if (!module.limits.relays ||
      module.MechanismOf(Route::kPeer) != Mechanism::kDirect) {
    return absl::OkStatus();
  }
  std::vector<std::vector<Piece>> pieces_of(module.pieces.size());
  Distributor distributor(module);
  for (auto& [key, groups] : ListGroups(module)) {
    if (!IsFaster(module.topology, key.second, LoadOf(groups))) continue;
    distributor.Distribute(groups, pieces_of);
  }
  std::vector<Piece> pieces;
  for (size_t i = 0; i < pieces_of.size(); ++i) {
    if (!module.pieces[i].destinations.empty()) {
      pieces.push_back(std::move(module.pieces[i]));
    }
    for (Piece& piece : pieces_of[i]) pieces.push_back(std::move(piece));
  }
  module.pieces = std::move(pieces);
  return absl::OkStatus();
}

}  // namespace refit
