// What ranks quantize, and the scratch that they do it in.
#ifndef REFIT_COMPILER_PASSES_QUANTIZE_WORK_H_
#define REFIT_COMPILER_PASSES_QUANTIZE_WORK_H_

#include <cstdint>
#include <vector>

#include "compiler/ir/module.h"

namespace refit {

// A box of one of a rank's own tensors.
struct HeldBox {
  int32_t slot = 0;
  Fragment fragment;

  // Of a part of the fragment's box.
  QuantizeOperand Of(const Box& part) const;
};

// Which of so many equal parts a rank quantizes of the boxes of a group: of
// those that exactly the same ranks hold. Group 0 is what a rank does alone.
struct QuantizedPart {
  int32_t group = 0;
  int32_t number = 0;
  int32_t count = 1;

  friend auto operator<=>(const QuantizedPart&, const QuantizedPart&) = default;
};

// A box that a rank quantizes, and where it is in the rank's tensors: what a
// source reads, or what a destination writes, more than one place where it
// holds the box more than once.
struct QuantizeItem {
  int32_t quantization = 0;  // of Module::quantizations
  Box box;
  std::vector<HeldBox> values;
  std::vector<HeldBox> scales;  // of a destination: those of `values`
  QuantizedPart part;           // of a destination: all of it
};

// What all ranks with these buffers quantize at `at`, each box once.
class QuantizeLister {
 public:
  QuantizeLister(const Module& module, QuantizedAt at);
  std::vector<QuantizeItem> List(const std::vector<BufferId>& buffers) const;

 private:
  template <typename Visit>
  void ForEachFragment(const std::vector<BufferId>& buffers,
                       const Visit& visit) const;
  void AddScales(const std::vector<BufferId>& buffers,
                 std::vector<QuantizeItem>& items) const;

  const Module& module_;
  const QuantizedAt at_;
  std::vector<int32_t> by_param_;  // numbers of quantizations; -1: none
};

// What items become.
struct QuantizeWork {
  RankQuantizes quantizes;
  std::vector<Buffer> scratch;
};

class QuantizeWorkBuilder {
 public:
  // `source_dtypes`: by param. `first_slot`: that of scratch among the buffers.
  QuantizeWorkBuilder(const Module& module,
                      const std::vector<DType>& source_dtypes,
                      size_t first_slot)
      : module_(module),
        source_dtypes_(source_dtypes),
        first_slot_(first_slot) {}

  // What the items take in scratch, scales not counted.
  int64_t Bytes(const std::vector<QuantizeItem>& items) const;

  // Each wave has its part of each item. `waves` is their number, the first of
  // them `first_wave`. Waves lie at the two ends of the arena in turns; one
  // wave lies in no window.
  QuantizeWork Build(const std::vector<QuantizeItem>& items, int32_t first_wave,
                     int32_t waves) const;

 private:
  int64_t ElementBytes(const QuantizeItem& item) const;

  const Module& module_;
  const std::vector<DType>& source_dtypes_;
  const size_t first_slot_;
};

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_QUANTIZE_WORK_H_
