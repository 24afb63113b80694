#include "executor/quantize_pulls.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "control/payload.h"
#include "plan/schedule/direct_pairs.h"
#include "plan/schedule/round_copies.h"

namespace refit {
namespace {

std::string WriteSlots(const std::set<uint32_t>& slots) {
  PayloadWriter writer;
  writer.U64(slots.size());
  for (const uint32_t slot : slots) writer.U32(slot);
  return writer.Take();
}

std::optional<std::set<uint32_t>> ReadSlots(const std::string& bytes) {
  PayloadReader reader(bytes);
  std::set<uint32_t> slots;
  for (uint64_t left = reader.Count(sizeof(uint32_t)); left > 0; --left) {
    slots.insert(reader.U32());
  }
  if (!reader.Complete()) return std::nullopt;
  return slots;
}

}  // namespace

absl::Status AgreeOnPulls(const PlanFile& plan, int32_t rank,
                          const RankSchedule& schedule,
                          absl::Span<std::byte* const> addresses,
                          PeerMemory& memory, Transport& transport,
                          Deadline deadline, PeerTensors& peers) {
  if (!MayPull(plan)) return absl::OkStatus();
  std::vector<int32_t> readers, senders;
  bool has_sources_alone = true;
  if (plan.side(rank) == fb::Side::kSource) {
    for (const int32_t peer : schedule.DirectReceivers()) {
      if (IsQuantizer(plan, peer)) readers.push_back(peer);
    }
  } else if (IsQuantizer(plan, rank)) {
    for (const int32_t peer : schedule.DirectSenders()) {
      const bool is_source = plan.side(peer) == fb::Side::kSource;
      has_sources_alone &= is_source;
      if (is_source) senders.push_back(peer);
    }
  }
  std::string mine;
  if (!readers.empty()) {
    absl::StatusOr<std::shared_ptr<ExportedMemory>> exported =
        memory.Export(plan, rank, addresses);
    if (exported.ok()) {
      mine = (*exported)->bytes();
      peers.exported.push_back(*std::move(exported));
    }
  }
  const absl::StatusOr<std::vector<std::string>> shown =
      transport.ExchangeBytes(mine, readers, senders, deadline);
  if (!shown.ok()) return shown.status();
  // Those that map this rank's tensors, as the plan says.
  const bool is_stored_into = has_sources_alone && peers.pulled_from.empty();
  for (size_t i = 0; i < senders.size() && is_stored_into; ++i) {
    if ((*shown)[i].empty()) continue;
    absl::StatusOr<std::shared_ptr<MappedMemory>> mapped =
        memory.Import(plan, senders[i], (*shown)[i], deadline);
    if (!mapped.ok()) continue;
    peers.mapped[senders[i]] = *std::move(mapped);
    peers.readable.insert(senders[i]);
  }
  std::set<uint32_t> slots;
  if (!peers.readable.empty()) {
    slots = PulledSlots(plan, rank, schedule, peers);
  }
  if (!slots.empty()) {
    peers.pulled_slots[rank] = slots;
  } else {
    // A source may free its tensors between refits where nobody maps them.
    for (const int32_t source : peers.readable) peers.mapped.erase(source);
    peers.readable.clear();
  }
  const absl::StatusOr<std::vector<std::string>> told = transport.ExchangeBytes(
      senders.empty() ? "" : WriteSlots(slots), senders, readers, deadline);
  if (!told.ok()) return told.status();
  for (size_t i = 0; i < readers.size(); ++i) {
    std::optional<std::set<uint32_t>> pulled = ReadSlots((*told)[i]);
    if (!pulled.has_value()) {
      return absl::InternalError(
          absl::StrCat("what rank ", readers[i],
                       " quantizes from its sources' tensors is told in a "
                       "form that is not known"));
    }
    if (!pulled->empty()) peers.pulled_slots[readers[i]] = *std::move(pulled);
  }
  return absl::OkStatus();
}

}  // namespace refit
