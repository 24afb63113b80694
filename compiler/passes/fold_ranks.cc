#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "compiler/module_sites.h"
#include "compiler/passes/passes.h"
#include "simulator/links.h"

namespace refit {
namespace {

// Shards are cut as evenly as their rows allow.
constexpr double kUneven = 1.01;
// A part that is not like all others may have so many more engines for each
// source than the whole job.
constexpr double kBusierPart = 1.1;

// Ranks of one side that hold the same, ascending.
using Class = std::vector<int32_t>;

// A side as copies that hold the same: data-parallel ones, or engines. Each
// copy has equally many ranks of a class, one after the other.
struct Copies {
  const SideLayout& side;
  std::vector<Class> classes;
  size_t count = 0;

  size_t RanksOf(const Class& ranks) const { return ranks.size() / count; }
  int32_t RanksIn(size_t copies) const {
    return static_cast<int32_t>(side.ranks.size() / count * copies);
  }
};

Copies CopiesOf(const SideLayout& side, int32_t first_rank) {
  std::map<std::vector<BufferId>, Class> by_buffers;
  for (size_t rank = 0; rank < side.ranks.size(); ++rank) {
    by_buffers[side.ranks[rank]].push_back(first_rank +
                                           static_cast<int32_t>(rank));
  }
  Copies copies = {.side = side, .classes = {}};
  for (auto& [buffers, ranks] : by_buffers) {
    copies.count = std::gcd(copies.count, ranks.size());
    copies.classes.push_back(std::move(ranks));
  }
  return copies;
}

// The fewest copies, from the first on, that share no NVLink domain with the
// others.
size_t CopiesOfBlock(const Module& module, const Copies& copies) {
  struct Range {
    size_t first = 0;
    size_t last = 0;
  };
  std::map<int32_t, Range> of_domain;
  for (const Class& ranks : copies.classes) {
    for (size_t i = 0; i < ranks.size(); ++i) {
      const int32_t host = module.topology.host[static_cast<size_t>(ranks[i])];
      const size_t copy = i / copies.RanksOf(ranks);
      Range& range = of_domain
                         .try_emplace(module.topology.DomainOf(host),
                                      Range{.first = copy, .last = copy})
                         .first->second;
      range.first = std::min(range.first, copy);
      range.last = std::max(range.last, copy);
    }
  }
  size_t end = 1;
  for (size_t before = 0; before != end;) {
    before = end;
    for (const auto& [domain, range] : of_domain) {
      if (range.first < end) end = std::max(end, range.last + 1);
    }
  }
  return end;
}

size_t BlocksOf(size_t copies, size_t block) {
  return (copies + block - 1) / block;
}

// By part: behind its last copy. The first parts have a block more than others,
// and the last one may lack some of its last block.
using PartEnds = std::vector<size_t>;

PartEnds EndsOfParts(size_t parts, size_t copies, size_t block) {
  const size_t blocks = BlocksOf(copies, block);
  PartEnds ends;
  for (size_t part = 1; part <= parts; ++part) {
    const size_t end = part * (blocks / parts) + std::min(part, blocks % parts);
    ends.push_back(std::min(end * block, copies));
  }
  return ends;
}

size_t BeginOf(const PartEnds& ends, size_t part) {
  return part == 0 ? 0 : ends[part - 1];
}

size_t CopiesIn(const PartEnds& ends, size_t part) {
  return ends[part] - BeginOf(ends, part);
}

// How both sides may be cut into parts.
struct Candidate {
  size_t parts = 0;
  // Copies of which parts consist, but for the rest.
  size_t source_block = 1;
  size_t destination_block = 1;
  std::vector<AlikeParts> alike = {};  // without shifts

  // Planned ranks. Parts that are not all alike count twice: a job of few such
  // parts is planned better as a whole.
  int64_t Cost() const {
    int64_t ranks = 0;
    for (const AlikeParts& of : alike) ranks += of.sources + of.destinations;
    return alike.size() == 1 ? ranks : 2 * ranks;
  }
};

std::vector<AlikeParts> AlikePartsIn(const Copies& sources,
                                     const Copies& destinations,
                                     const Candidate& of) {
  const PartEnds source_ends =
      EndsOfParts(of.parts, sources.count, of.source_block);
  const PartEnds destination_ends =
      EndsOfParts(of.parts, destinations.count, of.destination_block);
  std::vector<AlikeParts> alike;
  for (size_t part = 0; part < of.parts; ++part) {
    const int32_t from = sources.RanksIn(CopiesIn(source_ends, part));
    const int32_t to = destinations.RanksIn(CopiesIn(destination_ends, part));
    if (!alike.empty() && alike.back().sources == from &&
        alike.back().destinations == to) {
      ++alike.back().count;
      continue;
    }
    alike.push_back({.first = static_cast<int32_t>(part),
                     .sources = from,
                     .destinations = to});
  }
  return alike;
}

// Those of least cost first. Parts that are not all alike need a file in which
// ranks share their lists.
std::vector<Candidate> ListCandidates(const Module& module,
                                      const Copies& sources,
                                      const Copies& destinations) {
  std::vector<Candidate> candidates;
  const auto add = [&](Candidate candidate) {
    candidate.alike = AlikePartsIn(sources, destinations, candidate);
    if (candidate.Cost() >= module.world_size()) return;
    candidates.push_back(std::move(candidate));
  };
  const size_t copies = std::gcd(sources.count, destinations.count);
  for (size_t parts = 2; parts <= copies; ++parts) {
    if (copies % parts == 0) add({.parts = parts});
  }
  if (module.is_compact) {
    const size_t source_block = CopiesOfBlock(module, sources);
    const size_t destination_block = CopiesOfBlock(module, destinations);
    const size_t most =
        std::min(BlocksOf(sources.count, source_block),
                 BlocksOf(destinations.count, destination_block));
    for (size_t parts = 2; parts <= most; ++parts) {
      if (copies % parts == 0) continue;
      add({.parts = parts,
           .source_block = source_block,
           .destination_block = destination_block});
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) {
                     return a.Cost() < b.Cost();
                   });
  return candidates;
}

// How far the ranks of each part are from those of the one before. None: they
// are not equally far.
std::optional<int32_t> ShiftOf(const Copies& copies, const PartEnds& ends,
                               const AlikeParts& alike) {
  const auto first = static_cast<size_t>(alike.first);
  const size_t begin = BeginOf(ends, first);
  const size_t in_part = CopiesIn(ends, first);
  const auto others = static_cast<size_t>(alike.count) - 1;
  if (others == 0) return 0;
  std::optional<int32_t> shift;
  for (const Class& ranks : copies.classes) {
    const size_t of_copy = copies.RanksOf(ranks);
    for (size_t i = begin * of_copy; i < (begin + others * in_part) * of_copy;
         ++i) {
      const int32_t distance = ranks[i + in_part * of_copy] - ranks[i];
      if (shift.value_or(distance) != distance) return std::nullopt;
      shift = distance;
    }
  }
  return shift;
}

void NumberParts(const Copies& copies, const PartEnds& ends,
                 std::vector<int32_t>& part) {
  for (const Class& ranks : copies.classes) {
    const size_t of_copy = copies.RanksOf(ranks);
    for (size_t number = 0; number < ends.size(); ++number) {
      for (size_t i = BeginOf(ends, number) * of_copy;
           i < ends[number] * of_copy; ++i) {
        part[static_cast<size_t>(ranks[i])] = static_cast<int32_t>(number);
      }
    }
  }
}

// None: ranks of parts that are to be alike are not equally far apart.
std::optional<Fold> FoldOf(const Copies& sources, const Copies& destinations,
                           const Candidate& of) {
  const PartEnds source_ends =
      EndsOfParts(of.parts, sources.count, of.source_block);
  const PartEnds destination_ends =
      EndsOfParts(of.parts, destinations.count, of.destination_block);
  Fold fold = {.alike = of.alike, .part = {}, .alike_of = {}};
  for (size_t number = 0; number < fold.alike.size(); ++number) {
    AlikeParts& alike = fold.alike[number];
    const std::optional<int32_t> source = ShiftOf(sources, source_ends, alike);
    const std::optional<int32_t> destination =
        ShiftOf(destinations, destination_ends, alike);
    if (!source.has_value() || !destination.has_value()) return std::nullopt;
    alike.source_shift = *source;
    alike.destination_shift = *destination;
    fold.alike_of.insert(fold.alike_of.end(), static_cast<size_t>(alike.count),
                         static_cast<int32_t>(number));
  }
  fold.part.resize(sources.side.ranks.size() + destinations.side.ranks.size());
  NumberParts(sources, source_ends, fold.part);
  NumberParts(destinations, destination_ends, fold.part);
  return fold;
}

// Whether no NVLink domain has ranks of two parts, and ranks of a part share a
// domain, or a leaf whose way to the others is narrow, where those of the first
// one like it do.
bool HostsAreAlike(const Module& module) {
  enum Ranks { kOfOnePart, kOfAnyPart };
  const auto are_alike = [&](Ranks ranks, const auto& place_of) {
    std::map<int32_t, int32_t> part_of;
    // By part: from its places to those of the first one like it, and back.
    std::map<std::pair<int32_t, int32_t>, int32_t> first_of, place_in;
    for (int32_t rank = 0; rank < module.world_size(); ++rank) {
      const int32_t part = module.PartOf(Rank{rank});
      const int32_t place = place_of(Rank{rank});
      const int32_t first = place_of(module.FirstOf(Rank{rank}));
      if (ranks == kOfOnePart &&
          part_of.try_emplace(place, part).first->second != part) {
        return false;
      }
      if (first_of.try_emplace({part, place}, first).first->second != first ||
          place_in.try_emplace({part, first}, place).first->second != place) {
        return false;
      }
    }
    return true;
  };
  const auto host_of = [&](Rank rank) {
    return module.topology.host[IndexOf(rank)];
  };
  const Topology& topology = module.topology;
  return are_alike(kOfOnePart, host_of) &&
         are_alike(
             kOfOnePart,
             [&](Rank rank) { return topology.DomainOf(host_of(rank)); }) &&
         (!topology.HasNarrowLeaves() || are_alike(kOfAnyPart, [&](Rank rank) {
           return host_of(rank) / topology.fabric->hosts_per_leaf;
         }));
}

using Held = std::pair<ParamId, Box>;

double BytesOf(const Module& module, const Buffer& buffer,
               const Fragment& fragment) {
  if (module.param(fragment.param).skip != SkipReason::kUnspecified) return 0;
  return static_cast<double>(fragment.box.Volume() * DTypeBytes(buffer.dtype));
}

struct Bytes {
  double most = 0;  // by a NIC, which ranks may share
  double all = 0;
};

// What sources send at least, if what several hold is shared out among them.
Bytes SentBytes(const Module& module, const simulator::Links& links,
                const Copies& sources) {
  absl::flat_hash_map<Held, double> holders;
  std::map<uint32_t, double> by_nic;
  Bytes sent;
  for (const bool counts : {true, false}) {
    for (const Class& ranks : sources.classes) {
      double bytes = 0;
      for (const BufferId id : module.buffers_of(Rank{ranks.front()})) {
        const Buffer& buffer = module.buffers[id];
        for (const Fragment& fragment : buffer.fragments) {
          double& of_box = holders[{fragment.param, fragment.box}];
          if (counts) {
            of_box += static_cast<double>(ranks.size());
          } else {
            bytes += BytesOf(module, buffer, fragment) / of_box;
          }
        }
      }
      if (counts) continue;
      for (const int32_t rank : ranks) {
        double& of_nic = by_nic[links.place(rank).nic] += bytes;
        sent.most = std::max(sent.most, of_nic);
        sent.all += bytes;
      }
    }
  }
  return sent;
}

// How many ranks want the same, by the first rank that does.
using ClassCounts = std::map<int32_t, int32_t>;

// What destination ranks want, each byte once.
class WantedBytes {
 public:
  WantedBytes(const Module& module, const Copies& destinations)
      : module_(module),
        class_of_(static_cast<size_t>(module.world_size()), 0) {
    for (const Class& ranks : destinations.classes) {
      for (const int32_t rank : ranks) {
        class_of_[static_cast<size_t>(rank)] = ranks.front();
      }
    }
  }

  int32_t ClassOf(int32_t rank) const {
    return class_of_[static_cast<size_t>(rank)];
  }

  // By the ranks of these classes, but for as many as are in `left_out`.
  double Of(const ClassCounts& counts, const ClassCounts& left_out = {}) {
    std::vector<int32_t> classes;
    for (const auto& [number, count] : counts) {
      const auto out = left_out.find(number);
      if (out == left_out.end() || out->second < count) {
        classes.push_back(number);
      }
    }
    const auto [found, is_new] = bytes_of_.try_emplace(std::move(classes), 0);
    if (!is_new) return found->second;
    absl::flat_hash_set<Held> held;
    for (const int32_t rank : found->first) {
      for (const BufferId id : module_.buffers_of(Rank{rank})) {
        const Buffer& buffer = module_.buffers[id];
        for (const Fragment& fragment : buffer.fragments) {
          if (held.insert({fragment.param, fragment.box}).second) {
            found->second += BytesOf(module_, buffer, fragment);
          }
        }
      }
    }
    return found->second;
  }

 private:
  const Module& module_;
  std::vector<int32_t> class_of_;  // by rank
  std::map<std::vector<int32_t>, double> bytes_of_;
};

// What comes over the network, if the ranks of a host pass on to each other
// what several of them want.
Bytes ReceivedBytes(const Module& module, const simulator::Links& links,
                    WantedBytes& wanted) {
  struct Host {
    ClassCounts classes;
    std::set<uint32_t> nics;
  };
  std::map<int32_t, Host> hosts;
  for (int32_t rank = module.source_ranks(); rank < module.world_size();
       ++rank) {
    Host& host = hosts[module.topology.host[static_cast<size_t>(rank)]];
    ++host.classes[wanted.ClassOf(rank)];
    host.nics.insert(links.place(rank).nic);
  }
  Bytes received;
  for (const auto& [number, host] : hosts) {
    const double bytes = wanted.Of(host.classes);
    received.all += bytes;
    received.most =
        std::max(received.most, bytes / static_cast<double>(host.nics.size()));
  }
  return received;
}

// How long the busiest way of a leaf to the others is busy, if each byte that a
// part wants beyond it crosses it once. Sources send alike.
double LeafSeconds(const Module& module, const simulator::Links& links,
                   WantedBytes& wanted) {
  struct Ranks {
    double sources = 0;
    ClassCounts classes;  // of destinations
    int32_t any = 0;
  };
  struct Part {
    Ranks all;
    std::map<uint32_t, Ranks> leaves;
  };
  std::map<int32_t, Part> parts;
  for (int32_t rank = 0; rank < module.world_size(); ++rank) {
    Part& part = parts[module.PartOf(Rank{rank})];
    Ranks& leaf = part.leaves[links.place(rank).leaf];
    leaf.any = rank;
    for (Ranks* ranks : {&part.all, &leaf}) {
      if (module.IsRelay(Rank{rank})) {
        ++ranks->classes[wanted.ClassOf(rank)];
      } else {
        ++ranks->sources;
      }
    }
  }
  std::map<uint32_t, double> up, down;  // seconds, by leaf
  for (const auto& [part_number, part] : parts) {
    for (const auto& [number, leaf] : part.leaves) {
      const double of_sources = leaf.sources / part.all.sources;
      const double way =
          links.BytesPerSecond(simulator::LinkKind::kLeafUplink, leaf.any);
      up[number] +=
          of_sources * wanted.Of(part.all.classes, leaf.classes) / way;
      down[number] += (1 - of_sources) * wanted.Of(leaf.classes) / way;
    }
  }
  double longest = 0;
  for (const auto* const seconds : {&up, &down}) {
    for (const auto& [leaf, of_leaf] : *seconds) {
      longest = std::max(longest, of_leaf);
    }
  }
  return longest;
}

}  // namespace

absl::Status FoldRanks(const PassOptions&, Module& module) {
  module.is_compact = module.world_size() >= module.limits.compact_ranks_min;
  if (module.topology.colocated || module.source_ranks() == 0 ||
      module.world_size() == module.source_ranks()) {
    return absl::OkStatus();
  }
  const Copies sources = CopiesOf(module.source, 0);
  const Copies destinations =
      CopiesOf(module.destination, module.source_ranks());
  if (sources.count < 2 || destinations.count < 2) return absl::OkStatus();
  const simulator::Links links(SitesOf(module), LinkOptionsOf(module));
  const Bytes sent = SentBytes(module, links, sources);
  WantedBytes wanted(module, destinations);
  const Bytes received = ReceivedBytes(module, links, wanted);
  // Sources that send more than receivers receive would gain if receivers of
  // other parts passed on what they send. In a part fewer ranks share out what
  // they hold.
  const auto sends_more = [&](const AlikeParts& alike) {
    return sent.most * module.source_ranks() / alike.sources >
           received.most * kUneven;
  };
  // Nor may sources that feed all hosts send much more than in the whole job.
  const double fed = sent.most * received.all / sent.all;
  const auto is_busier = [&](const AlikeParts& alike) {
    const double of_part = fed * module.source_ranks() / alike.sources *
                           alike.destinations /
                           static_cast<double>(destinations.side.ranks.size());
    return of_part > received.most * kUneven && of_part > fed * kBusierPart;
  };
  // Parts want the same, and each has it cross the ways of leaves.
  const bool has_leaves = module.topology.HasNarrowLeaves();
  const double leaf_seconds =
      has_leaves
          ? kUneven * std::max(received.most /
                                   links.BytesPerSecond(
                                       simulator::LinkKind::kNetworkIngress, 0),
                               LeafSeconds(module, links, wanted))
          : 0;
  for (const Candidate& candidate :
       ListCandidates(module, sources, destinations)) {
    const std::vector<AlikeParts>& alike = candidate.alike;
    if (std::any_of(alike.begin(), alike.end(), sends_more) ||
        (alike.size() > 1 &&
         std::any_of(alike.begin(), alike.end(), is_busier))) {
      continue;
    }
    module.fold = FoldOf(sources, destinations, candidate);
    if (module.fold.has_value() && HostsAreAlike(module) &&
        (!has_leaves || LeafSeconds(module, links, wanted) <= leaf_seconds)) {
      break;
    }
    module.fold.reset();
  }
  return absl::OkStatus();
}

}  // namespace refit
