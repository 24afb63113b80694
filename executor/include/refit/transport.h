// Transport: one rank's end of the wires between all ranks of a plan.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_TRANSPORT_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_TRANSPORT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan_generated.h"
#include "refit/device.h"
#include "refit/fence.h"

namespace refit {

using Deadline = std::chrono::steady_clock::time_point;

// How far a rank has come when it shakes hands.
enum class HandshakeStage : uint32_t { kConnect = 0, kBind = 1 };

// What all ranks must agree on before any byte moves.
struct HandshakeRecord {
  HandshakeStage stage = HandshakeStage::kConnect;
  bool ready = true;  // false: this rank cannot go on, so no rank does
  uint32_t format_version = 0;
  uint32_t world_size = 0;
  fb::Digest body_digest;
};

// A peer that this rank sends to or receives from, and how messages travel.
struct Edge {
  int32_t peer = 0;
  fb::MessageKind kind = fb::MessageKind::kSend;
  fb::Route route = fb::Route::kUnspecified;
  fb::Mechanism mechanism = fb::Mechanism::kStaged;
};

// One send or receive of a staged round.
struct Operation {
  fb::MessageKind kind = fb::MessageKind::kSend;
  int32_t peer = 0;
  std::byte* data = nullptr;
  uint64_t size_bytes = 0;
};

// What a rank issues as one group. Operations to the same peer match in issue
// order; operations to different peers may complete in any order.
struct ExchangeRound {
  uint32_t index = 0;
  fb::Route route = fb::Route::kUnspecified;
  absl::Span<const Operation> operations;
};

// Every method but `Abort` is called by the rank's own thread. Connect,
// Handshake, Share, BeginRefit, EndRefit and Wait are collective: all ranks
// call them in the same order, and one that fails on a rank fails on all. A
// rank that left out a step that failed is told so by its next call.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual int32_t rank() const = 0;
  virtual int32_t world_size() const = 0;

  // Reaches all ranks, touches every edge once and shakes hands on `record`.
  // `edges` are sorted and distinct. Called again, it makes a transport whose
  // refit failed whole again.
  virtual absl::Status Connect(const HandshakeRecord& record,
                               absl::Span<const Edge> edges,
                               Deadline deadline) = 0;

  // Succeeds when all ranks are ready and give equal records; otherwise names
  // the rank that is not ready, or the first field that differs with two ranks
  // and both their values.
  virtual absl::Status Handshake(const HandshakeRecord& record,
                                 Deadline deadline) = 0;

  // Gives `mine` to each rank of `to`; returns what each rank of `from` gave to
  // this one, in that order.
  virtual absl::StatusOr<std::vector<std::string>> Share(
      std::string_view mine, absl::Span<const int32_t> to,
      absl::Span<const int32_t> from, Deadline deadline) = 0;

  // Orders direct rounds; null when Connect was given no direct edge. Belongs
  // to the transport.
  virtual Fence* fence() = 0;

  // Exchanges that follow are recorded on a stream that captures, outside of a
  // refit, and this rank's alone.
  virtual void BeginRecording(Deadline) {}

  // `callback` is called, on any thread, before work of this rank is broken
  // off: graphs that hold its exchanges must have ended by its return, since
  // NCCL waits for them. Set before the first Connect.
  virtual void OnBreak(std::function<void()>) {}

  // Starts a refit. `deadline` holds until Wait.
  virtual absl::Status BeginRefit(Deadline deadline) = 0;

  // Enqueues one group. The staging ranges are free again, and the received
  // bytes in place, when `stream` reaches this point. Errors name the round,
  // the operation and the peer, and leave nothing under way.
  virtual absl::Status Exchange(const ExchangeRound& round, Stream stream) = 0;

  // In place of the refit's Exchanges: those of the last one, or of the
  // recording since, are launched as a graph.
  virtual void Replay() {}

  // Enqueues the end of this rank's part of the refit.
  virtual absl::Status EndRefit(Stream stream) = 0;

  // Returns when the refits begun so far are over, with success if every rank
  // came to their end. After an error of this rank nothing is under way.
  virtual absl::Status Wait() = 0;

  // Fails the step this rank is in, on all ranks, with `status`. Thread-safe.
  virtual void Abort(const absl::Status& status) = 0;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_TRANSPORT_H_
