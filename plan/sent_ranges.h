// What a rank sends in staged rounds, of each of its tensors: what a delta may
// leave out. And which messages are small.
#ifndef REFIT_PLAN_SENT_RANGES_H_
#define REFIT_PLAN_SENT_RANGES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan/plan_file.h"

namespace refit {

// Bytes of a tensor, from the first that is sent in staged rounds to the last.
// Empty: none is.
struct SentRange {
  uint64_t begin_byte = 0;
  uint64_t end_byte = 0;

  uint64_t size_bytes() const { return end_byte - begin_byte; }
};

// By tensor of `rank`: all of its first stack, then all of its second, and so
// on.
std::vector<SentRange> SentRanges(const PlanFile& plan, int32_t rank);

// A copy of a range begins in memory where the range does, modulo this, so that
// both are equally aligned.
inline constexpr uint64_t kSnapshotAlignmentBytes = 256;

// Memory for a copy of the range, wherever the tensor is.
uint64_t SnapshotBytes(const SentRange& range);
// Memory for a copy of all that `rank` sends in staged rounds.
uint64_t SnapshotBytes(const PlanFile& plan, int32_t rank);

// Delta refits send staged messages below this size whole: few of a refit's
// messages are so much smaller than what one may hold.
inline uint64_t WholeBelowBytes(uint64_t bucket_bytes) {
  return std::min(uint64_t{64} << 10, bucket_bytes / 256);
}

}  // namespace refit

#endif  // REFIT_PLAN_SENT_RANGES_H_
