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
    : links_(capacities.size()), levels_(capacities.size(), kUnfilled) {
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
  flow = {.links = links, .positions = {}, .rate = 0, .bottleneck = 0};
  for (const uint32_t link : links) {
    flow.positions.push_back(static_cast<uint32_t>(links_[link].flows.size()));
    links_[link].flows.push_back(number);
    Queue(link);
  }
  links_[links[0]].has_news = true;
  return number;
}

void FlowNetwork::Remove(uint32_t number) {
  const Flow& flow = flows_[number];
  for (size_t i = 0; i < flow.links.size(); ++i) {
    std::vector<uint32_t>& flows = links_[flow.links[i]].flows;
    const uint32_t moved = flows.back();
    flows[flow.positions[i]] = moved;
    Flow& other = flows_[moved];
    for (size_t j = 0; j < other.links.size(); ++j) {
      if (other.links[j] == flow.links[i]) {
        other.positions[j] = flow.positions[i];
      }
    }
    flows.pop_back();
    Queue(flow.links[i]);
  }
  free_.push_back(number);
}

// Flows that other links hold below the level take what those give them; the
// others share the rest.
double FlowNetwork::LevelOf(uint32_t number) {
  const Link& link = links_[number];
  bounds_.clear();
  double least = kUnfilled;
  for (const uint32_t f : link.flows) {
    double bound = kUnfilled;
    for (const uint32_t other : flows_[f].links) {
      if (other != number) bound = std::min(bound, levels_[other]);
    }
    bounds_.push_back(bound);
    least = std::min(least, bound);
  }
  // Mostly no flow is held below an equal share.
  const double equal = link.capacity / static_cast<double>(bounds_.size());
  if (least > equal) return equal;
  std::sort(bounds_.begin(), bounds_.end());
  double left = link.capacity;
  for (size_t i = 0; i < bounds_.size(); ++i) {
    const double share = left / static_cast<double>(bounds_.size() - i);
    if (bounds_[i] > share) return share;
    left -= bounds_[i];
  }
  return kUnfilled;
}

absl::Span<const uint32_t> FlowNetwork::Share() {
  for (const uint32_t link : visited_) links_[link].is_visited = false;
  visited_.clear();
  for (size_t i = 0; i < queue_.size(); ++i) {
    const uint32_t number = queue_[i];
    Link& link = links_[number];
    link.is_queued = false;
    if (!std::exchange(link.is_visited, true)) visited_.push_back(number);
    const double level = LevelOf(number);
    if (IsSame(level, levels_[number])) continue;
    // A flow that another link holds below both levels tells that link nothing.
    const double lower = std::min(level, levels_[number]);
    levels_[number] = level;
    link.has_news = true;
    for (const uint32_t flow : link.flows) {
      for (const uint32_t other : flows_[flow].links) {
        if (other != number && lower <= levels_[other]) Queue(other);
      }
    }
  }
  queue_.clear();
  changed_.clear();
  for (const uint32_t number : visited_) {
    if (!std::exchange(links_[number].has_news, false)) continue;
    for (const uint32_t f : links_[number].flows) {
      Flow& flow = flows_[f];
      double rate = kUnfilled;
      for (const uint32_t link : flow.links) {
        rate = std::min(rate, levels_[link]);
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
      changed_.push_back(f);
    }
  }
  return changed_;
}

double FlowNetwork::LinkRate(uint32_t link) const {
  double rate = 0;
  for (const uint32_t flow : links_[link].flows) rate += flows_[flow].rate;
  return rate;
}

}  // namespace refit::simulator
