// What `refit-bench transfer` measures: a plan on GPUs beside what the same
// bytes take without it, and beside the methods of other systems.
#ifndef REFIT_BENCH_TRANSFER_BENCH_H_
#define REFIT_BENCH_TRANSFER_BENCH_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/other_methods.h"
#include "plan/plan_file.h"
#include "refit/control_plane.h"

namespace refit {

// One method: the time from the first rank's start to the last one's end of one
// refit, as CUDA events of the ranks' streams have it, averaged over the
// iterations, which follow each other without a pause.
struct TransferRow {
  std::string method;
  double seconds = 0;
  uint64_t wire_bytes = 0;  // that leave a GPU, all ranks
  std::optional<uint64_t> wrong_elements = std::nullopt;  // where it is checked
  std::string remark;
};

struct TransferOptions {
  int64_t iterations = 10;
  // Also the methods that move whole models or tensor by tensor.
  bool peers = false;
  // Also the plan on so many multiprocessors at most, a row each.
  std::vector<uint32_t> multiprocessors = {};
  // Also these; null: none.
  std::shared_ptr<const OtherMethods> others = nullptr;
  // Called on rank 0 with each row as soon as it is measured.
  std::function<void(const TransferRow&)> on_row = [](const TransferRow&) {};
};

struct TransferMeasurement {
  // The plan's first, then the plan with digests (RunOptions::check).
  std::vector<TransferRow> rows;
  double first_seconds = 0;       // Run and Wait after Bind, slowest rank
  double first_host_seconds = 0;  // its Run alone, slowest rank
  double run_host_seconds = 0;    // Executor::Run alone, slowest rank
  double latency_seconds = 0;     // best Run and Wait, slowest rank
  double checked_seconds = 0;     // the same of refits with a check
  uint64_t extra_bytes = 0;       // GPU memory beside the tensors, worst rank
  uint64_t wrong_elements = 0;    // after everything, by a last refit

  // Of that refit and of the methods that are checked.
  bool all_right() const;
};

// Of one rank; collective, the same result on all ranks.
absl::StatusOr<TransferMeasurement> MeasureTransfer(
    const PlanFile& plan, std::unique_ptr<ControlPlane> control, int ordinal,
    const TransferOptions& options);

// All ranks as threads of this process, on all GPUs of this host.
absl::StatusOr<TransferMeasurement> MeasureTransferInProcess(
    const PlanFile& plan, const TransferOptions& options);

// The table that the program prints: its head, a row, of which `ours` is the
// plan's time, and what follows the rows.
std::string TransferHeader();
std::string TransferRowText(const TransferRow& row, double ours);
std::string TransferSummary(const PlanFile& plan,
                            const TransferMeasurement& measured);

}  // namespace refit

#endif  // REFIT_BENCH_TRANSFER_BENCH_H_
