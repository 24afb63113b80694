// Differences between two plans by meaning: the order in which a plan was built
// does not count.
#ifndef REFIT_PLAN_DIFF_DIFF_H_
#define REFIT_PLAN_DIFF_DIFF_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/plan_file.h"

namespace refit {

// What a reviewer asks: does the contract with the workers change, the traffic
// between ranks, or only the schedule?
enum class DifferenceClass : uint8_t { kContract, kTraffic, kSchedule };
// "contract", "traffic", "schedule".
const char* ClassText(DifferenceClass kind);

// The rule of plans of other format versions or required features. With further
// features it is of the contract: executors that know less refuse the plan.
inline constexpr std::string_view kFormatChanged = "FORMAT_CHANGED";

// Source rank and destination rank of messages.
using RankPair = std::pair<int32_t, int32_t>;

struct Difference {
  DifferenceClass kind = DifferenceClass::kContract;
  // A stable id: "PARAM_ADDED", "LAYOUT_CHANGED", "BYTES_CHANGED" …
  std::string rule;
  std::string text;  // "param \"…\": … -> …"
  // All ranks, ascending, of which this is true, when it is about ranks; `text`
  // only counts them when they are many.
  std::vector<int32_t> ranks;
  // All pairs of ranks of which this is true, sorted, when it is about pairs;
  // `text` only counts them when they are many.
  std::vector<RankPair> pairs;
};

// What a plan adds up to.
struct PlanTotals {
  uint64_t moved_bytes = 0;
  uint64_t rounds = 0;
  uint64_t peak_staging_bytes = 0;  // of one rank
};

// Of what the jobs of two plans say: "destination.tensor_parallel", "2", "4".
struct JobDifference {
  std::string key;
  std::string a, b;  // "": a job does not say it
};

struct PlanDifference {
  // Ascending by key. None if either plan does not have what its job says.
  std::vector<JobDifference> job;
  std::vector<Difference> differences;  // sorted by class, rule, text
  PlanTotals totals_a;
  PlanTotals totals_b;
  // "summary: 1 contract, 0 traffic, 2 schedule; moved bytes A -> B; …"
  std::string summary;

  bool same() const { return differences.empty(); }
  int64_t Count(DifferenceClass kind) const;
};

PlanDifference ComparePlans(const PlanFile& a, const PlanFile& b);

std::string DifferenceText(const PlanDifference& difference);
std::string DifferenceJson(const PlanDifference& difference);

}  // namespace refit

#endif  // REFIT_PLAN_DIFF_DIFF_H_
