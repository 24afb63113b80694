// ControlPlane: small messages on the host among all ranks of a plan. Plans,
// ids and errors travel here, weights never do.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_CONTROL_PLANE_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_CONTROL_PLANE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace refit {

// One rank's end. BeginStep, AllGather and Exchange are collective: all ranks
// call them in the same order, from one thread of each rank. A step that fails
// on one rank fails on all; the next step starts afresh, unless a rank is gone.
class ControlPlane {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  virtual ~ControlPlane() = default;
  virtual int32_t rank() const = 0;
  virtual int32_t world_size() const = 0;

  // Starts a step, and returns its number, which is the same on all ranks: the
  // calls up to the next BeginStep belong to it. Does not wait for the others,
  // but for a callback of the step before that is running.
  virtual uint64_t BeginStep() = 0;

  // Every rank's `mine`, by rank. Errors: kDeadlineExceeded, naming `what`, how
  // many ranks did not come and the first of them; kAborted (or
  // kDeadlineExceeded, when that was the aborting rank's reason), with the rank
  // and its message; kUnavailable, naming a rank whose process is gone or which
  // has closed its end; kInternal, two ranks are in different calls, both
  // named; kResourceExhausted, over 256 MiB.
  virtual absl::StatusOr<std::vector<std::string>> AllGather(
      std::string_view mine, std::string_view what, Deadline deadline) = 0;

  // Gives `mine` to each rank of `to`; returns, when all ranks have come, what
  // each rank of `from` gave to this one, in that order. Errors as above;
  // kInternal also if two ranks do not agree on who gives to whom.
  virtual absl::StatusOr<std::vector<std::string>> Exchange(
      std::string_view mine, absl::Span<const int32_t> to,
      absl::Span<const int32_t> from, std::string_view what,
      Deadline deadline) = 0;

  // Fails the step this rank is in, on all ranks, with `status`. Thread-safe;
  // the first abort of a step counts. This rank's later calls in the step fail
  // in the same words as the others'.
  virtual void Abort(const absl::Status& status) = 0;

  // `callback(step, status)` is called, at most once per step and on a thread
  // of the control plane, when the step this rank is in was aborted by another
  // rank, or a rank is gone or has closed its end without entering the step,
  // also if that was before this rank entered the step; so it may come before
  // BeginStep has returned. Set before the first step; must not call back in
  // here.
  virtual void OnAbort(
      std::function<void(uint64_t step, const absl::Status&)> callback) = 0;
};

// Where ranks meet: rank 0 listens, the others connect.
struct TcpRendezvous {
  static constexpr int32_t kWorldSizeMax = 1 << 20;

  std::string host;
  uint16_t port = 0;
  int32_t rank = 0;
  int32_t world_size = 1;
  // Of the unique id that this is from (unique_id.h); 0: of none.
  uint64_t nonce = 0;
};

// Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them;
// where one is absent Open MPI's (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)
// or SLURM's (SLURM_PROCID, SLURM_NTASKS, the first host of SLURM_STEP_NODELIST
// or SLURM_NODELIST, SLURM_LAUNCH_NODE_IPADDR); the port is 29500 then. Where
// TORCHELASTIC_USE_AGENT_STORE says that torchrun itself listens at
// MASTER_PORT, the port is the next one. REFIT_PORT goes before all that.
// Error: kInvalidArgument, naming the variable, what it is and what it should
// be.
absl::StatusOr<TcpRendezvous> RendezvousFromEnvironment();

// A meeting of ranks of this process, of which rank 0 is given: at a port of
// the loopback interface that nobody listens at now.
absl::StatusOr<TcpRendezvous> LoopbackRendezvous(int32_t world_size);

// This rank's number among those of its host, from LOCAL_RANK, SLURM_LOCALID or
// OMPI_COMM_WORLD_LOCAL_RANK. Errors as above.
absl::StatusOr<int32_t> LocalRankFromEnvironment();

// Returns when all ranks have come. The first of their deadlines that passes is
// the end for all of them. Errors: kDeadlineExceeded (rank 0 names the first
// missing rank), kUnavailable (nobody listens at the address by then; rank 0:
// the port is taken), kAlreadyExists (two processes are the same rank, named),
// kInvalidArgument (another world size, both named; another unique id; or an
// address that is none), kFailedPrecondition (another version of this protocol;
// rank 0: a unique id of another process),
// kResourceExhausted (rank 0: too few file descriptors). A process that is
// refused does not end the meeting of the others.
absl::StatusOr<std::unique_ptr<ControlPlane>> ConnectTcp(
    const TcpRendezvous& rendezvous, ControlPlane::Deadline deadline);

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_CONTROL_PLANE_H_
