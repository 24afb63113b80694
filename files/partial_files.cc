#include "files/partial_files.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <future>
#include <thread>
#include <utility>

namespace refit {
namespace {

sigset_t EndingSignals() {
  sigset_t ending;
  sigemptyset(&ending);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action;
    sigaction(signal, nullptr, &action);
    if (action.sa_handler == SIG_DFL) sigaddset(&ending, signal);
  }
  return ending;
}

}  // namespace

PartialFiles& PartialFiles::OfThisProcess() {
  // Never destroyed: a signal may come while the process exits.
  static auto* const files = new PartialFiles;
  return *files;
}

void PartialFiles::Add(const std::string& path) {
  const std::lock_guard lock(mutex_);
  paths_.insert(path);
}

void PartialFiles::Remove(const std::string& path) {
  const std::lock_guard lock(mutex_);
  paths_.erase(path);
}

std::unique_lock<std::recursive_mutex> PartialFiles::Hold() {
  return std::unique_lock(mutex_);
}

void PartialFiles::Unlink() {
  mutex_.lock();  // and not let go of again: nobody makes another file
  for (const std::string& path : paths_) unlink(path.c_str());
}

SignalCleanup::SignalCleanup() {
  const sigset_t ending = EndingSignals();
  pthread_sigmask(SIG_BLOCK, &ending, nullptr);
  // Who forks next must find this thread waiting: a thread that still starts
  // may hold a lock that the new process would wait for, such as that of
  // AddressSanitizer's allocator.
  std::promise<void> started;
  const std::future<void> start = started.get_future();
  std::thread([ending, started = std::move(started)]() mutable {
    started.set_value();
    int signal = 0;
    if (sigwait(&ending, &signal) != 0) return;
    PartialFiles::OfThisProcess().Unlink();
    // With its default action, which ends the process.
    pthread_sigmask(SIG_UNBLOCK, &ending, nullptr);
    raise(signal);
  }).detach();
  start.wait();
  pthread_atfork(nullptr, nullptr, [] {
    const sigset_t blocked = EndingSignals();
    pthread_sigmask(SIG_UNBLOCK, &blocked, nullptr);
  });
}

}  // namespace refit
