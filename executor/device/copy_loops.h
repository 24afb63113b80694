// What every device does first with the loops of a strided copy.
#ifndef REFIT_EXECUTOR_DEVICE_COPY_LOOPS_H_
#define REFIT_EXECUTOR_DEVICE_COPY_LOOPS_H_

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "refit/device.h"

namespace refit {

using CopyLoops = absl::InlinedVector<CopyLoop, 8>;

// One loop for each maximal group of loops that continue each other on both
// sides, outermost first; none of one iteration.
CopyLoops MergedLoops(absl::Span<const CopyLoop> loops);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_COPY_LOOPS_H_
