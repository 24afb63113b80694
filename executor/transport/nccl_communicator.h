// One NCCL communicator, non-blocking, with deadlines.
#ifndef REFIT_EXECUTOR_TRANSPORT_NCCL_COMMUNICATOR_H_
#define REFIT_EXECUTOR_TRANSPORT_NCCL_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "executor/transport/nccl_api.h"
#include "refit/interruption.h"
#include "refit/transport.h"

namespace refit {

// The methods are called by the rank's own thread, but for Abort and
// AsyncError.
class NcclCommunicator {
 public:
  // Collective over `ranks` (global, ascending), of which `rank` is one.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Create(
      const nccl::Api& api, const nccl::UniqueId& id,
      std::vector<int32_t> ranks, int32_t rank, Deadline deadline,
      const Interruption& interruption);
  // The same in two steps, for who must not wait for the abort of one that
  // could not be made: Init may be called once, and nothing else before it.
  static std::unique_ptr<NcclCommunicator> Unmade(const nccl::Api& api,
                                                  std::vector<int32_t> ranks);
  absl::Status Init(const nccl::UniqueId& id, int32_t rank, Deadline deadline,
                    const Interruption& interruption);
  // Aborts, unless Abort did: ranks leave one by one and wait for nobody. An
  // abort may never return.
  ~NcclCommunicator();

  bool Contains(int32_t rank) const;
  const std::vector<int32_t>& ranks() const { return ranks_; }

  // Enqueues one group; peers are global ranks. Returns when NCCL has taken it,
  // before which nothing else may be enqueued on `stream`. After an
  // interruption or the deadline NCCL has `patience` more to take it.
  absl::Status Exchange(
      absl::Span<const Operation> operations, Stream stream, Deadline deadline,
      const Interruption& interruption,
      std::chrono::nanoseconds patience = std::chrono::nanoseconds(0));

  // NCCL connects an edge when it is first used, which takes tens of
  // milliseconds and both ends. Sends a byte along each of this rank's: in turn
  // k every rank talks to the ranks k before and k after it, so that both ends
  // of an edge come to it in the same turn.
  static constexpr uint64_t kTouchBytes = 256;  // of `scratch`
  absl::Status TouchInTurns(absl::Span<const Edge> edges, int32_t rank,
                            std::byte* scratch, Stream stream,
                            Deadline deadline,
                            const Interruption& interruption);

  // The same as Exchange for one broadcast of root's bytes, in place on all
  // ranks.
  absl::Status Broadcast(
      std::byte* data, uint64_t size_bytes, int32_t root, Stream stream,
      Deadline deadline, const Interruption& interruption,
      std::chrono::nanoseconds patience = std::chrono::nanoseconds(0));

  // Calls `function`, NCCL's `name`, with NCCL's own communicator, and waits
  // until NCCL has taken what it started.
  absl::Status Call(
      const char* name, const std::function<nccl::Result(nccl::Comm)>& function,
      Deadline deadline, const Interruption& interruption,
      std::chrono::nanoseconds patience = std::chrono::nanoseconds(0));

  // NCCL's asynchronous error, if there is one. Thread-safe.
  absl::Status AsyncError();
  // Ends all that is under way; only destruction may follow. Thread-safe.
  void Abort();

 private:
  NcclCommunicator(const nccl::Api& api, std::vector<int32_t> ranks)
      : api_(api), ranks_(std::move(ranks)) {}
  absl::Status AwaitIdle(
      nccl::Result result, const char* call, Deadline deadline,
      const Interruption& interruption,
      std::chrono::nanoseconds patience = std::chrono::nanoseconds(0));
  absl::StatusOr<nccl::Result> IssueGroup(
      absl::Span<const Operation> operations, Stream stream);
  absl::Status Issue(const Operation& operation, Stream stream);
  int RankOf(int32_t global) const;

  // A copy: an abort that does not return outlives the transport.
  const nccl::Api api_;
  const std::vector<int32_t> ranks_;
  // NCCL must not be inside another call when it aborts. Calls of a
  // non-blocking communicator are short.
  std::mutex mutex_;
  nccl::Comm comm_ = nullptr;  // null after an abort
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_NCCL_COMMUNICATOR_H_
