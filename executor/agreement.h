// How all ranks of a plan come to one decision.
#ifndef REFIT_EXECUTOR_AGREEMENT_H_
#define REFIT_EXECUTOR_AGREEMENT_H_

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "refit/transport.h"

namespace refit {

// Gives all ranks' bytes, by rank, to rank 0, which makes of them what all get.
// If one rank has an error instead, or rank 0 cannot decide, all return that:
// others are ahead of such a rank by a step, in which Transport::Abort would
// not reach them. Collective: two ExchangeBytes.
absl::StatusOr<std::string> ThroughRankZero(
    Transport& transport, Deadline deadline,
    const absl::StatusOr<std::string>& mine,
    const std::function<absl::StatusOr<std::string>(
        absl::Span<const std::string> by_rank)>& decide);

}  // namespace refit

#endif  // REFIT_EXECUTOR_AGREEMENT_H_
