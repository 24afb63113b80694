// How many NCCL operations one group of one rank may hold, whatever a plan says
// of itself.
#ifndef REFIT_PLAN_GROUP_LIMIT_H_
#define REFIT_PLAN_GROUP_LIMIT_H_

#include <cstdint>

namespace refit {

// NCCL launches a group as one kernel only while its batches fit into 4 KiB of
// kernel arguments, about 254 of them. Each channel of an operation takes one;
// operations with different peers can share them, up to eight. Larger groups
// are cut into several kernels, on each rank for itself. Where the two ends of
// a message fall into kernels of different turns, ranks wait for each other for
// ever. That was seen up to NCCL 2.30.7 in groups of 24,000 operations, while
// 8,000 passed, and no release is known to have mended it.
//
// 32 operations with different peers are one kernel. 32 of 1 MiB or more with
// one peer can be two or three, as an operation has eight channels among four
// ranks and 16 between two: both ends then hold the same operations in the same
// order.
inline constexpr uint32_t kGroupOperationsMax = 32;

}  // namespace refit

#endif  // REFIT_PLAN_GROUP_LIMIT_H_
