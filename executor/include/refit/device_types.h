// What kernels share with device.h: no more than they need, because nvcc parses
// it for each of them.
#ifndef REFIT_DEVICE_TYPES_H_
#define REFIT_DEVICE_TYPES_H_

#include <cstdint>

#include "plan/element_types.h"

namespace refit {

// A cast of contiguous fp32 elements, an optimizer's master weights, that marks
// which results differ from what was held before: a trainer's weights and
// their bitmap (BoundTensor::changes) in one pass. All memory is the device's
// and the caller's, none of it overlaps.
struct MarkingCast {
  const float* from = nullptr;      // aligned to 4 bytes
  void* to = nullptr;               // aligned to 2 bytes
  DType to_dtype = element::kBf16;  // or fp16
  // The bitmap of the tensor that `to` is a part of: the bit of to's element i
  // is first_element + i. Bits of what did not change stay as they are. Casts
  // that share a word may run at the same time.
  uint32_t* changes = nullptr;
  uint64_t first_element = 0;  // of `to` in the tensor
  uint64_t elements = 0;
};

// A digest's sum in memory: a number of 128 bits that is right mod 2^61 - 1.
struct DigestSum {
  uint64_t low = 0;
  uint64_t high = 0;
};

}  // namespace refit

#endif  // REFIT_DEVICE_TYPES_H_
