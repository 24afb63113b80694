// Flows that share links max-min fairly: no flow can be given more without
// taking from one that has no more than it.
#ifndef REFIT_SIMULATOR_FLOW_NETWORK_H_
#define REFIT_SIMULATOR_FLOW_NETWORK_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

#include "absl/types/span.h"

namespace refit::simulator {

// A flow's links, distinct: egress and ingress, most of all also those of slow
// ranks, an uplink and a downlink.
inline constexpr size_t kMostLinks = 6;
class LinkList {
 public:
  LinkList() = default;
  LinkList(std::initializer_list<uint32_t> links) {
    for (const uint32_t link : links) push_back(link);
  }

  void push_back(uint32_t link) { links_[size_++] = link; }
  size_t size() const { return size_; }
  uint32_t operator[](size_t i) const { return links_[i]; }
  uint32_t& operator[](size_t i) { return links_[i]; }
  const uint32_t* begin() const { return links_.data(); }
  const uint32_t* end() const { return links_.data() + size_; }
  uint32_t* begin() { return links_.data(); }
  uint32_t* end() { return links_.data() + size_; }

 private:
  std::array<uint32_t, kMostLinks> links_ = {};
  uint8_t size_ = 0;
};

// Progressive filling, done anew only where flows came or went. Each link has a
// *level*: the rate of those of its flows that no other link holds below it.
// A link that its flows do not fill has no level. A flow's rate is the lowest
// level of its links. The levels that agree with each other are the max-min
// fair ones; the link of the lowest level agrees first, then the next.
//
// Deterministic. Not thread-safe.
class FlowNetwork {
 public:
  // Capacities in bytes per second, all positive.
  explicit FlowNetwork(std::vector<double> capacities);

  // Requires at least one link. The number is free again after Remove.
  uint32_t Add(const LinkList& links);
  void Remove(uint32_t flow);

  // Shares links whose flows came or went. Returns the flows whose rate or
  // bottleneck is another now, each once; valid until the next call.
  absl::Span<const uint32_t> Share();
  // The links that Share looked at, each once.
  absl::Span<const uint32_t> SharedLinks() const { return visited_; }

  double rate(uint32_t flow) const { return flows_[flow].rate; }
  // The position in the flow's list of the link that holds its rate down.
  uint32_t bottleneck(uint32_t flow) const { return flows_[flow].bottleneck; }
  // The sum of the rates of the link's flows.
  double LinkRate(uint32_t link) const;

 private:
  static constexpr double kUnfilled = std::numeric_limits<double>::infinity();
  // As `other` of an end: the flow's links are not two.
  static constexpr uint32_t kNotTwo = std::numeric_limits<uint32_t>::max();
  struct Flow {
    double rate = 0;
    uint32_t bottleneck = 0;
    LinkList links;
    LinkList positions;  // in ends of each link
  };
  // A flow in the list of one of its links. Most flows have two links: with the
  // other one here, sharing seldom has to look at the flow.
  struct End {
    uint32_t flow = 0;
    uint32_t other = kNotTwo;
  };
  struct Link {
    double capacity = 0;
    std::vector<End> ends;
    bool is_queued = false;
    bool is_visited = false;
    // Its level is another since the last Share, or it has a flow that came.
    bool has_news = false;
  };

  void Queue(uint32_t link);
  // The lowest level of the flow's links but `link`.
  double LowestOther(uint32_t flow, uint32_t link) const;
  // What the flow takes of the link at most.
  double BoundOf(const End& end, uint32_t link) const {
    return end.other == kNotTwo ? LowestOther(end.flow, link)
                                : levels_[end.other];
  }
  double LevelOf(uint32_t link);
  // Queues the links of the link's flows whose level may be another now.
  void SetLevel(uint32_t link, double level);

  std::vector<Link> links_;
  std::vector<double> levels_;  // by link, beside each other: read most
  // By link that has no level: what its flows leave of its capacity. While that
  // is more than rounding, the link need not be looked at.
  std::vector<double> spares_;
  std::vector<Flow> flows_;
  std::vector<uint32_t> free_;
  std::vector<uint32_t> queue_;    // links whose level may be another
  std::vector<uint32_t> visited_;  // by the last Share
  std::vector<uint32_t> changed_;
  std::vector<double> bounds_;  // of LevelOf, which is called often
};

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_FLOW_NETWORK_H_
