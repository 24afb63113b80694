// From the plan's quantisation to matrices in physical tensors.
#ifndef REFIT_EXECUTOR_QUANTISE_BOXES_H_
#define REFIT_EXECUTOR_QUANTISE_BOXES_H_

#include "executor/binding.h"
#include "refit/device.h"

namespace refit {

// Adds `op` of a rank to a batch of kind kQuantise. Entries are those of
// `tensors`, the rank's own.
void AppendQuantise(const fb::Body& body, const TensorTable& tensors,
                    const fb::Quantise& op, CopyBatch& batch);

}  // namespace refit

#endif  // REFIT_EXECUTOR_QUANTISE_BOXES_H_
