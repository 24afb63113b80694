// RefitEnqueuer: puts one rank's refits on streams.
#ifndef REFIT_EXECUTOR_REFIT_ENQUEUER_H_
#define REFIT_EXECUTOR_REFIT_ENQUEUER_H_

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "executor/delta/delta_rounds.h"
#include "executor/digest/state_check.h"
#include "executor/nvtx.h"
#include "executor/refit_graph.h"
#include "plan/schedule/direct_ends.h"
#include "plan/schedule/rank_schedule.h"
#include "plan/schedule/round_copies.h"
#include "plan/schedule/steps.h"
#include "refit/device.h"
#include "refit/executor.h"
#include "refit/transport.h"

namespace refit {

// The steps of one kind of refit.
struct RefitSteps {
  // Which kind. Sources store what they quantize where it goes.
  bool stores = false;
  bool checks = false;
  bool digests_beside = false;  // the rounds

  std::vector<Step> steps;
  size_t join = 0;               // the position of kJoin
  std::vector<bool> is_awaited;  // by step: from another lane
  std::vector<bool> is_timed;    // by step, of refits that are not captured
  // What is issued in place of the schedule's batches; null: those.
  const BatchChoice FusedBatches::*batches = nullptr;
  bool pulls = false;          // destinations read sources behind the rounds
  bool moves_beside = false;   // some rounds have a lane of their own
  bool digests_early = false;  // this rank, while rounds go on
};

// What a schedule's rounds move, once the rank's tensors are known.
struct BoundRounds {
  std::vector<Operation> operations;       // RankSchedule's, with their data
  std::unique_ptr<PreparedCopies> copies;  // batches as RankSchedule's
  FusedBatches fused;                      // of `copies`
  std::vector<DirectEnds> direct_ends;     // by round of the schedule
  std::vector<DirectEnds> pulled_ends;     // where destinations pull
  DeltaRounds delta;                       // of a plan with deltas
  std::vector<RefitSteps> lists = {};      // RefitEnqueuer's
};

// Puts the steps of a refit on streams (plan/schedule/steps.h): a stream for
// each lane, an event for each step that another lane waits for. Owns these,
// the graph that steps are recorded as, and what is counted and timed of the
// last refit.
//
// From Bind on nothing is allocated or waited for, but by PrepareCheck, to
// record, and to find out what changed before a delta refit with staged rounds.
class RefitEnqueuer {
 public:
  // `schedule`, `device` and `transport` must outlive it. Of `options`: what
  // says how rounds are issued. `has_deltas`: refits may send only what
  // changed. `direct_multiprocessors`: what the first refit is likely to have.
  RefitEnqueuer(const RankSchedule& schedule, const ExecutorOptions& options,
                bool has_deltas, uint32_t direct_multiprocessors);
  ~RefitEnqueuer();

  absl::Status CreateStreams();

  // Makes what refits of `rounds` need, and leaves what is bound as it is.
  absl::Status Prepare(BoundRounds& rounds);
  // From now on refits move `rounds`, which are prepared. Records them as a
  // graph, if all are direct.
  void Bind(BoundRounds rounds);
  // Before the first refit of what is bound that `check` digests. It has to
  // live until the next Bind, unless this fails.
  absl::Status PrepareCheck(const StateCheck& check);

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
  // Of the last Enqueue.
  const RunCounters& counters() const { return counters_; }
  // Requires: it was waited for. Empty if it was not timed.
  absl::StatusOr<std::vector<RoundMeasurement>> Measure() const;
  // What the last refit, of a plan with deltas, moved, and how long it took but
  // for its check. Requires: it was waited for.
  absl::StatusOr<DeltaReport> MeasureDelta() const;

 private:
  RefitSteps ListStepsOf(const BoundRounds& rounds, bool stores,
                         std::optional<StepDigests> digests,
                         const StateCheck* check) const;
  const RefitSteps& ChooseSteps() const;
  // Makes the events and timers that the list needs.
  absl::Status ReserveFor(const RefitSteps& list);
  bool Times(const Step& step, absl::Span<const DirectEnds> ends) const;
  // Steps [begin, end) of the list. `main`: the stream of that lane.
  absl::Status EnqueueSteps(size_t begin, size_t end, Stream main);
  absl::Status EnqueueStep(const Step& step, Stream stream);
  absl::Status EnqueueStaged(const Step& step, Stream stream);
  absl::Status EnqueueMove(const Step& step, Stream stream);
  absl::Status EnqueueKeep(Stream stream);
  Stream StreamOf(Lane lane, Stream main) const;
  // Makes `stream` wait for what a refit that failed began in other lanes.
  void AwaitOwnStreams(Stream stream);
  DeviceUse UseOf(const Step& step) const;

  // Once after each DropGraph, and where a graph is worth it.
  void Record();
  absl::StatusOr<TimeSpan> SpanOf(size_t step) const;
  absl::StatusOr<double> SecondsOf(StepKind kind) const;
  absl::Status AwaitReached(DeviceEvent& event, Deadline deadline);
  void CountMessages();

  // The batch of the schedule as the refit does it.
  size_t BatchOf(size_t batch) const {
    if (chosen_->batches == nullptr) return batch;
    const BatchChoice& choice = rounds_.fused.*chosen_->batches;
    return choice.batches.empty() ? batch : choice.batches[batch];
  }
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

  std::array<std::unique_ptr<DeviceStream>, kLanes> streams_;  // own ones
  std::vector<RoundRangeText> range_texts_;                    // by round
  // By step, of those of any list that need one.
  std::vector<std::unique_ptr<DeviceEvent>> events_;
  std::vector<std::unique_ptr<DeviceTimer>> timers_;
  std::unique_ptr<DeviceEvent> lane_ended_;  // of a refit that failed
  std::unique_ptr<DeviceEvent> ended_;  // the last refit that was not captured
  // Of the last refit that was timed: its start, and when that was, in seconds
  // of the host's steady clock.
  std::unique_ptr<DeviceTimer> origin_;
  double origin_seconds_ = 0;

  BoundRounds rounds_;
  // Of a plan with deltas.
  std::unique_ptr<DeviceStream> count_stream_;  // that reads the counts
  std::unique_ptr<DeviceEvent> came_here_;      // the stream given to FindRung
  std::unique_ptr<DeviceEvent> counted_;        // by FindRung
  std::unique_ptr<DeviceTimer> find_timer_;
  bool has_found_ = false;     // the last FindRung
  double choose_seconds_ = 0;  // of the last FindRung
  bool codes_ = false;         // a refit that nobody checked yet
  // The transport drops it, possibly after this enqueuer's end.
  const std::shared_ptr<RefitGraph> graph_;
  bool is_recorded_ = false;               // or cannot be
  uint32_t recorded_multiprocessors_ = 0;  // direct ones, of the graph
  absl::Status recorded_;                  // how that went

  // Of the last refit, or the one that is being enqueued.
  const RefitSteps* chosen_ = nullptr;
  StateCheck* check_ = nullptr;
  uint32_t direct_multiprocessors_;
  size_t enqueued_ = 0;  // steps
  bool is_delta_ = false;
  bool is_captured_ = false;
  RunCounters counters_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_REFIT_ENQUEUER_H_
