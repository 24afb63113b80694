// How many staged rounds of a delta refit travel as one, on all ranks.
#ifndef REFIT_EXECUTOR_DELTA_MERGE_AGREEMENT_H_
#define REFIT_EXECUTOR_DELTA_MERGE_AGREEMENT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "executor/delta/staged_deltas.h"
#include "refit/transport.h"

namespace refit {

// What all ranks give StagedDeltas::Merge. Collective.
absl::StatusOr<std::vector<uint8_t>> AgreeOnMerged(const StagedDeltas& deltas,
                                                   Transport& transport,
                                                   Deadline deadline);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DELTA_MERGE_AGREEMENT_H_
