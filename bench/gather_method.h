// What several ranks want alike, by NCCL's all-gather instead of relays.
#ifndef REFIT_BENCH_GATHER_METHOD_H_
#define REFIT_BENCH_GATHER_METHOD_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/transfer_methods.h"
#include "bench/window_api.h"
#include "executor/transport/nccl_api.h"
#include "plan/plan_file.h"
#include "refit/device.h"
#include "refit/transport.h"

namespace refit {

struct GatherOptions {
  uint64_t round_bytes = 0;  // that each receiver has after a round
  bool graph = false;        // as one CUDA graph, as the executor does
  // Not null: receivers gather in memory that all of them register.
  const nccl::WindowApi* windows = nullptr;
};

// Why the plan's bytes cannot be sent so. It needs one source rank, all of
// whose bytes all destination ranks want, through staging.
absl::Status CanGather(const PlanFile& plan, const nccl::Api& api);

// The source sends each receiver an equal part of a round; the receivers gather
// the parts while the next round comes, in the other half of their memory.
// There is no packing and unpacking.
//
// WrongElements counts bytes, of what came last.
//
// Requires: CanGather. Collective over all ranks. All arguments must outlive
// the result.
absl::StatusOr<std::unique_ptr<TransferMethod>> MakeGatherMethod(
    const PlanFile& plan, Transport& transport, Device& device,
    const nccl::Api& api, const GatherOptions& options);

}  // namespace refit

#endif  // REFIT_BENCH_GATHER_METHOD_H_
