// The reference of block quantization: what generated values become, worked out
// one block at a time from the values themselves.
#ifndef REFIT_RUNNER_QUANTIZED_VALUES_H_
#define REFIT_RUNNER_QUANTIZED_VALUES_H_

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "executor/device/quantize.h"
#include "plan/plan_file.h"
#include "runner/generated_values.h"

namespace refit {

// Of the params that one quantization relates. Not thread-safe: it remembers
// the scales of blocks it has met.
class QuantizedValues {
 public:
  // `dtype` is the one that `of` is generated in, `division` the device's.
  QuantizedValues(const fb::Body& body, const fb::Quantization& quantization,
                  DType dtype, Division division);

  // Elements of the values, or of the scales, of the tensor of `of` with this
  // seed.
  void GenerateData(uint64_t seed, const IndexRange& range, std::byte* out);
  void GenerateScales(uint64_t seed, const IndexRange& range, std::byte* out);

 private:
  struct Scale {
    uint32_t stored = 0;
    float inverse = 0;
  };
  // Of block number `block` of a tensor's grid.
  const Scale& ScaleOfBlock(uint64_t seed, uint64_t block);
  // Values as fp32 bits.
  void GenerateFp32(uint64_t seed, const IndexRange& range,
                    uint32_t* out) const;

  const fb::Quantization& quantization_;
  const DType dtype_;
  const Division division_;
  uint64_t rows_ = 0;
  uint64_t columns_ = 0;
  uint64_t grid_columns_ = 0;
  // By block, of the seed met last.
  uint64_t seed_ = 0;
  std::unordered_map<uint64_t, Scale> scales_;
};

}  // namespace refit

#endif  // REFIT_RUNNER_QUANTIZED_VALUES_H_
