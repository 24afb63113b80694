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

// One whose calls return when they are done, of all ranks: what NVIDIA's
// libraries are used with. Aborted by scope.
class BlockingCommunicator {
 public:
  // Collective. `api` must outlive the result.
  static absl::StatusOr<std::unique_ptr<BlockingCommunicator>> Make(
      Transport& transport, const nccl::Api& api);
  ~BlockingCommunicator() {
    if (comm_ != nullptr) api_.CommAbort(comm_);
  }
  nccl::Comm get() const { return comm_; }

 private:
  explicit BlockingCommunicator(const nccl::Api& api) : api_(api) {}

  const nccl::Api& api_;
  nccl::Comm comm_ = nullptr;
};

}  // namespace refit

#endif  // REFIT_BENCH_MEASURED_COMMUNICATOR_H_
