// UcxWorker: what a rank sends and receives messages with.
#ifndef REFIT_EXECUTOR_TRANSPORT_UCX_WORKER_H_
#define REFIT_EXECUTOR_TRANSPORT_UCX_WORKER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "control/file_descriptor.h"
#include "executor/transport/ucx_api.h"
#include "refit/interruption.h"
#include "refit/transport.h"

namespace refit {

// Ends the sleep of a thread that waits for messages. Thread-safe.
class WakeSignal {
 public:
  static absl::StatusOr<std::unique_ptr<WakeSignal>> Create();

  // The thread wakes, or does not fall asleep the next time.
  void Set() const;
  // By the thread that woke.
  void Clear() const;
  int fd() const { return fd_.fd(); }

 private:
  explicit WakeSignal(FileDescriptor fd) : fd_(std::move(fd)) {}
  const FileDescriptor fd_;
};

// All of it is one thread's at a time. The calls that wait end with an error
// when `interruption` returns one (a WakeSignal makes it be asked) or the
// thread is interrupted, and at the deadline; the worker is of no more use
// then.
class UcxWorker {
 public:
  // What failed, and with which operation.
  struct Failure {
    absl::Status status;
    size_t operation = 0;
  };

  // `api` and `wake` must outlive it. `peers` is how many it will have.
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Create(
      const ucx::Api& api, const WakeSignal& wake, int32_t rank, size_t peers);
  // Messages under way are given up: nobody writes into this rank's memory
  // after that, unless a read that this rank began takes longer than a second.
  // Peers may go on reading it.
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  // How peers reach this worker.
  absl::StatusOr<std::string> Address() const;
  // Before the first operation with `peer`.
  absl::Status AddPeer(int32_t peer, std::string_view address);

  // Returns when all operations are done: a send, when its peer receives. The
  // k-th send to a peer meets the k-th receive there.
  Failure Exchange(absl::Span<const Operation> operations, Deadline deadline,
                   const Interruption& interruption);
  // Returns when what was sent needs this thread no more.
  absl::Status Flush(Deadline deadline, const Interruption& interruption);

 private:
  struct Peer {
    ucx::Endpoint endpoint = nullptr;
    uint64_t sends = 0;
    uint64_t receives = 0;
  };
  struct Pending {
    UcxWorker* worker = nullptr;
    int32_t peer = -1;  // of a message
    void* request = nullptr;
    bool receives = false;
    bool done = false;
    ucx::Status status = ucx::kInProgress;
    uint64_t received = 0;
  };

  UcxWorker(const ucx::Api& api, const WakeSignal& wake, int32_t rank)
      : api_(api), wake_(wake), rank_(rank) {}

  static void OnSent(void* request, ucx::Status status, void* pending);
  static void OnReceived(void* request, ucx::Status status,
                         const ucx::ReceiveInfo* info, void* pending);
  void Finish(Pending& pending, ucx::Status status, uint64_t received);
  void Post(const Operation& operation, Pending& pending);
  absl::Status OutcomeOf(const Operation& operation,
                         const Pending& pending) const;
  absl::Status Await(Deadline deadline, const Interruption& interruption);
  absl::Status Sleep(Deadline until) const;
  void Report(int64_t seconds) const;

  const ucx::Api& api_;
  const WakeSignal& wake_;
  const int32_t rank_;
  ucx::Context context_ = nullptr;
  ucx::Worker worker_ = nullptr;
  int event_fd_ = -1;  // the worker's
  absl::flat_hash_map<int32_t, Peer> peers_;
  // These are of the exchange in progress.
  std::vector<Pending> pending_;  // by operation
  size_t open_ = 0;
  bool failed_ = false;      // one of them
  bool has_failed_ = false;  // any so far
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_UCX_WORKER_H_
