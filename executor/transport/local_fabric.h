// What the ends of a LocalFabric share.
#ifndef REFIT_EXECUTOR_TRANSPORT_LOCAL_FABRIC_H_
#define REFIT_EXECUTOR_TRANSPORT_LOCAL_FABRIC_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "executor/device/thread_fence.h"
#include "executor/transport/handshake.h"
#include "refit/local_transport.h"
#include "refit/transport.h"

namespace refit {
namespace local {

struct Endpoint;

// A send that waits for its receiver. Lives in the sender's transport, linked
// into the receiver's inbox until the receiver takes it out.
struct Post {
  Post* next = nullptr;
  Endpoint* sender = nullptr;
  int32_t source = 0;
  uint64_t step = 0;
  uint32_t round = 0;
  const std::byte* data = nullptr;
  uint64_t size_bytes = 0;
  bool taken = false;  // guarded by the receiver's mutex
};

// One rank, as the other ranks see it.
struct Endpoint {
  std::mutex mutex;
  std::condition_variable changed;
  Post* inbox = nullptr;  // oldest first
  Post* inbox_last = nullptr;
  size_t unfinished_sends = 0;  // of the group this rank is in
  // While the rank sleeps for receives: how many, and of which round. It is
  // woken once, by the last of them.
  size_t awaited_posts = 0;
  uint32_t awaited_round = 0;
  FenceEnd fence;
};

}  // namespace local

// Collective steps (handshakes and refits) are numbered alike on all ranks. An
// abort belongs to a step, so that the next step is not touched by it.
struct LocalFabric::State {
  explicit State(int32_t world_size)
      : endpoints(world_size),
        records(world_size),
        shared{std::vector<std::string>(world_size),
               std::vector<std::string>(world_size)},
        arrived(world_size),
        created(world_size) {}

  std::vector<local::Endpoint> endpoints;
  // The newest step that was aborted. Written under `mutex`.
  std::atomic<uint64_t> aborted_step = 0;

  std::mutex mutex;  // never held together with an endpoint's
  std::condition_variable changed;
  absl::Status abort_status;
  bool aborted_in_handshake = false;  // the newest of these
  StepPurposes purposes;
  // The gathering in progress and the outcome of the last one.
  std::vector<OfRank<HandshakeRecord>> records;  // by rank
  // What ranks share, by parity of the step: one may be at the next step while
  // others still read.
  std::array<std::vector<std::string>, 2> shared;
  std::vector<bool> arrived;
  int32_t arrivals = 0;
  uint64_t gatherings = 0;
  absl::Status outcome;
  std::vector<bool> created;

  void Abort(uint64_t step, int32_t rank, const absl::Status& status);
  void MarkAborted(uint64_t step, const absl::Status& status,
                   bool in_handshake = false);
  // Fails the step, on all ranks, if another rank begins it for something else.
  void Begin(uint64_t step, int32_t rank, StepPurpose purpose);
  void WakeAll();
  absl::Status AbortStatus();
  // The caller of these two holds `mutex`.
  int32_t FirstArrived() const;
  std::vector<int32_t> Missing() const;
  absl::Status Gather(uint64_t step, int32_t rank,
                      const HandshakeRecord& record, Deadline deadline,
                      std::string_view what);
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_LOCAL_FABRIC_H_
