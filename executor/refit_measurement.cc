// What the last refit moved, and how long its steps took.
#include <algorithm>

#include "executor/refit_enqueuer.h"

namespace refit {

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

absl::StatusOr<double> RefitEnqueuer::SecondsOf(StepKind kind) const {
  double sum = 0;
  for (size_t i = 0; i < chosen_->steps.size(); ++i) {
    if (chosen_->steps[i].kind != kind) continue;
    const absl::StatusOr<double> seconds = timers_[i]->Seconds();
    if (!seconds.ok()) return seconds.status();
    sum += *seconds;
  }
  return sum;
}

absl::StatusOr<DeltaReport> RefitEnqueuer::MeasureDelta() const {
  const StagedDeltas& staged = *rounds_.delta.staged;
  DeltaReport report;
  report.elements = staged.elements();
  report.stored_bytes = StagedSendBytes(schedule_, operations());
  report.dense_bytes = StagedSendBytes(schedule_, rounds_.operations);
  absl::Status status;
  const auto add = [&](const absl::StatusOr<double>& measured,
                       double& seconds) {
    if (measured.ok()) seconds += *measured;
    status.Update(measured.status());
  };
  if (is_delta_) {
    report.changed_elements = staged.changed_elements();
    report.rung = staged.elements_per_slot();
    report.move_seconds = choose_seconds_;
    if (has_found_) add(find_timer_->Seconds(), report.find_seconds);
  }
  add(timers_[chosen_->join]->SecondsAfter(*timers_[0]), report.move_seconds);
  add(SecondsOf(StepKind::kJoin), report.move_seconds);
  add(SecondsOf(StepKind::kKeep), report.keep_seconds);
  add(SecondsOf(StepKind::kPack), report.encode_seconds);
  add(SecondsOf(StepKind::kExchange), report.wire_seconds);
  add(SecondsOf(StepKind::kMove), report.wire_seconds);
  add(SecondsOf(StepKind::kUnpack), report.apply_seconds);
  if (!status.ok()) return status;
  return report;
}

absl::StatusOr<TimeSpan> RefitEnqueuer::SpanOf(size_t step) const {
  const absl::StatusOr<double> after = timers_[step]->SecondsAfter(*origin_);
  const absl::StatusOr<double> seconds = timers_[step]->Seconds();
  if (!after.ok()) return after.status();
  if (!seconds.ok()) return seconds.status();
  const double begin = origin_seconds_ + *after;
  return TimeSpan{.begin = begin, .end = begin + *seconds};
}

absl::StatusOr<std::vector<RoundMeasurement>> RefitEnqueuer::Measure() const {
  std::vector<RoundMeasurement> measured;
  if (!times_rounds_ || is_captured_) return measured;
  for (const RoundWork& work : schedule_.rounds()) {
    RoundMeasurement& of = measured.emplace_back();
    of.round = work.index;
    of.route = work.route;
    of.mechanism = work.mechanism;
    for (const Operation& operation : OperationsOf(work)) {
      const bool send = operation.kind == fb::MessageKind::kSend;
      (send ? of.bytes_sent : of.bytes_received) += operation.size_bytes;
    }
  }
  for (size_t i = 0; i < chosen_->steps.size(); ++i) {
    const Step& step = chosen_->steps[i];
    if (step.round == kNoRound || !chosen_->is_timed[i]) continue;
    const absl::StatusOr<TimeSpan> timed = SpanOf(i);
    if (!timed.ok()) return timed.status();
    RoundMeasurement& of = measured[step.round];
    TimeSpan& part = step.kind == StepKind::kPack     ? of.pack
                     : step.kind == StepKind::kUnpack ? of.unpack
                                                      : of.move;
    // Steps of a lane come one after the other.
    if (part.end == 0) part.begin = timed->begin;
    part.end = timed->end;
  }
  for (RoundMeasurement& of : measured) {
    of.seconds = std::max(of.move.end, of.unpack.end) -
                 (of.pack.end > 0 ? of.pack : of.move).begin;
  }
  return measured;
}

}  // namespace refit
