// Fence: the order between ranks that use each other's memory.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace refit {

// In a direct round one end of each pair of ranks moves the bytes, whichever
// way they go: the *mover* stores into the memory of the other, the *holder*,
// or reads it. A holder grants its movers that they may, and a mover, once
// granted, moves and finishes. A rank may be a mover to one peer and a holder
// to another; two ranks may each be both to the other, in one round. All four
// happen on the streams of their ranks and may be captured in a CUDA graph.
// Between two ranks the k-th AwaitGrants meets the k-th Grant, and the k-th
// AwaitFinishes the k-th Finish.
class Fence {
 public:
  virtual ~Fence() = default;
  // Each of `movers` may use this rank's memory until it has finished, be it in
  // this round or a later one. What `stream` stored
  // there before is visible to them when they have awaited this.
  virtual absl::Status Grant(absl::Span<const int32_t> movers,
                             void* stream) = 0;
  // Errors, where the calling thread itself waits, name the peer. After one
  // nothing may be moved, and Finish must not be called.
  virtual absl::Status AwaitGrants(absl::Span<const int32_t> holders,
                                   void* stream) = 0;
  // What `stream` moved before is done: stores are visible to `holders` when
  // they have awaited this.
  virtual absl::Status Finish(absl::Span<const int32_t> holders,
                              void* stream) = 0;
  // Errors as above; after one nobody uses this rank's memory any more, where
  // the calling thread itself waits.
  virtual absl::Status AwaitFinishes(absl::Span<const int32_t> movers,
                                     void* stream) = 0;
  // After an error: this rank, whose thread calls it, moves nothing more of what
  // it was granted and has not finished.
  virtual void Withdraw() = 0;
  // A word that is not 0 once the fence was aborted: what follows an Await must
  // not be done then. Null where the Awaits themselves fail.
  virtual const uint32_t* aborted() const = 0;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_
