#include "control/socket.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace refit {
namespace {

// The sockets that a child after fork is not to have. An open copy of one there
// would hide from the other end that this process is gone.
struct Kept {
  std::mutex mutex;  // also held while one is closed, and while a child is made
  std::set<int> sockets;
};
Kept& TheKept() {
  static Kept& kept = *new Kept;  // forks and threads may outlive statics
  static const int handled = pthread_atfork(
      [] { TheKept().mutex.lock(); }, [] { TheKept().mutex.unlock(); },
      [] {
        // In its place, so that nobody else in the child gets its number while
        // copies of this process's objects believe to have it.
        const int empty = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
        for (const int fd : TheKept().sockets) dup3(empty, fd, O_CLOEXEC);
        close(empty);
        // The child may close these numbers behind their objects' back, and use
        // them for files of its own.
        TheKept().sockets.clear();
        TheKept().mutex.unlock();
      });
  (void)handled;  // without it, all works but that
  return kept;
}

}  // namespace

void Socket::Close() {
  if (fd() < 0) return;
  Kept& kept = TheKept();
  std::lock_guard lock(kept.mutex);
  kept.sockets.erase(fd());
  descriptor_.Close();
}

void Socket::LeaveToChildren() {
  Kept& kept = TheKept();
  std::lock_guard lock(kept.mutex);
  kept.sockets.erase(fd());
}

void Socket::KeepFromChildren() {
  if (fd() < 0) return;
  Kept& kept = TheKept();
  std::lock_guard lock(kept.mutex);
  kept.sockets.insert(fd());
}

}  // namespace refit
