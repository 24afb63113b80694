#include "compiler/passes/enter_hosts.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "compiler/passes/trees.h"

namespace refit {
namespace {

// A part of what enters a host may be so much smaller or larger, if it then
// ends with what one source sends: each pair of ranks costs messages.
constexpr int64_t kNearPart = 64;

// A rank that receives so much more than others of its host has them receive
// for it: less would be messages for nothing.
constexpr double kOverShare = 1.05;

// Each host has its own parts of pieces. Where there were more of them than
// these, receivers are fed by themselves, as in plans that route nothing.
constexpr int64_t kPartsMax = int64_t{1} << 20;

// What some ranks of one host want.
struct HostFlow {
  std::vector<std::pair<const Holders*, const Share*>> shares;
  int64_t bytes = 0;
};
struct HostFlowKey {
  int32_t host = 0;
  Members members;

  friend bool operator<(const HostFlowKey& a, const HostFlowKey& b) {
    return std::tie(a.host, a.members) < std::tie(b.host, b.members);
  }
};
using HostFlows = std::map<HostFlowKey, HostFlow>;

// What one source sends of a share.
struct Segment {
  Rank source{};
  const Members* members = nullptr;
  const Share* share = nullptr;
  int64_t bytes = 0;
};

// One wave.
class Entrance {
 public:
  Entrance(const Module& module, const Flows& flows, int32_t wave,
           int64_t bytes_min, RoutedPieces& routed);

  void Route();

 private:
  bool IsRouted(const HostFlowKey& key, const HostFlow& flow) const {
    return module_.limits.by_rails ||
           (key.members.size() > 1 && flow.bytes >= bytes_min_);
  }
  // Those of the receiver's NVLink domain, if there are any; else all.
  const Holders* NearestHolders(const Holders& holders, Rank receiver);
  int64_t CountParts() const;
  // What ranks send and receive however hosts are entered.
  void AddFixed();
  void AddOther(const FlowKey& key, const Holders& holders, const Share& share);
  void FindSpills();
  std::vector<RankBytes> EntriesOf(const HostFlowKey& key, const HostFlow& flow,
                                   Leveling& leveling);
  void Cut(std::vector<Segment> segments, absl::Span<const RankBytes> entries);
  void AddParts(const Members& members, const Share& share,
                absl::Span<const std::pair<Rank, RankBytes>> ranges);

  const Module& module_;
  const int64_t bytes_min_;
  RoutedPieces& routed_;
  std::set<Holders> near_;  // those that NearestHolders found
  HostFlows flows_;
  std::map<int32_t, Holders> ranks_;      // the destinations of each host
  std::vector<int64_t> sent_, received_;  // by rank
  // By rank that receives more than others of its host: who receives for it
  // how much of what it alone wants.
  std::map<Rank, std::vector<RankBytes>> spills_;
};

Entrance::Entrance(const Module& module, const Flows& flows, int32_t wave,
                   int64_t bytes_min, RoutedPieces& routed)
    : module_(module),
      bytes_min_(bytes_min),
      routed_(routed),
      sent_(static_cast<size_t>(module.world_size()), 0),
      received_(static_cast<size_t>(module.world_size()), 0) {
  for (int32_t i = module.source_ranks(); i < module.world_size(); ++i) {
    if (!module.IsPlanned(Rank{i})) continue;
    ranks_[module.SiteOf(Rank{i})].push_back(Rank{i});
  }
  for (const auto& [key, flow] : flows) {
    if (key.wave != wave) continue;
    for (const auto& [holders, share] : flow) {
      if (share.way != FlowWay::kEachHost) AddOther(key, holders, share);
    }
    for (const Members& members : key.hosts) {
      HostFlow* of_host = nullptr;
      for (const auto& [holders, share] : flow) {
        if (share.way != FlowWay::kEachHost) continue;
        if (of_host == nullptr) {
          of_host = &flows_[{module.SiteOf(members.front()), members}];
        }
        of_host->shares.emplace_back(NearestHolders(holders, members.front()),
                                     &share);
        of_host->bytes += share.bytes;
      }
    }
  }
}

const Holders* Entrance::NearestHolders(const Holders& holders, Rank receiver) {
  if (!module_.topology.fabric.has_value()) return &holders;
  Holders near;
  std::copy_if(holders.begin(), holders.end(), std::back_inserter(near),
               [&](Rank holder) {
                 return module_.LinkBetween(holder, receiver) == Route::kPeer;
               });
  if (near.empty()) return &holders;
  return &*near_.insert(std::move(near)).first;
}

int64_t Entrance::CountParts() const {
  int64_t parts = 0;
  for (const auto& [key, flow] : flows_) {
    if (!IsRouted(key, flow)) continue;
    for (const auto& [holders, share] : flow.shares) {
      parts += std::ssize(share->pieces);
    }
  }
  return parts;
}

// What goes along trees or is broadcast.
void Entrance::AddOther(const FlowKey& key, const Holders& holders,
                        const Share& share) {
  for (const Rank holder : holders) {
    sent_[IndexOf(holder)] += share.bytes / std::ssize(holders);
  }
  for (const Members& members : key.hosts) {
    for (const Rank member : members) {
      received_[IndexOf(member)] += share.bytes / std::ssize(members);
    }
  }
}

void Entrance::AddFixed() {
  for (const auto& [key, flow] : flows_) {
    const bool is_routed = IsRouted(key, flow);
    const int64_t copies = is_routed ? 1 : std::ssize(key.members);
    for (const auto& [holders, share] : flow.shares) {
      if (is_routed && holders->size() > 1) continue;
      for (const Rank holder : *holders) {
        sent_[IndexOf(holder)] += share->bytes * copies / std::ssize(*holders);
      }
    }
    if (is_routed) continue;
    for (const Rank member : key.members) {
      received_[IndexOf(member)] += flow.bytes;
    }
  }
}

void Entrance::FindSpills() {
  const int64_t most_sent = *std::max_element(sent_.begin(), sent_.end());
  for (const auto& [host, ranks] : ranks_) {
    int64_t sum = 0;
    for (const Rank rank : ranks) sum += received_[IndexOf(rank)];
    const int64_t level = sum / std::ssize(ranks);
    std::vector<RankBytes> proxies;
    for (const Rank rank : ranks) {
      const int64_t room = level - received_[IndexOf(rank)];
      if (room > 0) proxies.push_back({.rank = rank, .bytes = room});
    }
    for (const Rank rank : ranks) {
      const int64_t received = received_[IndexOf(rank)];
      if (received <= most_sent ||
          static_cast<double>(received) <=
              static_cast<double>(level) * kOverShare) {
        continue;
      }
      const auto alone = flows_.find({host, Members{rank}});
      if (alone == flows_.end() || alone->second.bytes < bytes_min_) continue;
      std::vector<RankBytes>& spill = spills_[rank];
      // Proxies fill up one after the other.
      int64_t left = std::min(received - level, alone->second.bytes);
      for (RankBytes& proxy : proxies) {
        const int64_t of_proxy = std::min(left, proxy.bytes);
        if (of_proxy == 0) continue;
        spill.push_back({.rank = proxy.rank, .bytes = of_proxy});
        proxy.bytes -= of_proxy;
        left -= of_proxy;
      }
    }
  }
}

std::vector<RankBytes> Entrance::EntriesOf(const HostFlowKey& key,
                                           const HostFlow& flow,
                                           Leveling& leveling) {
  if (key.members.size() > 1) {
    return leveling.Take({key.members.begin(), key.members.end()}, flow.bytes);
  }
  const Rank rank = key.members.front();
  std::vector<RankBytes> entries = {{.rank = rank, .bytes = flow.bytes}};
  for (const RankBytes& proxy : spills_.at(rank)) {
    entries.push_back(proxy);
    entries.front().bytes -= proxy.bytes;
  }
  if (entries.front().bytes <= 0) entries.erase(entries.begin());
  return entries;
}

void Entrance::AddParts(const Members& members, const Share& share,
                        absl::Span<const std::pair<Rank, RankBytes>> ranges) {
  std::vector<int64_t> sizes;
  sizes.reserve(ranges.size());
  for (const auto& [source, entry] : ranges) sizes.push_back(entry.bytes);
  for (const PieceId id : share.pieces) routed_.Feed(id, members);
  routed_.Cut(share.pieces, std::move(sizes),
              [&](const Packed& packed, size_t range) {
                const Rank source = ranges[range].first;
                const Rank entry = ranges[range].second.rank;
                std::vector<Relay> relays;
                AddOthers(members, entry, relays);
                Piece& part = routed_.Add(packed.piece, packed.box, entry,
                                          std::move(relays), {&source, 1});
                // A proxy may want the piece, and be fed it by another rank.
                part.root_keeps =
                    std::binary_search(members.begin(), members.end(), entry);
              });
}

// What stands first enters first. Where one entry ends, and the next begins,
// moves to the end of what a source sends if that is near.
void Entrance::Cut(std::vector<Segment> segments,
                   absl::Span<const RankBytes> entries) {
  std::stable_sort(
      segments.begin(), segments.end(),
      [](const Segment& a, const Segment& b) { return a.source < b.source; });
  struct Ranges {
    const Members* members = nullptr;
    const Share* share = nullptr;
    std::vector<std::pair<Rank, RankBytes>> all;  // by source
  };
  std::vector<Ranges> ranges;
  std::map<std::pair<const Members*, const Share*>, size_t> number_of;
  size_t entry = 0;
  int64_t end = entries.front().bytes;  // of the entry
  int64_t at = 0;
  for (const Segment& segment : segments) {
    const int64_t end_of_segment = at + segment.bytes;
    const auto [number, is_new] =
        number_of.try_emplace({segment.members, segment.share}, ranges.size());
    if (is_new) {
      ranges.push_back(
          {.members = segment.members, .share = segment.share, .all = {}});
    }
    while (at < end_of_segment) {
      const bool is_last = entry + 1 == entries.size();
      const int64_t near = entries[entry].bytes / kNearPart;
      if (!is_last && end <= at + near) {
        end += entries[++entry].bytes;
        continue;
      }
      const int64_t to =
          is_last || end >= end_of_segment - near ? end_of_segment : end;
      ranges[number->second].all.emplace_back(
          segment.source,
          RankBytes{.rank = entries[entry].rank, .bytes = to - at});
      at = to;
    }
  }
  for (const Ranges& of : ranges) AddParts(*of.members, *of.share, of.all);
}

void Entrance::Route() {
  if (CountParts() > kPartsMax) return;
  AddFixed();
  std::map<Holders, int64_t> of_holders, of_members;
  for (const auto& [key, flow] : flows_) {
    if (!IsRouted(key, flow)) continue;
    of_members[{key.members.begin(), key.members.end()}] += flow.bytes;
    for (const auto& [holders, share] : flow.shares) {
      if (holders->size() > 1) of_holders[*holders] += share->bytes;
    }
  }
  Leveling entering(of_members, received_);
  Leveling sending(of_holders, sent_);
  if (!module_.limits.by_rails) FindSpills();
  // Of spilled flows the holders are chosen here, too.
  std::map<Holders, int64_t> of_spilled;
  for (const auto& [rank, spill] : spills_) {
    const HostFlow& flow = flows_.at({module_.SiteOf(rank), Members{rank}});
    for (const auto& [holders, share] : flow.shares) {
      for (const Rank holder : *holders) {
        sent_[IndexOf(holder)] -= share->bytes / std::ssize(*holders);
      }
      of_spilled[*holders] += share->bytes;
    }
  }
  Leveling spilled(of_spilled, sent_);
  std::vector<Segment> of_host;
  const auto add = [&](const HostFlowKey& key, const HostFlow& flow,
                       Leveling& leveling) {
    for (const auto& [holders, share] : flow.shares) {
      if (holders->size() == 1) {
        of_host.push_back({.source = holders->front(),
                           .members = &key.members,
                           .share = share,
                           .bytes = share->bytes});
        continue;
      }
      for (const RankBytes& part : leveling.Take(*holders, share->bytes)) {
        of_host.push_back({.source = part.rank,
                           .members = &key.members,
                           .share = share,
                           .bytes = part.bytes});
      }
    }
  };
  for (auto next = flows_.begin(); next != flows_.end();) {
    const auto& [key, flow] = *next++;
    const bool is_spilled =
        key.members.size() == 1 && spills_.contains(key.members.front());
    if (!is_spilled && !IsRouted(key, flow)) continue;
    add(key, flow, is_spilled ? spilled : sending);
    if (!module_.limits.by_rails) {
      Cut(std::move(of_host), EntriesOf(key, flow, entering));
      of_host.clear();
      continue;
    }
    if (next != flows_.end() && next->first.host == key.host) continue;
    // All of the host together, by as many ranks as there are sources.
    int64_t bytes = 0;
    std::set<Rank> sources;
    for (const Segment& segment : of_host) {
      bytes += segment.bytes;
      sources.insert(segment.source);
    }
    const Holders& ranks = ranks_.at(key.host);
    const size_t count = std::min(ranks.size(), sources.size());
    std::vector<RankBytes> entries;
    for (size_t i = 0; i < count; ++i) {
      entries.push_back({.rank = ranks[i * ranks.size() / count],
                         .bytes = bytes / static_cast<int64_t>(count) + 1});
    }
    Cut(std::move(of_host), entries);
    of_host.clear();
  }
}

}  // namespace

void EnterHosts(const Module& module, const Flows& flows, int64_t bytes_min,
                RoutedPieces& routed) {
  for (int32_t wave = 0; wave < module.waves; ++wave) {
    Entrance(module, flows, wave, bytes_min, routed).Route();
  }
}

}  // namespace refit
