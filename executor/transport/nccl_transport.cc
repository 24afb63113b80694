#include "refit/nccl_transport.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "executor/transport/enqueued_rounds.h"
#include "executor/transport/gathered_structs.h"
#include "executor/transport/handshake.h"
#include "executor/transport/nccl_api.h"
#include "executor/transport/nccl_communicator.h"
#include "executor/transport/nccl_connector.h"
#include "executor/waiting.h"

namespace refit {
namespace {

// How often the watchdog looks at a refit that is under way, and Wait at its
// end.
constexpr std::chrono::milliseconds kWatchPause(5);
constexpr std::chrono::microseconds kWaitPause(20);

// How long Wait polls without a pause: the end of a small refit should not be
// missed by the tens of microseconds that a pause takes.
constexpr std::chrono::milliseconds kWaitWithoutPause(2);

// A rank that is done waits for the others for so long after the deadline: the
// word of one that hangs, which says where, is on its way then.
constexpr std::chrono::milliseconds kLastWords(250);

// How long kernels have to end after an abort, before graphs that hold them are
// dropped all the same.
constexpr std::chrono::seconds kStopTime(2);

Deadline Now() { return std::chrono::steady_clock::now(); }

Deadline Later(Deadline deadline, std::chrono::milliseconds by) {
  return deadline > Deadline::max() - by ? Deadline::max() : deadline + by;
}

// `status`, with where it happened if it does not say so itself.
absl::Status InPlace(const absl::Status& status, const std::string& place) {
  if (absl::StartsWith(status.message(), place)) return status;
  return absl::Status(status.code(),
                      absl::StrCat(place, ": ", status.message()));
}

}  // namespace

// A refit is under way (`running_`) until Wait has seen its end. If it fails,
// on this rank or, as the control plane's thread hears, on another one, the
// watchdog stops it: only then do the calls of this rank return, and the next
// step begins.
class NcclTransport : public Transport, private Fence {
 public:
  explicit NcclTransport(NcclOptions options) : options_(std::move(options)) {
    control().OnAbort(
        [this](uint64_t step, const absl::Status& s) { Hear(step, s); });
  }
  ~NcclTransport() override;

  int32_t rank() const override { return options_.control->rank(); }
  int32_t world_size() const override { return options_.control->world_size(); }
  absl::Status Connect(const HandshakeRecord& record,
                       absl::Span<const Edge> edges,
                       Deadline deadline) override;
  absl::Status Handshake(const HandshakeRecord& record,
                         Deadline deadline) override;
  absl::StatusOr<std::vector<std::string>> Share(std::string_view mine,
                                                 absl::Span<const int32_t> to,
                                                 absl::Span<const int32_t> from,
                                                 Deadline deadline) override;
  Fence* fence() override { return links_.fence == nullptr ? nullptr : this; }
  void BeginRecording(Deadline deadline) override;
  void OnBreak(std::function<void()> callback) override {
    on_break_ = std::move(callback);
  }
  absl::Status BeginRefit(Deadline deadline) override;
  absl::Status Exchange(const ExchangeRound& round, Stream stream) override;
  void Replay() override;
  absl::Status EndRefit(Stream stream) override;
  absl::Status Wait() override;
  void Abort(const absl::Status& status) override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  // Of the fence of its links, with what failed the refit if that ended it.
  absl::Status Grant(absl::Span<const int32_t> movers, Stream s) override {
    return Outcome(links_.fence->Grant(movers, s));
  }
  absl::Status AwaitGrants(absl::Span<const int32_t> holders,
                           Stream s) override {
    return Outcome(links_.fence->AwaitGrants(holders, s));
  }
  absl::Status Finish(absl::Span<const int32_t> holders, Stream s) override {
    return Outcome(links_.fence->Finish(holders, s));
  }
  absl::Status AwaitFinishes(absl::Span<const int32_t> movers,
                             Stream s) override {
    return Outcome(links_.fence->AwaitFinishes(movers, s));
  }
  void Withdraw() override { links_.fence->Withdraw(); }
  const uint32_t* aborted() const override { return links_.fence->aborted(); }

  ControlPlane& control() { return *options_.control; }
  Device& device() { return *options_.device; }
  void BeginStep();
  absl::Status MakeLinks(absl::Span<const Edge> edges, Deadline deadline);
  absl::StatusOr<size_t> AddEnqueued(const ExchangeRound& round);
  absl::Status Issue(const ExchangeRound& round, Stream stream);
  absl::Status Outcome(const absl::Status& status);

  // The failure of the step this rank is in, or OK.
  absl::Status failure();
  void Hear(uint64_t step, const absl::Status& status);
  // The following are called with mutex_ held; those that take the lock let go
  // of it meanwhile.
  void SetFailure(const absl::Status& status);
  void TellFailure(Lock& lock);
  void Tell(Lock& lock, absl::Status status);
  void AwaitStopped(Lock& lock);
  void StopWork(Lock& lock);
  void CheckProgress();
  absl::Status AsyncError();
  std::string Unfinished();

  void Watch();

  NcclOptions options_;
  std::optional<nccl::Api> api_;

  // Made by Connect, when nothing is running. Used by the rank's thread and,
  // while a refit is running, by the watchdog.
  NcclLinks links_;
  std::unique_ptr<DeviceEvent> ended_;
  std::function<void()> on_break_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread watchdog_;
  // All below is guarded by mutex_.
  bool closing_ = false;
  bool running_ = false;       // from BeginRefit until Wait, or until stopped
  bool all_enqueued_ = false;  // of the refit that is running
  bool over_ = false;          // on this rank
  bool broken_ = true;         // until Connect, and after work was stopped
  Deadline deadline_;          // of the refit
  EnqueuedRounds enqueued_;    // but for MarkEnd

  uint64_t step_ = 0;           // this rank is in
  bool between_steps_ = false;  // nobody may fail then
  absl::Status failure_;        // of the step
  // All ranks are asked whether the refit is over: what they answer together is
  // how it ended, whoever fails meanwhile.
  bool deciding_ = false;
  bool untold_ = false;  // the others have yet to hear of failure_
  int telling_ = 0;      // threads that are telling them
  // What the control plane said last; it may be ahead of step_.
  uint64_t heard_step_ = 0;
  absl::Status heard_;
};

NcclTransport::~NcclTransport() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (watchdog_.joinable()) watchdog_.join();
  {
    // Freeing what a waiting kernel uses would wait for it.
    Lock lock(mutex_);
    if (running_) StopWork(lock);
  }
  // Before anything that its callback touches is gone.
  options_.control.reset();
}

absl::Status NcclTransport::failure() {
  std::lock_guard lock(mutex_);
  return failure_;
}

// A failure is told, and what it ends has ended, in the step that it is of.
void NcclTransport::BeginStep() {
  {
    Lock lock(mutex_);
    changed_.wait(
        lock, [&] { return telling_ == 0 && (!running_ || failure_.ok()); });
  }
  const uint64_t step = control().BeginStep();
  std::lock_guard lock(mutex_);
  step_ = step;
  failure_ = heard_step_ == step ? heard_ : absl::OkStatus();
  untold_ = false;
}

void NcclTransport::Hear(uint64_t step, const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    heard_step_ = step;
    heard_ = status;
    // A later step's is taken up by BeginStep.
    if (step == step_ && !deciding_ && failure_.ok()) failure_ = status;
  }
  changed_.notify_all();
}

// The first failure of a step counts.
void NcclTransport::SetFailure(const absl::Status& status) {
  if (!failure_.ok()) return;
  failure_ = status;
  untold_ = true;
  changed_.notify_all();
}

void NcclTransport::TellFailure(Lock& lock) {
  if (std::exchange(untold_, false)) Tell(lock, failure_);
}

void NcclTransport::Tell(Lock& lock, absl::Status status) {
  ++telling_;
  lock.unlock();
  control().Abort(status);
  lock.lock();
  --telling_;
  changed_.notify_all();
}

// What is under way ends first, so that the caller may free memory.
void NcclTransport::AwaitStopped(Lock& lock) {
  TellFailure(lock);
  changed_.wait(lock, [&] { return !running_; });
}

void NcclTransport::Abort(const absl::Status& status) {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return !between_steps_; });
  // The control plane's word counts for all ranks, here too.
  if (deciding_) return Tell(lock, status);
  SetFailure(status);
  TellFailure(lock);
}

// Ends kernels that wait for peers. On the watchdog, or when it is gone.
void NcclTransport::StopWork(Lock& lock) {
  const bool is_enqueued = all_enqueued_;
  lock.unlock();
  if (links_.fence != nullptr) links_.fence->Abort();
  // Both at once: an abort waits for the kernels of its communicator, which may
  // stand behind the other's, on one stream or in one graph.
  std::vector<std::thread> aborts;
  for (NcclCommunicator* communicator :
       {links_.domain.get(), links_.world.get()}) {
    if (communicator == nullptr) continue;
    aborts.emplace_back([this, communicator] {
      (void)device().MakeCurrent();
      communicator->Abort();
    });
  }
  // An abort waits for graphs too: they are dropped once their kernels have
  // ended, or seem never to.
  const Deadline limit = Now() + kStopTime;
  while (is_enqueued && !aborts.empty() && Now() < limit) {
    const absl::StatusOr<bool> reached = ended_->Reached();
    if (!reached.ok() || *reached) break;
    std::this_thread::sleep_for(kWatchPause);
  }
  if (on_break_) on_break_();
  for (std::thread& abort : aborts) abort.join();
  lock.lock();
  running_ = false;
  broken_ = true;
  changed_.notify_all();
}

absl::Status NcclTransport::AsyncError() {
  for (NcclCommunicator* communicator :
       {links_.domain.get(), links_.world.get()}) {
    if (communicator == nullptr) continue;
    absl::Status status = communicator->AsyncError();
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Sets over_ or failure_, if it has come to that.
void NcclTransport::CheckProgress() {
  if (absl::Status error = AsyncError(); !error.ok()) {
    return SetFailure(InPlace(error, Unfinished()));
  }
  if (all_enqueued_) {
    const absl::StatusOr<bool> reached = ended_->Reached();
    if (!reached.ok()) {
      return SetFailure(InPlace(reached.status(), Unfinished()));
    }
    over_ = *reached;
  }
  if (!over_ && Now() > deadline_) {
    SetFailure(absl::DeadlineExceededError(
        absl::StrCat(Unfinished(), " did not end before the deadline")));
  }
}

void NcclTransport::Watch() {
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] {
      return closing_ ||
             (running_ && !between_steps_ && (!over_ || !failure_.ok()));
    });
    if (closing_) return;
    if (failure_.ok()) CheckProgress();
    if (failure_.ok()) {
      changed_.wait_for(lock, kWatchPause);
      continue;
    }
    // Told first, since the others wait for what is aborted here.
    TellFailure(lock);
    StopWork(lock);
  }
}

// What the refit waits for.
std::string NcclTransport::Unfinished() {
  // Rounds are in order on one stream: where it waits in a direct one, no
  // earlier round waits.
  if (links_.fence != nullptr) {
    const std::vector<int32_t> peers = links_.fence->Waiting();
    if (!peers.empty()) {
      return absl::StrCat("direct round with ",
                          peers.size() == 1 ? "rank " : "ranks ",
                          absl::StrJoin(peers, ", "));
    }
  }
  return enqueued_.Unfinished().value_or("the refit");
}

absl::Status NcclTransport::MakeLinks(absl::Span<const Edge> edges,
                                      Deadline deadline) {
  absl::Status status = device().MakeCurrent();
  if (status.ok() && ended_ == nullptr) {
    absl::StatusOr<std::unique_ptr<DeviceEvent>> event = device().CreateEvent();
    status = event.status();
    if (event.ok()) ended_ = *std::move(event);
    status.Update(enqueued_.CreateProgress(device()));
  }
  if (!status.ok()) {
    control().Abort(status);
    return status;
  }
  NcclConnector connector(control(), device(), options_.hosts, api_, deadline,
                          [this] { return failure(); });
  absl::StatusOr<NcclLinks> links = connector.Connect(edges);
  if (!links.ok()) return links.status();
  links_ = *std::move(links);
  return absl::OkStatus();
}

absl::Status NcclTransport::Connect(const HandshakeRecord& record,
                                    absl::Span<const Edge> edges,
                                    Deadline deadline) {
  {
    Lock lock(mutex_);
    if (running_) {
      SetFailure(absl::CancelledError("connecting anew"));
      AwaitStopped(lock);
    }
    broken_ = true;
  }
  links_.domain.reset();
  links_.world.reset();
  absl::Status status = Handshake(record, deadline);
  if (!status.ok()) return status;
  // Not earlier: until all are here, a peer may still signal to this fence.
  links_.fence.reset();
  status = MakeLinks(edges, deadline);
  if (!status.ok()) return status;
  std::lock_guard lock(mutex_);
  broken_ = false;
  if (!watchdog_.joinable()) watchdog_ = std::thread([this] { Watch(); });
  return absl::OkStatus();
}

absl::Status NcclTransport::Handshake(const HandshakeRecord& record,
                                      Deadline deadline) {
  BeginStep();
  const absl::StatusOr<std::vector<HandshakeRecord>> records =
      GatherStructs(control(), record, "handshake", deadline);
  return records.ok() ? CompareRecords(*records) : records.status();
}

absl::StatusOr<std::vector<std::string>> NcclTransport::Share(
    std::string_view mine, absl::Span<const int32_t> to,
    absl::Span<const int32_t> from, Deadline deadline) {
  BeginStep();
  return control().Exchange(mine, to, from, "sharing", deadline);
}

void NcclTransport::BeginRecording(Deadline deadline) {
  std::lock_guard lock(mutex_);
  deadline_ = deadline;
  enqueued_.Forget();
}

absl::Status NcclTransport::BeginRefit(Deadline deadline) {
  BeginStep();
  std::lock_guard lock(mutex_);
  if (broken_) {
    return absl::FailedPreconditionError(
        "the transport is not connected, or a refit failed since: Connect "
        "makes it whole");
  }
  running_ = true;
  all_enqueued_ = false;
  over_ = false;
  deadline_ = deadline;
  enqueued_.Restart();
  changed_.notify_all();
  return absl::OkStatus();
}

void NcclTransport::Replay() {
  std::lock_guard lock(mutex_);
  enqueued_.Repeat();
}

absl::Status NcclTransport::Exchange(const ExchangeRound& round,
                                     Stream stream) {
  if (round.operations.empty()) return absl::OkStatus();
  const absl::Status status = Outcome(Issue(round, stream));
  if (status.ok()) return status;
  return InPlace(status, EnqueuedRounds::Text(round));
}

// Of a step of the refit: if it failed, so has the refit, which has stopped
// when this returns. What was the first to fail is what counts.
absl::Status NcclTransport::Outcome(const absl::Status& status) {
  if (status.ok()) return status;
  Lock lock(mutex_);
  // A recording concerns nobody else.
  if (!running_ && failure_.ok()) return status;
  SetFailure(status);
  AwaitStopped(lock);
  return failure_;
}

absl::Status NcclTransport::Issue(const ExchangeRound& round, Stream stream) {
  NcclCommunicator* const communicator =
      (round.route == fb::Route::kNetwork ? links_.world : links_.domain).get();
  if (communicator == nullptr) {
    return absl::FailedPreconditionError(
        "no communicator: Connect was given no edge of this route");
  }
  absl::Status status = device().MakeCurrent();
  if (!status.ok()) return status;
  const absl::StatusOr<size_t> entry = AddEnqueued(round);
  if (!entry.ok()) return entry.status();
  status = communicator->Exchange(round.operations, stream, deadline_,
                                  [this] { return failure(); });
  if (!status.ok()) return InPlace(status, EnqueuedRounds::Text(round));
  return enqueued_.MarkEnd(*entry, stream);
}

// Before NCCL is called, so that the watchdog knows what may hang there.
absl::StatusOr<size_t> NcclTransport::AddEnqueued(const ExchangeRound& round) {
  std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  return enqueued_.Add(round);
}

absl::Status NcclTransport::EndRefit(Stream stream) {
  const absl::StatusOr<bool> capturing = device().IsCapturing(stream);
  if (!capturing.ok()) return capturing.status();
  std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  if (*capturing) {
    // Nothing runs yet: who replays the graph also waits for it.
    running_ = false;
    return absl::OkStatus();
  }
  absl::Status status = ended_->Record(stream);
  all_enqueued_ = status.ok();
  return status;
}

absl::Status NcclTransport::Wait() {
  const Deadline pause_from =
      std::chrono::steady_clock::now() + kWaitWithoutPause;
  Lock lock(mutex_);
  while (running_ && !over_ && failure_.ok()) {
    CheckProgress();
    if (over_ || !failure_.ok()) break;
    lock.unlock();
    if (std::chrono::steady_clock::now() > pause_from) {
      std::this_thread::sleep_for(kWaitPause);
    }
    const absl::Status interrupted = PollInterruption();
    lock.lock();
    if (!interrupted.ok()) SetFailure(interrupted);
  }
  if (failure_.ok()) {
    deciding_ = true;
    lock.unlock();
    const absl::Status status =
        control()
            .AllGather("", "end of refit", Later(deadline_, kLastWords))
            .status();
    lock.lock();
    deciding_ = false;
    if (!status.ok()) SetFailure(status);
  }
  if (failure_.ok()) {
    running_ = false;
    return absl::OkStatus();
  }
  AwaitStopped(lock);
  return failure_;
}

absl::StatusOr<std::unique_ptr<Transport>> CreateNcclTransport(
    NcclOptions options) {
  if (options.hosts.size() !=
      static_cast<size_t>(options.control->world_size())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hosts names ", options.hosts.size(), " ranks when the world has ",
        options.control->world_size()));
  }
  return std::make_unique<NcclTransport>(std::move(options));
}

}  // namespace refit
