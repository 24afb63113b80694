// NVIDIA's NCCL M2N as a method of `refit-bench transfer`.
#ifndef REFIT_BENCH_M2N_METHOD_H_
#define REFIT_BENCH_M2N_METHOD_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/m2n_api.h"
#include "bench/m2n_tensors.h"
#include "bench/transfer_methods.h"
#include "executor/transport/nccl_api.h"

namespace refit {

// Moves `tensors`, M2nTensors of `plan`, between the rank's own tensors, by a
// call for each, as vLLM does; or in groups as large as M2N fuses, which it
// refuses where NCCL has no network that GPUs use by themselves. Collective
// over all ranks. The rank must be a process of its own: M2N waits for other
// ranks while it holds a lock of the process. All arguments must outlive the
// result.
absl::StatusOr<std::unique_ptr<TransferMethod>> MakeM2nMethod(
    const PlanFile& plan, WorldRank& rank, const nccl::Api& nccl,
    const m2n::Api& api, const std::vector<M2nTensor>& tensors, bool groups);

}  // namespace refit

#endif  // REFIT_BENCH_M2N_METHOD_H_
