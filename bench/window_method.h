// The messages of a plan's staged rounds, without packing and unpacking: in
// memory that NCCL does not know, or in windows.
#ifndef REFIT_BENCH_WINDOW_METHOD_H_
#define REFIT_BENCH_WINDOW_METHOD_H_

#include <memory>

#include "absl/status/statusor.h"
#include "bench/transfer_methods.h"
#include "bench/window_api.h"
#include "executor/transport/nccl_api.h"
#include "plan/plan_file.h"
#include "refit/device.h"
#include "refit/transport.h"

namespace refit {

struct WindowOptions {
  bool registered = true;  // in memory of NCCL's that all ranks registered
  bool graph = false;      // as one CUDA graph, as the executor does
};

// Each rank has two arenas: it sends from one at the plan's offsets, and
// receives into the other, by NCCL's send and receive as the transport does.
//
// WrongElements counts bytes, of messages that no later one overwrote.
//
// Collective over all ranks. All arguments must outlive the result.
absl::StatusOr<std::unique_ptr<TransferMethod>> MakeWindowMethod(
    const PlanFile& plan, Transport& transport, Device& device,
    const nccl::Api& api, const nccl::WindowApi& windows,
    const WindowOptions& options);

}  // namespace refit

#endif  // REFIT_BENCH_WINDOW_METHOD_H_
