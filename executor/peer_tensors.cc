#include "executor/peer_tensors.h"

#include <algorithm>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "control/compared_structs.h"

namespace refit {
namespace {

// What a rank tells its peers in the second ExchangeBytes: those that are to
// map its tensors because it cannot map theirs, and its Export.
struct MapOffer {
  std::vector<int32_t> peers;
  std::string exported;

  static auto FieldsOf(auto& self) {
    return std::tie(self.peers, self.exported);
  }
};

absl::StatusOr<MapOffer> ReadOffer(std::string_view bytes) {
  if (bytes.empty()) return MapOffer();
  if (auto offer = ParseStruct<MapOffer>(bytes)) return *std::move(offer);
  return absl::InternalError("tensors offered in a form that is not known");
}

class PeerMapping {
 public:
  PeerMapping(const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
              absl::Span<std::byte* const> addresses, PeerMemory& memory,
              Transport& transport, Deadline deadline, PeerTensors& peers)
      : plan_(plan),
        rank_(rank),
        pulls_(plan.body().limits()->direct_pulls()),
        targets_(pulls_ ? schedule.DirectSenders()
                        : schedule.DirectReceivers()),
        origins_(pulls_ ? schedule.DirectReceivers()
                        : schedule.DirectSenders()),
        addresses_(addresses),
        memory_(memory),
        transport_(transport),
        deadline_(deadline),
        peers_(peers) {}

  // After an error of its own the rank still takes its part in both exchanges.
  absl::Status Map() {
    std::string mine;
    if (!origins_.empty()) mine = Export();
    const absl::StatusOr<std::vector<std::string>> shown =
        transport_.ExchangeBytes(mine, origins_, targets_, deadline_);
    if (!shown.ok()) return shown.status();
    for (size_t i = 0; i < targets_.size() && status_.ok(); ++i) {
      MapTarget(targets_[i], (*shown)[i]);
    }
    const absl::StatusOr<std::vector<std::string>> offers =
        transport_.ExchangeBytes(Offer(), targets_, origins_, deadline_);
    if (!offers.ok()) return offers.status();
    for (size_t i = 0; i < origins_.size() && status_.ok(); ++i) {
      MapOrigin(origins_[i], (*offers)[i]);
    }
    return status_;
  }

 private:
  // "" after an error.
  std::string Export() {
    absl::StatusOr<std::shared_ptr<ExportedMemory>> exported =
        memory_.Export(plan_, rank_, addresses_);
    status_.Update(exported.status());
    if (!exported.ok()) return "";
    peers_.exported.push_back(*std::move(exported));
    return peers_.exported.back()->bytes();
  }

  absl::Status Import(int32_t peer, std::string_view exported) {
    absl::StatusOr<std::shared_ptr<MappedMemory>> mapped =
        memory_.Import(plan_, peer, exported, deadline_);
    if (!mapped.ok()) return mapped.status();
    peers_.mapped[peer] = *std::move(mapped);
    return absl::OkStatus();
  }

  void MapTarget(int32_t target, std::string_view exported) {
    if (exported.empty()) {
      return Fail(absl::StatusCode::kAborted, "rank ", target,
                  " cannot go on; its own error says why");
    }
    const absl::Status mapped = Import(target, exported);
    if (absl::IsFailedPrecondition(mapped)) {
      peers_.unmapped.emplace(target, std::string(mapped.message()));
    } else if (!mapped.ok()) {
      return Fail(mapped.code(), "tensors of rank ", target, ": ",
                  mapped.message());
    }
    if (mapped.ok() == pulls_) {
      (pulls_ ? peers_.pulled_from : peers_.pulled_by).insert(target);
    }
  }

  std::string Offer() {
    if (peers_.unmapped.empty() || !status_.ok()) return "";
    MapOffer offer;
    for (const auto& [target, why] : peers_.unmapped) {
      offer.peers.push_back(target);
    }
    offer.exported = Export();
    return status_.ok() ? StructBytes(offer) : "";
  }

  // Unless it offers its tensors, the origin has mapped this rank's.
  void MapOrigin(int32_t origin, std::string_view text) {
    const absl::StatusOr<MapOffer> offer = ReadOffer(text);
    if (!offer.ok()) {
      return Fail(offer.status().code(), "tensors of rank ", origin, ": ",
                  offer.status().message());
    }
    const bool offers =
        std::binary_search(offer->peers.begin(), offer->peers.end(), rank_);
    if (offers != pulls_) {
      (pulls_ ? peers_.pulled_by : peers_.pulled_from).insert(origin);
    }
    // It may be a target too, whose tensors are mapped already.
    if (!offers || peers_.mapped.contains(origin)) return;
    const absl::Status mapped = Import(origin, offer->exported);
    if (mapped.ok()) return;
    Fail(mapped.code(), "tensors of rank ", origin,
         ", which cannot map those of rank ", rank_, ": ", mapped.message(),
         ". One of the two has to hold its tensors in memory that can be "
         "shared; else compile the plan with options.peer \"staged\", if they "
         "do not share a GPU");
  }

  template <typename... Parts>
  void Fail(absl::StatusCode code, const Parts&... parts) {
    status_.Update(absl::Status(code, absl::StrCat(parts...)));
  }

  const PlanFile& plan_;
  const int32_t rank_;
  const bool pulls_;
  // Peers whose tensors this rank is to map, and those that are to map its own.
  const std::vector<int32_t> targets_;
  const std::vector<int32_t> origins_;
  const absl::Span<std::byte* const> addresses_;
  PeerMemory& memory_;
  Transport& transport_;
  const Deadline deadline_;
  PeerTensors& peers_;
  absl::Status status_;  // of this rank
};

}  // namespace

absl::Status MapPeerTensors(const PlanFile& plan, int32_t rank,
                            const RankSchedule& schedule,
                            absl::Span<std::byte* const> addresses,
                            PeerMemory& memory, Transport& transport,
                            Deadline deadline, PeerTensors& peers) {
  return PeerMapping(plan, rank, schedule, addresses, memory, transport,
                     deadline, peers)
      .Map();
}

}  // namespace refit
