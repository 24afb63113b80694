#include "executor/device/thread_fence.h"

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

}  // namespace refit
