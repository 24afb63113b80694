// One thread per rank, for hundreds of ranks on few cores.
#ifndef REFIT_RUNNER_RANK_THREADS_H_
#define REFIT_RUNNER_RANK_THREADS_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace refit {

// Calls `body(rank)` for ranks 0 .. ranks-1, each on a thread of its own with a
// small stack, and returns when all have returned. No body starts before all
// threads exist; if one cannot be made, none starts.
absl::Status RunRankThreads(int32_t ranks,
                            const std::function<void(int32_t)>& body);

// The error of the statuses of all ranks that explains the others: one that is
// aborted, or finds a rank gone, only repeats what befell another.
absl::Status MainError(absl::Span<const absl::Status> statuses);

// Calls `body(item)` for items 0 .. items-1 on as many threads as the machine
// has cores, or on those that can be made: at least on this one.
void ParallelFor(size_t items, const std::function<void(size_t)>& body);

}  // namespace refit

#endif  // REFIT_RUNNER_RANK_THREADS_H_
