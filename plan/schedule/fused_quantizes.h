// Quantizing and then copying, as one step that needs no scratch.
#ifndef REFIT_PLAN_SCHEDULE_FUSED_QUANTIZES_H_
#define REFIT_PLAN_SCHEDULE_FUSED_QUANTIZES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "plan/schedule/copy_batch.h"

namespace refit {

// A copy of what a quantization writes: number `copy` of batch `batch`.
struct QuantizedCopy {
  size_t batch = 0;
  size_t copy = 0;
};

// Operations of a rank, and all the copies that read what they write.
class QuantizeFusion {
 public:
  // `batches` must outlive it. `quantize_batches`: those of the operations, in
  // the order in which these are numbered.
  QuantizeFusion(absl::Span<const CopyBatch> batches,
                 absl::Span<const size_t> quantize_batches);

  // A copy of a batch, issued once after the operations whose values or scales
  // it reads, in a batch in which others may do these operations instead.
  void AddCopy(const QuantizedCopy& copy);
  // What is read in another way, so many entries and bytes of each: the
  // operations that write any of it have to write there.
  void AddRead(const CopyAddress& first, const CopyStride& span);

  // What is left of `batches`, and what is done instead: batch b of the result
  // is what batch b becomes. An operation is fused where each block of values
  // goes to a place together with its scale, and wherever it goes. It then
  // stands in the batches of its copies, as often as it goes somewhere.
  std::vector<CopyBatch> Fuse();
  // By operation; after Fuse.
  const std::vector<bool>& is_fused() const { return is_fused_; }

 private:
  struct Operation {
    size_t batch = 0;
    size_t position = 0;  // in the batch
    uint64_t value_span_bytes = 0;
    uint64_t scale_span_bytes = 0;
    bool is_kept = false;
    std::vector<QuantizedCopy> values;
    std::vector<QuantizedCopy> scales;
  };

  const BlockQuantize& QuantizeOf(const Operation& operation) const;
  absl::Span<const QuantizeLoop> LoopsOf(const Operation& operation) const;
  bool Compose(const Operation& operation,
               std::vector<CopyBatch>& batches) const;

  const absl::Span<const CopyBatch> batches_;
  std::vector<Operation> operations_;
  std::vector<bool> is_fused_;
};

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_FUSED_QUANTIZES_H_
