// The sockets of the control plane: non-blocking, closed on exec, and quick to
// notice a host that has died.
#ifndef REFIT_CONTROL_TCP_SOCKET_H_
#define REFIT_CONTROL_TCP_SOCKET_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control/socket.h"

namespace refit::control {

using Clock = std::chrono::steady_clock;

// "host:port", as one would write it in a URL.
std::string AddressText(const std::string& host, uint16_t port);

// Whether `host` is this one's name for itself, which no other host reaches.
bool NamesLoopback(const std::string& host);

enum class Interfaces : uint8_t {
  // All of them, since a host's name need not resolve on the host itself to
  // what it does elsewhere; but the loopback interface alone if that is named.
  kAll,
  // Those that have the host's address.
  kOfHost,
};

// Listens at `port`, where `host` is this one. Its name is resolved until
// `deadline`, or for two seconds. Errors: kUnavailable; kInvalidArgument,
// `host` has no address.
absl::StatusOr<Socket> Listen(const std::string& host, uint16_t port,
                              Interfaces interfaces,
                              Clock::time_point deadline);

// Where a socket is bound.
struct Bound {
  std::string host = {};  // its address
  uint16_t port = 0;      // 0: it is not bound
};
Bound BoundTo(const Socket& socket);

// The next connection. Errors: kUnavailable, there is none; kResourceExhausted,
// this process can have no more for now.
absl::StatusOr<Socket> Accept(const Socket& listener);

// Tries each address of `host` once, until `deadline` at most. Errors:
// kInvalidArgument, `host` has no address; with the reason of the last one,
// kNotFound, nobody listens there, and kUnavailable.
absl::StatusOr<Socket> Connect(const std::string& host, uint16_t port,
                               Clock::time_point deadline);

// Error: kInvalidArgument, `host` has no address here. One that is not resolved
// within two seconds may have one.
absl::Status CheckHasAddress(const std::string& host);

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

#endif  // REFIT_CONTROL_TCP_SOCKET_H_
