// What a build without CUDA says of transfers.
#include "bench/transfer_bench.h"

namespace refit {

absl::StatusOr<TransferMeasurement> MeasureTransfer(
    const PlanFile&, std::unique_ptr<ControlPlane>, int,
    const TransferOptions&) {
  return absl::UnimplementedError("this build has no CUDA");
}

absl::StatusOr<TransferMeasurement> MeasureTransferInProcess(
    const PlanFile&, const TransferOptions&) {
  return absl::UnimplementedError("this build has no CUDA");
}

bool TransferMeasurement::all_right() const { return false; }

std::string TransferHeader() { return ""; }

std::string TransferRowText(const TransferRow&, double) { return ""; }

std::string TransferSummary(const PlanFile&, const TransferMeasurement&) {
  return "";
}

}  // namespace refit
