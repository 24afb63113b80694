#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "compiler/passes/broadcast_flows.h"
#include "compiler/passes/enter_hosts.h"
#include "compiler/passes/flows.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/routed_pieces.h"
#include "compiler/passes/tree_choices.h"
#include "compiler/passes/trees.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

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

// By wave and part of the job.
std::vector<FlowsOfPart> Competing(const Module& module, Flows& flows) {
  std::map<std::pair<int32_t, int32_t>, FlowsOfPart> competing;
  for (Flows::value_type& flow : flows) {
    const int32_t part = module.PartOf(flow.first.hosts.front().front());
    FlowsOfPart& of = competing[{flow.first.wave, part}];
    of.part = part;
    of.flows.push_back(&flow);
  }
  std::vector<FlowsOfPart> all;
  for (auto& [key, of] : competing) all.push_back(std::move(of));
  return all;
}

// What it takes to send bytes on that cross a link in `seconds`, over so many
// steps, in messages of the size that takes least: of R messages the last one
// arrives after R + steps of them, and each has a start.
double PipelineSeconds(double seconds, double steps) {
  const double root =
      std::sqrt(seconds) + std::sqrt(steps * kStagedRoundSeconds);
  return root * root;
}

// Whether what goes along trees is faster in one chain, however many hosts
// stand in it. That crosses the way of each leaf once, and trees do for almost
// every host, but a chain has more steps.
bool IsFasterInChain(const TreeChoices& choices, const FlowsOfPart& of) {
  size_t hosts = 2;
  for (const Flows::value_type* const flow : of.flows) {
    hosts = std::max(hosts, flow->first.hosts.size());
  }
  const auto count = static_cast<double>(hosts);
  return PipelineSeconds(choices.LongestOnce(), count - 1) <
         PipelineSeconds(choices.LongestArriving(), 2 * std::log2(count));
}

// Decides which shares go from host to host along trees: none, unless sources
// that fed every host would send more than ranks receive; else as many as it
// takes until none does.
void ChooseTrees(const NetworkLinks& links, FlowsOfPart& of, Module& module) {
  TreeChoices choices(links, of, /*near_send=*/true);
  of.in_chain = links.has_leaves() && module.limits.long_chains &&
                IsFasterInChain(choices, of);
  const double target = choices.LongestOnce();
  if (choices.Longest() <= target * kGainOfTrees) return;
  const std::vector<TreeChoice> chosen = choices.Choose(target);
  if (chosen.empty()) return;
  int64_t bytes = 0;
  for (const TreeChoice& choice : chosen) bytes += choice.share->bytes;
  // What each set of holders sends would be so little, in the mean, that its
  // messages took longer to start than on the wire. Many sources of little feed
  // every host about as fast.
  if (bytes < std::ssize(chosen) * RangeBytesMin(module)) return;
  for (const TreeChoice& choice : chosen) choice.share->way = FlowWay::kTree;
  module.stats.trees = true;
}

// How many ranks of other hosts the NIC sends to, if holders feed every host.
int64_t ReceiversOf(const NetworkLinks& links, size_t nic,
                    const FlowsOfPart& of) {
  std::set<Rank> receivers;
  for (const Flows::value_type* const of_key : of.flows) {
    const auto& [key, flow] = *of_key;
    const bool sends =
        std::any_of(flow.begin(), flow.end(), [&](const auto& share) {
          const Holders& holders = share.first;
          return std::any_of(holders.begin(), holders.end(), [&](Rank holder) {
            return links.EgressOf(holder) == nic;
          });
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
void LevelSources(const Module& module, const NetworkLinks& links,
                  const FlowsOfPart& of, RoutedPieces& routed) {
  TreeChoices choices(links, of, /*near_send=*/false);
  const double longest = choices.LongestSent();
  const double target = std::max(choices.LongestOnce(), choices.MeanSent());
  if (longest < target * kGainOfLeveling) return;
  const double start_seconds =
      kStagedRoundSeconds / module.limits.operations_per_round *
      static_cast<double>(ReceiversOf(links, choices.Busiest(), of));
  if (longest < start_seconds) return;
  const std::vector<TreeChoice> chosen = choices.ChooseSpread(target);
  if (longest < std::max(target, choices.LongestSent()) * kGainOfLeveling) {
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

// With the hosts on the sources' leaf first: a chain that begins there crosses
// the way of each leaf once.
FlowKey FromLeaf(const NetworkLinks& links, size_t uplink, FlowKey key) {
  const auto first = std::find_if(
      key.hosts.begin(), key.hosts.end(), [&](const Members& members) {
        return links.UplinkOf(members.front()) == uplink;
      });
  if (first != key.hosts.end()) {
    std::rotate(key.hosts.begin(), first, key.hosts.end());
  }
  return key;
}

// What goes by tree of a flow and begins on one leaf.
struct TreeShare {
  std::vector<PieceId> pieces;
  int64_t bytes = 0;
  std::set<Rank> sources;
};

// Cuts what goes by tree of a flow into ranges.
void CutIntoRanges(const NetworkLinks& links, const FlowKey& key,
                   const Flow& flow, bool in_chain, Module& module,
                   RoutedPieces& routed) {
  std::map<size_t, TreeShare> shares;  // by uplink, if there are leaves
  for (const auto& [holders, share] : flow) {
    if (share.way != FlowWay::kTree) continue;
    TreeShare& of =
        shares[links.has_leaves() ? links.UplinkOf(holders.front()) : 0];
    of.pieces.insert(of.pieces.end(), share.pieces.begin(), share.pieces.end());
    of.bytes += share.bytes;
    of.sources.insert(holders.begin(), holders.end());
  }
  for (const auto& [uplink, share] : shares) {
    const std::vector<FlowRange> ranges =
        RangesOf(links.has_leaves() ? FromLeaf(links, uplink, key) : key,
                 share.sources.size(),
                 static_cast<size_t>(
                     std::max<int64_t>(share.bytes / RangeBytesMin(module), 1)),
                 in_chain);
    module.stats.long_chains |= in_chain && key.hosts.size() > kHostsOfChain;
    for (const PieceId id : share.pieces) {
      for (const Members& members : key.hosts) routed.Feed(id, members);
      routed.Feed(id, key.near);
    }
    const int64_t even = share.bytes / std::ssize(ranges);
    routed.Cut(share.pieces, std::vector<int64_t>(ranges.size(), even),
               [&](const Packed& packed, size_t range) {
                 for (const Tree& tree : ranges[range].trees) {
                   routed.AddTree(packed.piece, packed.box, tree.root,
                                  tree.edges);
                 }
               });
  }
}

}  // namespace

absl::Status RouteFlows(const PassOptions&, Module& module) {
  if (!module.limits.relays) return absl::OkStatus();
  Flows flows = ListFlows(module);
  const NetworkLinks links(module);
  std::vector<FlowsOfPart> competing = Competing(module, flows);
  if (module.limits.trees && StagingHasRoom(module)) {
    for (FlowsOfPart& of : competing) ChooseTrees(links, of, module);
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
  for (const FlowsOfPart& of : competing) {
    for (const Flows::value_type* const flow : of.flows) {
      CutIntoRanges(links, flow->first, flow->second, of.in_chain, module,
                    routed);
    }
  }
  if (routed.empty()) {
    for (const FlowsOfPart& of : competing) {
      LevelSources(module, links, of, routed);
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
