// Peers' tensors that a rank reaches in direct rounds.
#ifndef REFIT_EXECUTOR_PEER_TENSORS_H_
#define REFIT_EXECUTOR_PEER_TENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "executor/rank_schedule.h"
#include "plan/plan_file.h"
#include "refit/device.h"
#include "refit/transport.h"

namespace refit {

// A sender stores into its receiver's tensors: it *pushes*. Or the receiver
// reads the sender's: it *pulls*. Limits.direct_pulls says which. If the end
// that is to move the bytes cannot map the other's tensors, the other end does.
struct PeerTensors {
  // Those of receivers that are pushed to and of senders that are pulled from,
  // by entry of their TensorTables.
  std::map<int32_t, std::unique_ptr<MappedMemory>> mapped;
  // This rank's own tensors, which peers map while this lives.
  std::vector<std::unique_ptr<ExportedMemory>> exported;
  std::set<int32_t> pulled_from;  // senders that this rank reads
  std::set<int32_t> pulled_by;    // receivers that read this rank
  // Peers whose tensors this rank was to map and cannot, with why. They map
  // this rank's instead.
  std::map<int32_t, std::string> unmapped;
  // Of a destination that quantizes: the sources whose tensors it has mapped,
  // beside what these store.
  std::set<int32_t> readable;
  // By destination, this rank or one that it stores into: the slots of its
  // scratch that only a checked refit fills, because it reads the sources'
  // tensors instead (executor/quantize_pulls.h). None is empty.
  std::map<int32_t, std::set<uint32_t>> pulled_slots;

  // Whether this rank, not `peer`, moves a message of this kind between them.
  bool Moves(fb::MessageKind kind, int32_t peer) const {
    return kind == fb::MessageKind::kSend ? !pulled_by.contains(peer)
                                          : pulled_from.contains(peer);
  }
};

// Shows the rank's tensors, so that peers can map them.
absl::StatusOr<std::unique_ptr<ExportedMemory>> ExportTensors(
    const PlanFile& plan, int32_t rank, absl::Span<std::byte* const> addresses,
    Device& device);
// Maps what ExportTensors of rank `peer` shows.
absl::StatusOr<std::unique_ptr<MappedMemory>> ImportTensors(
    const PlanFile& plan, int32_t peer, std::string_view exported,
    Device& device, Deadline deadline);

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
