// The server of a meeting in which rank 0 listens.
#ifndef REFIT_CONTROL_OWN_SERVER_H_
#define REFIT_CONTROL_OWN_SERVER_H_

#include <memory>

#include "absl/status/statusor.h"
#include "control/link.h"
#include "control/server.h"
#include "refit/control_plane.h"

namespace refit::control {

// The server, and rank 0's connection with it, which rank 0 closes first.
struct OwnServer {
  std::unique_ptr<ControlServer> server;
  Link link;
};

// Listens as `rendezvous` says, if there are other ranks, and starts the
// server. Rank 0 has yet to meet by its connection, as the others do by theirs.
// Errors: kUnavailable, the port is taken, or the host's name was not resolved
// by `deadline`; kInvalidArgument, the host has no address;
// kFailedPrecondition, the unique id is of another process; kResourceExhausted;
// that of this thread's interruption.
absl::StatusOr<OwnServer> StartServer(const TcpRendezvous& rendezvous,
                                      ControlPlane::Deadline deadline);

}  // namespace refit::control

#endif  // REFIT_CONTROL_OWN_SERVER_H_
