#include "refit/local_transport.h"

#include <atomic>
#include <cassert>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "control/waiting.h"
#include "executor/device/host_copy.h"
#include "executor/device/thread_fence.h"
#include "executor/transport/handshake.h"
#include "executor/transport/local_fabric.h"

namespace refit {

using local::Endpoint;
using local::Post;

class LocalTransport : public Transport, private Fence {
 public:
  LocalTransport(LocalFabric::State& fabric, int32_t rank)
      : fabric_(fabric),
        rank_(rank),
        fence_(rank, [this](int32_t of) -> FenceEnd& {
          return fabric_.endpoints[of].fence;
        }) {}

  int32_t rank() const override { return rank_; }
  int32_t world_size() const override {
    return static_cast<int32_t>(fabric_.endpoints.size());
  }
  absl::Status Connect(const HandshakeRecord& record,
                       absl::Span<const Edge> edges,
                       Deadline deadline) override;
  absl::Status Handshake(const HandshakeRecord& record,
                         Deadline deadline) override;
  absl::StatusOr<std::vector<std::string>> ExchangeBytes(
      std::string_view mine, absl::Span<const int32_t> to,
      absl::Span<const int32_t> from, Deadline deadline) override;
  bool TakeMissedStep() override { return std::exchange(missed_, false); }
  Fence* fence() override { return this; }
  absl::Status BeginRefit(Deadline deadline, bool is_captured) override;
  absl::Status Exchange(const ExchangeRound& round, Stream stream) override;
  absl::Status EndRefit(Stream stream) override;
  // Every call above returns when its work is done.
  absl::Status Wait() override { return absl::OkStatus(); }
  void Abort(const absl::Status& status) override {
    fabric_.Abort(step_, rank_, status);
  }

 private:
  absl::Status Grant(absl::Span<const int32_t> origins, void*) override;
  absl::Status AwaitGrants(absl::Span<const int32_t> targets, void*) override;
  absl::Status Progress(absl::Span<const int32_t> targets, void*) override;
  absl::Status Finish(absl::Span<const int32_t> targets, void*) override;
  absl::Status AwaitFinishes(absl::Span<const int32_t> origins, void*) override;
  void Withdraw() override { fence_.Withdraw(); }
  const uint32_t* aborted() const override { return nullptr; }
  absl::Status LeaveDirect(std::optional<int32_t> absent);

  Endpoint& endpoint() { return fabric_.endpoints[rank_]; }
  bool StepAborted() const { return step_ <= fabric_.aborted_step; }
  void PostSends(const ExchangeRound& round);
  absl::Status Receive(const ExchangeRound& round);
  const Operation& FirstOpen(const ExchangeRound& round) const;
  void ReportWaitFor(const Operation& operation, int64_t seconds) const;
  absl::Status AwaitSends(const ExchangeRound& round);
  void WithdrawSends(const ExchangeRound& round);
  absl::Status TakePosts(const ExchangeRound& round);
  absl::Status Match(const Post& post, const ExchangeRound& round,
                     size_t& receive) const;
  absl::Status WaitFailure(const ExchangeRound& round,
                           const Operation& operation);

  LocalFabric::State& fabric_;
  const int32_t rank_;
  ThreadFence fence_;
  std::atomic<uint64_t> step_ = 0;
  bool missed_ = false;  // TakeMissedStep
  Deadline deadline_;
  // Of the group in progress. They keep their storage between groups.
  std::vector<Post> posts_;                        // by operation
  std::vector<bool> received_;                     // by operation
  std::vector<std::pair<Post*, size_t>> matches_;  // taken, not yet copied
};

absl::Status LocalTransport::Connect(const HandshakeRecord& record,
                                     absl::Span<const Edge> edges,
                                     Deadline deadline) {
  for (const Edge& edge : edges) {
    if (edge.peer < 0 || edge.peer >= world_size()) {
      const absl::Status status = absl::InvalidArgumentError(absl::StrCat(
          "peer ", edge.peer, " is not one of the ", world_size(), " ranks"));
      fabric_.Abort(++step_, rank_, status);
      return status;
    }
  }
  return Handshake(record, deadline);
}

absl::Status LocalTransport::Handshake(const HandshakeRecord& record,
                                       Deadline deadline) {
  fabric_.Begin(++step_, rank_, PurposeOf(record.stage));
  {
    std::lock_guard lock(fabric_.mutex);
    missed_ = step_ < fabric_.aborted_step ||
              (step_ == fabric_.aborted_step && !fabric_.aborted_in_handshake);
  }
  return fabric_.Gather(step_, rank_, record, deadline, NameOf(record.stage));
}

absl::StatusOr<std::vector<std::string>> LocalTransport::ExchangeBytes(
    std::string_view mine, absl::Span<const int32_t>,
    absl::Span<const int32_t> from, Deadline deadline) {
  ++step_;
  std::vector<std::string>& shared = fabric_.shared[step_ % 2];
  {
    std::lock_guard lock(fabric_.mutex);
    shared[rank_] = std::string(mine);
  }
  absl::Status status =
      fabric_.Gather(step_, rank_, HandshakeRecord{}, deadline, "sharing");
  if (!status.ok()) return status;
  std::vector<std::string> given;
  std::lock_guard lock(fabric_.mutex);
  for (int32_t peer : from) given.push_back(shared[peer]);
  return given;
}

absl::Status LocalTransport::Grant(absl::Span<const int32_t> origins, void*) {
  fence_.Grant(origins, step_);
  return absl::OkStatus();
}

absl::Status LocalTransport::AwaitGrants(absl::Span<const int32_t> targets,
                                         void*) {
  return LeaveDirect(fence_.AwaitGrants(targets, step_, deadline_));
}

absl::Status LocalTransport::Progress(absl::Span<const int32_t> targets,
                                      void*) {
  fence_.Progress(targets, step_);
  return absl::OkStatus();
}

absl::Status LocalTransport::Finish(absl::Span<const int32_t> targets, void*) {
  fence_.Finish(targets, step_);
  return absl::OkStatus();
}

absl::Status LocalTransport::AwaitFinishes(absl::Span<const int32_t> origins,
                                           void*) {
  return LeaveDirect(fence_.AwaitFinishes(origins, step_, deadline_));
}

// Fails the step if `absent` did not come to it; nobody uses this rank's memory
// after that.
absl::Status LocalTransport::LeaveDirect(std::optional<int32_t> absent) {
  if (!absent.has_value()) return absl::OkStatus();
  absl::Status status =
      StepAborted() ? fabric_.AbortStatus() : InterruptionStatus();
  if (status.ok()) {
    status = absl::DeadlineExceededError(
        absl::StrCat("rank ", *absent, " did not come before the deadline"));
  }
  fabric_.Abort(step_, rank_, status);
  fence_.Leave(step_);
  return status;
}

absl::Status LocalTransport::BeginRefit(Deadline deadline, bool) {
  fabric_.Begin(++step_, rank_, StepPurpose::kRefit);
  deadline_ = deadline;
  return StepAborted() ? fabric_.AbortStatus() : absl::OkStatus();
}

absl::Status LocalTransport::EndRefit(Stream) {
  return fabric_.Gather(step_, rank_, HandshakeRecord{}, deadline_,
                        "end of refit");
}

absl::Status LocalTransport::Exchange(const ExchangeRound& round, Stream) {
  PostSends(round);
  absl::Status status = Receive(round);
  if (status.ok()) status = AwaitSends(round);
  if (!status.ok()) {
    fabric_.Abort(step_, rank_, status);
    WithdrawSends(round);
  }
  return status;
}

void LocalTransport::PostSends(const ExchangeRound& round) {
  posts_.resize(round.operations.size());
  size_t sends = 0;
  for (const Operation& operation : round.operations) {
    sends += operation.kind == fb::MessageKind::kSend;
  }
  {
    std::lock_guard lock(endpoint().mutex);
    endpoint().unfinished_sends = sends;
  }
  for (size_t i = 0; i < round.operations.size(); ++i) {
    const Operation& operation = round.operations[i];
    if (operation.kind != fb::MessageKind::kSend) continue;
    posts_[i] = {.sender = &endpoint(),
                 .source = rank_,
                 .step = step_,
                 .round = round.index,
                 .data = operation.data,
                 .size_bytes = operation.size_bytes};
    Endpoint& receiver = fabric_.endpoints[operation.peer];
    bool wake = false;
    {
      std::lock_guard lock(receiver.mutex);
      (receiver.inbox == nullptr ? receiver.inbox : receiver.inbox_last->next) =
          &posts_[i];
      receiver.inbox_last = &posts_[i];
      if (receiver.awaited_posts > 0) {
        wake = receiver.awaited_round != round.index ||
               --receiver.awaited_posts == 0;
      }
    }
    if (wake) receiver.changed.notify_one();
  }
}

// The receive that `post` belongs to: the first open one from its sender. A
// post of a later round waits for that round, unless this round expects bytes
// from the same sender. `receive` is the number of operations if it waits.
absl::Status LocalTransport::Match(const Post& post, const ExchangeRound& round,
                                   size_t& receive) const {
  receive = 0;
  while (receive < round.operations.size() &&
         (round.operations[receive].kind != fb::MessageKind::kRecv ||
          round.operations[receive].peer != post.source ||
          received_[receive])) {
    ++receive;
  }
  if (receive == round.operations.size()) {
    if (post.round > round.index) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("round ", round.index, ": rank ", post.source, " sends ",
                     post.size_bytes, " bytes in round ", post.round,
                     " for which rank ", rank_, " has no recv"));
  }
  const Operation& operation = round.operations[receive];
  if (post.round != round.index || post.size_bytes != operation.size_bytes) {
    return absl::InternalError(
        absl::StrCat(OperationText(round.index, operation), " meets a send of ",
                     post.size_bytes, " bytes in round ", post.round));
  }
  return absl::OkStatus();
}

// Moves the posts of this round from the inbox to matches_. The caller holds
// the endpoint's mutex.
absl::Status LocalTransport::TakePosts(const ExchangeRound& round) {
  Post* previous = nullptr;
  Post* post = endpoint().inbox;
  while (post != nullptr) {
    Post* const next = post->next;
    size_t receive = round.operations.size();
    if (post->step == step_) {  // else its sender is about to withdraw it
      absl::Status status = Match(*post, round, receive);
      if (!status.ok()) return status;
    }
    if (receive == round.operations.size()) {
      previous = post;
    } else {
      received_[receive] = true;
      post->taken = true;
      (previous == nullptr ? endpoint().inbox : previous->next) = next;
      if (next == nullptr) endpoint().inbox_last = previous;
      matches_.push_back({post, receive});
    }
    post = next;
  }
  return absl::OkStatus();
}

// The first receive without its bytes; there is one.
const Operation& LocalTransport::FirstOpen(const ExchangeRound& round) const {
  size_t first = 0;
  while (round.operations[first].kind != fb::MessageKind::kRecv ||
         received_[first]) {
    ++first;
  }
  return round.operations[first];
}

void LocalTransport::ReportWaitFor(const Operation& operation,
                                   int64_t seconds) const {
  ReportWait(absl::StrCat("rank ", rank_),
             absl::StrCat("rank ", operation.peer), seconds);
}

absl::Status LocalTransport::Receive(const ExchangeRound& round) {
  received_.assign(round.operations.size(), false);
  size_t open = 0;
  for (const Operation& operation : round.operations) {
    open += operation.kind == fb::MessageKind::kRecv;
  }
  while (open > 0) {
    matches_.clear();
    absl::Status status;
    {
      std::unique_lock lock(endpoint().mutex);
      WaitUntil(
          endpoint().changed, lock, deadline_,
          [&] {
            if (StepAborted()) return true;
            status = TakePosts(round);
            endpoint().awaited_posts = open;
            endpoint().awaited_round = round.index;
            return !status.ok() || !matches_.empty();
          },
          [&](int64_t seconds) { ReportWaitFor(FirstOpen(round), seconds); });
      endpoint().awaited_posts = 0;
    }
    for (auto& [post, receive] : matches_) {
      CopyContiguous(round.operations[receive].data, post->data,
                     post->size_bytes);
      Endpoint& sender = *post->sender;
      bool last;
      {
        std::lock_guard lock(sender.mutex);
        last = --sender.unfinished_sends == 0;
      }
      if (last) sender.changed.notify_one();
    }
    open -= matches_.size();
    if (!status.ok()) return status;
    if (matches_.empty()) return WaitFailure(round, FirstOpen(round));
  }
  return absl::OkStatus();
}

absl::Status LocalTransport::AwaitSends(const ExchangeRound& round) {
  {
    std::unique_lock lock(endpoint().mutex);
    WaitUntil(
        endpoint().changed, lock, deadline_,
        [&] { return endpoint().unfinished_sends == 0 || StepAborted(); },
        [&](int64_t) {});  // its receiver's own wait is what there is to tell
    if (endpoint().unfinished_sends == 0) return absl::OkStatus();
  }
  for (size_t i = 0; i < round.operations.size(); ++i) {
    const Operation& operation = round.operations[i];
    if (operation.kind != fb::MessageKind::kSend) continue;
    bool taken;
    {
      std::lock_guard lock(fabric_.endpoints[operation.peer].mutex);
      taken = posts_[i].taken;
    }
    if (!taken) return WaitFailure(round, operation);
  }
  // The last one was taken at the deadline; its copy is about to end.
  std::unique_lock lock(endpoint().mutex);
  endpoint().changed.wait(lock,
                          [&] { return endpoint().unfinished_sends == 0; });
  return absl::OkStatus();
}

// Takes back what no receiver has taken, and waits for the copies that are
// under way: after this, nobody reads this rank's staging.
void LocalTransport::WithdrawSends(const ExchangeRound& round) {
  size_t withdrawn = 0;
  for (size_t i = 0; i < round.operations.size(); ++i) {
    const Operation& operation = round.operations[i];
    if (operation.kind != fb::MessageKind::kSend) continue;
    Endpoint& receiver = fabric_.endpoints[operation.peer];
    std::lock_guard lock(receiver.mutex);
    if (posts_[i].taken) continue;
    Post* previous = nullptr;
    for (Post* post = receiver.inbox; post != &posts_[i]; post = post->next) {
      previous = post;
    }
    (previous == nullptr ? receiver.inbox : previous->next) = posts_[i].next;
    if (receiver.inbox_last == &posts_[i]) receiver.inbox_last = previous;
    ++withdrawn;
  }
  std::unique_lock lock(endpoint().mutex);
  endpoint().unfinished_sends -= withdrawn;
  endpoint().changed.wait(lock,
                          [&] { return endpoint().unfinished_sends == 0; });
}

absl::Status LocalTransport::WaitFailure(const ExchangeRound& round,
                                         const Operation& operation) {
  const std::string where = OperationText(round.index, operation);
  if (StepAborted()) {
    const absl::Status status = fabric_.AbortStatus();
    return absl::Status(status.code(),
                        absl::StrCat(where, ": ", status.message()));
  }
  if (absl::Status s = InterruptionStatus(); !s.ok()) return s;
  return absl::DeadlineExceededError(
      absl::StrCat(where, ": the peer did not come before the deadline"));
}

absl::StatusOr<std::unique_ptr<Transport>> LocalFabric::CreateTransport(
    int32_t rank) {
  if (rank < 0 || rank >= static_cast<int32_t>(state_->endpoints.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " is not one of the ",
                     state_->endpoints.size(), " ranks"));
  }
  std::lock_guard lock(state_->mutex);
  if (state_->created[rank]) {
    return absl::AlreadyExistsError(
        absl::StrCat("rank ", rank, " has its transport already"));
  }
  state_->created[rank] = true;
  return std::make_unique<LocalTransport>(*state_, rank);
}

}  // namespace refit
