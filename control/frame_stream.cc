#include "control/frame_stream.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace refit::control {

bool FrameStream::Fill() {
  std::array<char, kReadBytes> bytes;
  if (!input_end_.ok()) return false;
  const size_t received = Read(bytes);
  if (received > 0) reader_.Append({bytes.data(), received});
  return received > 0 || !input_end_.ok();
}

absl::Status FrameStream::Discard() {
  std::array<char, kReadBytes> bytes;
  if (input_end_.ok()) Read(bytes);
  return input_end_;
}

size_t FrameStream::Read(std::array<char, kReadBytes>& bytes) {
  const ssize_t received = recv(socket_.fd(), bytes.data(), bytes.size(), 0);
  if (received > 0) return static_cast<size_t>(received);
  if (received == 0) {
    input_end_ = absl::UnavailableError("the connection was closed");
  } else if (errno != EAGAIN && errno != EINTR) {
    input_end_ = absl::UnavailableError(std::strerror(errno));
  }
  return 0;
}

absl::StatusOr<std::optional<Frame>> FrameStream::Next() {
  absl::StatusOr<std::optional<Frame>> frame = reader_.Next();
  if (!frame.ok()) return absl::UnavailableError(frame.status().message());
  if (!frame->has_value() && !input_end_.ok()) return input_end_;
  return frame;
}

absl::StatusOr<std::optional<Frame>> FrameStream::Take() {
  while (true) {
    absl::StatusOr<std::optional<Frame>> frame = Next();
    if (!frame.ok() || frame->has_value() || !Fill()) return frame;
  }
}

absl::Status FrameStream::Flush() {
  while (!unsent_.empty()) {
    const std::string& bytes = *unsent_.front();
    const ssize_t sent = send(socket_.fd(), bytes.data() + first_sent_,
                              bytes.size() - first_sent_, MSG_NOSIGNAL);
    if (sent >= 0) {
      first_sent_ += static_cast<size_t>(sent);
      if (first_sent_ < bytes.size()) continue;
      unsent_.pop_front();
      first_sent_ = 0;
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      unsent_.clear();
      first_sent_ = 0;
      return absl::UnavailableError(std::strerror(errno));
    }
  }
  return absl::OkStatus();
}

void FrameStream::EndOutput() const { shutdown(socket_.fd(), SHUT_WR); }

absl::Status SendFrame(FrameStream& stream, const Frame& frame,
                       Clock::time_point limit) {
  stream.Queue(EncodeShared(frame));
  while (true) {
    absl::Status status = stream.Flush();
    if (!status.ok() || !stream.has_unsent()) return status;
    if (!Await(stream.socket(), POLLOUT, limit)) {
      return absl::DeadlineExceededError("it does not read");
    }
  }
}

absl::StatusOr<Frame> ReceiveFrame(FrameStream& stream, Clock::time_point limit,
                                   WaitReminder* reminder,
                                   const std::string& whom) {
  while (true) {
    absl::StatusOr<std::optional<Frame>> frame = stream.Take();
    if (!frame.ok()) return frame.status();
    if (frame->has_value()) return **std::move(frame);
    const Clock::time_point next =
        reminder != nullptr ? std::min(limit, reminder->next()) : limit;
    if (AwaitUnlessInterrupted(stream.socket(), POLLIN, next)) continue;
    if (absl::Status s = InterruptionStatus(); !s.ok()) return s;
    const Clock::time_point now = Clock::now();
    if (reminder != nullptr && reminder->IsDue(now)) {
      ReportWait("connect", whom, reminder->Seconds(now),
                 "its process listens, but it has not come to the meeting");
    }
    if (now >= limit) return absl::DeadlineExceededError("it does not answer");
  }
}

}  // namespace refit::control
