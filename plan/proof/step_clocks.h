// What a list of steps says: which of them are over when another one is done.
#ifndef REFIT_PLAN_PROOF_STEP_CLOCKS_H_
#define REFIT_PLAN_PROOF_STEP_CLOCKS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "plan/schedule/rank_schedule.h"
#include "plan/schedule/steps.h"

namespace refit::proof {

// By lane: of its steps, those at positions of the list below this are over.
// Steps of a lane follow each other, so that one number says which.
using Clock = std::array<uint32_t, kLanes>;

// The steps of a round, by their positions in the list.
struct RoundSteps {
  uint32_t round = 0;  // of the plan
  std::optional<uint32_t> pack = std::nullopt;
  std::optional<uint32_t> exchange = std::nullopt;
  std::optional<uint32_t> unpack = std::nullopt;
  std::optional<uint32_t> move = std::nullopt;

  std::optional<uint32_t> Find(StepKind kind) const;
};

// Positions of steps, ascending.
using Calls = absl::InlinedVector<uint32_t, 2>;

// What a rank calls between itself and one other.
struct FenceCalls {
  Calls grants, await_grants, finishes, await_finishes;
};

class StepClocks {
 public:
  // `unshifted`: how peers are numbered here. Direct rounds are stored.
  StepClocks(const RankSchedule& schedule, absl::Span<const Step> steps,
             size_t quantizes,
             absl::FunctionRef<uint32_t(uint32_t peer)> unshifted);

  size_t size() const { return steps_.size(); }
  StepKind KindOf(uint32_t step) const { return steps_[step].kind; }
  Lane LaneOf(uint32_t step) const { return steps_[step].lane; }
  // The plan's round; kNoRound: it is of none.
  uint32_t RoundOf(uint32_t step) const { return steps_[step].round; }

  // Whether `a` is over when `b` is; of different steps: when `b` begins.
  bool IsBefore(uint32_t a, uint32_t b) const {
    return steps_[b].clock[static_cast<size_t>(LaneOf(a))] > a;
  }
  // Whether all those of a clock are.
  bool AreBefore(const Clock& ends, uint32_t b) const;

  // Null: it has none in that round.
  const RoundSteps* FindRound(uint32_t round) const;
  const FenceCalls& CallsOf(uint32_t peer) const;
  // The step that does a quantize operation of the rank, if there is one.
  std::optional<uint32_t> LaunchOf(uint32_t operation) const {
    return launches_[operation];
  }
  // The first step that meets other ranks and comes behind one of a later
  // round, or of a later part of its own.
  std::optional<uint32_t> OutOfRound() const;

 private:
  struct Known {
    StepKind kind = StepKind::kZero;
    Lane lane = Lane::kMain;
    uint32_t round = kNoRound;
    Clock clock = {};
  };
  std::vector<Known> steps_;
  std::vector<RoundSteps> rounds_;                   // ascending
  absl::flat_hash_map<uint32_t, FenceCalls> calls_;  // by peer
  std::vector<std::optional<uint32_t>> launches_;    // by operation
};

}  // namespace refit::proof

#endif  // REFIT_PLAN_PROOF_STEP_CLOCKS_H_
