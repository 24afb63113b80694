// What ranks tell each other of one refit and its check.
#ifndef REFIT_RUNNER_RANK_REPORT_H_
#define REFIT_RUNNER_RANK_REPORT_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "refit/transport.h"
#include "runner/local_ranks.h"
#include "runner/value_check.h"

namespace refit {

struct RankReport {
  RefitMeasurement refit;
  CheckResult check;  // mismatches stay with the rank
};

std::string WriteReport(const RankReport& report);
// Error: kInternal, no report.
absl::StatusOr<RankReport> ReadReport(std::string_view bytes);

// Adds what the next rank reports, in the order of ranks; seconds are those of
// the slowest rank.
void AddReport(const RankReport& of_rank, RankReport& all);

// What all ranks report. Collective: two calls of ExchangeBytes. Rank 0 alone
// gets rounds_of_ranks.
absl::StatusOr<RankReport> GatherReports(Transport& transport,
                                         const RankReport& mine,
                                         Deadline deadline);

}  // namespace refit

#endif  // REFIT_RUNNER_RANK_REPORT_H_
