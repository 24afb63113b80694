#include "simulator/flow_network.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace refit::simulator {
namespace {

TEST(FlowNetwork, FlowsOfOneLinkHaveEqualShares) {
  FlowNetwork network({12});
  const uint32_t a = network.Add({0}), b = network.Add({0}),
                 c = network.Add({0});
  network.Share();
  EXPECT_DOUBLE_EQ(network.rate(a), 4);
  EXPECT_DOUBLE_EQ(network.rate(b), 4);
  EXPECT_DOUBLE_EQ(network.rate(c), 4);
  EXPECT_DOUBLE_EQ(network.LinkRate(0), 12);
}

TEST(FlowNetwork, AFlowTakesWhatAnotherCannotUse) {
  FlowNetwork network({10, 4});
  const uint32_t both = network.Add({0, 1}), one = network.Add({0});
  network.Share();
  EXPECT_DOUBLE_EQ(network.rate(both), 4);
  EXPECT_DOUBLE_EQ(network.rate(one), 6);
  EXPECT_EQ(network.bottleneck(both), 1u);
  EXPECT_EQ(network.bottleneck(one), 0u);
}

// Link 0 lets go of the flow as link 1 fills: its rate is 4 before and after.
TEST(FlowNetwork, ABottleneckMovesAlsoWhereTheRateStays) {
  FlowNetwork network({8, 12});
  const uint32_t both = network.Add({0, 1}), leaves = network.Add({0});
  network.Share();
  EXPECT_DOUBLE_EQ(network.rate(both), 4);
  EXPECT_EQ(network.bottleneck(both), 0u);
  network.Remove(leaves);
  network.Add({1});
  network.Add({1});
  const absl::Span<const uint32_t> changed = network.Share();
  EXPECT_DOUBLE_EQ(network.rate(both), 4);
  EXPECT_EQ(network.bottleneck(both), 1u);
  EXPECT_EQ(std::count(changed.begin(), changed.end(), both), 1);
}

// Bertsekas and Gallager's example of several bottlenecks: link 1 fills first
// (three flows, 1/3 each), then link 0 and then link 2.
TEST(FlowNetwork, LinksFillOneAfterTheOther) {
  FlowNetwork network({1, 1, 1, 1});
  const uint32_t a = network.Add({0, 1});
  const uint32_t b = network.Add({1});
  const uint32_t c = network.Add({1, 2});
  const uint32_t d = network.Add({0});
  const uint32_t e = network.Add({2, 3});
  network.Share();
  EXPECT_DOUBLE_EQ(network.rate(a), 1.0 / 3);
  EXPECT_DOUBLE_EQ(network.rate(b), 1.0 / 3);
  EXPECT_DOUBLE_EQ(network.rate(c), 1.0 / 3);
  EXPECT_DOUBLE_EQ(network.rate(d), 2.0 / 3);
  EXPECT_DOUBLE_EQ(network.rate(e), 2.0 / 3);
  EXPECT_LT(network.LinkRate(3), 1);
}

TEST(FlowNetwork, WhatAFlowLeavesGoesToTheOthers) {
  FlowNetwork network({6, 6});
  const uint32_t a = network.Add({0}), b = network.Add({0, 1}),
                 c = network.Add({1});
  network.Share();
  EXPECT_DOUBLE_EQ(network.rate(b), 3);
  network.Remove(a);
  network.Share();
  EXPECT_DOUBLE_EQ(network.rate(b), 3);  // link 1 holds it now
  EXPECT_DOUBLE_EQ(network.rate(c), 3);
  network.Remove(c);
  const absl::Span<const uint32_t> changed = network.Share();
  EXPECT_EQ(std::vector<uint32_t>(changed.begin(), changed.end()),
            std::vector<uint32_t>{b});
  EXPECT_DOUBLE_EQ(network.rate(b), 6);
}

// Progressive filling as the textbook has it: all flows grow alike until a link
// is full, then those of the full link stay.
std::map<uint32_t, double> Fill(const std::vector<double>& capacities,
                                const std::map<uint32_t, LinkList>& flows) {
  std::vector<double> left = capacities;
  std::map<uint32_t, double> rates;
  double level = 0;
  while (rates.size() < flows.size()) {
    std::vector<int> growing(capacities.size(), 0);
    for (const auto& [flow, links] : flows) {
      if (rates.contains(flow)) continue;
      for (const uint32_t link : links) ++growing[link];
    }
    double step = std::numeric_limits<double>::infinity();
    for (size_t link = 0; link < left.size(); ++link) {
      if (growing[link] > 0) step = std::min(step, left[link] / growing[link]);
    }
    level += step;
    for (size_t link = 0; link < left.size(); ++link) {
      left[link] -= step * growing[link];
    }
    for (const auto& [flow, links] : flows) {
      if (rates.contains(flow)) continue;
      if (std::any_of(links.begin(), links.end(), [&](uint32_t link) {
            return left[link] <= 1e-9 * capacities[link];
          })) {
        rates[flow] = level;
      }
    }
  }
  return rates;
}

TEST(FlowNetwork, IsProgressiveFillingWhateverComesAndGoes) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](size_t limit) { return random() % limit; };
    std::vector<double> capacities;
    for (size_t i = 0; i < 3 + below(12); ++i) {
      capacities.push_back(static_cast<double>(1 + below(20)));
    }
    FlowNetwork network(capacities);
    std::map<uint32_t, LinkList> flows;
    for (int step = 0; step < 60; ++step) {
      for (size_t change = 0; change <= below(3); ++change) {
        if (!flows.empty() && below(5) < 2) {
          const auto gone = std::next(flows.begin(), below(flows.size()));
          network.Remove(gone->first);
          flows.erase(gone);
          continue;
        }
        std::set<uint32_t> links;
        for (size_t i = 0; i <= below(kMostLinks); ++i) {
          links.insert(static_cast<uint32_t>(below(capacities.size())));
        }
        LinkList list;
        for (const uint32_t link : links) list.push_back(link);
        flows[network.Add(list)] = list;
      }
      network.Share();
      for (const auto& [flow, rate] : Fill(capacities, flows)) {
        EXPECT_NEAR(network.rate(flow), rate, 1e-6 * rate)
            << "seed " << seed << " step " << step << " flow " << flow;
      }
    }
  }
}

}  // namespace
}  // namespace refit::simulator
