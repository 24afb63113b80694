#include "simulator/flow_network.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace refit::simulator {
namespace {

// Levels and rates that differ by less are equal: rounding alone.
constexpr double kRelativeTolerance = 1e-9;

bool IsSame(double a, double b) {
  // Not of an infinite one: any difference to that is infinite too.
  return a == b || std::abs(a - b) <= kRelativeTolerance * std::min(a, b);
}

}  // namespace

FlowNetwork::FlowNetwork(std::vector<double> capacities)
    : links_(capacities.size()),
      levels_(capacities.size(), kUnfilled),
      spares_(capacities) {
  for (size_t i = 0; i < links_.size(); ++i) {
    links_[i].capacity = capacities[i];
  }
}

void FlowNetwork::Queue(uint32_t link) {
  if (std::exchange(links_[link].is_queued, true)) return;
  queue_.push_back(link);
}

uint32_t FlowNetwork::Add(const LinkList& links) {
  uint32_t number = static_cast<uint32_t>(flows_.size());
  if (free_.empty()) {
    flows_.emplace_back();
  } else {
    number = free_.back();
    free_.pop_back();
  }
  Flow& flow = flows_[number];
  flow = {.rate = 0, .bottleneck = 0, .links = links, .positions = {}};
  for (size_t i = 0; i < links.size(); ++i) {
    std::vector<End>& ends = links_[links[i]].ends;
    flow.positions.push_back(static_cast<uint32_t>(ends.size()));
    ends.push_back(
        {.flow = number, .other = links.size() == 2 ? links[1 - i] : kNotTwo});
    spares_[links[i]] -= BoundOf(ends.back(), links[i]);
    Queue(links[i]);
  }
  links_[links[0]].has_news = true;
  return number;
}

void FlowNetwork::Remove(uint32_t number) {
  const Flow& flow = flows_[number];
  for (size_t i = 0; i < flow.links.size(); ++i) {
    const uint32_t link = flow.links[i];
    std::vector<End>& ends = links_[link].ends;
    End& end = ends[flow.positions[i]];
    spares_[link] += BoundOf(end, link);
    end = ends.back();
    Flow& moved = flows_[end.flow];
    for (size_t j = 0; j < moved.links.size(); ++j) {
      if (moved.links[j] == link) moved.positions[j] = flow.positions[i];
    }
    ends.pop_back();
    Queue(link);
  }
  free_.push_back(number);
}

double FlowNetwork::LowestOther(uint32_t flow, uint32_t link) const {
  double lowest = kUnfilled;
  for (const uint32_t other : flows_[flow].links) {
    if (other != link) lowest = std::min(lowest, levels_[other]);
  }
  return lowest;
}

// Flows that other links hold below the level take what those give them; the
// others share the rest.
double FlowNetwork::LevelOf(uint32_t number) {
  const Link& link = links_[number];
  const size_t count = link.ends.size();
  if (bounds_.size() < count) bounds_.resize(count);
  const absl::Span<double> bounds(bounds_.data(), count);
  double spare = link.capacity;
  for (size_t i = 0; i < count; ++i) {
    bounds[i] = BoundOf(link.ends[i], number);
    spare -= bounds[i];
  }
  if (spare > kRelativeTolerance * link.capacity) {
    spares_[number] = spare;
    return kUnfilled;
  }
  std::sort(bounds.begin(), bounds.end());
  double left = link.capacity;
  for (size_t i = 0; i < count; ++i) {
    const double share = left / static_cast<double>(count - i);
    if (bounds[i] > share) return share;
    left -= bounds[i];
  }
  spares_[number] = left;
  return kUnfilled;
}

void FlowNetwork::SetLevel(uint32_t number, double level) {
  const double before = std::exchange(levels_[number], level);
  // A flow that another link holds below both levels tells that link nothing.
  const double lower = std::min(level, before);
  for (const End& end : links_[number].ends) {
    if (end.other != kNotTwo) {
      if (lower > levels_[end.other]) continue;
      spares_[end.other] += before - level;
      Queue(end.other);
      continue;
    }
    for (const uint32_t other : flows_[end.flow].links) {
      if (other == number || lower > levels_[other]) continue;
      spares_[other] = -kUnfilled;  // LevelOf will tell.
      Queue(other);
    }
  }
}

absl::Span<const uint32_t> FlowNetwork::Share() {
  for (const uint32_t link : visited_) links_[link].is_visited = false;
  visited_.clear();
  for (size_t i = 0; i < queue_.size(); ++i) {
    const uint32_t number = queue_[i];
    Link& link = links_[number];
    link.is_queued = false;
    if (!std::exchange(link.is_visited, true)) visited_.push_back(number);
    if (levels_[number] == kUnfilled &&
        spares_[number] > kRelativeTolerance * link.capacity) {
      continue;  // They do not fill it, now as before.
    }
    const double level = LevelOf(number);
    if (IsSame(level, levels_[number])) continue;
    link.has_news = true;
    SetLevel(number, level);
  }
  queue_.clear();
  changed_.clear();
  for (const uint32_t number : visited_) {
    if (!std::exchange(links_[number].has_news, false)) continue;
    for (const End& end : links_[number].ends) {
      Flow& flow = flows_[end.flow];
      const double rate = std::min(levels_[number], BoundOf(end, number));
      if (rate == flow.rate && levels_[flow.links[flow.bottleneck]] == rate) {
        continue;
      }
      // Of links whose levels are equal, the one that held it before does.
      uint32_t bottleneck = flow.bottleneck;
      if (!IsSame(levels_[flow.links[bottleneck]], rate)) {
        bottleneck = 0;
        while (!IsSame(levels_[flow.links[bottleneck]], rate)) {
          ++bottleneck;
        }
      }
      if (IsSame(flow.rate, rate) && flow.bottleneck == bottleneck) continue;
      flow.rate = rate;
      flow.bottleneck = bottleneck;
      changed_.push_back(end.flow);
    }
  }
  return changed_;
}

double FlowNetwork::LinkRate(uint32_t link) const {
  double rate = 0;
  for (const End& end : links_[link].ends) rate += flows_[end.flow].rate;
  return rate;
}

}  // namespace refit::simulator
