// Fence: the order between ranks that reach each other's memory.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace refit {

// Each ordered pair of ranks has a counter, raised by Signal and taken by
// Await, on the streams of their ranks: the k-th Await of a peer waits for the
// k-th Signal that this peer sent here. Both may be captured in a CUDA graph.
class Fence {
 public:
  virtual ~Fence() = default;
  // Each of `peers` may pass one more Await; all that `stream` wrote before is
  // visible to it then.
  virtual absl::Status Signal(absl::Span<const int32_t> peers,
                              void* stream) = 0;
  // Errors, where the calling thread itself waits, name the peer.
  virtual absl::Status Await(absl::Span<const int32_t> peers, void* stream) = 0;
  // A word that is not 0 once an Await has passed because the fence was
  // aborted: what follows must not be done then. Null where Await itself fails.
  virtual const uint32_t* aborted() const = 0;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_
