// The sockets of the control plane: non-blocking, closed on exec, and quick to
// notice a host that has died.
#ifndef REFIT_EXECUTOR_TRANSPORT_TCP_SOCKET_H_
#define REFIT_EXECUTOR_TRANSPORT_TCP_SOCKET_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "executor/file_descriptor.h"

namespace refit::control {

using Clock = std::chrono::steady_clock;

using Socket = FileDescriptor;

// "host:port", as one would write it in a URL.
std::string AddressText(const std::string& host, uint16_t port);

// Listens at `port`: of the loopback interface if `host` names it, so that no
// one else can reach it, otherwise of all interfaces, since a host's name need
// not resolve on the host itself to what it does elsewhere. Error:
// kUnavailable.
absl::StatusOr<Socket> Listen(const std::string& host, uint16_t port);

// The next connection. Errors: kUnavailable, there is none; kResourceExhausted,
// this process can have no more for now.
absl::StatusOr<Socket> Accept(const Socket& listener);

// Tries each address of `host` once, until `deadline` at most. Errors:
// kInvalidArgument, `host` has no address; kUnavailable, with the reason of the
// last one.
absl::StatusOr<Socket> Connect(const std::string& host, uint16_t port,
                               Clock::time_point deadline);

// Two ends that are connected with each other.
absl::StatusOr<std::pair<Socket, Socket>> ConnectedPair();

// Makes room for about `count` descriptors in this process, as far as its hard
// limit allows. Error: kResourceExhausted, it is below `count_min`.
absl::Status AllowDescriptors(uint64_t count, uint64_t count_min);

// For poll(): rounded up, and at most a minute.
int MillisecondsUntil(Clock::time_point deadline);

// Waits until `events` (of poll) or an error. Returns false at the deadline.
bool Await(const Socket& socket, short events, Clock::time_point deadline);

// The same of a wait that this thread's interruption ends: false then too.
bool AwaitUnlessInterrupted(const Socket& socket, short events,
                            Clock::time_point deadline);

}  // namespace refit::control

#endif  // REFIT_EXECUTOR_TRANSPORT_TCP_SOCKET_H_
