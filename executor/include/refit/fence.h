// Fence: orders two ranks of which one uses the other's memory.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace refit {

// In a direct round one rank of each pair moves the bytes. It is the *origin*,
// as in MPI's one-sided communication: it stores into the memory of the other
// rank, the *target*, or reads it. The
// target calls Grant; the origin calls AwaitGrants, moves, and calls Finish;
// the target calls AwaitFinishes. A rank may be an origin to one peer and a
// target to another, and both to one peer. All calls work on the ranks'
// streams; a CUDA graph may capture them. Between two ranks the k-th
// AwaitGrants meets the k-th Grant, and the k-th AwaitFinishes the k-th
// Progress or Finish.
class Fence {
 public:
  virtual ~Fence() = default;
  // Lets each of `origins` use this rank's memory until it finishes, in this
  // round or a later one. After AwaitGrants the origins see what `stream`
  // stored there before.
  virtual absl::Status Grant(absl::Span<const int32_t> origins,
                             void* stream) = 0;
  // Where the calling thread itself waits, an error names the peer. After an
  // error move nothing, and do not call Finish.
  virtual absl::Status AwaitGrants(absl::Span<const int32_t> targets,
                                   void* stream) = 0;
  // Reports that what `stream` has moved so far is in place. The origin goes on
  // under the same grant.
  virtual absl::Status Progress(absl::Span<const int32_t> targets,
                                void* stream) = 0;
  // Reports that `stream` has moved the bytes. After AwaitFinishes the targets
  // see the stores.
  virtual absl::Status Finish(absl::Span<const int32_t> targets,
                              void* stream) = 0;
  // Errors as above. Where the calling thread itself waits, nobody uses this
  // rank's memory after an error.
  virtual absl::Status AwaitFinishes(absl::Span<const int32_t> origins,
                                     void* stream) = 0;
  // Call it after an error, on the rank's own thread: it promises that this
  // rank moves nothing more of what it was granted and has not finished.
  virtual void Withdraw() = 0;
  // Points to a word that is not 0 after an abort; work that follows
  // ObserveAbort must not start then. Null where the Awaits themselves fail.
  virtual const uint32_t* aborted() const = 0;
  // Sets `aborted` if there was an abort before `stream` comes to this point.
  // Call it between an Await and what moves bytes.
  virtual absl::Status ObserveAbort(void* /*stream*/) {
    return absl::OkStatus();
  }
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_
