#include "compiler/passes/broadcast_flows.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "compiler/passes/trees.h"

namespace refit {
namespace {

// A communicator between hosts takes 122 MiB of a GPU (H100, NCCL 2.28.9), so a
// rank takes part in so many of those of broadcasts at most.
constexpr size_t kBroadcastsOfRank = 2;

struct ShareOfFlow {
  const FlowKey* key = nullptr;
  const Holders* holders = nullptr;
  Share* share = nullptr;

  // Those that hold it, and the receivers on their host: ascending.
  Holders Senders() const {
    Holders senders = *holders;
    senders.insert(senders.end(), key->near.begin(), key->near.end());
    std::sort(senders.begin(), senders.end());
    return senders;
  }
};

// What the same hosts want.
struct HostGroup {
  std::vector<ShareOfFlow> shares;
  int64_t bytes = 0;
  bool saves = false;                   // any share would go along trees
  std::vector<std::set<Rank>> wanters;  // by host
  std::set<Rank> senders;
};

// By hosts.
std::map<std::vector<int32_t>, HostGroup> HostGroupsOf(const Module& module,
                                                       Flows& flows) {
  std::map<std::vector<int32_t>, HostGroup> groups;
  for (auto& [key, flow] : flows) {
    std::vector<int32_t> hosts;
    for (const Members& members : key.hosts) {
      hosts.push_back(module.topology.host[IndexOf(members.front())]);
    }
    for (auto& [holders, share] : flow) {
      if (hosts.size() < 2) continue;
      HostGroup& group = groups[hosts];
      group.saves |= share.way == FlowWay::kTree;
      group.wanters.resize(hosts.size());
      for (size_t i = 0; i < hosts.size(); ++i) {
        group.wanters[i].insert(key.hosts[i].begin(), key.hosts[i].end());
      }
      group.shares.push_back({&key, &holders, &share});
      for (const Rank sender : group.shares.back().Senders()) {
        group.senders.insert(sender);
      }
      group.bytes += share.bytes;
    }
  }
  return groups;
}

class Broadcaster {
 public:
  Broadcaster(const Module& module, RoutedPieces& routed)
      : module_(module),
        routed_(routed),
        broadcasts_of_(static_cast<size_t>(module.world_size()), 0) {}

  // All of its shares, or none.
  void Route(const HostGroup& group) {
    if (!group.saves) return;
    std::map<Rank, std::vector<Rank>> entries = EntriesOf(group);
    if (!MayBroadcast(group, entries)) return;
    for (const auto& [sender, of_sender] : entries) {
      senders_.insert(sender);
      ++broadcasts_of_[IndexOf(sender)];
      for (const Rank entry : of_sender) ++broadcasts_of_[IndexOf(entry)];
    }
    // Holders send an equal part of what both send, and so do receivers on
    // their host.
    std::set<Rank> holders;
    for (const ShareOfFlow& of : group.shares) {
      holders.insert(of.holders->begin(), of.holders->end());
    }
    const auto of_holders = [&](const ShareOfFlow& of) {
      return of.share->bytes * std::ssize(holders) /
             (std::ssize(holders) + std::ssize(of.key->near));
    };
    std::map<int32_t, std::map<Holders, int64_t>> bytes_of;  // by wave
    for (const ShareOfFlow& of : group.shares) {
      bytes_of[of.key->wave][*of.holders] += of_holders(of);
    }
    std::map<int32_t, Leveling> levelings;
    for (const auto& [wave, bytes] : bytes_of) {
      std::vector<int64_t> loads(broadcasts_of_.size(), 0);
      levelings.emplace(wave, Leveling(bytes, loads));
    }
    for (const ShareOfFlow& of : group.shares) {
      of.share->way = FlowWay::kBroadcast;
      const int64_t bytes = of_holders(of);
      std::vector<RankBytes> parts =
          levelings.at(of.key->wave).Take(*of.holders, bytes);
      const int64_t left = of.share->bytes - bytes;
      const int64_t near = std::ssize(of.key->near);
      for (int64_t i = 0; i < near; ++i) {
        parts.push_back({.rank = of.key->near[static_cast<size_t>(i)],
                         .bytes = left * (i + 1) / near - left * i / near});
      }
      Divide(of, parts, entries);
    }
  }

 private:
  // By sender, by host: to whom it broadcasts. Senders share the ranks of a
  // host evenly.
  static std::map<Rank, std::vector<Rank>> EntriesOf(const HostGroup& group) {
    std::map<Rank, std::vector<Rank>> entries;
    const size_t senders = group.senders.size();
    size_t number = 0;
    for (const Rank sender : group.senders) {
      for (const std::set<Rank>& wanters : group.wanters) {
        const size_t ranks = wanters.size();
        const size_t place =
            senders >= ranks ? number % ranks : number * ranks / senders;
        entries[sender].push_back(
            *std::next(wanters.begin(), static_cast<std::ptrdiff_t>(place)));
      }
      ++number;
    }
    return entries;
  }

  static bool Wants(const Members& members, Rank rank) {
    return std::binary_search(members.begin(), members.end(), rank);
  }

  bool MayBroadcast(const HostGroup& group,
                    const std::map<Rank, std::vector<Rank>>& entries) const {
    std::vector<size_t> counts = broadcasts_of_;
    for (const auto& [sender, of_sender] : entries) {
      // A rank broadcasts to one set of ranks.
      if (senders_.contains(sender)) return false;
      ++counts[IndexOf(sender)];
      for (const Rank entry : of_sender) ++counts[IndexOf(entry)];
    }
    if (*std::max_element(counts.begin(), counts.end()) > kBroadcastsOfRank) {
      return false;
    }
    // Messages of a broadcast are unpacked by all that receive it, or by none,
    // and by all where it was received itself. Who does not unpack what it
    // receives deals it out to all in one round, beside what it is dealt.
    const auto most_dealt =
        static_cast<size_t>(module_.limits.operations_per_round / 2 - 1);
    return std::all_of(
        group.shares.begin(), group.shares.end(), [&](const ShareOfFlow& of) {
          const bool may_deal =
              std::all_of(of.key->hosts.begin(), of.key->hosts.end(),
                          [&](const Members& members) {
                            return members.size() <= most_dealt;
                          });
          const Holders senders = of.Senders();
          return std::all_of(senders.begin(), senders.end(), [&](Rank sender) {
            const std::vector<Rank>& to = entries.at(sender);
            size_t keep = 0;
            for (size_t i = 0; i < to.size(); ++i) {
              keep += Wants(of.key->hosts[i], to[i]) ? 1 : 0;
            }
            return keep == to.size() ||
                   (keep == 0 && may_deal && !Wants(of.key->near, sender));
          });
        });
  }

  // Each sender's part of the share, in the order of pieces.
  void Divide(const ShareOfFlow& of, const std::vector<RankBytes>& parts,
              const std::map<Rank, std::vector<Rank>>& entries) {
    // What a holder broadcasts enters its own host by one receiver after the
    // other.
    std::vector<RankBytes> ranges;
    for (const RankBytes& part : parts) {
      const bool holds =
          std::binary_search(of.holders->begin(), of.holders->end(), part.rank);
      const auto cuts =
          holds ? std::max<int64_t>(std::ssize(of.key->near), 1) : 1;
      for (int64_t i = 0; i < cuts; ++i) {
        ranges.push_back(
            {.rank = part.rank,
             .bytes = part.bytes * (i + 1) / cuts - part.bytes * i / cuts});
      }
    }
    std::vector<int64_t> sizes;
    for (const RankBytes& range : ranges) sizes.push_back(range.bytes);
    for (const PieceId id : of.share->pieces) {
      for (const Members& members : of.key->hosts) routed_.Feed(id, members);
      routed_.Feed(id, of.key->near);
    }
    routed_.Cut(of.share->pieces, std::move(sizes),
                [&](const Packed& packed, size_t range) {
                  const Rank sender = ranges[range].rank;
                  Add(of, packed, sender, range, entries.at(sender));
                });
  }

  void Add(const ShareOfFlow& of, const Packed& packed, Rank sender,
           size_t number, const std::vector<Rank>& entries) {
    const Members& near = of.key->near;
    std::vector<Relay> inside;
    for (size_t i = 0; i < entries.size(); ++i) {
      AddOthers(of.key->hosts[i], entries[i], inside);
    }
    std::vector<Rank> to = entries;
    std::sort(to.begin(), to.end());
    if (!std::binary_search(of.holders->begin(), of.holders->end(), sender)) {
      std::vector<Relay> relays;
      for (const Rank entry : to) relays.push_back({sender, entry});
      relays.insert(relays.end(), inside.begin(), inside.end());
      AddOthers(near, sender, relays);
      routed_.AddBroadcast(packed.piece, packed.box, {&sender, 1},
                           std::move(relays));
      return;
    }
    routed_.AddBroadcast(packed.piece, packed.box, to, std::move(inside),
                         {&sender, 1});
    if (near.empty()) return;
    std::vector<Relay> others;
    const Rank first = near[number % near.size()];
    AddOthers(near, first, others);
    routed_.Add(packed.piece, packed.box, first, std::move(others),
                {&sender, 1});
  }

  const Module& module_;
  RoutedPieces& routed_;
  std::set<Rank> senders_;
  std::vector<size_t> broadcasts_of_;  // by rank: those it takes part in
};

}  // namespace

void BroadcastFlows(const Module& module, Flows& flows, RoutedPieces& routed) {
  std::vector<HostGroup> groups;
  for (auto& [hosts, group] : HostGroupsOf(module, flows)) {
    groups.push_back(std::move(group));
  }
  std::stable_sort(
      groups.begin(), groups.end(),
      [](const HostGroup& a, const HostGroup& b) { return a.bytes > b.bytes; });
  Broadcaster broadcaster(module, routed);
  for (const HostGroup& group : groups) broadcaster.Route(group);
}

}  // namespace refit
