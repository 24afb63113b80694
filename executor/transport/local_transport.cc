#include "refit/local_transport.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "control/waiting.h"
#include "executor/device/host_copy.h"
#include "executor/device/thread_fence.h"
#include "executor/transport/handshake.h"
#include "executor/transport/last_words.h"

namespace refit {
namespace local {

// A send that waits for its receiver, in the sender's transport.
struct Post {
  int32_t source = 0;
  uint64_t step = 0;
  uint32_t round = 0;
  const std::byte* data = nullptr;
  uint64_t size_bytes = 0;
  bool is_taken = false;
};

// One rank, as the other ranks see it.
struct Endpoint {
  std::condition_variable changed;
  std::deque<Post*> inbox;      // oldest first
  size_t unfinished_sends = 0;  // of the group this rank is in
  FenceEnd fence;
};

}  // namespace local

using local::Endpoint;
using local::Post;

// Collective steps (handshakes and refits) are numbered alike on all ranks. An
// abort belongs to a step, so that the next step is not touched by it.
struct LocalFabric::State {
  explicit State(int32_t world_size)
      : endpoints(world_size),
        records(world_size),
        shared{std::vector<std::string>(world_size),
               std::vector<std::string>(world_size)},
        arrived(world_size),
        created(world_size) {}

  // The newest step that was aborted. Written under `mutex`.
  std::atomic<uint64_t> aborted_step = 0;

  std::mutex mutex;  // of all below, but for fences
  std::condition_variable changed;
  std::vector<Endpoint> endpoints;
  absl::Status abort_status;
  bool aborted_in_handshake = false;  // the newest of these
  StepPurposes purposes;
  // The gathering in progress and the outcome of the last one.
  std::vector<OfRank<HandshakeRecord>> records;  // by rank
  // What ranks share, by parity of the step: one may be at the next step while
  // others still read.
  std::array<std::vector<std::string>, 2> shared;
  std::vector<bool> arrived;
  size_t arrivals = 0;
  uint64_t gatherings = 0;
  absl::Status outcome;
  std::vector<bool> created;

  void Abort(uint64_t step, int32_t rank, const absl::Status& status) {
    const std::lock_guard lock(mutex);
    MarkAborted(step, AbortedBy(rank, status));
  }
  // Fails the step, on all ranks, if another rank begins it for something else.
  void Begin(uint64_t step, int32_t rank, StepPurpose purpose) {
    const std::lock_guard lock(mutex);
    const absl::Status status = purposes.Add(rank, step, purpose);
    if (!status.ok()) MarkAborted(step, status);
  }
  absl::Status AbortStatus() {
    const std::lock_guard lock(mutex);
    return abort_status;
  }
  // Returns on all ranks when all have come, with the comparison of their
  // records.
  absl::Status Gather(uint64_t step, int32_t rank,
                      const HandshakeRecord& record, Deadline deadline,
                      std::string_view what);

 private:
  // With the lock held. The first abort of a step counts.
  void MarkAborted(uint64_t step, const absl::Status& status,
                   bool in_handshake = false);
  std::vector<int32_t> Missing() const;
};

void LocalFabric::State::MarkAborted(uint64_t step, const absl::Status& status,
                                     bool in_handshake) {
  if (step <= aborted_step) return;
  abort_status = status;
  arrived.assign(arrived.size(), false);
  arrivals = 0;
  aborted_step = step;
  aborted_in_handshake = in_handshake;
  changed.notify_all();
  for (Endpoint& endpoint : endpoints) {
    endpoint.fence.Abort(step);
    endpoint.changed.notify_all();
  }
}

// Who has yet to come to the gathering in progress.
std::vector<int32_t> LocalFabric::State::Missing() const {
  std::vector<int32_t> missing;
  for (size_t rank = 0; rank < arrived.size(); ++rank) {
    if (!arrived[rank]) missing.push_back(static_cast<int32_t>(rank));
  }
  return missing;
}

absl::Status LocalFabric::State::Gather(uint64_t step, int32_t rank,
                                        const HandshakeRecord& record,
                                        Deadline deadline,
                                        std::string_view what) {
  std::unique_lock lock(mutex);
  if (step <= aborted_step) return abort_status;
  records[rank] = {rank, record};
  arrived[rank] = true;
  const bool is_first = arrivals++ == 0;
  if (arrivals == arrived.size()) {
    outcome = CompareRecords(records);
    arrived.assign(arrived.size(), false);
    arrivals = 0;
    ++gatherings;
    changed.notify_all();
    return outcome;
  }
  const uint64_t gathering = gatherings;
  const bool in_time = WaitUntil(
      changed, lock, deadline,
      [&] { return gatherings != gathering || step <= aborted_step; },
      [&](int64_t seconds) {
        // One of those that wait speaks for all.
        if (!is_first) return;
        ReportWait(std::string(what), RanksText(Missing()), seconds);
      });
  if (gatherings != gathering) return outcome;
  if (in_time) return abort_status;
  absl::Status status = InterruptionStatus();
  if (status.ok()) {
    const std::vector<int32_t> missing = Missing();
    status = absl::DeadlineExceededError(absl::StrCat(
        std::string(what), ": ", missing.size(), " of ", arrived.size(),
        " ranks did not come before the deadline, the first is rank ",
        missing.front()));
  }
  MarkAborted(step, AbortedBy(rank, status), what == kHandshake);
  return status;
}

LocalFabric::LocalFabric(int32_t world_size)
    : state_(std::make_unique<State>(world_size)) {}

LocalFabric::~LocalFabric() = default;

class LocalTransport : public Transport, private ThreadFence<Fence> {
 public:
  LocalTransport(LocalFabric::State& fabric, int32_t rank)
      : ThreadFence(rank), fabric_(fabric) {}

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
  FenceEnd& EndOf(int32_t rank) override {
    return fabric_.endpoints[rank].fence;
  }
  uint64_t Step() const override { return step_; }
  Deadline Limit() const override { return deadline_; }
  absl::Status Absent(int32_t peer) override;

  using Lock = std::unique_lock<std::mutex>;

  Endpoint& endpoint() { return fabric_.endpoints[rank_]; }
  bool StepAborted() const { return step_ <= fabric_.aborted_step; }
  // With the fabric's lock held. Waits, and copies, let go of it meanwhile.
  void PostSends(const ExchangeRound& round);
  absl::Status Receive(const ExchangeRound& round, Lock& lock);
  absl::Status AwaitSends(const ExchangeRound& round, Lock& lock);
  void WithdrawSends(const ExchangeRound& round, Lock& lock);
  absl::Status TakePosts(const ExchangeRound& round);
  absl::Status Match(const Post& post, const ExchangeRound& round,
                     size_t& receive) const;
  absl::Status WaitFailure(const ExchangeRound& round,
                           const Operation& operation) const;

  LocalFabric::State& fabric_;
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

// Fails the step; nobody uses this rank's memory after that.
absl::Status LocalTransport::Absent(int32_t peer) {
  absl::Status status =
      StepAborted() ? fabric_.AbortStatus() : InterruptionStatus();
  if (status.ok()) {
    status = absl::DeadlineExceededError(
        absl::StrCat("rank ", peer, " did not come before the deadline"));
  }
  fabric_.Abort(step_, rank_, status);
  LeaveStep();
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
  Lock lock(fabric_.mutex);
  PostSends(round);
  absl::Status status = Receive(round, lock);
  if (status.ok()) status = AwaitSends(round, lock);
  if (status.ok()) return status;
  lock.unlock();
  fabric_.Abort(step_, rank_, status);
  lock.lock();
  WithdrawSends(round, lock);
  return status;
}

void LocalTransport::PostSends(const ExchangeRound& round) {
  posts_.resize(round.operations.size());
  for (size_t i = 0; i < round.operations.size(); ++i) {
    const Operation& operation = round.operations[i];
    if (operation.kind != fb::MessageKind::kSend) continue;
    posts_[i] = {.source = rank_,
                 .step = step_,
                 .round = round.index,
                 .data = operation.data,
                 .size_bytes = operation.size_bytes};
    ++endpoint().unfinished_sends;
    Endpoint& receiver = fabric_.endpoints[operation.peer];
    receiver.inbox.push_back(&posts_[i]);
    receiver.changed.notify_one();
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

// Moves the posts of this round from the inbox to matches_.
absl::Status LocalTransport::TakePosts(const ExchangeRound& round) {
  std::deque<Post*>& inbox = endpoint().inbox;
  for (auto at = inbox.begin(); at != inbox.end();) {
    size_t receive = round.operations.size();
    if ((*at)->step == step_) {  // else its sender is about to withdraw it
      absl::Status status = Match(**at, round, receive);
      if (!status.ok()) return status;
    }
    if (receive == round.operations.size()) {
      ++at;
      continue;
    }
    received_[receive] = true;
    (*at)->is_taken = true;
    matches_.push_back({*at, receive});
    at = inbox.erase(at);
  }
  return absl::OkStatus();
}

absl::Status LocalTransport::Receive(const ExchangeRound& round, Lock& lock) {
  const absl::Span<const Operation> operations = round.operations;
  received_.assign(operations.size(), false);
  while (true) {
    size_t open = 0;  // the first receive without its bytes
    while (
        open < operations.size() &&
        (operations[open].kind != fb::MessageKind::kRecv || received_[open])) {
      ++open;
    }
    if (open == operations.size()) return absl::OkStatus();
    matches_.clear();
    absl::Status status;
    WaitUntil(
        endpoint().changed, lock, deadline_,
        [&] {
          if (StepAborted()) return true;
          status = TakePosts(round);
          return !status.ok() || !matches_.empty();
        },
        [&](int64_t seconds) {
          ReportWait(absl::StrCat("rank ", rank_),
                     absl::StrCat("rank ", operations[open].peer), seconds);
        });
    lock.unlock();
    for (const auto& [post, receive] : matches_) {
      CopyContiguous(operations[receive].data, post->data, post->size_bytes);
    }
    lock.lock();
    for (const auto& [post, receive] : matches_) {
      Endpoint& sender = fabric_.endpoints[post->source];
      if (--sender.unfinished_sends == 0) sender.changed.notify_one();
    }
    if (!status.ok()) return status;
    if (matches_.empty()) return WaitFailure(round, operations[open]);
  }
}

absl::Status LocalTransport::AwaitSends(const ExchangeRound& round,
                                        Lock& lock) {
  const auto are_done = [&] { return endpoint().unfinished_sends == 0; };
  WaitUntil(
      endpoint().changed, lock, deadline_,
      [&] { return are_done() || StepAborted(); },
      [&](int64_t) {});  // its receiver's own wait is what there is to tell
  for (size_t i = 0; i < round.operations.size() && !are_done(); ++i) {
    const Operation& operation = round.operations[i];
    if (operation.kind == fb::MessageKind::kSend && !posts_[i].is_taken) {
      return WaitFailure(round, operation);
    }
  }
  // The last one was taken at the deadline; its copy is about to end.
  endpoint().changed.wait(lock, are_done);
  return absl::OkStatus();
}

// Takes back what no receiver has taken, and waits for the copies that are
// under way: after this, nobody reads this rank's staging.
void LocalTransport::WithdrawSends(const ExchangeRound& round, Lock& lock) {
  for (size_t i = 0; i < round.operations.size(); ++i) {
    const Operation& operation = round.operations[i];
    if (operation.kind != fb::MessageKind::kSend || posts_[i].is_taken) {
      continue;
    }
    std::erase(fabric_.endpoints[operation.peer].inbox, &posts_[i]);
    --endpoint().unfinished_sends;
  }
  endpoint().changed.wait(lock,
                          [&] { return endpoint().unfinished_sends == 0; });
}

absl::Status LocalTransport::WaitFailure(const ExchangeRound& round,
                                         const Operation& operation) const {
  absl::Status status = fabric_.abort_status;
  if (!StepAborted()) {
    if (absl::Status s = InterruptionStatus(); !s.ok()) return s;
    status = absl::DeadlineExceededError(
        "the peer did not come before the deadline");
  }
  return InPlace(status, OperationText(round.index, operation));
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
