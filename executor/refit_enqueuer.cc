#include "executor/refit_enqueuer.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "control/waiting.h"
#include "executor/direct_steps.h"
#include "executor/nvtx.h"

namespace refit {
namespace {

using Clock = std::chrono::steady_clock;

// 0: no bound.
DeviceUse AtMost(uint32_t multiprocessors) {
  if (multiprocessors == 0) return {};
  return {.way = DeviceUse::Way::kBulk, .at_most = multiprocessors};
}

}  // namespace

struct RefitEnqueuer::TimedPart {
  std::unique_ptr<DeviceTimer> timer;  // null: rounds are not timed
  bool is_used = false;                // by the last refit
};

struct RefitEnqueuer::RoundEvents {
  RoundRangeText range_text;
  std::unique_ptr<DeviceEvent> packed;
  std::unique_ptr<DeviceEvent> exchanged;
  std::unique_ptr<DeviceEvent> unpacked;
  std::unique_ptr<DeviceEvent> stored;  // by peers, in rounds before it
  TimedPart pack;
  TimedPart move;
  TimedPart unpack;
};

struct RefitEnqueuer::QuantizeEvents {
  std::unique_ptr<DeviceEvent> may_begin;
  std::unique_ptr<DeviceEvent> done;
};

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
  transport_.OnBreak([graph = graph_] { graph->Drop(); });
}

RefitEnqueuer::~RefitEnqueuer() { graph_->Drop(); }

absl::Status RefitEnqueuer::CreateStreams() {
  const auto make = [&](auto& target, auto made) {
    if (made.ok()) target = *std::move(made);
    return made.status();
  };
  absl::Status status = make(pack_stream_, device_.CreateStream());
  status.Update(make(unpack_stream_, device_.CreateStream()));
  if (schedule_.SharesGpu()) {
    status.Update(make(beside_stream_, device_.CreateStream()));
    status.Update(make(moved_beside_, device_.CreateEvent()));
  }
  status.Update(make(started_, device_.CreateEvent()));
  status.Update(make(ended_, device_.CreateEvent()));
  if (times_rounds_) status.Update(make(origin_, device_.CreateTimer()));
  if (has_deltas_) {
    status.Update(make(count_stream_, device_.CreateStream()));
    status.Update(make(counted_, device_.CreateEvent()));
    status.Update(make(move_timer_, device_.CreateTimer()));
    status.Update(make(keep_timer_, device_.CreateTimer()));
    status.Update(ReserveTimes());
  }
  quantize_events_.clear();
  if (!schedule_.quantizes().empty()) {
    status.Update(make(quantize_stream_, device_.CreateStream()));
  }
  for (size_t i = 0; i < schedule_.quantizes().size(); ++i) {
    QuantizeEvents& events = quantize_events_.emplace_back();
    status.Update(make(events.may_begin, device_.CreateEvent()));
    status.Update(make(events.done, device_.CreateEvent()));
  }
  events_.clear();
  for (const RoundWork& work : schedule_.rounds()) {
    RoundEvents& events = events_.emplace_back();
    events.range_text = RoundRangeText(work.index, work.route, work.mechanism);
    if (times_rounds_) {
      status.Update(make(events.move.timer, device_.CreateTimer()));
    }
    if (work.mechanism == fb::Mechanism::kDirect) continue;
    if (times_rounds_) {
      status.Update(make(events.pack.timer, device_.CreateTimer()));
      status.Update(make(events.unpack.timer, device_.CreateTimer()));
    }
    status.Update(make(events.exchanged, device_.CreateEvent()));
    if (work.relays_stored) {
      status.Update(make(events.stored, device_.CreateEvent()));
    }
    if (work.pack_batch.has_value()) {
      status.Update(make(events.packed, device_.CreateEvent()));
    }
    if (work.unpack_batch.has_value()) {
      status.Update(make(events.unpacked, device_.CreateEvent()));
    }
  }
  return status;
}

// For as many parts as a refit can have.
absl::Status RefitEnqueuer::ReserveTimes() {
  size_t staged = 0;
  size_t direct = 0;
  for (const RoundWork& work : schedule_.rounds()) {
    ++(work.mechanism == fb::Mechanism::kDirect ? direct : staged);
  }
  absl::Status status = find_time_.Reserve(1, device_);
  status.Update(encode_time_.Reserve(staged, device_));
  status.Update(wire_time_.Reserve(staged + direct * kDirectSteps, device_));
  status.Update(apply_time_.Reserve(staged, device_));
  return status;
}

void RefitEnqueuer::Bind(BoundRounds rounds) {
  check_ = nullptr;
  DropGraph();
  rounds_ = std::move(rounds);
  Record();
}

void RefitEnqueuer::DropGraph() {
  graph_->Drop();
  is_recorded_ = false;
}

void RefitEnqueuer::Record() {
  if (!records_ || is_recorded_) return;
  is_recorded_ = true;
  recorded_multiprocessors_ = direct_multiprocessors_;
  Choose(/*digests_scratch=*/false);
  const uint64_t drops = graph_->Drops();
  absl::StatusOr<std::unique_ptr<DeviceGraph>> graph =
      device_.Record([&](Stream recorded) { return EnqueueRounds(recorded); });
  moves_beside_ = false;
  recorded_ = graph.status();
  if (graph.ok()) graph_->Set(*std::move(graph), drops);
}

// What the next refit of a plan with deltas needs.
absl::Status RefitEnqueuer::EnqueueAfter(Stream stream) {
  const DeltaRounds& delta = rounds_.delta;
  if (delta.compares && IsCoded() && delta.staged->ChangedLittle()) {
    return delta.staged->EnqueueKeep(stream);
  }
  return EnqueueBatch(delta.after, stream);
}

absl::Status RefitEnqueuer::Enqueue(Stream stream,
                                    const RefitOptions& options) {
  check_ = options.check;
  unpacked_ = nullptr;
  counters_ = {};
  encode_time_.Restart();
  wire_time_.Restart();
  apply_time_.Restart();
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
  is_timed_ = times_rounds_ && !is_captured_;
  absl::Status status;
  if (is_timed_) status = StartTiming(stream);
  if (!status.ok()) return status;
  // They use the same staging. A graph may not wait for what is outside of it.
  if (options.in_flight && !*capturing) status = ended_->Await(stream);
  if (!status.ok()) return status;
  if (staged != nullptr) status = move_timer_->Start(stream);
  if (!status.ok()) return status;
  // What is recorded digests nothing.
  const bool launches = records_ && !is_captured_ && check_ == nullptr;
  if (launches) {
    if (direct_multiprocessors_ != recorded_multiprocessors_) DropGraph();
    Record();
  }
  Choose(check_ != nullptr && check_->DigestsScratch());
  if (check_ != nullptr) {
    status.Update(check_->Begin(stream));
    status.Update(EnqueueDigests(/*arrivals=*/0, stream));
  }
  if (!status.ok()) return status;
  status = launches && graph_->IsSet() ? Launch(stream) : EnqueueRounds(stream);
  if (staged != nullptr) status.Update(move_timer_->Stop(stream));
  if (status.ok() && check_ != nullptr) status = check_->End(stream);
  if (staged != nullptr && status.ok()) {
    status.Update(keep_timer_->Start(stream));
    status.Update(EnqueueAfter(stream));
    status.Update(keep_timer_->Stop(stream));
  }
  // Nobody writes or reads the rank's tensors any more: the last direct round
  // awaited the peers that did.
  if (status.ok()) {
    status = rounds_.copies->Enqueue(RankSchedule::kHookBatch, stream);
  }
  if (!status.ok()) {
    if (Fence* const fence = transport_.fence()) fence->Withdraw();
    return status;
  }
  check_ = nullptr;
  moves_beside_ = false;
  CountMessages();
  return *capturing ? absl::OkStatus() : ended_->Record(stream);
}

void RefitEnqueuer::Choose(bool digests_scratch) {
  const FusedBatches& fused = rounds_.fused;
  pulls_ = !digests_scratch;
  // Few multiprocessors store faster from scratch, in bulk.
  const bool stores = direct_multiprocessors_ == 0 || !fused.in_peer_rounds;
  if (pulls_) {
    choice_ = stores ? &fused.fused : &fused.bounded;
  } else {
    choice_ = stores ? &fused.checked : nullptr;
  }
  // Digests take rounds in their order.
  moves_beside_ =
      check_ == nullptr && device_.CopiesInBulk() &&
      std::any_of(rounds_.direct_ends.begin(), rounds_.direct_ends.end(),
                  [](const DirectEnds& e) { return e.beside; });
  counters_.fused_elements = (stores ? fused.stored_elements : 0) +
                             (pulls_ ? fused.pulled_elements : 0);
}

absl::Status RefitEnqueuer::Launch(Stream stream) {
  const Clock::time_point start = Clock::now();
  const absl::Status status = graph_->Launch(stream);
  counters_.wire_seconds += SecondsSince(start);
  counters_.graph_launches = 1;
  return status;
}

void RefitEnqueuer::AwaitOwnStreams(Stream stream) {
  if (moves_beside_) (void)AwaitBeside(stream);
  for (const QuantizeEvents& events : quantize_events_) {
    (void)events.done->Await(stream);
  }
  if (StateCheck* const check = std::exchange(check_, nullptr)) {
    check->Await(stream);
  }
}

absl::Status RefitEnqueuer::StartTiming(Stream stream) {
  for (RoundEvents& events : events_) {
    for (TimedPart* part : {&events.pack, &events.move, &events.unpack}) {
      part->is_used = false;
    }
  }
  origin_seconds_ =
      std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  return origin_->Start(stream);
}

absl::Status RefitEnqueuer::Start(TimedPart& part, Stream stream) {
  if (!is_timed_) return absl::OkStatus();
  part.is_used = true;
  return part.timer->Start(stream);
}

absl::Status RefitEnqueuer::Stop(TimedPart& part, Stream stream) {
  return is_timed_ ? part.timer->Stop(stream) : absl::OkStatus();
}

absl::StatusOr<TimeSpan> RefitEnqueuer::SpanOf(const TimedPart& part) const {
  if (!part.is_used) return TimeSpan();
  const absl::StatusOr<double> after = part.timer->SecondsAfter(*origin_);
  const absl::StatusOr<double> seconds = part.timer->Seconds();
  if (!after.ok()) return after.status();
  if (!seconds.ok()) return seconds.status();
  const double begin = origin_seconds_ + *after;
  return TimeSpan{.begin = begin, .end = begin + *seconds};
}

absl::Status RefitEnqueuer::EnqueueRounds(Stream stream) {
  quantizes_enqueued_ = 0;
  absl::Status status =
      rounds_.copies->Enqueue(RankSchedule::kFillBatch, stream);
  status.Update(ForkStreams(stream));
  for (size_t i = 0; i < schedule_.rounds().size(); ++i) {
    status.Update(EnqueueQuantizes(i, stream));
    if (!status.ok()) return status;
    const RoundWork& work = schedule_.rounds()[i];
    const ProfilerRange range(events_[i].range_text);
    status = AwaitQuantized(i, stream);
    if (!status.ok()) return status;
    status =
        work.mechanism == fb::Mechanism::kDirect
            ? EnqueueDirect(i, IsBeside(i) ? beside_stream_->get() : stream)
            : EnqueueStaged(i, stream);
    if (status.ok()) status = EnqueueDigests(ArrivalsUntil(i), stream);
    if (!status.ok()) return status;
  }
  status.Update(EnqueueQuantizes(schedule_.rounds().size(), stream));
  if (status.ok() && pulls_) status = EnqueuePulls(stream);
  status.Update(JoinStreams(stream));
  return status;
}

// Only streams that will be waited for: one that is not would be left open when
// the caller's stream is captured.
absl::Status RefitEnqueuer::ForkStreams(Stream stream) {
  absl::Status status = started_->Record(stream);
  if (schedule_.Packs()) status.Update(started_->Await(pack_stream_->get()));
  if (schedule_.Unpacks()) {
    status.Update(started_->Await(unpack_stream_->get()));
  }
  if (!quantize_events_.empty() &&
      LastLaunch(quantize_events_.size() - 1).has_value()) {
    status.Update(started_->Await(quantize_stream_->get()));
  }
  if (moves_beside_) status.Update(started_->Await(beside_stream_->get()));
  return status;
}

absl::Status RefitEnqueuer::JoinStreams(Stream stream) {
  absl::Status status;
  for (const RoundEvents& events : events_) {
    if (events.unpacked != nullptr) {
      status.Update(events.unpacked->Await(stream));
    }
  }
  if (!quantize_events_.empty()) {
    status.Update(AwaitLaunch(quantize_events_.size() - 1, stream));
  }
  if (moves_beside_) status.Update(AwaitBeside(stream));
  return status;
}

absl::Status RefitEnqueuer::AwaitBeside(Stream stream) {
  const absl::Status status = moved_beside_->Record(beside_stream_->get());
  return status.ok() ? moved_beside_->Await(stream) : status;
}

std::optional<size_t> RefitEnqueuer::LastLaunch(size_t launch) const {
  if (choice_ == nullptr || choice_->is_idle.empty()) return launch;
  for (size_t i = launch + 1; i-- > 0;) {
    if (!choice_->is_idle[i]) return i;
  }
  return std::nullopt;
}

// A graph may not wait for an event that the refit does not record.
absl::Status RefitEnqueuer::AwaitLaunch(size_t launch, Stream stream) {
  const std::optional<size_t> last = LastLaunch(launch);
  return last.has_value() ? quantize_events_[*last].done->Await(stream)
                          : absl::OkStatus();
}

// What read or wrote the memory before is over: packing, sends, stores from
// scratch and peers' reads of it come before a point of the caller's stream,
// like what comes into scratch; unpacking has a stream of its own.
absl::Status RefitEnqueuer::EnqueueQuantizes(size_t rounds_before,
                                             Stream stream) {
  const std::vector<QuantizeLaunch>& launches = schedule_.quantizes();
  absl::Status status;
  while (quantizes_enqueued_ < launches.size() &&
         launches[quantizes_enqueued_].after == rounds_before) {
    if (LastLaunch(quantizes_enqueued_) != quantizes_enqueued_) {
      ++quantizes_enqueued_;
      continue;
    }
    const QuantizeEvents& events = quantize_events_[quantizes_enqueued_];
    const Stream quantize = quantize_stream_->get();
    status.Update(events.may_begin->Record(stream));
    status.Update(events.may_begin->Await(quantize));
    for (size_t round = rounds_before; round-- > 0;) {
      if (events_[round].unpacked == nullptr) continue;
      status.Update(events_[round].unpacked->Await(quantize));
      break;
    }
    status.Update(rounds_.copies->Enqueue(
        BatchOf(launches[quantizes_enqueued_].batch), quantize));
    if (check_ != nullptr) {
      status.Update(check_->EnqueueScratch(quantizes_enqueued_, quantize));
    }
    status.Update(events.done->Record(quantize));
    ++quantizes_enqueued_;
  }
  return status;
}

absl::Status RefitEnqueuer::AwaitQuantized(size_t round, Stream stream) {
  const std::vector<RoundWork>& works = schedule_.rounds();
  const std::optional<size_t> quantized = works[round].quantized;
  if (!quantized.has_value() ||
      (round > 0 && works[round - 1].quantized == quantized)) {
    return absl::OkStatus();
  }
  return AwaitLaunch(*quantized, stream);
}

void RefitEnqueuer::CountMessages() {
  for (const RoundWork& work : schedule_.rounds()) {
    ++counters_.rounds;
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const uint32_t number = work.operations_begin + i;
      const Operation& operation = operations()[number];
      Traffic& traffic =
          counters_.by(schedule_.RouteOf(number), work.mechanism);
      if (operation.kind == fb::MessageKind::kSend) {
        ++counters_.messages_sent;
        counters_.bytes_sent += operation.size_bytes;
        traffic.bytes_sent += operation.size_bytes;
      } else {
        ++counters_.messages_received;
        counters_.bytes_received += operation.size_bytes;
        traffic.bytes_received += operation.size_bytes;
      }
    }
  }
}

absl::Status RefitEnqueuer::AwaitUnpacked(std::optional<size_t> round,
                                          Stream stream) {
  return round.has_value() ? events_[*round].unpacked->Await(stream)
                           : absl::OkStatus();
}

std::optional<size_t> RefitEnqueuer::PackBatch(size_t round) const {
  const StagedDeltas* const staged = rounds_.delta.staged.get();
  return staged != nullptr && staged->rung() < staged->rungs()
             ? rounds_.delta.staged_batches[round].pack[staged->rung()]
             : schedule_.rounds()[round].pack_batch;
}

std::optional<size_t> RefitEnqueuer::UnpackBatch(size_t round) const {
  const StagedDeltas* const staged = rounds_.delta.staged.get();
  return staged != nullptr && staged->rung() < staged->rungs()
             ? rounds_.delta.staged_batches[round].unpack[staged->rung()]
             : schedule_.rounds()[round].unpack_batch;
}

absl::Status RefitEnqueuer::EnqueueBatch(std::optional<size_t> batch,
                                         Stream stream) {
  return batch.has_value() ? rounds_.copies->Enqueue(*batch, stream)
                           : absl::OkStatus();
}

absl::StatusOr<size_t> RefitEnqueuer::FindRung(Stream stream,
                                               Deadline deadline) {
  StagedDeltas* const staged = rounds_.delta.staged.get();
  if (staged == nullptr) return 0;
  const Clock::time_point start = Clock::now();
  find_time_.Restart();
  // All streams of the refit come behind this one.
  absl::Status status = staged->RestartCounts(stream);
  if (!status.ok()) return status;
  // Ranks that send nothing have nothing to wait for.
  if (!schedule_.Packs()) return 0;
  status.Update(started_->Record(stream));
  // First alone: what stands behind work that never ends would read tensors
  // after this call.
  if (status.ok()) status = AwaitReached(*started_, deadline);
  if (!status.ok()) return status;
  const Stream pack = pack_stream_->get();
  status.Update(started_->Await(pack));
  if (status.ok()) {
    status = find_time_.Time(pack, [&] { return staged->EnqueueCount(pack); });
  }
  status.Update(counted_->Record(pack));
  if (status.ok()) status = AwaitReached(*counted_, deadline);
  if (!status.ok()) {
    (void)device_.Synchronize(pack);
    return status;
  }
  absl::StatusOr<size_t> rung = staged->FirstRung(pack);
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

// Makes `pack` wait until the round may be packed.
absl::Status RefitEnqueuer::AwaitStaging(size_t round, Stream stream,
                                         Stream pack) {
  const RoundWork& work = schedule_.rounds()[round];
  const RoundEvents& events = events_[round];
  absl::Status status;
  if (work.reuses.has_value()) {
    status.Update(events_[*work.reuses].exchanged->Await(pack));
  }
  status.Update(AwaitUnpacked(work.reuses_unpacked, pack));
  // A relay packs what it unpacked.
  status.Update(AwaitUnpacked(work.relays, pack));
  if (events.stored != nullptr) {
    status.Update(events.stored->Record(stream));
    status.Update(events.stored->Await(pack));
  }
  if (work.quantized.has_value()) {
    status.Update(AwaitLaunch(*work.quantized, pack));
  }
  return status;
}

// Pack, exchange and unpack each go on as soon as what they read is there and
// what they overwrite is no longer needed; rounds within the plan's slots
// overlap.
absl::Status RefitEnqueuer::EnqueueStaged(size_t round, Stream stream) {
  const RoundWork& work = schedule_.rounds()[round];
  RoundEvents& events = events_[round];
  absl::Status status;
  Clock::time_point start = Clock::now();
  if (work.pack_batch.has_value()) {
    const Stream pack = pack_stream_->get();
    status.Update(AwaitStaging(round, stream, pack));
    status.Update(Start(events.pack, pack));
    if (status.ok()) {
      status = encode_time_.Time(pack, [&] {
        const absl::Status packed = EnqueueBatch(PackBatch(round), pack);
        return packed.ok() && IsCoded()
                   ? rounds_.delta.staged->EnqueueEncode(
                         work.operations_begin, work.operations_count, pack)
                   : packed;
      });
    }
    status.Update(Stop(events.pack, pack));
    status.Update(events.packed->Record(pack));
    status.Update(events.packed->Await(stream));
    counters_.pack_seconds += SecondsSince(std::exchange(start, Clock::now()));
  }
  status.Update(AwaitUnpacked(work.reuses_unpacked, stream));
  status.Update(Start(events.move, stream));
  if (!status.ok()) return status;
  status = wire_time_.Time(stream, [&] {
    return transport_.Exchange({.index = work.index,
                                .route = work.route,
                                .operations = OperationsOf(work)},
                               stream);
  });
  if (!status.ok()) return status;
  status = Stop(events.move, stream);
  status.Update(events.exchanged->Record(stream));
  counters_.wire_seconds += SecondsSince(std::exchange(start, Clock::now()));
  if (!work.unpack_batch.has_value()) return status;
  const Stream unpack = unpack_stream_->get();
  status.Update(events.exchanged->Await(unpack));
  status.Update(Start(events.unpack, unpack));
  if (status.ok()) {
    status = apply_time_.Time(unpack, [&] {
      const absl::Status applied =
          IsCoded() ? rounds_.delta.staged->EnqueueApply(
                          work.operations_begin, work.operations_count, unpack)
                    : absl::OkStatus();
      return applied.ok() ? EnqueueBatch(UnpackBatch(round), unpack) : applied;
    });
  }
  if (!status.ok()) return status;
  status.Update(Stop(events.unpack, unpack));
  status.Update(events.unpacked->Record(unpack));
  unpacked_ = events.unpacked.get();
  counters_.unpack_seconds += SecondsSince(start);
  return status;
}

// Ranks whose tensors others store into or read say that these may, the others
// do so, then say that they are done. A grant stands for what is read too, so
// it waits for what other streams put in place.
absl::Status RefitEnqueuer::EnqueueDirect(size_t round, Stream stream) {
  const RoundWork& work = schedule_.rounds()[round];
  const DirectEnds& ends = EndsOf(round);
  TimedPart& measured = events_[round].move;
  Fence& fence = *transport_.fence();
  const Clock::time_point start = Clock::now();
  absl::Status status;
  status.Update(AwaitUnpacked(work.relays, stream));
  if (ends.is_timed) status.Update(Start(measured, stream));
  if (!ends.grant.empty()) status.Update(fence.Grant(ends.grant, stream));
  if (!ends.await_grants.empty()) {
    status.Update(fence.AwaitGrants(ends.await_grants, stream));
  }
  if (DigestsBesideRounds() && check_->reports(round).IsStepped()) {
    const StepReports& reports = check_->reports(round);
    for (uint32_t step = 0; step < kDirectSteps && status.ok(); ++step) {
      if (ends.moves) status = EnqueueMoves(round, step, stream);
      if (!reports.targets.empty() && status.ok()) {
        status = fence.Progress(reports.targets, stream);
      }
      if (!reports.origins.empty() && status.ok()) {
        status = fence.AwaitFinishes(reports.origins, stream);
      }
      // Behind the last one others may still have to finish.
      if (step + 1 < kDirectSteps && status.ok()) {
        status = EnqueueDigests(ArrivalsUntil(round, step), stream);
      }
    }
  } else if (ends.moves && status.ok()) {
    status = EnqueueMoves(round, /*step=*/std::nullopt, stream);
  }
  if (!ends.finish.empty() && status.ok()) {
    status.Update(fence.Finish(ends.finish, stream));
  }
  if (!ends.await_finishes.empty() && status.ok()) {
    status.Update(fence.AwaitFinishes(ends.await_finishes, stream));
  }
  if (ends.is_timed) status.Update(Stop(measured, stream));
  counters_.wire_seconds += SecondsSince(start);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("round ", work.index, ": ",
                                                  status.message()));
}

DeviceUse RefitEnqueuer::UseOf(size_t round) const {
  using Way = DeviceUse::Way;
  if (IsBeside(round)) return {.way = Way::kFew};
  if (schedule_.rounds()[round].route == fb::Route::kLocal) return {};
  if (direct_multiprocessors_ > 0) return AtMost(direct_multiprocessors_);
  if (DigestsBesideRounds()) return {.way = Way::kBesideDigests};
  // What quantizes beside rounds needs multiprocessors of its own.
  if (!schedule_.quantizes().empty()) return {};
  return {.way = moves_beside_ ? Way::kMost : Way::kBulk};
}

absl::Status RefitEnqueuer::EnqueueMoves(size_t round,
                                         std::optional<uint32_t> step,
                                         Stream stream) {
  const RoundWork& work = schedule_.rounds()[round];
  Fence& fence = *transport_.fence();
  const uint32_t* const aborted = fence.aborted();
  const DeviceUse use = UseOf(round);
  const size_t batch = BatchOf(*work.move_batch);
  if (absl::Status s = fence.ObserveAbort(stream); !s.ok()) return s;
  return wire_time_.Time(stream, [&] {
    return step.has_value()
               ? rounds_.copies->EnqueueStep(batch, *step, stream, aborted, use)
               : rounds_.copies->Enqueue(batch, stream, aborted, use);
  });
}

// Encoding and applying take all of the GPU, which other rounds do not. The
// rung is all ranks': a rank that codes nothing itself may exchange steps with
// one that does.
bool RefitEnqueuer::DigestsBesideRounds() const {
  const StagedDeltas* const staged = rounds_.delta.staged.get();
  const bool codes = staged != nullptr && staged->rung() < staged->rungs();
  return check_ != nullptr && !codes;
}

absl::Status RefitEnqueuer::EnqueueDigests(size_t arrivals, Stream stream) {
  return DigestsBesideRounds()
             ? check_->EnqueueArrived(arrivals, stream, unpacked_)
             : absl::OkStatus();
}

absl::Status RefitEnqueuer::EnqueuePulls(Stream stream) {
  const FusedBatches& fused = rounds_.fused;
  if (fused.readers.empty() && fused.read_sources.empty()) {
    return absl::OkStatus();
  }
  Fence& fence = *transport_.fence();
  absl::Status status;
  if (!fused.readers.empty()) {
    status = fence.Grant(fused.readers, stream);
    if (status.ok()) status = fence.AwaitFinishes(fused.readers, stream);
  }
  if (!fused.read_sources.empty() && status.ok()) {
    status = fence.AwaitGrants(fused.read_sources, stream);
    if (status.ok()) status = fence.ObserveAbort(stream);
    if (!status.ok()) return status;
    status = rounds_.copies->Enqueue(*fused.pull_batch, stream, fence.aborted(),
                                     AtMost(direct_multiprocessors_));
    if (status.ok()) status = fence.Finish(fused.read_sources, stream);
  }
  return status;
}

absl::StatusOr<DeltaReport> RefitEnqueuer::MeasureDelta() const {
  const StagedDeltas& staged = *rounds_.delta.staged;
  DeltaReport report;
  report.elements = staged.elements();
  report.stored_bytes = StagedSendBytes(schedule_, operations());
  report.dense_bytes = StagedSendBytes(schedule_, rounds_.operations);
  if (is_delta_) {
    report.changed_elements = staged.changed_elements();
    report.rung = staged.elements_per_slot();
    report.move_seconds = choose_seconds_;
  }
  absl::Status status;
  const auto add = [&](const absl::StatusOr<double>& measured,
                       double& seconds) {
    if (measured.ok()) seconds += *measured;
    status.Update(measured.status());
  };
  add(move_timer_->Seconds(), report.move_seconds);
  add(keep_timer_->Seconds(), report.keep_seconds);
  if (is_delta_) add(find_time_.Seconds(), report.find_seconds);
  add(encode_time_.Seconds(), report.encode_seconds);
  add(wire_time_.Seconds(), report.wire_seconds);
  add(apply_time_.Seconds(), report.apply_seconds);
  if (!status.ok()) return status;
  return report;
}

absl::StatusOr<std::vector<RoundMeasurement>> RefitEnqueuer::Measure() const {
  std::vector<RoundMeasurement> measured;
  if (!is_timed_) return measured;
  for (size_t round = 0; round < schedule_.rounds().size(); ++round) {
    const RoundWork& work = schedule_.rounds()[round];
    RoundMeasurement& of = measured.emplace_back();
    of.round = work.index;
    of.route = work.route;
    of.mechanism = work.mechanism;
    const RoundEvents& events = events_[round];
    for (const auto& [part, span] :
         {std::pair(&events.pack, &of.pack), std::pair(&events.move, &of.move),
          std::pair(&events.unpack, &of.unpack)}) {
      const absl::StatusOr<TimeSpan> timed = SpanOf(*part);
      if (!timed.ok()) return timed.status();
      *span = *timed;
    }
    of.seconds = std::max(of.move.end, of.unpack.end) -
                 (events.pack.is_used ? of.pack : of.move).begin;
    for (const Operation& operation : OperationsOf(work)) {
      const bool send = operation.kind == fb::MessageKind::kSend;
      (send ? of.bytes_sent : of.bytes_received) += operation.size_bytes;
    }
  }
  return measured;
}

}  // namespace refit
