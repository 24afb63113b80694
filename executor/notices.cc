#include "executor/notices.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "control/waiting.h"

namespace refit {

void SetNotices(NoticeKind kind, const std::vector<std::string>& texts,
                std::vector<Notice>& notices) {
  std::erase_if(notices, [&](const Notice& n) { return n.kind == kind; });
  auto found = std::find_if(notices.begin(), notices.end(),
                            [&](const Notice& n) { return n.kind > kind; });
  for (const std::string& text : texts) {
    found = std::next(notices.insert(found, {.kind = kind, .text = text}));
  }
}

std::vector<std::string> TextsOfMixedEnds(const PlanFile& plan, int32_t rank,
                                          const RankSchedule& schedule,
                                          const PeerTensors& peers) {
  const bool pulls = plan.body().limits()->direct_pulls();
  std::map<std::string, std::vector<int32_t>> unmapped;  // by reason
  for (const auto& [peer, why] : peers.unmapped) {
    unmapped[why].push_back(peer);
  }
  std::vector<std::string> texts;
  for (const auto& [why, ranks] : unmapped) {
    const char* const verb =
        pulls ? (ranks.size() == 1 ? " stores into" : " store into")
              : (ranks.size() == 1 ? " reads" : " read");
    texts.push_back(
        absl::StrCat(RanksText(ranks), verb, " the tensors of rank ", rank,
                     ", which cannot map theirs to ",
                     pulls ? "read them" : "store there", ": ", why));
  }
  // Peers that were to map this rank's tensors and do not.
  std::vector<int32_t> others;
  for (const int32_t peer :
       pulls ? schedule.DirectReceivers() : schedule.DirectSenders()) {
    const std::set<int32_t>& pulled =
        pulls ? peers.pulled_by : peers.pulled_from;
    if (pulled.contains(peer) != pulls) others.push_back(peer);
  }
  if (!others.empty()) {
    texts.push_back(absl::StrCat(
        "rank ", rank, pulls ? " stores into" : " reads", " the tensors of ",
        RanksText(others), ", which cannot map its own; ",
        pulls ? "the receivers' notices say why"
              : "the senders' notices say why"));
  }
  return texts;
}

std::vector<std::string> TextsOfUnwatched(
    const MemoryWatch* memory, absl::Span<const BoundTensor> tensors) {
  if (memory == nullptr) return {};
  const std::vector<size_t> ranges = memory->Unwatched();
  if (ranges.empty()) return {};
  return {absl::StrCat(
      "the memory of \"", tensors[ranges.front()].name, "\"",
      ranges.size() == 1
          ? std::string()
          : absl::StrCat(" and ", ranges.size() - 1, " more tensors"),
      " is of a kind whose free Run does not notice")};
}

}  // namespace refit
