// UcxWorker: what a rank sends and receives messages with.
#ifndef REFIT_EXECUTOR_TRANSPORT_UCX_WORKER_H_
#define REFIT_EXECUTOR_TRANSPORT_UCX_WORKER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
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

// All of it is one thread's at a time. It outlives plans and their failures: at
// each Connect, Introduce and Meet start an epoch, in which messages of earlier
// ones are not received. The calls that wait end with an error when
// `interruption` returns one (a WakeSignal makes it be asked) or the thread is
// interrupted, and at the deadline; End comes next then.
class UcxWorker {
 public:
  // What failed, and with which operation.
  struct Failure {
    absl::Status status;
    size_t operation = 0;
  };

  // `peers` is about how many it will have.
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Create(const ucx::Api& api,
                                                           size_t peers);
  // As End.
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  // What the peers of `rank` need for Meet. Drops what earlier epochs sent.
  // `wake` is used until the next call.
  absl::StatusOr<std::string> Introduce(int32_t rank, const WakeSignal& wake);
  // Reaches these ranks, and no others any more. `introductions` are theirs. An
  // endpoint stays if both ends have kept it. After an error, or if a peer has
  // one, this worker must go: UCX counts endpoints between two workers, and
  // would confuse them if the ends count differently.
  absl::Status Meet(absl::Span<const int32_t> ranks,
                    absl::Span<const std::string> introductions);

  // Returns when all operations are done: a send, when its peer receives. The
  // k-th send to a peer meets the k-th receive there.
  Failure Exchange(absl::Span<const Operation> operations, Deadline deadline,
                   const Interruption& interruption);
  // Returns when what was sent needs this thread no more. Peers' flushes may
  // need this rank for longer (ServeDuring).
  absl::Status Flush(Deadline deadline, const Interruption& interruption);
  // Returns what `call` does. Meanwhile another thread answers peers.
  absl::Status ServeDuring(const std::function<absl::Status()>& call) const;

  // Gives up the messages under way, and closes the endpoints they are of.
  // Nobody writes into this rank's memory after that, unless a read that this
  // rank began takes longer than a second. Peers may go on reading it. False:
  // UCX cannot end them all, and the worker is of no more use.
  bool End();

 private:
  struct Peer {
    ucx::Endpoint endpoint = nullptr;
    bool failed = false;
    uint16_t epoch = 0;  // the peer's
    uint64_t sends = 0;  // in this epoch
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

  UcxWorker(const ucx::Api& api, uint64_t id) : api_(api), id_(id) {}

  static void OnSent(void* request, ucx::Status status, void* pending);
  static void OnReceived(void* request, ucx::Status status,
                         const ucx::ReceiveInfo* info, void* pending);
  static void OnFailed(void* peer, ucx::Endpoint endpoint, ucx::Status status);
  void Drop() const;
  bool IsReceiving() const;
  absl::Status Reach(int32_t rank, std::string_view address, Peer& peer) const;
  void Close(const Peer& peer) const;
  void Finish(Pending& pending, ucx::Status status, uint64_t received);
  void Post(const Operation& operation, Pending& pending);
  void PostFlush();
  absl::Status OutcomeOf(const Operation& operation,
                         const Pending& pending) const;
  absl::Status Await(Deadline deadline, const Interruption& interruption);
  absl::Status Sleep(Deadline until) const;
  void Report(int64_t seconds) const;

  const ucx::Api api_;
  const uint64_t id_;  // tells it from all others
  ucx::Context context_ = nullptr;
  ucx::Worker worker_ = nullptr;
  int event_fd_ = -1;                 // the worker's
  const WakeSignal* wake_ = nullptr;  // of this epoch, as all that follows
  int32_t rank_ = -1;
  uint16_t epoch_ = 0;
  std::map<uint64_t, std::unique_ptr<Peer>> peers_;  // by id
  absl::flat_hash_map<int32_t, Peer*> by_rank_;
  // These are of the exchange in progress.
  std::vector<Pending> pending_;  // by operation
  size_t open_ = 0;
  bool failed_ = false;     // one of them
  bool is_broken_ = false;  // End returned false
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_UCX_WORKER_H_
