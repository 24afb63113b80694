// Strided boxes as the entries of a batch of copies.
#ifndef REFIT_EXECUTOR_COPIES_COPY_BATCHES_H_
#define REFIT_EXECUTOR_COPIES_COPY_BATCHES_H_

#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "executor/copies/tensor_box.h"
#include "executor/copies/tensor_table.h"
#include "plan/plan_file.h"
#include "refit/device.h"

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

// One loop for each maximal group of loops that continue each other on both
// sides, outermost first; none of one iteration. Every device begins with this.
CopyLoops MergedLoops(absl::Span<const CopyLoop> loops);

}  // namespace refit

#endif  // REFIT_EXECUTOR_COPIES_COPY_BATCHES_H_
