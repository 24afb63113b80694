#include "executor/transport/refit_supervisor.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "control/own_thread.h"
#include "control/waiting.h"

namespace refit {
namespace {

using Clock = std::chrono::steady_clock;

// How often the thread probes a refit that is under way.
constexpr std::chrono::milliseconds kWatchPause(5);

}  // namespace

bool RefitSupervisor::IsUnderWay(RefitPhase phase) {
  switch (phase) {
    case RefitPhase::kEnqueuing:
    case RefitPhase::kEnqueued:
    case RefitPhase::kOver:
    case RefitPhase::kStopping:
      return true;
    case RefitPhase::kTorn:
    case RefitPhase::kIdle:
    case RefitPhase::kEntering:
    case RefitPhase::kDeciding:
      break;
  }
  return false;
}

absl::Status RefitSupervisor::Start() {
  if (thread_.joinable()) return absl::OkStatus();
  return StartThread(thread_, "the thread that watches refits",
                     [this] { Watch(); });
}

void RefitSupervisor::Close() {
  {
    std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  Lock lock(mutex_);
  if (!IsUnderWay()) return;
  // The others are in this refit, and some may use this rank's memory.
  SetFailure(absl::CancelledError("closed before Wait"));
  Stop(lock);
}

RefitPhase RefitSupervisor::phase() {
  std::lock_guard lock(mutex_);
  return phase_;
}

absl::Status RefitSupervisor::failure() {
  std::lock_guard lock(mutex_);
  return failure_;
}

absl::Status RefitSupervisor::Enter(Deadline deadline, StepPurpose purpose) {
  Lock lock(mutex_);
  if (!failure_.ok()) {
    if (absl::Status s = AwaitStopped(lock, deadline); !s.ok()) {
      FailNextStep(lock, s);
      return s;
    }
  }
  EnterStep(lock, purpose);
  return absl::OkStatus();
}

void RefitSupervisor::EnterStep(Lock& lock, StepPurpose purpose) {
  changed_.wait(lock, [&] {
    const bool is_stopped = !IsUnderWay() || failure_.ok();
    return telling_ == 0 && (is_stopped || !thread_.joinable());
  });
  const RefitPhase before = std::exchange(phase_, RefitPhase::kEntering);
  lock.unlock();
  const uint64_t step = actions_.begin_step(purpose);
  lock.lock();
  // A refit that goes on fails with the step that it began in, also if that is
  // heard of while this rank leaves it.
  const bool is_carried = IsUnderWay(before) && !failure_.ok();
  if (!is_carried) {
    failure_ = heard_step_ == step ? heard_ : absl::OkStatus();
  }
  is_untold_ = is_carried;
  step_ = step;
  phase_ = before;
  changed_.notify_all();
}

absl::Status RefitSupervisor::Disconnect(Deadline deadline) {
  Lock lock(mutex_);
  if (IsUnderWay()) {
    SetFailure(absl::CancelledError("connecting anew"));
    if (absl::Status s = AwaitStopped(lock, deadline); !s.ok()) return s;
  }
  phase_ = RefitPhase::kTorn;
  return absl::OkStatus();
}

void RefitSupervisor::FailNextStep(const absl::Status& status) {
  Lock lock(mutex_);
  FailNextStep(lock, status);
}

void RefitSupervisor::FailNextStep(Lock& lock, const absl::Status& status) {
  changed_.wait(lock, [&] { return telling_ == 0; });
  lock.unlock();
  const uint64_t step = actions_.begin_step(StepPurpose::kOther);
  lock.lock();
  step_ = step;
  failure_ = status;
  is_untold_ = false;
  Tell(lock, status);
}

void RefitSupervisor::Connected() {
  std::lock_guard lock(mutex_);
  phase_ = RefitPhase::kIdle;
}

absl::Status RefitSupervisor::BeginRefit(bool is_captured,
                                         const std::function<void()>& prepare) {
  Lock lock(mutex_);
  if (!IsUnderWay() || failure_.ok()) {
    EnterStep(lock, StepPurpose::kRefit);
    if (phase_ == RefitPhase::kTorn) {
      return absl::FailedPreconditionError(
          "the transport is not connected, or a refit failed since: Connect "
          "makes it whole");
    }
    prepare();
    is_captured_ = is_captured;
    phase_ = RefitPhase::kEnqueuing;
    changed_.notify_all();
    if (failure_.ok()) return absl::OkStatus();
  }
  AwaitStopped(lock);
  return failure_;
}

absl::Status RefitSupervisor::EndRefit(
    const std::function<absl::Status()>& record_end) {
  Lock lock(mutex_);
  if (!failure_.ok()) {
    AwaitStopped(lock);
    return failure_;
  }
  if (is_captured_) {
    phase_ = RefitPhase::kIdle;
    return absl::OkStatus();
  }
  absl::Status status = record_end();
  if (status.ok()) phase_ = RefitPhase::kEnqueued;
  return status;
}

absl::Status RefitSupervisor::Fail(const absl::Status& status) {
  Lock lock(mutex_);
  if (!IsUnderWay() && failure_.ok()) return status;
  SetFailure(status);
  AwaitStopped(lock);
  return failure_;
}

absl::Status RefitSupervisor::AwaitOver() {
  Lock lock(mutex_);
  AwaitOver(lock);
  if (!failure_.ok()) AwaitStopped(lock);
  return failure_;
}

void RefitSupervisor::AwaitOver(Lock& lock) {
  const Clock::time_point begin = Clock::now();
  const auto is_going_on = [&] {
    return IsUnderWay() && phase_ != RefitPhase::kOver && failure_.ok();
  };
  while (is_going_on()) {
    Probe();
    if (!is_going_on()) break;
    // A device can tell of the end itself, but takes a quarter of a
    // millisecond.
    const Clock::duration sleep = SleepAfter(Clock::now() - begin);
    if (sleep > Clock::duration::zero()) {
      changed_.wait_for(lock, sleep, [&] { return !is_going_on(); });
    }
    lock.unlock();
    absl::Status ended = PollInterruption();
    ended.Update(actions_.device_failure());
    lock.lock();
    if (!ended.ok()) SetFailure(ended);
  }
}

absl::Status RefitSupervisor::Wait(
    const std::function<absl::Status()>& decide) {
  Lock lock(mutex_);
  AwaitOver(lock);
  if (failure_.ok()) {
    const RefitPhase before = std::exchange(phase_, RefitPhase::kDeciding);
    lock.unlock();
    const absl::Status status = decide();
    lock.lock();
    phase_ = before;
    if (!status.ok()) SetFailure(status);
  }
  if (failure_.ok()) {
    if (IsUnderWay()) phase_ = RefitPhase::kIdle;
    return absl::OkStatus();
  }
  AwaitStopped(lock);
  return failure_;
}

void RefitSupervisor::Hear(uint64_t step, const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    heard_step_ = step;
    heard_ = status;
    // EnterStep takes up what is heard of a later step.
    if (step == step_ && phase_ != RefitPhase::kDeciding) {
      SetFailure(status, /*is_untold=*/false);
    }
  }
}

void RefitSupervisor::Abort(const absl::Status& status) {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return phase_ != RefitPhase::kEntering; });
  if (phase_ == RefitPhase::kDeciding) return Tell(lock, status);
  SetFailure(status);
  TellFailure(lock);
}

// The first failure of a step counts.
void RefitSupervisor::SetFailure(const absl::Status& status, bool is_untold) {
  if (!failure_.ok()) return;
  failure_ = status;
  is_untold_ = is_untold;
  if (actions_.wake) actions_.wake();
  changed_.notify_all();
}

void RefitSupervisor::TellFailure(Lock& lock) {
  if (std::exchange(is_untold_, false)) Tell(lock, failure_);
}

void RefitSupervisor::Tell(Lock& lock, absl::Status status) {
  ++telling_;
  lock.unlock();
  actions_.tell(status);
  lock.lock();
  --telling_;
  changed_.notify_all();
}

// What is under way ends first, so that the caller may free memory. Nothing of
// a captured refit is, and its abort may wait for the graph that this thread
// has yet to end.
void RefitSupervisor::AwaitStopped(Lock& lock) {
  changed_.notify_all();
  TellFailure(lock);
  if (!thread_.joinable() && IsUnderWay()) Stop(lock);
  changed_.wait(lock, [&] { return !IsUnderWay() || is_captured_; });
}

absl::Status RefitSupervisor::AwaitStopped(Lock& lock, Deadline deadline) {
  AwaitStopped(lock);
  if (changed_.wait_until(lock, deadline, [&] { return !IsUnderWay(); })) {
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError(
      "a graph that captured the refit which failed still exists, and its "
      "abort waits for that: destroy the graph first");
}

void RefitSupervisor::Probe() {
  const absl::StatusOr<bool> is_done =
      actions_.probe(phase_ != RefitPhase::kEnqueuing);
  if (!is_done.ok()) return SetFailure(is_done.status());
  if (*is_done) phase_ = RefitPhase::kOver;
}

void RefitSupervisor::Stop(Lock& lock) {
  const bool is_enqueued = phase_ != RefitPhase::kEnqueuing;
  phase_ = RefitPhase::kStopping;
  // First: the others wait for what is ended here.
  TellFailure(lock);
  lock.unlock();
  const absl::Status stopped = actions_.stop(is_enqueued);
  lock.lock();
  if (!stopped.ok()) {
    failure_ =
        absl::Status(failure_.code(),
                     absl::StrCat(failure_.message(), "; ", stopped.message()));
  }
  phase_ = RefitPhase::kTorn;
  changed_.notify_all();
}

void RefitSupervisor::Watch() {
  actions_.begin_thread();
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] {
      return is_closing_ ||
             (IsUnderWay() && (phase_ != RefitPhase::kOver || !failure_.ok()));
    });
    if (is_closing_) return;
    if (failure_.ok()) Probe();
    if (!failure_.ok()) {
      Stop(lock);
    } else if (phase_ == RefitPhase::kOver) {
      changed_.notify_all();
    } else {
      changed_.wait_for(lock, kWatchPause);
    }
  }
}

}  // namespace refit
