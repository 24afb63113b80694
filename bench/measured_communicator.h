// Communicators of NCCL for measurements, beside the transport's.
#ifndef REFIT_BENCH_MEASURED_COMMUNICATOR_H_
#define REFIT_BENCH_MEASURED_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "executor/transport/nccl_api.h"
#include "executor/transport/nccl_communicator.h"
#include "refit/transport.h"

namespace refit {

// For NCCL's calls in a measurement, which nothing interrupts.
Deadline MeasurementDeadline();
absl::Status NeverInterrupted();

// Of `ranks` (global, ascending); collective over all ranks. Null for a rank
// that is not among them. `api` must outlive the result.
absl::StatusOr<std::unique_ptr<NcclCommunicator>> MakeCommunicator(
    Transport& transport, const nccl::Api& api,
    const std::vector<int32_t>& ranks);

}  // namespace refit

#endif  // REFIT_BENCH_MEASURED_COMMUNICATOR_H_
