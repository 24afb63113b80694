// What `refit-bench links` measures: the speed of every pair of ranks over a
// transport of the executor.
#ifndef REFIT_BENCH_LINK_BENCH_H_
#define REFIT_BENCH_LINK_BENCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/link_table.h"
#include "refit/control_plane.h"
#include "refit/device.h"
#include "refit/transport.h"

namespace refit {

struct LinkOptions {
  uint64_t message_bytes = 0;
  int64_t iterations = 5;  // messages that are timed; one more warms up
};

// Of one rank; collective, the same result on all ranks. Pairs take turns, so
// no two of them share a link. A pair's speed is the median of its messages',
// each timed by its receiver. `table` says the wire and the hosts. Errors name
// the pair; kDataLoss, a message arrived wrong.
absl::StatusOr<LinkTable> MeasureLinks(Transport& transport, Device& device,
                                       LinkTable table,
                                       const LinkOptions& options);

// `wire`: "ucx" on the CPU, or "nccl" on the GPU `ordinal`. The ranks meet, and
// tell each other what machines they run on (executor/device/host_identity.h).
absl::StatusOr<LinkTable> MeasureLinksOfRank(const std::string& wire,
                                             const TcpRendezvous& meeting,
                                             int ordinal,
                                             const LinkOptions& options);

// All ranks here. `wire`: "local", threads on the CPU; "ucx", processes; or
// "nccl", threads with a GPU each.
absl::StatusOr<LinkTable> MeasureLinksHere(const std::string& wire,
                                           int32_t ranks,
                                           const LinkOptions& options);

}  // namespace refit

#endif  // REFIT_BENCH_LINK_BENCH_H_
