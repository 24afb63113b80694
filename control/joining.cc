#include "control/joining.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "control/log.h"
#include "control/membership.h"
#include "control/unique_id_listener.h"
#include "control/waiting.h"

namespace refit::control {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kAnswerTime{5};
constexpr milliseconds kRetryTimeMin{10};
constexpr milliseconds kRetryTimeMax{500};

// Whether the server will not meet by this connection.
bool IsLast(const absl::StatusOr<Frame>& answer) {
  return !answer.ok() || answer->type == FrameType::kRefused ||
         answer->type == FrameType::kLater;
}

// OK if the last word is a welcome, else why the server refuses.
absl::Status AnswerStatus(const absl::StatusOr<Frame>& answer) {
  if (!answer.ok()) return answer.status();
  return answer->type == FrameType::kWelcome ? absl::OkStatus()
                                             : PayloadStatus(answer->payload);
}

// A rank on its way to the server. Whoever has a unique id knows that its
// creator listens as long as it lives, and who was let in, that the server was
// there. All others may be early.
class Arrival {
 public:
  Arrival(const TcpRendezvous& rendezvous, ControlPlane::Deadline deadline,
          const absl::Status* ends)
      : rendezvous_(rendezvous),
        deadline_(deadline),
        ends_(ends),
        listener_(ListenerOf(rendezvous.hosted)),
        address_(absl::StrCat(AddressText(rendezvous.host, rendezvous.port),
                              by_id() ? ", where its unique id is from" : "")) {
  }

  // `own`: connected with the server already, if it has a descriptor.
  absl::StatusOr<FrameStream> Join(Socket own);

 private:
  bool by_id() const { return rendezvous_.id_name != 0; }
  int32_t rank() const { return ends_ == nullptr ? rendezvous_.rank : kNoRank; }

  absl::StatusOr<Frame> Ask(FrameStream& stream, FrameType type,
                            std::string payload, Clock::time_point limit);
  absl::StatusOr<Frame> Enter(FrameStream& stream, Clock::time_point limit);
  absl::StatusOr<Frame> Meet(FrameStream& stream, Clock::time_point limit);
  absl::Status NotReached(const absl::Status& status) const;
  absl::Status Gone(const absl::Status& status) const;
  int64_t Waited() const {
    return std::chrono::round<seconds>(Clock::now() - start_).count();
  }

  const TcpRendezvous& rendezvous_;
  const ControlPlane::Deadline deadline_;
  const absl::Status* const ends_;
  const std::string listener_;
  const std::string address_;
  const Clock::time_point start_ = Clock::now();
  WaitReminder reminder_;
  bool is_in_ = false;   // by the present connection
  bool was_in_ = false;  // by the last that reached the server
};

absl::StatusOr<Frame> Arrival::Ask(FrameStream& stream, FrameType type,
                                   std::string payload,
                                   Clock::time_point limit) {
  absl::Status sent = SendFrame(
      stream, {.type = type, .rank = rank(), .payload = std::move(payload)},
      limit);
  if (!sent.ok()) return sent;
  return ReceiveFrame(stream, limit, &reminder_,
                      absl::StrCat(listener_, " at ", address_));
}

// The two prove to each other that they are members. The server's answer:
// kAccepted, or its last word. Errors: kDeadlineExceeded, kUnavailable, whoever
// is there is not, or no longer, the server; kPermissionDenied, it does not
// have the secret.
absl::StatusOr<Frame> Arrival::Enter(FrameStream& stream,
                                     Clock::time_point limit) {
  Transcript transcript = {.rank = rank(),
                           .hello = {.world_size = rendezvous_.world_size,
                                     .id_name = rendezvous_.id_name,
                                     .nonce = NewNonce()},
                           .claims = {.remaining_ms = RemainingMs(deadline_),
                                      .process = ProcessText()}};
  absl::StatusOr<Frame> answer =
      Ask(stream, FrameType::kHello, StructBytes(transcript.hello), limit);
  if (IsLast(answer)) return answer;
  const auto challenge = ParseStruct<Nonce>(answer->payload);
  if (answer->type != FrameType::kChallenge || !challenge.has_value()) {
    return OffProtocol();
  }
  transcript.challenge = *challenge;

  const Membership membership(rendezvous_.secret);
  const Proof proof = {transcript.claims,
                       membership.Prove(End::kRank, transcript)};
  answer = Ask(stream, FrameType::kProof, StructBytes(proof), limit);
  if (IsLast(answer)) return answer;
  const auto mac = ParseStruct<Mac>(answer->payload);
  if (answer->type != FrameType::kAccepted || !mac.has_value()) {
    return OffProtocol();
  }
  if (!membership.Verify(*mac, End::kRankZero, transcript)) {
    return absl::PermissionDeniedError(absl::StrCat(
        "connect: who listens at ",
        AddressText(rendezvous_.host, rendezvous_.port), " is not ", listener_,
        ": it does not prove to have the secret of rank ", rank()));
  }
  stream.LetIn();
  is_in_ = true;
  return answer;
}

// The server's last word, when all ranks have come or it is clear that they
// cannot. Errors as of Enter.
absl::StatusOr<Frame> Arrival::Meet(FrameStream& stream,
                                    Clock::time_point limit) {
  is_in_ = false;
  absl::StatusOr<Frame> answer = Enter(stream, limit);
  if (IsLast(answer)) return answer;
  limit = AnswerLimit(deadline_);
  const auto abort = [&](const absl::Status& why, Clock::time_point until) {
    return SendFrame(stream,
                     {.type = FrameType::kAbort,
                      .rank = rank(),
                      .payload = StatusPayload(why)},
                     until);
  };
  if (ends_ != nullptr) {
    if (absl::Status sent = abort(*ends_, limit); !sent.ok()) return sent;
  }
  answer = ReceiveFrame(stream, limit);
  // One that gives up would be missing: it is over for all.
  if (const absl::Status s = InterruptionStatus();
      !answer.ok() && !s.ok() && ends_ == nullptr) {
    (void)abort(s, Clock::now() + kAnswerTime);
  }
  if (!IsLast(answer) && answer->type != FrameType::kWelcome) {
    return OffProtocol();
  }
  // It has ended, as was wanted.
  if (ends_ != nullptr && answer.ok() &&
      absl::IsAborted(AnswerStatus(answer))) {
    answer->type = FrameType::kWelcome;
  }
  return answer;
}

// Why the server was not reached: the last try's `status`.
absl::Status Arrival::NotReached(const absl::Status& status) const {
  return absl::Status(
      absl::IsNotFound(status) ? absl::StatusCode::kUnavailable : status.code(),
      absl::StrCat("connect: ", listener_, " was not reached at ", address_,
                   by_id() ? "," : "", " before the deadline, in ", Waited(),
                   " s: ", status.message()));
}

// Why it is waited for no longer, before the deadline.
absl::Status Arrival::Gone(const absl::Status& status) const {
  const bool may_be_used = rendezvous_.hosted && !was_in_;
  return absl::UnavailableError(absl::StrCat(
      "connect: ", may_be_used ? "the unique id was used already, or " : "",
      listener_, " is gone: ",
      was_in_ ? "it had let this rank in at " : "nobody listens at ", address_,
      was_in_ ? ", then the connection ended" : "", " (", status.message(),
      "), after ", Waited(), " s; ",
      may_be_used
          ? "wanted a new id if its ranks have met and left, its meeting was "
            "ended, or 64 newer ones came after it; else "
          : "",
      was_in_ ? "see how its process ended"
              : "see how the process ended that made the id, or whether its "
                "REFIT_HOST is reached from here"));
}

absl::StatusOr<FrameStream> Arrival::Join(Socket own) {
  const bool is_own = own.fd() >= 0;
  std::optional<Clock::time_point> absent_since;
  milliseconds pause = kRetryTimeMin;
  absl::Status status;
  while (true) {
    const absl::Status before = status;
    absl::StatusOr<Socket> socket =
        is_own ? std::move(own)
               : Connect(rendezvous_.host, rendezvous_.port, deadline_);
    if (socket.ok()) {
      FrameStream stream(*std::move(socket));
      // Who listens may never answer: the process that made the id, where rank
      // 0 does not come, or a child of rank 0's, which keeps the port open.
      Clock::time_point limit = is_own ? AnswerLimit(deadline_) : deadline_;
      if (was_in_) limit = std::min(limit, *absent_since + kGoneTime);
      const absl::StatusOr<Frame> answer = Meet(stream, limit);
      status = AnswerStatus(answer);
      // A try that the deadline cut short says less than the one before.
      if (!answer.ok() && !before.ok() && Clock::now() >= deadline_) {
        status = before;
      }
      if (status.ok()) return stream;
      const bool later = answer.ok() && answer->type == FrameType::kLater;
      const bool refuses = answer.ok() || absl::IsPermissionDenied(status);
      if (is_own || (refuses && !later)) return status;
      was_in_ = !later && (was_in_ || is_in_);
      if (!was_in_) absent_since.reset();
      if (was_in_ && is_in_) absent_since = Clock::now();
    } else {
      status = socket.status();
      if (!was_in_ && !absl::IsNotFound(status)) {
        // It may have more ranks waiting than its queue holds, or no name yet.
        absent_since.reset();
      } else if (!absent_since.has_value()) {
        absent_since = Clock::now();
      }
    }
    const Clock::time_point now = Clock::now();
    if (absl::Status s = PollInterruption(); !s.ok()) return s;
    if (reminder_.IsDue(now)) {
      ReportWait("connect", absl::StrCat(listener_, " at ", address_),
                 reminder_.Seconds(now), std::string(status.message()));
    }
    if (now >= deadline_) return NotReached(status);
    if ((by_id() || was_in_) && absent_since.has_value() &&
        now - *absent_since >= kGoneTime) {
      return Gone(status);
    }
    // The server, or its host's name, may not be there yet.
    std::this_thread::sleep_for(
        std::min<Clock::duration>(pause, deadline_ - now));
    pause = std::min(2 * pause, kRetryTimeMax);
  }
}

// Where rank 0's server listens.
absl::StatusOr<Socket> ListenForRanks(const TcpRendezvous& rendezvous,
                                      ControlPlane::Deadline deadline) {
  const bool open = rendezvous.secret.empty();
  absl::StatusOr<Socket> listener =
      rendezvous.id_name != 0
          ? UniqueIdListener(rendezvous)
          : Listen(rendezvous.host, rendezvous.port,
                   open ? Interfaces::kOfHost : Interfaces::kAll, deadline);
  if (!listener.ok()) {
    if (absl::Status s = InterruptionStatus(); !s.ok()) return s;
    const bool elsewhere =
        open && absl::StrContains(listener.status().message(),
                                  std::strerror(EADDRNOTAVAIL));
    return absl::Status(
        listener.status().code(),
        absl::StrCat(
            "connect: rank 0 cannot listen at port ", rendezvous.port, ": ",
            listener.status().message(),
            elsewhere ? absl::StrCat("; \"", rendezvous.host,
                                     "\" is no address of this host, and only "
                                     "with a secret (REFIT_SECRET) does rank 0 "
                                     "listen at others")
                      : ""));
  }
  static std::atomic<bool> said = false;
  if (open && !said.exchange(true)) {
    const Bound at = BoundTo(*listener);
    Log(LogLevel::kWarning,
        absl::StrCat("rank 0 listens at ", AddressText(at.host, at.port),
                     " and lets in whoever reaches it, since neither "
                     "REFIT_SECRET nor REFIT_SECRET_FILE is set"));
  }
  return listener;
}

absl::Status CheckRendezvous(const TcpRendezvous& rendezvous) {
  const int32_t size = rendezvous.world_size;
  if (size < 1 || size > TcpRendezvous::kWorldSizeMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("world size ", size, " is not between 1 and ",
                     TcpRendezvous::kWorldSizeMax));
  }
  if (rendezvous.rank < 0 || rendezvous.rank >= size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", rendezvous.rank, " is not one of the ", size, " ranks"));
  }
  if ((size > 1 || rendezvous.hosted) &&
      (rendezvous.host.empty() || rendezvous.port == 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks cannot meet at \"",
                     AddressText(rendezvous.host, rendezvous.port), "\""));
  }
  return absl::OkStatus();
}

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

absl::StatusOr<Joined> Join(const TcpRendezvous& rendezvous,
                            ControlPlane::Deadline deadline,
                            const absl::Status* ends) {
  const bool serves = rendezvous.rank == 0 && !rendezvous.hosted;
  // Who ends a meeting need not know its size.
  if (serves || ends == nullptr) {
    absl::Status status = CheckRendezvous(rendezvous);
    if (!status.ok()) return status;
  }
  std::unique_ptr<ControlServer> server;
  Socket own;
  if (serves) {
    Socket listener;
    if (rendezvous.world_size > 1) {
      absl::StatusOr<Socket> listening = ListenForRanks(rendezvous, deadline);
      if (!listening.ok()) return listening.status();
      listener = *std::move(listening);
    }
    // No port: where the loopback interface is down rank 0 meets, too.
    absl::StatusOr<std::pair<Socket, Socket>> ends_of_own = ConnectedPair();
    if (!ends_of_own.ok()) return ends_of_own.status();
    own = std::move(ends_of_own->first);
    absl::StatusOr<std::unique_ptr<ControlServer>> started =
        ControlServer::Start(rendezvous, std::move(listener),
                             std::move(ends_of_own->second));
    if (!started.ok()) return started.status();
    server = *std::move(started);
  }
  absl::StatusOr<FrameStream> stream =
      Arrival(rendezvous, deadline, ends).Join(std::move(own));
  if (!stream.ok()) return stream.status();
  return Joined{std::move(server), *std::move(stream)};
}

}  // namespace refit::control
