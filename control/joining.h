// How a rank joins its meeting. Rank 0 starts the server first, unless another
// process is the host; then it joins as all others do.
#ifndef REFIT_CONTROL_JOINING_H_
#define REFIT_CONTROL_JOINING_H_

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control/frame_stream.h"
#include "control/server.h"
#include "control/tcp_socket.h"
#include "refit/control_plane.h"

namespace refit::control {

// For the server, whose clock is another. At most kRemainingMsMax.
uint64_t RemainingMs(Clock::time_point deadline);

// When to stop waiting for the server's word on `deadline`: it decides whether
// that has passed. Only if it does not answer does a rank decide alone.
Clock::time_point AnswerLimit(Clock::time_point deadline);

struct Joined {
  std::unique_ptr<ControlServer> server;  // rank 0's own; closed last
  FrameStream stream;
};

// Meets the other ranks: tries until the server welcomes this one, or refuses
// it, is gone, or the deadline has passed. Unless `ends` is null, this has the
// server end the meeting for that reason in their place. Errors: ConnectTcp's.
absl::StatusOr<Joined> Join(const TcpRendezvous& rendezvous,
                            ControlPlane::Deadline deadline,
                            const absl::Status* ends = nullptr);

}  // namespace refit::control

#endif  // REFIT_CONTROL_JOINING_H_
