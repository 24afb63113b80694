#include "refit/nccl_transport.h"

#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "control/log.h"
#include "control/waiting.h"
#include "executor/device/host_identity.h"
#include "executor/transport/abort_thread.h"
#include "executor/transport/enqueued_rounds.h"
#include "executor/transport/last_words.h"
#include "executor/transport/nccl_api.h"
#include "executor/transport/nccl_communicator.h"
#include "executor/transport/nccl_connector.h"
#include "executor/transport/supervised_transport.h"

namespace refit {
namespace {

// How long kernels have to end after an abort, before graphs that hold them are
// dropped all the same; and how often that is looked at. Before the abort, a
// group has as long to become part of a capture.
constexpr std::chrono::seconds kStopTime(2);
constexpr std::chrono::milliseconds kStopPause(5);

Deadline Now() { return std::chrono::steady_clock::now(); }

}  // namespace

static absl::Status NoCommunicator() {
  return absl::FailedPreconditionError(
      "no communicator: Connect was given no edge of this route");
}

// What work that never ends may still use is never freed.
static void LeaveBehind(std::vector<NcclLinks::Touch> touches) {
  static std::mutex mutex;
  static auto* const left = new std::vector<NcclLinks::Touch>;
  const std::lock_guard lock(mutex);
  for (NcclLinks::Touch& touch : touches) left->push_back(std::move(touch));
}

// The supervisor knows how far a refit is. If it fails, on this rank or, as the
// control plane's thread hears, on another one, the supervisor's thread stops
// it: only then do the calls of this rank return, and the next step begins.
class NcclTransport : public SupervisedTransport, private Fence {
 public:
  explicit NcclTransport(NcclOptions options)
      : SupervisedTransport(
            std::move(options.meeting),
            {.probe = [this](bool is_enqueued) { return Probe(is_enqueued); },
             .stop = [this](bool is_enqueued) { return StopWork(is_enqueued); },
             // A new thread's current GPU is the first. A rank on another GPU
             // would make a context there: 0.2 s under the supervisor's lock,
             // and memory.
             .begin_thread = [this] { (void)device().MakeThreadOwn(); },
             .device_failure = [this] { return ended_->Failure(); }}),
        options_(std::move(options)) {}
  ~NcclTransport() override {
    (void)NcclTransport::Leave();
    (void)EndLinks(links_, Now() + options_.abort_time);
  }

  absl::Status Connect(const HandshakeRecord& record,
                       absl::Span<const Edge> edges,
                       Deadline deadline) override;
  Fence* fence() override { return links_.fence == nullptr ? nullptr : this; }
  std::vector<std::string> notices() const override { return links_.notices; }
  void OnBreak(std::function<void()> callback) override {
    on_break_ = std::move(callback);
  }
  absl::Status BeginRefit(Deadline deadline, bool is_captured) override;
  absl::Status Exchange(const ExchangeRound& round, Stream stream) override;
  absl::Status EndRefit(Stream stream) override;
  absl::Status Settle(const absl::Status& status, Stream stream) override;
  absl::Status AwaitOwnEnd() override {
    return WithUsers(supervisor_.AwaitOver());
  }
  absl::Status Wait() override;
  absl::Status Leave() override;

 private:
  // Calls of the links' fence, with what failed the refit if that ended it.
  absl::Status Grant(absl::Span<const int32_t> origins, Stream s) override {
    return Outcome(links_.fence->Grant(origins, s));
  }
  absl::Status AwaitGrants(absl::Span<const int32_t> targets,
                           Stream s) override {
    return Outcome(links_.fence->AwaitGrants(targets, s));
  }
  absl::Status Progress(absl::Span<const int32_t> targets, Stream s) override {
    return Outcome(links_.fence->Progress(targets, s));
  }
  absl::Status Finish(absl::Span<const int32_t> targets, Stream s) override {
    return Outcome(links_.fence->Finish(targets, s));
  }
  absl::Status AwaitFinishes(absl::Span<const int32_t> origins,
                             Stream s) override {
    return Outcome(links_.fence->AwaitFinishes(origins, s));
  }
  void Withdraw() override { links_.fence->Withdraw(); }
  const uint32_t* aborted() const override { return links_.fence->aborted(); }
  absl::Status ObserveAbort(Stream s) override {
    return Outcome(links_.fence->ObserveAbort(s));
  }

  Device& device() { return *options_.device; }
  absl::Status MakeTools();
  absl::Status MakeAbortThreads(absl::Span<const Edge> edges);
  absl::Status EndLinks(NcclLinks& links, Deadline deadline);
  std::string AbortHangs() const;
  absl::Status MakeLinks(absl::Span<const Edge> edges, Deadline deadline);
  absl::StatusOr<size_t> AddEnqueued(const ExchangeRound& round);
  absl::Status Issue(const ExchangeRound& round, Stream stream);
  absl::Status IssueGroup(const ExchangeRound& round,
                          absl::Span<const Operation> operations,
                          Stream stream);
  absl::Status IssueBroadcasts(absl::Span<const Operation> operations,
                               Stream stream);
  void SetCapturesGroup(bool captures);
  void AwaitCapturedGroup();
  absl::Status Outcome(const absl::Status& status) {
    return status.ok() ? status : supervisor_.Fail(status);
  }
  absl::Status BeginUse();
  bool IsUsing() { return links_.use != nullptr && links_.use->IsUsing(); }
  void AwaitEnded();
  std::string AwaitUnused();
  absl::Status WithUsers(const absl::Status& status);
  absl::StatusOr<bool> Probe(bool is_enqueued);
  absl::Status StopWork(bool is_enqueued);
  bool BeginAborts(const NcclLinks& links);
  bool AwaitAborts(Deadline deadline);
  absl::Status AsyncError();
  std::string Unfinished();

  NcclOptions options_;
  std::optional<nccl::Api> api_;

  // Made by Connect, when nothing is running. Used by the rank's thread and,
  // while a refit is under way, by the supervisor's.
  NcclLinks links_;
  bool has_tools_ = false;
  std::vector<std::unique_ptr<AbortThread>> aborts_;  // one a communicator
  std::unique_ptr<DeviceEvent> ended_;
  // What is broadcast in a round goes beside what else goes in it.
  std::unique_ptr<DeviceStream> broadcast_stream_;
  std::unique_ptr<DeviceEvent> before_broadcasts_;
  std::unique_ptr<DeviceEvent> broadcast_;
  std::function<void()> on_break_;

  // These are the rank's thread's.
  bool is_captured_ = false;   // the refit that began last
  bool has_given_up_ = false;  // on peers that use this rank's memory

  std::mutex mutex_;
  Deadline deadline_;        // of the refit; guarded by mutex_
  EnqueuedRounds enqueued_;  // guarded by mutex_, but for MarkEnd
  // NCCL puts a group of the rank's thread into a capture. Guarded by mutex_.
  bool captures_group_ = false;
  std::condition_variable group_is_captured_;
};

absl::Status NcclTransport::Leave() {
  // Freeing what a waiting kernel uses would wait for it.
  supervisor_.Close();
  if (links_.use != nullptr) {
    links_.use->Revoke();
    links_.use->End();
  }
  // Before anything that its callback touches is gone. Those that use this
  // rank's memory hear of it, and stop.
  meeting_.Close();
  const std::string text = AwaitUnused();
  links_.use.reset();
  if (text.empty()) return absl::OkStatus();
  Log(LogLevel::kWarning, absl::StrCat("close of rank ", rank(), ": ", text));
  return absl::FailedPreconditionError(text);
}

// Before this rank enqueues anything: from then on it may use memory of peers.
absl::Status NcclTransport::BeginUse() {
  if (links_.use == nullptr) return absl::OkStatus();
  const std::optional<int32_t> gone = links_.use->Begin();
  if (!gone.has_value()) return absl::OkStatus();
  // That rank has told why, and its word is on its way.
  const Deadline limit = Now() + kStopTime;
  while (supervisor_.failure().ok() && Now() < limit) {
    std::this_thread::sleep_for(kStopPause);
  }
  return supervisor_.Fail(absl::AbortedError(
      absl::StrCat("rank ", *gone, " has left this refit already")));
}

// After an abort: returns when this rank's work has ended, or seems never to.
// What of it has not begun by then observes the abort.
void NcclTransport::AwaitEnded() {
  const Deadline limit = Now() + kStopTime;
  while (Now() < limit) {
    const absl::StatusOr<bool> reached = ended_->Reached();
    if (!reached.ok() || *reached) return;
    std::this_thread::sleep_for(kStopPause);
  }
}

// On the rank's own thread, which enqueues nothing more.
absl::Status NcclTransport::Settle(const absl::Status& status, Stream stream) {
  (void)supervisor_.AwaitOver();
  if (IsUsing()) {
    if (ended_->Record(stream).ok()) AwaitEnded();
    links_.use->End();
  }
  return WithUsers(status);
}

// On the rank's own thread, after a failure: returns when no peer uses this
// rank's memory, so that the caller may free it. Else says who goes on, and
// does not wait for them another time.
std::string NcclTransport::AwaitUnused() {
  if (links_.use == nullptr) return "";
  links_.use->End();  // two ranks may wait for each other
  const Deadline limit = has_given_up_ ? Now() : Now() + options_.abort_time;
  const std::vector<int32_t> users = links_.use->AwaitUnused(limit);
  if (users.empty()) return "";
  std::string how = " had not stopped when the wait was interrupted";
  if (Now() >= limit) {
    has_given_up_ = true;
    how = absl::StrCat(
        " did not stop within ",
        std::chrono::duration<double>(options_.abort_time).count(), " s");
  }
  return absl::StrCat(RanksText(users), how,
                      " and may still use this rank's tensors: restart the "
                      "process before you free them");
}

absl::Status NcclTransport::WithUsers(const absl::Status& status) {
  if (status.ok()) return status;
  const std::string text = AwaitUnused();
  if (text.empty()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(status.message(), "; ", text));
}

// Ends kernels that wait for peers. On the supervisor's thread, or when it is
// gone.
absl::Status NcclTransport::StopWork(bool is_enqueued) {
  if (links_.fence != nullptr) links_.fence->Abort();
  if (links_.use != nullptr) links_.use->Revoke();
  AwaitCapturedGroup();
  // All at once: an abort waits for the kernels of its communicator, which may
  // stand behind another's, on one stream or in one graph.
  const bool aborts = BeginAborts(links_);
  // An abort waits for graphs too: they are dropped once their kernels have
  // ended, or seem never to.
  const bool uses = IsUsing();
  if (is_enqueued && (aborts || uses)) AwaitEnded();
  // Else Settle does, when the rank's thread enqueues nothing more.
  if (is_enqueued && uses) links_.use->End();
  if (on_break_) on_break_();
  if (AwaitAborts(Now() + options_.abort_time)) return absl::OkStatus();
  return absl::InternalError(AbortHangs());
}

std::string NcclTransport::AbortHangs() const {
  return absl::StrCat(
      "ncclCommAbort did not return within ",
      std::chrono::duration<double>(options_.abort_time).count(),
      " s and its communicator is left behind: destroy graphs that captured a "
      "refit, if there are any, and else restart the process");
}

bool NcclTransport::AwaitAborts(Deadline deadline) {
  bool are_over = true;
  for (const std::unique_ptr<AbortThread>& abort : aborts_) {
    are_over &= abort->Await(deadline);
  }
  return are_over;
}

// Whether there was anything to abort.
bool NcclTransport::BeginAborts(const NcclLinks& links) {
  size_t next = 0;
  links.ForEachCommunicator([&](const std::shared_ptr<NcclCommunicator>& of) {
    aborts_[next++]->Begin(of);
  });
  return next > 0;
}

absl::Status NcclTransport::AsyncError() {
  absl::Status status;
  links_.ForEachCommunicator([&](const std::shared_ptr<NcclCommunicator>& of) {
    status.Update(of->AsyncError());
  });
  return status;
}

absl::StatusOr<bool> NcclTransport::Probe(bool is_enqueued) {
  std::lock_guard lock(mutex_);
  if (absl::Status error = AsyncError(); !error.ok()) {
    return InPlace(error, Unfinished());
  }
  if (is_enqueued) {
    const absl::StatusOr<bool> reached = ended_->Reached();
    if (!reached.ok()) return InPlace(reached.status(), Unfinished());
    if (*reached) return true;
  }
  if (Now() <= deadline_) return false;
  return absl::DeadlineExceededError(
      absl::StrCat(Unfinished(), " did not end before the deadline"));
}

// What the refit waits for.
std::string NcclTransport::Unfinished() {
  // Only direct rounds go beside each other: where a direct one waits, no
  // staged round before it does.
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

// What this rank alone makes, once.
absl::Status NcclTransport::MakeTools() {
  if (has_tools_) return absl::OkStatus();
  absl::Status status;
  const auto make = [&](auto& target, auto made) {
    if (made.ok()) target = *std::move(made);
    status.Update(made.status());
  };
  status.Update(supervisor_.Start());
  make(ended_, device().CreatePolledEvent());
  make(broadcast_stream_, device().CreateStream());
  make(before_broadcasts_, device().CreateEvent());
  make(broadcast_, device().CreateEvent());
  status.Update(enqueued_.CreateProgress(device()));
  has_tools_ = status.ok();
  return status;
}

// For the domain, the world and each rank that broadcasts to this one, or is
// it.
absl::Status NcclTransport::MakeAbortThreads(absl::Span<const Edge> edges) {
  std::set<int32_t> roots;
  for (const Edge& edge : edges) {
    if (!edge.broadcasts) continue;
    roots.insert(edge.kind == fb::MessageKind::kSend ? rank() : edge.peer);
  }
  while (aborts_.size() < 2 + roots.size()) {
    absl::StatusOr<std::unique_ptr<AbortThread>> made =
        AbortThread::Start(device());
    if (!made.ok()) return made.status();
    aborts_.push_back(*std::move(made));
  }
  return absl::OkStatus();
}

absl::Status NcclTransport::MakeLinks(absl::Span<const Edge> edges,
                                      Deadline deadline) {
  absl::Status made = MakeTools();
  if (made.ok()) made = MakeAbortThreads(edges);
  if (!made.ok()) {
    control().Abort(made);
    return made;
  }
  NcclConnector connector(control(), device(), options_.hosts,
                          options_.host.empty() ? ThisHost() : options_.host,
                          api_, deadline,
                          [this] { return supervisor_.failure(); });
  NcclLinks links;
  const absl::Status status = connector.Connect(edges, links);
  if (status.ok()) {
    links_ = std::move(links);
    return status;
  }
  if (EndLinks(links, Now() + options_.abort_time).ok()) {
    // The work that was enqueued uses the scratch, which is about to be freed.
    for (const NcclLinks::Touch& touch : links.unended) {
      (void)device().Synchronize(touch.stream->get());
    }
    return status;
  }
  LeaveBehind(std::move(links.unended));
  return absl::Status(status.code(),
                      absl::StrCat(status.message(), "; ", AbortHangs()));
}

absl::Status NcclTransport::Connect(const HandshakeRecord& record,
                                    absl::Span<const Edge> edges,
                                    Deadline deadline) {
  absl::Status status = meeting_.Meet(deadline);
  if (!status.ok()) return status;
  status = supervisor_.Disconnect(deadline);
  if (status.ok()) status = EndLinks(links_, deadline);
  if (!status.ok()) {
    // The others are in the handshake, or on their way.
    supervisor_.FailNextStep(status);
    return status;
  }
  status = Handshake(record, deadline);
  if (!status.ok()) return status;
  // Not earlier: until all are here, a peer may still signal to this fence.
  links_.fence.reset();
  links_.use.reset();
  has_given_up_ = false;
  status = device().WhileCurrent([&] { return MakeLinks(edges, deadline); });
  if (status.ok()) supervisor_.Connected();
  return status;
}

// An abort waits for graphs of the caller's that hold a refit.
absl::Status NcclTransport::EndLinks(NcclLinks& links, Deadline deadline) {
  if (!has_tools_) return absl::OkStatus();
  BeginAborts(links);
  if (!AwaitAborts(deadline)) {
    return absl::DeadlineExceededError(
        "ncclCommAbort of the last connections has not returned, which it does "
        "not while a graph that captured a refit still exists: destroy the "
        "graph first; if there is none, restart the process");
  }
  links.domain.reset();
  links.world.reset();
  links.broadcasts.clear();
  return absl::OkStatus();
}

absl::Status NcclTransport::BeginRefit(Deadline deadline, bool is_captured) {
  is_captured_ = is_captured;
  const absl::Status status = supervisor_.BeginRefit(is_captured, [&] {
    std::lock_guard lock(mutex_);
    deadline_ = deadline;
    enqueued_.Restart();
  });
  return status.ok() && !is_captured ? BeginUse() : status;
}

absl::Status NcclTransport::Exchange(const ExchangeRound& round,
                                     Stream stream) {
  if (round.operations.empty()) return absl::OkStatus();
  const auto in_place = [&](const absl::Status& status) {
    return status.ok() ? status : InPlace(status, EnqueuedRounds::Text(round));
  };
  return in_place(Outcome(
      in_place(device().WhileCurrent([&] { return Issue(round, stream); }))));
}

absl::Status NcclTransport::Issue(const ExchangeRound& round, Stream stream) {
  absl::Span<const Operation> others = round.operations;
  std::vector<Operation> not_broadcast;
  const bool broadcasts =
      std::any_of(others.begin(), others.end(),
                  [](const Operation& of) { return of.broadcast != 0; });
  if (broadcasts) {
    std::copy_if(others.begin(), others.end(),
                 std::back_inserter(not_broadcast),
                 [](const Operation& of) { return of.broadcast == 0; });
    others = not_broadcast;
  }
  // Before failures are looked for: after one, AwaitCapturedGroup sees this.
  if (is_captured_) SetCapturesGroup(true);
  const absl::StatusOr<size_t> entry = AddEnqueued(round);
  absl::Status status = entry.status();
  // All ranks enqueue in this order, whatever they have of it. A graph may run
  // its branches in another, so that in a capture one comes after the other.
  if (status.ok() && broadcasts && !is_captured_) {
    status = before_broadcasts_->Record(stream);
  }
  if (status.ok() && !others.empty()) {
    status = IssueGroup(round, others, stream);
  }
  if (status.ok() && broadcasts && is_captured_) {
    status = before_broadcasts_->Record(stream);
  }
  if (status.ok() && broadcasts) {
    status = IssueBroadcasts(round.operations, stream);
  }
  if (is_captured_) SetCapturesGroup(false);
  if (!status.ok()) return status;
  return enqueued_.MarkEnd(*entry, stream);
}

absl::Status NcclTransport::IssueGroup(const ExchangeRound& round,
                                       absl::Span<const Operation> operations,
                                       Stream stream) {
  NcclCommunicator* const communicator =
      (round.route == fb::Route::kNetwork ? links_.world : links_.domain).get();
  if (communicator == nullptr) return NoCommunicator();
  return communicator->Exchange(
      operations, stream, deadline_, [this] { return supervisor_.failure(); },
      is_captured_ ? kStopTime : std::chrono::seconds(0));
}

// Those of `operations`, by root and number. On a stream of their own, because
// the round's group may move as much inside the host meanwhile.
absl::Status NcclTransport::IssueBroadcasts(
    absl::Span<const Operation> operations, Stream stream) {
  std::map<std::pair<int32_t, uint8_t>, const Operation*> by_root;
  for (const Operation& operation : operations) {
    if (operation.broadcast == 0) continue;
    const bool sends = operation.kind == fb::MessageKind::kSend;
    by_root.try_emplace({sends ? rank() : operation.peer, operation.broadcast},
                        &operation);
  }
  const Stream beside = broadcast_stream_->get();
  if (absl::Status s = before_broadcasts_->Await(beside); !s.ok()) return s;
  absl::Status status;
  for (const auto& [number, operation] : by_root) {
    const auto found = links_.broadcasts.find(number.first);
    if (found == links_.broadcasts.end()) status = NoCommunicator();
    if (!status.ok()) break;
    status = found->second->Broadcast(
        operation->data, operation->size_bytes, number.first, beside, deadline_,
        [this] { return supervisor_.failure(); },
        is_captured_ ? kStopTime : std::chrono::seconds(0));
  }
  // Also after a failure: whoever waits for `stream`, or ends its capture, has
  // to do with what is on the other.
  status.Update(broadcast_->Record(beside));
  status.Update(broadcast_->Await(stream));
  return status;
}

void NcclTransport::SetCapturesGroup(bool captures) {
  {
    std::lock_guard lock(mutex_);
    captures_group_ = captures;
  }
  group_is_captured_.notify_all();
}

// NCCL captures a group in a thread of its own. An abort meanwhile, or the end
// of the capture, would leave parts of the group in the graph that NCCL has
// freed: the process crashes or hangs when the graph is destroyed. A group that
// is not captured after kStopTime, because a peer does not answer, is aborted
// all the same.
void NcclTransport::AwaitCapturedGroup() {
  std::unique_lock lock(mutex_);
  group_is_captured_.wait_for(lock, kStopTime,
                              [this] { return !captures_group_; });
}

// Before NCCL is called, so that the supervisor knows what may hang there.
absl::StatusOr<size_t> NcclTransport::AddEnqueued(const ExchangeRound& round) {
  if (absl::Status failure = supervisor_.failure(); !failure.ok()) {
    return failure;
  }
  std::lock_guard lock(mutex_);
  return enqueued_.Add(round);
}

absl::Status NcclTransport::EndRefit(Stream stream) {
  return supervisor_.EndRefit([&] { return ended_->Record(stream); });
}

absl::Status NcclTransport::Wait() {
  const absl::Status status = supervisor_.Wait([this] {
    return control()
        .Compare("", "end of refit", Later(deadline_, kLastWords))
        .status();
  });
  if (status.ok() && links_.use != nullptr) links_.use->End();
  return WithUsers(status);
}

absl::StatusOr<std::unique_ptr<Transport>> CreateNcclTransport(
    NcclOptions options) {
  const int32_t world_size = options.meeting.world_size();
  if (options.hosts.size() != static_cast<size_t>(world_size)) {
    return absl::InvalidArgumentError(
        absl::StrCat("hosts names ", options.hosts.size(),
                     " ranks when the world has ", world_size));
  }
  return std::make_unique<NcclTransport>(std::move(options));
}

}  // namespace refit
