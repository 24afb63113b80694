// The hosts and GPUs of a plan, compared with those that its ranks run on.
#ifndef REFIT_EXECUTOR_TRANSPORT_HOST_COMPARISON_H_
#define REFIT_EXECUTOR_TRANSPORT_HOST_COMPARISON_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "refit/transport.h"

namespace refit {

// A line for each host of the plan whose ranks run on several hosts, then one
// for each host whose ranks the plan has on several: which ranks, on which
// hosts. Only the first are named where many differ. All three by rank: the
// plan's hosts, what tells the real ones apart, and what they are called.
std::vector<std::string> CompareHosts(absl::Span<const uint32_t> planned,
                                      absl::Span<const std::string> real,
                                      absl::Span<const std::string> names);

// The GPUs of the rank `rank` and of the peers of its `edges`: a line for peers
// that the plan has on its GPU and that run on others, then one for those that
// it has on others and that run on its GPU. `gpus`: by rank, what tells GPUs
// apart; "" where there is none.
std::vector<std::string> CompareGpus(int32_t rank, absl::Span<const Edge> edges,
                                     absl::Span<const std::string> gpus);

}  // namespace refit

#endif  // REFIT_EXECUTOR_TRANSPORT_HOST_COMPARISON_H_
