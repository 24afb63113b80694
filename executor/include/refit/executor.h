// Executor: one rank's replay of a plan.
//
//   Load -> Connect -> Bind -> Run, as often as wanted -> Close
//
// Connect and the first Bind are collective: all ranks of the plan call them,
// and none returns success before all have passed. Run is collective too.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_EXECUTOR_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_EXECUTOR_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/plan_file.h"
#include "refit/device.h"
#include "refit/transport.h"

namespace refit {

// A contiguous tensor of this worker, named as its framework names it.
struct BoundTensor {
  std::string name;
  void* data = nullptr;  // may be null when the tensor has no elements
  uint64_t size_bytes = 0;
  DType dtype = DType::kUnspecified;
  std::vector<uint64_t> shape;
};

enum class ExecutorState : uint8_t {
  kLoaded,
  kConnected,
  kBound,  // ready to run; the last refit, if any, succeeded
  kTorn,   // the last refit failed: do not serve until a later one succeeds
  kClosed,
};

std::string_view ExecutorStateName(ExecutorState state);

struct ExecutorOptions {
  int32_t rank = 0;                // global
  Device* device = nullptr;        // must outlive the executor
  Transport* transport = nullptr;  // of `rank`; must outlive the executor
};

struct RunOptions {
  // For the whole refit.
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
  // Where the tensors are now, in the order of Bind; empty: not checked. A
  // tensor that moved since Bind fails the refit before any byte moves.
  absl::Span<const void* const> addresses;
};

// Of the last Run.
struct RunCounters {
  uint64_t rounds = 0;
  uint64_t messages_sent = 0;
  uint64_t messages_received = 0;
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  // Time of the calling thread; on a device with streams, of the enqueuing.
  double pack_seconds = 0;
  double wire_seconds = 0;
  double unpack_seconds = 0;
};

// Thread-compatible.
class Executor {
 public:
  // Checks that `options.rank` is a rank of `plan` and of the transport. `plan`
  // must outlive the executor.
  static absl::StatusOr<std::unique_ptr<Executor>> Load(
      const PlanFile& plan, const ExecutorOptions& options);
  ~Executor();

  // Allocates the staging arena and shakes hands with all ranks on the plan.
  absl::Status Connect(std::chrono::nanoseconds timeout);

  // Takes this rank's tensors, checks every one against the plan and makes all
  // copies ready. Refuses missing, unexpected and duplicate names, a wrong
  // dtype, shape or size, null pointers and memory that overlaps: all problems
  // in one message. A tensor that the plan skips as a whole may be left out.
  //
  // Once bound, a rank may bind again whenever its tensors move; that is local
  // to the rank, and a refused Bind leaves the earlier one in place.
  absl::Status Bind(
      absl::Span<const BoundTensor> tensors,
      std::chrono::nanoseconds timeout = std::chrono::minutes(10));

  // Enqueues one refit. A failed one fails on all ranks, and leaves kTorn; Run
  // may be called again.
  absl::Status Run(Stream stream, const RunOptions& options);

  // Frees everything but the plan. Idempotent.
  void Close();

  ExecutorState state() const { return state_; }
  const RunCounters& counters() const { return counters_; }

 private:
  // A round in which this rank takes part.
  struct RoundWork {
    uint32_t index = 0;
    fb::Route route = fb::Route::kUnspecified;
    uint32_t operations_begin = 0;
    uint32_t operations_count = 0;
    bool packs = false;
    bool unpacks = false;
    size_t pack_batch = 0;
    size_t unpack_batch = 0;
  };

  Executor(const PlanFile& plan, const ExecutorOptions& options);
  const fb::RankProgram& program() const;
  HandshakeRecord Record(HandshakeStage stage) const;
  void PlanRounds();
  std::vector<CopyBatch> BuildBatches(absl::Span<std::byte* const> addresses,
                                      std::vector<Operation>& operations) const;
  absl::Status RunRounds(Stream stream, const RunOptions& options,
                         Deadline deadline);

  const PlanFile& plan_;
  const ExecutorOptions options_;
  ExecutorState state_ = ExecutorState::kLoaded;
  RunCounters counters_;
  std::unique_ptr<DeviceMemory> staging_;
  std::vector<RoundWork> rounds_;
  std::vector<Operation> operations_;
  std::vector<const void*> bound_addresses_;  // in the order of Bind
  std::unique_ptr<PreparedCopies> copies_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_EXECUTOR_H_
