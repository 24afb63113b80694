// From the plan's copies to boxes of physical tensors.
#ifndef REFIT_EXECUTOR_COPY_BOXES_H_
#define REFIT_EXECUTOR_COPY_BOXES_H_

#include <cstdint>

#include "executor/tensor_box.h"
#include "plan/plan_file.h"
#include "refit/device.h"

namespace refit {

const fb::Buffer& BufferOf(const fb::Body& body, const fb::RankProgram& program,
                           const fb::Copy& copy);

// The elements of `copy` in the tensors of its buffer.
TensorBox BoxOf(const fb::Body& body, const fb::RankProgram& program,
                const fb::Copy& copy);

// How one iteration of `loop` moves over tensors of `element_bytes`.
inline CopyStep StepOf(const BoxLoop& loop, uint64_t element_bytes) {
  return {.entries = loop.tensor_step,
          .bytes = loop.element_step * element_bytes};
}

}  // namespace refit

#endif  // REFIT_EXECUTOR_COPY_BOXES_H_
