// Block quantisation on the CPU.
#ifndef REFIT_EXECUTOR_DEVICE_HOST_QUANTISE_H_
#define REFIT_EXECUTOR_DEVICE_HOST_QUANTISE_H_

#include <cstddef>
#include <vector>

#include "refit/device.h"

namespace refit {

struct HostQuantise {
  BlockQuantise quantise;
  std::vector<QuantiseLoop> loops;  // outermost first
};

void RunHostQuantise(const HostQuantise& quantise, std::byte* const* table);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_HOST_QUANTISE_H_
