#include "bench/rank_processes.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace refit {

absl::Status RunRankProcesses(
    int32_t ranks,
    const std::function<absl::Status(const TcpRendezvous&)>& body) {
  absl::StatusOr<TcpRendezvous> meeting = LoopbackRendezvous(ranks);
  if (!meeting.ok()) return meeting.status();
  std::vector<pid_t> children;
  absl::Status status;
  for (int32_t rank = 1; rank < ranks && status.ok(); ++rank) {
    const pid_t child = fork();
    if (child < 0) {
      status = absl::ResourceExhaustedError(
          absl::StrCat("cannot start the process of rank ", rank, ": ",
                       std::strerror(errno)));
    } else if (child == 0) {
      meeting->rank = rank;
      std::_Exit(body(*meeting).ok() ? 0 : 1);
    } else {
      children.push_back(child);
    }
  }
  const bool all_started = status.ok();
  if (all_started) status = body(*meeting);
  for (const pid_t child : children) {
    int ended = 0;
    if (!all_started) kill(child, SIGKILL);
    waitpid(child, &ended, 0);
    if (status.ok() && ended != 0) {
      status = absl::InternalError("the process of a rank failed");
    }
  }
  return status;
}

}  // namespace refit
