#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cassert>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "control/file_descriptor.h"
#include "control/frame.h"
#include "control/joining.h"
#include "control/membership.h"
#include "control/own_thread.h"
#include "control/server.h"
#include "control/tcp_socket.h"
#include "control/waiting.h"
#include "refit/control_plane.h"

namespace refit {
namespace {

using control::Clock;
using control::Frame;
using control::FrameType;
using std::chrono::seconds;

constexpr seconds kGoodbyeTime{2};

class TcpControlPlane : public ControlPlane {
 public:
  TcpControlPlane(const TcpRendezvous& rendezvous, control::Joined joined)
      : rank_(rendezvous.rank),
        world_size_(rendezvous.world_size),
        server_(control::ListenerOf(rendezvous.hosted)),
        secret_(rendezvous.secret),
        joined_(std::move(joined)) {}
  ~TcpControlPlane() override;

  absl::Status StartReading();

  int32_t rank() const override { return rank_; }
  int32_t world_size() const override { return world_size_; }
  uint64_t BeginStep(StepPurpose purpose) override;
  bool TakeMissedStep() override {
    std::lock_guard lock(mutex_);
    return std::exchange(missed_, false);
  }
  absl::StatusOr<std::vector<OfRank<std::string>>> Compare(
      std::string_view mine, std::string_view what, Deadline deadline) override;
  absl::StatusOr<std::vector<std::string>> Exchange(
      std::string_view mine, absl::Span<const int32_t> to,
      absl::Span<const int32_t> from, std::string_view what,
      Deadline deadline) override;
  void Abort(const absl::Status& status) override;
  void OnAbort(
      std::function<void(uint64_t, const absl::Status&)> callback) override;
  std::string SharedKey(std::string_view purpose) const override {
    if (secret_.empty()) return "";
    return control::Membership(secret_).KeyFor(purpose);
  }

 private:
  absl::StatusOr<std::string> Collect(bool exchanges, std::string_view mine,
                                      absl::Span<const int32_t> to,
                                      absl::Span<const int32_t> from,
                                      std::string_view what, Deadline deadline);
  absl::Status CheckRanks(absl::Span<const int32_t> ranks,
                          std::string_view what) const;
  absl::Status FailOnAll(const absl::Status& status);
  absl::Status GoneStatus(const absl::Status& why) const {
    return absl::UnavailableError(
        absl::StrCat(server_, " is gone: ", why.message()));
  }
  absl::Status Unreadable() const {
    return absl::InternalError(
        absl::StrCat(server_, " sent a result that cannot be read"));
  }
  void Send(const Frame& frame);
  // No step after `last_step` can succeed any more; without it, nor this one.
  void SetLost(const absl::Status& status,
               std::optional<uint64_t> last_step = std::nullopt);

  void TakeFailure(const Frame& aborted);
  void TellFailure(std::unique_lock<std::mutex>& lock);

  // On the reading thread.
  void ReadLoop();
  absl::StatusOr<Frame> Receive();
  bool Dispatch(Frame& frame);

  const int32_t rank_;
  const int32_t world_size_;
  const char* const server_;  // in messages
  const std::string secret_;
  control::Joined joined_;

  // Held while frames are sent, and from reading the step that one belongs to,
  // so that steps are sent in order. Taken before `mutex_`.
  std::mutex send_mutex_;
  // An eventfd. What the connection has had no room for the reading thread
  // sends: a server that is stopped for a while ends no more than what waits
  // for it.
  FileDescriptor has_unsent_;

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t step_ = 0;
  uint64_t sequence_ = 0;              // of the step's newest collective
  std::optional<std::string> answer_;  // to it
  std::map<uint64_t, Frame> early_;    // kAborted of later steps
  absl::Status step_failure_;
  absl::Status lost_;     // why no step can succeed any more
  bool missed_ = false;   // TakeMissedStep
  bool untold_ = false;   // the callback has yet to hear of step_failure_
  bool telling_ = false;  // the callback is running
  bool closing_ = false;
  bool read_all_ = false;  // nothing more will be read
  std::function<void(uint64_t, const absl::Status&)> callback_;

  std::thread thread_;
};

TcpControlPlane::~TcpControlPlane() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (!thread_.joinable()) return;
  {
    std::lock_guard send_lock(send_mutex_);
    Send({.type = FrameType::kGoodbye, .rank = rank_});
  }
  {
    // The server closes its end when it has read the goodbye; to close ours
    // earlier could overtake it.
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, Clock::now() + kGoodbyeTime,
                        [&] { return read_all_; });
  }
  shutdown(joined_.stream.socket().fd(), SHUT_RDWR);
  thread_.join();
}

absl::Status TcpControlPlane::StartReading() {
  has_unsent_ = FileDescriptor(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (has_unsent_.fd() < 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("eventfd: ", std::strerror(errno)));
  }
  return StartThread(thread_, "the thread of the control plane",
                     [this] { ReadLoop(); });
}

uint64_t TcpControlPlane::BeginStep(StepPurpose purpose) {
  Frame frame{.type = FrameType::kBegin,
              .sequence = static_cast<uint64_t>(purpose),
              .rank = rank_};
  {
    std::lock_guard send_lock(send_mutex_);
    {
      std::unique_lock lock(mutex_);
      // So that the callback never speaks of a step that is over.
      changed_.wait(lock, [&] { return !telling_; });
      frame.step = ++step_;
      sequence_ = 0;
      step_failure_ = absl::OkStatus();
      missed_ = false;
      untold_ = false;
      early_.erase(early_.begin(), early_.lower_bound(step_));
      if (const auto early = early_.find(step_); early != early_.end()) {
        TakeFailure(early->second);
      } else if (!lost_.ok()) {
        step_failure_ = lost_;
        untold_ = true;
      }
    }
    changed_.notify_all();
    Send(frame);
  }
  // What is known already is heard before this rank does anything in the step.
  std::unique_lock lock(mutex_);
  TellFailure(lock);
  changed_.wait(lock, [&] { return !telling_; });
  return frame.step;
}

absl::StatusOr<std::vector<OfRank<std::string>>> TcpControlPlane::Compare(
    std::string_view mine, std::string_view what, Deadline deadline) {
  const absl::StatusOr<std::string> result =
      Collect(/*exchanges=*/false, mine, {}, {}, what, deadline);
  if (!result.ok()) return result.status();
  const auto values = control::ParseResult(*result);
  if (!values.has_value() || values->empty()) return Unreadable();
  std::vector<OfRank<std::string>> told;
  for (const auto& [rank, value] : *values) {
    told.push_back({rank, std::string(value)});
  }
  return told;
}

absl::StatusOr<std::vector<std::string>> TcpControlPlane::Exchange(
    std::string_view mine, absl::Span<const int32_t> to,
    absl::Span<const int32_t> from, std::string_view what, Deadline deadline) {
  absl::Status status = CheckRanks(to, what);
  if (status.ok()) status = CheckRanks(from, what);
  if (!status.ok()) return FailOnAll(status);
  const absl::StatusOr<std::string> result =
      Collect(/*exchanges=*/true, mine, to, from, what, deadline);
  if (!result.ok()) return result.status();
  const auto given = control::ParseResult(*result);
  if (!given.has_value() || given->size() != from.size()) return Unreadable();
  std::vector<std::string> values;
  for (const auto& of_peer : *given) values.emplace_back(of_peer.value);
  return values;
}

// One collective: gives the server this rank's part, and waits for its word.
absl::StatusOr<std::string> TcpControlPlane::Collect(
    bool exchanges, std::string_view mine, absl::Span<const int32_t> to,
    absl::Span<const int32_t> from, std::string_view what, Deadline deadline) {
  Frame frame{.type = FrameType::kContribution, .rank = rank_};
  frame.payload = StructBytes(
      control::Contribution{.exchanges = exchanges,
                            .remaining_ms = control::RemainingMs(deadline),
                            .what = std::string(what),
                            .to = {to.begin(), to.end()},
                            .from = {from.begin(), from.end()},
                            .bytes = std::string(mine)});
  if (frame.payload.size() > control::kPayloadBytesMax) {
    return FailOnAll(absl::ResourceExhaustedError(absl::StrCat(
        std::string(what), ": ", frame.payload.size(),
        " bytes exceed the limit of ", control::kPayloadBytesMax)));
  }
  const Clock::time_point limit = control::AnswerLimit(deadline);
  {
    std::lock_guard send_lock(send_mutex_);
    {
      std::lock_guard lock(mutex_);
      if (!step_failure_.ok()) return step_failure_;
      answer_.reset();
      frame.step = step_;
      frame.sequence = ++sequence_;
    }
    Send(frame);
  }
  std::unique_lock lock(mutex_);
  // The server reports who is waited for.
  WaitUntil(
      changed_, lock, limit,
      [&] { return answer_.has_value() || !step_failure_.ok(); },
      [](int64_t) {});
  // In this order: what the server has answered, it has answered to all.
  if (answer_.has_value()) return *std::move(answer_);
  if (!step_failure_.ok()) return step_failure_;
  step_failure_ = InterruptionStatus();
  if (step_failure_.ok()) {
    step_failure_ = absl::DeadlineExceededError(
        absl::StrCat(std::string(what), ": ", server_,
                     " did not answer before the deadline"));
  }
  const absl::Status status = step_failure_;
  lock.unlock();
  return FailOnAll(status);
}

absl::Status TcpControlPlane::CheckRanks(absl::Span<const int32_t> ranks,
                                         std::string_view what) const {
  for (int32_t rank : ranks) {
    if (rank >= 0 && rank < world_size_) continue;
    return absl::InvalidArgumentError(absl::StrCat(std::string(what), ": rank ",
                                                   rank, " is not one of the ",
                                                   world_size_, " ranks"));
  }
  return absl::OkStatus();
}

absl::Status TcpControlPlane::FailOnAll(const absl::Status& status) {
  Abort(status);
  return status;
}

void TcpControlPlane::Abort(const absl::Status& status) {
  assert(!status.ok());
  std::lock_guard send_lock(send_mutex_);
  Frame frame{.type = FrameType::kAbort, .rank = rank_};
  frame.payload = control::StatusPayload(status);
  {
    std::lock_guard lock(mutex_);
    frame.step = step_;
  }
  // This rank fails when the server says so: another may have been first.
  Send(frame);
}

void TcpControlPlane::OnAbort(
    std::function<void(uint64_t, const absl::Status&)> callback) {
  std::lock_guard lock(mutex_);
  callback_ = std::move(callback);
}

// The caller holds `send_mutex_`. If the connection is at its end, the reading
// thread finds that too, and why.
void TcpControlPlane::Send(const Frame& frame) {
  const bool waits = joined_.stream.has_unsent();
  joined_.stream.Queue(control::EncodeShared(frame));
  if (waits) return;
  (void)joined_.stream.Flush();
  if (joined_.stream.has_unsent()) eventfd_write(has_unsent_.fd(), 1);
}

void TcpControlPlane::SetLost(const absl::Status& status,
                              std::optional<uint64_t> last_step) {
  {
    std::lock_guard lock(mutex_);
    if (!lost_.ok() || closing_) return;
    lost_ = status;
    if (step_failure_.ok()) {
      step_failure_ = status;
      untold_ = !last_step.has_value() || *last_step < step_;
    }
  }
  changed_.notify_all();
}

void TcpControlPlane::ReadLoop() {
  while (true) {
    absl::StatusOr<Frame> frame = Receive();
    if (!frame.ok()) SetLost(GoneStatus(frame.status()));
    if (!frame.ok() || !Dispatch(*frame)) break;
    std::unique_lock lock(mutex_);
    TellFailure(lock);
  }
  // The server waits for this before it ends.
  joined_.stream.EndOutput();
  std::unique_lock lock(mutex_);
  read_all_ = true;
  changed_.notify_all();
  TellFailure(lock);
}

// The server's next frame. Sends what could not be sent before.
absl::StatusOr<Frame> TcpControlPlane::Receive() {
  control::FrameStream& stream = joined_.stream;
  while (true) {
    absl::StatusOr<std::optional<Frame>> frame = stream.Take();
    if (!frame.ok()) return frame.status();
    if (frame->has_value()) return **std::move(frame);
    std::unique_lock send_lock(send_mutex_);
    (void)stream.Flush();
    const int events = stream.has_unsent() ? POLLIN | POLLOUT : POLLIN;
    send_lock.unlock();
    pollfd polled[] = {{stream.socket().fd(), static_cast<short>(events), 0},
                       {has_unsent_.fd(), POLLIN, 0}};
    poll(polled, 2, -1);
    eventfd_t none;
    if (polled[1].revents != 0) eventfd_read(has_unsent_.fd(), &none);
  }
}

// Returns false if nothing more is to be read.
bool TcpControlPlane::Dispatch(Frame& frame) {
  if (frame.type == FrameType::kGoodbye) {
    // Nobody failed: a step that has begun, and which needs no more
    // collectives, may go on.
    SetLost(absl::UnavailableError(
                absl::StrCat(server_, " has closed its control plane")),
            frame.step);
    return false;
  }
  if (frame.type != FrameType::kResult && frame.type != FrameType::kAborted) {
    SetLost(GoneStatus(control::OffProtocol()));
    return false;
  }
  {
    std::lock_guard lock(mutex_);
    if (frame.type == FrameType::kResult) {
      if (frame.step == step_ && frame.sequence == sequence_) {
        answer_ = std::move(frame.payload);
      }
    } else if (frame.step > step_) {
      early_.emplace(frame.step, std::move(frame));
    } else if (frame.step == step_ && step_failure_.ok()) {
      TakeFailure(frame);
    }
  }
  changed_.notify_all();
  return true;
}

// The caller holds `mutex_`.
void TcpControlPlane::TakeFailure(const Frame& aborted) {
  step_failure_ = control::PayloadStatus(aborted.payload);
  missed_ = aborted.sequence == control::kMissed;
  untold_ = aborted.rank != rank_;
}

void TcpControlPlane::TellFailure(std::unique_lock<std::mutex>& lock) {
  if (!untold_) return;
  untold_ = false;
  if (callback_ == nullptr || closing_) return;
  const auto callback = callback_;
  const uint64_t step = step_;
  const absl::Status status = step_failure_;
  telling_ = true;
  lock.unlock();
  callback(step, status);
  lock.lock();
  telling_ = false;
  changed_.notify_all();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ControlPlane>> ConnectTcp(
    const TcpRendezvous& rendezvous, ControlPlane::Deadline deadline) {
  absl::StatusOr<control::Joined> joined = control::Join(rendezvous, deadline);
  if (!joined.ok()) return joined.status();
  auto plane =
      std::make_unique<TcpControlPlane>(rendezvous, *std::move(joined));
  absl::Status status = plane->StartReading();
  if (!status.ok()) return status;
  return plane;
}

absl::Status EndMeetingTcp(const TcpRendezvous& rendezvous,
                           const absl::Status& reason,
                           ControlPlane::Deadline deadline) {
  return control::Join(rendezvous, deadline, &reason).status();
}

Meeting::Meeting(std::unique_ptr<ControlPlane> control)
    : control_(std::move(control)) {
  rendezvous_.rank = control_->rank();
  rendezvous_.world_size = control_->world_size();
}

void Meeting::OnAbort(AbortCallback callback) {
  if (control_ != nullptr) return control_->OnAbort(std::move(callback));
  on_abort_ = std::move(callback);
}

absl::Status Meeting::Meet(ControlPlane::Deadline deadline) {
  if (control_ != nullptr) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<ControlPlane>> control =
      ConnectTcp(rendezvous_, deadline);
  if (!control.ok()) return control.status();
  control_ = *std::move(control);
  control_->OnAbort(std::exchange(on_abort_, nullptr));
  return absl::OkStatus();
}

}  // namespace refit
