#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "compiler/passes/passes.h"

namespace refit {
namespace {

// Shards are cut as evenly as their rows allow.
constexpr double kUneven = 1.01;

// Ranks of one side that hold the same, ascending.
using Class = std::vector<int32_t>;

std::vector<Class> ClassesOf(const SideLayout& side) {
  std::map<std::vector<BufferId>, Class> by_buffers;
  for (size_t rank = 0; rank < side.ranks.size(); ++rank) {
    by_buffers[side.ranks[rank]].push_back(static_cast<int32_t>(rank));
  }
  std::vector<Class> classes;
  for (auto& [buffers, ranks] : by_buffers) classes.push_back(std::move(ranks));
  return classes;
}

// How far the ranks of each part are from those of the one before, if each part
// takes as many of each class, in order. None: they are not equally far.
std::optional<int32_t> ShiftOf(const std::vector<Class>& classes,
                               size_t parts) {
  const size_t first = classes.front().size() / parts;
  const int32_t shift = classes.front()[first] - classes.front()[0];
  for (const Class& ranks : classes) {
    const size_t in_part = ranks.size() / parts;
    for (size_t i = in_part; i < ranks.size(); ++i) {
      if (ranks[i] != ranks[i - in_part] + shift) return std::nullopt;
    }
  }
  return shift;
}

void NumberParts(const std::vector<Class>& classes, size_t parts,
                 size_t first_rank, std::vector<int32_t>& part) {
  for (const Class& ranks : classes) {
    const size_t in_part = ranks.size() / parts;
    for (size_t i = 0; i < ranks.size(); ++i) {
      part[first_rank + static_cast<size_t>(ranks[i])] =
          static_cast<int32_t>(i / in_part);
    }
  }
}

// Whether no NVLink domain has ranks of two parts, and ranks of a part share a
// host or domain where those of the first part do.
bool HostsAreAlike(const Module& module, const Fold& fold) {
  const auto are_alike = [&](const auto& place_of) {
    std::map<int32_t, int32_t> part_of;
    std::map<int32_t, int32_t> first_of;                      // part's to first
    std::map<std::pair<int32_t, int32_t>, int32_t> place_in;  // and back
    for (int32_t rank = 0; rank < module.world_size(); ++rank) {
      const int32_t part = fold.part[static_cast<size_t>(rank)];
      const int32_t place = place_of(Rank{rank});
      const int32_t first = place_of(module.FirstOf(Rank{rank}));
      if (part_of.try_emplace(place, part).first->second != part) return false;
      if (first_of.try_emplace(place, first).first->second != first) {
        return false;
      }
      if (place_in.try_emplace({part, first}, place).first->second != place) {
        return false;
      }
    }
    return true;
  };
  const auto host_of = [&](Rank rank) {
    return module.topology.host[IndexOf(rank)];
  };
  return are_alike(host_of) && are_alike([&](Rank rank) {
           return module.topology.DomainOf(host_of(rank));
         });
}

using Held = std::pair<ParamId, Box>;

double BytesOf(const Module& module, const Buffer& buffer,
               const Fragment& fragment) {
  if (module.param(fragment.param).skip != SkipReason::kUnspecified) return 0;
  return static_cast<double>(fragment.box.Volume() * DTypeBytes(buffer.dtype));
}

// What the busiest source of the first part sends at least, if what several
// hold is shared out among them.
double MostSentBytes(const Module& module) {
  absl::flat_hash_map<Held, double> holders;
  std::vector<double> sent;
  for (const bool counts : {true, false}) {
    for (int32_t rank = 0; rank < module.source_ranks(); ++rank) {
      if (module.PartOf(Rank{rank}) != 0) continue;
      double bytes = 0;
      for (const BufferId id : module.buffers_of(Rank{rank})) {
        const Buffer& buffer = module.buffers[id];
        for (const Fragment& fragment : buffer.fragments) {
          double& of_box = holders[{fragment.param, fragment.box}];
          if (counts) {
            ++of_box;
          } else {
            bytes += BytesOf(module, buffer, fragment) / of_box;
          }
        }
      }
      sent.push_back(bytes);
    }
  }
  return *std::max_element(sent.begin(), sent.end());
}

// What a rank receives over the network, on the host whose ranks receive the
// most, if they pass on to each other what several of them want.
double MostReceivedBytes(const Module& module) {
  struct OfHost {
    absl::flat_hash_set<Held> held;
    double bytes = 0;
    int32_t ranks = 0;
  };
  std::map<int32_t, OfHost> hosts;
  for (int32_t rank = module.source_ranks(); rank < module.world_size();
       ++rank) {
    if (module.PartOf(Rank{rank}) != 0) continue;
    OfHost& host = hosts[module.topology.host[static_cast<size_t>(rank)]];
    ++host.ranks;
    for (const BufferId id : module.buffers_of(Rank{rank})) {
      const Buffer& buffer = module.buffers[id];
      for (const Fragment& fragment : buffer.fragments) {
        if (host.held.insert({fragment.param, fragment.box}).second) {
          host.bytes += BytesOf(module, buffer, fragment);
        }
      }
    }
  }
  double most = 0;
  for (const auto& [number, host] : hosts) {
    most = std::max(most, host.bytes / host.ranks);
  }
  return most;
}

}  // namespace

absl::Status FoldRanks(const PassOptions&, Module& module) {
  module.is_compact = module.world_size() >= module.limits.compact_ranks_min;
  if (module.topology.colocated || module.source_ranks() == 0 ||
      module.world_size() == module.source_ranks()) {
    return absl::OkStatus();
  }
  const std::vector<Class> sources = ClassesOf(module.source);
  const std::vector<Class> destinations = ClassesOf(module.destination);
  size_t most = 0;
  for (const std::vector<Class>* classes : {&sources, &destinations}) {
    for (const Class& ranks : *classes) most = std::gcd(most, ranks.size());
  }
  const size_t world = static_cast<size_t>(module.world_size());
  for (size_t parts = most; parts > 1; --parts) {
    if (most % parts != 0) continue;
    const std::optional<int32_t> source = ShiftOf(sources, parts);
    const std::optional<int32_t> destination = ShiftOf(destinations, parts);
    if (!source.has_value() || !destination.has_value()) continue;
    Fold& fold = module.fold.emplace();
    fold.parts = static_cast<int32_t>(parts);
    fold.source_shift = *source;
    fold.destination_shift = *destination;
    fold.part.resize(world);
    NumberParts(sources, parts, 0, fold.part);
    NumberParts(destinations, parts, module.source.ranks.size(), fold.part);
    // Sources that send more than receivers receive would gain if receivers of
    // other parts passed on what they send.
    if (HostsAreAlike(module, fold) &&
        MostSentBytes(module) <= MostReceivedBytes(module) * kUneven) {
      return absl::OkStatus();
    }
    module.fold.reset();
  }
  return absl::OkStatus();
}

}  // namespace refit
