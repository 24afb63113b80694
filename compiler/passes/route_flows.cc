#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "compiler/passes/broadcast_flows.h"
#include "compiler/passes/enter_hosts.h"
#include "compiler/passes/flows.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/routed_pieces.h"
#include "compiler/passes/trees.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// Trees take rounds until all have begun, and sources that feed every host do
// not: these may send more than ranks receive, by this factor.
constexpr double kGainOfTrees = 1.25;

// To pass on a part of what the busiest sources send costs few messages, but
// rounds with them are less full.
constexpr double kGainOfLeveling = 1.08;

// What several ranks of a host want is sent each of them if it is less than
// this part of what a message takes to start.
constexpr int64_t kSmallFlow = 4;

// A message of so many bytes takes as long to start as on the wire. A range of
// a flow has as many at least.
int64_t RangeBytesMin(const Module& module) {
  return std::max<int64_t>(
      static_cast<int64_t>(module.topology.network_bytes_per_second *
                           kStagedRoundSeconds),
      kFlowMessageBytesMin);
}

// Whether staging has room for messages that are worth their start where hosts
// pass on to hosts: a rank's own, and one that it is sent.
bool StagingHasRoom(const Module& module) {
  return std::min(module.limits.bucket_bytes,
                  RoomOfHeldRound(module.limits) / 2) >= RangeBytesMin(module);
}

// A share that hosts may pass on to each other.
struct TreeChoice {
  const FlowKey* key = nullptr;
  const Holders* holders = nullptr;
  Share* share = nullptr;

  // That each holder need not send if hosts pass it on.
  double SavedBytes() const {
    return static_cast<double>(share->bytes) *
           static_cast<double>(key->hosts.size() - 1) /
           static_cast<double>(holders->size());
  }
};

// What ranks send and receive in a wave, if holders feed every host but for the
// shares that are chosen.
class TreeChoices {
 public:
  TreeChoices(const Module& module, int32_t wave, Flows& flows);

  double MostReceived() const {
    return *std::max_element(received_.begin(), received_.end());
  }
  double MostSent() const {
    return *std::max_element(sent_.begin(), sent_.end());
  }
  // The rank that sends most.
  Rank Busiest() const {
    return Rank{static_cast<int32_t>(
        std::max_element(sent_.begin(), sent_.end()) - sent_.begin())};
  }
  double MeanSent() const {
    double sum = 0;
    for (const double bytes : sent_) sum += bytes;
    return sum / sources_;
  }
  // Those by which no source sends more than `target`, or as little more as
  // there are any: of each source those that save most first.
  std::vector<TreeChoice> Choose(double target);
  // The same of shares that one rank of each host wants, spread over the flows:
  // sources take turns, so that each leaves others receivers that pass on
  // little.
  std::vector<TreeChoice> ChooseSpread(double target);

 private:
  const double sources_;
  std::vector<double> sent_, received_;  // by rank
  bool MaySave(size_t source, const TreeChoice& choice, double target) const;
  void Take(const TreeChoice& choice, std::vector<TreeChoice>& chosen);

  std::vector<std::vector<TreeChoice>> choices_;  // by holder
  std::set<const Share*> is_chosen_;
};

TreeChoices::TreeChoices(const Module& module, int32_t wave, Flows& flows)
    : sources_(
          std::max<double>(1, static_cast<double>(module.PlannedSources()))),
      sent_(static_cast<size_t>(module.world_size()), 0),
      received_(sent_),
      choices_(sent_.size()) {
  for (auto& [key, flow] : flows) {
    if (key.wave != wave) continue;
    for (auto& [holders, share] : flow) {
      const auto bytes = static_cast<double>(share.bytes);
      for (const Rank holder : holders) {
        sent_[IndexOf(holder)] += bytes *
                                  static_cast<double>(key.hosts.size()) /
                                  static_cast<double>(holders.size());
        if (key.hosts.size() > 1) {
          choices_[IndexOf(holder)].push_back(
              {.key = &key, .holders = &holders, .share = &share});
        }
      }
      for (const Members& members : key.hosts) {
        for (const Rank member : members) {
          received_[IndexOf(member)] +=
              bytes / static_cast<double>(members.size());
        }
      }
    }
  }
}

// Not if the source would be further below the target than it is above.
bool TreeChoices::MaySave(size_t source, const TreeChoice& choice,
                          double target) const {
  return sent_[source] - choice.SavedBytes() / 2 >= target;
}

void TreeChoices::Take(const TreeChoice& choice,
                       std::vector<TreeChoice>& chosen) {
  chosen.push_back(choice);
  is_chosen_.insert(choice.share);
  for (const Rank holder : *choice.holders) {
    sent_[IndexOf(holder)] -= choice.SavedBytes();
  }
}

std::vector<TreeChoice> TreeChoices::Choose(double target) {
  std::vector<TreeChoice> chosen;
  for (size_t source = 0; source < sent_.size(); ++source) {
    std::vector<TreeChoice>& of_source = choices_[source];
    std::stable_sort(of_source.begin(), of_source.end(),
                     [](const TreeChoice& a, const TreeChoice& b) {
                       return a.SavedBytes() > b.SavedBytes();
                     });
    for (const TreeChoice& choice : of_source) {
      if (is_chosen_.contains(choice.share) ||
          !MaySave(source, choice, target)) {
        continue;
      }
      Take(choice, chosen);
    }
  }
  return chosen;
}

std::vector<TreeChoice> TreeChoices::ChooseSpread(double target) {
  for (std::vector<TreeChoice>& of_source : choices_) {
    std::erase_if(of_source, [](const TreeChoice& choice) {
      const std::vector<Members>& hosts = choice.key->hosts;
      return std::any_of(
          hosts.begin(), hosts.end(),
          [](const Members& members) { return members.size() > 1; });
    });
  }
  std::vector<TreeChoice> chosen;
  std::map<const FlowKey*, int64_t> passed_on;
  for (bool any = true; any;) {
    any = false;
    for (size_t source = 0; source < sent_.size(); ++source) {
      const TreeChoice* best = nullptr;
      for (const TreeChoice& choice : choices_[source]) {
        if (is_chosen_.contains(choice.share) ||
            !MaySave(source, choice, target)) {
          continue;
        }
        if (best == nullptr || passed_on[choice.key] < passed_on[best->key]) {
          best = &choice;
        }
      }
      if (best == nullptr) continue;
      any = true;
      passed_on[best->key] += best->share->bytes;
      Take(*best, chosen);
    }
  }
  return chosen;
}

// Decides which shares of a wave go from host to host along trees: none, unless
// sources that fed every host would send more than ranks receive; else as many
// as it takes until none does.
void ChooseTrees(const Module& module, int32_t wave, Flows& flows) {
  TreeChoices choices(module, wave, flows);
  const double target = choices.MostReceived();
  if (choices.MostSent() <= target * kGainOfTrees) return;
  const std::vector<TreeChoice> chosen = choices.Choose(target);
  int64_t bytes = 0;
  for (const TreeChoice& choice : chosen) bytes += choice.share->bytes;
  // What each set of holders sends would be so little, in the mean, that its
  // messages took longer to start than on the wire. Many sources of little feed
  // every host about as fast.
  if (bytes < std::ssize(chosen) * RangeBytesMin(module)) return;
  for (const TreeChoice& choice : chosen) choice.share->way = FlowWay::kTree;
}

// How many ranks of other hosts the source sends to in a wave, if holders feed
// every host.
int64_t ReceiversOf(Rank source, int32_t wave, const Flows& flows) {
  std::set<Rank> receivers;
  for (const auto& [key, flow] : flows) {
    if (key.wave != wave) continue;
    const bool sends =
        std::any_of(flow.begin(), flow.end(), [&](const auto& of) {
          return std::binary_search(of.first.begin(), of.first.end(), source);
        });
    if (!sends) continue;
    for (const Members& members : key.hosts) {
      receivers.insert(members.begin(), members.end());
    }
  }
  return std::ssize(receivers);
}

// Where some sources send more than others, and than ranks receive, has
// receivers pass on what takes the busiest below that: one that has little to
// pass on receives a share and sends it to the other hosts. Not where the
// messages of the busiest take longer to start than on the wire.
void LevelSources(const Module& module, int32_t wave, Flows& flows,
                  RoutedPieces& routed) {
  TreeChoices choices(module, wave, flows);
  const double most_sent = choices.MostSent();
  const double target = std::max(choices.MostReceived(), choices.MeanSent());
  if (most_sent < target * kGainOfLeveling) return;
  const double start_seconds =
      kStagedRoundSeconds / module.limits.operations_per_round *
      static_cast<double>(ReceiversOf(choices.Busiest(), wave, flows));
  if (most_sent < start_seconds * module.topology.network_bytes_per_second) {
    return;
  }
  const std::vector<TreeChoice> chosen = choices.ChooseSpread(target);
  if (most_sent < std::max(target, choices.MostSent()) * kGainOfLeveling) {
    return;
  }
  std::map<Rank, int64_t> passed_on;
  for (const TreeChoice& choice : chosen) {
    choice.share->way = FlowWay::kTree;
    const std::vector<Members>& hosts = choice.key->hosts;
    const Rank first =
        std::min_element(hosts.begin(), hosts.end(),
                         [&](const Members& a, const Members& b) {
                           return passed_on[a.front()] < passed_on[b.front()];
                         })
            ->front();
    passed_on[first] += choice.share->bytes;
    std::vector<Relay> relays;
    for (const Members& members : hosts) {
      if (members.front() != first) relays.push_back({first, members.front()});
    }
    for (const PieceId id : choice.share->pieces) {
      routed.AddRelayed(id, module.piece(id).box, first, relays);
    }
  }
}

// Cuts what goes by tree of a flow into ranges.
void CutIntoRanges(const Module& module, const FlowKey& key, const Flow& flow,
                   RoutedPieces& routed) {
  std::vector<PieceId> pieces;
  int64_t bytes = 0;
  std::set<Rank> sources;
  for (const auto& [holders, share] : flow) {
    if (share.way != FlowWay::kTree) continue;
    pieces.insert(pieces.end(), share.pieces.begin(), share.pieces.end());
    bytes += share.bytes;
    sources.insert(holders.begin(), holders.end());
  }
  if (pieces.empty()) return;
  const std::vector<FlowRange> ranges = RangesOf(
      key, sources.size(),
      static_cast<size_t>(std::max<int64_t>(bytes / RangeBytesMin(module), 1)));
  for (const PieceId id : pieces) {
    for (const Members& members : key.hosts) routed.Feed(id, members);
    routed.Feed(id, key.near);
  }
  const int64_t even = bytes / std::ssize(ranges);
  routed.Cut(pieces, std::vector<int64_t>(ranges.size(), even),
             [&](const Packed& packed, size_t range) {
               for (const Tree& tree : ranges[range].trees) {
                 routed.AddTree(packed.piece, packed.box, tree.root,
                                tree.edges);
               }
             });
}

}  // namespace

absl::Status RouteFlows(const PassOptions&, Module& module) {
  if (!module.limits.relays) return absl::OkStatus();
  Flows flows = ListFlows(module);
  const bool has_room = StagingHasRoom(module);
  for (int32_t wave = 0; has_room && wave < module.waves; ++wave) {
    ChooseTrees(module, wave, flows);
  }
  RoutedPieces routed(module);
  const bool has_domains = module.topology.fabric.has_value() &&
                           module.topology.fabric->hosts_per_nvlink_domain > 1;
  // Neither shifted nor packed programs say what is broadcast, and nobody tried
  // broadcasts between NVLink domains of several hosts.
  if (module.limits.broadcasts && module.parts() == 1 && !module.is_compact &&
      !has_domains) {
    BroadcastFlows(module, flows, routed);
  }
  for (const auto& [key, flow] : flows) {
    CutIntoRanges(module, key, flow, routed);
  }
  if (routed.empty()) {
    for (int32_t wave = 0; wave < module.waves; ++wave) {
      LevelSources(module, wave, flows, routed);
    }
    module.stats.levels_sources = !routed.empty();
  }
  EnterHosts(module, flows, RangeBytesMin(module) / kSmallFlow, routed);
  module.stats.routes_flows = routed.routes();
  module.stats.held_rounds = routed.held_rounds();
  module.stats.broadcasts = routed.broadcasts();
  // A round of staging has room for a message that is not routed, too.
  module.limits.bucket_bytes =
      std::min(module.limits.bucket_bytes,
               module.limits.staging_bytes / StagingTurns(module) /
                   kStagingAlignmentBytes * kStagingAlignmentBytes);
  if (!routed.empty()) routed.Finish();
  return absl::OkStatus();
}

}  // namespace refit
