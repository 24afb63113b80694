#include "control/link.h"

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
#include "control/membership.h"
#include "control/server.h"
#include "control/waiting.h"

namespace refit::control {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

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

absl::StatusOr<std::optional<Frame>> TakeFrame(Link& link) {
  char bytes[kReadBytes];
  while (true) {
    absl::StatusOr<std::optional<Frame>> frame = link.reader.Next();
    if (!frame.ok()) return absl::UnavailableError(frame.status().message());
    if (frame->has_value()) return frame;
    const ssize_t received = recv(link.socket.fd(), bytes, sizeof(bytes), 0);
    if (received > 0) {
      link.reader.Append({bytes, static_cast<size_t>(received)});
    } else if (received == 0) {
      return absl::UnavailableError("the connection was closed");
    } else if (errno == EAGAIN) {
      return std::nullopt;
    } else if (errno != EINTR) {
      return absl::UnavailableError(std::strerror(errno));
    }
  }
}

absl::StatusOr<Frame> ReceiveFrame(Link& link, Clock::time_point limit) {
  while (true) {
    absl::StatusOr<std::optional<Frame>> frame = TakeFrame(link);
    if (!frame.ok()) return frame.status();
    if (frame->has_value()) return **std::move(frame);
    const bool reports = link.reminder != nullptr && !link.let_in;
    const Clock::time_point next =
        reports ? std::min(limit, link.reminder->next()) : limit;
    if (AwaitUnlessInterrupted(link.socket, POLLIN, next)) continue;
    if (absl::Status s = InterruptionStatus(); !s.ok()) return s;
    const Clock::time_point now = Clock::now();
    if (reports && link.reminder->IsDue(now)) {
      ReportWait("connect", link.whom, link.reminder->Seconds(now),
                 "its process listens, but it has not come to the meeting");
    }
    if (now >= limit) return absl::DeadlineExceededError("it does not answer");
  }
}

static absl::Status OffProtocol() {
  return absl::UnavailableError("it does not keep to the protocol");
}

// Whether the server will not meet by this connection.
static bool IsLast(const Frame& answer) {
  return answer.type == FrameType::kRefused || answer.type == FrameType::kLater;
}

// The server's answer to this rank's proof: kAccepted, or its last word.
static absl::StatusOr<Frame> Enter(const TcpRendezvous& rendezvous,
                                   ControlPlane::Deadline deadline,
                                   Clock::time_point limit, Link& link) {
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
        AddressText(rendezvous.host, rendezvous.port), " is not ",
        ListenerOf(rendezvous.hosted),
        ": it does not prove to have the secret of rank ", rendezvous.rank));
  }
  link.reader.set_payload_bytes_max(kPayloadBytesMax);
  link.let_in = true;
  return answer;
}

static std::string AbortFrame(int32_t rank, const absl::Status& why) {
  return Encode(
      {.type = FrameType::kAbort, .rank = rank, .payload = StatusPayload(why)});
}

absl::StatusOr<Frame> Meet(const TcpRendezvous& rendezvous,
                           ControlPlane::Deadline deadline,
                           Clock::time_point limit, Link& link) {
  absl::StatusOr<Frame> answer = Enter(rendezvous, deadline, limit, link);
  if (!answer.ok() || IsLast(*answer)) return answer;
  answer = ReceiveFrame(link, AnswerLimit(deadline));
  // One that gives up would be missing: it is over for all.
  if (const absl::Status s = InterruptionStatus(); !answer.ok() && !s.ok()) {
    (void)SendAll(link.socket, AbortFrame(rendezvous.rank, s),
                  Clock::now() + kAnswerTime);
  }
  if (answer.ok() && answer->type != FrameType::kWelcome && !IsLast(*answer)) {
    return OffProtocol();
  }
  return answer;
}

absl::StatusOr<Frame> EndMeeting(const TcpRendezvous& rendezvous,
                                 const absl::Status& reason,
                                 ControlPlane::Deadline deadline,
                                 Clock::time_point limit, Link& link) {
  TcpRendezvous outside = rendezvous;
  outside.rank = kNoRank;
  absl::StatusOr<Frame> answer = Enter(outside, deadline, limit, link);
  if (!answer.ok() || IsLast(*answer)) return answer;
  limit = AnswerLimit(deadline);
  const absl::Status sent =
      SendAll(link.socket, AbortFrame(kNoRank, reason), limit);
  if (!sent.ok()) return sent;
  answer = ReceiveFrame(link, limit);
  if (!answer.ok() || !IsLast(*answer)) {
    return answer.ok() ? OffProtocol() : answer.status();
  }
  // It has ended.
  if (absl::IsAborted(AnswerStatus(*answer)))
    answer->type = FrameType::kWelcome;
  return answer;
}

absl::Status AnswerStatus(const Frame& answer) {
  return answer.type == FrameType::kWelcome ? absl::OkStatus()
                                            : PayloadStatus(answer.payload);
}

// Why the server was not reached: the last try's `status`, after `waited`.
static absl::Status NotReached(const TcpRendezvous& rendezvous,
                               const std::string& address,
                               const absl::Status& status,
                               Clock::duration waited) {
  const bool by_id = rendezvous.id_name != 0;
  return absl::Status(
      absl::IsNotFound(status) ? absl::StatusCode::kUnavailable : status.code(),
      absl::StrCat("connect: ", ListenerOf(rendezvous.hosted),
                   " was not reached at ", address, by_id ? "," : "",
                   " before the deadline, in ",
                   std::chrono::round<seconds>(waited).count(),
                   " s: ", status.message()));
}

// Why it is waited for no longer, before the deadline.
static absl::Status Gone(bool hosted, const std::string& address, bool let_in,
                         const absl::Status& status, Clock::duration waited) {
  const bool may_be_used = hosted && !let_in;
  return absl::UnavailableError(absl::StrCat(
      "connect: ", may_be_used ? "the unique id was used already, or " : "",
      ListenerOf(hosted), " is gone: ",
      let_in ? "it had let this rank in at " : "nobody listens at ", address,
      let_in ? ", then the connection ended" : "", " (", status.message(),
      "), after ", std::chrono::round<seconds>(waited).count(), " s; ",
      may_be_used
          ? "wanted a new id if its ranks have met and left, its meeting was "
            "ended, or 64 newer ones came after it; else "
          : "",
      let_in ? "see how its process ended"
             : "see how the process ended that made the id, or whether its "
               "REFIT_HOST is reached from here"));
}

// Tries to connect and `meet` until the server is willing, refuses, is gone, or
// the deadline has passed. Who has a unique id knows that its creator listens
// as long as it lives, and who was let in, that the server was there. All
// others may be early.
static absl::StatusOr<Link> ConnectAnd(
    const TcpRendezvous& rendezvous, ControlPlane::Deadline deadline,
    absl::FunctionRef<absl::StatusOr<Frame>(Link&, Clock::time_point limit)>
        meet) {
  const bool by_id = rendezvous.id_name != 0;
  const std::string listener = ListenerOf(rendezvous.hosted);
  const std::string address =
      absl::StrCat(AddressText(rendezvous.host, rendezvous.port),
                   by_id ? ", where its unique id is from" : "");
  const Clock::time_point start = Clock::now();
  bool let_in = false;
  std::optional<Clock::time_point> absent_since;
  milliseconds pause = kRetryTimeMin;
  WaitReminder reminder;
  absl::Status status;
  while (true) {
    const absl::Status before = status;
    absl::StatusOr<Socket> socket =
        Connect(rendezvous.host, rendezvous.port, deadline);
    if (socket.ok()) {
      Link link{*std::move(socket)};
      link.reminder = &reminder;
      link.whom = absl::StrCat(listener, " at ", address);
      // Who listens may never answer: the process that made the id, where rank
      // 0 does not come, or a child of rank 0's, which keeps the port open.
      Clock::time_point limit = deadline;
      if (let_in) limit = std::min(limit, *absent_since + kGoneTime);
      const absl::StatusOr<Frame> answer = meet(link, limit);
      status = answer.ok() ? AnswerStatus(*answer) : answer.status();
      // A try that the deadline cut short says less than the one before.
      if (!answer.ok() && !before.ok() && Clock::now() >= deadline) {
        status = before;
      }
      if (status.ok()) {
        link.reminder = nullptr;
        return link;
      }
      const bool later = answer.ok() && answer->type == FrameType::kLater;
      if (!later && (answer.ok() || absl::IsPermissionDenied(status))) {
        return status;
      }
      let_in = !later && (let_in || link.let_in);
      if (!let_in) absent_since.reset();
      if (let_in && link.let_in) absent_since = Clock::now();
    } else {
      status = socket.status();
      if (!let_in && !absl::IsNotFound(status)) {
        // It may have more ranks waiting than its queue holds, or no name yet.
        absent_since.reset();
      } else if (!absent_since.has_value()) {
        absent_since = Clock::now();
      }
    }
    const Clock::time_point now = Clock::now();
    if (absl::Status s = PollInterruption(); !s.ok()) return s;
    if (reminder.IsDue(now)) {
      ReportWait("connect", listener + " at " + address, reminder.Seconds(now),
                 std::string(status.message()));
    }
    if (now >= deadline) {
      return NotReached(rendezvous, address, status, now - start);
    }
    if ((by_id || let_in) && absent_since.has_value() &&
        now - *absent_since >= kGoneTime) {
      return Gone(rendezvous.hosted, address, let_in, status, now - start);
    }
    // The server, or its host's name, may not be there yet.
    std::this_thread::sleep_for(
        std::min<Clock::duration>(pause, deadline - now));
    pause = std::min(2 * pause, kRetryTimeMax);
  }
}

absl::StatusOr<Link> ConnectAndMeet(const TcpRendezvous& rendezvous,
                                    ControlPlane::Deadline deadline) {
  return ConnectAnd(rendezvous, deadline,
                    [&](Link& link, Clock::time_point limit) {
                      return Meet(rendezvous, deadline, limit, link);
                    });
}

absl::StatusOr<Link> ConnectAndEndMeeting(const TcpRendezvous& rendezvous,
                                          const absl::Status& reason,
                                          ControlPlane::Deadline deadline) {
  return ConnectAnd(
      rendezvous, deadline, [&](Link& link, Clock::time_point limit) {
        return EndMeeting(rendezvous, reason, deadline, limit, link);
      });
}

}  // namespace refit::control
