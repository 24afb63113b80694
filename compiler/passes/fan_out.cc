#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "compiler/passes/flows.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/routed_pieces.h"

namespace refit {
namespace {

// Relays must save at least this part of the time, and a round, to be worth it.
constexpr double kGain = 1.1;
// A piece is cut into stripes when it is more than this part of what is handed
// out with it; smaller ones are handed out whole.
constexpr int64_t kWholePieces = 256;
// Stripes are cut along the outermost dimension with this many rows for each.
constexpr int64_t kRowsPerStripe = 16;
// Where single elements are cut: a multiple of the widest access of a GPU.
constexpr int64_t kElementsTogether = 64;

// The receivers of one host that want a piece which sources of the host hold.
struct Group {
  size_t piece = 0;
  int64_t bytes = 0;
  std::vector<Rank> senders;
  Members members;
  bool casts = false;  // on arrival: what arrived is not what was sent

  bool CanRelay() const {
    return !casts && members.size() > 1 && senders.size() < members.size();
  }
};

using BytesByRank = std::vector<double>;

double Largest(const BytesByRank& bytes) {
  return *std::max_element(bytes.begin(), bytes.end());
}

// `copies` of a group's bytes, sent by those that may.
void AddSent(const Group& group, double copies, BytesByRank& sent) {
  const double part = static_cast<double>(group.bytes) /
                      static_cast<double>(group.senders.size());
  for (const Rank sender : group.senders) {
    sent[IndexOf(sender)] += part * copies;
  }
}

bool HasLocalSource(const Module& module, const Piece& piece,
                    Rank destination) {
  if (!module.topology.colocated) return false;
  return std::any_of(
      piece.sources.begin(), piece.sources.end(), [&](Rank source) {
        return module.RouteBetween(source, destination) == Route::kLocal;
      });
}

// By host and wave; those of one in the order of pieces.
using Groups = std::map<std::pair<int32_t, int32_t>, std::vector<Group>>;

Groups ListGroups(const Module& module) {
  const std::vector<int32_t>& host = module.topology.host;
  Groups groups;
  std::map<int32_t, std::vector<Rank>> sources;
  for (size_t i = 0; i < module.pieces.size(); ++i) {
    const Piece& piece = module.pieces[i];
    if (piece.is_routed) continue;
    sources.clear();
    for (const Rank source : piece.sources) {
      sources[host[IndexOf(source)]].push_back(source);
    }
    for (const Rank destination : piece.destinations) {
      const int32_t number = host[IndexOf(destination)];
      const auto senders = sources.find(number);
      if (senders == sources.end() ||
          HasLocalSource(module, piece, destination)) {
        continue;
      }
      std::vector<Group>& of_host = groups[{number, piece.wave}];
      if (of_host.empty() || of_host.back().piece != i) {
        of_host.push_back(
            {.piece = i,
             .bytes = module.WireBytes(piece),
             .senders = senders->second,
             .members = {},
             .casts = piece.wire_dtype != piece.destination_dtype});
      }
      of_host.back().members.push_back(destination);
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

// Whether the groups of a host that can relay should. What counts is the
// busiest sender: a receiver must be given everything in any case.
bool IsFaster(const Module& module, absl::Span<const Group* const> groups) {
  const size_t world = static_cast<size_t>(module.world_size());
  BytesByRank sent(world), sent_once(world), received(world);
  bool can_relay = false;
  for (const Group* group : groups) {
    const double members = static_cast<double>(group->members.size());
    can_relay |= group->CanRelay();
    AddSent(*group, members, sent);
    AddSent(*group, group->CanRelay() ? 1 : members, sent_once);
    for (const Rank member : group->members) {
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

// Hands pieces out to receivers, which pass them on to the others.
class Distributor {
 public:
  explicit Distributor(Module& module)
      : module_(module),
        parts_(module),
        load_of_wave_(static_cast<size_t>(module.waves)),
        load_(static_cast<size_t>(module.world_size()), 0) {
    for (Loads& loads : load_of_wave_) loads.resize(load_.size(), 0);
  }

  // The members leave the destinations of the pieces.
  void HandOut(absl::Span<const Group> together);
  // Puts what was handed out into the module.
  void Finish() { parts_.Finish(); }

 private:
  using Loads = std::vector<int64_t>;

  // Who has least to relay in the piece's wave: the rounds of a wave end before
  // those of the next.
  Rank LeastLoaded(const Group& group) const;
  void Give(const Group& group, const Box& box);

  Module& module_;
  RoutedPieces parts_;
  // Bytes that a rank relays: in each wave, and in all.
  std::vector<Loads> load_of_wave_;
  Loads load_;
};

Rank Distributor::LeastLoaded(const Group& group) const {
  const Loads& of_wave =
      load_of_wave_[static_cast<size_t>(module_.pieces[group.piece].wave)];
  const auto load_of = [&](Rank rank) {
    return std::pair(of_wave[IndexOf(rank)], load_[IndexOf(rank)]);
  };
  return *std::min_element(
      group.members.begin(), group.members.end(),
      [&](Rank a, Rank b) { return load_of(a) < load_of(b); });
}

void Distributor::Give(const Group& group, const Box& box) {
  const Rank first = LeastLoaded(group);
  std::vector<Relay> relays;
  for (const Rank member : group.members) {
    if (member != first) relays.push_back({first, member});
  }
  const Piece& piece = module_.pieces[group.piece];
  const int64_t relayed =
      std::ssize(relays) * box.Volume() * DTypeBytes(piece.wire_dtype);
  parts_.AddRelayed(PieceId{static_cast<int32_t>(group.piece)}, box, first,
                    std::move(relays));
  load_of_wave_[static_cast<size_t>(piece.wave)][IndexOf(first)] += relayed;
  load_[IndexOf(first)] += relayed;
}

void Distributor::HandOut(absl::Span<const Group> together) {
  int64_t total = 0;
  for (const Group& group : together) {
    if (group.CanRelay()) total += group.bytes;
  }
  // The small ones level what the large ones leave uneven.
  for (const bool whole : {false, true}) {
    for (const Group& group : together) {
      if (!group.CanRelay()) continue;
      if ((group.bytes < total / kWholePieces) != whole) continue;
      const int64_t count = whole ? 1 : std::ssize(group.members);
      for (const Box& box : Stripes(module_.pieces[group.piece].box, count)) {
        Give(group, box);
      }
    }
  }
}

}  // namespace

absl::Status FanOut(const PassOptions&, Module& module) {
  if (!module.limits.relays) return absl::OkStatus();
  if (!module.limits.relays_directly &&
      module.MechanismOf(Route::kPeer) == Mechanism::kDirect) {
    return absl::OkStatus();
  }
  const Groups groups = ListGroups(module);
  std::map<int32_t, std::vector<const Group*>> by_host;
  for (const auto& [key, of_wave] : groups) {
    for (const Group& group : of_wave) by_host[key.first].push_back(&group);
  }
  std::map<int32_t, bool> relays;  // by host
  for (const auto& [host, of_host] : by_host) {
    relays[host] = IsFaster(module, of_host);
  }
  Distributor distributor(module);
  for (const auto& [key, of_wave] : groups) {
    if (relays.at(key.first)) distributor.HandOut(of_wave);
  }
  distributor.Finish();
  return absl::OkStatus();
}

}  // namespace refit
