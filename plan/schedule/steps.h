// The steps of one rank's refit, and what each of them waits for.
//
//   RankSchedule, DirectEnds ─▶ ListSteps ─▶ InIssueOrder   RefitEnqueuer
//                                        │                  issues them
//                                        ├─▶ simulator      prices them
//                                        └─▶ order proof    proves them
//
// Nothing else says what waits for what within a rank's refit; what comes
// before it (a refit under way, counts of what changed) is waited for by
// RefitEnqueuer. The list depends on the plan, the ends of pairs and
// StepChoices; it is made in milliseconds, on a CPU.
#ifndef REFIT_PLAN_SCHEDULE_STEPS_H_
#define REFIT_PLAN_SCHEDULE_STEPS_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "plan/schedule/direct_ends.h"
#include "plan/schedule/rank_schedule.h"

namespace refit {

// Steps of a lane are done in the order of the list. A lane is a stream; a
// device without streams does all steps in the order of the list.
enum class Lane : uint8_t {
  kMain,  // the caller's stream
  kPack,
  kUnpack,
  kQuantize,
  kBeside,  // of DirectEnds::beside
  kDigest,
};
inline constexpr size_t kLanes = static_cast<size_t>(Lane::kDigest) + 1;

enum class StepKind : uint8_t {
  kZero,      // zeroes the padding: always the first step
  kQuantize,  // a launch of the schedule
  // Of a staged round.
  kPack,
  kExchange,
  kUnpack,
  // Of a direct round, or behind all rounds: calls of the fence (refit/fence.h)
  // and what moves bytes between them.
  kGrant,
  kAwaitGrants,
  kMove,
  kProgress,
  kFinish,
  kAwaitFinishes,
  kDigest,      // of what has arrived
  kJoin,        // all rounds are over, on all lanes
  kDigestRest,  // of what was not begun before
  kKeep,        // what the next delta needs
  kHooks,       // the executor's own post-hooks: always the last step
};

// "await grants".
const char* StepKindName(StepKind kind);

inline constexpr uint32_t kNoRound = std::numeric_limits<uint32_t>::max();

struct Step {
  StepKind kind = StepKind::kZero;
  Lane lane = Lane::kMain;
  // Of the schedule, at or before whose end the step is; kNoRound for steps
  // before, between and behind the rounds.
  uint32_t round = kNoRound;
  // kQuantize: the launch. kMove: the part of the round's bytes, of
  // kDirectSteps; none: all of them. kDigest: so many arrivals (ArrivalsUntil).
  std::optional<size_t> number = std::nullopt;
  // Of calls of the fence. They point into what ListSteps was given.
  absl::Span<const int32_t> peers = {};
  // Steps of other lanes that come before it, by their positions: none that
  // follows from another, or from an earlier step of the lane.
  absl::InlinedVector<uint32_t, 2> after = {};
};

// What a rank tells and hears in a direct round of a checked refit, at the end
// of each of kDirectSteps parts. Ranks are ascending.
struct StepReports {
  bool moves = false;            // it moves bytes part by part
  std::vector<int32_t> targets;  // that it tells
  std::vector<int32_t> origins;  // that tell it

  bool IsStepped() const { return moves || !origins.empty(); }
};

// Arrivals are counted: kDirectSteps for each round of a rank's schedule. A
// staged round has them all at its end, a direct one part by part.
size_t ArrivalsUntil(size_t round);
size_t ArrivalsUntil(size_t round, uint32_t part);

// Digests beside the rounds.
struct StepDigests {
  absl::Span<const StepReports> reports;  // by round
  // After how many arrivals there is something to digest; ascending.
  absl::Span<const size_t> due;
};

// How a refit differs from the plain one of its schedule.
struct StepChoices {
  // By launch: it does nothing. Empty: all do something.
  std::vector<bool> is_idle = {};
  // Rounds of DirectEnds::beside have a lane of their own.
  bool moves_beside = false;
  // Behind the rounds this rank reads the tensors of those, or is read by these
  // (FusedBatches).
  absl::Span<const int32_t> read_sources = {};
  absl::Span<const int32_t> readers = {};
  std::optional<StepDigests> digests = std::nullopt;
  bool digests_rest = false;
  bool keeps = false;
};

// `ends`: by round of the schedule. They and the spans of `choices` have to
// outlive the list.
std::vector<Step> ListSteps(const RankSchedule& schedule,
                            absl::Span<const DirectEnds> ends,
                            const StepChoices& choices);

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_STEPS_H_
