// Worker: one rank of a plan, with all that it is made of.
//
//   absl::StatusOr<TcpRendezvous> met = RendezvousFromEnvironment();
//   if (!met.ok()) return met.status();
//   absl::StatusOr<std::unique_ptr<Worker>> worker =
//       Worker::Create({.plan = plan,
//                       .device = device,
//                       .meeting = *met,
//                       .executor = {.rank = met->rank}});
//   if (!worker.ok()) return worker.status();
//   absl::Status status = (*worker)->executor().Connect(timeout);
//
// Device, transport and executor may as well be made one by one. A Worker makes
// them in the right order, ends them in the right order, and can be
// interrupted.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_WORKER_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_WORKER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "plan/plan_file.h"
#include "refit/control_plane.h"
#include "refit/device.h"
#include "refit/executor.h"
#include "refit/interruption.h"
#include "refit/local_transport.h"
#include "refit/transport.h"

namespace refit {

// What carries the messages of ranks that are processes.
enum class Wire {
  kDefault,  // kUcx for host memory, kNccl for that of a GPU
  kNccl,
  kUcx,  // host memory only
};

struct WorkerOptions {
  std::shared_ptr<const PlanFile> plan;
  std::shared_ptr<Device> device;
  // One of these two. Ranks that are processes meet; Connect does so within its
  // deadline, and its errors are ConnectTcp's too. Ranks that are threads of
  // one process may share a fabric instead, if they hold host memory.
  std::optional<Meeting> meeting = {};
  std::shared_ptr<LocalFabric> fabric = nullptr;
  Wire wire = Wire::kDefault;
  // `rank` is this worker's. Create overwrites `device` and `transport`.
  ExecutorOptions executor = {};
};

// What takes the place of a worker's plan.
struct Replacement {
  std::shared_ptr<const PlanFile> plan;
  int32_t rank = 0;  // this worker's, in `plan`
  // One of these two, as at Create.
  std::optional<Meeting> meeting = {};
  std::shared_ptr<LocalFabric> fabric = nullptr;
};

// Thread-compatible, but for Interrupt. A child after fork has a copy without
// the threads and connections of one that meets others. Its Call fails with
// kFailedPrecondition, and its end leaves all to the parent.
class Worker {
 public:
  // As Close.
  ~Worker();

  // Loads the executor. Errors: kInvalidArgument, options that do not fit
  // together, and those of Executor::Load and LocalFabric::CreateTransport;
  // kNotFound or kUnimplemented, the rank sends or receives by UCX and libucp
  // is not here, or too old.
  static absl::StatusOr<std::unique_ptr<Worker>> Create(WorkerOptions options);

  // These are valid until Replace, which makes them anew.
  Executor& executor() { return *executor_; }
  const Executor& executor() const { return *executor_; }
  // Until Close.
  Transport& transport() { return *transport_; }
  Device& device() { return *device_; }
  const PlanFile& plan() const { return *plan_; }

  // Runs `call` on the executor and returns its status. Its waits for other
  // ranks end early when another thread calls Interrupt, or when `poll` returns
  // an error (ScopedInterruption). Calls of executor() itself are not
  // interrupted.
  absl::Status Call(const std::function<absl::Status(Executor&)>& call,
                    const Interruption& poll = nullptr);
  // Goes on with another plan, as when an engine was lost or one has come.
  // Collective over the ranks of that plan, which meet anew: those of the old
  // plan that stay call this; newcomers Create, Connect and Bind. The worker
  // keeps its device, and the tensors and hooks of its last Bind, if it is
  // bound; what its peers and it map for both plans stays mapped. Torn tensors
  // are torn until a refit of the new plan has succeeded. The next
  // refit of a plan with options.delta is dense, and Executor::refits begins
  // anew. Destroy graphs that captured refits before, as before Connect. It
  // waits as Call does; `timeout` is of Connect and Bind.
  //
  // Errors: Create's, and kFailedPrecondition while a refit is under way or
  // after Close, which leave all as it was. After any other the executor is
  // that of the new plan and not bound, as its state tells: call this again,
  // with a plan of those that are left and a new meeting or fabric, or bind
  // other tensors. Such are Connect's and Bind's, and kFailedPrecondition
  // naming peers that may still use this rank's tensors: end their processes
  // first.
  absl::Status Replace(Replacement replacement,
                       std::chrono::nanoseconds timeout,
                       const Interruption& poll = nullptr);

  // Ends what Call waits in now, on all ranks; without a Call it does nothing.
  // Thread-safe.
  void Interrupt() { interrupted_ = true; }

  // Says goodbye to the other ranks, closes the executor and ends the
  // transport. Idempotent.
  void Close();

 private:
  Worker() = default;
  bool IsParents() const;
  absl::Status CheckOwn() const;
  bool IsTorn() const;
  absl::Status Interrupted(const Interruption& poll) const;
  absl::Status Load(WorkerOptions options);

  std::atomic<bool> interrupted_ = false;
  // Each outlives what comes after it.
  std::shared_ptr<const PlanFile> plan_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<LocalFabric> fabric_;
  std::unique_ptr<Transport> transport_;
  // What was bound when the plan was replaced, until the new one is bound.
  std::shared_ptr<const BoundRank> kept_;
  std::unique_ptr<Executor> executor_;
  Wire wire_ = Wire::kDefault;
  ExecutorOptions options_;  // as given
  int64_t process_ = 0;      // that meets others; 0: it shares a fabric
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_WORKER_H_
