// RefitEnqueuer: puts one rank's refits on streams.
#ifndef REFIT_EXECUTOR_REFIT_ENQUEUER_H_
#define REFIT_EXECUTOR_REFIT_ENQUEUER_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "executor/copies/round_copies.h"
#include "executor/delta/delta_rounds.h"
#include "executor/digest/state_check.h"
#include "executor/direct_ends.h"
#include "executor/rank_schedule.h"
#include "executor/refit_graph.h"
#include "executor/time_sum.h"
#include "refit/device.h"
#include "refit/executor.h"
#include "refit/transport.h"

namespace refit {

// What a schedule's rounds move, once the rank's tensors are known.
struct BoundRounds {
  std::vector<Operation> operations;       // RankSchedule's, with their data
  std::unique_ptr<PreparedCopies> copies;  // batches as RankSchedule's
  FusedBatches fused;                      // of `copies`
  std::vector<DirectEnds> direct_ends;     // by round of the schedule
  std::vector<DirectEnds> pulled_ends;     // where destinations pull
  DeltaRounds delta;                       // of a plan with deltas
};

// Owns the streams and events of the rounds, the graph that they are recorded
// as, and what is counted and timed of the last refit. Packing, unpacking and
// quantizing have streams of their own, so that they overlap with the wire.
//
// Nothing is allocated or waited for from CreateStreams on, but to record, and
// to find out what changed before a delta refit with staged rounds.
class RefitEnqueuer {
 public:
  // `schedule`, `device` and `transport` must outlive it. Of `options`: what
  // says how rounds are issued. `has_deltas`: refits may send only what
  // changed. `direct_multiprocessors`: what the first refit is likely to have.
  RefitEnqueuer(const RankSchedule& schedule, const ExecutorOptions& options,
                bool has_deltas, uint32_t direct_multiprocessors);
  ~RefitEnqueuer();

  absl::Status CreateStreams();

  // From now on refits move `rounds`. Records them as a graph, if all are
  // direct.
  void Bind(BoundRounds rounds);

  // Why the rounds could not be recorded, where they should have been.
  const absl::Status& recorded() const { return recorded_; }
  // The next refit records anew.
  void DropGraph();

  struct RefitOptions {
    bool in_flight = false;       // nobody has waited for the one before
    StateCheck* check = nullptr;  // unless null, digests what the refit leaves
    std::optional<size_t> rung;   // of a delta: RefitVersions'
    uint32_t direct_multiprocessors = 0;  // RunOptions'
  };
  // The first rung on which this rank can send what changed in its tensors, as
  // RefitVersions::Agree takes it. Waits until `stream` has come here, and for
  // the counts. Requires: no refit is under way.
  absl::StatusOr<size_t> FindRung(Stream stream, Deadline deadline);
  // Enqueues one refit, between the transport's BeginRefit and EndRefit.
  absl::Status Enqueue(Stream stream, const RefitOptions& options);
  // Whether what staged rounds sent and received was coded as it should be.
  // Requires: the refits that were enqueued are over on this rank.
  absl::Status CheckCoding();
  // Makes `stream` wait for what an Enqueue which failed began on streams of
  // its own: quantizing, digests, and rounds beside others.
  void AwaitOwnStreams(Stream stream);

  // Of the last Enqueue.
  const RunCounters& counters() const { return counters_; }
  // Requires: it was waited for. Empty if it was not timed.
  absl::StatusOr<std::vector<RoundMeasurement>> Measure() const;
  // What the last refit, of a plan with deltas, moved, and how long it took but
  // for its check. Requires: it was waited for.
  absl::StatusOr<DeltaReport> MeasureDelta() const;

 private:
  // A part of a round that is timed.
  struct TimedPart;
  // When what a round does is done. Only those that are needed are made.
  struct RoundEvents;
  // When the rounds that a quantize launch comes after are done, and when it
  // is.
  struct QuantizeEvents;

  // Once after each DropGraph, and where a graph is worth it.
  void Record();
  absl::Status Launch(Stream stream);
  absl::Status EnqueueRounds(Stream stream);
  absl::Status EnqueueAfter(Stream stream);
  absl::Status ForkStreams(Stream stream);
  absl::Status JoinStreams(Stream stream);
  // Those that come after `rounds_before` of the rank's rounds.
  absl::Status EnqueueQuantizes(size_t rounds_before, Stream stream);
  // The last quantize launch of the refit, up to `launch`.
  std::optional<size_t> LastLaunch(size_t launch) const;
  // Makes `stream` wait for the launches up to `launch`.
  absl::Status AwaitLaunch(size_t launch, Stream stream);
  // Decides how the refit quantizes that is enqueued next, or recorded.
  // `digests_scratch`: a check reads what goes through it.
  void Choose(bool digests_scratch);
  // The batch of the schedule as the refit does it.
  size_t BatchOf(size_t batch) const {
    return choice_ == nullptr || choice_->batches.empty()
               ? batch
               : choice_->batches[batch];
  }
  const DirectEnds& EndsOf(size_t round) const {
    return (pulls_ ? rounds_.pulled_ends : rounds_.direct_ends)[round];
  }
  // Whether the refit moves the round beside the others.
  bool IsBeside(size_t round) const {
    return moves_beside_ && EndsOf(round).beside;
  }
  // What destinations quantize from sources' tensors, behind all rounds.
  absl::Status EnqueuePulls(Stream stream);
  absl::Status AwaitQuantized(size_t round, Stream stream);
  absl::Status AwaitUnpacked(std::optional<size_t> round, Stream stream);
  absl::Status EnqueueStaged(size_t round, Stream stream);
  absl::Status AwaitStaging(size_t round, Stream stream, Stream pack);
  absl::Status AwaitReached(DeviceEvent& event, Deadline deadline);
  // Of a staged round of the refit that is enqueued.
  std::optional<size_t> PackBatch(size_t round) const;
  std::optional<size_t> UnpackBatch(size_t round) const;
  absl::Status EnqueueBatch(std::optional<size_t> batch, Stream stream);
  absl::Status EnqueueDirect(size_t round, Stream stream);
  // What this rank moves in a direct round, or a step of it.
  absl::Status EnqueueMoves(size_t round, std::optional<uint32_t> step,
                            Stream stream);
  DeviceUse UseOf(size_t round) const;
  absl::Status StartTiming(Stream stream);
  // Nothing if the refit is not timed.
  absl::Status Start(TimedPart& part, Stream stream);
  absl::Status Stop(TimedPart& part, Stream stream);
  absl::StatusOr<TimeSpan> SpanOf(const TimedPart& part) const;
  absl::Status AwaitBeside(Stream stream);
  absl::Status ReserveTimes();
  // Whether the check digests while the rounds go on: all ranks alike.
  bool DigestsBesideRounds() const;
  // Has the check digest what is whole after so many arrivals, up to a round
  // that is enqueued.
  absl::Status EnqueueDigests(size_t arrivals, Stream stream);
  void CountMessages();

  // Those of the refit that is enqueued.
  const std::vector<Operation>& operations() const {
    return rounds_.delta.staged == nullptr ? rounds_.operations
                                           : rounds_.delta.staged->operations();
  }
  absl::Span<const Operation> OperationsOf(const RoundWork& work) const {
    return absl::MakeConstSpan(operations())
        .subspan(work.operations_begin, work.operations_count);
  }
  // Whether the refit's staged messages hold only what changed.
  bool IsCoded() const {
    return rounds_.delta.staged != nullptr &&
           !rounds_.delta.staged->TakesWhole();
  }

  const RankSchedule& schedule_;
  const int32_t rank_;
  Device& device_;
  Transport& transport_;
  // Its rounds are worth a graph, and can be recorded without the peers: NCCL
  // would ask these while it records a send or a receive.
  const bool records_;
  const bool times_rounds_;
  const bool has_deltas_;

  std::unique_ptr<DeviceStream> pack_stream_;
  std::unique_ptr<DeviceStream> unpack_stream_;
  std::unique_ptr<DeviceStream> quantize_stream_;
  std::unique_ptr<DeviceStream> beside_stream_;  // of DirectEnds::beside
  std::unique_ptr<DeviceEvent> moved_beside_;
  std::unique_ptr<DeviceEvent> started_;
  // Of the last refit that was timed: its start, and when that was, in seconds
  // of the host's steady clock.
  std::unique_ptr<DeviceTimer> origin_;
  double origin_seconds_ = 0;
  std::unique_ptr<DeviceEvent> ended_;  // the last refit that was not captured
  std::vector<RoundEvents> events_;     // by round of the schedule
  std::vector<QuantizeEvents> quantize_events_;  // by launch of the schedule

  BoundRounds rounds_;
  bool is_delta_ = false;  // the last refit
  // Of a plan with deltas.
  std::unique_ptr<DeviceStream> count_stream_;  // that reads the counts
  std::unique_ptr<DeviceEvent> counted_;        // by FindRung
  bool codes_ = false;  // a refit that nobody checked yet
  std::unique_ptr<DeviceTimer> move_timer_;
  std::unique_ptr<DeviceTimer> keep_timer_;
  TimeSum find_time_;
  TimeSum encode_time_;
  TimeSum wire_time_;
  TimeSum apply_time_;
  // The transport drops it, possibly after this enqueuer's end.
  const std::shared_ptr<RefitGraph> graph_;
  bool is_recorded_ = false;               // or cannot be
  uint32_t recorded_multiprocessors_ = 0;  // direct ones, of the graph
  absl::Status recorded_;                  // how that went

  size_t quantizes_enqueued_ = 0;        // of the refit that is being enqueued
  StateCheck* check_ = nullptr;          // likewise; null: digests nothing
  DeviceEvent* unpacked_ = nullptr;      // likewise: the last one of a round
  uint32_t direct_multiprocessors_;      // of the last refit
  const BatchChoice* choice_ = nullptr;  // likewise; null: the schedule's
  bool pulls_ = false;                   // likewise: destinations read sources
  bool moves_beside_ = false;            // likewise: some DirectEnds::beside
  bool is_timed_ = false;                // the last refit
  bool is_captured_ = false;             // likewise
  RunCounters counters_;
  double choose_seconds_ = 0;  // of the last FindRung
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_REFIT_ENQUEUER_H_
