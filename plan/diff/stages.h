// The stages of a comparison. They report only on ranks [0, common_ranks),
// which have the same number and side in both plans.
#ifndef REFIT_PLAN_DIFF_STAGES_H_
#define REFIT_PLAN_DIFF_STAGES_H_

#include <cstdint>
#include <set>
#include <vector>

#include "plan/diff/facts.h"
#include "plan/diff/report.h"

namespace refit {

// By rank, the tensors that a reviewer sees in the contract's differences,
// ascending.
using ChangedTensors = std::vector<std::vector<NameId>>;

// What workers must agree with: params, ranks, buffers, layouts, skips, casts,
// settings of the frameworks.
ChangedTensors CompareContracts(const PlanFacts& a, const PlanFacts& b,
                                int32_t common_ranks, DiffReport& report);

// Who sends what to whom, and in which messages and rounds. Says nothing of
// what follows from `changed` alone.
void CompareTraffic(PlanFacts& a, PlanFacts& b, const NameTable& names,
                    int32_t common_ranks, const ChangedTensors& changed,
                    DiffReport& report);

// What is quantized, what of it on which rank, and in which scratch. Leaves out
// ranks with `changed` tensors, but for the first.
void CompareQuantization(const fb::Body& a, const fb::Body& b,
                         int32_t common_ranks, const ChangedTensors& changed,
                         DiffReport& report);

// The arenas of staging; `moved_staging` are ranks whose messages stand
// elsewhere in them and differ in nothing else.
void CompareStaging(const PlanFile& a, const PlanFile& b, int32_t common_ranks,
                    const std::set<int32_t>& moved_staging, DiffReport& report);

// Limits, and the number of rounds.
void CompareLimits(const fb::Body& a, const fb::Body& b, DiffReport& report);

}  // namespace refit

#endif  // REFIT_PLAN_DIFF_STAGES_H_
