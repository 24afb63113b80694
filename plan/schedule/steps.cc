#include "plan/schedule/steps.h"

#include <algorithm>
#include <array>
#include <functional>
#include <initializer_list>
#include <utility>

#include "plan/schedule/direct_steps.h"

namespace refit {
namespace {

using MaybeStep = std::optional<uint32_t>;

// By lane: how many steps of the list are known to be done, up to the lane's
// last of them; 0 where none is.
using Known = std::array<uint32_t, kLanes>;

class StepLister {
 public:
  StepLister(const RankSchedule& schedule, absl::Span<const DirectEnds> ends,
             const StepChoices& choices)
      : schedule_(schedule),
        ends_(ends),
        choices_(choices),
        exchanged_(schedule.rounds().size()),
        unpacked_(schedule.rounds().size()),
        launches_(schedule.quantizes().size()) {}

  std::vector<Step> List() {
    Add({.kind = StepKind::kZero});
    AddDigest(/*arrivals=*/0, kNoRound);
    const auto rounds = static_cast<uint32_t>(schedule_.rounds().size());
    for (uint32_t round = 0; round < rounds; ++round) {
      AddQuantizes(round);
      if (schedule_.rounds()[round].mechanism == fb::Mechanism::kDirect) {
        AddDirect(round);
      } else {
        AddStaged(round);
      }
      AddDigest(ArrivalsUntil(round), round);
    }
    AddQuantizes(rounds);
    AddReadsBehindRounds();
    Add({.kind = StepKind::kJoin},
        {LastOf(Lane::kPack), LastOf(Lane::kUnpack), LastOf(Lane::kQuantize),
         LastOf(Lane::kBeside)});
    if (choices_.digests_rest) Add({.kind = StepKind::kDigestRest});
    const MaybeStep digested = LastOf(Lane::kDigest);
    if (choices_.keeps) Add({.kind = StepKind::kKeep}, {digested});
    Add({.kind = StepKind::kHooks}, {digested});
    return std::move(steps_);
  }

 private:
  MaybeStep LastOf(Lane lane) const { return last_[Index(lane)]; }
  static size_t Index(Lane lane) { return static_cast<size_t>(lane); }

  // Appends a step behind others, of any lane.
  uint32_t Add(Step step, std::initializer_list<MaybeStep> behind = {}) {
    const auto number = static_cast<uint32_t>(steps_.size());
    Known& known = known_by_lane_[Index(step.lane)];
    absl::InlinedVector<uint32_t, 8> others;
    for (const MaybeStep& other : behind) {
      if (other.has_value()) others.push_back(*other);
    }
    // A lane that others do not lead to begins with the refit.
    if (number > 0 && !LastOf(step.lane).has_value()) others.push_back(0);
    // A step can follow from a later one alone.
    std::sort(others.begin(), others.end(), std::greater<>());
    for (const uint32_t other : others) {
      if (known[Index(steps_[other].lane)] > other) continue;
      step.after.push_back(other);
      for (size_t lane = 0; lane < kLanes; ++lane) {
        known[lane] = std::max(known[lane], known_[other][lane]);
      }
    }
    known[Index(step.lane)] = number + 1;
    last_[Index(step.lane)] = number;
    known_.push_back(known);
    steps_.push_back(std::move(step));
    return number;
  }

  MaybeStep UnpackOf(std::optional<size_t> round) const {
    return round.has_value() ? unpacked_[*round] : std::nullopt;
  }
  // The last launch, up to this one, that does something.
  MaybeStep LaunchOf(std::optional<size_t> launch) const {
    return launch.has_value() ? launches_[*launch] : std::nullopt;
  }

  // What read or wrote the memory before is over: packing, sends, stores from
  // scratch and peers' reads of it come before a point of the main lane, like
  // what comes into scratch; unpacking has a lane of its own.
  void AddQuantizes(uint32_t rounds_before) {
    const std::vector<QuantizeLaunch>& launches = schedule_.quantizes();
    for (; next_launch_ < launches.size() &&
           launches[next_launch_].after == rounds_before;
         ++next_launch_) {
      if (choices_.is_idle.empty() || !choices_.is_idle[next_launch_]) {
        Add({.kind = StepKind::kQuantize,
             .lane = Lane::kQuantize,
             .number = next_launch_},
            {LastOf(Lane::kMain), LastOf(Lane::kUnpack)});
      }
      launches_[next_launch_] = LastOf(Lane::kQuantize);
    }
  }

  // Pack, exchange and unpack each go on as soon as what they read is there and
  // what they overwrite is no longer needed; rounds within the plan's slots
  // overlap.
  void AddStaged(uint32_t round) {
    const RoundWork& work = schedule_.rounds()[round];
    const MaybeStep reused = UnpackOf(work.reuses_unpacked);
    const MaybeStep quantized = LaunchOf(work.quantized);
    MaybeStep packed;
    if (work.pack_batch.has_value()) {
      packed = Add(
          {.kind = StepKind::kPack, .lane = Lane::kPack, .round = round},
          {work.reuses.has_value() ? exchanged_[*work.reuses] : std::nullopt,
           reused,
           // A relay packs what it unpacked, or what peers stored.
           UnpackOf(work.relays),
           work.relays_stored ? LastOf(Lane::kMain) : std::nullopt, quantized});
    }
    exchanged_[round] = Add({.kind = StepKind::kExchange, .round = round},
                            {packed, reused, quantized});
    if (!work.unpack_batch.has_value()) return;
    unpacked_[round] =
        Add({.kind = StepKind::kUnpack, .lane = Lane::kUnpack, .round = round},
            {exchanged_[round]});
  }

  // Ranks whose tensors others store into or read say that these may, the
  // others do so, then say that they are done. A grant stands for what is read
  // too, so it waits for what other lanes put in place.
  void AddDirect(uint32_t round) {
    const RoundWork& work = schedule_.rounds()[round];
    const DirectEnds& ends = ends_[round];
    const Lane lane =
        choices_.moves_beside && ends.beside ? Lane::kBeside : Lane::kMain;
    const auto add = [&](StepKind kind, absl::Span<const int32_t> peers,
                         std::optional<size_t> part = std::nullopt) {
      Add({.kind = kind,
           .lane = lane,
           .round = round,
           .number = part,
           .peers = peers},
          {UnpackOf(work.relays), LaunchOf(work.quantized)});
    };
    const auto call = [&](StepKind kind, absl::Span<const int32_t> peers) {
      if (!peers.empty()) add(kind, peers);
    };
    call(StepKind::kGrant, ends.grant);
    call(StepKind::kAwaitGrants, ends.await_grants);
    const StepReports* const reports = choices_.digests.has_value()
                                           ? &choices_.digests->reports[round]
                                           : nullptr;
    if (reports != nullptr && reports->IsStepped()) {
      for (uint32_t part = 0; part < kDirectSteps; ++part) {
        if (ends.moves) add(StepKind::kMove, {}, part);
        call(StepKind::kProgress, reports->targets);
        call(StepKind::kAwaitFinishes, reports->origins);
        // Behind the last one others may still have to finish.
        if (part + 1 < kDirectSteps) {
          AddDigest(ArrivalsUntil(round, part), round);
        }
      }
    } else if (ends.moves) {
      add(StepKind::kMove, {});
    }
    call(StepKind::kFinish, ends.finish);
    call(StepKind::kAwaitFinishes, ends.await_finishes);
  }

  // What destinations quantize from sources' tensors.
  void AddReadsBehindRounds() {
    if (!choices_.readers.empty()) {
      Add({.kind = StepKind::kGrant, .peers = choices_.readers});
      Add({.kind = StepKind::kAwaitFinishes, .peers = choices_.readers});
    }
    if (!choices_.read_sources.empty()) {
      Add({.kind = StepKind::kAwaitGrants, .peers = choices_.read_sources});
      Add({.kind = StepKind::kMove});
      Add({.kind = StepKind::kFinish, .peers = choices_.read_sources});
    }
  }

  void AddDigest(size_t arrivals, uint32_t round) {
    if (!choices_.digests.has_value()) return;
    const absl::Span<const size_t> due = choices_.digests->due;
    if (digested_ == due.size() || due[digested_] > arrivals) return;
    while (digested_ < due.size() && due[digested_] <= arrivals) ++digested_;
    Add({.kind = StepKind::kDigest,
         .lane = Lane::kDigest,
         .round = round,
         .number = arrivals},
        {LastOf(Lane::kMain), LastOf(Lane::kUnpack)});
  }

  const RankSchedule& schedule_;
  const absl::Span<const DirectEnds> ends_;
  const StepChoices& choices_;
  std::vector<Step> steps_;
  std::vector<Known> known_;  // by step: at its end
  std::array<Known, kLanes> known_by_lane_ = {};
  std::array<MaybeStep, kLanes> last_;
  std::vector<MaybeStep> exchanged_;  // by round
  std::vector<MaybeStep> unpacked_;   // likewise
  std::vector<MaybeStep> launches_;   // by launch
  size_t next_launch_ = 0;
  size_t digested_ = 0;  // of what is due
};

}  // namespace

const char* StepKindName(StepKind kind) {
  switch (kind) {
    case StepKind::kZero:
      return "zero";
    case StepKind::kQuantize:
      return "quantize";
    case StepKind::kPack:
      return "pack";
    case StepKind::kExchange:
      return "exchange";
    case StepKind::kUnpack:
      return "unpack";
    case StepKind::kGrant:
      return "grant";
    case StepKind::kAwaitGrants:
      return "await grants";
    case StepKind::kMove:
      return "move";
    case StepKind::kProgress:
      return "progress";
    case StepKind::kFinish:
      return "finish";
    case StepKind::kAwaitFinishes:
      return "await finishes";
    case StepKind::kDigest:
      return "digest";
    case StepKind::kJoin:
      return "join";
    case StepKind::kDigestRest:
      return "digest the rest";
    case StepKind::kKeep:
      return "keep";
    case StepKind::kHooks:
      return "hooks";
  }
  return "";
}

size_t ArrivalsUntil(size_t round) {
  return ArrivalsUntil(round, kDirectSteps - 1);
}

size_t ArrivalsUntil(size_t round, uint32_t part) {
  return round * kDirectSteps + part + 1;
}

std::vector<Step> ListSteps(const RankSchedule& schedule,
                            absl::Span<const DirectEnds> ends,
                            const StepChoices& choices) {
  return StepLister(schedule, ends, choices).List();
}

}  // namespace refit
