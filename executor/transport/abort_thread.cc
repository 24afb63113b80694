#include "executor/transport/abort_thread.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "control/own_thread.h"

namespace refit {

struct AbortThread::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_closing = false;
  std::shared_ptr<NcclCommunicator> communicator;  // to abort

  template <typename Change>
  void Set(Change change) {
    {
      std::lock_guard lock(mutex);
      change();
    }
    changed.notify_all();
  }

  void Loop(Device& device) {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return is_closing || communicator != nullptr; });
      if (communicator == nullptr) return;
      // `Begin` may name another one, or the same again, meanwhile.
      const std::shared_ptr<NcclCommunicator> aborted = communicator;
      lock.unlock();
      (void)device.MakeThreadOwn();
      aborted->Abort();
      lock.lock();
      if (communicator == aborted) communicator = nullptr;
      changed.notify_all();
    }
  }
};

AbortThread::AbortThread() : state_(std::make_shared<State>()) {}

absl::StatusOr<std::unique_ptr<AbortThread>> AbortThread::Start(
    Device& device) {
  std::unique_ptr<AbortThread> made(new AbortThread);
  absl::Status status =
      StartThread(made->thread_, "a thread for NCCL's aborts",
                  [state = made->state_, &device] { state->Loop(device); });
  if (!status.ok()) return status;
  return made;
}

AbortThread::~AbortThread() {
  if (!thread_.joinable()) return;
  state_->Set([this] { state_->is_closing = true; });
  if (Await(std::chrono::steady_clock::now())) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void AbortThread::Begin(std::shared_ptr<NcclCommunicator> communicator) {
  state_->Set([&] { state_->communicator = std::move(communicator); });
}

bool AbortThread::Await(Deadline deadline) {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_until(
      lock, deadline, [this] { return state_->communicator == nullptr; });
}

}  // namespace refit
