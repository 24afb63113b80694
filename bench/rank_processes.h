// A process for each rank of this machine.
#ifndef REFIT_BENCH_RANK_PROCESSES_H_
#define REFIT_BENCH_RANK_PROCESSES_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "refit/control_plane.h"

namespace refit {

// Calls `body` once for each rank: for rank 0 in this process, for the others
// in children, which are gone when this returns. The ranks meet on the loopback
// interface. Returns rank 0's error, which tells what went wrong; or that a
// child failed. Requires: this process has one thread.
absl::Status RunRankProcesses(
    int32_t ranks,
    const std::function<absl::Status(const TcpRendezvous&)>& body);

}  // namespace refit

#endif  // REFIT_BENCH_RANK_PROCESSES_H_
