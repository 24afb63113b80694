#include "bench/measured_communicator.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace refit {
namespace {

// The unique id that `root` makes, on all ranks.
absl::StatusOr<nccl::UniqueId> SharedId(Transport& transport,
                                        const nccl::Api& api, int32_t root) {
  nccl::UniqueId id = {};
  if (root == transport.rank()) {
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
  std::memcpy(id.internal, (*ids)[static_cast<size_t>(root)].data(),
              sizeof(id.internal));
  return id;
}

}  // namespace

Deadline MeasurementDeadline() {
  return std::chrono::steady_clock::now() + std::chrono::minutes(2);
}

absl::Status NeverInterrupted() { return absl::OkStatus(); }

absl::StatusOr<std::unique_ptr<NcclCommunicator>> MakeCommunicator(
    Transport& transport, const nccl::Api& api,
    const std::vector<int32_t>& ranks) {
  const int32_t me = transport.rank();
  const absl::StatusOr<nccl::UniqueId> id =
      SharedId(transport, api, ranks.front());
  if (!id.ok()) return id.status();
  if (std::find(ranks.begin(), ranks.end(), me) == ranks.end()) {
    return std::unique_ptr<NcclCommunicator>();
  }
  return NcclCommunicator::Create(api, *id, ranks, me, MeasurementDeadline(),
                                  NeverInterrupted);
}

absl::StatusOr<std::unique_ptr<BlockingCommunicator>>
BlockingCommunicator::Make(Transport& transport, const nccl::Api& api) {
  const absl::StatusOr<nccl::UniqueId> id = SharedId(transport, api, 0);
  if (!id.ok()) return id.status();
  std::unique_ptr<BlockingCommunicator> made(new BlockingCommunicator(api));
  nccl::Config config;
  config.blocking = 1;
  absl::Status status = nccl::StatusOf(
      api,
      api.CommInitRankConfig(&made->comm_, transport.world_size(), *id,
                             transport.rank(), &config),
      "ncclCommInitRankConfig", nullptr);
  if (!status.ok()) return status;
  return made;
}

}  // namespace refit
