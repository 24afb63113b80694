#include "control/server.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "control/own_thread.h"
#include "control/unique_id_listener.h"

namespace refit::control {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A port scanner may connect and say nothing.
constexpr seconds kProofTime{5};
// Strangers at a time, beside as many as there are ranks, which may all come at
// once. One more takes the place of the oldest.
constexpr uint64_t kStrangersMax = 256;
// Before those that have come are heard.
constexpr int kAcceptsPerTurn = 64;
// For a rank to read its last frames: only one that is stopped needs longer.
constexpr seconds kCloseTime{5};
constexpr milliseconds kAcceptPause{100};
// For ranks that come a little later than the one that ended the meeting.
constexpr seconds kEndedTime{2};
// From one connection before the others have their turn.
constexpr int kReceivesPerTurn = 16;

}  // namespace

std::string ProcessText() {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  return absl::StrCat("process ", getpid(), " on host ", host);
}

ControlServer::Connection::Connection(Socket socket)
    : stream(std::move(socket)), deadline(Clock::now() + kProofTime) {}

absl::StatusOr<std::unique_ptr<ControlServer>> ControlServer::Start(
    const TcpRendezvous& rendezvous, Socket listener, Socket own) {
  // The ranks may be threads of this process, with a descriptor each; others
  // are for strangers and for what else the process has open.
  const uint64_t ranks = rendezvous.world_size;
  absl::Status status =
      AllowDescriptors(3 * ranks + kStrangersMax + 256, ranks + 16);
  if (!status.ok()) return status;
  absl::StatusOr<std::pair<Socket, Socket>> ends = ConnectedPair();
  if (!ends.ok()) return ends.status();
  std::unique_ptr<ControlServer> server(
      new ControlServer(rendezvous, std::move(listener), *std::move(ends)));
  if (own.fd() >= 0) {
    server->connections_.push_back(
        std::make_unique<Connection>(std::move(own)));
    server->connections_.back()->deadline = kNoDeadline;
  }
  status = StartThread(server->thread_, "the thread of the control plane",
                       [made = server.get()] { made->Run(); });
  if (!status.ok()) return status;
  return server;
}

ControlServer::ControlServer(const TcpRendezvous& rendezvous, Socket listener,
                             std::pair<Socket, Socket> ends)
    : world_size_(rendezvous.world_size),
      name_(ListenerOf(rendezvous.hosted)),
      id_name_(rendezvous.id_name),
      hosted_(rendezvous.hosted),
      membership_(rendezvous.secret),
      owner_end_(std::move(ends.first)),
      owner_(std::move(ends.second)),
      listener_(std::move(listener)),
      by_rank_(world_size_),
      processes_(world_size_),
      steps_(world_size_, [this](int32_t rank, SharedBytes bytes) {
        if (by_rank_[rank] != nullptr) Queue(*by_rank_[rank], std::move(bytes));
      }) {
  // A host may know its own name by another address than the others do.
  if (listener_.fd() >= 0 && rendezvous.secret.empty() &&
      !NamesLoopback(rendezvous.host)) {
    const Bound at = BoundTo(listener_);
    trouble_ =
        absl::StrCat(name_, " listens at ", AddressText(at.host, at.port),
                     " alone, having no secret");
  }
}

void ControlServer::Stop() { owner_end_.Close(); }

ControlServer::~ControlServer() {
  Stop();
  if (thread_.joinable()) thread_.join();
}

std::string ControlServer::WhoCame() const {
  constexpr const char* kWhat[] = {"waiting: ", "came and left: ", "missing: "};
  std::vector<int32_t> ranks[3];
  {
    std::lock_guard lock(who_came_mutex_);
    for (int32_t rank = 0; rank < world_size_; ++rank) {
      ranks[by_rank_[rank] != nullptr  ? 0
            : processes_[rank].empty() ? 2
                                       : 1]
          .push_back(rank);
    }
  }
  std::vector<std::string> parts;
  for (int i = 0; i < 3; ++i) {
    if (ranks[i].empty()) continue;
    parts.push_back(absl::StrCat(kWhat[i], RanksText(ranks[i])));
  }
  return absl::StrJoin(parts, "; ");
}

void ControlServer::Run() {
  while (phase_ != Phase::kClosing || !connections_.empty()) {
    Poll();
    Expire(Clock::now());
    // By index: to lose one may add frames to others, but no connections.
    for (size_t i = 0; i < connections_.size(); ++i) Flush(*connections_[i]);
    connections_.erase(
        std::remove_if(connections_.begin(), connections_.end(),
                       [](const auto& connection) { return connection->over; }),
        connections_.end());
  }
  is_over_ = true;
}

// Waits for something to happen, and reads what has come.
void ControlServer::Poll() {
  std::vector<pollfd> polled;
  for (const auto& connection : connections_) {
    const int events =
        connection->stream.has_unsent() ? POLLIN | POLLOUT : POLLIN;
    polled.push_back(
        {connection->stream.socket().fd(), static_cast<short>(events), 0});
  }
  const size_t count = polled.size();
  // poll() leaves out what has no descriptor.
  polled.push_back(
      {Clock::now() < accept_again_ ? -1 : listener_.fd(), POLLIN, 0});
  polled.push_back({owner_.fd(), POLLIN, 0});
  const int ready =
      poll(polled.data(), polled.size(), MillisecondsUntil(NextEvent()));
  if (ready <= 0) return;
  for (size_t i = 0; i < count; ++i) {
    if ((polled[i].revents & ~POLLOUT) != 0) Receive(*connections_[i]);
  }
  if (polled[count].revents != 0) AcceptSome();
  if (polled[count + 1].revents != 0) {
    owner_.Close();
    // Else those that come are still to be told why.
    if (phase_ != Phase::kEnded) Close();
  }
}

void ControlServer::AcceptSome() {
  for (int i = 0; i < kAcceptsPerTurn && listener_.fd() >= 0; ++i) {
    absl::StatusOr<Socket> socket = Accept(listener_);
    if (socket.ok()) {
      const auto strangers =
          std::count_if(connections_.begin(), connections_.end(),
                        [](const auto& c) { return c->IsStranger(); });
      if (static_cast<uint64_t>(strangers) >= kStrangersMax + world_size_) {
        EvictStranger();
      }
      connections_.push_back(std::make_unique<Connection>(*std::move(socket)));
      continue;
    }
    if (!absl::IsResourceExhausted(socket.status())) return;
    // A stranger's descriptor serves whoever comes next.
    if (EvictStranger()) continue;
    trouble_ = std::string(socket.status().message());
    accept_again_ = Clock::now() + kAcceptPause;
    return;
  }
}

// Closes the oldest of those that have not said hello, else of all strangers: a
// rank says hello at once, and comes again if it is the one. False: there is
// none.
bool ControlServer::EvictStranger() {
  for (const bool has_greeted : {false, true}) {
    for (const auto& connection : connections_) {
      if (!connection->IsStranger() || connection->deadline == kNoDeadline ||
          connection->transcript.has_value() != has_greeted) {
        continue;
      }
      connection->over = true;
      connection->stream = FrameStream(Socket());
      return true;
    }
  }
  return false;
}

void ControlServer::Receive(Connection& connection) {
  // Read only to reach its end.
  if (connection.closing) {
    if (const absl::Status end = connection.stream.Discard(); !end.ok()) {
      Lose(connection, end);
    }
    return;
  }
  for (int i = 0; i < kReceivesPerTurn && connection.stream.Fill(); ++i) {
    while (true) {
      absl::StatusOr<std::optional<Frame>> frame = connection.stream.Next();
      if (!frame.ok()) {
        return Lose(connection, frame.status());
      }
      if (!frame->has_value()) break;
      if (!Handle(connection, **frame)) return Lose(connection, OffProtocol());
      if (connection.over || connection.closing) return;
    }
  }
}

// Returns false if the sender does not keep to the protocol.
bool ControlServer::Handle(Connection& connection, Frame& frame) {
  if (connection.ends_meeting) return HandleEnd(connection, frame);
  if (connection.rank < 0) {
    return connection.transcript.has_value() ? HandleProof(connection, frame)
                                             : HandleHello(connection, frame);
  }
  if (frame.type == FrameType::kGoodbye) {
    connection.over = true;
    Leave(connection.rank);
    return true;
  }
  if (phase_ == Phase::kMeeting && frame.type == FrameType::kAbort) {
    EndMeeting(AbortedBy(connection.rank, PayloadStatus(frame.payload)),
               kEndedTime);
    return true;
  }
  return phase_ == Phase::kMet && HandleInStep(connection, frame);
}

bool ControlServer::HandleInStep(Connection& connection, Frame& frame) {
  if (frame.type == FrameType::kBegin) {
    return steps_.Begin(connection.rank, frame.step, frame.sequence);
  }
  if (frame.type == FrameType::kAbort) {
    return steps_.Abort(connection.rank, frame.step,
                        PayloadStatus(frame.payload));
  }
  if (frame.type != FrameType::kContribution) return false;
  auto contribution = ParseStruct<Contribution>(frame.payload);
  return contribution.has_value() &&
         steps_.Contribute(connection.rank, frame.step, frame.sequence,
                           *std::move(contribution), Clock::now());
}

// Nothing that a stranger says here counts before it is proved.
bool ControlServer::HandleHello(Connection& connection, const Frame& frame) {
  if (frame.type != FrameType::kHello) return false;
  const std::optional<Hello> hello = ParseHello(frame.payload);
  if (!hello.has_value()) return false;
  if (IsLeft()) return PutOff(connection);
  const absl::Status status = CheckHello(frame.rank, *hello);
  if (!status.ok()) return Refuse(connection, status);
  connection.transcript = Transcript{.rank = frame.rank,
                                     .hello = *hello,
                                     .challenge = NewNonce(),
                                     .claims = {}};
  Send(connection, {.type = FrameType::kChallenge,
                    .payload = StructBytes(connection.transcript->challenge)});
  return true;
}

bool ControlServer::HandleProof(Connection& connection, const Frame& frame) {
  if (frame.type != FrameType::kProof) return false;
  const std::optional<Proof> proof = ParseStruct<Proof>(frame.payload);
  if (!proof.has_value()) return false;
  if (IsLeft()) return PutOff(connection);
  connection.transcript->claims = proof->claims;
  const absl::Status status = CheckProof(*connection.transcript, *proof);
  if (!status.ok()) return Refuse(connection, status);
  const int32_t rank = connection.transcript->rank;
  // Before a reason, which may be long: of a stranger a rank reads little.
  Send(connection, {.type = FrameType::kAccepted,
                    .payload = StructBytes(membership_.Prove(
                        End::kRankZero, *connection.transcript))});
  connection.stream.LetIn();
  connection.ends_meeting = rank == kNoRank;
  if (connection.ends_meeting) return true;
  connection.rank = rank;
  if (phase_ == Phase::kEnded) return TellEnded(connection);
  connection.deadline =
      Clock::now() +
      milliseconds(std::min(proof->claims.remaining_ms, kRemainingMsMax));
  {
    std::lock_guard lock(who_came_mutex_);
    by_rank_[rank] = &connection;
    processes_[rank] = proof->claims.process;
  }
  std::erase_if(left_, [&](const Left& left) { return left.rank == rank; });
  if (AbsentCount() == 0) {
    phase_ = Phase::kMet;
    has_met_ = true;
    SendToAll({.type = FrameType::kWelcome});
  }
  return true;
}

// Of a member that takes no part, but knows that the meeting is in vain.
bool ControlServer::HandleEnd(Connection& connection, const Frame& frame) {
  if (frame.type != FrameType::kAbort) return false;
  if (phase_ == Phase::kMet) {
    return Refuse(connection, absl::FailedPreconditionError(
                                  "all ranks have met already, so the meeting "
                                  "cannot be ended"));
  }
  // Also where a rank has ended it, who might try again.
  if (phase_ == Phase::kMeeting || (phase_ == Phase::kEnded && !in_vain_)) {
    EndMeeting(
        absl::AbortedError(absl::StrCat(
            "the meeting was ended: ", PayloadStatus(frame.payload).message())),
        kEndedTime);
    in_vain_ = true;
  }
  return Refuse(connection, ended_);
}

absl::Status ControlServer::CheckHello(int32_t rank, const Hello& hello) const {
  if (hello.version != kProtocolVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("version of the control plane differs: ", kProtocolVersion,
                     " on ", name_, ", ", hello.version, " on rank ", rank));
  }
  if (hello.id_name != id_name_) {
    return absl::InvalidArgumentError(absl::StrCat("unique id differs: rank ",
                                                   rank, " has another than ",
                                                   name_, ", or none"));
  }
  if (rank == kNoRank) return absl::OkStatus();
  if (hello.world_size != world_size_) {
    return absl::InvalidArgumentError(
        absl::StrCat("world size differs: ", world_size_, " on ", name_, ", ",
                     hello.world_size, " on rank ", rank));
  }
  if (rank < 0 || rank >= world_size_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", rank, " is not one of the ", world_size_, " ranks"));
  }
  return absl::OkStatus();
}

absl::Status ControlServer::CheckProof(const Transcript& transcript,
                                       const Proof& proof) const {
  const int32_t rank = transcript.rank;
  if (!membership_.Verify(proof.mac, End::kRank, transcript)) {
    return absl::PermissionDeniedError(
        absl::StrCat("secret differs: rank ", rank, " has another than ", name_,
                     ", or one of them has none (REFIT_SECRET, "
                     "REFIT_SECRET_FILE)"));
  }
  if (rank == kNoRank) return absl::OkStatus();
  if (phase_ == Phase::kMet || by_rank_[rank] != nullptr) {
    return absl::AlreadyExistsError(
        absl::StrCat("two processes are rank ", rank, ": ", processes_[rank],
                     " and ", proof.claims.process));
  }
  return absl::OkStatus();
}

void ControlServer::Expire(Clock::time_point now) {
  for (const auto& connection : connections_) {
    if (connection->over || connection->deadline > now) continue;
    if (connection->closing || connection->rank < 0) {
      connection->over = true;
    } else if (phase_ == Phase::kMeeting) {
      // One that gives up would be missing: it is over for all.
      const std::vector<int32_t> missing = Absent();
      return EndMeeting(
          absl::DeadlineExceededError(absl::StrCat(
              "connect: ", missing.size(), " of ", world_size_,
              " ranks did not come before the deadline, the first is rank ",
              missing.front(), trouble_.empty() ? "" : "; ", trouble_)),
          seconds::zero());
    }
  }
  if (phase_ == Phase::kEnded && ended_until_ <= now) {
    if (owner_.fd() < 0 || in_vain_) return Close();
    // The ranks may try again.
    phase_ = Phase::kMeeting;
    left_.clear();
    trouble_.clear();
    meeting_reminder_ = WaitReminder();
  }
  if (phase_ == Phase::kMeeting) EndMeetingIfLeft(now);
  // Where nobody is here, nobody may ever come.
  if (phase_ == Phase::kMeeting && meeting_reminder_.IsDue(now) &&
      !NobodyIsHere()) {
    ReportWait("connect", RanksText(Absent()), meeting_reminder_.Seconds(now),
               trouble_);
  }
  if (phase_ == Phase::kMet) {
    steps_.Expire(now);
    steps_.ReportMissing(now);
  }
}

void ControlServer::EndMeeting(const absl::Status& status,
                               Clock::duration stay) {
  phase_ = Phase::kEnded;
  ended_ = status;
  ended_until_ = Clock::now() + stay;
  told_.assign(world_size_, false);
  for (int32_t rank = 0; rank < world_size_; ++rank) {
    Connection* const has_come = by_rank_[rank];
    if (has_come == nullptr) continue;
    Remove(rank);
    TellEnded(*has_come);
  }
}

// A rank that was here and does not come back is gone: to wait for it until the
// deadline would be in vain.
void ControlServer::EndMeetingIfLeft(Clock::time_point now) {
  for (const Left& left : left_) {
    if (left.until > now) continue;
    return EndMeeting(
        absl::UnavailableError(absl::StrCat(
            "rank ", left.rank, " is gone: ", processes_[left.rank],
            " had come, then ", left.reason, ", and it did not come again")),
        kEndedTime);
  }
}

bool ControlServer::TellEnded(Connection& connection) {
  // Once: then it comes for the next meeting.
  if (told_[connection.rank]) return PutOff(connection);
  told_[connection.rank] = true;
  if (std::count(told_.begin(), told_.end(), false) == 0) {
    ended_until_ = Clock::now();
  }
  return Refuse(connection, ended_);
}

std::vector<int32_t> ControlServer::Absent() const {
  std::vector<int32_t> absent;
  for (int32_t rank = 0; rank < world_size_; ++rank) {
    if (by_rank_[rank] == nullptr) absent.push_back(rank);
  }
  return absent;
}

void ControlServer::Remove(int32_t rank) {
  std::lock_guard lock(who_came_mutex_);
  by_rank_[rank] = nullptr;
}

Clock::time_point ControlServer::NextEvent() const {
  Clock::time_point next = Clock::time_point::max();
  for (const auto& connection : connections_) {
    const bool met = phase_ == Phase::kMet && connection->rank >= 0;
    if (!met || connection->closing) {
      next = std::min(next, connection->deadline);
    }
  }
  if (phase_ == Phase::kMeeting) {
    next = std::min(next, meeting_reminder_.next());
    for (const Left& left : left_) next = std::min(next, left.until);
  }
  if (phase_ == Phase::kEnded) next = std::min(next, ended_until_);
  if (phase_ == Phase::kMet) {
    next = std::min({next, steps_.NextDeadline(), steps_.NextReport()});
  }
  if (listener_.fd() >= 0 && accept_again_ > Clock::now()) {
    next = std::min(next, accept_again_);
  }
  return next;
}

void ControlServer::Queue(Connection& connection, SharedBytes bytes) {
  if (!connection.closing) connection.stream.Queue(std::move(bytes));
}

void ControlServer::SendToAll(const Frame& frame) {
  const SharedBytes bytes = EncodeShared(frame);
  for (Connection* connection : by_rank_) {
    if (connection != nullptr) Queue(*connection, bytes);
  }
}

void ControlServer::Flush(Connection& connection) {
  if (connection.over) return;
  const absl::Status sent = connection.stream.Flush();
  if (!sent.ok()) return Lose(connection, sent);
  // Not closed at once: bytes that come to a closed socket would make the
  // kernel throw away those that are still on their way to the other end.
  if (connection.closing && !connection.stream.has_unsent()) {
    connection.stream.EndOutput();
  }
}

bool ControlServer::Refuse(Connection& connection, const absl::Status& status,
                           FrameType type) {
  if (phase_ == Phase::kMeeting && type == FrameType::kRefused) {
    trouble_ = std::string(status.message());
  }
  Send(connection, {.type = type, .payload = StatusPayload(status)});
  CloseWhenSent(connection);
  return true;
}

// Whether the ranks have met, and one is not there any more. Whoever comes now
// comes for the next meeting, which begins when this one is closed; a host has
// none.
bool ControlServer::IsLeft() const {
  return phase_ == Phase::kMet && AbsentCount() > 0;
}

absl::Status ControlServer::UsedStatus() const {
  return absl::FailedPreconditionError(
      absl::StrCat("the unique id was used already: its ranks have met, and ",
                   RanksText(Absent()),
                   " left; wanted a new id, as a host serves one meeting"));
}

void ControlServer::EndUse() {
  if (!hosted_) return Close();
  // Ranks may yet come by this id in the place of a new one.
  EndMeeting(UsedStatus(), kEndedTime);
  in_vain_ = true;
}

bool ControlServer::PutOff(Connection& connection) {
  const bool has_met = phase_ == Phase::kMet;
  if (has_met && hosted_) return Refuse(connection, UsedStatus());
  return Refuse(
      connection,
      absl::UnavailableError(absl::StrCat(
          "it has not closed its last meeting yet, which ",
          has_met ? absl::StrCat(RanksText(Absent()), " left") : "has ended")),
      FrameType::kLater);
}

void ControlServer::CloseWhenSent(Connection& connection) {
  if (connection.closing) return;
  connection.closing = true;
  connection.deadline = Clock::now() + kCloseTime;
}

void ControlServer::Lose(Connection& connection, const absl::Status& reason) {
  connection.over = true;
  if (connection.closing || connection.rank < 0) return;
  const std::string why(reason.message());
  if (phase_ == Phase::kMeeting) {
    left_.push_back({connection.rank, Clock::now() + kGoneTime, why});
  }
  Leave(connection.rank, why);
}

void ControlServer::Leave(int32_t rank, const std::string& lost) {
  Remove(rank);
  if (phase_ != Phase::kMet) return;
  steps_.Leave(rank, lost);
  if (NobodyIsHere()) EndUse();
}

// The owner has no more use for the server, or all ranks have left: so nobody
// has.
void ControlServer::Close() {
  if (phase_ == Phase::kMet) {
    SendToAll({.type = FrameType::kGoodbye, .step = steps_.newest_step()});
  }
  if (phase_ == Phase::kMeeting) {
    for (Connection* rank : by_rank_) {
      if (rank != nullptr) PutOff(*rank);
    }
  }
  phase_ = Phase::kClosing;
  ReturnUniqueIdListener(id_name_, std::move(listener_));
  for (const auto& connection : connections_) {
    if (connection->rank < 0 && !connection->closing) connection->over = true;
    CloseWhenSent(*connection);
  }
}

}  // namespace refit::control
