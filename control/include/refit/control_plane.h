// ControlPlane: small messages between a plan's ranks, over TCP. It carries
// ids, digests, memory handles and errors, never weights.
#ifndef REFIT_CONTROL_INCLUDE_REFIT_CONTROL_PLANE_H_
#define REFIT_CONTROL_INCLUDE_REFIT_CONTROL_PLANE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace refit {

// What a rank begins a step for, where ranks that differ in it would wait for
// each other until their deadline.
enum class StepPurpose : uint8_t {
  kOther = 0,  // compared with nothing
  kRefit = 1,
  kCheck = 2,  // agreeing on the check of a refit, before that begins
};

// What a rank gives or says.
template <typename Value>
struct OfRank {
  int32_t rank = 0;
  Value value = {};
};

// One rank's end. BeginStep, Compare and Exchange are collective: all ranks
// call them in the same order, from one thread of each rank. A step that fails
// on one rank fails on all; the next step starts afresh, unless a rank is gone.
//
// The executor never has each rank hear what each other one says, as an
// Exchange of all with all would: rank 0 would send the square of their number,
// 64 million values among 8,192 ranks.
class ControlPlane {
 public:
  // Compare tells no more values than these.
  static constexpr size_t kValuesMax = 16;

  using Deadline = std::chrono::steady_clock::time_point;

  virtual ~ControlPlane() = default;
  virtual int32_t rank() const = 0;
  virtual int32_t world_size() const = 0;

  // Starts a step and returns its number, the same on all ranks. The calls up
  // to the next BeginStep belong to it. It does not wait for other ranks, only
  // for a running callback of the step before. A step that one rank begins for
  // a refit, and another for the check of one, fails: kFailedPrecondition,
  // naming both.
  virtual uint64_t BeginStep(StepPurpose purpose) = 0;
  uint64_t BeginStep() { return BeginStep(StepPurpose::kOther); }

  // Whether others had failed the step before this rank began it, and not in a
  // handshake: this rank was not called when they were. Asked again, in the
  // same step: false.
  virtual bool TakeMissedStep() { return false; }

  // Each of the values that ranks give as `mine`, once, with the first rank
  // that gives it, by that rank: one value if all are equal, never more than
  // the first kValuesMax. Errors: kDeadlineExceeded, naming `what`, how many
  // ranks did not come and the first of them; kAborted (or kDeadlineExceeded,
  // when that was the aborting rank's reason), with the rank and its message;
  // kUnavailable, naming a rank whose process is gone or which has closed its
  // end; kInternal, two ranks are in different calls, both named;
  // kResourceExhausted, over 256 MiB.
  virtual absl::StatusOr<std::vector<OfRank<std::string>>> Compare(
      std::string_view mine, std::string_view what, Deadline deadline) = 0;

  // Gives `mine` to each rank of `to`; returns, when all ranks have come, what
  // each rank of `from` gave to this one, in that order. Errors as above;
  // kInternal also if two ranks do not agree on who gives to whom.
  virtual absl::StatusOr<std::vector<std::string>> Exchange(
      std::string_view mine, absl::Span<const int32_t> to,
      absl::Span<const int32_t> from, std::string_view what,
      Deadline deadline) = 0;

  // Fails this rank's present step on all ranks with `status`. Thread-safe; the
  // first abort of a step counts. This rank's later calls in the step fail with
  // the same message as the others'.
  virtual void Abort(const absl::Status& status) = 0;

  // `callback(step, status)` is called, at most once per step, when the step
  // this rank is in was aborted by another rank, or a rank is gone or has
  // closed its end without entering the step: on a thread of the control plane,
  // or, where this rank knows that before it enters the step, before BeginStep
  // returns. Set before the first step; must not call back in here.
  virtual void OnAbort(
      std::function<void(uint64_t step, const absl::Status&)> callback) = 0;

  // A key that all ranks have and nobody else, of 64 hexadecimal digits, for
  // `purpose` alone. It follows from the meeting's secret and crosses no wire.
  // "": the meeting has no secret.
  virtual std::string SharedKey(std::string_view purpose) const {
    (void)purpose;
    return "";
  }
};

// Where ranks meet. Rank 0 listens, or a process that is none of them; the
// others connect.
struct TcpRendezvous {
  static constexpr int32_t kWorldSizeMax = 1 << 20;

  std::string host;
  uint16_t port = 0;
  int32_t rank = 0;
  int32_t world_size = 1;
  // What all ranks have and nobody else: they prove it to each other, and it
  // never crosses the wire. Any bytes; 16 random ones cannot be guessed. Empty:
  // whoever reaches rank 0 is let in, so rank 0 listens at the addresses of
  // `host` alone and says so once on stderr.
  std::string secret = {};
  // Names the unique id that this is from (unique_id.h); 0: of none.
  uint64_t id_name = 0;
  // Who listens is no rank (HostMeeting), so rank 0 connects as the others do.
  bool hosted = false;
  // Keeps the port from being given to others while a copy of this lives.
  std::shared_ptr<const void> port_holder = {};
};

// Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them;
// where one is absent Open MPI's (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)
// or SLURM's (SLURM_PROCID, SLURM_NTASKS, the first host of SLURM_STEP_NODELIST
// or SLURM_NODELIST, SLURM_LAUNCH_NODE_IPADDR); the port is 29500 then. Where
// TORCHELASTIC_USE_AGENT_STORE says that torchrun itself listens at
// MASTER_PORT, the port is the next one. REFIT_PORT goes before all that. The
// secret is SecretFromEnvironment's. Error: kInvalidArgument, naming the
// variable, what it is and what it should be.
absl::StatusOr<TcpRendezvous> RendezvousFromEnvironment();

// REFIT_SECRET, or the content of the file that REFIT_SECRET_FILE names,
// without white space at its end; "" if neither is set. A secret below 16 bytes
// gives one warning on stderr. Error: kInvalidArgument; both are set, one is
// empty, or the file cannot be read or exceeds 4096 bytes.
absl::StatusOr<std::string> SecretFromEnvironment();

// A meeting of ranks of this host, at a free port of the loopback interface,
// with a secret of its own. The result is rank 0's.
absl::StatusOr<TcpRendezvous> LoopbackRendezvous(int32_t world_size);

// This rank's number among those of its host, from LOCAL_RANK, SLURM_LOCALID or
// OMPI_COMM_WORLD_LOCAL_RANK. Errors as above.
absl::StatusOr<int32_t> LocalRankFromEnvironment();

// Returns when all ranks have come, and have proved to each other that they
// have one secret. The first of their deadlines that passes is the end for all
// of them; nothing that others send is. Errors: kDeadlineExceeded (rank 0 names
// the first missing rank), kUnavailable (nobody listens at the address by then;
// within seconds: the unique id's creator is gone, or a rank that had come;
// rank 0: the port is taken), kAlreadyExists (two processes are the same rank,
// named), kInvalidArgument (another world size, both named; another unique id;
// or an address that is none), kPermissionDenied (another secret, at either
// end), kFailedPrecondition (another version of this protocol; rank 0: a
// unique id of another process), kResourceExhausted (rank 0: too few file
// descriptors), kAborted (another rank gave up, or EndMeetingTcp was called). A
// process that is refused does not end the meeting of the others.
absl::StatusOr<std::unique_ptr<ControlPlane>> ConnectTcp(
    const TcpRendezvous& rendezvous, ControlPlane::Deadline deadline);

// Ends a meeting that cannot succeed, for whoever knows so: a rank before it
// has an executor, or what drives the ranks. The ConnectTcp of all that have
// come, or come in the next two seconds, fails with kAborted and `reason`.
// `rank` 0 is who listens as rank 0: it waits these seconds, and has to know
// `world_size`. For all others any other rank will do. Errors: ConnectTcp's;
// kFailedPrecondition, all ranks have met already.
absl::Status EndMeetingTcp(const TcpRendezvous& rendezvous,
                           const absl::Status& reason,
                           ControlPlane::Deadline deadline);

// A rank's way to the other ranks: its end of the control plane, or the place
// where it has yet to meet them.
class Meeting {
 public:
  using AbortCallback =
      std::function<void(uint64_t step, const absl::Status& status)>;

  Meeting() = default;  // of one rank, at no address
  // NOLINTNEXTLINE(google-explicit-constructor): each is a meeting.
  Meeting(std::unique_ptr<ControlPlane> control);
  // NOLINTNEXTLINE(google-explicit-constructor)
  Meeting(TcpRendezvous rendezvous) : rendezvous_(std::move(rendezvous)) {}

  int32_t rank() const { return rendezvous_.rank; }
  int32_t world_size() const { return rendezvous_.world_size; }

  // ControlPlane::OnAbort, as soon as there is one. Set before the first step.
  void OnAbort(AbortCallback callback);
  // Meets the other ranks, if that has yet to be done. Errors: ConnectTcp's.
  absl::Status Meet(ControlPlane::Deadline deadline);
  // Requires: the ranks have met.
  ControlPlane& control() const { return *control_; }
  // ControlPlane's; false before the ranks have met.
  bool TakeMissedStep() {
    return control_ != nullptr && control_->TakeMissedStep();
  }
  // Ends the control plane: its callback is not called any more.
  void Close() { control_.reset(); }

 private:
  TcpRendezvous rendezvous_;
  AbortCallback on_abort_;  // until there is a control plane
  std::unique_ptr<ControlPlane> control_;
};

}  // namespace refit

#endif  // REFIT_CONTROL_INCLUDE_REFIT_CONTROL_PLANE_H_
