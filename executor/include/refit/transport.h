// Transport: how one rank exchanges bytes with all other ranks of a plan.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_TRANSPORT_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_TRANSPORT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/schedule/operation.h"
#include "plan_generated.h"
#include "refit/device.h"
#include "refit/fence.h"

namespace refit {

using Deadline = std::chrono::steady_clock::time_point;

// The step in which a rank shakes hands.
enum class HandshakeStage : uint32_t {
  kConnect = 0,
  kBind = 1,
  kCheck = 2,
  kPostHooks = 3,
};

// All ranks must agree on this before any byte moves.
struct HandshakeRecord {
  HandshakeStage stage = HandshakeStage::kConnect;
  bool ready = true;  // false: this rank cannot go on, so no rank does
  std::string why;    // that is; "": only its own error says it
  uint32_t format_version = 0;
  uint32_t world_size = 0;
  fb::Digest body_digest;
};

// The operations that a rank issues as one group. Operations to one peer match
// in issue order; those to different peers complete in any order.
struct ExchangeRound {
  uint32_t index = 0;
  fb::Route route = fb::Route::kUnspecified;
  absl::Span<const Operation> operations;
};

// Only `Abort` may be called by other threads than the rank's own. Connect,
// Handshake, ExchangeBytes, BeginRefit, EndRefit and Wait are collective: all
// ranks call them in the same order, and a failure on one rank fails the call
// on all. A rank that skipped a failed step learns of it from its next call
// (TakeMissedStep).
class Transport {
 public:
  virtual ~Transport() = default;

  virtual int32_t rank() const = 0;
  virtual int32_t world_size() const = 0;

  // Reaches all ranks, touches every edge once and shakes hands on `record`.
  // `edges` are sorted and distinct. Call it again after a failed refit: it
  // repairs the transport.
  virtual absl::Status Connect(const HandshakeRecord& record,
                               absl::Span<const Edge> edges,
                               Deadline deadline) = 0;

  // Succeeds if all ranks are ready and give equal records. An error names the
  // rank that is not ready, or the first field that differs, with two ranks and
  // their values.
  virtual absl::Status Handshake(const HandshakeRecord& record,
                                 Deadline deadline) = 0;
  // Of a Connect or Handshake that failed: whether others had failed a call
  // that this rank never made. The next one joins them, or misses another.
  // Asked again: false.
  virtual bool TakeMissedStep() { return false; }

  // Gives `mine` to each rank of `to`. Returns what each rank of `from` gave to
  // this one, in the order of `from`.
  virtual absl::StatusOr<std::vector<std::string>> ExchangeBytes(
      std::string_view mine, absl::Span<const int32_t> to,
      absl::Span<const int32_t> from, Deadline deadline) = 0;

  // True: ranks use each other's tensors in direct rounds, as the device maps
  // them and fence() orders it. False: the executor sends the messages of
  // direct rounds like those of staged ones, and gives Connect no direct edge.
  virtual bool ReachesPeerMemory() const { return true; }

  // Orders direct rounds. Null if Connect was given no direct edge. The
  // transport owns it.
  virtual Fence* fence() = 0;

  // What the last Connect found that is no error, but that a user should know:
  // a sentence each.
  virtual std::vector<std::string> notices() const { return {}; }

  // `callback` is called, on any thread, before the transport aborts work of
  // this rank. Graphs that hold its exchanges must have ended when it returns,
  // because NCCL waits for them. Set it before the first Connect.
  virtual void OnBreak(std::function<void()>) {}

  // Starts a refit, whose `deadline` lasts until Wait returns. `is_captured`:
  // it becomes part of a graph of the caller's. If it fails then, nothing of it
  // is under way; an abort that waits for that graph goes on when the calls of
  // this rank have returned.
  virtual absl::Status BeginRefit(Deadline deadline, bool is_captured) = 0;

  // Enqueues one group. When `stream` reaches this point, the staging ranges
  // are free again and the received bytes are in place. An error names the
  // round, the operation and the peer, and leaves nothing under way.
  virtual absl::Status Exchange(const ExchangeRound& round, Stream stream) = 0;

  // Enqueues the end of this rank's part of the refit.
  virtual absl::Status EndRefit(Stream stream) = 0;

  // After a call of a refit that failed on this rank with `status`, which the
  // others know: returns that when what this rank has enqueued on `stream` uses
  // no memory of peers any more, and no peer this rank's. Adds who goes on.
  virtual absl::Status Settle(const absl::Status& status, Stream /*stream*/) {
    return status;
  }

  // Returns when this rank's part of the refits that were begun is over. Not
  // collective. After an error nothing is under way, and Wait returns it too.
  virtual absl::Status AwaitOwnEnd() { return absl::OkStatus(); }

  // Returns when all refits that were begun are over; OK if every rank came to
  // their end. After an error of this rank nothing is under way.
  virtual absl::Status Wait() = 0;

  // Fails the step this rank is in, on all ranks, with `status`. Thread-safe.
  virtual void Abort(const absl::Status& status) = 0;

  // Goes on with what `earlier`, which this process has left, reached peers by,
  // if it is of the same kind. Before the first Connect.
  virtual void TakeLinks(Transport& /*earlier*/) {}

  // Ends what is under way and tells the others that this rank comes to no
  // further call. After it only the destructor may be called, which does the
  // same where nobody called Leave. Error: kFailedPrecondition, naming peers
  // that may still use this rank's tensors.
  virtual absl::Status Leave() { return absl::OkStatus(); }
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_TRANSPORT_H_
