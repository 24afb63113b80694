// The bitmaps that workers give with their tensors: which elements changed.
#ifndef REFIT_EXECUTOR_DELTA_BITMAPS_H_
#define REFIT_EXECUTOR_DELTA_BITMAPS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "plan/plan_file.h"
#include "refit/executor.h"

namespace refit {

// Bytes of a tensor's bitmap: 32-bit words with a bit for each element.
constexpr uint64_t BitmapBytes(uint64_t elements) {
  return (elements + 31) / 32 * sizeof(uint32_t);
}

// Why `rank` cannot take bitmaps where `tensors` have them, a line each: the
// plan's refits take none, or not from this rank, or their memory is not theirs
// alone.
std::vector<std::string> BitmapProblems(const PlanFile& plan, int32_t rank,
                                        absl::Span<const BoundTensor> tensors);

// The bitmaps by entry of the rank's TensorTable, null without one.
std::vector<std::byte*> BitmapsByEntry(const PlanFile& plan, int32_t rank,
                                       absl::Span<const BoundTensor> tensors);

// What each refit sends whole, because tensors that `rank` sends have no
// bitmap; "" if nothing. Of a plan whose workers mark what changed.
std::string SentWhole(const PlanFile& plan, int32_t rank,
                      absl::Span<const BoundTensor> tensors);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DELTA_BITMAPS_H_
