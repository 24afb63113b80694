// The order between ranks that are threads of one process and store into, or
// read, each other's memory (refit/fence.h): what fences of the host are made
// of.
#ifndef REFIT_EXECUTOR_DEVICE_THREAD_FENCE_H_
#define REFIT_EXECUTOR_DEVICE_THREAD_FENCE_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "control/waiting.h"

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

// A rank's part of the fence, whose calling thread itself waits. Used by that
// thread, but for waiting(). `Base` is Fence or derives from it.
template <typename Base>
class ThreadFence : public Base {
 public:
  using Peers = absl::Span<const int32_t>;

  absl::Status Grant(Peers origins, void*) override { return Signal(origins); }
  absl::Status AwaitGrants(Peers targets, void*) override {
    for (const int32_t target : targets) {
      if (!Await(target) || !EndOf(target).BeginMoving(Step())) {
        return Absent(target);
      }
      granting_.push_back(target);
    }
    return absl::OkStatus();
  }
  absl::Status Progress(Peers targets, void*) override {
    return Signal(targets);
  }
  absl::Status Finish(Peers targets, void*) override {
    for (const int32_t target : targets) {
      granting_.erase(std::find(granting_.begin(), granting_.end(), target));
      EndOf(target).EndMoving();
    }
    return Signal(targets);
  }
  absl::Status AwaitFinishes(Peers origins, void*) override {
    for (const int32_t origin : origins) {
      if (!Await(origin)) return Absent(origin);
    }
    return absl::OkStatus();
  }
  void Withdraw() override {
    for (const int32_t target : granting_) EndOf(target).EndMoving();
    granting_.clear();
  }
  const uint32_t* aborted() const override { return nullptr; }

 protected:
  explicit ThreadFence(int32_t rank) : rank_(rank) {}

  // Of this rank, or of a peer.
  virtual FenceEnd& EndOf(int32_t rank) = 0;
  virtual uint64_t Step() const = 0;
  virtual FenceEnd::Deadline Limit() const = 0;
  // The error where `peer` did not come, or has left the step. Nothing may be
  // moved then, and this rank has to LeaveStep.
  virtual absl::Status Absent(int32_t peer) = 0;

  // Withdraws first: two ranks that leave may each be the other's origin.
  void LeaveStep() {
    Withdraw();
    EndOf(rank_).Leave(Step());
  }
  // The peer that the rank's thread waits for now; -1: none. Thread-safe.
  int32_t waiting() const { return waiting_; }

  const int32_t rank_;

 private:
  absl::Status Signal(Peers peers) {
    for (const int32_t peer : peers) EndOf(peer).Signal(rank_, Step());
    return absl::OkStatus();
  }
  bool Await(int32_t peer) {
    waiting_ = peer;
    const bool came = EndOf(rank_).Await(
        peer, Step(), Limit(), [this, peer](int64_t seconds) {
          ReportWait(RanksText({rank_}), RanksText({peer}), seconds);
        });
    waiting_ = -1;
    return came;
  }

  std::vector<int32_t> granting_;  // targets, between grant and finish
  std::atomic<int32_t> waiting_ = -1;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_THREAD_FENCE_H_
