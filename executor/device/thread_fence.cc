#include "executor/device/thread_fence.h"

#include <algorithm>

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

bool FenceEnd::Await(int32_t peer, uint64_t step, Deadline deadline) {
  bool taken = false;
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [&] {
    Signals& signals = signals_[peer];
    taken = signals.step == step && signals.count > 0;
    if (taken) --signals.count;
    return taken || step <= aborted_step_;
  });
  return taken;
}

bool FenceEnd::BeginStoring(uint64_t step) {
  std::lock_guard lock(mutex_);
  if (step <= aborted_step_) return false;
  ++writers_;
  return true;
}

void FenceEnd::EndStoring() {
  {
    std::lock_guard lock(mutex_);
    --writers_;
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
  changed_.wait(lock, [&] { return writers_ == 0; });
}

void ThreadFence::Signal(Peers peers, uint64_t step) {
  for (int32_t peer : peers) end_of_(peer).Signal(rank_, step);
}

bool ThreadFence::Await(int32_t peer, uint64_t step,
                        FenceEnd::Deadline deadline) {
  waiting_ = peer;
  const bool came = end_of_(rank_).Await(peer, step, deadline);
  waiting_ = -1;
  return came;
}

std::optional<int32_t> ThreadFence::waiting() const {
  const int32_t peer = waiting_;
  return peer < 0 ? std::nullopt : std::optional(peer);
}

std::optional<int32_t> ThreadFence::AwaitGrants(Peers receivers, uint64_t step,
                                                FenceEnd::Deadline deadline) {
  for (size_t i = 0; i < receivers.size(); ++i) {
    if (Await(receivers[i], step, deadline) &&
        end_of_(receivers[i]).BeginStoring(step)) {
      continue;
    }
    for (int32_t begun : receivers.subspan(0, i)) end_of_(begun).EndStoring();
    return receivers[i];
  }
  return std::nullopt;
}

void ThreadFence::Finish(Peers receivers, uint64_t step) {
  for (int32_t receiver : receivers) end_of_(receiver).EndStoring();
  Signal(receivers, step);
}

std::optional<int32_t> ThreadFence::AwaitFinishes(Peers senders, uint64_t step,
                                                  FenceEnd::Deadline deadline) {
  for (int32_t sender : senders) {
    if (!Await(sender, step, deadline)) return sender;
  }
  return std::nullopt;
}

}  // namespace refit
