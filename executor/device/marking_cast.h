// What devices check of a MarkingCast, and how the CPU runs it.
#ifndef REFIT_EXECUTOR_DEVICE_MARKING_CAST_H_
#define REFIT_EXECUTOR_DEVICE_MARKING_CAST_H_

#include "absl/status/status.h"
#include "refit/device.h"

namespace refit {

// kInvalidArgument if `cast` cannot be run.
absl::Status CheckMarkingCast(const MarkingCast& cast);

// On the CPU.
void RunMarkingCast(const MarkingCast& cast);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_MARKING_CAST_H_
