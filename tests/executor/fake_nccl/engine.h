// The state behind the exported functions; fake_nccl.h describes the model.
#ifndef REFIT_TESTS_EXECUTOR_FAKE_NCCL_ENGINE_H_
#define REFIT_TESTS_EXECUTOR_FAKE_NCCL_ENGINE_H_

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "executor/transport/nccl_api.h"
#include "tests/executor/fake_nccl/fake_nccl.h"

namespace refit::nccl::fake {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

struct Clique;
struct Communicator;
struct Edge;

struct Fault {
  enum Kind { kNone, kFail, kHang, kCorrupt };
  bool KeepsFromMoving() const { return kind == kFail || kind == kHang; }

  Kind kind = kNone;
  Result result = kSuccess;  // of kFail
  size_t byte = 0;           // of kCorrupt
};

struct Operation {
  bool is_send = false;
  std::byte* data = nullptr;
  size_t count = 0;
  int peer = 0;
  Communicator* comm = nullptr;
  Fault fault;
  // Set when its group is issued.
  Edge* edge = nullptr;
  uint64_t pair_group = 0;  // this rank's n-th group with the peer
  size_t kernel = 0;
  Time due{};  // set when both ends are in running kernels
  bool is_done = false;
};

// One direction between two ranks. The queues hold what is unfinished of the
// groups that the two are in, in issue order.
struct Edge {
  bool is_connecting = false;
  bool is_connected = false;
  Time connected_at{};
  std::deque<Operation*> sends;
  std::deque<Operation*> recvs;
};

// The operation's own end of its edge.
inline std::deque<Operation*>& OwnQueue(const Operation& operation) {
  return operation.is_send ? operation.edge->sends : operation.edge->recvs;
}

// The first unfinished operation of the other end, null if there is none.
inline Operation* Counterpart(const Operation& operation) {
  const auto& queue =
      operation.is_send ? operation.edge->recvs : operation.edge->sends;
  return queue.empty() ? nullptr : queue.front();
}

// All ranks that were given one unique id.
struct Clique {
  Communicator* Peer(const Operation& operation) const {
    return members[operation.peer];
  }

  std::vector<Communicator*> members;  // by rank; empty until the first comes
  size_t came = 0;
  Result error = kSuccess;
  std::string error_text;
  std::map<std::pair<int, int>, Edge> edges;  // by sender and receiver
};

struct Group {
  bool is_active = false;
  bool is_connecting = false;
  std::vector<std::unique_ptr<Operation>> operations;  // by kernel
  size_t kernel = 0;
  size_t begin = 0, end = 0;  // the running kernel's operations
  size_t open = 0;            // those of them that are not done
};

enum class State { kInitializing, kReady, kFailed, kAborted };

struct Communicator {
  Clique* clique = nullptr;
  int rank = 0;
  int worker = 0;
  uint64_t owner = 0;  // equal for the communicators of one worker
  State state = State::kInitializing;
  Result error = kSuccess;
  std::string last_error;
  // The owner knows that its last call is done.
  bool is_observed = false;
  Group group;
  std::vector<uint64_t> groups_with;  // by peer
  Time captured_at{};  // until then its last group is put into a graph
};

// What a thread issues to a communicator between GroupStart and GroupEnd.
struct IssuedGroup {
  Communicator* comm;
  std::vector<std::unique_ptr<Operation>> operations;
};

// What the fake knows of a thread of the test.
struct ThreadState {
  ~ThreadState();
  uint64_t Owner() const;

  int rank = -1;            // as fake_nccl_set_rank said
  int depth = 0;            // of groups
  Result error = kSuccess;  // the group's first refusal
  std::vector<IssuedGroup> groups;
  bool captures = false;
  std::string last_error;
  // What was returned as const char*.
  std::string returned_error;
  std::string violation;
};
extern thread_local ThreadState thread;

struct Worker {
  int version = 0;  // 0: as the settings say
  bool is_killed = false;
  bool abort_hangs = false;
  std::chrono::microseconds delay{0};
  uint64_t issued = 0;
  std::map<uint64_t, Fault> faults;  // by operation
};

struct Settings {
  int version = 22809;
  size_t budget = 2048;
  std::chrono::microseconds connect_delay{0};
  std::chrono::microseconds capture_delay{0};
  bool remote_errors = false;
};

struct Counts {
  std::string key;  // of ncclSetEncryption
  uint64_t ids = 0;
  uint64_t lazy_connects = 0;
  uint64_t cut_groups = 0;
  uint64_t messages = 0;
  uint64_t largest_group = 0;
  uint64_t group_mismatches = 0;
  uint64_t violations = 0;
  std::string first_violation;
};

// The mutex guards everything; every method is called with it held.
class Engine {
 public:
  static Engine& Get();

  void Reset();
  uint64_t AddClique();
  Clique* FindClique(uint64_t id);  // null if there is none
  Communicator& AddCommunicator();
  Communicator* Find(Comm comm);  // null if it never was one

  // Takes the communicator into its clique, or fails all of the clique.
  void Join(Communicator& comm, size_t ranks);
  // Starts `operations`, all of this communicator, as one group.
  void Issue(Communicator& comm,
             std::vector<std::unique_ptr<Operation>> operations);
  void Fail(Communicator& comm, Result error, const std::string& text);
  void Leave(Communicator& comm, State state);  // failed or aborted
  // The communicator's asynchronous state, after all work that can be done.
  Result AsyncState(Communicator& comm);

  Fault TakeFault(const Communicator& comm);
  void RecordViolation(const std::string& text);
  void RecordOverlaps(const Communicator& comm);
  bool IsDeadlocked();  // deadlock.cc
  int LiveCommunicators() const;
  int Unawaited(uint64_t owner) const;

  // Does the work that became possible.
  void Progress();
  void SetChanged();
  // Until fake_nccl_release.
  void AwaitRelease(std::unique_lock<std::mutex>& lock) {
    changed_.wait(lock, [this] { return is_released; });
  }

  std::mutex mutex;
  Settings settings;
  Counts counts;
  std::map<int, Worker> workers;
  bool is_released = false;

 private:
  bool Advance(Communicator& comm);
  bool AdvanceInit(Communicator& comm);
  bool Connect(Communicator& comm);
  bool Try(Operation& operation);
  bool FailForLostPeer(Communicator& comm, const Operation& operation);
  void FailMismatch(const Operation& send, const Operation& recv);
  bool IsDue(Operation& operation, Operation& other);
  void Move(Operation& send, Operation& recv);
  void MarkDone(Operation& operation);
  void RunKernel(Group& group, size_t begin);
  bool IsLost(const Communicator& comm) const;
  bool IsRunning(const Operation& operation) const;
  bool IsStuck(const Communicator& comm,
               const std::set<const Communicator*>& stuck) const;
  bool IsBlocked(const Operation& operation,
                 const std::set<const Communicator*>& stuck) const;

  std::condition_variable changed_;
  uint64_t cliques_made_ = 0;  // ids of before a reset stay unknown
  std::map<uint64_t, Clique> cliques_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
  bool has_changed_ = false;
  Time now_{};
  Time next_due_ = Time::max();  // when waiting alone makes progress
};

}  // namespace refit::nccl::fake

#endif  // REFIT_TESTS_EXECUTOR_FAKE_NCCL_ENGINE_H_
