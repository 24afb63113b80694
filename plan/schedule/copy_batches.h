// Strided boxes as the entries of a batch of copies.
#ifndef REFIT_PLAN_SCHEDULE_COPY_BATCHES_H_
#define REFIT_PLAN_SCHEDULE_COPY_BATCHES_H_

#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "plan/plan_file.h"
#include "plan/schedule/copy_batch.h"
#include "plan/schedule/tensor_box.h"
#include "plan/schedule/tensor_table.h"

namespace refit {

using CopyLoops = absl::InlinedVector<CopyLoop, 8>;

// Copies the elements of `from` to those of `to`, in order. False, and nothing
// is appended: the boxes differ in size, or a loop of one straddles two of the
// other.
bool AppendCopy(const TensorBox& from, const TensorBox& to, uint32_t link,
                CopyBatch& batch);

// Writes zero bytes. Of kind kZero.
void AppendZero(const TensorBox& box, CopyBatch& batch);

// Quantizes what `op` of the rank of `tensors` does. Of kind kQuantize.
void AppendQuantize(const fb::Body& body, const TensorTable& tensors,
                    const fb::Quantize& op, CopyBatch& batch);

// Moves all of `more`, which is empty then, to the end of `batch`.
void MoveBatch(CopyBatch& more, CopyBatch& batch);

// How many elements an operation of `batch` quantizes.
uint64_t ElementsOf(const BlockQuantize& op, const CopyBatch& batch);

// The runs of an operation of `batch`; none where its rows follow each other.
std::vector<CopyStride> RowRunsOf(const CopyBatch& batch,
                                  const BlockQuantize& op);

// One loop for each maximal group of loops that continue each other on both
// sides, outermost first; none of one iteration. Every device begins with this.
CopyLoops MergedLoops(absl::Span<const CopyLoop> loops);

// Calls visit(from, to) for each iteration of `loops`, the last one fastest:
// how devices without kernels walk a copy.
template <typename Visit>
void ForEachIteration(absl::Span<const CopyLoop> loops, CopyAddress from,
                      CopyAddress to, const Visit& visit) {
  absl::InlinedVector<uint64_t, 8> counts(loops.size(), 0);
  const auto move = [](CopyAddress& at, const CopyStride& stride,
                       uint64_t times) {
    at.entry += stride.entries * times;
    at.byte_offset += stride.bytes * times;
  };
  while (true) {
    visit(from, to);
    size_t d = loops.size();
    while (d > 0 && ++counts[d - 1] == loops[d - 1].extent) {
      // Back to the first: unsigned numbers wrap.
      const uint64_t back = 1 - loops[d - 1].extent;
      move(from, loops[d - 1].from, back);
      move(to, loops[d - 1].to, back);
      counts[d - 1] = 0;
      --d;
    }
    if (d == 0) return;
    move(from, loops[d - 1].from, 1);
    move(to, loops[d - 1].to, 1);
  }
}

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_COPY_BATCHES_H_
