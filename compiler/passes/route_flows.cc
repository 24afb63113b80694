#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "compiler/passes/packer.h"
#include "compiler/passes/passes.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// The hosts of a flow stand in this many trees, each of which carries an equal
// part of its bytes, and in each tree a host passes what it gets on to this
// many others. Trees begin at different hosts, so that a host passes bytes on
// in one of them and is a leaf of the other: it sends as much as it receives,
// however many hosts there are. These are the double trees of P. Sanders,
// J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast,
// reduction and scan", Parallel Computing 35 (2009), which NCCL has for
// reductions. With one tree, a chain, bytes take a step for every host; with
// more, a rank has more peers.
constexpr size_t kTrees = 2;
// So few hosts stand in one chain: it has about as many steps, and ranks one
// message each way in each round.
constexpr size_t kHostsOfChain = 8;
size_t CountTrees(size_t hosts) { return hosts <= kHostsOfChain ? 1 : kTrees; }

// Trees take rounds until all have begun, and sources that feed every host do
// not: these may send more than ranks receive, by this factor.
constexpr double kGainOfTrees = 1.25;

// A flow of less than this part of all: nobody passes it on without trees,
// either.
constexpr int64_t kSmallFlow = 256;

// Where a range of a flow ends may differ by this part of it.
constexpr int64_t kUnevenPart = 256;

// A message of so many bytes takes as long to start as on the wire. A range of
// a flow has as many at least.
int64_t RangeBytesMin(const Module& module) {
  return std::max<int64_t>(
      static_cast<int64_t>(module.topology.network_bytes_per_second *
                           kStagedRoundSeconds),
      kFlowMessageBytesMin);
}

// Whether staging has room for messages that are worth their start, a rank's
// own and one that it is sent, and for the buckets of what is not routed: the
// rounds that use staging in turn are more by kHeldRounds than those of other
// plans.
bool StagingHasRoom(const Module& module) {
  const Limits& limits = module.limits;
  const int64_t of_round = limits.staging_bytes / (limits.slots + kHeldRounds);
  return AlignStaging(limits.bucket_bytes) <= of_round &&
         std::min(limits.bucket_bytes, of_round / 2) >= RangeBytesMin(module);
}

// Ranks of one host, ascending.
using Members = absl::InlinedVector<Rank, 4>;

// The receivers of a piece that no source shares a host with, by host.
std::vector<Members> FarReceivers(const Module& module, const Piece& piece) {
  const std::vector<int32_t>& host = module.topology.host;
  std::vector<int32_t> near;
  for (const Rank source : piece.sources) near.push_back(host[IndexOf(source)]);
  std::sort(near.begin(), near.end());
  std::map<int32_t, Members> by_host;
  for (const Rank receiver : piece.destinations) {
    const int32_t number = host[IndexOf(receiver)];
    if (std::binary_search(near.begin(), near.end(), number)) continue;
    by_host[number].push_back(receiver);
  }
  std::vector<Members> receivers;
  for (auto& [number, members] : by_host) {
    receivers.push_back(std::move(members));
  }
  return receivers;
}

// Those on the one host that has all sources.
Members NearReceivers(const Module& module, const Piece& piece) {
  const std::vector<int32_t>& host = module.topology.host;
  const int32_t number = host[IndexOf(piece.sources.front())];
  Members near;
  if (module.topology.colocated || !module.limits.deals_relays ||
      std::any_of(piece.sources.begin(), piece.sources.end(), [&](Rank source) {
        return host[IndexOf(source)] != number;
      })) {
    return near;
  }
  for (const Rank receiver : piece.destinations) {
    if (host[IndexOf(receiver)] == number) near.push_back(receiver);
  }
  return near;
}

// Pieces of one wave that the same ranks of several hosts want. Those with the
// same holders stand together.
struct Flow {
  std::vector<PieceId> pieces;
  int64_t bytes = 0;
};
struct FlowKey {
  int32_t wave = 0;
  std::vector<Members> hosts;
  // Receivers on the one host where all sources are; empty if there are none,
  // or several such hosts.
  Members near;

  friend bool operator<(const FlowKey& a, const FlowKey& b) {
    return std::tie(a.wave, a.hosts, a.near) <
           std::tie(b.wave, b.hosts, b.near);
  }
};
using Flows = std::map<FlowKey, Flow>;

Flows ListFlows(const Module& module) {
  Flows flows;
  for (size_t i = 0; i < module.pieces.size(); ++i) {
    const Piece& piece = module.pieces[i];
    // What is cast on arrival is not what was sent, so nobody passes it on.
    if (piece.wire_dtype != piece.destination_dtype) continue;
    std::vector<Members> hosts = FarReceivers(module, piece);
    if (hosts.size() < 2) continue;
    Flow& flow =
        flows[{piece.wave, std::move(hosts), NearReceivers(module, piece)}];
    flow.pieces.push_back(PieceId{static_cast<int32_t>(i)});
    flow.bytes += module.WireBytes(piece);
  }
  for (auto& [key, flow] : flows) {
    std::stable_sort(flow.pieces.begin(), flow.pieces.end(),
                     [&](PieceId a, PieceId b) {
                       return module.piece(a).sources < module.piece(b).sources;
                     });
  }
  return flows;
}

// Whether sources that fed every host would be what takes longest.
bool SourcesAreTheLimit(const Module& module) {
  std::vector<double> sent(static_cast<size_t>(module.world_size()), 0);
  std::vector<double> received = sent;
  for (const Piece& piece : module.pieces) {
    const auto bytes = static_cast<double>(module.WireBytes(piece));
    const std::vector<Members> hosts = FarReceivers(module, piece);
    for (const Rank source : piece.sources) {
      sent[IndexOf(source)] += bytes * static_cast<double>(hosts.size()) /
                               static_cast<double>(piece.sources.size());
    }
    for (const Members& members : hosts) {
      for (const Rank member : members) {
        received[IndexOf(member)] +=
            bytes / static_cast<double>(members.size());
      }
    }
  }
  return *std::max_element(sent.begin(), sent.end()) >
         *std::max_element(received.begin(), received.end()) * kGainOfTrees;
}

// How many sets of ranks hold pieces of the flow.
int64_t CountStreams(const Module& module, const Flow& flow) {
  int64_t streams = 0;
  const std::vector<Rank>* last = nullptr;
  for (const PieceId id : flow.pieces) {
    const std::vector<Rank>& sources = module.piece(id).sources;
    if (last == nullptr || *last != sources) ++streams;
    last = &sources;
  }
  return streams;
}

int64_t BytesOf(const Flows& flows) {
  int64_t bytes = 0;
  for (const auto& [key, flow] : flows) bytes += flow.bytes;
  return bytes;
}

// Whether what each set of holders sends is so little, in the mean, that its
// messages would take longer to start than on the wire. Many sources of little
// feed every host about as fast.
bool AreStreamsSmall(const Module& module, const Flows& flows) {
  int64_t streams = 0;
  for (const auto& [key, flow] : flows) streams += CountStreams(module, flow);
  return BytesOf(flows) < streams * RangeBytesMin(module);
}

// How many messages fan-out would make at least, in which each receiver passes
// a part of what a source holds on to all others.
int64_t MessagesWithoutTrees(const Module& module, const Flows& flows) {
  const int64_t small = BytesOf(flows) / kSmallFlow;
  int64_t messages = 0;
  for (const auto& [key, flow] : flows) {
    if (flow.bytes < small) continue;
    int64_t receivers = 0;
    for (const Members& members : key.hosts) receivers += std::ssize(members);
    messages += CountStreams(module, flow) * receivers * receivers;
  }
  return messages;
}

// From `first` to the others of its host.
void AddOthers(const Members& members, Rank first, std::vector<Relay>& edges) {
  // Each begins with the rank after it, so that all receive alike.
  const auto next = std::upper_bound(members.begin(), members.end(), first);
  for (auto it = next; it != members.end(); ++it) edges.push_back({first, *it});
  for (auto it = members.begin(); it != next; ++it) {
    if (*it != first) edges.push_back({first, *it});
  }
}

// The tree of one range of a flow: who of each host receives it first, the
// root's first, and how it goes on from there.
struct Tree {
  Rank root{};
  std::vector<Relay> edges;
};

// One of the flow's trees, by way of lane `lane` of `lanes`: each lane enters a
// host by another of its ranks, as far as there are enough.
Tree TreeOf(const std::vector<Members>& hosts, size_t tree_number, size_t lane,
            size_t lanes) {
  const size_t trees = CountTrees(hosts.size());
  const size_t first = tree_number * hosts.size() / trees;
  const auto members = [&](size_t position) -> const Members& {
    return hosts[(first + position) % hosts.size()];
  };
  const auto entry = [&](size_t position) {
    const Members& of_host = members(position);
    return of_host[lane * of_host.size() / lanes];
  };
  Tree tree;
  tree.root = entry(0);
  for (size_t i = 1; i < hosts.size(); ++i) {
    tree.edges.push_back({entry((i - 1) / trees), entry(i)});
  }
  for (size_t i = 0; i < hosts.size(); ++i) {
    AddOthers(members(i), entry(i), tree.edges);
  }
  return tree;
}

// How many source ranks the flow has.
size_t CountSources(const Module& module, const Flow& flow) {
  std::set<Rank> sources;
  for (const PieceId id : flow.pieces) {
    const Piece& piece = module.piece(id);
    sources.insert(piece.sources.begin(), piece.sources.end());
  }
  return sources.size();
}

// A part of a flow, of as many bytes as the others. It goes by one tree, or two
// where receivers share the sources' host.
struct Range {
  std::vector<Tree> trees;
};

// `most` at most, in the order of the flow's pieces: neighbouring ranges, which
// often have the same source, enter a host by the same rank.
std::vector<Range> RangesOf(const FlowKey& key, size_t sources, size_t most) {
  size_t members = 0;
  for (const Members& of : key.hosts) members = std::max(members, of.size());
  const size_t trees = std::min(CountTrees(key.hosts.size()), most);
  const size_t lanes = std::min(members, most / trees);
  // Whoever stands on the sources' host sends as much over the network. What a
  // source sends itself enters its own host by one receiver after the other, as
  // far as that is not too little for each.
  const size_t near = key.near.size();
  const size_t senders = sources + near;
  const size_t parts =
      std::clamp<size_t>(most / trees / lanes, 1, std::max<size_t>(near, 1));
  std::vector<Range> ranges;
  for (size_t lane = 0; lane < lanes; ++lane) {
    const size_t sender = lane * senders / lanes;
    const size_t sources_before = sender * sources / senders;
    const bool by_source = (sender + 1) * sources / senders > sources_before;
    for (size_t number = 0; number < trees; ++number) {
      const Tree far = TreeOf(key.hosts, number, lane, lanes);
      if (near == 0) {
        ranges.push_back({{far}});
        continue;
      }
      for (size_t part = 0; part < parts; ++part) {
        const size_t receiver =
            by_source ? lane + part : sender - sources_before;
        Tree inside = {.root = key.near[receiver % near], .edges = {}};
        AddOthers(key.near, inside.root, inside.edges);
        if (by_source) {
          ranges.push_back({{std::move(inside), far}});
          continue;
        }
        inside.edges.push_back({inside.root, far.root});
        inside.edges.insert(inside.edges.end(), far.edges.begin(),
                            far.edges.end());
        ranges.push_back({{std::move(inside)}});
      }
    }
  }
  return ranges;
}

void CutIntoRanges(const FlowKey& key, const Flow& flow, const Module& module,
                   std::vector<std::vector<Piece>>& routed) {
  const std::vector<Range> ranges =
      RangesOf(key, CountSources(module, flow),
               static_cast<size_t>(
                   std::max<int64_t>(flow.bytes / RangeBytesMin(module), 1)));
  const int64_t even = flow.bytes / std::ssize(ranges);
  Packer packer(even + even / kUnevenPart + 1, kUnevenPart, flow.pieces.size());
  for (const PieceId id : flow.pieces) {
    const Piece& piece = module.piece(id);
    packer.Add(id, piece.box, DTypeBytes(piece.wire_dtype));
  }
  const std::vector<Bucket> buckets = packer.Take();
  for (size_t i = 0; i < buckets.size(); ++i) {
    // What rounding leaves over goes with the last range.
    const Range& range = ranges[std::min(i, ranges.size() - 1)];
    for (const Packed& packed : buckets[i].contents) {
      for (const Tree& tree : range.trees) {
        Piece& part = routed[IndexOf(packed.piece)].emplace_back(
            module.piece(packed.piece));
        part.box = packed.box;
        part.destinations = {tree.root};
        part.relays = tree.edges;
        part.is_routed = true;
      }
    }
  }
}

}  // namespace

absl::Status RouteFlows(const PassOptions&, Module& module) {
  if (!module.limits.relays || !module.limits.routes_flows) {
    return absl::OkStatus();
  }
  if (!StagingHasRoom(module)) return absl::OkStatus();
  if (!SourcesAreTheLimit(module)) return absl::OkStatus();
  const Flows flows = ListFlows(module);
  if (flows.empty() || AreStreamsSmall(module, flows)) return absl::OkStatus();
  module.stats.routes_flows = true;
  module.stats.messages_without_trees = MessagesWithoutTrees(module, flows);
  std::vector<std::vector<Piece>> routed(module.pieces.size());
  std::vector<const FlowKey*> flow_of(module.pieces.size(), nullptr);
  for (const auto& [key, flow] : flows) {
    CutIntoRanges(key, flow, module, routed);
    for (const PieceId id : flow.pieces) flow_of[IndexOf(id)] = &key;
  }
  std::vector<Piece> pieces;
  for (size_t i = 0; i < routed.size(); ++i) {
    Piece& piece = module.pieces[i];
    if (flow_of[i] != nullptr) {
      std::vector<Members> hosts = flow_of[i]->hosts;
      hosts.push_back(flow_of[i]->near);
      for (const Members& members : hosts) {
        std::erase_if(piece.destinations, [&](Rank receiver) {
          return std::binary_search(members.begin(), members.end(), receiver);
        });
      }
    }
    if (!piece.destinations.empty()) pieces.push_back(std::move(piece));
    for (Piece& part : routed[i]) pieces.push_back(std::move(part));
  }
  module.pieces = std::move(pieces);
  return absl::OkStatus();
}

}  // namespace refit
