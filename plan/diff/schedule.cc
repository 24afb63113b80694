#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "plan/diff/stages.h"
#include "plan/text/plan_view.h"
#include "plan/text/text.h"

namespace refit {
namespace {

// More ways than these in which arenas change are summed up.
constexpr size_t kStagingChangesListed = 4;

uint64_t StagingBytes(const PlanFile& plan, int32_t rank) {
  return plan.body()
      .programs()
      ->Get(static_cast<uint32_t>(rank))
      ->staging_bytes();
}

}  // namespace

// Ranks whose arenas change alike share a line; when each changes in its own
// way, each side has one.
void CompareStaging(const PlanFile& a, const PlanFile& b, int32_t common_ranks,
                    const std::set<int32_t>& moved_staging,
                    DiffReport& report) {
  struct SideChange {
    int32_t ranks = 0;
    uint64_t peak_a = 0;
    uint64_t peak_b = 0;
  };
  std::map<std::pair<uint64_t, uint64_t>, std::vector<int32_t>> ranks_by_change;
  std::map<fb::Side, SideChange> sides;
  for (int32_t rank = 0; rank < common_ranks; ++rank) {
    const uint64_t bytes_a = StagingBytes(a, rank);
    const uint64_t bytes_b = StagingBytes(b, rank);
    SideChange& side = sides[a.side(rank)];
    side.peak_a = std::max(side.peak_a, bytes_a);
    side.peak_b = std::max(side.peak_b, bytes_b);
    if (bytes_a != bytes_b) {
      side.ranks += 1;
      ranks_by_change[{bytes_a, bytes_b}].push_back(rank);
    } else if (moved_staging.count(rank) > 0) {
      report.AddRank(DifferenceClass::kSchedule, "STAGING_CHANGED", rank,
                     "messages elsewhere in an arena of the same size");
    }
  }
  if (ranks_by_change.size() <= kStagingChangesListed) {
    for (const auto& [bytes, ranks] : ranks_by_change) {
      for (const int32_t rank : ranks) {
        report.AddRank(
            DifferenceClass::kSchedule, "STAGING_CHANGED", rank,
            absl::StrCat(bytes.first, " -> ", bytes.second, " bytes"));
      }
    }
    return;
  }
  for (const auto& [side, change] : sides) {
    if (change.ranks == 0) continue;
    report.Add(DifferenceClass::kSchedule, "STAGING_CHANGED",
               absl::StrCat(change.ranks, " ", EnumText(side),
                            " ranks have other sizes, largest ", change.peak_a,
                            " -> ", change.peak_b, " bytes"));
  }
}

void CompareLimits(const fb::Body& a, const fb::Body& b, DiffReport& report) {
  const auto add = [&](const char* rule, const char* what, uint64_t from,
                       uint64_t to) {
    if (from != to)
      report.Add(DifferenceClass::kSchedule, rule,
                 absl::StrCat(what, " ", from, " -> ", to));
  };
  add("LIMITS_CHANGED", "bucket_bytes", a.limits()->bucket_bytes(),
      b.limits()->bucket_bytes());
  add("LIMITS_CHANGED", "staging_bytes", a.limits()->staging_bytes(),
      b.limits()->staging_bytes());
  add("LIMITS_CHANGED", "slots", a.limits()->slots(), b.limits()->slots());
  add("LIMITS_CHANGED", "operations_per_round",
      a.limits()->operations_per_round(), b.limits()->operations_per_round());
  add("LIMITS_CHANGED", "network_peers", a.limits()->network_peers(),
      b.limits()->network_peers());
  add("LIMITS_CHANGED", "direct_multiprocessors",
      a.limits()->direct_multiprocessors(),
      b.limits()->direct_multiprocessors());
  if (a.limits()->direct_pulls() != b.limits()->direct_pulls()) {
    const auto copies = [](const fb::Body& body) {
      return body.limits()->direct_pulls() ? "pull" : "push";
    };
    report.Add(DifferenceClass::kSchedule, "LIMITS_CHANGED",
               absl::StrCat("direct ", copies(a), " -> ", copies(b)));
  }
  add("ROUNDS_CHANGED", "rounds", a.rounds()->size(), b.rounds()->size());
  const auto text = [](const fb::Topology* topology) {
    return topology == nullptr ? "none" : TopologyText(*topology);
  };
  if (text(a.topology()) != text(b.topology())) {
    report.Add(DifferenceClass::kSchedule, "TOPOLOGY_CHANGED",
               absl::StrCat("topology: ", text(a.topology()), " -> ",
                            text(b.topology())));
  }
}

}  // namespace refit
