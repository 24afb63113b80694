#include "executor/device/thread_fence.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "control/waiting.h"

namespace refit {

void FenceEnd::Signal(int32_t peer, uint64_t step) {
  {
    std::lock_guard lock(mutex_);
    Signals& signals = signals_[peer];
    if (signals.step != step) signals = {.step = step};
    ++signals.count;
  }
  changed_.notify_one();
}

bool FenceEnd::Await(int32_t peer, uint64_t step, Deadline deadline,
                     const std::function<void(int64_t)>& report) {
  bool taken = false;
  std::unique_lock lock(mutex_);
  WaitUntil(
      changed_, lock, deadline,
      [&] {
        Signals& signals = signals_[peer];
        taken = signals.step == step && signals.count > 0;
        if (taken) --signals.count;
        return taken || step <= aborted_step_;
      },
      report);
  return taken;
}

bool FenceEnd::BeginMoving(uint64_t step) {
  std::lock_guard lock(mutex_);
  if (step <= aborted_step_) return false;
  ++origins_;
  return true;
}

void FenceEnd::EndMoving() {
  {
    std::lock_guard lock(mutex_);
    --origins_;
  }
  changed_.notify_one();
}

void FenceEnd::Abort(uint64_t step) {
  {
    std::lock_guard lock(mutex_);
    aborted_step_ = std::max(aborted_step_, step);
  }
  changed_.notify_all();
}

void FenceEnd::AwaitAbort(uint64_t step) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return step <= aborted_step_; });
}

void FenceEnd::Leave(uint64_t step) {
  Abort(step);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return origins_ == 0; });
}

void ThreadFence::Signal(Peers peers, uint64_t step) {
  for (int32_t peer : peers) end_of_(peer).Signal(rank_, step);
}

bool ThreadFence::Await(int32_t peer, uint64_t step,
                        FenceEnd::Deadline deadline) {
  waiting_ = peer;
  const auto report = [this, peer](int64_t seconds) {
    ReportWait(absl::StrCat("rank ", rank_), absl::StrCat("rank ", peer),
               seconds);
  };
  const bool came = end_of_(rank_).Await(peer, step, deadline, report);
  waiting_ = -1;
  return came;
}

std::optional<int32_t> ThreadFence::waiting() const {
  const int32_t peer = waiting_;
  return peer < 0 ? std::nullopt : std::optional(peer);
}

std::optional<int32_t> ThreadFence::AwaitGrants(Peers targets, uint64_t step,
                                                FenceEnd::Deadline deadline) {
  for (const int32_t target : targets) {
    if (!Await(target, step, deadline) || !end_of_(target).BeginMoving(step)) {
      return target;
    }
    granting_.push_back(target);
  }
  return std::nullopt;
}

void ThreadFence::Finish(Peers targets, uint64_t step) {
  for (const int32_t target : targets) {
    granting_.erase(std::find(granting_.begin(), granting_.end(), target));
    end_of_(target).EndMoving();
  }
  Signal(targets, step);
}

void ThreadFence::Withdraw() {
  for (const int32_t target : granting_) end_of_(target).EndMoving();
  granting_.clear();
}

// Withdraws first: two ranks that leave may each be the other's origin.
void ThreadFence::Leave(uint64_t step) {
  Withdraw();
  end_of_(rank_).Leave(step);
}

std::optional<int32_t> ThreadFence::AwaitFinishes(Peers origins, uint64_t step,
                                                  FenceEnd::Deadline deadline) {
  for (int32_t origin : origins) {
    if (!Await(origin, step, deadline)) return origin;
  }
  return std::nullopt;
}

}  // namespace refit
