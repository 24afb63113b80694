// Values to test a plan with: a function of a logical tensor's name and an
// element's index in it, and of nothing else.
#ifndef REFIT_RUNNER_GENERATED_VALUES_H_
#define REFIT_RUNNER_GENERATED_VALUES_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "plan/dtype.h"

namespace refit {

// Bytes that no generated float value consists of: source elements that hold no
// param, and destination elements before a refit.
inline constexpr std::byte kSourcePoison{0xfb};
inline constexpr std::byte kDestinationPoison{0xff};

uint64_t TensorSeed(std::string_view tensor_name);

// Elements first, first + stride, first + 2 * stride … of the tensor.
struct IndexRange {
  uint64_t first = 0;
  uint64_t stride = 1;
  size_t count = 0;
};

// Training steps, each of which changes some of the values.
struct ValueSteps {
  uint32_t count = 0;
  double change_rate = 0;  // the part of the values that one changes
};

// The values of `range`, contiguous, as `steps` leave them: each of these
// inverts one bit of each value that it changes, which no cast between bf16,
// fp16 and fp32 drops. Which values that are is a function of what
// GenerateValues goes by, and of the training step.
void ChangeValues(uint64_t seed, DType dtype, const IndexRange& range,
                  const ValueSteps& steps, void* values);

// Writes the values of `range`, contiguous, to `out`. Float values are between
// 2^-7 and 2^9 in magnitude, so that every cast of them is finite.
void GenerateValues(uint64_t seed, DType dtype, const IndexRange& range,
                    void* out);

}  // namespace refit

#endif  // REFIT_RUNNER_GENERATED_VALUES_H_
