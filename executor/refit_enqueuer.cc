#include "executor/refit_enqueuer.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "control/waiting.h"
#include "plan/schedule/issue_order.h"

namespace refit {
namespace {

using Clock = std::chrono::steady_clock;

// 0: no bound.
DeviceUse AtMost(uint32_t multiprocessors) {
  if (multiprocessors == 0) return {};
  return {.way = DeviceUse::Way::kBulk, .at_most = multiprocessors};
}

template <typename T>
void Take(absl::StatusOr<T> made, T& target, absl::Status& status) {
  if (made.ok()) target = *std::move(made);
  status.Update(made.status());
}

// Whether sources store what they quantize where it goes, in refits of the
// rounds: where they do so over NVLink it depends on the refit.
std::vector<bool> StoresOf(const BoundRounds& rounds) {
  return rounds.fused.in_peer_rounds ? std::vector<bool>{true, false}
                                     : std::vector<bool>{true};
}

}  // namespace

RefitEnqueuer::RefitEnqueuer(const RankSchedule& schedule,
                             const ExecutorOptions& options, bool has_deltas,
                             uint32_t direct_multiprocessors)
    : schedule_(schedule),
      rank_(options.rank),
      device_(*options.device),
      transport_(*options.transport),
      records_(options.graph && !options.time_rounds && !has_deltas &&
               !schedule.Stages() && schedule.GainsFromGraph()),
      times_rounds_(options.time_rounds),
      has_deltas_(has_deltas),
      graph_(std::make_shared<RefitGraph>()),
      direct_multiprocessors_(direct_multiprocessors) {
  for (const RoundWork& work : schedule.rounds()) {
    range_texts_.emplace_back(work.index, work.route, work.mechanism);
  }
  transport_.OnBreak([graph = graph_] { graph->Drop(); });
}

RefitEnqueuer::~RefitEnqueuer() { graph_->Drop(); }

absl::Status RefitEnqueuer::CreateStreams() {
  absl::Status status;
  const auto make = [&](auto& target, auto made) {
    Take(std::move(made), target, status);
  };
  const auto make_lane = [&](Lane lane) {
    make(streams_[static_cast<size_t>(lane)], device_.CreateStream());
  };
  make_lane(Lane::kPack);
  make_lane(Lane::kUnpack);
  if (schedule_.SharesGpu()) make_lane(Lane::kBeside);
  if (!schedule_.quantizes().empty()) make_lane(Lane::kQuantize);
  make(lane_ended_, device_.CreateEvent());
  make(ended_, device_.CreateEvent());
  if (times_rounds_) make(origin_, device_.CreateTimer());
  if (has_deltas_) {
    make(count_stream_, device_.CreateStream());
    make(came_here_, device_.CreateEvent());
    make(counted_, device_.CreateEvent());
    make(find_timer_, device_.CreateTimer());
  }
  return status;
}

absl::Status RefitEnqueuer::Prepare(BoundRounds& rounds) {
  absl::Status status;
  for (const bool stores : StoresOf(rounds)) {
    rounds.lists.push_back(ListStepsOf(rounds, stores,
                                       /*digests=*/std::nullopt,
                                       /*check=*/nullptr));
    status.Update(ReserveFor(rounds.lists.back()));
  }
  return status;
}

void RefitEnqueuer::Bind(BoundRounds rounds) {
  check_ = nullptr;
  chosen_ = nullptr;
  DropGraph();
  rounds_ = std::move(rounds);
  Record();
}

absl::Status RefitEnqueuer::PrepareCheck(const StateCheck& check) {
  absl::Status status;
  chosen_ = nullptr;
  const auto erase = [this] {
    std::erase_if(rounds_.lists,
                  [](const RefitSteps& list) { return list.checks; });
  };
  erase();  // those of an earlier check
  for (const bool stores : StoresOf(rounds_)) {
    for (const auto& digests :
         {std::optional(check.digests()), std::optional<StepDigests>()}) {
      // Encoding and applying take all of the GPU, which other rounds do not.
      if (!digests.has_value() && rounds_.delta.staged == nullptr) continue;
      rounds_.lists.push_back(ListStepsOf(rounds_, stores, digests, &check));
      status.Update(ReserveFor(rounds_.lists.back()));
    }
  }
  if (!status.ok()) erase();
  return status;
}

RefitSteps RefitEnqueuer::ListStepsOf(const BoundRounds& rounds, bool stores,
                                      std::optional<StepDigests> digests,
                                      const StateCheck* check) const {
  const FusedBatches& fused = rounds.fused;
  RefitSteps list;
  list.stores = stores;
  list.checks = check != nullptr;
  list.digests_beside = digests.has_value();
  // A check reads what goes through scratch.
  list.pulls = check == nullptr || !check->DigestsScratch();
  if (list.pulls) {
    list.batches = stores ? &FusedBatches::fused : &FusedBatches::bounded;
  } else if (stores) {
    list.batches = &FusedBatches::checked;
  }
  // Elsewhere digests would hold up the rounds, on half of the GPU; behind them
  // they have all of it. Peers are told of parts all the same.
  if (digests.has_value() && !device_.OverlapsStreams()) digests->due = {};
  list.digests_early = digests.has_value() && !digests->due.empty();
  // Digests take rounds in their order.
  list.moves_beside =
      check == nullptr && device_.CopiesInBulk() &&
      std::any_of(rounds.direct_ends.begin(), rounds.direct_ends.end(),
                  [](const DirectEnds& ends) { return ends.beside; });
  StepChoices choices = {.moves_beside = list.moves_beside,
                         .digests = digests,
                         .digests_rest = list.checks,
                         .keeps = rounds.delta.staged != nullptr};
  if (list.batches != nullptr) {
    choices.is_idle = (fused.*list.batches).is_idle;
  }
  if (list.pulls) {
    choices.read_sources = fused.read_sources;
    choices.readers = fused.readers;
  }
  const std::vector<DirectEnds>& ends =
      list.pulls ? rounds.pulled_ends : rounds.direct_ends;
  list.steps = ListSteps(schedule_, ends, choices);
  // The host does one step after the other, and a message should leave as soon
  // as it is packed.
  if (!device_.IsHost()) list.steps = InIssueOrder(std::move(list.steps));
  list.is_awaited.resize(list.steps.size());
  for (size_t i = 0; i < list.steps.size(); ++i) {
    const Step& step = list.steps[i];
    if (step.kind == StepKind::kJoin) list.join = i;
    for (const uint32_t other : step.after) list.is_awaited[other] = true;
    list.is_timed.push_back(Times(step, ends));
  }
  return list;
}

bool RefitEnqueuer::Times(const Step& step,
                          absl::Span<const DirectEnds> ends) const {
  using Kind = StepKind;
  switch (step.kind) {
    case Kind::kPack:
    case Kind::kExchange:
    case Kind::kUnpack:
      return times_rounds_ || has_deltas_;
    case Kind::kQuantize:
    case Kind::kDigest:
    case Kind::kDigestRest:
    case Kind::kHooks:
      return false;
    case Kind::kZero:
    case Kind::kJoin:
    case Kind::kKeep:
      return has_deltas_;
    case Kind::kGrant:
    case Kind::kAwaitGrants:
    case Kind::kMove:
    case Kind::kProgress:
    case Kind::kFinish:
    case Kind::kAwaitFinishes:
      return (has_deltas_ && step.kind == Kind::kMove) ||
             (times_rounds_ && step.round != kNoRound &&
              ends[step.round].is_timed);
  }
  return false;
}

absl::Status RefitEnqueuer::ReserveFor(const RefitSteps& list) {
  const size_t steps = list.steps.size();
  if (events_.size() < steps) {
    events_.resize(steps);
    timers_.resize(steps);
  }
  absl::Status status;
  for (size_t i = 0; i < steps; ++i) {
    if (list.is_awaited[i] && events_[i] == nullptr) {
      Take(device_.CreateEvent(), events_[i], status);
    }
    if (list.is_timed[i] && timers_[i] == nullptr) {
      Take(device_.CreateTimer(), timers_[i], status);
    }
  }
  return status;
}

const RefitSteps& RefitEnqueuer::ChooseSteps() const {
  // Few multiprocessors store faster from scratch, in bulk.
  const bool stores =
      direct_multiprocessors_ == 0 || !rounds_.fused.in_peer_rounds;
  const bool checks = check_ != nullptr;
  // The rung is all ranks': a rank that codes nothing itself may exchange parts
  // of rounds with one that does.
  const StagedDeltas* const staged = rounds_.delta.staged.get();
  const bool codes = staged != nullptr && staged->rung() < staged->rungs();
  return *std::find_if(
      rounds_.lists.begin(), rounds_.lists.end(), [&](const RefitSteps& list) {
        return list.stores == stores && list.checks == checks &&
               list.digests_beside == (checks && !codes);
      });
}

void RefitEnqueuer::DropGraph() {
  graph_->Drop();
  is_recorded_ = false;
}

void RefitEnqueuer::Record() {
  if (!records_ || is_recorded_) return;
  is_recorded_ = true;
  recorded_multiprocessors_ = direct_multiprocessors_;
  chosen_ = &ChooseSteps();
  const uint64_t drops = graph_->Drops();
  absl::StatusOr<std::unique_ptr<DeviceGraph>> graph =
      device_.Record([&](Stream recorded) {
        return EnqueueSteps(0, chosen_->join + 1, recorded);
      });
  recorded_ = graph.status();
  if (graph.ok()) graph_->Set(*std::move(graph), drops);
}

absl::Status RefitEnqueuer::Enqueue(Stream stream,
                                    const RefitOptions& options) {
  check_ = options.check;
  enqueued_ = 0;
  counters_ = {};
  direct_multiprocessors_ = options.direct_multiprocessors;
  is_delta_ = options.rung.has_value();
  StagedDeltas* const staged = rounds_.delta.staged.get();
  if (staged != nullptr) {
    staged->Take(options.rung.value_or(staged->rungs()));
    if (!options.in_flight) codes_ = false;
    codes_ |= IsCoded();
  }
  const absl::StatusOr<bool> capturing = device_.IsCapturing(stream);
  if (!capturing.ok()) return capturing.status();
  is_captured_ = *capturing;
  absl::Status status;
  if (times_rounds_ && !is_captured_) {
    origin_seconds_ =
        std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
    status = origin_->Start(stream);
  }
  // They use the same staging. A graph may not wait for what is outside of it.
  if (options.in_flight && !is_captured_) status.Update(ended_->Await(stream));
  if (!status.ok()) return status;
  // What is recorded digests nothing.
  const bool launches = records_ && !is_captured_ && check_ == nullptr;
  if (launches) {
    if (direct_multiprocessors_ != recorded_multiprocessors_) DropGraph();
    Record();
  }
  chosen_ = &ChooseSteps();
  counters_.fused_elements =
      (chosen_->stores ? rounds_.fused.stored_elements : 0) +
      (chosen_->pulls ? rounds_.fused.pulled_elements : 0);
  // Before kZero, behind which the lane of digests begins.
  if (check_ != nullptr) status = check_->Begin(stream);
  size_t begin = 0;
  if (status.ok() && launches && graph_->IsSet()) {
    const Clock::time_point start = Clock::now();
    status = graph_->Launch(stream);
    counters_.wire_seconds += SecondsSince(start);
    counters_.graph_launches = 1;
    begin = chosen_->join + 1;
  }
  // The own post-hooks are the last step: nobody writes or reads the rank's
  // tensors any more, for the last direct round awaited the peers that did.
  if (status.ok()) status = EnqueueSteps(begin, chosen_->steps.size(), stream);
  if (!status.ok()) {
    AwaitOwnStreams(stream);
    if (Fence* const fence = transport_.fence()) fence->Withdraw();
    return status;
  }
  CountMessages();
  return is_captured_ ? absl::OkStatus() : ended_->Record(stream);
}

Stream RefitEnqueuer::StreamOf(Lane lane, Stream main) const {
  switch (lane) {
    case Lane::kMain:
      return main;
    case Lane::kDigest:
      return check_->stream();
    default:
      return streams_[static_cast<size_t>(lane)]->get();
  }
}

void RefitEnqueuer::AwaitOwnStreams(Stream stream) {
  std::array<bool, kLanes> awaited = {true};  // the main lane is `stream`
  for (size_t i = 0; i < enqueued_; ++i) {
    const Lane lane = chosen_->steps[i].lane;
    if (std::exchange(awaited[static_cast<size_t>(lane)], true)) continue;
    (void)lane_ended_->Record(StreamOf(lane, stream));
    (void)lane_ended_->Await(stream);
  }
}

absl::Status RefitEnqueuer::EnqueueSteps(size_t begin, size_t end,
                                         Stream main) {
  // By lane: the last step whose event is not recorded yet. A process with one
  // hardware queue begins nothing behind an event before that is reached, so
  // events are recorded as late as they can be.
  std::array<std::optional<size_t>, kLanes> unrecorded;
  const auto record = [&](Lane lane) {
    const std::optional<size_t> step =
        std::exchange(unrecorded[static_cast<size_t>(lane)], std::nullopt);
    return step.has_value() ? events_[*step]->Record(StreamOf(lane, main))
                            : absl::OkStatus();
  };
  std::optional<ProfilerRange> range;
  uint32_t round = kNoRound;
  for (size_t i = begin; i < end; ++i) {
    const Step& step = chosen_->steps[i];
    if (step.round != round) {
      range.reset();
      if (step.round != kNoRound) range.emplace(range_texts_[step.round]);
      round = step.round;
    }
    const Clock::time_point start = Clock::now();
    const Stream stream = StreamOf(step.lane, main);
    DeviceTimer* const timer =
        chosen_->is_timed[i] && !is_captured_ ? timers_[i].get() : nullptr;
    absl::Status status;
    for (const uint32_t other : step.after) {
      status.Update(record(chosen_->steps[other].lane));
    }
    status.Update(record(step.lane));
    for (const uint32_t other : step.after) {
      status.Update(events_[other]->Await(stream));
    }
    enqueued_ = i + 1;
    if (timer != nullptr) status.Update(timer->Start(stream));
    if (status.ok()) status = EnqueueStep(step, stream);
    if (timer != nullptr) status.Update(timer->Stop(stream));
    if (chosen_->is_awaited[i]) unrecorded[static_cast<size_t>(step.lane)] = i;
    if (!status.ok()) return status;
    if (step.round == kNoRound) continue;
    (step.kind == StepKind::kPack     ? counters_.pack_seconds
     : step.kind == StepKind::kUnpack ? counters_.unpack_seconds
                                      : counters_.wire_seconds) +=
        SecondsSince(start);
  }
  absl::Status status;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    status.Update(record(static_cast<Lane>(lane)));
  }
  return status;
}

absl::Status RefitEnqueuer::EnqueueStep(const Step& step, Stream stream) {
  Fence* const fence = transport_.fence();
  absl::Status status;
  switch (step.kind) {
    case StepKind::kZero:
      return rounds_.copies->Enqueue(RankSchedule::kFillBatch, stream);
    case StepKind::kQuantize:
      status = rounds_.copies->Enqueue(
          BatchOf(schedule_.quantizes()[*step.number].batch), stream);
      return status.ok() && check_ != nullptr
                 ? check_->EnqueueScratch(*step.number, stream)
                 : status;
    case StepKind::kPack:
    case StepKind::kExchange:
    case StepKind::kUnpack:
      return EnqueueStaged(step, stream);
    case StepKind::kGrant:
      status = fence->Grant(step.peers, stream);
      break;
    case StepKind::kAwaitGrants:
      status = fence->AwaitGrants(step.peers, stream);
      break;
    case StepKind::kMove:
      status = EnqueueMove(step, stream);
      break;
    case StepKind::kProgress:
      status = fence->Progress(step.peers, stream);
      break;
    case StepKind::kFinish:
      status = fence->Finish(step.peers, stream);
      break;
    case StepKind::kAwaitFinishes:
      status = fence->AwaitFinishes(step.peers, stream);
      break;
    case StepKind::kDigest:
      return check_->EnqueueArrived(*step.number);
    case StepKind::kJoin:
      return absl::OkStatus();
    case StepKind::kDigestRest:
      return check_->EnqueueRest(stream);
    case StepKind::kKeep:
      return EnqueueKeep(stream);
    case StepKind::kHooks:
      return rounds_.copies->Enqueue(RankSchedule::kHookBatch, stream);
  }
  if (status.ok() || step.round == kNoRound) return status;
  return absl::Status(
      status.code(),
      absl::StrCat("round ", schedule_.rounds()[step.round].index, ": ",
                   status.message()));
}

absl::Status RefitEnqueuer::EnqueueStaged(const Step& step, Stream stream) {
  const RoundWork& work = schedule_.rounds()[step.round];
  if (step.kind == StepKind::kExchange) {
    return transport_.Exchange({work.index, work.route, OperationsOf(work)},
                               stream);
  }
  const uint32_t begin = work.operations_begin, count = work.operations_count;
  const bool packs = step.kind == StepKind::kPack;
  StagedDeltas* const staged = rounds_.delta.staged.get();
  std::optional<size_t> batch = packs ? work.pack_batch : work.unpack_batch;
  if (staged != nullptr && staged->rung() < staged->rungs()) {
    const StagedDeltaBatches& batches =
        rounds_.delta.staged_batches[step.round];
    batch = (packs ? batches.pack : batches.unpack)[staged->rung()];
  }
  absl::Status status;
  if (!packs && IsCoded()) status = staged->EnqueueApply(begin, count, stream);
  if (status.ok() && batch.has_value()) {
    status = rounds_.copies->Enqueue(*batch, stream);
  }
  return status.ok() && packs && IsCoded()
             ? staged->EnqueueEncode(begin, count, stream)
             : status;
}

absl::Status RefitEnqueuer::EnqueueMove(const Step& step, Stream stream) {
  Fence& fence = *transport_.fence();
  if (absl::Status s = fence.ObserveAbort(stream); !s.ok()) return s;
  const size_t batch =
      step.round == kNoRound
          ? *rounds_.fused.pull_batch
          : BatchOf(*schedule_.rounds()[step.round].move_batch);
  const DeviceUse use = UseOf(step);
  return step.number.has_value()
             ? rounds_.copies->EnqueueStep(batch,
                                           static_cast<uint32_t>(*step.number),
                                           stream, fence.aborted(), use)
             : rounds_.copies->Enqueue(batch, stream, fence.aborted(), use);
}

DeviceUse RefitEnqueuer::UseOf(const Step& step) const {
  using Way = DeviceUse::Way;
  if (step.round == kNoRound) return AtMost(direct_multiprocessors_);
  if (step.lane == Lane::kBeside) return {.way = Way::kFew};
  if (schedule_.rounds()[step.round].route == fb::Route::kLocal) return {};
  if (direct_multiprocessors_ > 0) return AtMost(direct_multiprocessors_);
  if (chosen_->digests_early) return {.way = Way::kBesideDigests};
  // What quantizes beside rounds needs multiprocessors of its own.
  if (!schedule_.quantizes().empty()) return {};
  return {.way = chosen_->moves_beside ? Way::kMost : Way::kBulk};
}

// What the next refit of a plan with deltas needs.
absl::Status RefitEnqueuer::EnqueueKeep(Stream stream) {
  const DeltaRounds& delta = rounds_.delta;
  if (delta.compares && IsCoded() && delta.staged->ChangedLittle()) {
    return delta.staged->EnqueueKeep(stream);
  }
  return delta.after.has_value() ? rounds_.copies->Enqueue(*delta.after, stream)
                                 : absl::OkStatus();
}

absl::StatusOr<size_t> RefitEnqueuer::FindRung(Stream stream,
                                               Deadline deadline) {
  StagedDeltas* const staged = rounds_.delta.staged.get();
  if (staged == nullptr) return 0;
  const Clock::time_point start = Clock::now();
  has_found_ = false;
  // All streams of the refit come behind this one.
  absl::Status status = staged->RestartCounts(stream);
  if (!status.ok()) return status;
  // Ranks that send nothing have nothing to wait for.
  if (!schedule_.Packs()) return 0;
  status.Update(came_here_->Record(stream));
  // First alone: what stands behind work that never ends would read tensors
  // after this call.
  if (status.ok()) status = AwaitReached(*came_here_, deadline);
  if (!status.ok()) return status;
  const Stream pack = StreamOf(Lane::kPack, stream);
  status.Update(came_here_->Await(pack));
  status.Update(find_timer_->Start(pack));
  if (status.ok()) status = staged->EnqueueCount(pack);
  status.Update(find_timer_->Stop(pack));
  status.Update(counted_->Record(pack));
  if (status.ok()) status = AwaitReached(*counted_, deadline);
  if (!status.ok()) {
    (void)device_.Synchronize(pack);
    return status;
  }
  absl::StatusOr<size_t> rung = staged->FirstRung(pack);
  has_found_ = true;
  choose_seconds_ = SecondsSince(start);
  return rung;
}

absl::Status RefitEnqueuer::AwaitReached(DeviceEvent& event,
                                         Deadline deadline) {
  const Clock::time_point start = Clock::now();
  WaitReminder reminder(start);
  while (true) {
    const absl::StatusOr<bool> reached = event.Reached();
    if (!reached.ok()) return reached.status();
    if (*reached) return absl::OkStatus();
    if (absl::Status s = PollInterruption(); !s.ok()) return s;
    const Clock::time_point now = Clock::now();
    if (now > deadline) {
      return absl::DeadlineExceededError(
          "what changed was not found before the deadline: work that the "
          "stream was given before Run may not have ended");
    }
    if (reminder.IsDue(now)) {
      ReportWait(absl::StrCat("rank ", rank_), "its stream",
                 reminder.Seconds(now),
                 "it finds what changed behind what the stream was given "
                 "before Run");
    }
    std::this_thread::sleep_for(SleepAfter(now - start));
  }
}

absl::Status RefitEnqueuer::CheckCoding() {
  if (!std::exchange(codes_, false)) return absl::OkStatus();
  return rounds_.delta.staged->CheckCoding(count_stream_->get());
}

}  // namespace refit
