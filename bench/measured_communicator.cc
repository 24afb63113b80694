#include "bench/measured_communicator.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace refit {

Deadline MeasurementDeadline() {
  return std::chrono::steady_clock::now() + std::chrono::minutes(2);
}

absl::Status NeverInterrupted() { return absl::OkStatus(); }

absl::StatusOr<std::unique_ptr<NcclCommunicator>> MakeCommunicator(
    Transport& transport, const nccl::Api& api,
    const std::vector<int32_t>& ranks) {
  const int32_t me = transport.rank();
  nccl::UniqueId id = {};
  if (ranks.front() == me) {
    absl::Status status =
        nccl::StatusOf(api, api.GetUniqueId(&id), "ncclGetUniqueId", nullptr);
    if (!status.ok()) return status;
  }
  std::vector<int32_t> everyone;
  for (int32_t rank = 0; rank < transport.world_size(); ++rank) {
    everyone.push_back(rank);
  }
  const absl::StatusOr<std::vector<std::string>> ids =
      transport.ExchangeBytes(std::string(id.internal, sizeof(id.internal)),
                              everyone, everyone, MeasurementDeadline());
  if (!ids.ok()) return ids.status();
  std::memcpy(id.internal, (*ids)[static_cast<size_t>(ranks.front())].data(),
              sizeof(id.internal));
  if (std::find(ranks.begin(), ranks.end(), me) == ranks.end()) {
    return std::unique_ptr<NcclCommunicator>();
  }
  return NcclCommunicator::Create(api, id, ranks, me, MeasurementDeadline(),
                                  NeverInterrupted);
}

}  // namespace refit
