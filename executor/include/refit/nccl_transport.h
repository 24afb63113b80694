// NcclTransport: ranks are processes (or threads) with a GPU each. NCCL carries
// staged rounds; direct rounds store into mapped memory or read it.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_NCCL_TRANSPORT_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_NCCL_TRANSPORT_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "refit/control_plane.h"
#include "refit/transport.h"

namespace refit {

struct NcclOptions {
  Device* device = nullptr;  // must outlive the transport
  Meeting meeting;           // Connect meets the others, if that is yet to be
  // By global rank, world_size of them: the plan's hosts (RankProgram.host).
  // Ranks with equal numbers share a host.
  std::vector<uint32_t> hosts;
  // What tells the host of this rank from others; empty: the machine it runs
  // on, or what NCCL_HOSTID says. Connect compares `hosts` with it.
  std::string host = "";
  // How long an abort of NCCL may take. A communicator whose abort takes longer
  // is left behind, with a thread, so that this rank's calls return; Connect
  // waits for the abort again, until its deadline.
  // How long peers may take, too, to stop using this rank's memory when a refit
  // has failed.
  std::chrono::milliseconds abort_time{30'000};
};

// The transport uses the libnccl that the process has loaded, else the file
// that REFIT_NCCL_LIBRARY names, else what the loader finds. Plans without
// staged rounds need none. Communicators are non-blocking. Connect makes them
// one after the other: one per domain whose ranks stage inside it, and one over
// all ranks if any stages between domains.
//
// Connect and Run leave the device the calling thread's current one.
//
// A thread of the transport aborts a refit that fails or misses its deadline,
// on all ranks. Connect then makes everything anew.
absl::StatusOr<std::unique_ptr<Transport>> CreateNcclTransport(
    NcclOptions options);

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_NCCL_TRANSPORT_H_
