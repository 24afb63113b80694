// From a plan to the tasks of its ranks: those of each step of their lists
// (plan/schedule/steps.h), which say what waits for what within a rank.
#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "plan/schedule/direct_ends.h"
#include "plan/schedule/steps.h"
#include "simulator/equal_ranks.h"
#include "simulator/links.h"
#include "simulator/message_tasks.h"
#include "simulator/rank_work.h"
#include "simulator/simulation.h"

namespace refit::simulator {
namespace {

// What one rank grants to or tells another rank in a direct round, or behind
// all rounds.
using Point = std::pair<int32_t, uint32_t>;  // rank and round
constexpr uint32_t kFirstGrant = kNone - 1;  // as a round

// Points, and what waits for them.
struct Points {
  absl::flat_hash_map<Point, uint32_t> reached;  // the task after which each is
  std::vector<std::pair<Point, uint32_t>> awaited;
};

class Builder {
 public:
  Builder(const PlanFile& plan, const Options& options)
      : plan_(plan),
        options_(options),
        links_(SitesOf(plan), options),
        messages_(plan, links_, graph_) {
    if (options.folds_equal_ranks) {
      graph_.equal_ranks = EqualRanks(plan, links_);
    }
  }

  absl::StatusOr<TaskGraph> Build();

 private:
  // The tasks of one rank while they are made.
  struct Rank : RankWork {
    using RankWork::RankWork;

    double slowness = 1;
    std::vector<int32_t> pulled;  // peers; the steps point there
    // By work of the schedule.
    std::vector<DirectEnds> ends;
    std::vector<uint32_t> parts;  // of rounds that are sent in parts
    size_t passed = 0;            // works whose unmoved messages are there
    std::array<uint32_t, kLanes> last;         // tasks, by lane
    std::vector<uint32_t> done;                // the task that ends a step
    absl::Span<const int32_t> grants_awaited;  // by the next step that moves
    uint32_t start = kNone;                    // of the last step that moved
  };
  using Tasks = absl::InlinedVector<uint32_t, 4>;

  uint32_t Add(const Rank& rank, TaskKind kind, uint32_t round, double seconds,
               absl::Span<const uint32_t> after);
  uint32_t AddPoint(const Rank& rank, uint32_t round,
                    absl::Span<const uint32_t> after) {
    return Add(rank, TaskKind::kPoint, round, 0, after);
  }
  // A task that ends when all of `tasks` have; kNone if there are none.
  uint32_t Join(const Rank& rank, uint32_t round, const Tasks& tasks);
  void AddWait(uint32_t from, uint32_t to) {
    if (from != kNone) graph_.waits.push_back({.from = from, .to = to});
  }
  // A task between two others.
  void AddBetween(uint32_t from, uint32_t task, uint32_t to) {
    AddWait(from, task);
    AddWait(task, to);
  }
  absl::Status PlanDelta();
  void AddRanks();
  void AddLinksOfAll(absl::Span<const uint32_t> crossed);
  void AddRank(int32_t number);
  void AddFindOf(int32_t rank, int32_t stand_in);
  std::vector<Step> StepsOf(Rank& rank) const;
  // Each returns the task that ends the step.
  uint32_t AddStep(Rank& rank, const Step& step, const Tasks& before);
  uint32_t AddKeep(Rank& rank, const Tasks& before);
  uint32_t AddExchange(Rank& rank, const RoundWork& round, uint32_t part,
                       const Tasks& before);
  uint32_t AddMove(Rank& rank, const RoundWork& round, const Tasks& before);
  uint32_t AddPulls(Rank& rank, const Tasks& before);
  uint32_t AddAwaitedReads(Rank& rank, const Tasks& before);
  uint32_t PullTask(const Rank& rank, int32_t peer, const Pull& pull);
  void AddUnmoved(Rank& rank, size_t until, uint32_t begin);
  template <typename Each>
  void ForEachMessage(const Rank& rank, const RoundWork& work, uint32_t part,
                      const Each& each);
  // Other transports send each message of a broadcast by itself.
  bool IsBroadcast(const Operation& operation) const {
    return operation.broadcast != 0 && options_.executor == Executor::kGpu;
  }
  void AddBroadcast(const Rank& rank, const RoundWork& round,
                    const Operation& operation, uint32_t start,
                    uint32_t message, uint32_t exchanged);
  absl::Status Resolve(const Points& points);

  const PlanFile& plan_;
  const Options& options_;
  Links links_;
  TaskGraph graph_;
  MessageTasks messages_;
  DeltaRefit delta_;
  bool may_pull_ = false;
  PulledSlotsOfRanks pulled_slots_;
  uint32_t agreed_ = kNone;  // the task after which all ranks begin
  // Of direct rounds: that a rank's memory may be used, and that it was.
  Points grants_, finishes_;
  // Of broadcasts, by root and round: the root's start; the task after which
  // the last of the receivers so far passes it on, and the one after which it
  // has come to all of them.
  Points begun_;
  struct PassedOn {
    uint32_t begun = kNone;
    uint32_t arrived = kNone;
  };
  absl::flat_hash_map<std::pair<Point, uint8_t>, PassedOn> passed_on_;
};

uint32_t Builder::Add(const Rank& rank, TaskKind kind, uint32_t round,
                      double seconds, absl::Span<const uint32_t> after) {
  const auto task = static_cast<uint32_t>(graph_.tasks.size());
  graph_.tasks.push_back({.kind = kind,
                          .rank = rank.rank,
                          .round = round,
                          .seconds = seconds * rank.slowness});
  for (const uint32_t other : after) AddWait(other, task);
  return task;
}

uint32_t Builder::Join(const Rank& rank, uint32_t round, const Tasks& tasks) {
  Tasks some = tasks;
  some.erase(std::remove(some.begin(), some.end(), kNone), some.end());
  if (some.empty()) return kNone;
  if (std::count(some.begin(), some.end(), some[0]) ==
      static_cast<std::ptrdiff_t>(some.size())) {
    return some[0];
  }
  return AddPoint(rank, round, some);
}

absl::StatusOr<TaskGraph> Builder::Build() {
  if (absl::Status planned = PlanDelta(); !planned.ok()) return planned;
  may_pull_ = options_.executor == Executor::kGpu && MayPull(plan_);
  AddRanks();
  if (options_.executor == Executor::kCpu) messages_.AddConnections();
  absl::Status status = messages_.Check();
  for (const Points* points : {&grants_, &finishes_, &begun_}) {
    status.Update(Resolve(*points));
  }
  if (!status.ok()) return status;
  return std::move(graph_);
}

// Those that others stand for add nothing but their links, in the order in
// which they would come if all were simulated, and what all ranks wait for.
void Builder::AddRanks() {
  const EqualRanks& equal = graph_.equal_ranks;
  const int32_t ranks = plan_.world_size();
  std::vector<uint32_t> crossed;  // by rank: the first link
  graph_.first_tasks.clear();
  graph_.first_links.clear();
  size_t ends = 0;  // of messages
  for (int32_t rank = 0; rank < ranks; ++rank) {
    if (equal.StandInOf(rank) == rank) ends += plan_.messages().Of(rank).size();
  }
  messages_.Reserve(ends / 2);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    graph_.first_tasks.push_back(static_cast<uint32_t>(graph_.tasks.size()));
    crossed.push_back(links_.size());
    const int32_t stand_in = equal.StandInOf(rank);
    if (stand_in == rank) {
      AddRank(rank);
    } else if (delta_.plan != nullptr) {
      AddFindOf(rank, stand_in);
    }
  }
  graph_.first_tasks.push_back(static_cast<uint32_t>(graph_.tasks.size()));
  crossed.push_back(links_.size());
  if (equal.any()) {
    AddLinksOfAll(crossed);
  } else {
    graph_.first_links = std::move(crossed);
    graph_.links = links_.Take();
  }
}

void Builder::AddLinksOfAll(absl::Span<const uint32_t> crossed) {
  const EqualRanks& equal = graph_.equal_ranks;
  std::vector<uint32_t> numbers(links_.size());
  for (int32_t rank = 0; rank < plan_.world_size(); ++rank) {
    graph_.first_links.push_back(static_cast<uint32_t>(graph_.links.size()));
    const auto stand_in = static_cast<size_t>(equal.StandInOf(rank));
    for (uint32_t link = crossed[stand_in]; link < crossed[stand_in + 1];
         ++link) {
      if (equal.StandInOf(rank) == rank) {
        numbers[link] = static_cast<uint32_t>(graph_.links.size());
      }
      graph_.links.push_back(links_.LikeThatOf(
          link, equal.Counterpart(links_.CrossedBy(link), rank)));
    }
  }
  graph_.first_links.push_back(static_cast<uint32_t>(graph_.links.size()));
  for (Message& message : graph_.messages) {
    for (uint32_t& link : message.links) link = numbers[link];
  }
}

// The rung that all ranks agree on.
absl::Status Builder::PlanDelta() {
  if (!options_.change_rate.has_value()) return absl::OkStatus();
  if (!HasRungs(plan_.body())) {
    return absl::InvalidArgumentError(
        "--change-rate is given, and all refits of the plan are dense: its job "
        "has no options.delta, or the plan no staged rounds");
  }
  delta_.plan = plan_.body().delta();
  delta_.costs = StagedDeltaCostsAt(options_.executor, delta_.plan->changes(),
                                    *options_.change_rate);
  agreed_ = 0;
  graph_.tasks.push_back(
      {.kind = TaskKind::kAgree, .round = kNone, .seconds = 2 * kAgreeSeconds});
  for (int32_t rank = 0; rank < plan_.world_size(); ++rank) {
    if (graph_.equal_ranks.StandInOf(rank) != rank) continue;
    const RankSchedule schedule = ScheduleOf(plan_, options_.executor, rank);
    const DeltaSizes deltas(plan_, rank, schedule);
    delta_.rung = std::max(
        delta_.rung,
        deltas.ExpectedRung(*options_.change_rate, plan_.source_ranks()));
  }
  graph_.rung = 1;
  return absl::OkStatus();
}

// Of a rank that another stands for. All ranks agree, and which of them found
// last is a matter of all.
void Builder::AddFindOf(int32_t rank, int32_t stand_in) {
  Task find = graph_.tasks[graph_.first_tasks[static_cast<size_t>(stand_in)]];
  find.rank = rank;
  AddWait(static_cast<uint32_t>(graph_.tasks.size()), agreed_);
  graph_.tasks.push_back(find);
}

uint32_t Builder::AddKeep(Rank& rank, const Tasks& before) {
  const uint32_t keep =
      Add(rank, TaskKind::kKeep, kNone, rank.KeepSeconds(), before);
  if (!delta_.plan->check()) return keep;
  return Add(rank, TaskKind::kCheck, kNone, rank.CheckSeconds(), {keep});
}

void Builder::AddRank(int32_t number) {
  Rank rank(plan_, options_, delta_, number,
            may_pull_ ? &pulled_slots_ : nullptr);
  rank.slowness = links_.place(number).slowness;
  const std::vector<RoundWork>& works = rank.schedule.rounds();
  const bool cpu = options_.executor == Executor::kCpu;
  rank.ends = cpu ? std::vector<DirectEnds>(works.size())
                  : ListDirectEnds(plan_, number, rank.schedule, rank.peers,
                                   /*pulls=*/!rank.peers.pulled_slots.empty());
  for (size_t i = 0; i < works.size(); ++i) {
    const bool follows = i > 0 && works[i - 1].index == works[i].index;
    rank.parts.push_back(follows ? rank.parts.back() + 1 : 0);
  }
  if (delta_.plan != nullptr) {
    if (!rank.deltas->IsAllWhole(delta_.rung)) {
      graph_.rung = rank.deltas->ElementsPerSlot(delta_.rung);
    }
    // Before all ranks agree.
    AddWait(Add(rank, TaskKind::kFind, kNone, rank.FindSeconds(), {}), agreed_);
  }
  rank.last.fill(agreed_);
  for (const Step& step : StepsOf(rank)) {
    uint32_t& last = rank.last[cpu ? 0 : static_cast<size_t>(step.lane)];
    // What the first of a lane waits for is in `after`.
    Tasks before = {last};
    for (const uint32_t other : step.after) before.push_back(rank.done[other]);
    if (step.round != kNoRound) AddUnmoved(rank, step.round, rank.last[0]);
    last = AddStep(rank, step, before);
    rank.done.push_back(last);
  }
}

std::vector<Step> Builder::StepsOf(Rank& rank) const {
  for (const auto& [peer, pull] : rank.pulls) rank.pulled.push_back(peer);
  StepChoices choices = {.moves_beside = true, .keeps = delta_.plan != nullptr};
  for (const double of_launch : rank.quantized_elements) {
    choices.is_idle.push_back(of_launch == 0);
  }
  (plan_.side(rank.rank) == fb::Side::kDestination ? choices.read_sources
                                                   : choices.readers) =
      rank.pulled;
  return ListSteps(rank.schedule, rank.ends, choices);
}

// `before` begins with the last task of the step's lane.
uint32_t Builder::AddStep(Rank& rank, const Step& step, const Tasks& before) {
  const RoundWork* const work =
      step.round == kNoRound ? nullptr : &rank.schedule.rounds()[step.round];
  const uint32_t index = work == nullptr ? kNone : work->index;
  const Point here(rank.rank, work == nullptr ? kBehindRounds : index);
  const uint32_t last = before.front();
  uint32_t done = last;
  switch (step.kind) {
    case StepKind::kQuantize:
      return Add(rank, TaskKind::kQuantize, kNone,
                 rank.quantized_elements[*step.number] /
                     options_.quantized_elements_per_second,
                 before);
    case StepKind::kPack:
      return Add(rank, TaskKind::kPack, index,
                 rank.CopySeconds(*work, fb::MessageKind::kSend), before);
    case StepKind::kExchange:
      return AddExchange(rank, *work, rank.parts[step.round], before);
    case StepKind::kUnpack:
      return Add(rank, TaskKind::kUnpack, index,
                 rank.CopySeconds(*work, fb::MessageKind::kRecv), before);
    case StepKind::kGrant:
      done = AddPoint(rank, index, before);
      grants_.reached[here] = done;
      grants_.reached.try_emplace(Point(rank.rank, kFirstGrant), done);
      return done;
    case StepKind::kAwaitGrants:
      rank.grants_awaited = step.peers;
      return Join(rank, index, before);
    case StepKind::kMove:
      done = work == nullptr ? AddPulls(rank, before)
                             : AddMove(rank, *work, before);
      for (const int32_t target : rank.grants_awaited) {
        grants_.awaited.emplace_back(Point(target, here.second), rank.start);
      }
      rank.grants_awaited = {};
      return done;
    case StepKind::kFinish:
      finishes_.reached[here] = last;
      return last;
    case StepKind::kAwaitFinishes:
      if (work != nullptr) AddUnmoved(rank, step.round + 1, last);
      done = work == nullptr ? AddAwaitedReads(rank, before)
                             : AddPoint(rank, index, before);
      for (const int32_t origin : step.peers) {
        finishes_.awaited.emplace_back(Point(origin, here.second), done);
      }
      return done;
    case StepKind::kJoin:
      AddUnmoved(rank, rank.ends.size(), last);
      return Join(rank, kNone, before);
    case StepKind::kKeep:
      return AddKeep(rank, before);
    // Refits that digest beside their rounds are not simulated.
    case StepKind::kProgress:
    case StepKind::kDigest:
    case StepKind::kDigestRest:
    case StepKind::kZero:
    case StepKind::kHooks:
      return last;
  }
  return last;
}

uint32_t Builder::AddPulls(Rank& rank, const Tasks& before) {
  const uint32_t index = rank.LastPull().index;
  rank.start =
      Add(rank, TaskKind::kStart, index, options_.direct_round_seconds, before);
  const uint32_t moved = AddPoint(rank, index, {rank.start});
  AddWait(
      Add(rank, TaskKind::kQuantize, index, rank.PulledSeconds(), {rank.start}),
      moved);
  for (const auto& [peer, pull] : rank.pulls) {
    AddBetween(rank.start, PullTask(rank, peer, pull), moved);
  }
  return moved;
}

// By the destinations that pull from this source.
uint32_t Builder::AddAwaitedReads(Rank& rank, const Tasks& before) {
  for (const auto& [peer, pull] : rank.pulls) PullTask(rank, peer, pull);
  return AddPoint(rank, rank.LastPull().index, before);
}

uint32_t Builder::PullTask(const Rank& rank, int32_t peer, const Pull& pull) {
  const bool reads = plan_.side(rank.rank) == fb::Side::kDestination;
  const Operation operation = {
      .kind = reads ? fb::MessageKind::kRecv : fb::MessageKind::kSend,
      .peer = peer,
      .size_bytes = pull.bytes};
  return messages_.TaskOf({.rank = rank.rank,
                           .work = rank.schedule.rounds()[pull.work],
                           .part = kBehindRounds,
                           .operation = operation,
                           .size_bytes = pull.bytes,
                           .position = pull.position});
}

// Calls `each` with the number of each operation of the work, and its
// message's task.
template <typename Each>
void Builder::ForEachMessage(const Rank& rank, const RoundWork& work,
                             uint32_t part, const Each& each) {
  uint32_t ordinal = 0;
  const Operation* last = nullptr;
  for (uint32_t i = 0; i < work.operations_count; ++i) {
    const uint32_t number = work.operations_begin + i;
    const Operation& operation = rank.schedule.operations()[number];
    const bool repeats = last != nullptr && last->peer == operation.peer &&
                         last->kind == operation.kind;
    ordinal = repeats ? ordinal + 1 : 0;
    last = &operation;
    each(number,
         messages_.TaskOf({.rank = rank.rank,
                           .work = work,
                           .part = part,
                           .operation = operation,
                           .size_bytes = rank.SizeBytes(number),
                           .position = rank.schedule.parts()[number].message,
                           .ordinal = ordinal,
                           .is_broadcast = IsBroadcast(operation)}));
  }
}

uint32_t Builder::AddExchange(Rank& rank, const RoundWork& round, uint32_t part,
                              const Tasks& before) {
  const auto add_start = [&](TaskKind kind, fb::Route route) {
    return Add(rank, kind, round.index, rank.StartSeconds(round, route),
               before);
  };
  const uint32_t start = add_start(TaskKind::kStart, round.route);
  // What is dealt out beside messages between hosts starts beside them.
  uint32_t dealt = kNone;
  if (round.route == fb::Route::kNetwork) {
    for (uint32_t i = 0; i < round.operations_count && dealt == kNone; ++i) {
      if (rank.schedule.RouteOf(round.operations_begin + i) ==
          fb::Route::kPeer) {
        dealt = add_start(TaskKind::kDealtStart, fb::Route::kPeer);
      }
    }
  }
  const uint32_t exchanged = AddPoint(rank, round.index, {start, dealt});
  ForEachMessage(rank, round, part, [&](uint32_t operation, uint32_t message) {
    const Operation& of = rank.schedule.operations()[operation];
    if (IsBroadcast(of)) {
      AddBroadcast(rank, round, of, start, message, exchanged);
      return;
    }
    const bool is_dealt =
        dealt != kNone && rank.schedule.RouteOf(operation) == fb::Route::kPeer;
    AddBetween(is_dealt ? dealt : start, message, exchanged);
  });
  return exchanged;
}

// What a rank does of a broadcast: its root sends it to the first receiver, and
// each of these passes it on to the next while it comes. A rank begins to pass
// on after the one before it, and is not done before that one. Receivers come
// in the order in which they pass it on.
void Builder::AddBroadcast(const Rank& rank, const RoundWork& round,
                           const Operation& operation, uint32_t start,
                           uint32_t message, uint32_t exchanged) {
  const auto here = static_cast<uint32_t>(rank.rank);
  const auto peer = static_cast<uint32_t>(operation.peer);
  if (operation.kind == fb::MessageKind::kSend) {
    begun_.reached[Point(rank.rank, round.index)] = start;
    if (messages_.broadcasts().Before(here, peer) == here) {
      AddBetween(start, message, exchanged);
    }
    return;
  }
  const Point root(operation.peer, round.index);
  const auto [found, is_first] =
      passed_on_.try_emplace(std::pair(root, operation.broadcast));
  PassedOn& passed = found->second;
  AddWait(start, message);
  passed.arrived = is_first
                       ? message
                       : AddPoint(rank, round.index, {passed.arrived, message});
  AddWait(passed.arrived, exchanged);
  Tasks before = {start};
  if (!is_first) before.push_back(passed.begun);
  passed.begun = Add(rank, TaskKind::kStart, round.index,
                     options_.broadcast_hop_seconds, before);
  if (is_first) begun_.awaited.emplace_back(root, passed.begun);
  const std::optional<uint32_t> next = messages_.broadcasts().After(peer, here);
  if (!next.has_value()) return;
  AddBetween(passed.begun,
             messages_.TaskOfPassedOn(rank.rank, round, operation,
                                      static_cast<int32_t>(*next)),
             exchanged);
}

uint32_t Builder::AddMove(Rank& rank, const RoundWork& round,
                          const Tasks& before) {
  const uint32_t start = rank.start =
      Add(rank, TaskKind::kStart, round.index, options_.direct_round_seconds,
          before);
  const uint32_t moved = AddPoint(rank, round.index, {start});
  ForEachMessage(
      rank, round, /*part=*/0, [&](uint32_t number, uint32_t message) {
        const Operation& operation = rank.schedule.operations()[number];
        if (rank.peers.Moves(operation.kind, operation.peer)) {
          AddBetween(start, message, moved);
        }
      });
  if (const double seconds = rank.FusedSeconds(round); seconds > 0) {
    AddWait(Add(rank, TaskKind::kQuantize, round.index, seconds, {start}),
            moved);
  }
  return moved;
}

// Messages of direct rounds before work `until` in which the rank moves
// nothing. What is read behind the rounds may leave an empty one, which nobody
// moves.
void Builder::AddUnmoved(Rank& rank, size_t until, uint32_t begin) {
  for (; rank.passed < until; ++rank.passed) {
    const RoundWork& work = rank.schedule.rounds()[rank.passed];
    if (work.mechanism != fb::Mechanism::kDirect ||
        rank.ends[rank.passed].moves) {
      continue;
    }
    ForEachMessage(rank, work, /*part=*/0,
                   [&](uint32_t number, uint32_t message) {
                     if (rank.IsEmptied(number)) AddWait(begin, message);
                   });
  }
}

absl::Status Builder::Resolve(const Points& points) {
  for (const auto& [point, task] : points.awaited) {
    auto found = points.reached.find(point);
    // A rank at rest grants all in its first round.
    if (found == points.reached.end()) {
      found = points.reached.find(Point(point.first, kFirstGrant));
    }
    if (found == points.reached.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "round ", point.second, ": rank ", graph_.tasks[task].rank,
          " waits for rank ", point.first, ", which never tells it"));
    }
    AddWait(found->second, task);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TaskGraph> BuildTaskGraph(const PlanFile& plan,
                                         const Options& options) {
  const absl::Status status = CheckOptions(plan, options);
  if (!status.ok()) return status;
  return Builder(plan, options).Build();
}

}  // namespace refit::simulator
