// NcclTransport: ranks are processes (or threads) with a GPU each, NCCL carries
// staged rounds, stores into mapped memory and reads of it the direct ones.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_NCCL_TRANSPORT_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_NCCL_TRANSPORT_H_

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
  std::unique_ptr<ControlPlane> control;
  // By global rank: ranks with equal numbers share an NVLink domain. As the
  // plan's programs have it.
  std::vector<uint32_t> hosts;
};

// libnccl is taken from the process, if it is loaded there, else from the file
// that REFIT_NCCL_LIBRARY names, else as the loader finds it; it is asked for
// only when a plan has staged rounds. Communicators are non-blocking: one per
// domain for the routes inside it, one over all ranks for the network, made at
// Connect one after the other, if some rank stages there.
//
// Connect and Run leave the device the calling thread's current one.
//
// A refit that fails, or is not over at its deadline, is aborted on all ranks
// by a thread of the transport; Connect then makes everything anew.
absl::StatusOr<std::unique_ptr<Transport>> CreateNcclTransport(
    NcclOptions options);

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_NCCL_TRANSPORT_H_
