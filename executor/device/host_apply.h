// Functions of elements on the CPU.
#ifndef REFIT_EXECUTOR_DEVICE_HOST_APPLY_H_
#define REFIT_EXECUTOR_DEVICE_HOST_APPLY_H_

#include <cstddef>
#include <vector>

#include "refit/device.h"

namespace refit {

struct HostApply {
  ElementApply apply;
  std::vector<ElementFunction> functions;
};

void RunHostApply(const HostApply& apply, std::byte* const* table);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_HOST_APPLY_H_
