#include "executor/delta/merge_agreement.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "executor/agreement.h"

namespace refit {

absl::StatusOr<std::vector<uint8_t>> AgreeOnMerged(const StagedDeltas& deltas,
                                                   Transport& transport,
                                                   Deadline deadline) {
  const auto bytes_of = [](const std::vector<uint8_t>& powers) {
    return std::string(powers.begin(), powers.end());
  };
  const std::string mine = bytes_of(deltas.MostMerged());
  const absl::StatusOr<std::string> least = ThroughRankZero(
      transport, deadline, mine,
      [&](absl::Span<const std::string> by_rank)
          -> absl::StatusOr<std::string> {
        std::string all = mine;
        for (size_t rank = 0; rank < by_rank.size(); ++rank) {
          const std::string& theirs = by_rank[rank];
          if (theirs.size() != all.size()) {
            return absl::InternalError(
                absl::StrCat("rank ", rank, " merges rounds of ", theirs.size(),
                             " rungs; rank 0 has ", all.size()));
          }
          std::transform(all.begin(), all.end(), theirs.begin(), all.begin(),
                         [](char a, char b) { return std::min(a, b); });
        }
        return all;
      });
  if (!least.ok()) return least.status();
  if (least->size() != mine.size()) {
    return absl::InternalError(
        "what rank 0 says of merged rounds cannot be read");
  }
  return std::vector<uint8_t>(least->begin(), least->end());
}

}  // namespace refit
