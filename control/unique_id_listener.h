// Where rank 0 listens for those who have its unique id.
#ifndef REFIT_CONTROL_UNIQUE_ID_LISTENER_H_
#define REFIT_CONTROL_UNIQUE_ID_LISTENER_H_

#include "absl/status/statusor.h"
#include "control/tcp_socket.h"
#include "refit/control_plane.h"

namespace refit::control {

// The socket that the id's creation opened; if it was closed since, a new one
// at the same port. Errors: kFailedPrecondition, the id is of another process;
// kUnavailable, the port is taken.
absl::StatusOr<Socket> UniqueIdListener(const TcpRendezvous& rendezvous);

// Gives it back after a meeting. The process listens on for the next one: so
// long as it lives, nobody is told that nobody listens. Closes the socket of an
// id that this process did not create, or of a hosted meeting.
void ReturnUniqueIdListener(uint64_t id_name, Socket listener);

}  // namespace refit::control

#endif  // REFIT_CONTROL_UNIQUE_ID_LISTENER_H_
