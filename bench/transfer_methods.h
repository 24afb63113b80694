// The methods that a plan is compared with, on the same GPUs and memory.
#ifndef REFIT_BENCH_TRANSFER_METHODS_H_
#define REFIT_BENCH_TRANSFER_METHODS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "plan/plan_file.h"
#include "runner/world_rank.h"

namespace refit {

// One rank's part of a method. What it writes is overwritten by the last refit.
class TransferMethod {
 public:
  virtual ~TransferMethod() = default;
  virtual std::string name() const = 0;
  virtual std::string remark() const { return ""; }
  virtual uint64_t sent_bytes() const = 0;  // by this rank, per refit
  // Fewer iterations than asked for are enough where one takes long.
  virtual int64_t iterations_max() const { return 1 << 20; }
  virtual absl::Status Enqueue(Stream stream) = 0;
  // What it moved wrong on this rank, if that can be told; collective, behind
  // all that was enqueued.
  virtual absl::StatusOr<std::optional<uint64_t>> WrongElements() {
    return std::nullopt;
  }
};

// What each pair of ranks exchanges in a refit, from this rank's view.
struct PairBytes {
  int32_t peer = 0;
  fb::MessageKind kind = fb::MessageKind::kSend;
  uint64_t size_bytes = 0;
};

// Collective over all ranks, in this order: the bytes alone by NCCL send and
// receive; by copy engines into mapped memory; and with `peers` packed
// broadcast of 1 GiB without and with the gather before it, gather and
// broadcast tensor by tensor, and send and receive tensor by tensor. Methods
// that the layout of GPUs does not allow (two ranks of a communicator on one
// GPU) are left out.
absl::StatusOr<std::vector<std::unique_ptr<TransferMethod>>> MakeMethods(
    const PlanFile& plan, WorldRank& rank, bool peers);

}  // namespace refit

#endif  // REFIT_BENCH_TRANSFER_METHODS_H_
