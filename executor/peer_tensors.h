// Peers' tensors that a rank reaches in direct rounds.
#ifndef REFIT_EXECUTOR_PEER_TENSORS_H_
#define REFIT_EXECUTOR_PEER_TENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "executor/peer_memory.h"
#include "plan/plan_file.h"
#include "plan/schedule/direct_pairs.h"
#include "plan/schedule/rank_schedule.h"
#include "plan/schedule/round_copies.h"
#include "refit/device.h"
#include "refit/transport.h"

namespace refit {

struct PeerTensors : DirectPairs {
  // Those of receivers that are pushed to and of senders that are pulled from
  // or readable, by entry of their TensorTables.
  std::map<int32_t, std::shared_ptr<MappedMemory>> mapped;
  // This rank's own tensors, which peers map while this lives.
  std::vector<std::shared_ptr<ExportedMemory>> exported;
  // Peers whose tensors this rank was to map and cannot, with why. They map
  // this rank's instead.
  std::map<int32_t, std::string> unmapped;

  // Of `mapped`, for BuildRoundCopies.
  PeerAddresses addresses() const {
    PeerAddresses addresses;
    for (const auto& [peer, memory] : mapped) {
      addresses[peer] = memory->addresses();
    }
    return addresses;
  }
};

// Maps what the rank needs of its peers. `addresses`: its own tensors, by entry
// of its TensorTable.
//
// Takes two calls of ExchangeBytes, on all ranks of the plan. An error of
// another rank is not seen here: they have to agree on it afterwards.
absl::Status MapPeerTensors(const PlanFile& plan, int32_t rank,
                            const RankSchedule& schedule,
                            absl::Span<std::byte* const> addresses,
                            PeerMemory& memory, Transport& transport,
                            Deadline deadline, PeerTensors& peers);

}  // namespace refit

#endif  // REFIT_EXECUTOR_PEER_TENSORS_H_
