// Peers' tensors that a rank reaches in direct rounds.
#ifndef REFIT_EXECUTOR_PEER_TENSORS_H_
#define REFIT_EXECUTOR_PEER_TENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "executor/rank_schedule.h"
#include "plan/plan_file.h"
#include "refit/device.h"
#include "refit/transport.h"

namespace refit {

// A sender stores into its receiver's tensors (it *pushes*), if it can map
// them. Where it cannot, the receiver maps the sender's and reads (it *pulls*).
struct PeerTensors {
  // Those of receivers that are pushed to and of senders that are pulled from,
  // by entry of their TensorTables.
  std::map<int32_t, std::unique_ptr<MappedMemory>> mapped;
  // This rank's own tensors, which peers map while this lives.
  std::vector<std::unique_ptr<ExportedMemory>> exported;
  std::set<int32_t> pulled_from;  // senders
  // Receivers, with why this rank cannot map their tensors.
  std::map<int32_t, std::string> pulled_by;
};

// Maps what the rank needs of its peers. `addresses`: its own tensors, by entry
// of its TensorTable.
//
// Takes two calls of ExchangeBytes, on all ranks of the plan. An error of
// another rank is not seen here: they have to agree on it afterwards.
absl::Status MapPeerTensors(const PlanFile& plan, int32_t rank,
                            const RankSchedule& schedule,
                            absl::Span<std::byte* const> addresses,
                            Device& device, Transport& transport,
                            Deadline deadline, PeerTensors& peers);

}  // namespace refit

#endif  // REFIT_EXECUTOR_PEER_TENSORS_H_
