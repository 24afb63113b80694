// UcxTransport: ranks are processes (or threads) that hold their tensors in
// host memory; UCX carries all messages, in shared memory inside a host, over
// TCP or RDMA between hosts.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_UCX_TRANSPORT_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_UCX_TRANSPORT_H_

#include <memory>

#include "absl/status/statusor.h"
#include "refit/control_plane.h"
#include "refit/transport.h"

namespace refit {

// libucp is taken from the process, if it is loaded there, else from the file
// that REFIT_UCX_LIBRARY names, else as the loader finds it; it is asked for
// only on ranks that send or receive. UCX reads its own variables: UCX_TLS
// chooses the ways, UCX_NET_DEVICES the network interfaces.
//
// It reaches no peer's memory: messages of direct rounds are exchanged like
// staged ones. Every call returns when its work is done.
//
// A refit that fails, or is not over at its deadline, ends on all ranks;
// Connect then makes anew the endpoints on which messages were under way. A
// rank whose process is gone is noticed by the control plane. Connect meets the
// other ranks, if that is yet to be.
absl::StatusOr<std::unique_ptr<Transport>> CreateUcxTransport(Meeting meeting);

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_UCX_TRANSPORT_H_
