// Block quantization on the CPU.
#ifndef REFIT_EXECUTOR_DEVICE_HOST_QUANTIZE_H_
#define REFIT_EXECUTOR_DEVICE_HOST_QUANTIZE_H_

#include <cstddef>
#include <vector>

#include "refit/device.h"

namespace refit {

struct HostQuantize {
  BlockQuantize quantize;
  std::vector<QuantizeLoop> loops;  // outermost first
  std::vector<CopyStride> runs;     // of its rows
};

void RunHostQuantize(const HostQuantize& quantize, std::byte* const* table);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_HOST_QUANTIZE_H_
