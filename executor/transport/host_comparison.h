// The hosts of a plan, compared with those that its ranks run on.
#ifndef REFIT_EXECUTOR_TRANSPORT_HOST_COMPARISON_H_
#define REFIT_EXECUTOR_TRANSPORT_HOST_COMPARISON_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace refit {

// A line for each host of the plan whose ranks run on several hosts, then one
// for each host whose ranks the plan has on several: which ranks, on which
// hosts. All three by rank: the plan's hosts, what tells the real ones apart,
// and what they are called.
std::vector<std::string> CompareHosts(absl::Span<const uint32_t> planned,
                                      absl::Span<const std::string> real,
                                      absl::Span<const std::string> names);

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_HOST_COMPARISON_H_
