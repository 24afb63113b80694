// The order between ranks that are threads of one process and store into, or
// read, each other's memory (refit/fence.h): what fences of the host are made
// of.
#ifndef REFIT_EXECUTOR_DEVICE_THREAD_FENCE_H_
#define REFIT_EXECUTOR_DEVICE_THREAD_FENCE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"

namespace refit {

// One rank as its peers see it. Signals and moves are of a step; a step that
// was aborted takes no more of either. Thread-safe.
class FenceEnd {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // `peer` is here once more. What is left of its older steps is forgotten.
  void Signal(int32_t peer, uint64_t step);
  // Takes one signal of `peer`; false if none came before the deadline, the
  // abort of the step or an interruption of this thread. `report(seconds)` is
  // called when the wait is to be reported.
  bool Await(int32_t peer, uint64_t step, Deadline deadline,
             const std::function<void(int64_t)>& report);
  // Between these two the rank does not leave the step. False: it may have.
  bool BeginMoving(uint64_t step);
  void EndMoving();
  // Ends the waits of `step`, and of all before it.
  void Abort(uint64_t step);
  void AwaitAbort(uint64_t step);
  // Aborts; returns when nobody uses this rank's memory any more.
  void Leave(uint64_t step);

 private:
  struct Signals {
    uint64_t step = 0;
    uint64_t count = 0;  // not yet taken
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  // All guarded by mutex_.
  absl::flat_hash_map<int32_t, Signals> signals_;  // by peer
  size_t origins_ = 0;
  uint64_t aborted_step_ = 0;
};

// A rank's part of the fence. Used by its thread, but for waiting().
class ThreadFence {
 public:
  using Peers = absl::Span<const int32_t>;
  // `end_of(rank)`, also of this one.
  ThreadFence(int32_t rank, std::function<FenceEnd&(int32_t)> end_of)
      : rank_(rank), end_of_(std::move(end_of)) {}

  void Grant(Peers origins, uint64_t step) { Signal(origins, step); }
  // The target that did not come, or has left the step: nothing may be moved,
  // and this rank has to Leave.
  std::optional<int32_t> AwaitGrants(Peers targets, uint64_t step,
                                     FenceEnd::Deadline deadline);
  void Progress(Peers targets, uint64_t step) { Signal(targets, step); }
  void Finish(Peers targets, uint64_t step);
  // The origin that did not come: this rank has to Leave.
  std::optional<int32_t> AwaitFinishes(Peers origins, uint64_t step,
                                       FenceEnd::Deadline deadline);
  // Ends what was granted and not finished: this rank moves nothing more.
  void Withdraw();
  void Leave(uint64_t step);

  // The peer that the rank's thread waits for now. Thread-safe.
  std::optional<int32_t> waiting() const;

 private:
  void Signal(Peers peers, uint64_t step);
  bool Await(int32_t peer, uint64_t step, FenceEnd::Deadline deadline);

  const int32_t rank_;
  const std::function<FenceEnd&(int32_t)> end_of_;
  std::vector<int32_t> granting_;  // targets, between grant and finish
  std::atomic<int32_t> waiting_ = -1;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_THREAD_FENCE_H_
