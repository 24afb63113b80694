#include "executor/peer_tensors.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "executor/copies/tensor_table.h"
#include "executor/payload.h"

namespace refit {
namespace {

// What a sender tells its receivers in the second ExchangeBytes: those that are
// to pull, and its Export.
struct PullOffer {
  std::vector<int32_t> receivers;
  std::string exported;
};

std::string WriteOffer(const PullOffer& offer) {
  return PayloadWriter().Ranks(offer.receivers).String(offer.exported).Take();
}

absl::StatusOr<PullOffer> ReadOffer(std::string_view bytes) {
  PullOffer offer;
  if (bytes.empty()) return offer;
  PayloadReader reader(bytes);
  offer.receivers = reader.Ranks();
  offer.exported = reader.String();
  if (reader.Complete()) return offer;
  return absl::InternalError("tensors offered in a form that is not known");
}

class PeerMapping {
 public:
  PeerMapping(const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
              absl::Span<std::byte* const> addresses, Device& device,
              Transport& transport, Deadline deadline, PeerTensors& peers)
      : plan_(plan),
        rank_(rank),
        senders_(schedule.DirectSenders()),
        receivers_(schedule.DirectReceivers()),
        addresses_(addresses),
        device_(device),
        transport_(transport),
        deadline_(deadline),
        peers_(peers) {}

  // After an error of its own the rank still takes its part in both exchanges.
  absl::Status Map() {
    std::string mine;
    if (!senders_.empty()) mine = Export();
    const absl::StatusOr<std::vector<std::string>> shown =
        transport_.ExchangeBytes(mine, senders_, receivers_, deadline_);
    if (!shown.ok()) return shown.status();
    for (size_t i = 0; i < receivers_.size() && status_.ok(); ++i) {
      MapReceiver(receivers_[i], (*shown)[i]);
    }
    const absl::StatusOr<std::vector<std::string>> offers =
        transport_.ExchangeBytes(Offer(), receivers_, senders_, deadline_);
    if (!offers.ok()) return offers.status();
    for (size_t i = 0; i < senders_.size() && status_.ok(); ++i) {
      MapSender(senders_[i], (*offers)[i]);
    }
    return status_;
  }

 private:
  // "" after an error.
  std::string Export() {
    std::vector<MemoryRange> ranges;
    const std::vector<uint64_t> sizes = SizesOf(rank_);
    for (size_t entry = 0; entry < sizes.size(); ++entry) {
      ranges.push_back({.data = addresses_[entry], .size_bytes = sizes[entry]});
    }
    absl::StatusOr<std::unique_ptr<ExportedMemory>> exported =
        device_.Export(ranges);
    status_.Update(exported.status());
    if (!exported.ok()) return "";
    peers_.exported.push_back(*std::move(exported));
    return peers_.exported.back()->bytes();
  }

  // Of a rank's tensors in bytes, by entry of its TensorTable.
  std::vector<uint64_t> SizesOf(int32_t rank) const {
    const TensorTable table(plan_, rank);
    std::vector<uint64_t> sizes;
    for (size_t slot = 0; slot < table.stacks(); ++slot) {
      const fb::Buffer& buffer = table.buffer(slot);
      sizes.insert(sizes.end(), table.begin(slot + 1) - table.begin(slot),
                   TensorElements(buffer) * DTypeBytes(buffer.dtype()));
    }
    return sizes;
  }

  absl::Status Import(int32_t peer, std::string_view exported) {
    absl::StatusOr<std::unique_ptr<MappedMemory>> mapped =
        device_.Import(exported, SizesOf(peer));
    if (!mapped.ok()) return mapped.status();
    peers_.mapped[peer] = *std::move(mapped);
    return absl::OkStatus();
  }

  void MapReceiver(int32_t receiver, std::string_view exported) {
    if (exported.empty()) {
      return Fail(absl::StatusCode::kAborted, "rank ", receiver,
                  " cannot go on; its own error says why");
    }
    const absl::Status mapped = Import(receiver, exported);
    if (absl::IsFailedPrecondition(mapped)) {
      peers_.pulled_by.emplace(receiver, std::string(mapped.message()));
    } else if (!mapped.ok()) {
      Fail(mapped.code(), "tensors of rank ", receiver, ": ", mapped.message());
    }
  }

  std::string Offer() {
    if (peers_.pulled_by.empty() || !status_.ok()) return "";
    PullOffer offer;
    for (const auto& [receiver, why] : peers_.pulled_by) {
      offer.receivers.push_back(receiver);
    }
    offer.exported = Export();
    return status_.ok() ? WriteOffer(offer) : "";
  }

  void MapSender(int32_t sender, std::string_view text) {
    const absl::StatusOr<PullOffer> offer = ReadOffer(text);
    if (!offer.ok()) {
      return Fail(offer.status().code(), "tensors of rank ", sender, ": ",
                  offer.status().message());
    }
    if (!std::binary_search(offer->receivers.begin(), offer->receivers.end(),
                            rank_)) {
      return;
    }
    peers_.pulled_from.insert(sender);
    // It may be a receiver too, whose tensors are mapped already.
    if (peers_.mapped.contains(sender)) return;
    const absl::Status mapped = Import(sender, offer->exported);
    if (mapped.ok()) return;
    const bool relays = plan_.side(sender) == fb::Side::kDestination;
    Fail(mapped.code(), "tensors of rank ", sender,
         ", which cannot map those of rank ", rank_, ": ", mapped.message(),
         ". One of the two has to hold its tensors in memory that can be "
         "shared; else compile the plan with options.peer \"staged\", if they "
         "do not share a GPU",
         relays ? ", or with options.fan_out \"none\", so that neither relays "
                  "to the other"
                : "");
  }

  template <typename... Parts>
  void Fail(absl::StatusCode code, const Parts&... parts) {
    status_.Update(absl::Status(code, absl::StrCat(parts...)));
  }

  const PlanFile& plan_;
  const int32_t rank_;
  const std::vector<int32_t> senders_;
  const std::vector<int32_t> receivers_;
  const absl::Span<std::byte* const> addresses_;
  Device& device_;
  Transport& transport_;
  const Deadline deadline_;
  PeerTensors& peers_;
  absl::Status status_;  // of this rank
};

}  // namespace

absl::Status MapPeerTensors(const PlanFile& plan, int32_t rank,
                            const RankSchedule& schedule,
                            absl::Span<std::byte* const> addresses,
                            Device& device, Transport& transport,
                            Deadline deadline, PeerTensors& peers) {
  return PeerMapping(plan, rank, schedule, addresses, device, transport,
                     deadline, peers)
      .Map();
}

}  // namespace refit
