#include "executor/transport/nccl_communicator.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "control/waiting.h"
#include "executor/transport/last_words.h"

namespace refit {
namespace {

// A group over edges that are connected is taken within some microseconds, so
// that a pause, which lasts ten times as long, would be most of a round's cost.
// What connects takes milliseconds.
constexpr int kPollsBeforePause = 2000;
constexpr std::chrono::microseconds kPollPause(50);

absl::Status Aborted() {
  return absl::AbortedError("the communicator was aborted");
}

std::string TouchText(absl::Span<const Operation> operations) {
  std::string text =
      operations.size() > 1 ? "touching the edges" : "touching the edge";
  for (const Operation& operation : operations) {
    const bool send = operation.kind == fb::MessageKind::kSend;
    absl::StrAppend(&text, &operation != &operations.front() ? " and" : "",
                    send ? " to rank " : " from rank ", operation.peer);
  }
  return text;
}

}  // namespace

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Create(
    const nccl::Api& api, const nccl::UniqueId& id, std::vector<int32_t> ranks,
    int32_t rank, Deadline deadline, const Interruption& interruption) {
  std::unique_ptr<NcclCommunicator> made = Unmade(api, std::move(ranks));
  absl::Status status = made->Init(id, rank, deadline, interruption);
  if (!status.ok()) return status;
  return made;
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::Unmade(
    const nccl::Api& api, std::vector<int32_t> ranks) {
  return std::unique_ptr<NcclCommunicator>(
      new NcclCommunicator(api, std::move(ranks)));
}

absl::Status NcclCommunicator::Init(const nccl::UniqueId& id, int32_t rank,
                                    Deadline deadline,
                                    const Interruption& interruption) {
  nccl::Config config;
  config.blocking = 0;
  const nccl::Result result = api_.CommInitRankConfig(
      &comm_, static_cast<int>(ranks_.size()), id, RankOf(rank), &config);
  return AwaitIdle(result, "ncclCommInitRankConfig", deadline, interruption);
}

NcclCommunicator::~NcclCommunicator() { Abort(); }

// An abort that does not return holds up nobody else: others find no
// communicator.
void NcclCommunicator::Abort() {
  nccl::Comm comm = nullptr;
  {
    std::lock_guard lock(mutex_);
    comm = std::exchange(comm_, nullptr);
  }
  if (comm != nullptr) api_.CommAbort(comm);
}

bool NcclCommunicator::Contains(int32_t rank) const {
  return std::binary_search(ranks_.begin(), ranks_.end(), rank);
}

int NcclCommunicator::RankOf(int32_t global) const {
  return static_cast<int>(
      std::lower_bound(ranks_.begin(), ranks_.end(), global) - ranks_.begin());
}

absl::Status NcclCommunicator::AsyncError() {
  std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return absl::OkStatus();
  nccl::Result error = nccl::kSuccess;
  const nccl::Result asked = api_.CommGetAsyncError(comm_, &error);
  return nccl::StatusOf(api_, asked == nccl::kSuccess ? error : asked,
                        "ncclCommGetAsyncError", comm_);
}

// Waits until a call that may go on in the background has ended.
absl::Status NcclCommunicator::AwaitIdle(nccl::Result result, const char* call,
                                         Deadline deadline,
                                         const Interruption& interruption,
                                         std::chrono::nanoseconds patience) {
  absl::Status ended;
  Deadline limit;  // once it has ended
  for (int polls = 0; result == nccl::kInProgress; ++polls) {
    const Deadline now = std::chrono::steady_clock::now();
    if (ended.ok()) {
      ended.Update(interruption());
      ended.Update(PollInterruption());
      if (now > deadline) {
        ended.Update(absl::DeadlineExceededError(
            absl::StrCat(call, " did not end before the deadline")));
      }
      limit = now + patience;
    }
    if (!ended.ok() && now >= limit) return ended;
    {
      std::lock_guard lock(mutex_);
      if (comm_ == nullptr) return Aborted();
      const nccl::Result asked = api_.CommGetAsyncError(comm_, &result);
      if (asked != nccl::kSuccess) result = asked;
      if (result != nccl::kInProgress) {
        ended.Update(nccl::StatusOf(api_, result, call, comm_));
        return ended;
      }
    }
    if (polls >= kPollsBeforePause) std::this_thread::sleep_for(kPollPause);
  }
  return nccl::StatusOf(api_, result, call, nullptr);
}

absl::Status NcclCommunicator::Issue(const Operation& operation,
                                     Stream stream) {
  const int peer = RankOf(operation.peer);
  if (operation.kind == fb::MessageKind::kSend) {
    return nccl::StatusOf(api_,
                          api_.Send(operation.data, operation.size_bytes,
                                    nccl::kUint8, peer, comm_, stream),
                          "ncclSend", comm_);
  }
  return nccl::StatusOf(api_,
                        api_.Recv(operation.data, operation.size_bytes,
                                  nccl::kUint8, peer, comm_, stream),
                        "ncclRecv", comm_);
}

absl::StatusOr<nccl::Result> NcclCommunicator::IssueGroup(
    absl::Span<const Operation> operations, Stream stream) {
  std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return Aborted();
  absl::Status status =
      nccl::StatusOf(api_, api_.GroupStart(), "ncclGroupStart", comm_);
  for (const Operation& operation : operations) {
    status.Update(Issue(operation, stream));
  }
  // Ended in any case: the group is the thread's, not the communicator's.
  const nccl::Result ended = api_.GroupEnd();
  if (!status.ok()) return status;
  return ended;
}

absl::Status NcclCommunicator::Exchange(absl::Span<const Operation> operations,
                                        Stream stream, Deadline deadline,
                                        const Interruption& interruption,
                                        std::chrono::nanoseconds patience) {
  for (const Operation& operation : operations) {
    if (Contains(operation.peer)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", operation.peer, " is not in the communicator"));
  }
  const absl::StatusOr<nccl::Result> ended = IssueGroup(operations, stream);
  if (!ended.ok()) return ended.status();
  return AwaitIdle(*ended, "ncclGroupEnd", deadline, interruption, patience);
}

absl::Status NcclCommunicator::TouchInTurns(absl::Span<const Edge> edges,
                                            int32_t rank, std::byte* scratch,
                                            Stream stream, Deadline deadline,
                                            const Interruption& interruption) {
  const auto size = static_cast<int32_t>(ranks_.size());
  const int me = RankOf(rank);
  for (int32_t k = 1; k < size; ++k) {
    const int32_t after = ranks_[static_cast<size_t>((me + k) % size)];
    const int32_t before = ranks_[static_cast<size_t>((me - k + size) % size)];
    std::vector<Operation> operations;
    for (const Edge& edge : edges) {
      const bool send = edge.kind == fb::MessageKind::kSend;
      if (edge.peer != (send ? after : before)) continue;
      operations.push_back({.kind = edge.kind,
                            .peer = edge.peer,
                            .data = scratch + (send ? 0 : kTouchBytes / 2),
                            .size_bytes = 1});
    }
    if (operations.empty()) continue;
    const absl::Status status =
        Exchange(operations, stream, deadline, interruption);
    if (!status.ok()) return InPlace(status, TouchText(operations));
  }
  return absl::OkStatus();
}

absl::Status NcclCommunicator::Broadcast(std::byte* data, uint64_t size_bytes,
                                         int32_t root, Stream stream,
                                         Deadline deadline,
                                         const Interruption& interruption,
                                         std::chrono::nanoseconds patience) {
  if (api_.Broadcast == nullptr) {
    return absl::UnimplementedError("this libnccl has no ncclBroadcast");
  }
  return Call(
      "ncclBroadcast",
      [&](nccl::Comm comm) {
        return api_.Broadcast(data, data, size_bytes, nccl::kUint8,
                              RankOf(root), comm, stream);
      },
      deadline, interruption, patience);
}

absl::Status NcclCommunicator::Call(
    const char* name, const std::function<nccl::Result(nccl::Comm)>& function,
    Deadline deadline, const Interruption& interruption,
    std::chrono::nanoseconds patience) {
  nccl::Result result;
  {
    std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return Aborted();
    result = function(comm_);
  }
  // ncclCommWindowRegister of NCCL 2.30 says so while it goes on.
  if (result == nccl::kSuccess) result = nccl::kInProgress;
  return AwaitIdle(result, name, deadline, interruption, patience);
}

}  // namespace refit
