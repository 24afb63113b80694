#include "plan/proof/step_clocks.h"

#include <algorithm>
#include <utility>

namespace refit::proof {
namespace {

// In which order a round's steps meet those of other ranks; none: they do not.
std::optional<int> PartOf(StepKind kind) {
  switch (kind) {
    case StepKind::kExchange:
    case StepKind::kGrant:
      return 0;
    case StepKind::kAwaitGrants:
      return 1;
    case StepKind::kFinish:
      return 2;
    case StepKind::kAwaitFinishes:
      return 3;
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<uint32_t> RoundSteps::Find(StepKind kind) const {
  switch (kind) {
    case StepKind::kPack:
      return pack;
    case StepKind::kExchange:
      return exchange;
    case StepKind::kUnpack:
      return unpack;
    case StepKind::kMove:
      return move;
    default:
      return std::nullopt;
  }
}

StepClocks::StepClocks(const RankSchedule& schedule,
                       absl::Span<const Step> steps, size_t quantizes,
                       absl::FunctionRef<uint32_t(uint32_t peer)> unshifted)
    : launches_(quantizes) {
  Clock of_nothing = {};
  std::array<Clock, kLanes> of_lanes = {};
  steps_.reserve(steps.size());
  for (uint32_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    Clock& clock = of_lanes[static_cast<size_t>(step.lane)];
    for (const uint32_t other : step.after) {
      const Clock& known = other < i ? steps_[other].clock : of_nothing;
      for (size_t lane = 0; lane < kLanes; ++lane) {
        clock[lane] = std::max(clock[lane], known[lane]);
      }
    }
    clock[static_cast<size_t>(step.lane)] = i + 1;
    const uint32_t round =
        step.round == kNoRound ? kNoRound : schedule.rounds()[step.round].index;
    steps_.push_back(
        {.kind = step.kind, .lane = step.lane, .round = round, .clock = clock});
    if (step.kind == StepKind::kQuantize) {
      for (const uint32_t operation :
           schedule.quantizes()[*step.number].operations) {
        launches_[operation] = i;
      }
    }
    for (const int32_t peer : step.peers) {
      FenceCalls& calls = calls_[unshifted(static_cast<uint32_t>(peer))];
      switch (step.kind) {
        case StepKind::kGrant:
          calls.grants.push_back(i);
          break;
        case StepKind::kAwaitGrants:
          calls.await_grants.push_back(i);
          break;
        case StepKind::kFinish:
          calls.finishes.push_back(i);
          break;
        case StepKind::kAwaitFinishes:
          calls.await_finishes.push_back(i);
          break;
        default:
          break;
      }
    }
    if (round == kNoRound) continue;
    if (rounds_.empty() || rounds_.back().round != round) {
      rounds_.push_back({.round = round});
    }
    RoundSteps& of_round = rounds_.back();
    switch (step.kind) {
      case StepKind::kPack:
        of_round.pack = i;
        break;
      case StepKind::kExchange:
        of_round.exchange = i;
        break;
      case StepKind::kUnpack:
        of_round.unpack = i;
        break;
      case StepKind::kMove:
        of_round.move = i;
        break;
      default:
        break;
    }
  }
}

bool StepClocks::AreBefore(const Clock& ends, uint32_t b) const {
  const Clock& clock = steps_[b].clock;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (ends[lane] > clock[lane]) return false;
  }
  return true;
}

const RoundSteps* StepClocks::FindRound(uint32_t round) const {
  const auto found = std::partition_point(
      rounds_.begin(), rounds_.end(),
      [&](const RoundSteps& steps) { return steps.round < round; });
  return found == rounds_.end() || found->round != round ? nullptr : &*found;
}

const FenceCalls& StepClocks::CallsOf(uint32_t peer) const {
  static const FenceCalls none;
  const auto found = calls_.find(peer);
  return found == calls_.end() ? none : found->second;
}

std::optional<uint32_t> StepClocks::OutOfRound() const {
  std::pair<uint32_t, int> last = {0, 0};
  for (uint32_t i = 0; i < steps_.size(); ++i) {
    const std::optional<int> part = PartOf(steps_[i].kind);
    if (!part.has_value()) continue;
    const std::pair<uint32_t, int> at(steps_[i].round, *part);
    if (at < last) return i;
    last = at;
  }
  return std::nullopt;
}

}  // namespace refit::proof
