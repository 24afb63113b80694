// From the plan's quantization to matrices in physical tensors.
#ifndef REFIT_EXECUTOR_QUANTIZE_BOXES_H_
#define REFIT_EXECUTOR_QUANTIZE_BOXES_H_

#include "executor/binding.h"
#include "refit/device.h"

namespace refit {

// Adds `op` of a rank to a batch of kind kQuantize. Entries are those of
// `tensors`, the rank's own.
void AppendQuantize(const fb::Body& body, const TensorTable& tensors,
                    const fb::Quantize& op, CopyBatch& batch);

}  // namespace refit

#endif  // REFIT_EXECUTOR_QUANTIZE_BOXES_H_
