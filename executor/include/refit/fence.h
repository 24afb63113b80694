// Fence: orders two ranks of which one uses the other's memory.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace refit {

// In a direct round one rank of each pair moves the bytes. This *mover*
// stores into the memory of the other rank, the *holder*, or reads it. The
// holder calls Grant; the mover calls AwaitGrants, moves, and calls Finish;
// the holder calls AwaitFinishes. A rank may be a mover to one peer and a
// holder to another, and both to one peer. All four calls work on the ranks'
// streams; a CUDA graph may capture them. Between two ranks the k-th
// AwaitGrants meets the k-th Grant, and the k-th AwaitFinishes the k-th
// Finish.
class Fence {
 public:
  virtual ~Fence() = default;
  // Lets each of `movers` use this rank's memory until it finishes, in this
  // round or a later one. After AwaitGrants the movers see what `stream` stored
  // there before.
  virtual absl::Status Grant(absl::Span<const int32_t> movers,
                             void* stream) = 0;
  // Where the calling thread itself waits, an error names the peer. After an
  // error move nothing, and do not call Finish.
  virtual absl::Status AwaitGrants(absl::Span<const int32_t> holders,
                                   void* stream) = 0;
  // Reports that `stream` has moved the bytes. After AwaitFinishes the holders
  // see the stores.
  virtual absl::Status Finish(absl::Span<const int32_t> holders,
                              void* stream) = 0;
  // Errors as above. Where the calling thread itself waits, nobody uses this
  // rank's memory after an error.
  virtual absl::Status AwaitFinishes(absl::Span<const int32_t> movers,
                                     void* stream) = 0;
  // Call it after an error, on the rank's own thread: it promises that this
  // rank moves nothing more of what it was granted and has not finished.
  virtual void Withdraw() = 0;
  // Points to a word that is not 0 after an abort; work that follows an Await
  // must not start then. Null where the Awaits themselves fail.
  virtual const uint32_t* aborted() const = 0;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_
