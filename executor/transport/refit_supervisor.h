// RefitSupervisor: what one rank's refit is doing, and the thread that ends one
// that fails. It knows no NCCL, no UCX and no GPU; the transport gives it
// functions.
#ifndef REFIT_EXECUTOR_TRANSPORT_REFIT_SUPERVISOR_H_
#define REFIT_EXECUTOR_TRANSPORT_REFIT_SUPERVISOR_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "refit/control_plane.h"
#include "refit/transport.h"

namespace refit {

//            Connected        BeginRefit        EndRefit          its work ends
//   kTorn ------------> kIdle ---------> kEnqueuing ----> kEnqueued -------->
//   kOver
//     ^                  ^ ^                |  |               | | | | +--
//     captured ----+  |               |                | Wait | +----- success
//     -------|---------------|------------ kDeciding
//     +----- kStopping <---- failure
//     ----------+---------------+----------------+
//
// kEntering stands in for kIdle, kEnqueued, kOver or kTorn while the rank goes
// from one step of the control plane to the next.
enum class RefitPhase : uint8_t {
  kTorn,       // not connected, or stopped since then
  kIdle,       // connected; no refit is under way
  kEntering,   // between two steps, to neither of which a failure can belong
  kEnqueuing,  // from BeginRefit to EndRefit
  kEnqueued,   // this rank's work goes on
  kOver,       // this rank's work is done
  kDeciding,  // Wait asks all ranks whether they are done: their answer counts,
              // and no failure of this rank alone
  kStopping,  // the supervisor's thread ends the work
};

// Enter, FailNextStep, BeginRefit, EndRefit, Fail, AwaitOver, Wait and
// Disconnect are calls of the rank's own thread; the others may come from any
// thread. A failure belongs to the step of the control plane in which it is
// found. Once there is one, the supervisor's thread tells the other ranks and
// stops the work; the calls of the rank return after that. Without Start there
// is no thread: the rank's own calls do this, where all its work is in them.
class RefitSupervisor {
 public:
  struct Actions {
    // Begins a step of the control plane and returns its number.
    std::function<uint64_t(StepPurpose)> begin_step = nullptr;
    // Tells all ranks that the step has failed.
    std::function<void(const absl::Status&)> tell = nullptr;
    // Whether this rank's work is done, or the error that ends the refit; its
    // deadline too. `is_enqueued`: all of the work was enqueued. Called with
    // the supervisor's lock held, so it must not call the supervisor.
    std::function<absl::StatusOr<bool>(bool is_enqueued)> probe = nullptr;
    // Ends the work. Called on the supervisor's thread, in Close, or, without
    // a thread, in the rank's calls. An error, what could not be ended, is
    // added to the failure.
    std::function<absl::Status(bool is_enqueued)> stop = nullptr;
    // Called on the supervisor's thread before all else there.
    std::function<void()> begin_thread = nullptr;
    // An error of the work, for which `probe` need not ask. Called without the
    // lock on the rank's thread, which alone waits if it does not return.
    std::function<absl::Status()> device_failure = nullptr;
    // Unless null: ends what the rank's thread waits in, because there is a
    // failure. Called with the lock held.
    std::function<void()> wake = nullptr;
  };

  explicit RefitSupervisor(Actions actions) : actions_(std::move(actions)) {}
  ~RefitSupervisor() { Close(); }
  RefitSupervisor(const RefitSupervisor&) = delete;
  RefitSupervisor& operator=(const RefitSupervisor&) = delete;

  // Starts the thread, once. Error: kResourceExhausted.
  absl::Status Start();
  // Ends the thread and what is under way, which fails on all ranks.
  // Idempotent.
  void Close();

  RefitPhase phase();
  // The failure of the step this rank is in, or OK.
  absl::Status failure();

  // Enters the next step, after a failure of the one before was told and its
  // work has ended. kDeadlineExceeded: its work goes on, because a graph of the
  // caller's still holds it; the next step has failed with that.
  absl::Status Enter(Deadline deadline,
                     StepPurpose purpose = StepPurpose::kOther);
  // Ends what is under way; kTorn from now on. Errors as Enter.
  absl::Status Disconnect(Deadline deadline);
  // Enters the next step only to fail it, because this rank cannot come to what
  // the others do there: its own work of before goes on.
  void FailNextStep(const absl::Status& status);
  void Connected();  // kIdle from now on

  // Enters a step for a refit, unless one that nobody has waited for has
  // failed: that is the error then. kFailedPrecondition: torn. `prepare` is
  // called before the first probe, with the supervisor's lock held.
  // `is_captured`: nothing of it runs before the caller launches its graph. If
  // it fails, calls do not wait for the end of the work: to stop it may take
  // until that graph is destroyed, which the caller does after they return.
  absl::Status BeginRefit(bool is_captured,
                          const std::function<void()>& prepare);
  // `record_end` marks the end of the work. It is not called where the refit is
  // captured: whoever launches the graph waits for it.
  absl::Status EndRefit(const std::function<absl::Status()>& record_end);
  // The first failure of the step: `status`, unless there was one before.
  // Returns when the work has ended. Where no refit is under way and none has
  // failed, `status` is nobody else's.
  absl::Status Fail(const absl::Status& status);
  // Returns when this rank's work is done or has been stopped. It sleeps
  // between probes, ever longer; a failure wakes it.
  absl::Status AwaitOver();
  // The same for the work of all ranks, whom `decide` asks.
  absl::Status Wait(const std::function<absl::Status()>& decide);

  // What the control plane says of `step`, which may be one that this rank has
  // yet to enter.
  void Hear(uint64_t step, const absl::Status& status);
  // Fails the step this rank is in.
  void Abort(const absl::Status& status);

 private:
  using Lock = std::unique_lock<std::mutex>;

  // With the lock held; those that take it let go of it meanwhile.
  bool IsUnderWay() const { return IsUnderWay(phase_); }
  static bool IsUnderWay(RefitPhase phase);
  void SetFailure(const absl::Status& status, bool is_untold = true);
  void TellFailure(Lock& lock);
  void Tell(Lock& lock, absl::Status status);
  void AwaitStopped(Lock& lock);
  absl::Status AwaitStopped(Lock& lock, Deadline deadline);
  void AwaitOver(Lock& lock);
  void EnterStep(Lock& lock, StepPurpose purpose);
  void FailNextStep(Lock& lock, const absl::Status& status);
  void Probe();
  void Stop(Lock& lock);
  void Watch();

  const Actions actions_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // All below is guarded by mutex_.
  RefitPhase phase_ = RefitPhase::kTorn;
  bool is_closing_ = false;
  bool is_captured_ = false;  // the refit that was begun last
  uint64_t step_ = 0;         // this rank is in
  absl::Status failure_;      // of the step
  bool is_untold_ = false;    // the others have yet to hear of failure_
  int telling_ = 0;           // threads that are telling them
  // What the control plane said last; it may be ahead of step_.
  uint64_t heard_step_ = 0;
  absl::Status heard_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_REFIT_SUPERVISOR_H_
