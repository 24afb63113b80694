// FrameStream: one end of a connection of the control plane.
#ifndef REFIT_CONTROL_FRAME_STREAM_H_
#define REFIT_CONTROL_FRAME_STREAM_H_

#include <array>
#include <cstddef>
#include <deque>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control/frame.h"
#include "control/tcp_socket.h"
#include "control/waiting.h"

namespace refit::control {

// Never waits. One thread may read while another one sends.
class FrameStream {
 public:
  // The other end is a stranger.
  explicit FrameStream(Socket socket) : socket_(std::move(socket)) {}

  const Socket& socket() const { return socket_; }
  // The other end is a member.
  void LetIn() { reader_.set_payload_bytes_max(kPayloadBytesMax); }

  // Reads some of what has come. False: nothing has.
  bool Fill();
  // The next frame of what was read, if it is whole. Error: kUnavailable, the
  // connection is of no more use.
  absl::StatusOr<std::optional<Frame>> Next();
  // Drops some of what has come. Error: kUnavailable, nothing more comes.
  absl::Status Discard();
  // The next frame that has come.
  absl::StatusOr<std::optional<Frame>> Take();

  void Queue(SharedBytes bytes) { unsent_.push_back(std::move(bytes)); }
  bool has_unsent() const { return !unsent_.empty(); }
  // Sends of the queue what there is room for. Error: kUnavailable; the queue
  // is empty then.
  absl::Status Flush();
  // The other end reads to the end of what was sent.
  void EndOutput() const;

 private:
  static constexpr size_t kReadBytes = size_t{64} << 10;
  // How many came; 0: none, or no more will.
  size_t Read(std::array<char, kReadBytes>& bytes);

  Socket socket_;
  FrameReader reader_{kStrangerBytesMax};
  absl::Status input_end_;  // why nothing more comes
  std::deque<SharedBytes> unsent_;
  size_t first_sent_ = 0;  // bytes of the first
};

// Sends the queue and `frame`. Errors: kDeadlineExceeded, with part of it sent
// perhaps; kUnavailable.
absl::Status SendFrame(FrameStream& stream, const Frame& frame,
                       Clock::time_point limit);

// Waits for the next frame, and unless `reminder` is null says after a while
// that it waits for `whom`. Errors: kDeadlineExceeded; kUnavailable; that of
// this thread's interruption.
absl::StatusOr<Frame> ReceiveFrame(FrameStream& stream, Clock::time_point limit,
                                   WaitReminder* reminder = nullptr,
                                   const std::string& whom = "");

}  // namespace refit::control

#endif  // REFIT_CONTROL_FRAME_STREAM_H_
