// Fence: the order between ranks that store into each other's memory.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace refit {

// In each direct round a receiver grants its senders that they may store, and a
// sender, once granted, stores and finishes. All four happen on the streams of
// their ranks and may be captured in a CUDA graph. Between two ranks the k-th
// AwaitGrants meets the k-th Grant, and the k-th AwaitFinishes the k-th Finish.
class Fence {
 public:
  virtual ~Fence() = default;
  // Each of `senders` may store into this rank's memory once.
  virtual absl::Status Grant(absl::Span<const int32_t> senders,
                             void* stream) = 0;
  // Errors, where the calling thread itself waits, name the peer. After one
  // nothing may be stored, and Finish must not be called.
  virtual absl::Status AwaitGrants(absl::Span<const int32_t> receivers,
                                   void* stream) = 0;
  // What `stream` stored before is visible to `receivers` when they have
  // awaited this.
  virtual absl::Status Finish(absl::Span<const int32_t> receivers,
                              void* stream) = 0;
  // Errors as above; after one nobody stores into this rank's memory any more,
  // where the calling thread itself waits.
  virtual absl::Status AwaitFinishes(absl::Span<const int32_t> senders,
                                     void* stream) = 0;
  // A word that is not 0 once the fence was aborted: what follows an Await must
  // not be done then. Null where the Awaits themselves fail.
  virtual const uint32_t* aborted() const = 0;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_FENCE_H_
