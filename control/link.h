// A rank's end of the control plane: how it gets a connection with the server,
// and how frames go over it.
#ifndef REFIT_CONTROL_LINK_H_
#define REFIT_CONTROL_LINK_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control/frame.h"
#include "control/tcp_socket.h"
#include "control/waiting.h"
#include "refit/control_plane.h"

namespace refit::control {

// The server decides whether a deadline has passed. Only if it does not answer
// either by then does a rank decide alone.
inline constexpr std::chrono::seconds kAnswerTime{5};

// Who was there, and could come again, is gone after this time: a process that
// is started anew takes longer.
inline constexpr std::chrono::seconds kGoneTime{3};

// A connection with the server, who may be a stranger until they have met.
struct Link {
  Socket socket;
  FrameReader reader{kStrangerBytesMax};
  bool let_in = false;  // both have proved themselves
  // Until then, waits for an answer are reported.
  WaitReminder* reminder = nullptr;
  std::string whom = {};
};

// Who listens, in messages.
inline const char* ListenerOf(bool hosted) {
  return hosted ? "the meeting's host" : "rank 0";
}

// For the server, whose clock is another. At most kRemainingMsMax.
uint64_t RemainingMs(Clock::time_point deadline);

// When to stop waiting for the server's word on `deadline`.
Clock::time_point AnswerLimit(Clock::time_point deadline);

// Errors: kDeadlineExceeded, with part of `bytes` sent perhaps; kUnavailable.
absl::Status SendAll(const Socket& socket, std::string_view bytes,
                     Clock::time_point limit);

// The next frame, if it has come. Error: kUnavailable, the connection is of no
// more use.
absl::StatusOr<std::optional<Frame>> TakeFrame(Link& link);

// Waits for it. Errors: kDeadlineExceeded; kUnavailable, as above.
absl::StatusOr<Frame> ReceiveFrame(Link& link, Clock::time_point limit);

// Proves to the server to be a member, has it prove the same by `limit`, and
// returns its last word, when all ranks have come or it is clear that they
// cannot. Errors: kDeadlineExceeded, kUnavailable; whoever is there is not, or
// no longer, the server. kPermissionDenied: it does not have the secret.
absl::StatusOr<Frame> Meet(const TcpRendezvous& rendezvous,
                           ControlPlane::Deadline deadline,
                           Clock::time_point limit, Link& link);

// The same, but has the server end the meeting for `reason`. A welcome: it has
// done so.
absl::StatusOr<Frame> EndMeeting(const TcpRendezvous& rendezvous,
                                 const absl::Status& reason,
                                 ControlPlane::Deadline deadline,
                                 Clock::time_point limit, Link& link);

// OK if the last word is a welcome, else why the server refuses.
absl::Status AnswerStatus(const Frame& answer);

// Connects with the server and meets the other ranks: tries until it is
// welcome, is refused, the server is gone or the deadline has passed. Errors as
// of ConnectTcp.
absl::StatusOr<Link> ConnectAndMeet(const TcpRendezvous& rendezvous,
                                    ControlPlane::Deadline deadline);

// As ConnectAndMeet, to end the meeting.
absl::StatusOr<Link> ConnectAndEndMeeting(const TcpRendezvous& rendezvous,
                                          const absl::Status& reason,
                                          ControlPlane::Deadline deadline);

}  // namespace refit::control

#endif  // REFIT_CONTROL_LINK_H_
