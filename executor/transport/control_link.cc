#include "executor/transport/control_link.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "executor/transport/control_server.h"
#include "executor/transport/membership.h"
#include "executor/waiting.h"

namespace refit::control {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kRetryTimeMin{10};
constexpr milliseconds kRetryTimeMax{500};
constexpr size_t kReadBytes = size_t{64} << 10;

}  // namespace

uint64_t RemainingMs(Clock::time_point deadline) {
  const Clock::time_point now = Clock::now();
  if (deadline <= now) return 0;
  const auto left = std::chrono::ceil<milliseconds>(deadline - now);
  return std::min<uint64_t>(left.count(), kRemainingMsMax);
}

Clock::time_point AnswerLimit(Clock::time_point deadline) {
  return Clock::now() + milliseconds(RemainingMs(deadline)) + kAnswerTime;
}

absl::Status SendAll(const Socket& socket, std::string_view bytes,
                     Clock::time_point limit) {
  while (!bytes.empty()) {
    const ssize_t sent =
        send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(sent);
    } else if (errno == EAGAIN) {
      if (!Await(socket, POLLOUT, limit)) {
        return absl::DeadlineExceededError("it does not read");
      }
    } else if (errno != EINTR) {
      return absl::UnavailableError(std::strerror(errno));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Frame> ReceiveFrame(Link& link, Clock::time_point limit) {
  char bytes[kReadBytes];
  while (true) {
    absl::StatusOr<std::optional<Frame>> frame = link.reader.Next();
    if (!frame.ok()) return absl::UnavailableError(frame.status().message());
    if (frame->has_value()) return **std::move(frame);
    const ssize_t received = recv(link.socket.fd(), bytes, sizeof(bytes), 0);
    if (received > 0) {
      link.reader.Append({bytes, static_cast<size_t>(received)});
    } else if (received == 0) {
      return absl::UnavailableError("the connection was closed");
    } else if (errno == EAGAIN) {
      if (!AwaitUnlessInterrupted(link.socket, POLLIN, limit)) {
        if (absl::Status s = InterruptionStatus(); !s.ok()) return s;
        return absl::DeadlineExceededError("it does not answer");
      }
    } else if (errno != EINTR) {
      return absl::UnavailableError(std::strerror(errno));
    }
  }
}

static absl::Status OffProtocol() {
  return absl::UnavailableError("it does not keep to the protocol");
}

// Whether rank 0 will not meet by this connection.
static bool IsLast(const Frame& answer) {
  return answer.type == FrameType::kRefused || answer.type == FrameType::kLater;
}

// The server's answer to this rank's proof: kAccepted, or its last word.
static absl::StatusOr<Frame> Enter(const TcpRendezvous& rendezvous,
                                   ControlPlane::Deadline deadline,
                                   Link& link) {
  const Clock::time_point limit = AnswerLimit(deadline);
  const auto ask = [&](FrameType type, std::string payload) {
    const absl::Status sent = SendAll(link.socket,
                                      Encode({.type = type,
                                              .rank = rendezvous.rank,
                                              .payload = std::move(payload)}),
                                      limit);
    return sent.ok() ? ReceiveFrame(link, limit) : sent;
  };

  Transcript transcript = {.rank = rendezvous.rank,
                           .hello = {.world_size = rendezvous.world_size,
                                     .id_name = rendezvous.id_name,
                                     .nonce = NewNonce()},
                           .claims = {.remaining_ms = RemainingMs(deadline),
                                      .process = ProcessText()}};
  absl::StatusOr<Frame> answer =
      ask(FrameType::kHello, HelloPayload(transcript.hello));
  if (!answer.ok() || IsLast(*answer)) return answer;
  const std::optional<Nonce> challenge = ParseBytes(answer->payload);
  if (answer->type != FrameType::kChallenge || !challenge.has_value()) {
    return OffProtocol();
  }
  transcript.challenge = *challenge;

  const Membership membership(rendezvous.secret);
  answer = ask(FrameType::kProof,
               ProofPayload({transcript.claims,
                             membership.Prove(End::kRank, transcript)}));
  if (!answer.ok() || IsLast(*answer)) return answer;
  const std::optional<Mac> mac = ParseBytes(answer->payload);
  if (answer->type != FrameType::kAccepted || !mac.has_value()) {
    return OffProtocol();
  }
  if (!membership.Verify(*mac, End::kRankZero, transcript)) {
    return absl::PermissionDeniedError(absl::StrCat(
        "connect: who listens at ",
        AddressText(rendezvous.host, rendezvous.port),
        " is not rank 0: it does not prove to have the secret of rank ",
        rendezvous.rank));
  }
  link.reader.set_payload_bytes_max(kPayloadBytesMax);
  return answer;
}

static std::string AbortFrame(int32_t rank, const absl::Status& why) {
  return Encode({.type = FrameType::kAbort,
                 .rank = rank,
                 .payload = StatusPayload(why)});
}

absl::StatusOr<Frame> Meet(const TcpRendezvous& rendezvous,
                           ControlPlane::Deadline deadline, Link& link) {
  absl::StatusOr<Frame> answer = Enter(rendezvous, deadline, link);
  if (!answer.ok() || IsLast(*answer)) return answer;
  answer = ReceiveFrame(link, AnswerLimit(deadline));
  // One that gives up would be missing: it is over for all.
  if (const absl::Status s = InterruptionStatus(); !answer.ok() && !s.ok()) {
    (void)SendAll(link.socket, AbortFrame(rendezvous.rank, s),
                  Clock::now() + kAnswerTime);
  }
  if (answer.ok() && answer->type != FrameType::kWelcome &&
      answer->type != FrameType::kRefused) {
    return OffProtocol();
  }
  return answer;
}

absl::StatusOr<Frame> EndMeeting(const TcpRendezvous& rendezvous,
                                 const absl::Status& reason,
                                 ControlPlane::Deadline deadline, Link& link) {
  TcpRendezvous outside = rendezvous;
  outside.rank = kNoRank;
  absl::StatusOr<Frame> answer = Enter(outside, deadline, link);
  if (!answer.ok() || IsLast(*answer)) return answer;
  const Clock::time_point limit = AnswerLimit(deadline);
  const absl::Status sent =
      SendAll(link.socket, AbortFrame(kNoRank, reason), limit);
  if (!sent.ok()) return sent;
  answer = ReceiveFrame(link, limit);
  if (!answer.ok() || !IsLast(*answer)) {
    return answer.ok() ? OffProtocol() : answer.status();
  }
  // It has ended.
  if (absl::IsAborted(Verdict(*answer))) answer->type = FrameType::kWelcome;
  return answer;
}

absl::Status Verdict(const Frame& answer) {
  return answer.type == FrameType::kWelcome ? absl::OkStatus()
                                            : PayloadStatus(answer.payload);
}

// Tries to connect and `meet` until the server is willing, refuses, or the
// deadline has passed.
static absl::StatusOr<Link> ConnectAnd(
    const TcpRendezvous& rendezvous, ControlPlane::Deadline deadline,
    absl::FunctionRef<absl::StatusOr<Frame>(Link&)> meet) {
  const bool by_id = rendezvous.id_name != 0;
  const std::string address =
      absl::StrCat(AddressText(rendezvous.host, rendezvous.port),
                   by_id ? ", where its unique id is from" : "");
  milliseconds pause = kRetryTimeMin;
  WaitReminder reminder;
  while (true) {
    absl::Status status;
    absl::StatusOr<Socket> socket =
        Connect(rendezvous.host, rendezvous.port, deadline);
    if (socket.ok()) {
      Link link{*std::move(socket)};
      const absl::StatusOr<Frame> answer = meet(link);
      status = answer.ok() ? Verdict(*answer) : answer.status();
      if (status.ok()) return link;
      const bool may_come_again = answer.ok()
                                      ? answer->type == FrameType::kLater
                                      : !absl::IsPermissionDenied(status);
      if (!may_come_again) return status;
    } else {
      status = socket.status();
    }
    const Clock::time_point now = Clock::now();
    if (absl::Status s = PollInterruption(); !s.ok()) return s;
    if (reminder.IsDue(now)) {
      ReportWait("connect", "rank 0 at " + address, reminder.Seconds(now),
                 std::string(status.message()));
    }
    if (now >= deadline) {
      return absl::Status(
          status.code(),
          absl::StrCat("connect: rank 0 was not reached at ", address,
                       by_id ? "," : "",
                       " before the deadline: ", status.message()));
    }
    // Rank 0, or its host's name, may not be there yet.
    std::this_thread::sleep_for(
        std::min<Clock::duration>(pause, deadline - now));
    pause = std::min(2 * pause, kRetryTimeMax);
  }
}

absl::StatusOr<Link> ConnectAndMeet(const TcpRendezvous& rendezvous,
                                    ControlPlane::Deadline deadline) {
  return ConnectAnd(rendezvous, deadline, [&](Link& link) {
    return Meet(rendezvous, deadline, link);
  });
}

absl::StatusOr<Link> ConnectAndEndMeeting(const TcpRendezvous& rendezvous,
                                          const absl::Status& reason,
                                          ControlPlane::Deadline deadline) {
  return ConnectAnd(rendezvous, deadline,
                    [&](Link& link) {
                      return EndMeeting(rendezvous, reason, deadline, link);
                    });
}

}  // namespace refit::control
