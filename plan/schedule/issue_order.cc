#include "plan/schedule/issue_order.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <tuple>
#include <utility>

namespace refit {
namespace {

bool MayWaitForPeers(Lane lane) {
  return lane == Lane::kMain || lane == Lane::kBeside;
}

// By step. What may wait for peers comes last of its group.
std::vector<uint32_t> GroupsOf(const std::vector<Step>& steps) {
  std::vector<uint32_t> groups;
  groups.reserve(steps.size());
  uint32_t last = 0;  // of what may wait for peers
  std::array<uint32_t, kLanes> last_of = {};
  for (const Step& step : steps) {
    const bool ends_group = MayWaitForPeers(step.lane);
    uint32_t& of_lane = ends_group ? last : last_of[size_t(step.lane)];
    uint32_t group = ends_group ? last + 1 : std::max(last, of_lane);
    for (const uint32_t other : step.after) {
      group = std::max(group, groups[other] + (ends_group ? 0 : 1));
    }
    of_lane = group;
    groups.push_back(group);
  }
  return groups;
}

}  // namespace

std::vector<Step> InIssueOrder(std::vector<Step> steps) {
  const std::vector<uint32_t> groups = GroupsOf(steps);
  std::vector<uint32_t> order(steps.size());
  std::iota(order.begin(), order.end(), 0);
  const auto place_of = [&](uint32_t step) {
    return std::tuple(groups[step], MayWaitForPeers(steps[step].lane), step);
  };
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return place_of(a) < place_of(b); });
  std::vector<uint32_t> moved(steps.size());  // by step: its new number
  std::vector<Step> issued;
  issued.reserve(steps.size());
  for (const uint32_t number : order) {
    moved[number] = static_cast<uint32_t>(issued.size());
    issued.push_back(std::move(steps[number]));
    for (uint32_t& other : issued.back().after) other = moved[other];
  }
  return issued;
}

}  // namespace refit
