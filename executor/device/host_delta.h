// Copies of what has changed, on the CPU.
#ifndef REFIT_EXECUTOR_DEVICE_HOST_DELTA_H_
#define REFIT_EXECUTOR_DEVICE_HOST_DELTA_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "executor/copies/copy_batches.h"
#include "executor/device/cast.h"
#include "refit/device.h"

namespace refit {

// Whether batches of `kind` go by CopyBatch::delta.
constexpr bool IsDelta(CopyKind kind) {
  return kind == CopyKind::kChanged || kind == CopyKind::kMarked ||
         kind == CopyKind::kKept;
}

// A copy whose innermost part is runs of elements that are contiguous on both
// sides.
struct HostDelta {
  CopyKind kind = CopyKind::kChanged;
  DeltaCopies delta;
  CopyAddress from;
  CopyAddress to;
  uint64_t run_elements = 1;
  uint64_t from_bytes = 0;  // of an element
  uint64_t to_bytes = 0;
  CastFunction cast = nullptr;  // of a copy that casts
  CopyLoops loops;              // around the runs, outermost first
};

HostDelta MakeHostDelta(CopyKind kind, const StridedCopy& copy,
                        absl::Span<const CopyLoop> loops,
                        const DeltaCopies& delta);

void RunHostDelta(const HostDelta& copy, std::byte* const* table);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_HOST_DELTA_H_
