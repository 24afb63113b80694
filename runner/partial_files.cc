#include "runner/partial_files.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <thread>

namespace refit {

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

SignalCleanup::SignalCleanup() {
  sigset_t ending;
  sigemptyset(&ending);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action;
    sigaction(signal, nullptr, &action);
    if (action.sa_handler == SIG_DFL) sigaddset(&ending, signal);
  }
  pthread_sigmask(SIG_BLOCK, &ending, nullptr);
  std::thread([ending] {
    int signal = 0;
    if (sigwait(&ending, &signal) != 0) return;
    PartialFiles& files = PartialFiles::OfThisProcess();
    // Not let go of again: nobody makes another file.
    files.mutex_.lock();
    for (const std::string& path : files.paths_) unlink(path.c_str());
    // With its default action, which ends the process.
    pthread_sigmask(SIG_UNBLOCK, &ending, nullptr);
    raise(signal);
  }).detach();
}

}  // namespace refit
