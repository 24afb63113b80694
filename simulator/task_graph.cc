// From a plan to the tasks of its ranks: those of each step of their lists
// (plan/schedule/steps.h), which say what waits for what within a rank.
#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "plan/broadcasts.h"
#include "plan/dtype.h"
#include "plan/schedule/delta_sizes.h"
#include "plan/schedule/direct_ends.h"
#include "plan/schedule/direct_pairs.h"
#include "plan/schedule/rank_schedule.h"
#include "plan/schedule/round_copies.h"
#include "plan/schedule/steps.h"
#include "plan/schedule/tensor_box.h"
#include "plan/schedule/tensor_table.h"
#include "plan/sent_ranges.h"
#include "simulator/delta_costs.h"
#include "simulator/equal_ranks.h"
#include "simulator/links.h"
#include "simulator/simulation.h"

namespace refit::simulator {
namespace {

// Both ends of a message name it so.
struct MessageKey {
  uint32_t round = 0;
  uint32_t part = 0;  // of a round that is sent in parts
  int32_t source = 0;
  int32_t destination = 0;
  uint32_t ordinal = 0;  // among those of the same ranks, round and part

  friend bool operator==(const MessageKey&, const MessageKey&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const MessageKey& key) {
    // Two words are hashed in a third of the time of five.
    return H::combine(
        std::move(h),
        uint64_t{key.round} << 32 ^ uint64_t{key.part} << 16 ^ key.ordinal,
        static_cast<uint64_t>(key.source) << 32 ^
            static_cast<uint64_t>(key.destination));
  }
};

struct OpenMessage {
  uint32_t message = 0;
  uint64_t sent_bytes = 0;
  uint64_t received_bytes = 0;
  bool is_sent = false;
  bool is_received = false;
};

constexpr absl::string_view kAskVerify =
    "; refit-verify tells what is wrong with the plan";

// What one rank grants to or tells another rank in a direct round, or behind
// all rounds.
using Point = std::pair<int32_t, uint32_t>;  // rank and round
constexpr uint32_t kBehindRounds = kNone;    // as a round, and as a part of one
constexpr uint32_t kFirstGrant = kNone - 1;  // as a round
// As a part of a round: the n-th broadcast of a rank in it, less n.
constexpr uint32_t kBroadcastPart = kNone - 1;

// What a destination reads of a source behind the rounds, and not before.
struct Pull {
  uint64_t bytes = 0;
  size_t work = 0;        // the last one that the plan has it in
  uint32_t position = 0;  // of that one's message
};

// Whether the list is one run of a tensor, byte for byte: such bytes are sent
// from the tensor itself, or received into it.
bool IsOneRun(const fb::Body& body, const TensorTable& tensors,
              absl::Span<const fb::Copy> copies) {
  if (copies.size() != 1) return false;
  const TensorBox box = BoxOf(body, tensors, copies[0]);
  return box.first.dtype == copies[0].wire_dtype() && box.IsOneRun();
}

class Builder {
 public:
  Builder(const PlanFile& plan, const Options& options)
      : plan_(plan),
        body_(plan.body()),
        options_(options),
        broadcasts_(plan.body()),
        links_(SitesOf(plan), options) {
    if (options.folds_equal_ranks) {
      graph_.equal_ranks = EqualRanks(plan, links_);
    }
  }

  absl::StatusOr<TaskGraph> Build();

 private:
  // The tasks of one rank while they are made. By work of its rank.schedule.
  struct Rank {
    Rank(const PlanFile& plan, int32_t number, double slowness,
         RankSchedule of_rank)
        : number(number),
          slowness(slowness),
          schedule(std::move(of_rank)),
          tensors(plan, number),
          is_dealt(DealtReceives(
              plan.messages(),
              *plan.body().programs()->Get(static_cast<uint32_t>(number)))) {}

    int32_t number = 0;
    double slowness = 1;
    RankSchedule schedule;
    TensorTable tensors;
    std::vector<bool> is_dealt;         // by message of the program
    std::array<uint32_t, kLanes> last;  // tasks, by lane
    std::vector<uint32_t> done;         // the task that ends a step, by step
    absl::Span<const int32_t> grants_awaited;  // by the next step that moves
    uint32_t start = kNone;                    // of the last step that moved
    const DeltaSizes* deltas = nullptr;        // of a refit that sends them
    // By operation: it is a part of the rounds that store what it makes.
    std::vector<bool> is_fused;
    // Slots of scratch whose values are made by such operations alone.
    std::set<uint32_t> fused_slots;
    // By operation of the schedule: what is read behind the rounds instead. By
    // peer: the sum. Empty where nothing is.
    std::vector<uint64_t> pulled_bytes;
    std::map<int32_t, Pull> pulls;
    double pulled_elements = 0;  // that are quantized then
  };
  using Tasks = absl::InlinedVector<uint32_t, 4>;

  uint32_t Add(const Rank& rank, TaskKind kind, uint32_t round, double seconds,
               absl::Span<const uint32_t> after);
  // A task that ends when all of `tasks` have; kNone if there are none.
  uint32_t Join(const Rank& rank, uint32_t round, const Tasks& tasks);
  void AddWait(uint32_t from, uint32_t to) {
    if (from != kNone) graph_.waits.push_back({.from = from, .to = to});
  }
  absl::Status PlanDelta();
  RankSchedule ScheduleOf(int32_t rank) const;
  void AddRanks();
  void AddRank(int32_t number);
  void AddFind(Rank& rank);
  void AddFindOf(int32_t rank, int32_t stand_in);
  uint32_t AddKeep(Rank& rank, const Tasks& before);
  // Whether the rank encodes or decodes the operation.
  bool IsCoded(const Rank& rank, size_t operation) const {
    return rank.deltas != nullptr && rank.deltas->IsCoded(operation) &&
           !rank.deltas->IsWhole(operation, rung_);
  }
  std::vector<double> QuantizedElements(Rank& rank);
  const std::set<uint32_t>& PulledSlotsOf(int32_t rank);
  void PlanFused(Rank& rank);
  void PlanPulls(Rank& rank, DirectPairs& peers);
  double FusedSeconds(const Rank& rank, const RoundWork& work) const;
  // Each returns the task that ends the step.
  uint32_t AddExchange(Rank& rank, const RoundWork& round, uint32_t part,
                       const Tasks& before);
  uint32_t AddMove(Rank& rank, const RoundWork& round, const DirectPairs& peers,
                   const Tasks& before);
  uint32_t AddPulls(Rank& rank, const Tasks& before);
  uint32_t AddAwaitedReads(Rank& rank, const Tasks& before);
  uint32_t PullTask(const Rank& rank, int32_t peer, const Pull& pull);
  void AddUnmoved(Rank& rank, const RoundWork& round, uint32_t begin);
  template <typename Each>
  void ForEachMessage(const Rank& rank, const RoundWork& work, uint32_t part,
                      const Each& each);
  uint64_t SizeBytes(const Rank& rank, size_t operation) const;
  uint32_t MessageTask(const Rank& rank, const RoundWork& work, uint32_t part,
                       const Operation& operation, uint64_t size_bytes,
                       uint32_t position, uint32_t ordinal);
  // A message that one of the ranks it concerns comes to. `sender`: from whom
  // it comes to its destination.
  OpenMessage& Open(const Rank& rank, const RoundWork& work,
                    const MessageKey& key, int32_t sender, uint64_t size_bytes,
                    uint64_t dense_bytes);
  // Other transports send each message of a broadcast by itself.
  bool IsBroadcast(const Operation& operation) const {
    return operation.broadcast != 0 && options_.executor == Executor::kGpu;
  }
  void AddBroadcast(const Rank& rank, const RoundWork& round,
                    const Operation& operation, uint32_t start,
                    uint32_t message, uint32_t exchanged);
  double CopySeconds(const Rank& rank, const RoundWork& work,
                     fb::MessageKind kind) const;
  // Before the round's messages of the route.
  double StartSeconds(const Rank& rank, const RoundWork& work,
                      fb::Route route) const;
  void AddConnections();
  absl::Status CheckMessages() const;
  absl::Status ResolvePoints();

  const PlanFile& plan_;
  const fb::Body& body_;
  const Options& options_;
  const Broadcasts broadcasts_;
  Links links_;
  TaskGraph graph_;
  // Of a refit that sends only what changed.
  const fb::Delta* delta_ = nullptr;
  size_t rung_ = 0;  // as its position in the plan's
  StagedDeltaCosts costs_;
  bool may_pull_ = false;
  std::map<int32_t, std::set<uint32_t>> pulled_slots_;  // by destination
  uint32_t agreed_ = kNone;  // the task after which all ranks begin
  absl::flat_hash_map<MessageKey, OpenMessage> messages_;
  std::vector<uint32_t> tasks_of_messages_;
  absl::Status misordered_;  // the first rank's messages that are, if any
  // Of direct rounds: the task after which a rank's memory may be used, and
  // the one after which it was; and who waits for them.
  absl::flat_hash_map<Point, uint32_t> granted_, finished_;
  std::vector<std::pair<Point, uint32_t>> await_grants_, await_finishes_;
  // Of broadcasts, by root and round: the root's start, and who waits for it;
  // the task after which the last of the receivers so far passes it on, and the
  // one after which it has come to all of them.
  struct PassedOn {
    uint32_t begun = kNone;
    uint32_t arrived = kNone;
  };
  absl::flat_hash_map<Point, uint32_t> begun_;
  std::vector<std::pair<Point, uint32_t>> await_begun_;
  absl::flat_hash_map<std::pair<Point, uint8_t>, PassedOn> passed_on_;
};

uint32_t Builder::Add(const Rank& rank, TaskKind kind, uint32_t round,
                      double seconds, absl::Span<const uint32_t> after) {
  const auto task = static_cast<uint32_t>(graph_.tasks.size());
  graph_.tasks.push_back({.kind = kind,
                          .rank = rank.number,
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
  return Add(rank, TaskKind::kPoint, round, 0, some);
}

absl::StatusOr<TaskGraph> Builder::Build() {
  if (absl::Status planned = PlanDelta(); !planned.ok()) return planned;
  may_pull_ = options_.executor == Executor::kGpu && MayPull(plan_);
  AddRanks();
  if (options_.executor == Executor::kCpu) AddConnections();
  absl::Status status = misordered_;
  status.Update(CheckMessages());
  status.Update(ResolvePoints());
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
  messages_.reserve(ends / 2);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    graph_.first_tasks.push_back(static_cast<uint32_t>(graph_.tasks.size()));
    crossed.push_back(links_.size());
    const int32_t stand_in = equal.StandInOf(rank);
    if (stand_in == rank) {
      AddRank(rank);
    } else if (delta_ != nullptr) {
      AddFindOf(rank, stand_in);
    }
  }
  graph_.first_tasks.push_back(static_cast<uint32_t>(graph_.tasks.size()));
  crossed.push_back(links_.size());
  if (!equal.any()) {
    graph_.first_links = std::move(crossed);
    graph_.links = links_.Take();
    return;
  }
  std::vector<uint32_t> numbers(links_.size());
  for (int32_t rank = 0; rank < ranks; ++rank) {
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

RankSchedule Builder::ScheduleOf(int32_t rank) const {
  return RankSchedule(plan_, rank,
                      options_.executor == Executor::kCpu
                          ? DirectRounds::kSent
                          : DirectRounds::kStored);
}

// The rung that all ranks agree on.
absl::Status Builder::PlanDelta() {
  if (!options_.change_rate.has_value()) return absl::OkStatus();
  if (!HasRungs(body_)) {
    return absl::InvalidArgumentError(
        "--change-rate is given, and all refits of the plan are dense: its job "
        "has no options.delta, or the plan no staged rounds");
  }
  delta_ = body_.delta();
  costs_ = StagedDeltaCostsAt(options_.executor, delta_->changes(),
                              *options_.change_rate);
  agreed_ = 0;
  graph_.tasks.push_back(
      {.kind = TaskKind::kAgree, .round = kNone, .seconds = 2 * kAgreeSeconds});
  for (int32_t rank = 0; rank < plan_.world_size(); ++rank) {
    if (graph_.equal_ranks.StandInOf(rank) != rank) continue;
    const RankSchedule schedule = ScheduleOf(rank);
    const DeltaSizes deltas(plan_, rank, schedule);
    rung_ = std::max(rung_, deltas.ExpectedRung(*options_.change_rate,
                                                plan_.source_ranks()));
  }
  graph_.rung = 1;
  return absl::OkStatus();
}

// Before all ranks agree.
void Builder::AddFind(Rank& rank) {
  double bytes = 0;
  for (size_t i = 0; i < rank.schedule.operations().size(); ++i) {
    const Operation& operation = rank.schedule.operations()[i];
    if (operation.kind != fb::MessageKind::kSend) continue;
    if (rank.deltas->IsCoded(i)) {
      bytes += static_cast<double>(operation.size_bytes);
    }
  }
  AddWait(Add(rank, TaskKind::kFind, kNone, bytes * costs_.find, {}), agreed_);
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
  double kept = 0;
  double held = static_cast<double>(SnapshotBytes(plan_, rank.number));
  const double rate = *options_.change_rate;
  for (size_t i = 0; i < rank.schedule.operations().size(); ++i) {
    const Operation& operation = rank.schedule.operations()[i];
    const auto bytes = static_cast<double>(operation.size_bytes);
    if (operation.kind == fb::MessageKind::kRecv) {
      held += bytes;
    } else if (rank.deltas->IsCoded(i)) {
      kept += bytes;
    }
  }
  // Bitmaps are cleared, however many changed.
  const bool is_little = delta_->changes() == fb::DeltaChanges::kBitmap ||
                         (!rank.deltas->IsAllWhole(rung_) &&
                          rate * DeltaSizes::kElementsPerChangeToTakeAll <= 1);
  const uint32_t keep = Add(
      rank, TaskKind::kKeep, kNone,
      is_little ? kept * costs_.keep : kept / options_.copy_bytes_per_second,
      before);
  if (!delta_->check()) return keep;
  return Add(rank, TaskKind::kCheck, kNone,
             held * CheckSecondsPerByte(options_.executor), {keep});
}

void Builder::AddRank(int32_t number) {
  const bool cpu = options_.executor == Executor::kCpu;
  Rank rank(plan_, number, links_.place(number).slowness, ScheduleOf(number));
  const std::vector<RoundWork>& works = rank.schedule.rounds();
  DirectPairs peers = PlannedPairs(plan_, rank.schedule);
  rank.is_fused = FusedQuantizes(plan_, number, rank.schedule, peers);
  PlanFused(rank);
  if (may_pull_) PlanPulls(rank, peers);
  const std::vector<DirectEnds> ends =
      cpu ? std::vector<DirectEnds>(works.size())
          : ListDirectEnds(plan_, number, rank.schedule, peers,
                           /*pulls=*/!peers.pulled_slots.empty());
  std::optional<DeltaSizes> deltas;
  if (delta_ != nullptr) {
    deltas.emplace(plan_, number, rank.schedule);
    rank.deltas = &*deltas;
    if (!deltas->IsAllWhole(rung_)) {
      graph_.rung = deltas->ElementsPerSlot(rung_);
    }
    AddFind(rank);
  }
  std::vector<uint32_t> parts;  // by work: of rounds that are sent in parts
  for (size_t i = 0; i < works.size(); ++i) {
    const bool follows = i > 0 && works[i - 1].index == works[i].index;
    parts.push_back(follows ? parts.back() + 1 : 0);
  }
  const std::vector<double> elements = QuantizedElements(rank);
  std::vector<int32_t> pulled;
  for (const auto& [peer, pull] : rank.pulls) pulled.push_back(peer);
  StepChoices choices = {.moves_beside = true, .keeps = delta_ != nullptr};
  for (const double of_launch : elements) {
    choices.is_idle.push_back(of_launch == 0);
  }
  (plan_.side(number) == fb::Side::kDestination ? choices.read_sources
                                                : choices.readers) = pulled;
  const std::vector<Step> steps = ListSteps(rank.schedule, ends, choices);
  size_t passed = 0;  // works
  const auto pass = [&](size_t until, uint32_t begin) {
    for (; passed < until; ++passed) {
      if (works[passed].mechanism == fb::Mechanism::kDirect &&
          !ends[passed].moves) {
        AddUnmoved(rank, works[passed], begin);
      }
    }
  };
  rank.last.fill(agreed_);
  for (const Step& step : steps) {
    uint32_t& last = rank.last[cpu ? 0 : static_cast<size_t>(step.lane)];
    // What the first of a lane waits for is in `after`.
    Tasks before = {last};
    for (const uint32_t other : step.after) before.push_back(rank.done[other]);
    const RoundWork* const work =
        step.round == kNoRound ? nullptr : &works[step.round];
    const uint32_t index = work == nullptr ? kNone : work->index;
    const Point here(number, work == nullptr ? kBehindRounds : index);
    if (work != nullptr) pass(step.round, rank.last[0]);
    uint32_t done = last;
    switch (step.kind) {
      case StepKind::kQuantize:
        done =
            Add(rank, TaskKind::kQuantize, kNone,
                elements[*step.number] / options_.quantized_elements_per_second,
                before);
        break;
      case StepKind::kPack:
        done = Add(rank, TaskKind::kPack, index,
                   CopySeconds(rank, *work, fb::MessageKind::kSend), before);
        break;
      case StepKind::kExchange:
        done = AddExchange(rank, *work, parts[step.round], before);
        break;
      case StepKind::kUnpack:
        done = Add(rank, TaskKind::kUnpack, index,
                   CopySeconds(rank, *work, fb::MessageKind::kRecv), before);
        break;
      case StepKind::kGrant:
        done = Add(rank, TaskKind::kPoint, index, 0, before);
        granted_[here] = done;
        granted_.try_emplace(Point(number, kFirstGrant), done);
        break;
      case StepKind::kAwaitGrants:
        done = Join(rank, index, before);
        rank.grants_awaited = step.peers;
        break;
      case StepKind::kMove:
        done = work == nullptr ? AddPulls(rank, before)
                               : AddMove(rank, *work, peers, before);
        for (const int32_t target : rank.grants_awaited) {
          await_grants_.emplace_back(Point(target, here.second), rank.start);
        }
        rank.grants_awaited = {};
        break;
      case StepKind::kFinish:
        finished_[here] = last;
        break;
      case StepKind::kAwaitFinishes:
        if (work != nullptr) pass(step.round + 1, last);
        done = work == nullptr ? AddAwaitedReads(rank, before)
                               : Add(rank, TaskKind::kPoint, index, 0, before);
        for (const int32_t origin : step.peers) {
          await_finishes_.emplace_back(Point(origin, here.second), done);
        }
        break;
      case StepKind::kJoin:
        pass(works.size(), last);
        done = Join(rank, kNone, before);
        break;
      case StepKind::kKeep:
        done = AddKeep(rank, before);
        break;
      // Refits that digest beside their rounds are not simulated.
      case StepKind::kProgress:
      case StepKind::kDigest:
      case StepKind::kDigestRest:
      case StepKind::kZero:
      case StepKind::kHooks:
        break;
    }
    last = done;
    rank.done.push_back(done);
  }
}

const std::set<uint32_t>& Builder::PulledSlotsOf(int32_t rank) {
  const auto [found, is_new] = pulled_slots_.try_emplace(rank);
  if (is_new) found->second = PlannedPulledSlots(plan_, rank);
  return found->second;
}

void Builder::PlanFused(Rank& rank) {
  const auto& quantizes =
      body_.programs()->Get(static_cast<uint32_t>(rank.number))->quantizes();
  std::set<uint32_t> unfused;
  for (uint32_t i = 0; i < rank.is_fused.size(); ++i) {
    (rank.is_fused[i] ? rank.fused_slots : unfused)
        .insert(quantizes->Get(i)->output_slot());
  }
  for (const uint32_t slot : unfused) rank.fused_slots.erase(slot);
}

// What sources would store into scratch from which a destination quantizes.
void Builder::PlanPulls(Rank& rank, DirectPairs& peers) {
  std::set<int32_t> readers;
  if (IsQuantizer(plan_, rank.number)) readers.insert(rank.number);
  for (const int32_t receiver : rank.schedule.DirectReceivers()) {
    if (IsQuantizer(plan_, receiver)) readers.insert(receiver);
  }
  for (const int32_t reader : readers) {
    if (const std::set<uint32_t>& slots = PulledSlotsOf(reader);
        !slots.empty()) {
      peers.pulled_slots[reader] = slots;
    }
  }
  if (peers.pulled_slots.empty()) return;
  rank.pulled_bytes.assign(rank.schedule.operations().size(), 0);
  const auto here = static_cast<uint32_t>(rank.number);
  for (size_t work = 0; work < rank.schedule.rounds().size(); ++work) {
    const RoundWork& round = rank.schedule.rounds()[work];
    if (round.mechanism != fb::Mechanism::kDirect) continue;
    for (uint32_t i = 0; i < round.operations_count; ++i) {
      const uint32_t number = round.operations_begin + i;
      const Operation& operation = rank.schedule.operations()[number];
      const bool sends = operation.kind == fb::MessageKind::kSend;
      const auto slots =
          peers.pulled_slots.find(sends ? operation.peer : rank.number);
      if (slots == peers.pulled_slots.end()) continue;
      const uint32_t position = rank.schedule.parts()[number].message;
      const fb::Message* received =
          sends ? PartnerOf(plan_.messages(), here, position)
                : plan_.messages().Of(here).Get(position);
      if (received == nullptr) continue;
      uint64_t bytes = 0;
      for (const fb::Copy& copy : CopiesOf(body_, received->copies())) {
        if (slots->second.contains(copy.buffer_slot())) {
          bytes += CopyElements(body_, copy) * DTypeBytes(copy.wire_dtype());
        }
      }
      if (bytes == 0) continue;
      rank.pulled_bytes[number] = bytes;
      Pull& pull = rank.pulls[operation.peer];
      pull = {.bytes = pull.bytes + bytes, .work = work, .position = position};
    }
  }
}

uint32_t Builder::AddPulls(Rank& rank, const Tasks& before) {
  size_t last = 0;
  for (const auto& [peer, pull] : rank.pulls) last = std::max(last, pull.work);
  const uint32_t index = rank.schedule.rounds()[last].index;
  rank.start =
      Add(rank, TaskKind::kStart, index, options_.direct_round_seconds, before);
  const uint32_t moved = Add(rank, TaskKind::kPoint, index, 0, {rank.start});
  AddWait(Add(rank, TaskKind::kQuantize, index,
              rank.pulled_elements / options_.fused_elements_per_second,
              {rank.start}),
          moved);
  for (const auto& [peer, pull] : rank.pulls) {
    const uint32_t message = PullTask(rank, peer, pull);
    AddWait(rank.start, message);
    AddWait(message, moved);
  }
  return moved;
}

// By the destinations that pull from this source.
uint32_t Builder::AddAwaitedReads(Rank& rank, const Tasks& before) {
  size_t last = 0;
  for (const auto& [peer, pull] : rank.pulls) {
    last = std::max(last, pull.work);
    PullTask(rank, peer, pull);
  }
  return Add(rank, TaskKind::kPoint, rank.schedule.rounds()[last].index, 0,
             before);
}

uint32_t Builder::PullTask(const Rank& rank, int32_t peer, const Pull& pull) {
  const bool reads = plan_.side(rank.number) == fb::Side::kDestination;
  const Operation operation = {
      .kind = reads ? fb::MessageKind::kRecv : fb::MessageKind::kSend,
      .peer = peer,
      .size_bytes = pull.bytes};
  return MessageTask(rank, rank.schedule.rounds()[pull.work], kBehindRounds,
                     operation, pull.bytes, pull.position, /*ordinal=*/0);
}

// By launch, but for what is fused or pulled.
std::vector<double> Builder::QuantizedElements(Rank& rank) {
  const fb::RankProgram& program =
      *body_.programs()->Get(static_cast<uint32_t>(rank.number));
  static const std::set<uint32_t> none;
  const std::set<uint32_t>& pulled =
      rank.pulls.empty() ? none : PulledSlotsOf(rank.number);
  std::vector<double> elements;
  for (const QuantizeLaunch& launch : rank.schedule.quantizes()) {
    elements.push_back(0);
    for (const uint32_t position : launch.operations) {
      if (rank.is_fused[position]) continue;
      const fb::Quantize& operation = *program.quantizes()->Get(position);
      double matrices = 1;
      for (const fb::QuantizeLoop& loop : LoopsOf(body_, operation)) {
        matrices *= static_cast<double>(loop.extent());
      }
      (pulled.contains(operation.input_slot()) ? rank.pulled_elements
                                               : elements.back()) +=
          matrices * static_cast<double>(operation.rows()) *
          static_cast<double>(operation.columns());
    }
  }
  return elements;
}

// Calls `each` with the number of each operation of the work, and its
// message's task.
template <typename Each>
void Builder::ForEachMessage(const Rank& rank, const RoundWork& work,
                             uint32_t part, const Each& each) {
  uint32_t ordinal = 0;
  const Operation* last = nullptr;
  const auto ordinal_of = [&](const Operation& operation) {
    const bool same = last != nullptr && last->peer == operation.peer &&
                      last->kind == operation.kind;
    last = &operation;
    return ordinal = same ? ordinal + 1 : 0;
  };
  for (uint32_t i = 0; i < work.operations_count; ++i) {
    const uint32_t number = work.operations_begin + i;
    const Operation& operation = rank.schedule.operations()[number];
    each(number,
         MessageTask(rank, work, part, operation, SizeBytes(rank, number),
                     rank.schedule.parts()[number].message,
                     ordinal_of(operation)));
  }
}

// What is sent of an operation.
uint64_t Builder::SizeBytes(const Rank& rank, size_t operation) const {
  const uint64_t size_bytes = rank.schedule.operations()[operation].size_bytes;
  if (!rank.pulled_bytes.empty()) {
    return size_bytes - rank.pulled_bytes[operation];
  }
  return rank.deltas == nullptr ? size_bytes
                                : rank.deltas->SizeBytes(operation, rung_);
}

OpenMessage& Builder::Open(const Rank& rank, const RoundWork& work,
                           const MessageKey& key, int32_t sender,
                           uint64_t size_bytes, uint64_t dense_bytes) {
  const auto [found, inserted] = messages_.try_emplace(key);
  OpenMessage& open = found->second;
  if (!inserted) return open;
  open.message = static_cast<uint32_t>(graph_.messages.size());
  graph_.messages.push_back(
      {.round = key.round,
       .source = key.source,
       .destination = key.destination,
       .size_bytes = size_bytes,
       .links = links_.Cross(work.route, sender, key.destination, size_bytes)});
  if (work.IsStagedRound()) {
    const uint64_t alike = graph_.equal_ranks.CountOf(rank.number);
    graph_.stored_bytes += alike * size_bytes;
    graph_.dense_bytes += alike * dense_bytes;
  }
  tasks_of_messages_.push_back(static_cast<uint32_t>(graph_.tasks.size()));
  graph_.tasks.push_back({.kind = TaskKind::kMessage,
                          .rank = key.source,
                          .round = key.round,
                          .message = open.message});
  return open;
}

uint32_t Builder::MessageTask(const Rank& rank, const RoundWork& work,
                              uint32_t part, const Operation& operation,
                              uint64_t size_bytes, uint32_t position,
                              uint32_t ordinal) {
  const bool sends = operation.kind == fb::MessageKind::kSend;
  const int32_t source = sends ? rank.number : operation.peer;
  const int32_t destination = sends ? operation.peer : rank.number;
  const bool is_broadcast = IsBroadcast(operation);
  const int32_t sender = is_broadcast ? static_cast<int32_t>(broadcasts_.Before(
                                            static_cast<uint32_t>(source),
                                            static_cast<uint32_t>(destination)))
                                      : source;
  OpenMessage& open =
      Open(rank, work,
           {.round = work.index,
            .part = is_broadcast ? kBroadcastPart - operation.broadcast : part,
            .source = source,
            .destination = destination,
            .ordinal = is_broadcast ? 0 : ordinal},
           sender, size_bytes, operation.size_bytes);
  if (sends) graph_.messages[open.message].position = position;
  bool& is_listed = sends ? open.is_sent : open.is_received;
  if (std::exchange(is_listed, true) && misordered_.ok()) {
    misordered_ = absl::InvalidArgumentError(absl::StrCat(
        "round ", work.index, ": rank ", rank.number,
        sends ? " sends to rank " : " receives from rank ", operation.peer,
        " in two places, with other messages between them", kAskVerify));
  }
  (sends ? open.sent_bytes : open.received_bytes) = size_bytes;
  return tasks_of_messages_[open.message];
}

// Of packing or unpacking, or of encoding or applying what is coded.
double Builder::CopySeconds(const Rank& rank, const RoundWork& work,
                            fb::MessageKind kind) const {
  const MessageVector& messages =
      plan_.messages().Of(static_cast<uint32_t>(rank.number));
  double bytes = 0;
  double coded_bytes = 0;
  RepeatedSends sends;
  for (uint32_t i = 0; i < work.operations_count; ++i) {
    const uint32_t number = work.operations_begin + i;
    const Operation& operation = rank.schedule.operations()[number];
    if (sends.Repeats(*messages.Get(rank.schedule.parts()[number].message)) ||
        operation.kind != kind) {
      continue;
    }
    if (IsCoded(rank, number)) {
      coded_bytes += static_cast<double>(operation.size_bytes);
      continue;
    }
    const uint32_t message = rank.schedule.parts()[number].message;
    const auto copies = CopiesOf(body_, messages.Get(message)->copies());
    // What is dealt out stays in staging.
    if (copies.empty()) continue;
    if (!rank.is_dealt[message] && IsOneRun(body_, rank.tensors, copies)) {
      continue;
    }
    bytes += static_cast<double>(operation.size_bytes);
  }
  return bytes / options_.copy_bytes_per_second +
         coded_bytes *
             (kind == fb::MessageKind::kSend ? costs_.encode : costs_.apply);
}

double Builder::StartSeconds(const Rank& rank, const RoundWork& work,
                             fb::Route route) const {
  if (route == fb::Route::kNetwork) return options_.network_round_seconds;
  int64_t sends = 0;
  int64_t receives = 0;
  for (uint32_t i = 0; i < work.operations_count; ++i) {
    const uint32_t number = work.operations_begin + i;
    if (rank.schedule.RouteOf(number) != route) continue;
    ++(rank.schedule.operations()[number].kind == fb::MessageKind::kSend
           ? sends
           : receives);
  }
  const auto messages = static_cast<double>(std::max(sends, receives));
  if (work.route == fb::Route::kNetwork) {
    return options_.dealt_message_seconds * messages;
  }
  const double message_seconds =
      !rank.schedule.quantizes().empty() ? options_.quantized_message_seconds
      : rank.schedule.RelaysInStages()   ? options_.dealt_message_seconds
                                         : options_.peer_message_seconds;
  return options_.peer_round_seconds + messages * message_seconds;
}

uint32_t Builder::AddExchange(Rank& rank, const RoundWork& round, uint32_t part,
                              const Tasks& before) {
  const auto add_start = [&](TaskKind kind, fb::Route route) {
    return Add(rank, kind, round.index, StartSeconds(rank, round, route),
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
  const uint32_t exchanged =
      Add(rank, TaskKind::kPoint, round.index, 0, {start, dealt});
  ForEachMessage(rank, round, part, [&](uint32_t operation, uint32_t message) {
    const Operation& of = rank.schedule.operations()[operation];
    if (IsBroadcast(of)) {
      AddBroadcast(rank, round, of, start, message, exchanged);
      return;
    }
    const bool is_dealt =
        dealt != kNone && rank.schedule.RouteOf(operation) == fb::Route::kPeer;
    AddWait(is_dealt ? dealt : start, message);
    AddWait(message, exchanged);
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
  const auto here = static_cast<uint32_t>(rank.number);
  const auto peer = static_cast<uint32_t>(operation.peer);
  if (operation.kind == fb::MessageKind::kSend) {
    begun_[Point(rank.number, round.index)] = start;
    if (broadcasts_.Before(here, peer) != here) return;
    AddWait(start, message);
    AddWait(message, exchanged);
    return;
  }
  const Point root(operation.peer, round.index);
  const auto [found, is_first] =
      passed_on_.try_emplace(std::pair(root, operation.broadcast));
  PassedOn& passed = found->second;
  AddWait(start, message);
  passed.arrived = is_first ? message
                            : Add(rank, TaskKind::kPoint, round.index, 0,
                                  {passed.arrived, message});
  AddWait(passed.arrived, exchanged);
  Tasks before = {start};
  if (!is_first) before.push_back(passed.begun);
  passed.begun = Add(rank, TaskKind::kStart, round.index,
                     options_.broadcast_hop_seconds, before);
  if (is_first) await_begun_.emplace_back(root, passed.begun);
  const std::optional<uint32_t> next = broadcasts_.After(peer, here);
  if (!next.has_value()) return;
  const OpenMessage& onward =
      Open(rank, round,
           {.round = round.index,
            .part = kBroadcastPart - operation.broadcast,
            .source = operation.peer,
            .destination = static_cast<int32_t>(*next)},
           rank.number, operation.size_bytes, operation.size_bytes);
  const uint32_t task = tasks_of_messages_[onward.message];
  AddWait(passed.begun, task);
  AddWait(task, exchanged);
}

// Of quantization that the round's copies do, beside their bytes on links.
double Builder::FusedSeconds(const Rank& rank, const RoundWork& work) const {
  if (rank.fused_slots.empty()) return 0;
  const MessageVector& messages =
      plan_.messages().Of(static_cast<uint32_t>(rank.number));
  double elements = 0;
  for (uint32_t i = 0; i < work.operations_count; ++i) {
    const uint32_t number = work.operations_begin + i;
    if (rank.schedule.operations()[number].kind != fb::MessageKind::kSend)
      continue;
    const uint32_t message = rank.schedule.parts()[number].message;
    for (const fb::Copy& copy :
         CopiesOf(body_, messages.Get(message)->copies())) {
      if (!rank.fused_slots.contains(copy.buffer_slot())) continue;
      elements += static_cast<double>(CopyElements(body_, copy));
    }
  }
  return elements / options_.fused_elements_per_second;
}

uint32_t Builder::AddMove(Rank& rank, const RoundWork& round,
                          const DirectPairs& peers, const Tasks& before) {
  const uint32_t start = rank.start =
      Add(rank, TaskKind::kStart, round.index, options_.direct_round_seconds,
          before);
  const uint32_t moved = Add(rank, TaskKind::kPoint, round.index, 0, {start});
  ForEachMessage(
      rank, round, /*part=*/0, [&](uint32_t number, uint32_t message) {
        const Operation& operation = rank.schedule.operations()[number];
        if (!peers.Moves(operation.kind, operation.peer)) return;
        AddWait(start, message);
        AddWait(message, moved);
      });
  if (const double seconds = FusedSeconds(rank, round); seconds > 0) {
    AddWait(Add(rank, TaskKind::kQuantize, round.index, seconds, {start}),
            moved);
  }
  return moved;
}

// Messages of a direct round in which the rank moves nothing. What is read
// behind the rounds may leave an empty one, which nobody moves.
void Builder::AddUnmoved(Rank& rank, const RoundWork& round, uint32_t begin) {
  ForEachMessage(
      rank, round, /*part=*/0, [&](uint32_t number, uint32_t message) {
        const Operation& operation = rank.schedule.operations()[number];
        if (!rank.pulls.empty() && operation.kind == fb::MessageKind::kSend &&
            rank.pulled_bytes[number] == operation.size_bytes) {
          AddWait(begin, message);
        }
      });
}

// UCX asks a sender for its message over the connection on which it sends its
// own. So of two ranks of different hosts that send to each other in a round,
// one waits until the other has sent: here the one with the higher number.
void Builder::AddConnections() {
  std::vector<std::pair<uint32_t, uint32_t>> waits;
  for (const auto& [key, open] : messages_) {
    if (key.source < key.destination ||
        RouteBetween(body_, static_cast<uint32_t>(key.source),
                     static_cast<uint32_t>(key.destination)) !=
            fb::Route::kNetwork) {
      continue;
    }
    MessageKey other = key;
    std::swap(other.source, other.destination);
    other.ordinal = 0;
    for (auto found = messages_.find(other); found != messages_.end();
         ++other.ordinal, found = messages_.find(other)) {
      waits.emplace_back(tasks_of_messages_[found->second.message],
                         tasks_of_messages_[open.message]);
    }
  }
  // The table's order is another in each process.
  std::sort(waits.begin(), waits.end());
  for (const auto& [from, to] : waits) AddWait(from, to);
}

absl::Status Builder::CheckMessages() const {
  // The first in the order of rounds and ranks, whatever the table's order.
  std::optional<std::pair<uint32_t, std::string>> first;
  for (const auto& [key, open] : messages_) {
    std::string wrong;
    if (!open.is_sent) {
      wrong = absl::StrCat("rank ", key.destination, " receives ",
                           open.received_bytes, " bytes from rank ", key.source,
                           ", which sends nothing");
    } else if (!open.is_received) {
      wrong = absl::StrCat("rank ", key.source, " sends ", open.sent_bytes,
                           " bytes to rank ", key.destination,
                           ", which receives nothing");
    } else if (open.sent_bytes != open.received_bytes) {
      wrong = absl::StrCat("rank ", key.source, " sends ", open.sent_bytes,
                           " bytes to rank ", key.destination,
                           ", which receives ", open.received_bytes);
    }
    if (wrong.empty()) continue;
    std::pair<uint32_t, std::string> found(key.round, std::move(wrong));
    if (!first.has_value() || found < *first) first = std::move(found);
  }
  if (!first.has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("round ", first->first, ": ", first->second, kAskVerify));
}

absl::Status Builder::ResolvePoints() {
  const auto resolve = [&](const auto& awaited, const auto& points) {
    for (const auto& [point, task] : awaited) {
      auto found = points.find(point);
      // A rank at rest grants all in its first round.
      if (found == points.end()) {
        found = points.find(Point(point.first, kFirstGrant));
      }
      if (found == points.end()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "round ", point.second, ": rank ", graph_.tasks[task].rank,
            " waits for rank ", point.first, ", which never tells it"));
      }
      AddWait(found->second, task);
    }
    return absl::OkStatus();
  };
  absl::Status status = resolve(await_grants_, granted_);
  status.Update(resolve(await_finishes_, finished_));
  status.Update(resolve(await_begun_, begun_));
  return status;
}

}  // namespace

absl::StatusOr<TaskGraph> BuildTaskGraph(const PlanFile& plan,
                                         const Options& options) {
  const absl::Status status = CheckOptions(plan, options);
  if (!status.ok()) return status;
  return Builder(plan, options).Build();
}

}  // namespace refit::simulator
