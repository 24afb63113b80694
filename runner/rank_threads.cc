#include "runner/rank_threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "control/own_thread.h"

namespace refit {
namespace {

// Ample for an executor's Run, also under a sanitizer.
constexpr size_t kStackBytes = size_t{1} << 20;

// The start line.
struct Gate {
  enum class State : uint8_t { kClosed, kOpen, kCancelled };

  std::mutex mutex;
  std::condition_variable changed;
  State state = State::kClosed;

  void Set(State value) {
    {
      std::lock_guard lock(mutex);
      state = value;
    }
    changed.notify_all();
  }
  bool Await() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return state != State::kClosed; });
    return state == State::kOpen;
  }
};

struct RankThread {
  Gate* gate = nullptr;
  const std::function<void(int32_t)>* body = nullptr;
  int32_t rank = 0;
  pthread_t thread{};

  static void* Main(void* argument) {
    auto* self = static_cast<RankThread*>(argument);
    if (self->gate->Await()) (*self->body)(self->rank);
    return nullptr;
  }
};

}  // namespace

absl::Status RunRankThreads(int32_t ranks,
                            const std::function<void(int32_t)>& body) {
  Gate gate;
  std::vector<RankThread> threads(ranks);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  int32_t created = 0;
  int error = 0;
  for (; created < ranks && error == 0; ++created) {
    threads[created] = {.gate = &gate, .body = &body, .rank = created};
    error = pthread_create(&threads[created].thread, &attributes,
                           RankThread::Main, &threads[created]);
    if (error != 0) break;
  }
  pthread_attr_destroy(&attributes);
  gate.Set(error == 0 ? Gate::State::kOpen : Gate::State::kCancelled);
  for (int32_t rank = 0; rank < created; ++rank) {
    pthread_join(threads[rank].thread, nullptr);
  }
  if (error == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("cannot start a thread for rank ", created, " of ", ranks,
                   ": ", std::strerror(error)));
}

void ParallelFor(size_t items, const std::function<void(size_t)>& body) {
  const size_t threads = std::min<size_t>(
      items, std::max(1u, std::thread::hardware_concurrency()));
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t item; (item = next.fetch_add(1)) < items;) body(item);
  };
  std::vector<std::thread> others;
  for (size_t i = 1; i < threads; ++i) {
    std::thread other;
    if (!StartThread(other, "a thread of a loop", work).ok()) break;
    others.push_back(std::move(other));
  }
  work();
  for (std::thread& thread : others) thread.join();
}

absl::Status MainError(absl::Span<const absl::Status> statuses) {
  for (const absl::Status& status : statuses) {
    if (!status.ok() && status.code() != absl::StatusCode::kAborted &&
        status.code() != absl::StatusCode::kUnavailable) {
      return status;
    }
  }
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace refit
